"""The side of the calibrator: a Flower ServerApp that asks, searches and writes down what it found."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from tacit._files import write_atomically
from tacit.calibrate._calibrator import Calibrator
from tacit.calibrate._methods import METHODS, SignedGap
from tacit.calibrate._source import Trust
from tacit.calibrate._transport import CalibrationError
from tacit.calibrate._wire import make
from tacit.calibrate.federated._transport import FlowerTransport
from tacit.privacy import Budget

_log = logging.getLogger("tacit")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What ``[tool.flwr.app.config]`` and ``flwr run --run-config`` say; dashes and underscores are the same there."""

    sources: int
    epsilon: float
    delta: float = 0.0
    method: str = SignedGap.name
    cautious: bool = True
    quorum: float = 1.0
    timeout: float = 60.0  # seconds, of each question
    run_id: str = ""  # a run under the same name goes on with the answers that were given
    out: str = ""  # a file for the result
    trust: Trust = "local"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"There is no method {self.method!r}; choose one of {', '.join(METHODS)}.")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RunSettings:
        return make(cls, {key.replace("-", "_"): value for key, value in config.items()})

    @property
    def calibrator(self) -> Calibrator:
        return Calibrator(
            budget=Budget(float(self.epsilon), float(self.delta)),
            method=METHODS[self.method](),
            cautious=self.cautious,
            quorum=self.quorum,
            trust=self.trust,
        )


def server_app() -> ServerApp:
    """An app that runs one recalibration, as its settings say. The run fails if it cannot give a right result."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = RunSettings.of(context.run_config)
        calibrator = settings.calibrator
        at_least = max(1, math.ceil(calibrator.quorum * settings.sources - 1e-9))
        transport = FlowerTransport(grid, sources=settings.sources, at_least=at_least, timeout=float(settings.timeout))
        try:
            result = calibrator.run(transport, run_id=settings.run_id or None)
        except CalibrationError as error:
            _write(settings.out, {"error": str(error)})
            raise
        _log.info("%s", result)
        _write(settings.out, result.to_json())

    return app


def _write(out: str, value: dict[str, Any]) -> None:
    """The whole file or none."""
    if out:
        write_atomically(out, json.dumps(value, indent=2) + "\n")


app = server_app()
