"""What a run leaves behind: a card that says everything, and files that are whole or not there."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tacit import __version__
from tacit.privacy import Budget, Ledger, events
from tacit.report._about import card as read
from tacit.report._card import NEVER_COVERED, card
from tacit.report._ledger import Book
from tacit.report._page import Section
from tacit.report._write import prepare, write_files, write_run


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    book = Ledger(tmp_path / "book.db")
    book.subject("stream", budget=Budget(1.0, 1e-6), unit="patient", neighbours="replace-one")
    book.charge("stream", events.stream(10.0, 200), stage="adapt")
    return book


def test_a_card_says_everything(ledger: Ledger) -> None:
    text = card(
        title="A *run*",
        ledgers=[Book.of(ledger)],
        assumptions=["Assumes one row per person."],
        not_covered=["Their own predictions."],
    )
    for line in [
        "# Privacy card: A \\*run\\*",
        "| protects | one patient |",
        "| relation | replace-one: one unit is replaced by any other |",
        "| epsilon | 0.8342 |",
        "| delta | 1e-06 |",
        "| budget | 1 at δ = 1e-06 |",
        "| composition | gaussian |",
        "| if charges were chosen by earlier releases | epsilon 1, delta 1e-06 |",
        "| noise | keyed by the operating system |",
        "| ledger | durable |",
        f"- ledger: {ledger.head}",
        f"| version | tacit {__version__} |",
        "- Assumes one row per person.",
        "- Their own predictions.",
        f"- {NEVER_COVERED[0]}",
        f"tacit ledger verify LEDGER --head {ledger.head}",
    ]:
        assert line in text.splitlines()
    assert "a stream of 200 steps, one release in all" in text


def test_a_card_of_a_ledger_that_is_gone() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("a", budget=Budget(1.0, 1e-6), unit="user")
    ledger.subject("b", budget=Budget(1.0, 0.0), disjoint_from=["a"])
    ledger.charge("a", events.gaussian(40.0), stage="tune", seed=3)
    text = card(title="x", ledgers=[Book.of(ledger)])
    assert "> **seeded: not private**" in text
    assert "> **not durable: this ledger was in memory and is gone**" in text
    assert "| noise | seeded: not private |" in text
    assert "- Subjects declared disjoint: b and a." in text
    assert "| protects | a: one user; b: one sample |" in text
    assert "How to check" not in text


def test_a_card_without_a_ledger_promises_nothing() -> None:
    text = card(title="x", ledgers=[])
    assert "makes no privacy guarantee" in text
    assert "Nothing was stated." in text


def test_a_card_of_several_ledgers(ledger: Ledger) -> None:
    text = card(title="x", ledgers=[Book.of(ledger, "one"), Book.of(Ledger("sqlite://"), "two")])
    assert "2 ledgers, each a promise of its own" in text
    assert "### one" in text
    assert "### two" in text
    assert f"tacit ledger verify LEDGER --head {ledger.head}" in text
    text = card(title="x", ledgers=[Book.of(ledger, f"ledger {n}") for n in range(9)])
    assert "### ledger 0 and 8 alike" in text
    assert text.count("tacit ledger verify") == 1
    assert text.count(ledger.head) == 9


def run_of(out: Path, ledgers: list[Any], **more: Any) -> dict[str, Any]:
    sections = [Section("Accuracy", "It <works>.")]
    return write_run(out, title="A run", sections=sections, ledgers=ledgers, facts={"eps": math.inf}, **more)


def test_a_run_leaves_three_files(tmp_path: Path, ledger: Ledger) -> None:
    out = tmp_path / "runs" / "x"
    run_of(out, [ledger], assumptions=["One row per person."], about={"kind": "toy"})
    assert sorted(file.name for file in out.iterdir()) == ["privacy-card.md", "report.html", "run.json"]
    page = (out / "report.html").read_text("utf-8")
    for words in ("It &lt;works&gt;.", "ε = 0.8342, δ = 1e-06", ledger.head, "One row per person.", NEVER_COVERED[1]):
        assert words in page
    facts = json.loads((out / "run.json").read_text("utf-8"))
    assert (facts["title"], facts["kind"], facts["tacit"], facts["facts"]) == (
        "A run",
        "toy",
        __version__,
        {"eps": "inf"},
    )
    assert facts["privacy"]["private"] is True
    assert facts["privacy"]["epsilon"] == ledger.total().epsilon
    assert Book.from_facts(facts["privacy"]["ledgers"][0]) == Book.of(ledger)
    assert read(out).startswith("# Privacy card: A run")


def test_many_ledgers(tmp_path: Path) -> None:
    """Those alike are one row; many different ones are folded; a head is kept only of a ledger that is still there."""
    ledgers = []
    for noise in (20.0, 20.0, 30.0, 40.0, 50.0):
        ledger = Ledger("sqlite://")
        ledger.subject("stream", budget=Budget(1.0, 1e-6))
        ledger.charge("stream", events.gaussian(noise), stage="adapt")
        ledgers.append(ledger)
    facts = run_of(tmp_path, ledgers)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<details" in page
    assert "Charged to ledger 1 and 1 alike" in page
    assert "Charged to ledger 5" in page
    assert "Charged to ledger 2" not in page
    assert ledgers[0].head not in page
    assert "5 ledgers, ε up to " in page
    assert facts["privacy"]["epsilon"] is None
    assert [one["name"] for one in facts["privacy"]["ledgers"]] == [f"ledger {n}" for n in range(1, 6)]


def test_no_ledger_is_no_promise(tmp_path: Path) -> None:
    assert run_of(tmp_path, [])["privacy"]["private"] is False
    assert "not private" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    write_files(tmp_path, {"a.txt": "old", "b.txt": "old"})
    calls = []

    def full(*_: object) -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if broken == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"cannot be written to .*: No space left on device\. No file is left half"):
        write_files(tmp_path, {"a.txt": "new", "b.txt": "new"})
    assert calls == [1]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.txt": "old", "b.txt": "old"}


def test_an_interruption_leaves_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_files(tmp_path, {"a.txt": "new"})
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match="a file is in the way"):
            prepare(out)


def test_reading_back_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no ledger, run, checkpoint or saved result at"):
        read(tmp_path / "no")
    with pytest.raises(ValueError, match=r"holds no finished run and no saved result: there is no privacy-card\.md"):
        read(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="neither a ledger, nor a checkpoint"):
        read(tmp_path / "file")
    (tmp_path / "privacy-card.md").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is damaged"):
        read(tmp_path)
