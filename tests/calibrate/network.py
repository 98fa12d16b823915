"""A real Flower network on loopback: a superlink and supernodes as processes, and runs of the example project."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

HANG = 1800.0  # seconds: no machine is so slow; a limit that only stops what hangs
BIN = Path(sys.executable).parent
PROJECT = Path(__file__).parents[2] / "examples" / "recalibration"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def toml(settings: dict[str, Any]) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())


class Network:
    """Everything it starts ends with it; what it ends are its own processes, each by its group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "flower-home"
        self.home.mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (self.runtime,) = free_ports(1)
        self.environment = os.environ | {
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Network:
        self.start_link()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.processes):
            self.end(name)

    def start_link(self) -> None:
        self._start(
            "link",
            "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.runtime),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        address = f'[superlink.here]\naddress = "127.0.0.1:{self.runtime}"\ninsecure = true\n'
        (self.home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n{address}')

    def start_node(self, name: str, settings: dict[str, Any]) -> None:
        (port,) = free_ports(1)
        self._start(
            name,
            "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.runtime}", "--port", str(port),
            "--node-config", toml(settings),
        )  # fmt: skip

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / program, *arguments],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, name: str) -> None:
        """End a process that was started here, with its children, at once."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def submit(self, project: Path = PROJECT, **settings: Any) -> tuple[str, Path]:
        """Start a run; returns its number and where its result will be."""
        copy = self.folder / "project"
        if not copy.exists():
            shutil.copytree(project, copy)
        out = self.folder / f"result-{time.monotonic_ns()}.json"
        settings = {key.replace("_", "-"): value for key, value in settings.items()} | {"out": str(out)}
        deadline = time.monotonic() + HANG
        while True:  # the superlink may still be starting
            printed_facts = self._flwr("run", str(copy), "here", "--run-config", toml(settings), "--format", "json")
            if printed_facts.get("run-id"):
                return str(printed_facts["run-id"]), out
            assert time.monotonic() < deadline, f"no run could be started: {printed_facts}\n{self.log('link')[-2000:]}"
            time.sleep(0.3)

    def finish(self, run: str, out: Path, limit: float = HANG) -> tuple[str, dict[str, Any]]:
        """How a run ended, as Flower says, and its result. The exit code of `flwr run` says nothing about it."""
        deadline = time.monotonic() + limit
        while not out.exists():
            assert time.monotonic() < deadline, f"no result in {limit} s\n{self.log('link')[-4000:]}"
            time.sleep(0.1)
        while not (status := self.status(run)).startswith("finished"):
            assert time.monotonic() < deadline, f"the run is still {status}"
            time.sleep(0.2)
        return status, json.loads(out.read_text())

    def run(self, limit: float = HANG, **settings: Any) -> tuple[str, dict[str, Any]]:
        return self.finish(*self.submit(**settings), limit=limit)

    def status(self, run: str) -> str:
        runs = self._flwr("list", "here", "--format", "json").get("runs", [])
        return next((str(one["status"]) for one in runs if str(one["run-id"]) == run), "unknown")

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """What a command of Flower prints; it may hang after it has printed everything, and is ended then."""
        command, printed = [str(BIN / "flwr"), *arguments], self.folder / f"flwr-{time.monotonic_ns()}.out"
        with printed.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        deadline = time.monotonic() + HANG
        while (printed_facts := _read(printed)) is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        printed_facts = printed_facts or _read(printed)
        return {"said": printed.read_text(errors="replace")} if printed_facts is None else printed_facts


def _read(path: Path) -> dict[str, Any] | None:
    """The whole object that a file holds; None as long as it does not."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError:
        return None
    return found
