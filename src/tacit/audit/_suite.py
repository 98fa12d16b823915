"""Every audit of the package, registered with what it attacks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tacit import adapt, tune
from tacit.audit import _releases as releases
from tacit.audit import _stage_releases as stage_releases
from tacit.audit import _stages as stages
from tacit.audit._findings import Claim, Finding
from tacit.audit._mechanism import mechanism
from tacit.audit._recorded import Stage, releases_of
from tacit.audit._registry import Effort, audits
from tacit.audit._run import run
from tacit.audit._steps import optimizers, training_step
from tacit.calibrate import GapCells, Price
from tacit.finetune import DPFTRL, DPGD, DPSGD, plan
from tacit.privacy import Budget, Neighbours, events

_RELATIONS = ("add-remove", "replace-one", "zero-out")
_STREAMS = ((1, 1, 1, None), (1, 1, 1, 9), (3, 4, 1, None), (3, 4, 2, None))  # k, separation, blocks, reset
_attack = partial(mechanism, strict=False)


@audits("gaussian", "privacy.mechanisms.gaussian")
def gaussian(effort: Effort) -> Iterator[Finding]:
    trials = effort.trials(500_000)
    for relation in _RELATIONS:
        release = releases.gaussian(1.0, 2, neighbours=relation)
        claim = Claim.of(events.gaussian(1.0, 2), neighbours=relation)
        yield _attack(release, claim, name=f"gaussian, two releases, {relation}", trials=trials)
    noise, bounds = {"gradient": 0.6, "count": 1.5}, {"gradient": 0.7, "count": 0.5}
    claim = Claim.of(events.joint(noise.values()))
    yield _attack(releases.gaussian_blocks(noise, bounds), claim, name="gaussian, two blocks", trials=trials)


@audits("shards", "privacy.mechanisms.GaussianShards", "finetune.ShardedRun._released")
def shards(effort: Effort) -> Iterator[Finding]:
    claim = Claim.of(events.gaussian(1.0))
    yield _attack(releases.shards(1.0), claim, name="gaussian, in three shards", trials=effort.trials(400_000))


@audits("stream", "privacy.mechanisms.GaussianStream")
def streams(effort: Effort) -> Iterator[Finding]:
    trials = effort.trials(150_000)
    for strategy in ("independent", "banded:4", "buffered", "buffered@0.9", "full"):
        for contributions, separation, blocks, reset in _STREAMS:
            event = events.stream(
                1.0, 12, strategy=strategy, contributions=contributions, separation=separation, blocks=blocks
            )
            release = releases.stream(event, neighbours="replace-one", reset=reset)
            name = f"stream, {strategy}, k = {contributions}" + (", two blocks" if blocks > 1 else "")
            name += ", reset" if reset else ""
            yield _attack(release, Claim.of(event, neighbours="replace-one"), name=name, trials=trials)
    cyclic = events.cyclic_poisson(0.7, 8, strategy="toeplitz", bands=4, sample_rate=0.5, momentum=0.9)
    name = "stream, four bands, cyclic Poisson sampling"
    claim = Claim.of(cyclic, delta=1e-2)
    yield _attack(releases.cyclic_poisson(cyclic), claim, name=name, trials=effort.trials(600_000))


@audits("gaussian query", "privacy.mechanisms.gaussian_query")
def gaussian_query(effort: Effort) -> Iterator[Finding]:
    claim = Claim.of(events.gaussian(0.5))
    yield _attack(releases.gaussian_query(0.5), claim, name="gaussian_query", trials=effort.trials(100_000))


@audits("laplace", "privacy.mechanisms.laplace")
def laplace(effort: Effort) -> Iterator[Finding]:
    claim = Claim.of(events.laplace(0.5))
    yield _attack(releases.laplace(0.5), claim, name="laplace", trials=effort.trials(200_000))


@audits("shares", "privacy.mechanisms.share")
def shares(effort: Effort) -> Iterator[Finding]:
    for kind in ("laplace", "gaussian"):
        claim = Claim.of(events.shared_noise(kind, 0.5, 3))
        name = f"shares of one noise, {kind}, the total of three"
        trials = effort.trials(140_000 if kind == "laplace" else 60_000)
        yield _attack(releases.shares(kind, 0.5), claim, name=name, trials=trials)


@audits("noisy max", "privacy.mechanisms.noisy_max")
def noisy_max(effort: Effort) -> Iterator[Finding]:
    claim = Claim.of(events.noisy_max(1.0))
    yield _attack(releases.noisy_max(1.0), claim, name="noisy_max", trials=effort.trials(200_000, least=1_000))


@audits("Poisson step", "privacy.mechanisms.gaussian")
def poisson(effort: Effort) -> Iterator[Finding]:
    event = events.poisson(0.5, events.gaussian(0.5))
    for relation in ("add-remove", "replace-one"):
        claim = Claim.of(event, neighbours=relation, delta=1e-2)
        release = releases.poisson(0.5, 0.5, neighbours=relation)
        name = f"one Poisson step, {relation}"
        yield _attack(release, claim, name=name, trials=effort.trials(1_500_000))
    claim = Claim.of(events.without_replacement(2, 4, events.gaussian(0.5)), neighbours="replace-one", delta=1e-2)
    release, name = releases.without_replacement(2, 4, 0.5), "one step of 2 units of 4, replace-one"
    yield _attack(release, claim, name=name, trials=effort.trials(40_000, least=1_000))


@audits("balls in bins", "privacy.mechanisms.gaussian")
def balls_in_bins(effort: Effort) -> Iterator[Finding]:
    for noise, steps in ((0.5, 3), (1.0, 8)):
        event = events.BallsInBinsDpEvent(noise, steps, 3)
        release, claim = releases.balls_in_bins(event), Claim.of(event, delta=1e-2)
        yield _attack(release, claim, name=f"{steps} steps of 3 bins, add-remove", trials=effort.trials(600_000))


@audits("training steps", "finetune.ConstantNoise.releases")
def training_steps(effort: Effort) -> Iterator[Finding]:
    for name, optimizer in optimizers().items():
        for rate, title in ((1.0, "everybody"), (0.5, "Poisson draw")):
            claim = Claim.of(events.poisson(rate, events.gaussian(0.5)), delta=1e-2)
            release = training_step(optimizer, rate=rate, noise=0.5)
            trials = effort.trials(800_000 if rate < 1 else 100_000)
            yield _attack(release, claim, name=f"a step of {name}, {title}", trials=trials)


@audits("feature statistics", "finetune.Standardise._released")
def feature_statistics(effort: Effort) -> Iterator[Finding]:
    claim = Claim.of(events.gaussian(0.5))
    release = stage_releases.feature_mean(0.5)
    yield _attack(release, claim, name="Standardise, the mean", trials=effort.trials(80_000))


@audits("evaluation", "finetune.Evaluator.__call__")
def evaluation(effort: Effort) -> Iterator[Finding]:
    yield _recorded(stage_releases.evaluation(2.0), "a charged evaluation", effort, subject="held out")
    several = stage_releases.areas(2.0)
    yield _recorded(several, "a charged evaluation of several labels", effort, subject="held out")


@audits("adaptation step", "adapt.NoisyStream.charge")
def adaptation_step(effort: Effort) -> Iterator[Finding]:
    for batchnorm, name in ((False, "a step of Tent, monitor"), (True, "a step of Tent, BatchNorm and monitor")):
        yield _recorded(stage_releases.watched_step(8.0, batchnorm=batchnorm), name, effort)


@audits("calibration source", "calibrate.Source.answer")
def source(effort: Effort) -> Iterator[Finding]:
    for price in (Price(noise="laplace", amount=2.0), Price(noise="gaussian", amount=2.0)):
        claim = Claim(epsilon=2.0) if price.noise == "laplace" else Claim(mu=2.0)
        name = f"an answer of a source, histogram, {price.noise}"
        trials = effort.trials(360_000 if price.noise == "laplace" else 100_000)
        yield _attack(stage_releases.source_answers(price), claim, name=name, trials=trials)
        stage, name = stage_releases.gap_of_source(price.noise), f"an answer of a source, gap, {price.noise}"
        yield _recorded(stage, name, effort, 200_000 if price.noise == "laplace" else 100_000)
    price, name = Price(noise="laplace", amount=2.0), "an answer of a source, gap cells, laplace"
    release = stage_releases.source_answers(price, GapCells)
    yield _attack(release, Claim(epsilon=2.0), name=name, trials=effort.trials(360_000))
    release, name = stage_releases.logit_cells_of_source(price), "an answer of a source, logit cells, laplace"
    yield _attack(release, Claim(epsilon=2.0), name=name, trials=effort.trials(360_000))


@audits("calibration shares", "calibrate.Source.share")
def source_shares(effort: Effort) -> Iterator[Finding]:
    for price in (Price(noise="laplace", amount=2.0), Price(noise="gaussian", amount=2.0)):
        claim = Claim(epsilon=2.0) if price.noise == "laplace" else Claim(mu=2.0)
        name = f"the total of two sources' shares, cells, {price.noise}"
        trials = effort.trials(140_000 if price.noise == "laplace" else 80_000)
        yield _attack(stage_releases.source_shares(price), claim, name=name, trials=trials)


@audits("selection", "tune.noisy_selection", "tune.released")
def selection(effort: Effort) -> Iterator[Finding]:
    yield _recorded(stage_releases.selected(2.0, "winner"), "noisy_selection, winner", effort, 200_000)
    yield _recorded(stage_releases.selected(8.0, "scores"), "noisy_selection, scores", effort)


def _recorded(stage: Stage, name: str, effort: Effort, trials: int = 150_000, **options: Any) -> Finding:
    """An attack on a stage that is run once in either world, and whose sums are then released again and again."""
    release, claim = releases_of(stage, name=name, **options)
    return _attack(release, claim, name=name, trials=effort.trials(trials))


@audits("fine-tuning run", "finetune.ConstantNoise.releases", "finetune.Correlated.releases")
def finetuning(effort: Effort) -> Iterator[Finding]:
    count = effort.trials(3_000)
    for optimizer in (DPGD(steps=4, lr=0.1), DPSGD(batch_size=count // 8, steps=8, lr=0.1)):
        event = plan(optimizer, epsilon=8.0, delta=1e-5, size=count // 2)
        train = stages.finetuning(optimizer, canaries=count, epsilon=8.0)
        yield run(train, count, event, name=f"fit, {optimizer.name}, one run", strict=False)
    optimizer = DPFTRL(batches=6, passes=2, lr=0.1)
    event = plan(optimizer, epsilon=8.0, delta=1e-5, size=count, neighbours="zero-out")
    train = stages.finetuning(optimizer, canaries=count, epsilon=8.0, neighbours="zero-out", blank=True)
    yield run(train, count, event, neighbours="zero-out", name="fit, DPFTRL, one run", strict=False)


@audits("own loop", "finetune.ConstantNoise.releases")
def own_loop(effort: Effort) -> Iterator[Finding]:
    count = effort.trials(1_000, least=200)
    event = plan(DPSGD(batch_size=count, steps=4, lr=0.1), epsilon=8.0, delta=1e-5, size=count, neighbours="zero-out")
    train = stages.own_loop(canaries=count, epsilon=8.0, batch_size=count, steps=4)
    yield run(train, count, event, neighbours="zero-out", name="make_private, one run", strict=False)


@audits("adaptation run", "adapt.NoisyStream.charge")
def adaptation(effort: Effort) -> Iterator[Finding]:
    count = effort.trials(1_000, least=100)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 5))
    rows = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    form = adapt.DP(8.0, 1e-5, clip=1e-3, neighbours=Neighbours.ZERO_OUT)
    for make in (adapt.Tent, adapt.EATA, adapt.SAR, adapt.DeYO, adapt.COME):
        train = stages.adaptation(make, model, rows, privacy=form)
        event = form.event(form.noise_multiplier())
        yield run(train, count, event, neighbours="zero-out", name=f"{make.__name__}, one stream", strict=False)
    normalised = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)).eval()
    train = stages.adaptation(adapt.Tent, normalised, rows, privacy=form, statistics="private")
    yield run(train, count, event, neighbours="zero-out", name="Tent, private statistics, one stream", strict=False)


@audits("search", "tune.carried_out", "tune.released")
def searches(effort: Effort) -> Iterator[Finding]:
    """Whole searches. Those that claim a mere (epsilon, delta) have a delta so small that one run can speak of it."""
    count, budget, strict = effort.trials(3_000, least=600), Budget(8.0, 1e-5), Budget(8.0, 1e-13)
    methods: tuple[tuple[Any, dict[str, Any]], ...] = (
        (tune.linear_scaling, {}),
        (tune.random_search, {"trials": 2}),
        (tune.grid_search, {"points": 2}),
    )
    for method, options in methods:
        train = stages.search(method, canaries=count, budget=budget, **options)
        yield run(train, count, Claim(mu=budget.mu), name=f"{method.__name__}, whole search", strict=False)
    for method in (tune.repeat_and_select, tune.dp_hypo, tune.subset_search):
        train = stages.search(method, canaries=count, budget=strict, mean=2.0)
        yield run(train, count, strict, name=f"{method.__name__}, whole search", strict=False)
