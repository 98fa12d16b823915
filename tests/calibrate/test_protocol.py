"""The searches, the calibrator over real sources, and the simulation that shares them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tacit.calibrate import (
    ECET,
    METHODS,
    NLLT,
    AccT,
    Answer,
    CalibrationError,
    Calibrator,
    Forecast,
    GapCurve,
    HistogramBinning,
    InProcess,
    Method,
    Nothing,
    OneSource,
    Platt,
    Query,
    Refusal,
    Setting,
    SignedGap,
    Simulation,
    Source,
    Terms,
    ece,
    forecast,
    simulate,
)
from tacit.calibrate._intervals import bracket, ece_interval, noise_quantile
from tacit.calibrate._outputs import Outputs
from tacit.calibrate._search import Ask, drive
from tacit.calibrate._simulation import reference
from tacit.privacy import Budget, Ledger, Neighbours

LOGITS, LABELS = reference(0.1)
FREE, PURE = Budget(math.inf, 0.0), Budget(1.0, 0.0)
ASKING: list[Method] = [
    SignedGap(steps=2), SignedGap(), GapCurve(steps=1), GapCurve(steps=2), Platt(), AccT(), NLLT(), ECET(),
    HistogramBinning(),
]  # fmt: skip


def sources_of(rows: Sequence[Any], **options: Any) -> list[Source]:
    """One source per entry of row numbers, in one ledger in memory."""
    options = {"budget": PURE, "ledger": Ledger("sqlite://")} | options
    return [Source(f"s{i}", logits=LOGITS[r], labels=LABELS[r], **options) for i, r in enumerate(rows)]


def slices(sources: int, samples: int) -> list[slice]:
    return [slice(i * samples, (i + 1) * samples) for i in range(sources)]


def run(method: Method, sources: list[Source], budget: Budget = PURE, **options: Any) -> Any:
    return Calibrator(budget=budget, method=method, cautious=False, **options).run(sources)


# Searches


def test_golden_section_without_noise_is_a_dense_grid_search() -> None:
    logits, labels = LOGITS[:600], LABELS[:600]
    grid = np.arange(0.5, 3.0, 5e-4)
    data = Outputs.of(logits=logits, labels=labels)
    gap = [abs(float((data.correct - data.confidence(float(t))).sum())) for t in grid]
    loss = [float(data.loss(float(t)).clamp(max=10).sum()) for t in grid]
    sources = sources_of(slices(3, 200), budget=FREE)
    assert run(AccT(iterations=20), sources, FREE).temperature == pytest.approx(grid[np.argmin(gap)], abs=1e-3)
    assert run(NLLT(iterations=20), sources, FREE).temperature == pytest.approx(grid[np.argmin(loss)], abs=1e-3)
    signed = run(SignedGap(steps=8), sources, FREE).temperature
    assert signed == pytest.approx(grid[np.argmin(gap)], abs=0.02)  # its own grid has steps of 1/64 in log T
    found = run(ECET(iterations=20), sources, FREE).temperature
    errors = [ece(logits=logits / t, labels=labels) for t in grid[::20]]
    assert ece(logits=logits / found, labels=labels) < min(errors) + 0.005  # the objective has small local minima


@pytest.mark.parametrize(("factor", "end"), [(20.0, 3.0), (0.05, 0.5)])
@pytest.mark.parametrize("method", [AccT(iterations=20), NLLT(iterations=20), SignedGap(steps=4)])
def test_a_temperature_beyond_the_range_ends_at_its_end(method: Method, factor: float, end: float) -> None:
    sources = [Source("s", logits=LOGITS[:200] * factor, labels=LABELS[:200], budget=FREE, size=200)]
    result = run(method, sources, FREE)
    assert result.temperature == pytest.approx(end, abs=1e-3)
    assert "end of the range" in str(result)


@pytest.mark.parametrize("method", ASKING)
@pytest.mark.parametrize("budget", [PURE, Budget(1.0, 1e-6)])
@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
def test_the_number_of_queries_is_what_is_paid_for(method: Method, budget: Budget, neighbours: str) -> None:
    sources = sources_of(slices(2, 40), budget=budget, neighbours=neighbours)
    result = run(method, sources, budget)
    for one in sources:
        charged = [entry for entry in one.ledger.entries(one.subject) if entry.kind == "charge"]
        assert len(charged) == result.queries
        assert one.spent.epsilon == pytest.approx(1.0, rel=1e-9)  # all of it, and no more
    counted = neighbours == "add-remove" and isinstance(method, SignedGap)  # sizes are private there
    expected = {"acc-t": 6, "nll-t": 6, "ece-t": 6, "histogram": 1}
    assert result.queries == (expected.get(method.name) or method_steps(method, counted))
    assert (result.epsilon, result.delta) == (budget.epsilon, budget.delta)


def method_steps(method: Method, counted: bool) -> int:
    if not isinstance(method, SignedGap):
        return 0
    return (method.steps or (2 if counted else 1)) + counted


def test_the_signed_gap_asks_less_where_there_is_more_noise() -> None:
    def steps(samples: int, epsilon: float) -> int:
        setting = Setting(sources=100, samples=samples, budget=Budget(epsilon, 0.0), noise="laplace")
        return SignedGap().queries(setting)

    assert [steps(1000, e) for e in (0.1, 2.0, 20.0)] == [1, 2, 3]
    assert steps(100_000, 0.1) == steps(10_000, 1.0) == 3


# The calibrator and its sources


@pytest.mark.parametrize(
    "sources", [sources_of([slice(0, 0)]), sources_of([slice(0, 1)]), sources_of([slice(0, 0), slice(0, 3)])]
)
def test_empty_and_tiny_sources(sources: list[Source]) -> None:
    for method in (AccT(iterations=1), HistogramBinning()):
        fresh = [replace_ledger(one) for one in sources]
        result = run(method, fresh)
        assert 0.5 <= result.temperature <= 3


def replace_ledger(one: Source) -> Source:
    n = len(one._outputs)
    return Source(one.name, logits=LOGITS[:n], labels=LABELS[:n], budget=one.budget)


def test_a_constant_class() -> None:
    logits = torch.zeros(50, 3)
    logits[:, 1] = 4.0
    sources = [Source("s", logits=logits, labels=torch.ones(50, dtype=torch.int64), budget=FREE, size=50)]
    assert run(AccT(iterations=20), sources, FREE).temperature == pytest.approx(0.5, abs=1e-3)
    probs = torch.softmax(run(HistogramBinning(), sources, FREE).apply(logits), 1)
    assert float(probs[:, 1].min()) == pytest.approx(1.0)


def test_sizes_do_not_matter_to_the_sum() -> None:
    """Sources of 1, 200 and 799 samples find what one source of all 1000 finds."""
    sources = sources_of([slice(0, 1), slice(1, 201), slice(201, 1000)], budget=FREE)
    whole = sources_of([slice(0, 1000)], budget=FREE)
    for method in (AccT(), NLLT(), ECET(), SignedGap(), HistogramBinning()):
        parts, together = run(method, sources, FREE), run(method, whole, FREE)
        assert (parts.temperature, parts.confidences) == (together.temperature, together.confidences)


def test_bins_without_a_positive_count_get_their_middle() -> None:
    def answer(_: Any) -> list[torch.Tensor]:
        return [torch.tensor([[1.0, -2.0, 3.0, 9.0, 4.0, -1.0, 0.0, 6.0]], dtype=torch.float64)]

    setting = Setting(sources=1, samples=4, budget=PURE, noise="laplace")
    found = drive(HistogramBinning(bins=4, ask="totals").search(setting), answer).confidences
    assert found is not None
    assert found[0].tolist() == [0.25, 0.375, 0.625, 1.0]  # 1/4; no count: middle; no count: middle; 9/6 is cut
    found = drive(HistogramBinning(bins=4).search(setting), answer).confidences
    assert found is not None
    assert found[0].tolist() == [0.2, 0.375, 1.0, 0.6]  # 1/5; -2 - 1 is no count; 3/3; 9/15


def test_one_source_stays_where_it_is() -> None:
    sources = sources_of(slices(2, 300))
    result = run(OneSource(goal="gap", iterations=20), sources)
    assert not result.private
    assert "not private if shared" in str(result)
    assert sources[0].spent.epsilon == 0
    alone = sources_of([slice(0, 300)], budget=FREE)
    assert result.temperature == pytest.approx(run(AccT(iterations=20), alone, FREE).temperature)


def test_nothing_asks_nothing() -> None:
    sources = sources_of(slices(2, 10))
    result = run(Nothing(), sources)
    assert (result.temperature, result.queries, sources[0].spent.epsilon) == (1.0, 0, 0.0)


def test_a_budget_that_is_too_small_is_not_spent() -> None:
    sources = sources_of(slices(5, 10), size=10)
    result = Calibrator(budget=PURE, method=AccT()).run(sources)
    assert (result.temperature, result.queries, result.epsilon) == (1.0, 0, 0.0)
    assert "too small for this much data" in str(result)
    assert sources[0].spent.epsilon == 0


def test_a_forecast_says_what_it_assumes_and_an_interval_when_it_tells_nothing() -> None:
    rows: dict[str, Any] = {"logits": LOGITS[:8], "labels": LABELS[:8], "size": 8}
    few = [Source(f"s{k}", budget=Budget(0.2, 0.0), seed=k, **rows) for k in range(5)]
    plan = Calibrator(budget=Budget(0.2, 0.0), expected=0.08).plan([source.terms for source in few])
    assert "assuming a classifier of ten classes that is right in 75 % of the cases and 8 points" in plan.reason
    bold = Calibrator(budget=Budget(0.2, 0.0), cautious=False).run(few)
    assert bold.interval is not None
    assert math.log(bold.interval[1] / bold.interval[0]) > 0.9 * math.log(6)
    assert bold.notes[-1] == "The interval says next to nothing: it is most of the range that was searched, 0.5 to 3."
    many = [Source("all", logits=LOGITS, labels=LABELS, budget=Budget(50.0, 0.0), size=len(LABELS), seed=0)]
    assert "next to nothing" not in str(Calibrator(budget=Budget(50.0, 0.0)).run(many))


def test_an_interrupted_run_goes_on_with_the_answers_that_were_given(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "all.db")
    calibrator = Calibrator(budget=PURE, method=AccT(iterations=2), cautious=False)
    with pytest.raises(CalibrationError, match="stays charged"):
        calibrator.run(Faulty(sources_of(slices(2, 20), ledger=ledger), lambda _: None, after=1), run_id="r")
    sources = sources_of(slices(2, 20), ledger=ledger)
    assert sources[0].spent.epsilon == pytest.approx(2 / 3)
    with pytest.raises(CalibrationError, match="cannot afford"):
        calibrator.run(sources)
    found = calibrator.run(sources, run_id="r")
    assert sources[0].spent.epsilon == pytest.approx(1.0)
    assert calibrator.run(sources_of(slices(2, 20), ledger=ledger), run_id="r") == found
    assert sources[0].spent.epsilon == pytest.approx(1.0)


class Faulty(InProcess):
    """Sources of which one does something else from some question on."""

    def __init__(self, sources: list[Source], reply: Any, after: int = 0) -> None:
        super().__init__(sources)
        self.reply, self.after, self.seen = reply, after, 0

    def ask(self, query: Query) -> list[Answer | Refusal]:
        replies = super().ask(query)
        self.seen += 1
        if self.seen > self.after:
            changed = self.reply(replies[-1])
            replies = replies[:-1] + ([changed] if changed is not None else [])
        return replies


FAULTS = {
    "silent": (lambda _: None, "did not answer"),
    "not a number": (lambda a: replace(a, values=(math.nan,)), "finite"),
    "too many": (lambda a: replace(a, values=(1.0, 2.0)), "finite"),
    "another query": (lambda a: replace(a, query="x"), "another question"),
    "refuses": (lambda a: Refusal(source=a.source, reason="no budget."), "no budget"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_source_that_fails_ends_the_run_or_is_left_out_and_named(fault: str) -> None:
    reply, message = FAULTS[fault]
    with pytest.raises(CalibrationError, match=f"s2: .*{message}.*stays charged"):
        run(AccT(), Faulty(sources_of(slices(3, 300), size=300), reply, after=2))  # type: ignore[arg-type]
    sources = sources_of(slices(3, 300), size=300, budget=FREE)
    result = run(AccT(iterations=20), Faulty(sources, reply), FREE, quorum=0.6)  # type: ignore[arg-type]
    assert "s2 was left out" in str(result)
    assert result.interval is None
    others = run(AccT(iterations=20), sources_of(slices(2, 300), budget=FREE), FREE)
    assert result.temperature == pytest.approx(others.temperature)


def test_an_impossible_answer_is_left_out_and_named() -> None:
    reply = lambda a: replace(a, values=(1e9,))  # noqa: E731
    result = run(AccT(iterations=20), Faulty(sources_of(slices(3, 300), size=300, budget=FREE), reply), FREE)  # type: ignore[arg-type]
    others = run(AccT(iterations=20), sources_of(slices(2, 300), budget=FREE), FREE)
    assert "s2 was left out at least once: its answer is impossible" in str(result)
    assert result.temperature == pytest.approx(others.temperature)
    assert result.interval is None
    with pytest.raises(CalibrationError, match=r"larger than its published size allows.*stays charged"):
        run(AccT(), Faulty(sources_of(slices(2, 300), size=300), reply))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "no sources"),
        (sources_of(slices(1, 5)) * 2, "same name"),
        (
            [
                *sources_of(slices(1, 5)),
                Source("x", logits=LOGITS[:5], labels=LABELS[:5], budget=PURE, unit="patient", unit_ids=range(5)),
            ],
            "unit",
        ),
        (sources_of(slices(2, 5), budget=Budget(0.5, 0.0)), "s0 cannot afford 6 answers.*2 of 2.*Nothing was charged"),
        (sources_of(slices(2, 5), budget=Budget(0.5, 1e-6)), "gaussian noise, and laplace is asked for"),
    ],
)
def test_sources_that_cannot_be_asked_are_refused_before_anything_is_charged(
    sources: list[Source], message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        run(AccT(), sources)
    assert all(one.spent.epsilon == 0 for one in sources)


def test_settings_that_make_no_sense() -> None:
    for make in (
        lambda: AccT(low=3, high=1),
        lambda: AccT(iterations=0),
        lambda: SignedGap(steps=0),
        lambda: Calibrator(budget=PURE, level=1.0),
        lambda: OneSource(goal="luck"),  # type: ignore[arg-type]
        lambda: HistogramBinning(bins=0),
        lambda: Calibrator(budget=PURE, quorum=0.0),
        lambda: Calibrator(budget=PURE, aggregate="luck"),  # type: ignore[arg-type]
        lambda: HistogramBinning(ask="luck"),  # type: ignore[arg-type]
        lambda: Calibrator(budget=PURE, method=HistogramBinning(), check=True),
        lambda: Simulation(logits=LOGITS[:10], labels=LABELS[:10], sources=2, samples=5),
        lambda: Simulation(logits=LOGITS, labels=LABELS, sources=2, samples=[1, 2, 3]),
        lambda: reference(0.5),
    ):
        with pytest.raises(ValueError, match=r"[a-z].*\."):
            make()
    own = {"signed-gap", "gap-curve", "platt"}
    assert set(METHODS) == own | {"acc-t", "nll-t", "ece-t", "histogram", "one-source", "nothing"}


# Intervals


def test_the_quantile_of_the_noise_of_many_sources() -> None:
    assert noise_quantile("laplace", 2.0, 1, 0.95) == pytest.approx(-2 * math.log(0.05))
    two = noise_quantile("laplace", 1.0, 2, 0.95)  # P(|X| > x) = (2 + x) e^-x / 2
    assert (2 + two) * math.exp(-two) / 2 == pytest.approx(0.05, rel=1e-4)
    assert noise_quantile("gaussian", 2.0, 9, 0.95) == pytest.approx(6 * stats.norm.ppf(0.975))
    exact, normal = noise_quantile("laplace", 1.0, 100, 0.95), noise_quantile("laplace", 1.0, 101, 0.95)
    assert exact == pytest.approx(normal, rel=0.02)
    assert noise_quantile("laplace", 0.0, 3, 0.9) == 0


def test_intervals_hold_the_temperature_as_often_as_they_say() -> None:
    """The seed is fixed, so this gives the same shares each time."""
    best = run(AccT(iterations=30), sources_of([slice(0, 4000)], budget=FREE), FREE).temperature
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=50, samples=30, trials=200)
    for budget in (Budget(0.3, 0.0), Budget(2.0, 0.0)):
        for method in (SignedGap(), SignedGap(steps=2)):
            found = simulation.run(method, budget=budget).outcome
            assert found.low is not None
            assert found.high is not None
            held = ((found.low <= best) & (best <= found.high)).double().mean()
            assert float(held) > 0.9
        found = simulation.run(AccT(), budget=budget).outcome
        scale = 6 / budget.epsilon
        low, high = bracket(found.asked, noise="laplace", scale=scale, sources=50, low=0.5, high=3.0, level=0.95)
        own = simulation.run(AccT(iterations=20), budget=FREE).temperature  # of the same samples, without noise
        assert float(((low <= own + 1e-3) & (own - 1e-3 <= high)).double().mean()) > 0.95
        assert float((high - low).median()) < 2.5 or budget.epsilon < 1


@pytest.mark.parametrize("sharpness", [0.45, 0.6, 1.6])
def test_the_interval_allows_for_curves_that_are_no_parabola(sharpness: float) -> None:
    logits = LOGITS * sharpness
    whole = [Source("s", logits=logits, labels=LABELS, budget=FREE)]
    best = run(AccT(iterations=30), whole, FREE).temperature
    simulation = Simulation(logits=logits, labels=LABELS, sources=50, samples=30, trials=200)
    found = simulation.run(SignedGap(), budget=Budget(8.0, 0.0)).outcome  # little noise: the model's error is all
    assert found.low is not None
    assert found.high is not None
    assert float(((found.low <= best) & (best <= found.high)).double().mean()) > 0.93


def test_the_interval_of_the_calibration_error_holds_it() -> None:
    rng = np.random.default_rng(3)
    truth = torch.from_numpy(rng.normal(0, 10, 15))
    held = 0
    for _ in range(300):
        noisy = truth + torch.from_numpy(3 * (rng.gamma(20, size=15) - rng.gamma(20, size=15)))
        low, high = ece_interval(noisy, noise="laplace", scale=3.0, sources=20, samples=1000, z=1.96)
        held += low <= float(truth.abs().sum()) / 1000 <= high
    assert held > 0.9 * 300
    sources = sources_of(slices(10, 100), budget=FREE, size=100)
    result = Calibrator(budget=FREE, method=AccT(), cautious=False, check=True).run(sources)
    exact = ece(logits=LOGITS[:1000] / result.temperature, labels=LABELS[:1000])
    assert result.ece_interval == pytest.approx((exact, exact), abs=1e-4)
    assert result.queries == 7


# The simulation


@pytest.mark.parametrize("method", [*ASKING, SignedGap(steps=3)], ids=str)
@pytest.mark.parametrize("budget", [Budget(0.5, 0.0), Budget(2.0, 1e-6)])
@pytest.mark.parametrize("aggregate", ["robust", "sum"])
def test_the_fast_path_is_the_loop_over_sources_given_the_same_noise(
    method: Method, budget: Budget, aggregate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tacit.calibrate._methods._CURVE_NOISE", math.inf)  # a curve whatever the noise
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=3, samples=[20, 7, 13], trials=1, seed=5)
    rows = simulation.assigned[0].split([20, 7, 13])
    sources = [
        Source(f"s{i}", logits=LOGITS[r], labels=LABELS[r], budget=budget, seed=i, size=len(r))
        for i, r in enumerate(rows)
    ]
    recorder = Recorder(sources)
    result = run(method, recorder, budget, aggregate=aggregate)  # type: ignore[arg-type]
    noise = iter(recorder.noise)

    def draw(scale: float, sources: float, shape: tuple[int, ...]) -> torch.Tensor:
        del scale, shape
        return (next(noise) if sources == 1 else next(noise).sum(dim=0))[None]

    fast = simulation.run(method, budget=budget, draw=draw, aggregate=aggregate)
    assert result.seeded
    assert not result.private
    assert float(fast.temperature[0]) == result.temperature
    assert fast.queries == result.queries
    if result.confidences is not None:
        assert fast.outcome.confidences is not None
        assert fast.outcome.confidences[0].tolist() == pytest.approx(list(result.confidences), abs=1e-12)
    assert (result.corrections is not None) == (method == GapCurve(steps=2))
    assert (result.platt is not None) == (fast.outcome.platt is not None)
    if result.platt is not None:
        assert fast.outcome.platt is not None
        assert fast.outcome.platt[0].tolist() == pytest.approx(list(result.platt), abs=1e-9)
    if result.corrections is not None:
        assert fast.outcome.corrections is not None
        assert fast.outcome.corrections[0].tolist() == pytest.approx(list(result.corrections), abs=1e-12)
    rest = torch.ones(len(LABELS), dtype=torch.bool)
    rest[simulation.assigned[0]] = False
    after = ece(logits=result.apply(LOGITS[rest]), labels=LABELS[rest])
    assert float(fast.ece_after[0]) == pytest.approx(after, abs=1e-9 if result.only_temperature else 2e-4)
    assert float(fast.ece_before[0]) == pytest.approx(ece(logits=LOGITS[rest], labels=LABELS[rest]), abs=1e-9)


class Recorder(InProcess):
    """Keeps the noise of every answer: what was answered less what it is."""

    def __init__(self, sources: list[Source]) -> None:
        super().__init__(sources)
        self.noise: list[torch.Tensor] = []

    def ask(self, query: Query) -> list[Answer | Refusal]:
        replies = super().ask(query)
        found = []
        for one, reply in zip(self.sources, replies, strict=True):
            assert isinstance(reply, Answer)
            exact = query.statistic.sum(one._outputs)
            steps = torch.tensor(reply.values, dtype=torch.float64) / exact.grid - torch.tensor(exact.total)
            found.append(steps.round() * exact.grid)
        self.noise.append(torch.stack(found))
        return replies


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_the_summed_noise_has_the_distribution_of_a_sum(noise: Any) -> None:
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=4, samples=1, trials=1)
    drawn = simulation._draw(noise)(1.5, 4, (20_000,)).numpy()
    rng = np.random.default_rng(9)
    each = (rng.laplace if noise == "laplace" else rng.normal)(scale=1.5, size=(4, 20_000)).sum(axis=0)
    assert stats.ks_2samp(drawn, each).pvalue > 1e-6


def test_temperatures_of_their_own_give_the_same_sums_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=2, samples=900, trials=10)
    temperatures = torch.linspace(0.6, 2.9, 3, dtype=torch.float64)[torch.arange(10) % 3]
    monkeypatch.setattr("tacit.calibrate._simulation.CELLS", 50_000)
    monkeypatch.setattr("tacit.calibrate._rows.CELLS", 3_000)
    for method in (AccT(), NLLT(), ECET()):
        asked = Ask(statistic=method.statistic, temperatures=temperatures)
        assert torch.equal(simulation._sums(asked, None), simulation._sums(asked, simulation.assigned))


def test_the_signed_gap_beats_the_golden_section() -> None:
    simulation = Simulation(logits=LOGITS, labels=LABELS, sources=100, samples=10, trials=200)
    for budget in (Budget(0.5, 0.0), PURE, Budget(2.0, 1e-6)):
        ours = simulation.run(SignedGap(), budget=budget).ece_after
        theirs = simulation.run(AccT(), budget=budget, aggregate="sum").ece_after
        assert float(ours.median()) < 0.75 * float(theirs.median())
        assert float(ours.mean()) < 0.8 * float(theirs.mean())


def test_simulate_says_that_it_is_not_private() -> None:
    options: dict[str, Any] = {"logits": LOGITS, "labels": LABELS, "sources": 5, "samples": 20, "trials": 3}
    found = simulate(OneSource(), budget=PURE, **options)
    assert found.note == "seeded: not private"
    assert torch.equal(found.temperature, simulate(OneSource(), budget=PURE, **options).temperature)
    assert torch.equal(simulate(Nothing(), budget=PURE, **options).ece_after, found.ece_before)


def test_a_forecast_depends_on_public_quantities_only() -> None:
    def at(epsilon: float, samples: int = 1000, method: Method | None = None) -> Forecast:
        setting = Setting(sources=100, samples=samples, budget=Budget(epsilon, 0.0), noise="laplace")
        return forecast(method or SignedGap(), setting)

    assert not at(0.01).worth
    assert at(1.0).worth
    assert at(0.01, 10**6).after == pytest.approx(at(10.0, 1000).after, abs=0.01)  # the same relative noise
    assert not at(0.5, method=AccT()).worth  # where the golden section would still do harm
    setting = Setting(sources=2, samples=None, budget=PURE, noise="laplace", neighbours=Neighbours.ADD_REMOVE)
    with pytest.raises(ValueError, match="number of samples"):
        forecast(SignedGap(), setting)


def test_the_reference_classifier_is_as_wrong_as_it_says() -> None:
    for expected in (0.02, 0.05, 0.15):
        logits, labels = reference(expected)
        data = Outputs.of(logits=logits, labels=labels)
        assert float((data.confidence(1.0) - data.correct).mean()) == pytest.approx(expected, abs=1e-3)
        assert float(data.correct.mean()) == pytest.approx(0.75, abs=0.03)


def test_terms_are_what_a_plan_needs() -> None:
    terms = [one.terms for one in sources_of(slices(3, 50), size=50)]
    plan = Calibrator(budget=PURE).plan([Terms.from_json(one.to_json()) for one in terms])
    assert plan.setting.samples == 150
    assert plan.forecast is not None
    assert plan.price is not None
    assert plan.price.amount * plan.queries == pytest.approx(1.0)
