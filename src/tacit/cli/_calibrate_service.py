"""`tacit calibrate serve`: a calibrator that stays, for sources that connect through Flower."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from tacit.cli._output import console


def serve(
    folder: Annotated[Path, typer.Argument(help="Its database, logs and results; the same folder goes on.")],
    sources: Annotated[int, typer.Option(help="How many sources are waited for.")],
    epsilon: Annotated[float, typer.Option(help="What each source pays for one recalibration.")],
    delta: Annotated[float, typer.Option(help="With epsilon; 0 is pure epsilon.")] = 0.0,
    method: Annotated[str, typer.Option(help="As of tacit calibrate, of those that ask.")] = "signed-gap",
    trust: Annotated[str, typer.Option(help="local or secure-aggregation.")] = "local",
    quorum: Annotated[float, typer.Option(help="The share of the sources that must answer.")] = 1.0,
    timeout: Annotated[float, typer.Option(help="Seconds that a source has for each question.")] = 60.0,
    cautious: Annotated[bool, typer.Option(help="Keep T = 1 where the budget is too small.")] = True,
    every: Annotated[float, typer.Option(help="Hours from one recalibration to the next.")] = 24.0 * 30,
    runs: Annotated[int | None, typer.Option(help="How many in all; without it, no end.")] = None,
    host: Annotated[str, typer.Option(help="The address that sources connect to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port.")] = 9092,
    certificate: Annotated[Path | None, typer.Option(help="A TLS certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    ca: Annotated[Path | None, typer.Option(help="The certificate of its authority (PEM).")] = None,
    known_sources: Annotated[bool, typer.Option(help="Only supernodes whose keys are registered.")] = False,
) -> None:
    """Recalibrate again and again, with sources that connect as Flower supernodes.

    Starts Flower's superlink and runs one recalibration through it every so often. Each result is a file in the folder;
    after a stop the same command goes on, and answers that were given are given again, free of charge.
    """
    try:
        from tacit.calibrate.federated import CalibrationService, RunSettings, ServiceError
    except ImportError as error:
        raise ValueError(str(error)) from None

    settings = RunSettings(
        sources=sources,
        epsilon=epsilon,
        delta=delta,
        method=method,
        trust=trust,  # type: ignore[arg-type]
        quorum=quorum,
        timeout=timeout,
        cautious=cautious,
    )
    _ = settings.calibrator  # invalid settings are reported now, not by the first run
    service = CalibrationService(
        folder=folder,
        settings=settings,
        host=host,
        port=port,
        certificate=certificate,
        key=key,
        ca=ca,
        known_sources=known_sources,
    )
    out = console()
    out.print(f"Sources connect with flower-supernode --superlink {host}:{port}; results are in {folder / 'results'}.")

    def on_result(place: int, result: dict[str, Any]) -> None:
        text = result.get("error") or f"temperature {result['temperature']:.3f}, {result['queries']} questions"
        out.print(escape(f"recalibration {place}: {text}"))

    previous = signal.signal(signal.SIGTERM, _stop)  # a supervisor's way to end it: the superlink ends as well
    try:
        service.run(every=3600 * every, runs=runs, on_result=on_result)
    except ServiceError as error:
        raise ValueError(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Abort from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _stop(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
