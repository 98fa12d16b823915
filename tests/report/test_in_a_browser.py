"""Pages in a browser (headless Chromium, if there is one) and their numbers against the JSON beside them."""

import json
import re
from pathlib import Path

import pytest

from tacit import report
from tacit.privacy import Budget, Ledger, events, right_guesses
from tacit.report import Column, Picture, Section, Table, plots
from tools.check_page import CHROMIUM, SCHEMES, WIDTHS, Cells, complaints, look, numbers, unknown

SHIFTS = ["gaussian noise", "elastic transform", "fog"]
ARMS = {f"an arm with a name, ε = {place}": [60.0 + place, 70.25, 80.5] for place in range(10)}


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
            plots.curve({"DP": plots.Curve([1, 10], [78.4, 79.9])}, x_label="ε", y_label="%", levels={"source": 73.7}),
            caption="Curve.",
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
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_overflows_and_no_plot_is_cut(ledger: Ledger, tmp_path: Path, width: int, scheme: str) -> None:
    found = look(written(ledger, tmp_path / "out"), width, scheme)
    assert complaints(found, width) == []
    assert found["figures"] == 4
    assert found["colour"] == ("rgb(22, 24, 28)" if scheme == "dark" else "rgb(254, 254, 254)")


def test_a_number_that_the_json_does_not_have_is_found(ledger: Ledger, tmp_path: Path) -> None:
    page = written(ledger, tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    assert unknown(page, facts) == []
    page.write_text(page.read_text().replace("70.25", "71.23", 1))
    assert len(unknown(page, facts)) == 1


def test_a_hash_is_no_number() -> None:
    head = "chain 7e065091554, 7b3f and 12345e6789: 1,024 rows, 2.5e-07, −3 and 40%"
    assert list(numbers({"head": head})) == [1024.0, 2.5e-07, -3.0, 0.4]


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
