"""How figures look, and how they get into a page."""

from tacit.report.theme._narrow import narrow
from tacit.report.theme._theme import (
    COLOURS,
    DARK,
    FAINT,
    GRID,
    INK,
    MARKS,
    MUTED,
    PAPER,
    ROLES,
    WIDTH,
    colour,
    end_labels,
    figure,
    mark,
    png,
    styled,
    svg,
)

__all__ = [
    "COLOURS",
    "DARK",
    "FAINT",
    "GRID",
    "INK",
    "MARKS",
    "MUTED",
    "PAPER",
    "ROLES",
    "WIDTH",
    "colour",
    "end_labels",
    "figure",
    "mark",
    "narrow",
    "png",
    "styled",
    "svg",
]
