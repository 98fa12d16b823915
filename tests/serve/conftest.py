"""A real service on loopback, in a thread of this process or in one of its own."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tacit.privacy import Budget, Ledger
from tacit.serve import Role, Tokens, ledger_app


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Service:
    """A running service, its database and the tokens in it."""

    app: Any
    url: str
    database: str

    def token(self, role: Role = Role.ADMIN, **terms: Any) -> str:
        return Tokens(self.app.state.book.engine).create(role, **terms)[0]

    def ledger(self, role: Role = Role.ADMIN, **terms: Any) -> Ledger:
        return Ledger(self.url, token=self.token(role, **terms))

    def ask(self, path: str, token: str | None = None) -> httpx.Response:
        return httpx.get(
            self.url + path, headers={} if token is None else {"Authorization": f"Bearer {token}"}, timeout=300.0
        )


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[int]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    database = f"sqlite:///{tmp_path}/ledger.db"
    app = ledger_app(database, rate=1e6, burst=10**6)
    with serving(app) as port:
        yield Service(app, f"http://127.0.0.1:{port}", database)


@pytest.fixture
def clinic(service: Service) -> Ledger:
    ledger = service.ledger()
    ledger.subject("clinic", Budget(2.0, 1e-6), unit="patient")
    return ledger


class Forked:
    """A command of tacit in a process of its own; see `zygote`."""

    _parent: "subprocess.Popen[str] | None" = None

    def __init__(self, *arguments: str) -> None:
        if Forked._parent is None:
            root = Path(__file__).parents[2]
            settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
            command = [sys.executable, "-m", "tests.serve.zygote"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            Forked._parent = subprocess.Popen(command, env=os.environ | settings, cwd=root, **pipes)
            atexit.register(Forked._parent.kill)
            assert self._read() == "ready"
        assert Forked._parent.stdin is not None
        Forked._parent.stdin.write(json.dumps(arguments) + "\n")
        Forked._parent.stdin.flush()
        self.pid = int(self._read())
        atexit.register(self.kill)  # a test that fails leaves no process behind

    def _read(self) -> str:
        assert Forked._parent is not None
        assert Forked._parent.stdout is not None
        return Forked._parent.stdout.readline().strip()

    @property
    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        atexit.unregister(self.kill)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.alive:
            time.sleep(0.005)


def started(port: int, path: str, *arguments: str) -> Forked:
    """A service, once it answers."""
    process = Forked(*arguments, "--port", str(port))
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60.0).status_code == 200:
                return process
        except httpx.TransportError:
            assert process.alive, "the service does not start"
            time.sleep(0.02)


class Killable:
    """`tacit ledger serve` as a process that is killed and started again, on the same port and database."""

    def __init__(self, database: Path) -> None:
        self.database, self.port = database, free_port()
        self.process: Forked | None = None

    def start(self) -> None:
        limits = ("--rate", "1e6", "--burst", "1000000")
        self.process = started(self.port, "/health/ready", "ledger", "serve", str(self.database), *limits)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
