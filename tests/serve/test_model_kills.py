"""An adapting service that is killed: every request is answered in the end, one charge, no noise twice."""

import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tacit.models import embedded
from tacit.privacy import Ledger
from tests.serve.conftest import Forked, free_port, started
from tests.serve.test_model_service import question, rows


def start(folder: Path, port: int, *options: str) -> Forked:
    given = ("--batch-size", "4", "--epsilon", "5", "--unit", "patient", "--wait", "0.2")
    return started(port, "/v2/health/ready", "serve", "embedded", "--out", str(folder), *given, *options)


def ask(port: int, number: int, images: torch.Tensor) -> dict[str, Any] | None:
    try:
        sent = question(images, unit_id=str(number))
        answer = httpx.post(f"http://127.0.0.1:{port}/v2/models/model/infer", json=sent, timeout=60.0)
    except httpx.TransportError:
        return None
    assert answer.status_code == 200
    return dict(answer.json())


def check_versions(folder: Path, served: list[int], said: list[list[float]]) -> None:
    """Every answer is that of the released parameters which it names, also right after a restart."""
    model, checked = embedded().eval(), 0
    for number, version in enumerate(served):
        file = folder / "versions" / f"{version:08d}.safetensors"
        if not file.exists():
            continue  # the last hundred are kept
        values, checked = load_file(file), checked + 1
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
            assert torch.allclose(torch.tensor(said[number]), model(rows(1, number))[0], atol=1e-4), number
    assert checked > len(served) / 4


def killed(folder: Path, kills: int) -> None:
    port, chance, number = free_port(), random.Random(7), 0
    served: list[int] = []
    said: list[list[float]] = []
    for life in range(kills + 1):
        process = start(folder, port)
        until, enough = time.monotonic() + chance.uniform(0.3, 2.0), number + chance.randrange(5, 12)
        # On a busy machine, too, every process makes a step before it is killed.
        while time.monotonic() < until or number < enough or len(set(served)) <= life:
            answer = ask(port, number, rows(1, number))
            assert answer is not None, "a request was lost while the service was not killed"
            served.append(int(answer["model_version"]))
            said.append(answer["outputs"][0]["data"])
            number += 1
        process.kill()
    assert served == sorted(served), "an earlier version came back"
    assert len(set(served)) > kills, "some steps between two kills"
    check_versions(folder, served, said)
    ledger = Ledger(str(folder / "ledger.db"))
    ledger.verify()
    entries = ledger.entries()
    assert [entry.kind for entry in entries].count("charge") == 1
    # no two processes ever held the same releases: what was given away never becomes less when another one takes over
    given = 0
    for entry in entries:
        if entry.kind == "resumed":
            assert entry.body["upto"] >= given
        if entry.kind in ("lease", "saved", "resumed"):
            given = max(given, entry.body["upto"]) if entry.kind == "lease" else entry.body["upto"]
    assert [entry.kind for entry in entries].count("resumed") == kills


def test_killed_twice(tmp_path: Path) -> None:
    killed(tmp_path, kills=2)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path: Path) -> None:
    killed(tmp_path, kills=20)
