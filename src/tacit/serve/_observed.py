"""What operators see of a service: health, metrics, and one line of JSON per request. Nothing of what was asked.

Metrics and lines hold the route's template, the method, the status, the time and the token's name: no subject, receipt,
note, cost or address.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tacit.serve._schemas import Health

log = logging.getLogger("tacit.serve")
_TOGETHER = 4  # bodies of the largest size that may be in memory at a time
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}  # others are counted together


class Metrics:
    """The counters of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = Counter("tacit_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "tacit_request_seconds", "Seconds until the answer.", ("route",), registry=self.registry
        )


class Observed:
    """Counts, logs and bounds every request; no page is kept by a browser or shown in a frame.

    A body of more than `largest` bytes is refused with 413, before it is read where the request names its length. All
    large bodies that are being read or answered have at most four times that together: beyond it 429.

    An unexpected error is answered with `failure`, and its kind and place are logged: its text may quote what was asked
    (a database's has the values of its query), so neither it nor its traceback goes any further.
    """

    def __init__(self, app: ASGIApp, *, largest: int, failure: Response) -> None:
        self.app, self.largest, self.failure = app, largest, failure
        self._held = 0  # bytes of all bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        began, status, got, wrong = time.perf_counter(), 0, 0, None

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"cache-control", b"no-store"),
                    (b"x-content-type-options", b"nosniff"),
                    (b"x-frame-options", b"DENY"),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        named = _content_length(scope)

        async def bounded() -> Message:
            nonlocal got
            if named > self.largest:
                raise self._too_large()
            message = await receive()
            more = len(message.get("body", b""))
            got, self._held = got + more, self._held + more
            if got > self.largest:
                raise self._too_large()
            if self._held > _TOGETHER * self.largest and got > self.largest // 16:
                raise HTTPException(429, "Too many large requests at a time; ask again later.", {"Retry-After": "1"})
            return message

        try:
            await self.app(scope, bounded, answer)
        except Exception as error:
            wrong = place_of(error)
            if not status:  # nothing was answered yet
                await self.failure(scope, receive, answer)
        finally:
            self._held -= got
            self._note(scope, state, status or 500, time.perf_counter() - began, wrong)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"A request has at most {self.largest:,} bytes: send fewer rows at a time.")

    def _note(self, scope: Scope, state: dict[str, Any], status: int, seconds: float, wrong: str | None) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        metrics: Metrics = scope["app"].state.metrics
        metrics.requests.labels(method, route, str(status)).inc()
        metrics.seconds.labels(route).observe(seconds)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "method": method,
            "route": route,
            "status": status,
            "ms": round(1000 * seconds, 1),
            "token": state.get("token"),
        }
        log.info(json.dumps(line if wrong is None else line | {"error": wrong}))


def _content_length(scope: Scope) -> int:
    """The length that a request names for its body; 0 if it names none, or nonsense."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 20 else 0
    return 0


def place_of(error: BaseException) -> str:
    """The kind of an error and the line of the package that it passed last, without a word of its text."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "tacit" in frame.filename]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return type(error).__name__ + place


def health_routes(probe: Callable[[], object], metrics: Metrics) -> APIRouter:
    """Liveness, readiness (``probe`` reaches what the service needs, or raises) and Prometheus' metrics."""
    router = APIRouter()

    @router.get("/health/live", response_model=Health)
    def live() -> Any:
        """The process answers."""
        return Health()

    @router.get("/health/ready", response_model=Health, responses={503: {"model": Health}})
    def ready() -> Any:
        """What it needs answers, too."""
        try:
            probe()
        except Exception:
            return JSONResponse({"status": "not ready"}, status_code=503)
        return Health()

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def counted() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
