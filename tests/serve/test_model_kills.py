"""An adapting service that is killed: every request is answered in the end, one charge, no noise twice."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tacit.privacy import Ledger
from tests.serve.conftest import free_port
from tests.serve.test_model_service import question, rows


def start(folder: Path, port: int, *options: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tacit", "serve", "embedded", "--out", str(folder), "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--batch-size", "4", "--epsilon", "5", "--unit", "patient", "--wait", "0.2", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/v2/health/ready")
            return process
        except httpx.TransportError:
            assert process.poll() is None, "the service does not start"
            time.sleep(0.05)


def ask(port: int, number: int, images: torch.Tensor) -> dict[str, Any] | None:
    try:
        sent = question(images, unit_id=str(number))
        answer = httpx.post(f"http://127.0.0.1:{port}/v2/models/model/infer", json=sent, timeout=60.0)
    except httpx.TransportError:
        return None
    assert answer.status_code == 200
    return dict(answer.json())


def killed(folder: Path, kills: int) -> None:
    port, chance, number = free_port(), random.Random(7), 0
    served: list[int] = []
    for _ in range(kills + 1):
        process = start(folder, port)
        until = time.monotonic() + chance.uniform(0.3, 2.0)
        while time.monotonic() < until:
            answer = ask(port, number, rows(1, number))
            if answer is not None:
                served.append(int(answer["model_version"]))
                number += 1
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert served == sorted(served), "an earlier version came back"
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
