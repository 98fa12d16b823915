"""`tacit calibrate serve`: a superlink that stays and one recalibration after the other, stopped and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from network import BIN, HANG, Network

from tacit.calibrate import Calibrator, reference
from tacit.calibrate.federated import CalibrationService, RunSettings, ServiceError, SourceSettings
from tacit.calibrate.federated import _service as module
from tacit.privacy import Budget, Ledger

SETTINGS = RunSettings(sources=2, epsilon=0.5, cautious=False)
LINK = "import sys, time; open('started', 'a').write('x'); time.sleep(1000)"
FLWR = """
import json, os, sys
if sys.argv[1] == "run":
    config = sys.argv[sys.argv.index("--run-config") + 1]
    settings = dict(one.split("=", 1) for one in config.split())
    result = {"temperature": 1.5, "queries": 2, "name": json.loads(settings["run-id"])}
    open(json.loads(settings["out"]), "w").write(json.dumps(result))
    assert "tacit.calibrate.federated.server:app" in open(os.path.join(sys.argv[2], "pyproject.toml")).read()
    print(json.dumps({"run-id": 7}))
else:
    print(json.dumps({"runs": [{"run-id": 7, "status": "finished:completed"}]}))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs in place of Flower's that do as much as the service looks at."""
    for name, text in (("flower-superlink", LINK), ("flwr", FLWR)):
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setattr(module, "_program", lambda name: str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_results_are_numbered_and_the_same_folder_goes_on(programs: Path) -> None:
    service = CalibrationService(folder=programs / "service", settings=SETTINGS)
    seen: list[tuple[int, Any]] = []
    service.run(every=1e-3, runs=2, on_result=lambda place, found: seen.append((place, found["name"])))
    assert seen == [(1, "0001"), (2, "0002")]
    service.result(1).unlink()  # as if it had been stopped before this result was kept
    service.run(every=1e-3, runs=3, on_result=lambda place, found: seen.append((place, found["name"])))
    assert seen[2:] == [(1, "0001"), (3, "0003")]
    assert json.loads(service.result(3).read_text())["temperature"] == 1.5
    assert (programs / "started").read_text() == "xx"


def test_no_superlink_is_left_behind(programs: Path) -> None:
    service = CalibrationService(folder=programs / "service", settings=SETTINGS)
    with service._superlink() as link:
        assert link.poll() is None
    assert link.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(link.pid, 0)


def test_a_superlink_that_ends_is_reported_with_its_log(programs: Path) -> None:
    (programs / "flower-superlink").write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    (programs / "flwr").write_text(f"#!{sys.executable}\nprint('no connection')\n")
    service = CalibrationService(folder=programs / "service", settings=SETTINGS)
    with pytest.raises(ServiceError, match=r"ended with code 3 .*superlink\.log"):
        service.run(every=1.0, runs=1)


def test_settings_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs TLS"):
        CalibrationService(folder=tmp_path, settings=SETTINGS, host="0.0.0.0")
    with pytest.raises(ValueError, match="all three"):
        CalibrationService(folder=tmp_path, settings=SETTINGS, certificate=tmp_path / "a.pem")
    with pytest.raises(ValueError, match="some time apart"):
        CalibrationService(folder=tmp_path, settings=SETTINGS).run(every=0.0)


@pytest.mark.slow
def test_the_command_over_real_processes(tmp_path: Path) -> None:
    """Two supernodes stay connected while the service is started three times; the third time they cannot pay."""
    logits, labels = reference(0.1)
    made: list[dict[str, Any]] = []
    for place in range(2):
        rows = slice(1500 * place, 1500 * (place + 1))
        np.savez(tmp_path / f"{place}.npz", logits=logits[rows].numpy(), labels=labels[rows].numpy())
        made.append(
            {
                "name": f"clinic-{place}",
                "logits": str(tmp_path / f"{place}.npz"),
                "epsilon": 1.0,
                "size": 1500,
                "ledger": str(tmp_path / f"clinic-{place}.db"),
                "seed": place,
            }
        )
    network, folder = Network(tmp_path), tmp_path / "service"
    try:
        for one in made:
            network.start_node(one["name"], one)
        found = []
        for runs in (1, 2, 3):
            command = [
                BIN / "tacit", "calibrate", "serve", folder, "--sources", "2", "--epsilon", "0.5", "--no-cautious",
                "--timeout", str(HANG), "--every", "0.0001", "--runs", str(runs), "--port", str(network.runtime),
            ]  # fmt: skip
            with (tmp_path / f"serve-{runs}.log").open("wb") as log:
                ended = subprocess.run(
                    command, env=network.environment, stdout=log, stderr=subprocess.STDOUT, timeout=HANG, check=False
                )
            assert ended.returncode == 0, (tmp_path / f"serve-{runs}.log").read_text()
            found.append(json.loads((folder / "results" / f"{runs:04d}.json").read_text()))
    finally:
        for name in list(network.processes):
            network.end(name)
    sources = [
        SourceSettings.of(one | {"ledger": str(tmp_path / f"here-{place}.db")}).source()
        for place, one in enumerate(made)
    ]
    calibrator = Calibrator(budget=Budget(0.5, 0.0), cautious=False)
    assert found[0] == calibrator.run(sources, run_id="0001").to_json()
    assert found[1] == calibrator.run(sources, run_id="0002").to_json()
    assert "cannot afford" in found[2]["error"]
    for one in made:
        assert Ledger(one["ledger"], create=False).spent(one["name"]).epsilon == pytest.approx(1.0)


def test_stopping_ends_the_superlink(programs: Path) -> None:
    """A supervisor's SIGTERM reaches the service, which takes the superlink with it."""
    (programs / "flower-superlink").write_text(
        f"#!{sys.executable}\nimport os, time\nopen('pid.part', 'w').write(str(os.getpid()))\n"
        "os.rename('pid.part', 'pid')\ntime.sleep(1000)\n"
    )
    (programs / "flwr").write_text(f"#!{sys.executable}\nprint('not yet')\n")
    script = (
        "from tacit.calibrate.federated import _service as m\n"
        f"m._program = lambda name: {str(programs)!r} + '/' + name\n"
        "from tacit.cli import run\n"
        "run(['calibrate', 'serve', 'service', '--sources', '2', '--epsilon', '0.5'])\n"
    )
    service = subprocess.Popen([sys.executable, "-c", script], cwd=programs, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + HANG
        while not (programs / "pid").exists():
            assert service.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        link = int((programs / "pid").read_text())
        service.terminate()
        _, said = service.communicate(timeout=HANG)
        assert service.returncode == 130
        assert b"Stopped." in said
        with pytest.raises(ProcessLookupError):
            os.kill(link, 0)
    finally:
        service.kill()
        service.wait()
