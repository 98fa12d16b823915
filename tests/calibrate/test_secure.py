"""One noise for all sources: shares that are given once, their totals, and SecAgg+ with sources that drop out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.task_identity import TaskIdentity
from network import HANG, Network

from tacit.calibrate import (
    AccT,
    CalibrationError,
    Calibrator,
    Cells,
    Gap,
    GapCurve,
    HistogramBinning,
    InProcess,
    OneSource,
    Price,
    Query,
    Refused,
    Result,
    Setting,
    Shares,
    SignedGap,
    Simulation,
    Source,
    Terms,
    reference,
)
from tacit.calibrate.federated import FlowerTransport, client_app
from tacit.calibrate.federated._masks import stretched
from tacit.calibrate.federated._messages import content
from tacit.privacy import Budget, BudgetExceeded, Ledger, mechanisms

LOGITS, LABELS = reference(0.1)
PURE, SECURE = Budget(1.0, 0.0), "secure-aggregation"


def deal(count: int, rows: int = 100, **options: Any) -> list[Source]:
    options = {"budget": PURE, "trust": SECURE, "size": rows} | options
    places = [slice(i * rows, (i + 1) * rows) for i in range(count)]
    return [
        Source(f"clinic-{i}", logits=LOGITS[r], labels=LABELS[r], **({"ledger": Ledger("sqlite://")} | options))
        for i, r in enumerate(places)
    ]


def ask(shares: Shares, amount: float = 0.5, name: str = "q") -> Query:
    return Query(id=name, statistic=Gap(), price=Price(noise="laplace", amount=amount), shares=shares)


def test_shares_travel_and_queries_without_them_are_as_they_were() -> None:
    query = ask(Shares(needed=4, honest=2))
    assert Query.from_json(json.loads(query.text)) == query
    assert "shares" not in replace(query, shares=None).to_json()
    terms = deal(1)[0].terms
    assert Terms.from_json(terms.to_json()) == terms
    assert (terms.trust, terms.colluding) == (SECURE, 0.5)
    old = {key: value for key, value in terms.to_json().items() if key not in ("trust", "colluding")}
    assert Terms.from_json(old).trust == "local"
    for bad in ({"needed": 1, "honest": 1}, {"needed": 3, "honest": 4}, {"needed": 3, "honest": 2, "steps": 7},
                {"needed": 3, "honest": 2, "bits": 31}, {"needed": 3.5, "honest": 2}):  # fmt: skip
        with pytest.raises(ValueError, match=r"[a-z]"):
            Shares(**bad)  # type: ignore[arg-type]


def test_totals_are_centred() -> None:
    shares = Shares(needed=2, honest=1, bits=8)
    assert [shares.centred(value % 256) for value in (-128, -1, 0, 1, 127)] == [-128, -1, 0, 1, 127]


def test_a_share_is_charged_given_once_and_refused_on_other_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = deal(1)
    query = ask(Shares(needed=4, honest=2))
    monkeypatch.setattr(mechanisms, "share", lambda total, _: tuple(total.total))  # to see what it is a share of
    gap = Gap().contributions(source._outputs)[:, 0]
    assert source.share(query) == (int((gap * 256).round().sum()) % (1 << 24),)
    assert source.spent.epsilon == pytest.approx(0.5)
    with pytest.raises(Refused, match="given once"):
        source.share(query)
    with pytest.raises(Refused, match=r"50% of the sources colluding.*3 honest ones of 4"):
        source.share(ask(Shares(needed=4, honest=3), name="r"))
    with pytest.raises(Refused, match="asked for the other"):
        source.answer(query)
    with pytest.raises(Refused, match="asked for the other"):
        deal(1, trust="local")[0].share(query)
    with pytest.raises(BudgetExceeded):
        source.share(ask(Shares(needed=4, honest=2), amount=0.9, name="s"))
    assert source.spent.epsilon == pytest.approx(0.5)
    assert str(source.share(ask(Shares(needed=4, honest=2), name="s")))  # what could not be afforded was not begun


def test_the_ledger_says_what_is_assumed() -> None:
    from tacit.report import card

    (source,) = deal(1)
    source.share(ask(Shares(needed=4, honest=2)))
    assert "secure aggregation" in str(card(source.ledger))


@pytest.mark.parametrize("budget", [PURE, Budget(1.0, 1e-6)])
@pytest.mark.parametrize("method", [SignedGap(), AccT(iterations=3), HistogramBinning()], ids=str)
def test_a_run_with_one_noise_for_all(method: Any, budget: Budget) -> None:
    sources = deal(8, rows=400, budget=budget)
    result = Calibrator(budget=budget, method=method, trust=SECURE).run(sources)
    assert (result.trust, result.honest, result.private) == (SECURE, 4, True)
    assert "at least 4 of the sources" in str(result.guarantee)
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result
    for one in sources:
        assert one.spent.epsilon == pytest.approx(1.0)
    if result.confidences is None:
        assert 1.1 < result.temperature < 2.2  # 1.5 without noise, of which there is little


def test_its_noise_is_that_of_the_simulation() -> None:
    """200 cells of one total: their spread is sqrt(2 n / h) scales, of n = 6 shares where h = 3 are enough."""
    sources = deal(6, rows=10)
    shares, statistic = Shares(needed=6, honest=3, steps=8), Cells(bins=100)
    exact = np.sum([one._outputs.correct.numpy().sum() for one in sources])
    query = Query(id="q", statistic=statistic, price=Price(noise="laplace", amount=1.0), shares=shares)
    total = InProcess(sources).total(query)
    found = np.array([shares.centred(value) / 8 for value in total.values])
    setting = Setting(sources=6, samples=60, budget=PURE, noise="laplace", aggregate="secure", honest=3)
    assert setting.noise_std(statistic, 1) == pytest.approx(2.0)
    assert abs(found[:100].sum() - exact) < 6 * 2.0 * 10
    assert 1.2 < np.std(found) < 3.0  # local noise would be 3.5; the tails are heavy, and 60 of the cells hold one each


def test_one_noise_is_better_than_many() -> None:
    """The seeds are fixed. The noise is a fifth of the local one, with half of the fifty sources colluding."""
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=50, samples=30, trials=100)
    for epsilon in (0.2, 0.5):
        budget = Budget(epsilon, 0.0)
        setting = Setting(sources=50, samples=1500, budget=budget, noise="laplace", aggregate="secure", honest=25)
        secure = simulation.run_in(setting, SignedGap()).temperature.log().std()
        assert float(secure) < 0.7 * float(simulation.run(SignedGap(), budget=budget).temperature.log().std())


def test_what_cannot_be_is_said_before_anything_is_charged() -> None:
    for trust, other in ((SECURE, "local"), ("local", SECURE)):
        sources = deal(3, trust=trust)
        with pytest.raises(CalibrationError, match=f"trust {trust}, and {other} is asked for"):
            Calibrator(budget=PURE, trust=other, cautious=False).run(sources)  # type: ignore[arg-type]
        assert sources[0].spent.epsilon == 0
    with pytest.raises(CalibrationError, match="fewer than two"):
        Calibrator(budget=PURE, trust=SECURE).run(deal(1))
    with pytest.raises(CalibrationError, match="disagree on trust"):
        Calibrator(budget=PURE).run([*deal(1), replace_name(deal(1, trust="local")[0])])
    for make in (
        lambda: Calibrator(budget=PURE, trust="luck"),  # type: ignore[arg-type]
        lambda: Calibrator(budget=PURE, trust=SECURE, method=OneSource()),
        lambda: deal(1, colluding=1.0),
        lambda: deal(1, trust="luck"),
    ):
        with pytest.raises(ValueError, match=r"[a-z].*\."):
            make()


def replace_name(source: Source) -> Source:
    source.name = "other"
    return source


def test_sources_that_drop_out_are_named_and_too_few_end_the_run() -> None:
    sources = deal(5, rows=400)
    poor = Source("poor", logits=LOGITS[:9], labels=LABELS[:9], budget=PURE, ledger=Ledger("sqlite://"), trust=SECURE,
                  size=9)  # fmt: skip
    poor.share(ask(Shares(needed=4, honest=2), amount=0.9))
    result = Calibrator(budget=PURE, trust=SECURE, quorum=0.8, cautious=False).run([*sources, poor])
    assert "poor was left out" in str(result)
    assert result.honest == 3  # of five that are needed, two may collude
    with pytest.raises(CalibrationError, match="cannot afford"):
        Calibrator(budget=PURE, trust=SECURE, cautious=False).run([*deal(5), poor])


# Flower


def test_masks_are_uniform_and_need_the_whole_seed() -> None:
    first, second = stretched(b"a" * 32, 2**32, [(1,), (20_000,)])
    assert (first.shape, second.shape, second.dtype) == ((1,), (20_000,), np.int64)
    assert second.min() >= 0
    assert second.max() < 2**32
    assert abs(second.mean() / 2**31 - 1) < 6 / math.sqrt(3 * 20_000)
    # Flower's own stretches 32 bits: these two seeds have the same exclusive or, and so the same masks
    one, other = bytes([1, 0, 0, 0] + [0] * 28), bytes([0] * 28 + [1, 0, 0, 0])
    shape = [(4,)]
    assert pseudo_rand_gen(one, 2**32, shape)[0].tolist() == pseudo_rand_gen(other, 2**32, shape)[0].tolist()
    assert stretched(one, 2**32, shape)[0].tolist() != stretched(other, 2**32, shape)[0].tolist()
    for name in (
        "client.mod.secure_aggregation.secaggplus_mod",
        "server.workflow.secure_aggregation.secaggplus_workflow",
    ):
        assert import_module(f"flwr.{name}").pseudo_rand_gen is stretched
    with pytest.raises(ValueError, match="power of two"):
        stretched(b"a", 1000, shape)


@pytest.fixture(autouse=True)
def _some_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message belongs to a run; outside of Flower's processes there is none."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def settings(folder: Path, place: int, rows: int = 300, **options: Any) -> dict[str, Any]:
    path = folder / f"clinic-{place}.npz"
    part = slice(place * rows, (place + 1) * rows)
    np.savez(path, logits=LOGITS[part].numpy(), labels=LABELS[part].numpy())
    return {
        "name": f"clinic-{place}",
        "logits": str(path),
        "ledger": str(folder / f"clinic-{place}.db"),
        "epsilon": 1.0,
        "size": rows,
        "seed": place,
        "trust": SECURE,
    } | options


class Grid:
    """A grid whose nodes are apps in this process, each with a state that lasts; some fall silent at a stage."""

    def __init__(self, nodes: dict[int, dict[str, Any]], silent: dict[int, str] | None = None) -> None:
        self.nodes, self.silent, self.seen = nodes, silent or {}, list[Message]()
        self.apps = {node: client_app() for node in nodes}
        self.states = {node: RecordDict() for node in nodes}
        self.ready: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            name = f"m{len(self.ready)}-{message.metadata.dst_node_id}"
            message.metadata.__dict__["_message_id"] = name
            self.ready[name] = self._one(message)
            names.append(name)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [self.ready.pop(name) for name in list(names) if name in self.ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        del timeout
        return [self._one(message) for message in list(messages)]

    def _one(self, message: Message) -> Message:
        message = deepcopy(message)  # on the wire everybody gets an object of their own
        node = message.metadata.dst_node_id
        configs = message.content.config_records.get("secaggplus_configs", {})
        if node in self.silent and configs.get("stage") == self.silent[node]:
            return Message(Error(code=0, reason="gone"), reply_to=message)
        context = Context(run_id=1, node_id=node, node_config=self.nodes[node], state=self.states[node], run_config={})
        message.metadata.__dict__.setdefault("_message_id", "m")
        try:
            reply = self.apps[node](message, context)
        except Exception as error:  # as Flower does
            reply = Message(Error(code=0, reason=str(error)), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = node
        self.seen.append(reply)
        return reply


def transport(grid: Grid) -> FlowerTransport:
    return FlowerTransport(grid, sources=len(grid.nodes), timeout=5, poll=0.01)  # type: ignore[arg-type]


def test_secagg_gives_the_total_that_one_process_gives(tmp_path: Path) -> None:
    nodes = {11 + place: settings(tmp_path, place) for place in range(4)}
    grid = Grid(nodes)
    found = Calibrator(budget=PURE, trust=SECURE).run(transport(grid), run_id="a")
    here = deal(4, rows=300)
    for place, one in enumerate(here):
        one.seed = place
    expected = Calibrator(budget=PURE, trust=SECURE).run(here, run_id="a")
    assert found == expected
    assert found.seeded
    assert found.queries == 3
    for one in nodes.values():
        assert Ledger(one["ledger"], create=False).spent(one["name"]).epsilon == pytest.approx(1.0)
    with pytest.raises(CalibrationError, match="Fewer than 4 of 4"):  # a share is given once: nothing is replayed
        Calibrator(budget=PURE, trust=SECURE).run(transport(Grid(nodes)), run_id="a")


def test_secagg_with_the_whole_budget_in_one_question(tmp_path: Path) -> None:
    nodes = {11 + place: settings(tmp_path, place, epsilon=0.3) for place in range(4)}
    budget = Budget(0.3, 0.0)
    calibrator = Calibrator(budget=budget, trust=SECURE, method=GapCurve(steps=1), cautious=False)
    found = calibrator.run(transport(Grid(nodes)), run_id="a")
    here = deal(4, rows=300, budget=budget)
    for place, one in enumerate(here):
        one.seed = place
    assert found == calibrator.run(here, run_id="a")
    assert (found.queries, found.honest, found.epsilon) == (1, 2, 0.3)
    for one in nodes.values():
        assert Ledger(one["ledger"], create=False).spent(one["name"]).epsilon == pytest.approx(0.3)


def test_secagg_survives_a_source_that_drops_out_after_the_keys(tmp_path: Path) -> None:
    nodes = {11 + place: settings(tmp_path, place) for place in range(4)}
    calibrator = Calibrator(budget=PURE, trust=SECURE, quorum=0.75, cautious=False)
    found = calibrator.run(transport(Grid(nodes, {12: "collect_masked_vectors"})), run_id="a")
    here = [one for place, one in enumerate(deal(4, rows=300)) if place != 1]
    for one in here:
        one.seed = int(one.name[-1])

    class Without(InProcess):
        def terms(self) -> list[Terms]:
            return [source.terms for source in deal(4, rows=300)]

    expected = calibrator.run(Without(here), run_id="a")
    assert found.temperature == expected.temperature
    assert "clinic-1 was left out" in str(found)
    assert found.honest == 2
    strict = Calibrator(budget=PURE, trust=SECURE, cautious=False)
    with pytest.raises(CalibrationError, match=r"Fewer than 4 of 4.*stays charged"):
        strict.run(transport(Grid(nodes, {12: "collect_masked_vectors"})), run_id="b")


def test_no_share_leaves_without_a_mask(tmp_path: Path) -> None:
    nodes = {11 + place: settings(tmp_path, place) for place in range(3)}
    grid = Grid(nodes)
    query = ask(Shares(needed=3, honest=1))
    bare = Message(content({"query": query.to_json()}), dst_node_id=11, message_type="train")
    reply = grid._one(bare)
    assert reply.has_error()
    assert reply.error.reason == "unmasked"
    direct = Message(content({"query": query.to_json()}), dst_node_id=11, message_type="query.answer")
    assert "refused" in str(grid._one(direct).content)
    assert not Path(nodes[11]["ledger"]).exists() or not Ledger(nodes[11]["ledger"]).spent("clinic-0").epsilon
    # a server that sets the protocol up for fewer sources than the question counts on gets nothing
    other = transport(grid)
    other.terms()
    lax = replace(query, shares=Shares(needed=2, honest=1))
    import tacit.calibrate.federated._transport as module

    real = module.secure_total
    try:
        module.secure_total = lambda grid_, names, _, shares, timeout: real(  # type: ignore[assignment]
            grid_, names, query, shares, timeout
        )
        with pytest.raises(CalibrationError, match="Fewer than 2"):
            other.total(lax)
    finally:
        module.secure_total = real
    assert all(not reply.has_error() or reply.error.reason in ("unmasked", "refused") for reply in grid.seen)


@pytest.mark.slow
def test_secagg_over_real_processes_with_a_drop_out(tmp_path: Path) -> None:
    """Four supernodes and a superlink; one source has no budget for the question and drops out when it is asked."""
    made = [settings(tmp_path, place) for place in range(4)]
    made[3]["epsilon"] = 0.25
    with Network(tmp_path) as network:
        for one in made:
            network.start_node(one["name"], one)
        status, found = network.run(
            sources=4, trust=SECURE, quorum=0.75, cautious=False, epsilon=1.0, run_id="a", timeout=HANG
        )
        logs = network.log("link")
    assert status == "finished:completed"
    assert (found["trust"], found["honest"], found["seeded"]) == (SECURE, 2, True)
    assert any("clinic-3 was left out" in note for note in found["notes"])
    for one in made[:3]:
        assert Ledger(one["ledger"], create=False).spent(one["name"]).epsilon == pytest.approx(1.0)
        assert one["logits"] not in logs
    assert Ledger(made[3]["ledger"], create=False).spent("clinic-3").epsilon == 0
