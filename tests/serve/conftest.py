"""A real service on loopback, in a thread of this process or in one of its own."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


class Killable:
    """`tacit ledger serve` as a process that is killed and started again, on the same port and database."""

    def __init__(self, database: Path) -> None:
        self.database, self.port = database, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tacit", "ledger", "serve", str(self.database), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--rate", "1e6", "--burst", "1000000"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, "the service does not start"
                time.sleep(0.05)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
