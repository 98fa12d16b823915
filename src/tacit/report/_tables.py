"""Tables: the same cells for the terminal, for markdown and for a page.

A cell is text, a number, a mean with its spread, or None. None is a cell that was not run: it is shown empty, never
guessed, and never takes part in what is best.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table as RichTable


class Spread(NamedTuple):
    """A mean over runs, and their standard deviation; 0 if there was one run."""

    mean: float
    std: float


_SHORT = 24  # letters of a cell that stay on one line in a page

Cell = str | float | int | Spread | None


@dataclass(frozen=True)
class Column:
    """A column's name, how its numbers are written (``.1f``, ``,d`` or a function) and which of them is best."""

    name: str
    format: str | Callable[[float], str] = ""
    best: Literal["max", "min"] | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns. ``contenders`` are the rows among which the best is bold (None: all).

    A winner needs more than one run: it is bold only among cells that have a spread, or if ``repeated`` says that plain
    numbers (medians, say) come from several runs.
    """

    title: str
    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    contenders: Collection[int] | None = None
    repeated: bool = False

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError(f"The table {self.title!r} has no columns.")
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"Row {number} of the table {self.title!r} has {len(row)} cells for {len(self.columns)} columns."
                )

    @property
    def heads(self) -> list[Column]:
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """Every cell as it is shown."""
        return [[shown(cell, head.format) for cell, head in zip(row, self.heads, strict=True)] for row in self.rows]

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers and nothing else, so that it is set to the right."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and not any(isinstance(cell, str) for cell in cells)

    def best(self) -> set[tuple[int, int]]:
        """The places (row, column) that are best in their columns, as shown: what looks equal is equally good."""
        found: set[tuple[int, int]] = set()
        texts = self.texts
        for column, head in enumerate(self.heads):
            if head.best is None:
                continue
            values: dict[int, float] = {}
            for row, cells in enumerate(self.rows):
                value = number(cells[column])
                if value is not None and not math.isnan(value) and self._contends(row):
                    if not self.repeated and not _has_spread(cells[column]):
                        values = {}
                        break
                    values[row] = value if head.best == "max" else -value
            if len(values) < 2:
                continue
            winner = max(values, key=lambda row: values[row])
            alike = texts[winner][column].partition(" ±")[0]
            found |= {(row, column) for row in values if texts[row][column].partition(" ±")[0] == alike}
        return found

    def _contends(self, row: int) -> bool:
        return self.contenders is None or row in self.contenders

    # -- as seen -----------------------------------------------------------------------------------------------------

    def rich(self) -> RichTable:
        """For the terminal."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title, style="bold") if self.title else None,
            caption=Text(self.note, style="dim") if self.note else None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for place, head in enumerate(self.heads):
            table.add_column(Text(head.name), justify="right" if self.numeric(place) else "left")
        best = self.best()
        for row, cells in enumerate(self.texts):
            styles = ["bold" if (row, place) in best else "" for place in range(len(cells))]
            table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
        return table

    def markdown(self) -> str:
        """For a file that people read as text or rendered."""
        best = self.best()
        lines = [f"**{escaped(self.title)}**\n"] if self.title else []
        lines.append("| " + " | ".join(escaped(head.name) for head in self.heads) + " |")
        lines.append("|" + "|".join("---:" if self.numeric(place) else "---" for place in range(len(self.heads))) + "|")
        for row, cells in enumerate(self.texts):
            marked = [
                f"**{escaped(cell)}**" if (row, place) in best else escaped(cell) for place, cell in enumerate(cells)
            ]
            lines.append("| " + " | ".join(marked) + " |")
        return "\n".join(lines) + "\n" + (f"\n{escaped(self.note)}\n" if self.note else "")

    def html(self) -> str:
        """For a page; ``page`` brings the style."""
        best = self.best()
        kinds = ["number" if self.numeric(place) else "words" for place in range(len(self.heads))]
        caption = f"<figcaption>{html.escape(self.title)}</figcaption>" if self.title else ""
        head = "".join(
            f'<th scope="col" class="{kind}">{html.escape(head.name)}</th>'
            for kind, head in zip(kinds, self.heads, strict=True)
        )
        body = []
        for row, (cells, given) in enumerate(zip(self.texts, self.rows, strict=True)):
            parts = []
            for place, (text, cell) in enumerate(zip(cells, given, strict=True)):
                name = kinds[place] + (" best" if (row, place) in best else "") + (" none" if cell is None else "")
                name += " short" if len(text) <= _SHORT else ""
                tag = ("th", ' scope="row"') if place == 0 else ("td", "")
                parts.append(f'<{tag[0]}{tag[1]} class="{name}">{html.escape(text)}</{tag[0]}>')
            body.append(f"<tr>{''.join(parts)}</tr>")
        note = f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        dense = " dense" if len(self.columns) > 10 else ""
        return (
            f'<figure class="table{dense}">{caption}<div class="scroll" tabindex="0"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{note}</figure>"
        )


def _has_spread(cell: Cell) -> bool:
    return isinstance(cell, Spread) and cell.std > 0


def number(cell: Cell) -> float | None:
    """The number of a cell, if it has one."""
    if isinstance(cell, Spread):
        return cell.mean
    return float(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else None


def shown(cell: Cell, form: str | Callable[[float], str] = "") -> str:
    """A cell as text: whole numbers with thousands apart, others by ``form`` or four significant digits."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, Spread):
        about = f" ± {shown(float(cell.std), form)}" if cell.std > 0 else ""  # one run has no spread
        return shown(float(cell.mean), form) + about
    if isinstance(cell, float) and math.isinf(cell):
        return "∞" if cell > 0 else "-∞"
    if callable(form):
        return form(cell)
    if form:
        return format(cell, form)
    return f"{cell:,d}" if isinstance(cell, int) else f"{cell:.4g}"


def escaped(text: str) -> str:
    """Text that markdown shows as it is, on one line and within one cell of a table."""
    line = " ".join(text.split())
    return re.sub(r"[\\|*`\[\]<>]|^[#+-](?= )|^#|(?<!\w)_|_(?!\w)|&(?=#?\w+;)", lambda found: "\\" + found[0], line)
