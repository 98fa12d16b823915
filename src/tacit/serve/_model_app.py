"""An adapting model over HTTP: the Open Inference Protocol, versions to roll back to, metrics of public values."""

from __future__ import annotations

import hmac
import math
import unicodedata
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Protocol

import torch
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import Gauge
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from torch import Tensor

from tacit import __version__
from tacit.serve import _inference_schemas as schemas
from tacit.serve._adapting import Facts, QueueFull, Rules
from tacit.serve._observed import Metrics, Observed, health_routes

LARGEST = 16_000_000  # bytes of a request
_FAILED = "The model could not answer this request."
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": schemas.Error} for code in (400, 401, 404, 413, 422, 429, 500)
}


class Served(Protocol):
    """What answers requests: an adapting model, or one of the replicas that predict for it."""

    example: Tensor
    rules: Rules

    def predict(self, rows: Tensor, unit_ids: Sequence[str] | None = None) -> tuple[Tensor, int]: ...

    def facts(self) -> Facts: ...

    def roll_back(self, version: int) -> None: ...

    def close(self) -> None: ...


def model_app(model: Served, *, name: str = "model", admin_token: str | None = None, largest: int = LARGEST) -> FastAPI:
    """The service of an adapting model, as an ASGI application.

    Args:
        model: The model.
        name: Its name in the protocol.
        admin_token: What allows to roll back; None: roll-backs are refused.
        largest: Bytes of a request's body; a larger one is refused with 413. Numbers become Python objects while a
            request is answered: it takes up to twenty times its bytes, and four of the largest are answered at a time.

    Returns:
        The application.

    Raises:
        ValueError: No request would fit.
    """
    if isinstance(largest, bool) or not isinstance(largest, int) or largest < 1_000:
        raise ValueError(f"largest is a whole number of bytes of at least 1,000; got {largest!r}.")

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        model.close()

    app = FastAPI(
        title=f"tacit: {name}",
        version=__version__,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,  # clients of the protocol, curl among them, do not all name their content's type
    )
    app.state.metrics = metrics = Metrics()
    app.add_middleware(Observed, largest=largest, failure=JSONResponse({"error": _FAILED}, status_code=500))
    app.include_router(health_routes(lambda: model.example, metrics))
    for kind in (ValueError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refused)
    _gauges(metrics, model)
    _protocol(app, model, name)
    _versions(app, model, admin_token)
    return app


def _protocol(app: FastAPI, model: Served, name: str) -> None:
    def known(asked: str) -> None:
        if asked != name:
            raise HTTPException(404, "There is no such model here.")

    @app.get("/v2")
    def server() -> dict[str, Any]:
        """What this server is."""
        return {"name": "tacit", "version": __version__, "extensions": []}

    @app.get("/v2/health/live")
    def live() -> dict[str, bool]:
        """It answers."""
        return {"live": True}

    @app.get("/v2/health/ready")
    def ready() -> dict[str, bool]:
        """It predicts."""
        return {"ready": True}

    @app.get("/v2/models/{asked}", responses=_ERRORS)
    @app.get("/v2/models/{asked}/versions/{version}", responses=_ERRORS)
    def metadata(asked: str, version: str | None = None) -> dict[str, Any]:
        """What the model takes and gives, whether it adapts, and what that has cost."""
        del version
        known(asked)
        facts = model.facts()
        return {
            "name": name,
            "versions": [str(each) for each in facts.versions],
            "platform": "pytorch",
            "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, *model.example.shape]}],
            "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, -1]}],
            "parameters": {
                "adapting": facts.stopped is None,
                "why_not": facts.stopped,
                "shadow": model.rules.shadow,
                "unit": facts.unit,
                "guarantee": facts.guarantee,
            },
        }

    @app.get("/v2/models/{asked}/ready", responses=_ERRORS)
    def model_ready(asked: str) -> dict[str, Any]:
        """The model predicts."""
        known(asked)
        return {"name": name, "ready": True}

    @app.post("/v2/models/{asked}/infer", response_model=schemas.InferenceResponse, responses=_ERRORS)
    def infer(
        asked: str, request: schemas.InferenceRequest, x_unit_id: Annotated[list[str] | None, Header()] = None
    ) -> Any:
        """Predict with the released parameters; the rows are used for adaptation afterwards."""
        known(asked)
        rows = _rows(request.inputs[0])
        try:
            logits, version = model.predict(rows, _unit_ids(request, x_unit_id, len(rows)))
        except QueueFull:
            retry = {"Retry-After": f"{model.rules.wait:g}"}
            raise HTTPException(429, "Too many rows wait for adaptation; ask again later.", headers=retry) from None
        shown = [value if math.isfinite(value) else None for value in logits.flatten().tolist()]
        output = {"name": "logits", "shape": list(logits.shape), "datatype": "FP32", "data": shown}
        return {"model_name": name, "model_version": str(version), "id": request.id, "outputs": [output]}


def _versions(app: FastAPI, model: Served, admin_token: str | None) -> None:
    @app.get("/v1/versions")
    def versions() -> dict[str, Any]:
        """The released versions that are kept, and the one that is served."""
        facts = model.facts()
        return {"versions": facts.versions, "served": facts.served}

    @app.post("/v1/versions/{version}/serve", responses=_ERRORS)
    def roll_back(version: int, authorization: Annotated[str, Header(max_length=400)] = "") -> dict[str, Any]:
        """Serve a kept version and learn on from there. Needs the admin's token."""
        shown = authorization.removeprefix("Bearer ").encode()
        if admin_token is None or not hmac.compare_digest(shown, admin_token.encode()):
            raise HTTPException(401, "The admin's token is needed.")
        model.roll_back(version)
        return {"served": version}


def _gauges(metrics: Metrics, model: Served) -> None:
    """Numbers that are public: the clock, the queue, and what was released or charged."""
    gauges = {
        "tacit_waiting_rows": ("Rows that wait for adaptation.", lambda: float(model.facts().waiting)),
        "tacit_steps": ("Steps that were released.", lambda: float(model.facts().steps)),
        "tacit_served_version": ("The version that is served.", lambda: float(model.facts().served)),
        "tacit_adapting": ("1 while the model adapts.", lambda: float(model.facts().stopped is None)),
        "tacit_epsilon_spent": ("Epsilon spent on the stream.", lambda: model.facts().epsilon),
    }
    for name, (text, read) in gauges.items():
        Gauge(name, text, registry=metrics.registry).set_function(read)


def _rows(given: schemas.InputTensor) -> Tensor:
    """The rows of an input tensor; refused by shape and type alone."""
    if given.datatype not in schemas.TYPES:
        raise ValueError(f"The datatype {given.datatype} is not served: use FP32.")
    flat: list[Any] = given.data
    while any(isinstance(each, list) for each in flat):
        if not all(isinstance(each, list) for each in flat):
            raise ValueError("The data are numbers, or lists of one depth.")
        flat = [number for row in flat for number in row]
    if len(flat) != math.prod(given.shape):
        raise ValueError(f"{len(flat)} numbers for the shape {given.shape}.")
    return torch.tensor([_number(value) for value in flat], dtype=torch.float64).float().reshape(given.shape)


def _number(value: Any) -> float:
    """A value that is no number counts as a missing one: it is not used for adaptation and moves no other row."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number beyond float64
        return math.nan


def _unit_ids(request: schemas.InferenceRequest, headers: list[str] | None, rows: int) -> list[str] | None:
    """Whose rows they are. Who is named in the header (by a gateway, say) cannot be renamed by who asks."""
    if headers is not None and len(headers) != 1:
        raise ValueError("The header X-Unit-Id is there more than once: say it once.")
    header = None if headers is None else headers[0]
    said = {**(request.parameters or {}), **(request.inputs[0].parameters or {})}
    named = said.get("unit_ids", said.get("unit_id"))
    of_all = None if header is None else _unit_id(header.encode("latin-1").decode("utf-8", "replace"))
    if named is None:
        return None if of_all is None else [of_all] * rows
    ids = [_unit_id(each) for each in named] if isinstance(named, list) else [_unit_id(named)] * rows
    if of_all is not None and any(each != of_all for each in ids):
        raise ValueError("The header X-Unit-Id and the request's parameters name different units: say it once.")
    return ids


def _unit_id(given: Any) -> str:
    """One spelling for one unit: a whole number is its digits, and blanks around a name do not count."""
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise ValueError("A unit id is a string or a whole number.")
    name = unicodedata.normalize("NFC", str(given)).strip()
    if not 0 < len(name) <= schemas.LONGEST_ID:
        raise ValueError(f"A unit id has 1 to {schemas.LONGEST_ID} characters.")
    return name


def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": str(error.detail)}, status_code=error.status_code, headers=error.headers)
    if isinstance(error, RequestValidationError):
        parts = [f"{'.'.join(str(p) for p in each['loc'][1:])}: {each['msg']}" for each in error.errors()]
        return JSONResponse({"error": "; ".join(parts)}, status_code=422)
    return JSONResponse({"error": str(error)}, status_code=400)
