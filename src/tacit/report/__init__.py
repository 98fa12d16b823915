"""What a run leaves behind for people: tables, plots, one page and the privacy card.

The modules `tacit.report.plots` and `tacit.report.theme` draw figures; they load matplotlib.
"""

from tacit._json import to_plain as plain
from tacit.report._about import About, card, card_facts, page, tell
from tacit.report._card import FACTS as FACTS
from tacit.report._describe_events import event as describe_event
from tacit.report._describe_events import settlement as describe_settlement
from tacit.report._ledger import Book, overview
from tacit.report._page import Picture, Section
from tacit.report._tables import Cell, Column, Spread, Table
from tacit.report._write import run_files as run_files
from tacit.report._write import write_pictures, write_run

__all__ = [
    "About",
    "Book",
    "Cell",
    "Column",
    "Picture",
    "Section",
    "Spread",
    "Table",
    "card",
    "card_facts",
    "describe_event",
    "describe_settlement",
    "overview",
    "page",
    "plain",
    "tell",
    "write_pictures",
    "write_run",
]
