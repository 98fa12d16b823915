"""`tacit serve MODEL`: a model that adapts as it serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tacit.cli._ledger_service import service
from tacit.cli._output import console

if TYPE_CHECKING:
    from tacit.adapt import Adapter

ADMIN = "TACIT_SERVE_ADMIN_TOKEN"
_METHODS = {"tent": "Tent", "eata": "EATA", "sar": "SAR", "deyo": "DeYO"}


def serve(
    model: Annotated[str, typer.Argument(help="timm:NAME, a folder, small:NAME, embedded or module:function.")],
    out: Annotated[Path, typer.Option(help="The folder of its state, versions and ledger.")],
    method: Annotated[str, typer.Option(help="tent, eata, sar or deyo.")] = "tent",
    epsilon: Annotated[float, typer.Option(help="For the whole stream; inf: clipping only, not private.")] = 1.0,
    delta: Annotated[float, typer.Option(help="For the whole stream.")] = 1e-6,
    clip: Annotated[float, typer.Option(help="The L2 bound of a unit's gradient.")] = 1.0,
    lr: Annotated[str, typer.Option(help="The learning rate; auto: from public quantities.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Rows of a step.")] = 64,
    horizon: Annotated[int | None, typer.Option(help="Steps after which it stops adapting.")] = None,
    correlated: Annotated[bool, typer.Option(help="Correlated noise over the horizon.")] = False,
    unit: Annotated[
        str, typer.Option(help="Who is protected; other than sample, requests say whose rows are.")
    ] = "sample",
    contributions: Annotated[int, typer.Option(help="Steps that a unit takes part in at most.")] = 1,
    ledger: Annotated[str | None, typer.Option(help="By default OUT/ledger.db.")] = None,
    subject: Annotated[str, typer.Option(help="The stream's name in the ledger.")] = "stream",
    wait: Annotated[float, typer.Option(help="Seconds that a row waits for its batch to fill.")] = 5.0,
    queue: Annotated[int, typer.Option(help="Rows that may wait; beyond that the answer is 429.")] = 4096,
    largest: Annotated[int, typer.Option(help="Bytes of a request; beyond that the answer is 413.")] = 16_000_000,
    every: Annotated[int, typer.Option(help="Steps between two saves.")] = 1,
    shadow: Annotated[bool, typer.Option(help="Adapt without serving what was adapted.")] = False,
    shape: Annotated[str | None, typer.Option("--input", help="The shape of one row, such as 3x224x224.")] = None,
    name: Annotated[str, typer.Option(help="The model's name in the protocol.")] = "model",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port.")] = 8080,
    certificate: Annotated[Path | None, typer.Option(help="A TLS certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    behind_proxy: Annotated[bool, typer.Option(help="A proxy in front of it ends TLS.")] = False,
) -> None:
    """Serve a model that adapts to what it is asked, by the Open Inference Protocol (version 2)."""
    from tacit import adapt
    from tacit.cli._check import shape_of
    from tacit.privacy import Ledger

    if method not in _METHODS:
        raise ValueError(f"The method is one of {', '.join(_METHODS)}, not {method!r}.")
    if correlated and horizon is None:
        raise ValueError("Correlated noise needs --horizon, the number of steps.")
    rate = _rate(lr)
    services, (built, example) = service(), _model(model, shape_of(shape))
    out.mkdir(parents=True, exist_ok=True)
    book = Ledger(ledger or str(out / "ledger.db"))
    privacy = adapt.DP(
        epsilon=epsilon,
        delta=delta,
        clip=clip,
        noise="correlated" if correlated else "independent",
        horizon=horizon if correlated else None,
        contributions=contributions,
    )

    def make() -> Adapter:
        adapter: Adapter = getattr(adapt, _METHODS[method])(
            built, privacy=privacy, batch_size=batch_size, lr=rate, ledger=book, subject=subject, unit=unit
        )
        return adapter

    rules = services.Rules(wait=wait, queue=queue, horizon=horizon, every=every, shadow=shadow)
    private = None if book.url.startswith("sqlite") else out
    running = services.AdaptingModel(make, example, out, rules=rules, private=private)
    said = running.adapter.guarantee or "Not private: clipping alone."
    how = {None: "", True: " It goes on exactly where it stopped.", False: " It goes on with fresh noise after a kill."}
    console().print(f"{name} is at {host}:{port}/v2/models/{name}.{how[running.exact]}\n{said}", soft_wrap=True)
    application = services.model_app(running, name=name, admin_token=os.environ.get(ADMIN), largest=largest)
    services.run_service(application, host=host, port=port, certificate=certificate, key=key, behind_proxy=behind_proxy)


def _rate(text: str) -> float | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--lr is a number above 0, or auto; got {text!r}.") from None


def _model(name: str, shape: tuple[int, ...] | None) -> tuple[Any, Any]:
    """A model and one row like those that it takes."""
    import torch

    from tacit import models

    if name == "embedded":
        return models.embedded(), torch.zeros(1, 28, 28)
    loaded = models.load(name, shape=shape)
    batch = loaded.batch[0] if isinstance(loaded.batch, tuple | list) else loaded.batch
    if not isinstance(batch, torch.Tensor) or not batch.is_floating_point():
        raise ValueError(f"{name} does not take float tensors: only such models are served.")
    return loaded.model, torch.zeros_like(batch[0])
