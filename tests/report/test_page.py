"""A page: everything inside it, everything escaped, nothing fetched."""

import re
from html.parser import HTMLParser

from tacit.report._page import Banner, Picture, Section, page
from tacit.report._tables import Table
from tacit.report.plots import Curve, curve

NASTY = '<script>alert("x")</script> & more'
VOID = {"meta", "br", "img", "link", "input"}


class Checked(HTMLParser):
    """Every element is closed in its turn, and nothing points outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), "no code in a page"
            if name in {"src", "href", "xlink:href"}:
                assert (value or "").startswith(("#", "data:")), f"{value} is fetched"
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check(text: str) -> Checked:
    checked = Checked()
    checked.feed(text)
    assert checked.open == []
    assert "script" not in checked.tags
    assert len(checked.ids) == len(set(checked.ids))
    return checked


def test_everything_is_escaped() -> None:
    figure = curve({NASTY: Curve([1, 2], [1.0, 2.0])}, x_label=NASTY, y_label=NASTY, title=NASTY)
    table = Table(NASTY, [NASTY], [[NASTY]], note=NASTY)
    section = Section(NASTY, f"{NASTY}\n\n- {NASTY}\n- two", [table], [Picture(figure, NASTY), figure])
    sections = [section, Section(NASTY, folded=True), Section("3"), Section("4")]
    text = page(NASTY, sections, lead=NASTY, banner=Banner(NASTY, NASTY, [NASTY]), footer=NASTY)
    found = check(text)
    assert {"svg", "table", "details", "nav", "ul"} <= found.tags
    assert found.text.count('alert("x")') > 15
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_the_smallest_page() -> None:
    found = check(page("A title", [Section("One", "Two\nlines.\n\nThree.")]))
    assert "Two lines." in found.text
    assert "nav" not in found.tags
    assert "svg" not in found.tags


def test_light_and_dark() -> None:
    figure = curve({"a": Curve([1, 2], [1.0, 2.0])}, x_label="x", y_label="y")
    text = page("A title", [Section("One", figures=[figure])])
    assert text.count("prefers-color-scheme: dark") == 2
    defined = set(re.findall(r"(--[\w-]+):", text))
    assert set(re.findall(r"var\((--[\w-]+)", text)) <= defined
