"""`tacit demo`: a report, a card and a ledger per private arm, from what is in the package."""

import json
from pathlib import Path

import pytest
import torch

from tacit.cli import _demo_runs as demo_runs
from tacit.cli import _main as main
from tacit.data import fashion_mnist, shifts, streams
from tacit.models import embedded

PER_SHIFT = 8


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main.run(list(arguments))
    return int(end.value.code or 0)


def test_the_demo_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo_runs.Demo.__init__.__kwdefaults__, "per_shift", PER_SHIFT)
    out = tmp_path / "demo"
    assert call("demo", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].strip() == "Accuracy in percent, continual"
    for words in ("DP-Tent (eps 10), seed 0", "2 ledgers, each a promise of its own", str(out / "report.html")):
        assert words in printed
    assert {path.name for path in out.iterdir()} == {
        "ledgers", "picture-1.png", "picture-2.png", "privacy-card.md", "report.html", "run.json",
    }  # fmt: skip

    told = json.loads((out / "run.json").read_text("utf-8"))
    arms = {cell["arm"]: cell for cell in told["facts"]["cells"]}
    assert list(arms) == ["source", "Tent", "Tent + clip", "DP-Tent (eps 10)", "DP-Tent (eps 1)"]
    images, labels = fashion_mnist("unseen")
    stream = streams.corrupted(
        images, labels, shifts=shifts.TEST, severity=3, setting="continual", per_shift=PER_SHIFT, seed=0
    )
    with torch.no_grad():
        right = [embedded()(batch.images).argmax(1) == batch.labels for batch in stream.batches(64)]
    assert arms["source"]["accuracy"] == pytest.approx(100 * float(torch.cat(right).double().mean()))
    spent = [account["epsilon"] for ledger in told["privacy"]["ledgers"] for account in ledger["accounts"]]
    assert spent == pytest.approx([10.0, 1.0], rel=1e-3)
    for ledger in (out / "ledgers").glob("*.db"):
        assert call("ledger", "verify", str(ledger)) == 0
    capsys.readouterr()

    assert call("demo", "--out", str(out), "--json") == 0  # a second one starts from nothing
    again = json.loads(capsys.readouterr().out)
    assert [len(ledger["accounts"]) for ledger in again["privacy"]["ledgers"]] == [1, 1]
    assert again["fingerprint"] == told["fingerprint"]
