"""The side of a source: a Flower ClientApp that answers from its own data and its own ledger.

Flower may run every message in a process of its own, so nothing is kept in memory between two: the ledger and the
answers beside it are files, and a source whose ledger would not survive is refused.

How long it takes to draw noise depends on the noise, which must stay secret. So an answer or a share leaves only when
a whole number of quarters of a second has passed since it was asked for (``_whole_ticks``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tacit._refusals import ENDING
from tacit.calibrate._answers import Refused
from tacit.calibrate._files import read_outputs, read_unit_ids
from tacit.calibrate._queries import Query, Shares
from tacit.calibrate._source import Source, Trust
from tacit.calibrate._statistics import Noise
from tacit.calibrate._wire import make
from tacit.calibrate.federated._messages import content, value_of
from tacit.calibrate.federated._secure import NotSecure, given, question, secure_mod
from tacit.privacy import Budget, BudgetExceeded, Ledger, LedgerError

_log = logging.getLogger("tacit")
_TICK = 0.25  # seconds; drawing noise takes a small part of it


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """What ``flower-supernode --node-config`` says about a source; dashes and underscores are the same there."""

    name: str
    epsilon: float
    ledger: str  # a file, or a URL; it outlives every process
    answers: str = ""  # where answers are kept, if the ledger is behind a service (its token: TACIT_LEDGER_TOKEN)
    delta: float = 0.0
    logits: str = ""  # a file of one of the two kinds
    probs: str = ""
    labels: str = ""  # a file of its own, if need be
    key: str = ""
    labels_key: str = ""
    unit: str = ""  # "sample", unless unit_ids are named
    unit_ids: str = ""  # the array or column of the outputs' file that says whose each row is
    neighbours: str = "add-remove"
    noise: Noise | None = None
    size: int | None = None  # what is published; nothing by default
    seed: int | None = None  # for tests: "seeded: not private"
    trust: Trust = "local"
    colluding: float = 0.5  # with secure-aggregation: the share of the sources that may collude against this one

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> SourceSettings:
        return make(cls, {key.replace("-", "_"): value for key, value in config.items()})

    def source(self) -> Source:
        if bool(self.logits) == bool(self.probs):
            raise ValueError("A source names its outputs as logits=FILE or as probs=FILE: one of the two.")
        outputs, labels = read_outputs(
            self.logits or self.probs,
            "logits" if self.logits else "probs",
            key=self.key or None,
            labels=self.labels or None,
            labels_key=self.labels_key or None,
            unit_ids=self.unit_ids or None,
        )
        ids = read_unit_ids(self.logits or self.probs, self.unit_ids) if self.unit_ids else None
        return Source(
            self.name,
            logits=outputs if self.logits else None,
            probs=outputs if self.probs else None,
            labels=labels,
            budget=Budget(float(self.epsilon), float(self.delta)),
            ledger=Ledger(self.ledger),
            answers=self.answers or None,
            unit=self.unit or None,
            unit_ids=ids,
            neighbours=self.neighbours,
            noise=self.noise,
            size=self.size,
            seed=self.seed,
            trust=self.trust,
            colluding=float(self.colluding),
        )


def client_app(source_of: Callable[[Context], Source] | None = None) -> ClientApp:
    """An app that answers for the source that ``source_of`` makes, by default from the node's settings.

    Whatever goes wrong, only a fixed code leaves: an exception's text would reach the server.
    """
    make_source = source_of or (lambda context: SourceSettings.of(context.node_config).source())
    app = ClientApp(mods=[secure_mod])

    @app.query("terms")
    def terms(message: Message, context: Context) -> Message:
        return _reply(message, lambda: {"terms": _source(make_source, context).terms.to_json()})

    @app.query("answer")
    def answer(message: Message, context: Context) -> Message:
        with _whole_ticks():
            return _reply(message, lambda: _answer(message, lambda: _source(make_source, context)))

    @app.train()
    def share(message: Message, context: Context) -> Message:
        """Between two stages of SecAgg+, which masks what is returned. What is raised here drops the source out."""
        try:
            with _whole_ticks():
                source, query = _source(make_source, context), question(message, context)
                return given(message, source.share(query), query.shares or _none(), seeded=source.seed is not None)
        except ENDING:
            raise
        except BaseException as error:
            code = "refused" if isinstance(error, NotSecure) else _code(error)
            _log.error("No share was given (%s: %s).", code, type(error).__name__)
            raise NotSecure(code) from None  # the text of an exception would reach the server

    return app


@contextmanager
def _whole_ticks() -> Iterator[None]:
    """What happens inside takes a whole number of ticks, however it ends."""
    start = time.monotonic()
    try:
        yield
    finally:
        passed = time.monotonic() - start
        time.sleep(max(0.0, math.ceil(passed / _TICK) * _TICK - passed))


def _none() -> Shares:
    raise _Code("unreadable")


class _Code(Exception):
    """Ends a reply with a refusal's code."""


def _source(make_source: Callable[[Context], Source], context: Context) -> Source:
    try:
        source = make_source(context)
    except ValueError as error:
        _log.error("This source cannot be asked: %s", error)  # stays on this machine
        raise _Code("settings") from None
    if not source.ledger.durable:
        raise _Code("ledger")
    return source


def _answer(message: Message, source: Callable[[], Source]) -> dict[str, Any]:
    try:
        query = Query.from_json((value_of(message) or {})["query"])
    except (ValueError, TypeError, KeyError):
        raise _Code("unreadable") from None
    return {"answer": source().answer(query).to_json()}


def _reply(message: Message, work: Callable[[], dict[str, Any]]) -> Message:
    try:
        reply = work()
    except ENDING:
        raise
    except BaseException as error:
        code = _code(error)
        _log.error("No answer was given (%s: %s).", code, type(error).__name__)
        reply = {"refused": code}
    return Message(content(reply), reply_to=message)


def _code(error: BaseException) -> str:
    if isinstance(error, _Code):
        return str(error)
    if isinstance(error, BudgetExceeded):
        return "budget"
    if isinstance(error, Refused):
        return "refused"
    return "ledger" if isinstance(error, LedgerError) else "failed"


app = client_app()
