"""Sources behind Flower: the same answers as in one process, charged once, and nothing but codes in place of errors."""

from __future__ import annotations

import builtins
import importlib
import itertools
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from network import HANG, PROJECT, Network

from tacit.calibrate import (
    AccT,
    Answer,
    CalibrationError,
    Calibrator,
    InProcess,
    Query,
    Refusal,
    SignedGap,
    Source,
    Terms,
)
from tacit.calibrate._simulation import reference
from tacit.calibrate.federated import FlowerTransport, RunSettings, SourceSettings, client_app
from tacit.calibrate.federated._messages import REFUSALS, content, value_of
from tacit.privacy import Budget, Ledger

LOGITS, LABELS = (part.numpy() for part in reference(0.1))
BUDGET = Budget(1.0, 0.0)
ROWS = 300
LATE = 400.0  # seconds: what an honest source needs on a machine that is busy with ten other things


def settings(folder: Path, place: int) -> dict[str, Any]:
    """A source's settings; its outputs are in a file, its noise is seeded so that it can be compared."""
    rows = slice(place * ROWS, (place + 1) * ROWS)
    path = folder / f"clinic-{place}.npz"
    if not path.exists():
        np.savez(path, logits=LOGITS[rows], labels=LABELS[rows])
    return {
        "name": f"clinic-{place}",
        "logits": str(path),
        "ledger": str(folder / f"clinic-{place}.db"),
        "epsilon": BUDGET.epsilon,
        "size": ROWS,
        "seed": place,
    }


def here(folder: Path, count: int) -> list[Source]:
    """The same sources in this process, with ledgers of their own."""
    (folder / "here").mkdir(exist_ok=True)
    made = [settings(folder, place) for place in range(count)]
    return [SourceSettings.of(one | {"ledger": str(folder / "here" / f"{one['name']}.db")}).source() for one in made]


def charges(path: str | Path) -> int:
    return sum(entry.kind == "charge" for entry in Ledger(path, create=False).entries())


class Without(InProcess):
    """Sources of which some never answer."""

    def __init__(self, sources: Sequence[Source], silent: set[str]) -> None:
        super().__init__(sources)
        self.silent = silent

    def ask(self, query: Query) -> list[Answer | Refusal]:
        asked = [source for source in self.sources if source.name not in self.silent]
        return [self._one(source, query) for source in asked]


# -- the real thing ----------------------------------------------------------------------------------------------------


def test_three_processes_give_what_one_gives(tmp_path: Path) -> None:
    with Network(tmp_path) as network:
        made = [settings(tmp_path, place) for place in range(3)]
        for one in made:
            network.start_node(one["name"], one)
        status, found = network.run(run_id="2031-05", timeout=HANG)
        logs = network.log("link")
    expected = Calibrator(budget=BUDGET).run(here(tmp_path, 3), run_id="2031-05")
    assert status == "finished:completed"
    assert found == expected.to_json()
    assert found["queries"] == 2
    for one in made:
        ledger = Ledger(one["ledger"], create=False)
        assert charges(one["ledger"]) == 2
        assert ledger.spent(one["name"]).epsilon == pytest.approx(1.0)
        assert one["logits"] not in logs
    # the ledgers are files: the same question has the same answer in yet another process, free of charge
    again = Calibrator(budget=BUDGET).run([SourceSettings.of(one).source() for one in made], run_id="2031-05")
    assert again == expected
    assert charges(made[0]["ledger"]) == 2


@pytest.mark.slow
def test_answers_and_charges_survive_the_end_of_every_process(tmp_path: Path) -> None:
    made = [settings(tmp_path, place) for place in range(3)]
    with Network(tmp_path) as network:
        for one in made:
            network.start_node(one["name"], one)
        _, first = network.run(run_id="a", timeout=HANG)
        for one in made:
            network.end(one["name"])
        for one in made:
            network.start_node(one["name"] + "-again", one)
        _, second = network.run(run_id="a", timeout=HANG)
        assert second == first
        assert [charges(one["ledger"]) for one in made] == [2, 2, 2]
        status, refused = network.run(run_id="b", timeout=HANG)
        assert status == "finished:failed"
        assert "cannot afford" in refused["error"]
        assert [charges(one["ledger"]) for one in made] == [2, 2, 2]


FAULTY = '''
"""A client that misbehaves as its settings say."""

import json
import os
import signal
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from tacit.calibrate.federated import SourceSettings, client_app


def source_of(context):
    config = {key: value for key, value in context.node_config.items() if key != "fault"}
    if context.node_config.get("fault") == "leaks":
        raise RuntimeError("the name of a patient: Zacharias")
    return SourceSettings.of(config).source()


inner = client_app(source_of)
app = ClientApp()


@app.query("terms")
def terms(message, context):
    return inner(message, context)


@app.query("answer")
def answer(message, context):
    fault = context.node_config.get("fault")
    if fault == "garbage":
        garbage = ConfigRecord({"json": '{"answer": [NaN, "Zacharias"]}'})
        return Message(RecordDict({"tacit": garbage}), reply_to=message)
    if fault == "late":
        while True:  # it never answers; it ends with the network
            time.sleep(1)
    reply = inner(message, context)
    if fault == "dies" and not os.path.exists(context.node_config["ledger"] + ".died"):
        open(context.node_config["ledger"] + ".died", "w").close()
        os.killpg(os.getpgid(0), signal.SIGKILL)
    return reply
'''


@pytest.mark.slow
def test_dead_garbled_and_late_clients_are_left_out_and_named(tmp_path: Path) -> None:
    project = tmp_path / "faulty-project"
    shutil.copytree(PROJECT, project)
    (project / "faulty.py").write_text(FAULTY)
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace("tacit.calibrate.federated.client:app", "faulty:app"))
    faults = {3: "dies", 4: "garbage", 5: "late"}
    made = [settings(tmp_path, place) | {"fault": faults.get(place, "")} for place in range(6)]
    leaky = settings(tmp_path, 6) | {"fault": "leaks"}
    with Network(tmp_path) as network:
        for one in [*made, leaky]:
            network.start_node(one["name"], one)
        asked = {"sources": 7, "timeout": LATE, "run_id": "a"}
        status, found = network.finish(*network.submit(project, quorum=0.4, **asked))
        assert status == "finished:completed"
        named = " ".join(found["notes"])
        assert all(f"clinic-{place} was left out" in named for place in faults)
        assert "its answer cannot be read" in named
        assert f"did not answer within {LATE:g} s" in named
        assert found["sources"] == 6  # the leaky one never stated its terms
        silent = Without(here(tmp_path, 6), {f"clinic-{place}" for place in faults})
        expected = Calibrator(budget=BUDGET, quorum=0.4).run(silent, run_id="a")
        assert found["temperature"] == expected.temperature
        before = [charges(one["ledger"]) for one in made]
        assert before[:4] == [found["queries"]] * 3 + [1]  # the fourth had charged and answered when it died
        status, answer = network.finish(*network.submit(project, quorum=1.0, **asked))
        assert status == "finished:failed"
        assert "sources stated their terms" in answer["error"]
        assert "7 are needed" in answer["error"]
        assert "Zacharias" not in network.log("link") + json.dumps(found) + json.dumps(answer)
    assert [charges(one["ledger"]) for one in made][:5] == before[:5]
    # the question that it died over has its answer, kept before it could leave: asked again, it is that, free of charge
    with sqlite3.connect(made[3]["ledger"]) as kept:
        ((query, answer),) = kept.execute("SELECT query, answer FROM tacit_answers").fetchall()
    source = SourceSettings.of({key: value for key, value in made[3].items() if key != "fault"}).source()
    assert source.answer(Query.from_json(json.loads(query))).to_json() == json.loads(answer)
    assert charges(made[3]["ledger"]) == 1


# -- the same apps on a grid in this process ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _some_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message belongs to a run; outside of Flower's processes there is none."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """As much of a Flower grid as the transport uses; ``nodes`` maps a number to its app and its settings."""

    def __init__(self, nodes: dict[int, tuple[Callable[[Message, Context], Message | None], dict[str, Any]]]) -> None:
        self.nodes, self.ids, self.ready = nodes, itertools.count(1), dict[str, Message]()

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = []
        for message in messages:
            name = f"message-{next(self.ids)}"
            message.metadata.__dict__["_message_id"] = name
            app, config = self.nodes[message.metadata.dst_node_id]
            context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
            reply = app(message, context)
            if reply is not None:
                self.ready[name] = reply
            sent.append(name)
        return sent

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [self.ready.pop(name) for name in list(names) if name in self.ready]


def transport(nodes: dict[int, Any], **options: Any) -> FlowerTransport:
    grid: Any = Grid(nodes)
    return FlowerTransport(grid, **({"sources": len(nodes), "timeout": 0.3, "poll": 0.01} | options))


def spoiled(how: Callable[[Message], Message | None]) -> Callable[[Message, Context], Message | None]:
    """A client that states its terms and then answers as ``how`` does."""
    app = client_app()

    def call(message: Message, context: Context) -> Message | None:
        return app(message, context) if message.metadata.message_type == "query.terms" else how(message)

    return call


def test_apps_and_sources_agree(tmp_path: Path) -> None:
    nodes = {10 + place: (client_app(), settings(tmp_path, place)) for place in range(3)}
    for method in (SignedGap(), AccT()):
        found = Calibrator(budget=BUDGET, method=method).run(transport(nodes), run_id=method.name)
        expected = Calibrator(budget=BUDGET, method=method).run(here(tmp_path, 3), run_id=method.name)
        assert found == expected
        for place in range(3):
            (tmp_path / f"clinic-{place}.db").unlink()
            (tmp_path / "here" / f"clinic-{place}.db").unlink()


FAULTS: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "silent": (lambda _: None, "did not answer within"),
    "empty": (lambda message: Message(RecordDict(), reply_to=message), "cannot be read"),
    "no answer": (lambda message: Message(content({"answer": {"values": ["x"]}}), reply_to=message), "cannot be read"),
    "an error": (lambda message: Message(Error(code=0, reason="secret"), reply_to=message), "did not answer within"),
    "refuses": (lambda message: Message(content({"refused": "budget"}), reply_to=message), "cannot afford"),
    "unknown code": (lambda message: Message(content({"refused": "secret"}), reply_to=message), "it refuses."),
    "no code": (lambda message: Message(content({"refused": ["secret"]}), reply_to=message), "it refuses."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_and_tell_nothing(tmp_path: Path, fault: str) -> None:
    how, reason = FAULTS[fault]
    nodes = {place: (client_app(), settings(tmp_path, place)) for place in range(3)}
    nodes[2] = (spoiled(how), nodes[2][1])  # type: ignore[assignment]
    with pytest.raises(CalibrationError, match=reason) as raised:
        Calibrator(budget=BUDGET).run(transport(nodes), run_id="a")
    assert "clinic-2" in str(raised.value)
    assert "secret" not in str(raised.value)
    found = Calibrator(budget=BUDGET, quorum=0.6).run(transport(nodes), run_id="a")
    silent = Without(here(tmp_path, 3), {"clinic-2"})
    assert found.temperature == Calibrator(budget=BUDGET, quorum=0.6).run(silent, run_id="a").temperature
    assert reason in " ".join(found.notes)
    assert charges(tmp_path / "clinic-0.db") == 2  # the first question was asked twice and charged once


def test_nobody_answers_in_anothers_name(tmp_path: Path) -> None:
    nodes = {place: (client_app(), settings(tmp_path, place)) for place in range(3)}
    honest = SourceSettings.of(nodes[1][1])

    def how(message: Message) -> Message:
        query = Query.from_json((value_of(message) or {})["query"])
        return Message(content({"answer": honest.source().answer(query).to_json()}), reply_to=message)

    nodes[2] = (spoiled(how), nodes[2][1])  # type: ignore[assignment]
    with pytest.raises(CalibrationError, match="in another's name"):
        Calibrator(budget=BUDGET).run(transport(nodes))


def test_a_reply_to_another_message_is_not_taken(tmp_path: Path) -> None:
    nodes = {place: (client_app(), settings(tmp_path, place)) for place in range(2)}
    kept: list[Message] = []

    def late(message: Message) -> Message | None:
        """Always one question behind."""
        kept.append(client_app()(message, Context(1, 1, nodes[1][1], RecordDict(), {})))
        return kept[-2] if len(kept) > 1 else None

    grid = dict(nodes) | {1: (spoiled(late), nodes[1][1])}
    found = Calibrator(budget=BUDGET, quorum=0.5).run(transport(grid), run_id="a")
    alone = Calibrator(budget=BUDGET, quorum=0.5).run(Without(here(tmp_path, 2), {"clinic-1"}), run_id="a")
    assert found.temperature == alone.temperature
    assert charges(tmp_path / "clinic-1.db") == 2  # it answered, too late: it stays charged


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"logits": "nowhere.npz"}, "settings"),
        ({"epsilon": -1.0}, "settings"),
        ({"colour": "red"}, "settings"),
        ({"probs": "both.npz"}, "settings"),
        ({"ledger": "sqlite://"}, "ledger"),
    ],
)
def test_a_source_with_wrong_settings_says_a_code_only(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    nodes = {0: (client_app(), settings(tmp_path, 0) | change)}
    with pytest.raises(CalibrationError) as raised:
        transport(nodes).terms()
    assert REFUSALS[code] in str(raised.value)
    assert "nowhere" not in str(raised.value)


class Panic(BaseException):
    """What libraries in Rust raise (pyo3): no `Exception`."""


@pytest.mark.parametrize("kind_of_error", [RuntimeError, Panic])
def test_the_text_of_an_exception_stays_at_home(tmp_path: Path, kind_of_error: type[BaseException]) -> None:
    def source_of(_: Context) -> Source:
        raise kind_of_error("the name of a patient: Zacharias")

    app: ClientApp = client_app(source_of)
    for kind in ("terms", "answer"):
        query = {"id": "q", "statistic": {"kind": "gap"}, "price": {"noise": "laplace", "amount": 0.1}}
        message = Message(content({"query": query}), dst_node_id=1, message_type=f"query.{kind}")
        reply = app(message, Context(1, 1, settings(tmp_path, 0), RecordDict(), {}))
        assert value_of(reply) == {"refused": "failed"}


@pytest.mark.parametrize("query", [None, 3, {}, {"id": "x"}, {"id": "", "statistic": {"kind": "gap"}}])
def test_a_question_that_cannot_be_read_costs_nothing(tmp_path: Path, query: object) -> None:
    config = settings(tmp_path, 0)
    message = Message(content({"query": query}), dst_node_id=1, message_type="query.answer")
    reply = client_app()(message, Context(1, 1, config, RecordDict(), {}))
    assert value_of(reply) == {"refused": "unreadable"}
    assert not Path(config["ledger"]).exists()


def test_terms_that_cannot_be_read_do_not_count(tmp_path: Path) -> None:
    good = settings(tmp_path, 0)
    stated = SourceSettings.of(good).source().terms.to_json()
    for change in ({"source": 3}, {"source": ""}, {"left": "x"}, {"neighbours": "none"}, {"extra": 1}, {"classes": -1}):

        def garbled(message: Message, _: Context, change: dict[str, Any] = change) -> Message:
            return Message(content({"terms": stated | change}), reply_to=message)

        with pytest.raises(CalibrationError, match="1 of 2 sources stated their terms"):
            transport({0: (client_app(), good), 1: (garbled, {})}).terms()
        kept = transport({0: (client_app(), good), 1: (garbled, {})}, at_least=1).terms()
        assert [one.source for one in kept] == ["clinic-0"]
        assert kept == [Terms.from_json(stated)]


def test_too_few_nodes_end_the_run_before_anything_is_asked(tmp_path: Path) -> None:
    nodes = {0: (client_app(), settings(tmp_path, 0))}
    with pytest.raises(CalibrationError, match=r"1 of 2 sources stated their terms .* 2 are needed"):
        Calibrator(budget=BUDGET).run(transport(nodes, sources=2))
    assert charges(tmp_path / "clinic-0.db") == 0


def test_the_settings_of_a_run_are_checked() -> None:
    run = RunSettings.of({"sources": 3, "epsilon": 1.0, "run-id": "a"})
    assert run.run_id == "a"
    assert run.calibrator == Calibrator(budget=BUDGET)
    with pytest.raises(ValueError, match="has no field 'colour'"):
        RunSettings.of({"sources": 3, "epsilon": 1.0, "colour": "red"})
    with pytest.raises(ValueError, match="no method 'magic'"):
        RunSettings.of({"sources": 3, "epsilon": 1.0, "method": "magic"})


def test_without_flower_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tacit.calibrate.federated") or name == "flwr"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "flwr" or name.startswith("flwr."):
            raise ImportError(f"No module named {name!r}")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'tacit\[federated\]'"):
        importlib.import_module("tacit.calibrate.federated")


@pytest.mark.parametrize(("took", "waits"), [(0.01, 0.24), (0.25, 0.0), (0.3, 0.2), (2.9, 0.1)])
def test_replies_leave_after_whole_ticks(monkeypatch: pytest.MonkeyPatch, took: float, waits: float) -> None:
    """However long an answer took, and also where it ends in an error: drawing noise must not be timed."""
    from tacit.calibrate.federated import _client

    now: list[float] = [100.0]
    slept: list[float] = []

    def fails() -> None:
        with _client._whole_ticks():
            now[0] += took
            raise KeyError

    monkeypatch.setattr(_client, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    with pytest.raises(KeyError):
        fails()
    assert slept == [pytest.approx(waits, abs=1e-9)]
