"""Tables: what a cell looks like, what is best, and text that stays text in every form."""

import io
import math
from html.parser import HTMLParser

import pytest
from rich.console import Console

from tacit.report._tables import Cell, Column, Spread, Table, escaped, shown


@pytest.mark.parametrize(
    ("cell", "form", "text"),
    [
        (None, ".1f", ""),
        ("as it is", ".1f", "as it is"),
        (63.25, ".1f", "63.2"),
        (63.0, "", "63"),
        (0.123456, "", "0.1235"),
        (1234567, "", "1,234,567"),
        (0, "", "0"),
        (Spread(63.26, 0.44), ".1f", "63.3 ± 0.4"),
        (math.inf, ".1f", "∞"),
        (-math.inf, "", "-∞"),
        (math.nan, ".1f", "nan"),
        (True, "", "yes"),
        (2.5, lambda value: f"<{value}>", "<2.5>"),
    ],
)
def test_cells(cell: Cell, form: str, text: str) -> None:
    assert shown(cell, form) == text


def example(**more: object) -> Table:
    columns = ["method", Column("up", ".1f", best="max"), Column("down", ".2f", best="min"), "plain"]
    rows: list[list[Cell]] = [
        ["none", 51.0, 0.30, 1.0],
        ["a|b", Spread(63.26, 0.4), None, 2.0],
        ["<c>", 63.3, 0.10, None],
        ["d", math.nan, 0.20, None],
    ]
    return Table("A *title*", columns, rows, **{"repeated": True} | more)  # type: ignore[arg-type]


def test_the_best_of_each_column_as_it_is_shown() -> None:
    """63.26 and 63.3 look alike, so both are best; what was not run is not; a column without an aim has none."""
    assert example().best() == {(1, 1), (2, 1), (2, 2)}
    assert example(contenders=[0, 1, 3]).best() == {(1, 1), (3, 2)}
    assert example(contenders=[0]).best() == set()


def test_one_run_has_no_winner_and_no_spread() -> None:
    columns = ["method", Column("up", ".1f", best="max")]
    once = Table("", columns, [["a", 60.0], ["b", 70.0]])
    alone = Table("", columns, [["a", Spread(60.0, 0.0)], ["b", Spread(70.0, 0.0)]])
    several = Table("", columns, [["a", Spread(60.0, 1.0)], ["b", Spread(70.0, 1.0)]])
    assert once.best() == alone.best() == set()
    assert several.best() == {(1, 1)}
    assert alone.texts[1] == ["b", "70.0"]


def test_columns_of_numbers() -> None:
    assert [example().numeric(place) for place in range(4)] == [False, True, True, True]
    assert not Table("", ["x"], [[None]]).numeric(0)


def test_markdown() -> None:
    assert example(note="a_b").markdown() == (
        "**A \\*title\\***\n\n"
        "| method | up | down | plain |\n"
        "|---|---:|---:|---:|\n"
        "| none | 51.0 | 0.30 | 1 |\n"
        "| a\\|b | **63.3 ± 0.4** |  | 2 |\n"
        "| \\<c\\> | **63.3** | **0.10** |  |\n"
        "| d | nan | 0.20 |  |\n"
        "\na_b\n"
    )


def test_text_for_markdown() -> None:
    assert escaped("snake_case _x_ a\nb # &lt; & `y`") == "snake_case \\_x\\_ a b # \\&lt; & \\`y\\`"
    assert escaped("# head") == "\\# head"
    assert escaped("- item") == "\\- item"


class Cells(HTMLParser):
    """The cells of a page's tables, with their classes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.found: list[tuple[str, set[str], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"th", "td"}:
            self.inside = True
            self.found.append((tag, set((dict(attrs)["class"] or "").split()), ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in {"th", "td"}

    def handle_data(self, data: str) -> None:
        if self.inside:
            tag, names, text = self.found[-1]
            self.found[-1] = (tag, names, text + data)


def test_html() -> None:
    text = example(note="<note>").html()
    parser = Cells()
    parser.feed(text)
    cells = parser.found
    assert [c[2] for c in cells[:4]] == ["method", "up", "down", "plain"]
    assert [c[2] for c in cells if "best" in c[1]] == ["63.3 ± 0.4", "63.3", "0.10"]
    assert [c[2] for c in cells if "none" in c[1]] == ["", "", ""]
    assert "<c>" in [c[2] for c in cells]
    assert "&lt;note&gt;" in text
    assert "<c>" not in text


def test_rich() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(example(note="[bold]note[/bold]").rich())
    text = console.export_text()
    assert "63.3 ± 0.4" in text
    assert "[bold]note[/bold]" in text  # markup in a text is text


def test_rows_must_fit() -> None:
    with pytest.raises(ValueError, match="Row 2 of the table 'x' has 1 cells for 2 columns"):
        Table("x", ["a", "b"], [[1, 2], [1]])
    with pytest.raises(ValueError, match="no columns"):
        Table("x", [], [])
