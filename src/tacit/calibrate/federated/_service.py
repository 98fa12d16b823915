"""A calibrator that stays: Flower's superlink as a child process, and one recalibration after the other through it.

Everything that it needs lives in one folder: the superlink's database and log, the Flower project (which names tacit's
two apps and holds no code), and a result for each recalibration. A recalibration is named by its place, so after a stop
at any point the same folder goes on: results that are there stay, and the one that was under way is asked again under
its name, for which the sources give the answers that they have given already, free of charge.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tacit._files import write_atomically
from tacit.calibrate.federated._server import RunSettings

_PROJECT = """\
[project]
name = "recalibration"
version = "1.0.0"
description = "Honest confidences from many private sources."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tacit"

[tool.flwr.app.components]
serverapp = "tacit.calibrate.federated.server:app"
clientapp = "tacit.calibrate.federated.client:app"

[tool.flwr.app.config]
"""
_POLL = 0.2  # seconds between two looks at what Flower does
_PATIENCE = 600.0  # seconds for a superlink to start and for a finished run to be listed as such
_LEAVE = 10.0  # seconds for a superlink to end by itself


class ServiceError(Exception):
    """Flower did not do what it was asked to; the sentence says where its log is."""


@dataclass(frozen=True, kw_only=True)
class CalibrationService:
    """A superlink and the recalibrations that go through it.

    Args:
        folder: For its database, logs and results.
        settings: Of every recalibration; their names and files are chosen here.
        host: The address that supernodes connect to.
        port: The port.
        certificate: TLS: the certificate (PEM). Without it nothing is encrypted: for loopback.
        key: Its private key.
        ca: The certificate of the authority that signed it.
        known_sources: Whether only supernodes may connect whose keys were registered (`flwr supernode register`).
    """

    folder: Path
    settings: RunSettings
    host: str = "127.0.0.1"
    port: int = 9092
    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    known_sources: bool = False

    def __post_init__(self) -> None:
        given = [one is not None for one in (self.certificate, self.key, self.ca)]
        if any(given) and not all(given):
            raise ValueError("TLS needs all three: the certificate, its key and the certificate of its authority.")
        if not any(given) and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError("Beyond loopback the superlink needs TLS: give --certificate, --key and --ca.")
        if self.settings.run_id or self.settings.out:
            raise ValueError("The service names its recalibrations and their files itself.")

    def result(self, place: int) -> Path:
        """The file of one recalibration, counted from 1."""
        return self.folder / "results" / f"{place:04d}.json"

    def run(
        self,
        *,
        every: float,
        runs: int | None = None,
        on_result: Callable[[int, dict[str, Any]], None] = lambda _place, _result: None,
    ) -> None:
        """Recalibrate now and then every so many seconds, until stopped or until there are ``runs`` results.

        Args:
            every: Seconds from the beginning of one recalibration to that of the next.
            runs: How many in all, those of earlier starts included; None: no end.
            on_result: Called with each new result: its place, and the result or ``{"error": …}``.

        Raises:
            ServiceError: Flower did not do what it was asked to.
        """
        if not every > 0 or (runs is not None and runs < 1):
            raise ValueError("Recalibrations are some time apart, and there is at least one.")
        (self.folder / "results").mkdir(parents=True, exist_ok=True)
        with self._superlink() as link:
            place = 1
            while runs is None or place <= runs:
                if not self.result(place).exists():
                    began = time.monotonic()
                    on_result(place, self._one(place, link))
                    if runs is None or place < runs:
                        _wait(began + every, link, self)
                place += 1

    def _one(self, place: int, link: subprocess.Popen[bytes]) -> dict[str, Any]:
        """One recalibration. Its result is moved to its place only when Flower has ended the run."""
        partial = self.folder / f"recalibration-{place:04d}.json"
        partial.unlink(missing_ok=True)
        stated = {one.name: getattr(self.settings, one.name) for one in fields(RunSettings)}
        stated |= {"run_id": f"{place:04d}", "out": str(partial.resolve())}
        config = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in stated.items())
        deadline = time.monotonic() + _PATIENCE
        while not (said := self._flwr("run", self._project(stated), "here", "--run-config", config)).get("run-id"):
            self._alive(link)
            if time.monotonic() > deadline:
                raise ServiceError(f"Flower started no run; its log is {self.folder / 'superlink.log'}.")
            time.sleep(_POLL)
        number = str(said["run-id"])
        while not (status := self._status(number)).startswith("finished"):
            self._alive(link)
            time.sleep(_POLL)
        if not partial.exists():
            raise ServiceError(f"Run {number} ended ({status}) without a result; see {self.folder / 'superlink.log'}.")
        found: dict[str, Any] = json.loads(partial.read_text())
        write_atomically(self.result(place), json.dumps(found, indent=2) + "\n")
        partial.unlink()
        return found

    @contextmanager
    def _superlink(self) -> Iterator[subprocess.Popen[bytes]]:
        """The superlink, in a process group of its own that ends with this block."""
        home = self.folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        here = [f'address = "{self.host}:{self.port}"']
        here.append(
            "insecure = true" if self.ca is None else f"root-certificates = {json.dumps(str(self.ca.resolve()))}"
        )
        write_atomically(
            home / "config.toml", "\n".join(['[superlink]\ndefault = "here"\n', "[superlink.here]", *here, ""])
        )
        tls = ["--insecure"]
        if self.certificate is not None:
            tls = [
                "--ssl-certfile",
                str(self.certificate),
                "--ssl-keyfile",
                str(self.key),
                "--ssl-ca-certfile",
                str(self.ca),
            ]
        command = [
            _program("flower-superlink"), *tls, "--host", self.host, "--port", str(self.port),
            "--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation",
            *(["--enable-supernode-auth"] if self.known_sources else []),
        ]  # fmt: skip
        with (self.folder / "superlink.log").open("ab") as log:
            link = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield link
        finally:
            _end(link)

    def _alive(self, link: subprocess.Popen[bytes]) -> None:
        if link.poll() is not None:
            raise ServiceError(
                f"The superlink ended with code {link.returncode} (is port {self.port} taken?); its log is "
                f"{self.folder / 'superlink.log'}."
            )

    def _project(self, stated: dict[str, Any]) -> str:
        """The Flower project of these recalibrations; `--run-config` may only set what is stated here."""
        config = "".join(f"{name.replace('_', '-')} = {json.dumps(value)}\n" for name, value in stated.items())
        (self.folder / "project").mkdir(exist_ok=True)
        write_atomically(self.folder / "project" / "pyproject.toml", _PROJECT + config)
        return str(self.folder / "project")

    def _status(self, number: str) -> str:
        runs = self._flwr("list", "here").get("runs", [])
        return next((str(one["status"]) for one in runs if str(one["run-id"]) == number), "unknown")

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """What a command of Flower prints as JSON; it may hang after it has printed everything, and is ended then."""
        printed = self.folder / "flwr.out"
        with printed.open("wb") as out:
            process = subprocess.Popen(
                [_program("flwr"), *arguments, "--format", "json"],
                env=self._environment,
                stdout=out,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + _PATIENCE
            while (found := _read(printed)) is None and process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL)
        finally:
            _end(process, 0.0)
        return found or _read(printed) or {}

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "FLWR_HOME": str((self.folder / "flower").resolve()),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }


def _program(name: str) -> str:
    """A program of Flower: that of this environment if it is there."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def _wait(until: float, link: subprocess.Popen[bytes], service: CalibrationService) -> None:
    while (left := until - time.monotonic()) > 0:
        service._alive(link)
        time.sleep(min(left, 1.0))


def _end(process: subprocess.Popen[bytes], patience: float = _LEAVE) -> None:
    """End a process that was started here and its children: asked first, if there is time, then at once."""
    for sign, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, None)):
        if wait == 0:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)


def _read(path: Path) -> dict[str, Any] | None:
    """The whole object that a file holds; None as long as it does not."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
