"""`python -m studies run`, through a toy kind: files, progress, JSON, and one sentence for every bad input."""

import json
import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from studies.__main__ import main
from studies.findings import Findings, carry_out
from studies.runner import KINDS, Kind, listed, load
from tacit.cli._main import run
from tacit.privacy import Budget, Ledger, events
from tacit.recipes import Progress
from tacit.report._page import Section
from tacit.report._tables import Table


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Charges one stream and reports it."""

    steps: int
    noise: float = 10.0
    trouble: Literal["none", "interrupt", "value", "budget", "write"] = "none"


@dataclass(frozen=True)
class Outcome:
    config: Toy
    ledger: Ledger


def toy_run(config: Toy, *, out: Path, progress: Progress) -> Outcome:
    assert out.is_dir()
    ledger = Ledger("sqlite://")
    ledger.subject("stream", budget=Budget(1.0, 1e-6), unit="patient", neighbours="replace-one")
    if config.trouble == "budget":
        ledger.charge("stream", events.gaussian(0.1), stage="toy")
    ledger.charge("stream", events.stream(config.noise, config.steps), stage="toy")
    for step in range(config.steps):
        progress("adapting", step + 1, config.steps, spent=(ledger.spent("stream").epsilon, 1.0))
    if config.trouble == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if config.trouble == "value":
        raise ValueError("The toy has no batteries.")
    if config.trouble == "write":
        (out / "cell.json").write_text("{}")
        raise OSError("The toy fell apart.")
    return Outcome(config, ledger)


def toy_render(result: Outcome) -> Findings:
    return Findings(
        title="A toy",
        sections=[Section("Accuracy", "As always.")],
        summary=[Table("Summary", ["steps"], [[result.config.steps]])],
        facts={"steps": result.config.steps, "best": math.inf},
        ledgers=[result.ledger],
        assumptions=["Assumes one row per person."],
    )


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module: Any = ModuleType("toy_kind")
    module.Toy, module.run, module.render = Toy, toy_run, toy_render
    monkeypatch.setitem(sys.modules, "toy_kind", module)
    monkeypatch.setitem(KINDS, "toy", Kind(config="toy_kind:Toy", run="toy_kind:run", render="toy_kind:render"))
    monkeypatch.chdir(tmp_path)


def studies(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def tacit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        run(arguments)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def recipe(text: str = "steps = 3", kind: str = "toy") -> str:
    Path("example.toml").write_text(f'kind = "{kind}"\n{text}\n')
    return "example.toml"


def test_a_run_from_recipe_to_card(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = studies(capsys, "run", recipe())
    assert code == 0
    folder = Path("runs/example")
    assert sorted(file.name for file in folder.iterdir()) == ["privacy-card.md", "report.html", "run.json"]
    printed = " ".join(out.split())
    for words in ("Summary", "(0.8342, 1e-06)-differential privacy", "not durable", "runs/example/report.html"):
        assert words in printed
    assert err.splitlines() == [
        "adapting: 1 of 3; privacy spent: eps 0.835 of 1",
        "adapting: 3 of 3; privacy spent: eps 0.835 of 1",
    ]
    code, out, err = tacit(capsys, "card", str(folder))
    assert (code, out, err) == (0, (folder / "privacy-card.md").read_text("utf-8"), "")
    code, out, _ = tacit(capsys, "card", str(folder), "--json")
    assert (code, json.loads(out)) == (0, json.loads((folder / "run.json").read_text("utf-8")))


def test_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = studies(capsys, "run", recipe(), "--out", "elsewhere", "--json")
    found = json.loads(out)
    assert code == 0
    assert found == json.loads(Path("elsewhere/run.json").read_text("utf-8"))
    assert (found["kind"], found["facts"]) == ("toy", {"steps": 3, "best": "inf"})
    assert found["recipe"] == {"steps": 3, "noise": 10.0, "trouble": "none"}
    assert len(found["fingerprint"]) == 32
    assert found["privacy"]["ledgers"][0]["accounts"][0]["unit"] == "patient"


def test_a_second_run_takes_the_place_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    studies(capsys, "run", recipe())
    studies(capsys, "run", recipe("steps = 4"))
    assert json.loads(Path("runs/example/run.json").read_text("utf-8"))["facts"]["steps"] == 4


BAD = [
    (["run", "missing.toml"], "There is no recipe at missing.toml."),
    (["run", "."], "is a folder"),
    (["run", "misspelt.toml"], "misspelt.toml: there is no key 'stepz'; did you mean 'steps'?"),
    (["run", "kind.toml"], "kind.toml: there is no kind 'toi'; did you mean 'toy'?"),
    (["run", "less.toml"], "less.toml: a recipe says what it is: add kind = "),
    (["run", "broken.toml"], "broken.toml is not valid TOML"),
    (["run", "good.toml", "--out", "file"], "a file is in the way"),
    (["run", "good.toml", "--out", "file/below"], "a file is in the way"),
    (["run", "value.toml"], "The toy has no batteries."),
    (["run", "budget.toml"], "stream cannot afford this"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    files = {
        "good": 'kind = "toy"\nsteps = 3',
        "misspelt": 'kind = "toy"\nstepz = 3',
        "kind": 'kind = "toi"\nsteps = 3',
        "less": "steps = 3",
        "broken": 'kind = "toy\n',
        "value": 'kind = "toy"\nsteps = 1\ntrouble = "value"',
        "budget": 'kind = "toy"\nsteps = 1\ntrouble = "budget"',
    }
    for name, text in files.items():
        Path(f"{name}.toml").write_text(text)
    Path("file").write_text("")
    code, out, err = studies(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err.splitlines()[-1]
    assert len([line for line in err.splitlines() if not line.startswith("adapting")]) == 1
    assert not Path("runs").exists()


def test_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        code, out, err = studies(capsys, "run", recipe('steps = 1\ntrouble = "interrupt"'))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == (
        "Stopped: no report was written to runs/example. What was charged to a ledger stays spent."
    )
    assert not Path("runs").exists()


def test_what_a_run_keeps_for_the_next_stays(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = studies(capsys, "run", recipe('steps = 1\ntrouble = "write"'))
    assert code == 2
    assert [file.name for file in Path("runs/example").iterdir()] == ["cell.json"]


def test_every_kind_that_ships_can_be_loaded() -> None:
    for name, kind in KINDS.items():
        for place in (kind.config, kind.run, kind.render):
            assert callable(load(place)), f"{name}: {place}"


def test_the_list_has_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = studies(capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [path.as_posix() for path in listed()]
    assert len(listed()) >= 35


def test_a_recipe_of_the_laboratory_is_found_from_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = studies(capsys, "tables", "runs/none", "dp_tta/dp-tta-clean.toml")
    assert code == 0
    assert "(dp-tta-clean.toml)" in out


def test_folders_that_were_made_for_nothing_go_away(tmp_path: Path) -> None:
    def broken(_: object) -> Findings:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        carry_out(tmp_path / "a" / "b", broken, {})
    assert list(tmp_path.iterdir()) == []

    def half(_: object) -> Findings:
        (tmp_path / "a" / "kept").write_text("")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        carry_out(tmp_path / "a" / "b", half, {})
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["kept"]
