"""`tacit run` and `tacit card`: one sentence for every bad input; the bar that shows how far a run is."""

import io
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tacit.cli._main import run
from tacit.cli._run import STUDIES
from tacit.progress import Bar, budget_text


def tacit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        run(arguments)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.mark.parametrize("kind", STUDIES)
def test_a_study_is_told_where_it_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text(f'kind = "{kind}"\ntitle = "t"\n')
    for more in ([], ["--out", "here", "--json"]):
        code, out, err = tacit(capsys, "run", "study.toml", *more)
        assert (code, out) == (2, "")
        assert err == (
            f"study.toml describes a study (kind = {kind!r}): studies are no part of the package, run it from a "
            "checkout of the repository with `python -m studies run study.toml`.\n"
        )
        assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


BAD = [
    (["run", "missing.toml"], "There is no recipe at missing.toml."),
    (["run", "."], "is a folder"),
    (["run", "kind.toml"], "kind.toml: there is no kind 'adopt'; did you mean 'adapt'?"),
    (["run", "less.toml"], "less.toml, line 1: there is no key 'steps'; the keys are budget, title, model, "),
    (["run", "broken.toml"], "broken.toml is not valid TOML"),
    (["card", "missing"], "There is no ledger, run, checkpoint or saved result at missing."),
    (["card", "file"], "file is neither a ledger, nor a checkpoint of tacit"),
    (["card", "."], "there is no privacy-card.md in it"),
    (["card", ".", "--json"], "there is no privacy-card.md in it"),
    (["card", "damaged", "--json"], "is damaged: it is not JSON"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kind.toml").write_text('kind = "adopt"')
    Path("less.toml").write_text("steps = 3")
    Path("broken.toml").write_text('kind = "toy\n')
    Path("file").write_text("")
    Path("damaged").mkdir()
    Path("damaged/run.json").write_text("{")
    Path("damaged/privacy-card.md").write_text("")
    code, out, err = tacit(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_a_bar_on_a_terminal() -> None:
    screen = io.StringIO()
    with Bar(Console(file=screen, force_terminal=True, width=120)) as progress:
        progress("adapting [fog]", 1, 2)
        progress("adapting [fog]", 2, 2, spent=(0.7301, 1.0))
        progress("calibrating", 0, 5)
    for words in ("adapting [fog]", "privacy spent: eps 0.731 of 1", "calibrating"):
        assert words in screen.getvalue()


def test_plain_lines_are_few(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tacit.progress._progress.time.monotonic", lambda: now[0])
    with Bar(Console(file=io.StringIO())) as progress:
        for step in range(1, 101):
            now[0] += 0.3
            progress("a", step, 100)
    assert capsys.readouterr().err.splitlines() == ["a: 1 of 100", "a: 35 of 100", "a: 69 of 100", "a: 100 of 100"]


def test_a_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for IPython's kernel: one place in the output, shown anew, and the budget at the end."""
    shown: list[str] = []

    class Cell:
        def update(self, what: Any) -> None:
            shown.append(what._repr_html_())

    ipython = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(config={"IPKernelApp": {}}),
        display=SimpleNamespace(display=lambda *_, **__: Cell()),
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with Bar() as progress:
        progress("adapting <fog>", 1, 1000)
        progress("adapting <fog>", 2, 1000)
        progress("adapting <fog>", 1000, 1000, spent=(0.7301, 1.0))
    assert shown == [
        '<progress value="1" max="1000"></progress> adapting &lt;fog&gt;: 1 of 1,000',
        '<progress value="1000" max="1000"></progress> adapting &lt;fog&gt;: 1,000 of 1,000; '
        "privacy spent: eps 0.731 of 1",
        "<p>privacy spent: eps 0.731 of 1</p>",
    ]


def test_spent_is_never_rounded_below_the_truth() -> None:
    assert budget_text((0.73001, 1.0)) == "privacy spent: eps 0.731 of 1"
    assert budget_text((0.0, 0.5)) == "privacy spent: eps 0 of 0.5"
    assert budget_text((math.inf, math.inf)) == "not private"


def test_help_loads_nothing_slow() -> None:
    code = (
        "import sys, tacit.cli._main; slow = {'torch', 'scipy', 'matplotlib', 'sqlalchemy', 'tacit.report'};"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    card = "import sys, tacit.report; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", card], check=True)
