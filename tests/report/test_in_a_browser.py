"""Pages in a browser (headless Chromium, if there is one) and their numbers against the JSON beside them."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tacit import report
from tacit.privacy import Budget, Ledger, events, right_guesses
from tacit.report import Column, Picture, Section, Table, plots

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SHIFTS = ["gaussian noise", "elastic transform", "fog"]
ARMS = {f"an arm with a name, ε = {place}": [60.0 + place, 70.25, 80.5] for place in range(10)}
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
MEASURE = """<script>
const wide = [...document.querySelectorAll('svg, img, p, li, dl, h1, h2, figure')].filter(
  one => !one.closest('.scroll') && one.getBoundingClientRect().right > window.innerWidth + 0.5);
const seen = [...document.querySelectorAll('.plot svg')].filter(one => one.getBoundingClientRect().width > 0);
const cut = seen.filter(one => { const box = one.getBoundingClientRect();
  return [...one.querySelectorAll('text')].some(text => { const own = text.getBoundingClientRect();
    return own.left < box.left - 2 || own.right > box.right + 2; }); });
parent.postMessage(JSON.stringify({page: document.documentElement.scrollWidth, screen: window.innerWidth,
  wide: wide.length, figures: seen.length, cut: cut.map(one => one.getAttribute('aria-label')),
  colour: getComputedStyle(document.body).backgroundColor}), '*');
</script></body>"""
FRAME = """<title>nothing</title><script>onmessage = told => { document.title = told.data; };</script>
<iframe src="measured.html" style="border: 0" width="WIDTH" height="900"></iframe>"""  # no window is below 500 pixels


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "ledger.db")
    made.subject("camera 7", budget=Budget(1.0, 1e-6), neighbours="replace-one")
    made.charge("camera 7", events.stream(20.0, 1 << 20, blocks=1 << 20), stage="adapt", note="Tent")
    made.subject("clinic", budget=Budget(4.0, 1e-3), unit="patient", mode="renyi", disjoint_from=["camera 7"])
    for _ in range(2):
        made.charge("clinic", events.poisson(0.1, events.gaussian(3.0), steps=100), stage="finetune")
    return made


def written(ledger: Ledger, out: Path) -> Path:
    figures = [
        Picture(plots.bars_by_shift(SHIFTS, dict(list(ARMS.items())[:5])), caption="Dots."),
        Picture(plots.bars_by_shift(SHIFTS, ARMS), caption="Panels."),
        Picture(
            plots.tradeoff({"DP": [plots.Point(1, 78.4), plots.Point(10, 79.9)]}, {"source": 73.7}), caption="Curve."
        ),
        Picture(
            plots.reliability({f"panel {i}": [plots.Bin(0.5, 0.6, 1.0)] for i in range(4)}), caption="Reliability."
        ),
    ]
    columns = ["arm", *(Column(shift, ".2f") for shift in SHIFTS)]
    table = Table("Accuracy", columns, [[name, *cells] for name, cells in ARMS.items()])
    report.write_run(
        out,
        title="A page with everything on it and a rather long title",
        sections=[Section("All", "Words " * 40, tables=[table], figures=figures)],
        ledgers=[ledger],
        facts={"arms": ARMS},
    )
    return out / "report.html"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_and_no_plot_is_cut(ledger: Ledger, tmp_path: Path, width: int, scheme: str) -> None:
    text = written(ledger, tmp_path / "out").read_text()
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # so that the page can be measured
    (tmp_path / "measured.html").write_text(text.replace("</body>", MEASURE))
    colours = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    options = [
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1500,1000",
        colours,
        "--virtual-time-budget=5000",
    ]
    page = f"file://{tmp_path / 'frame.html'}"
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *FLAGS, *options, "--dump-dom", page], capture_output=True, text=True, timeout=120, check=True
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title is not None
    found = json.loads(html.unescape(title[1]))
    assert found["screen"] == width
    assert found["page"] <= width
    assert found["wide"] == 0
    assert found["figures"] == 4
    assert found["cut"] == []
    assert found["colour"] == ("rgb(22, 24, 28)" if scheme == "dark" else "rgb(254, 254, 254)")


class Cells(HTMLParser):
    """The tables of a page by their titles, and what stands in the box above."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.box = self.title = ""
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = dict(attrs).get("class") or ""
        if tag == "div" and kind.startswith("banner"):
            self._in = "box"
        elif tag == "figcaption":
            self._in, self.title = "title", ""
        elif tag == "tr":
            self.tables.setdefault(self.title, []).append([])
        elif tag in ("td", "th"):
            self._in = "cell"
            self.tables[self.title][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("div", "figcaption", "td", "th"):
            self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "box":
            self.box += data
        elif self._in == "title":
            self.title += data
        elif self._in == "cell":
            self.tables[self.title][-1][-1] += data


def close(shown: str, value: float) -> bool:
    """A number on a page is the JSON's, rounded up to four digits."""
    return value <= float(shown) * (1 + 1e-12) and float(shown) - value <= abs(value) * 1.1e-3


def test_every_number_of_a_page_is_that_of_the_json_beside_it(ledger: Ledger, tmp_path: Path) -> None:
    page = written(ledger, tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    cells = Cells()
    cells.feed(page.read_text())
    book = facts["privacy"]["ledgers"][0]
    promise = re.search(r"ε = ([\d.e-]+), δ = ([\d.e-]+)", cells.box)
    assert promise is not None
    assert close(promise[1], book["epsilon"])
    assert close(promise[2], book["delta"])
    guesses = re.search(r"right at most ([\d.]+) times", cells.box)
    assert guesses is not None
    truth = right_guesses(book["epsilon"], book["delta"], book["mu"])
    assert 0 <= float(guesses[1]) - truth < 0.1
    heads, *rows = cells.tables["Charged to ledger"]
    assert [row[0] for row in rows] == [charge["subject"] for charge in book["charges"]]
    for row, charge in zip(rows, book["charges"], strict=True):
        told = dict(zip(heads, row, strict=True))
        assert close(told["spent ε"], charge["spent"])
        assert close(told["total ε"], charge["total"])
        assert told["stage"] == charge["stage"]
        assert told["what"].startswith(f"{charge['times']} charges" if charge["times"] > 1 else charge["what"])
    _, *rows = cells.tables["Accuracy"]
    assert {name: [float(cell) for cell in row] for name, *row in rows} == facts["facts"]["arms"]
    card = (tmp_path / "out" / "privacy-card.md").read_text()
    assert f"| epsilon | {promise[1]} |" in card
    assert f"{guesses[1]} times out of 100" in card
    assert facts["privacy"]["epsilon"] == book["epsilon"]
