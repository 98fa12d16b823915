"""Every audit of the package, registered with what it attacks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from tacit import adapt, tune
from tacit.audit import _releases as releases
from tacit.audit import _stage_releases as stage_releases
from tacit.audit import _stages as stages
from tacit.audit._findings import Claim, Finding
from tacit.audit._mechanism import mechanism
from tacit.audit._registry import REGISTRY, Effort, audits
from tacit.audit._run import run
from tacit.audit._steps import optimizers, training_step
from tacit.calibrate import Price
from tacit.finetune import DPFTRL, DPGD, DPSGD, plan
from tacit.privacy import Budget, Neighbours, events

_RELATIONS = ("add-remove", "replace-one", "zero-out")
_STREAMS = ((1, 1, 1, None), (1, 1, 1, 5), (3, 4, 1, None), (3, 4, 2, None))  # k, separation, blocks, reset
_attack = partial(mechanism, strict=False)


@audits("gaussian", "privacy.mechanisms.gaussian")
def gaussian(effort: Effort) -> Iterator[Finding]:
    trials = effort.trials(1_000_000)
    for relation in _RELATIONS:
        release = releases.gaussian(1.0, 2, neighbours=relation)
        claim = Claim.of(events.gaussian(1.0, 2), neighbours=relation)
        yield _attack(release, claim, name=f"gaussian, two releases, {relation}", trials=trials)
    noise, bounds = {"gradient": 0.6, "count": 1.5}, {"gradient": 0.7, "count": 0.5}
    claim = Claim.of(events.joint(noise.values()))
    yield _attack(releases.gaussian_blocks(noise, bounds), claim, name="gaussian, two blocks", trials=trials)


@audits("stream", "privacy.mechanisms.GaussianStream")
def streams(effort: Effort) -> Iterator[Finding]:
    trials = effort.trials(300_000)
    for strategy in ("independent", "banded:4", "buffered", "full"):
        for contributions, separation, blocks, reset in _STREAMS:
            event = events.stream(
                1.0, 12, strategy=strategy, contributions=contributions, separation=separation, blocks=blocks
            )
            release = releases.stream(event, neighbours="replace-one", reset=reset)
            name = f"stream, {strategy}, k = {contributions}" + (", two blocks" if blocks > 1 else "")
            name += ", reset" if reset else ""
            yield _attack(release, Claim.of(event, neighbours="replace-one"), name=name, trials=trials)


@audits("gaussian query", "privacy.mechanisms.gaussian_query")
def gaussian_query(effort: Effort) -> Iterator[Finding]:
    claim = Claim.of(events.gaussian(0.5))
    yield _attack(releases.gaussian_query(0.5), claim, name="gaussian_query", trials=effort.trials(100_000))


@audits("laplace", "privacy.mechanisms.laplace")
def laplace(effort: Effort) -> Iterator[Finding]:
    claim = Claim.of(events.laplace(0.5))
    yield _attack(releases.laplace(0.5), claim, name="laplace", trials=effort.trials(200_000))


@audits("noisy max", "privacy.mechanisms.noisy_max")
def noisy_max(effort: Effort) -> Iterator[Finding]:
    claim = Claim.of(events.noisy_max(1.0))
    yield _attack(releases.noisy_max(1.0), claim, name="noisy_max", trials=effort.trials(120_000, least=1_000))


@audits("Poisson step", "privacy.mechanisms.gaussian")
def poisson(effort: Effort) -> Iterator[Finding]:
    event = events.poisson(0.5, events.gaussian(0.5))
    for relation in ("add-remove", "replace-one"):
        claim = Claim.of(event, neighbours=relation, delta=1e-2)
        release = releases.poisson(0.5, 0.5, neighbours=relation)
        name = f"one Poisson step, {relation}"
        yield _attack(release, claim, name=name, trials=effort.trials(2_000_000))


@audits("training steps", "finetune.ConstantNoise.releases")
def training_steps(effort: Effort) -> Iterator[Finding]:
    for name, optimizer in optimizers().items():
        for rate, title in ((1.0, "everybody"), (0.5, "Poisson draw")):
            claim = Claim.of(events.poisson(rate, events.gaussian(0.5)), delta=1e-2)
            release = training_step(optimizer, rate=rate, noise=0.5)
            trials = effort.trials(1_000_000 if rate < 1 else 200_000)
            yield _attack(release, claim, name=f"a step of {name}, {title}", trials=trials)


@audits("feature statistics", "finetune.Standardise._released")
def feature_statistics(effort: Effort) -> Iterator[Finding]:
    claim = Claim.of(events.gaussian(0.5))
    found = _attack(stage_releases.feature_mean(0.5), claim, name="Standardise, the mean", trials=effort.trials(50_000))
    yield found


@audits("evaluation", "finetune.Evaluator.__call__")
def evaluation(effort: Effort) -> Iterator[Finding]:
    release = stage_releases.evaluations(2.0)
    yield _attack(release, Claim(mu=2.0), name="a charged evaluation", trials=effort.trials(1_500, least=150))


@audits("calibration source", "calibrate.Source.answer")
def source(effort: Effort) -> Iterator[Finding]:
    for noise, amount in (("laplace", 2.0), ("gaussian", 2.0)):
        price = Price(noise=noise, amount=amount)  # type: ignore[arg-type]
        claim = Claim(epsilon=amount) if noise == "laplace" else Claim(mu=amount)
        release = stage_releases.source_answers(price)
        yield _attack(release, claim, name=f"an answer of a source, {noise}", trials=effort.trials(10_000))


@audits("selection", "tune.noisy_selection", "tune.released")
def selection(effort: Effort) -> Iterator[Finding]:
    release = stage_releases.selected(2.0, "winner")
    yield _attack(release, Claim(epsilon=2.0), name="noisy_selection, winner", trials=effort.trials(4_000, least=200))
    budget = Budget(8.0, 1e-5)
    release = stage_releases.selected(budget.epsilon, "scores")
    yield _attack(release, Claim(mu=budget.mu), name="noisy_selection, scores", trials=effort.trials(4_000, least=200))


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


@audits("search", "tune.repeat_and_select", "tune.released")
def searches(effort: Effort) -> Iterator[Finding]:
    count, budget = effort.trials(1_000, least=100), Budget(8.0, 1e-5)
    for method in (tune.linear_scaling, tune.random_search, tune.repeat_and_select):
        train = stages.search(method, canaries=count, budget=budget)
        claim = Claim(mu=budget.mu) if method is not tune.repeat_and_select else budget
        yield run(train, count, claim, name=f"{method.__name__}, whole search", strict=False)


def everything(effort: Effort) -> Iterator[Finding]:
    """All registered audits."""
    for audit in REGISTRY.values():
        yield from audit.attack(effort)
