"""The commands as people run them: output, JSON, and one sentence with exit code 2 for bad input."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from tacit import __version__
from tacit.cli._main import run
from tacit.privacy import Budget, Ledger, delta_of, events
from tacit.privacy import _storage as storage


def tacit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        run(arguments)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A ledger with two subjects, three charges and a settlement."""
    address = f"sqlite:///{tmp_path / 'book.db'}"
    with Ledger(address) as ledger:
        ledger.subject("clinic-a", budget=Budget(1.0, 1e-6), unit="patient", neighbours="replace-one")
        ledger.subject("clinic-b", budget=Budget(2.0, 0.0), disjoint_from=["clinic-a"])
        ledger.charge("clinic-a", events.gaussian(40.0), stage="calibrate", note="mean confidence")
        receipt = ledger.charge("clinic-a", events.gaussian(100.0, steps=10), stage="finetune")
        ledger.settle(receipt, 0)
        ledger.charge("clinic-b", events.laplace(4.0), stage="tune", seed=1)
    return address


def test_version() -> None:
    found = subprocess.run([sys.executable, "-m", "tacit", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"tacit {__version__}"


@pytest.mark.parametrize(("epsilon", "sigma"), [(1, 8.4494), (5, 1.9601), (10, 1.0822), (15, 0.7763), (20, 0.6182)])
def test_golden_noise(capsys: pytest.CaptureFixture[str], epsilon: float, sigma: float) -> None:
    options = ["--epsilon", str(epsilon), "--delta", "1e-6", "--neighbours", "replace-one", "--json"]
    code, out, err = tacit(capsys, "noise", *options)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["noise_multiplier"] == pytest.approx(sigma, abs=1e-3)
    assert delta_of(epsilon, 2 / found["noise_multiplier"]) == pytest.approx(1e-6, rel=1e-6)


def test_noise_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = tacit(capsys, "noise", "--epsilon", "1", "--delta", "1e-6", "--unit", "video")
    assert "noise multiplier" in out
    assert "when one video is added or removed" in " ".join(out.split())


def test_pure_epsilon_means_laplace(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = tacit(capsys, "noise", "--epsilon", "2", "--delta", "0", "--steps", "10", "--json")
    assert json.loads(out)["noise_multiplier"] == pytest.approx(5.0)
    assert json.loads(out)["distribution"] == "laplace"


def test_infinite_epsilon_is_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = tacit(capsys, "noise", "--epsilon", "inf", "--delta", "1e-5", "--json")
    found = json.loads(out)
    assert (found["noise_multiplier"], found["epsilon"], found["private"]) == (0.0, "inf", False)
    assert "not private" in found["guarantee"]


BAD = [
    (["noise", "--epsilon", "-1", "--delta", "1e-5"], "Epsilon must be above 0"),
    (["noise", "--epsilon", "nan", "--delta", "1e-5"], "Epsilon must be above 0"),
    (["noise", "--epsilon", "1", "--delta", "1"], "Delta must be at least 0 and below 1"),
    (["noise", "--epsilon", "1", "--delta", "1e-5", "--sample-rate", "2"], "A sample rate is a probability"),
    (["noise", "--epsilon", "1", "--delta", "1e-5", "--neighbours", "cousins"], "Unknown neighbour relation 'cousins'"),
    (["noise", "--epsilon", "1", "--delta", "1e-5", "--accountant", "magic"], "Unknown accountant"),
    (["noise", "--epsilon", "1", "--delta", "1e-5", "--steps", "0"], "at least 1"),
    (["noise", "--epsilon", "much", "--delta", "1e-5"], "--epsilon"),
    (["noise", "--epsilon", "1"], "--delta"),
    (["nois"], "Did you mean 'noise'"),
    (["serve", "embedded", "--out", "served", "--lr", "fast"], "--lr is a number above 0, or auto; got 'fast'"),
    (["ledger", "show", "missing.db"], "There is no ledger at missing.db"),
    (["ledger", "show", "mysql://here/there"], "SQLite or PostgreSQL"),
    (["ledger", "verify", "sqlite:///no/such/place.db"], "There is no ledger"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    code, out, err = tacit(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_show(capsys: pytest.CaptureFixture[str], url: str) -> None:
    code, out, _ = tacit(capsys, "ledger", "show", url)
    assert code == 0
    for words in ("clinic-a", "patient", "mean confidence", "seeded: not private", "Total over all subjects", "Head"):
        assert words in " ".join(out.split())
    _, out, _ = tacit(capsys, "ledger", "show", url, "--json")
    found = json.loads(out)
    assert [row["subject"] for row in found["subjects"]] == ["clinic-a", "clinic-b"]
    assert found["subjects"][1]["spent_epsilon"] == pytest.approx(0.25)
    assert found["entries"] == 6


def test_show_fits_eighty_columns(
    capsys: pytest.CaptureFixture[str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = tacit(capsys, "ledger", "show", url)
    lines = [line for line in out.splitlines() if not line.startswith("Head")]
    assert max(map(len, lines)) <= 80
    assert "…" not in out, "nothing is cut"
    assert any(words in out for words in ("replace-one", "add-remove"))


def test_card_of_a_ledger(capsys: pytest.CaptureFixture[str], url: str) -> None:
    for name in (url, url.removeprefix("sqlite:///")):
        code, out, _ = tacit(capsys, "card", name)
        assert code == 0
        assert "## In plain words" in out
        _, told, _ = tacit(capsys, "card", name, "--json")
        facts = json.loads(told)["privacy"]["ledgers"][0]
        assert f"| epsilon | {facts['epsilon']:.3g}"[:14] in out


def test_a_plain_path_will_do(capsys: pytest.CaptureFixture[str], url: str) -> None:
    code, _, _ = tacit(capsys, "ledger", "verify", url.removeprefix("sqlite:///"))
    assert code == 0


def test_verify_finds_an_edited_row(capsys: pytest.CaptureFixture[str], url: str) -> None:
    with Ledger(url) as ledger:
        head = ledger.head
    code, out, _ = tacit(capsys, "ledger", "verify", url, "--head", head, "--json")
    assert (code, json.loads(out)["entries"]) == (0, 6)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        changed = storage.entries.c.body
        new = sa.func.replace(changed, "mean confidence", "nothing at all")
        connection.execute(sa.update(storage.entries).values(body=new))
    code, out, err = tacit(capsys, "ledger", "verify", url)
    assert (code, out) == (1, "")
    assert err.strip() == "Entry 3 was changed after it was written."


def test_export(capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path) -> None:
    _, out, _ = tacit(capsys, "ledger", "export", url)
    rows = json.loads(out)
    assert [row["kind"] for row in rows] == ["subject", "subject", "charge", "charge", "settle", "charge"]
    file = tmp_path / "book.csv"
    code, out, _ = tacit(capsys, "ledger", "export", url, "--csv", "--out", str(file))
    assert (code, out) == (0, "")
    assert len(file.read_text().splitlines()) == 7
    code, _, err = tacit(capsys, "ledger", "export", url, "--out", str(tmp_path / "no" / "folder.json"))
    assert code == 2
    assert "No such file" in err


def test_the_answer_of_one_second_order_question(capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of noise sqrt(2) sigma cost what one step of sigma costs."""
    ask = lambda steps: json.loads(  # noqa: E731
        tacit(capsys, "noise", "--epsilon", "1", "--delta", "1e-6", "--steps", steps, "--json")[1]
    )["noise_multiplier"]
    assert ask("2") == pytest.approx(math.sqrt(2) * ask("1"), rel=1e-9)


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tacit(capsys, "check", "timm:vit_tiny_patch16_224", "--scheme", "norms", "--json")
    assert (code, json.loads(out)["trainable"]) == (0, 9_600)
    code, out, err = tacit(capsys, "check", "timm:resnet18")
    assert (code, out) == (2, "")
    assert "timm:resnet18 is refused. The layer 'bn1' (BatchNorm2d) is live" in err
    assert len(err.strip().splitlines()) == 1
    code, out, _ = tacit(capsys, "check", "timm:resnet18", "--frozen", "--scheme", "linear")
    assert code == 0
    assert "513,000 of 11,689,512 parameters" in " ".join(out.split())
