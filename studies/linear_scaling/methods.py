"""The methods of a tuning study: a way to search, a way to train, and the table that both belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import nn

from studies.grids import combinations
from studies.linear_scaling.data import Task
from tacit.finetune import DPGD, DPSGD, Optimizer, RowNorm
from tacit.models import head_of
from tacit.privacy import Budget, Ledger, Neighbours, Receipt, epsilon_of, events, noise_multiplier
from tacit.recipes import renamed_fields
from tacit.tune import (
    Finetuning,
    Hyperparameters,
    Space,
    Tuned,
    adam_without_second_moment,
    default_search,
    dp_hypo,
    dpgd_wosm,
    linear_scaling,
    plan,
    random_search,
    repeat_and_select,
    subset_search,
    suggest,
)

SUBJECT = "rows"
SHAVE = 1 - 1e-9  # of a run that has the whole budget, so that no rounding goes over it


# -- training ---------------------------------------------------------------------------------------------------------


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Training:
    """A linear probe and its optimizer; by default as paper 3 has it: no bias, zero at the start, everybody in every
    step, momentum 0.9, unit clip. `batch_size` draws Poisson batches instead; `accounting="rdp"` takes the noise that
    RDP asks for, which is more than is needed; `rows="unit"` scales each row's features to norm 1.
    """

    bias: bool = False
    start: Literal["zero", "random"] = "zero"
    batch_size: int | None = None
    momentum: float = 0.9
    clip: float = 1.0
    accounting: Literal["pld", "rdp"] = "pld"
    rows: Literal["raw", "unit"] = "raw"


@dataclass
class Count:
    """How often a probe and its parts were trained, with how many steps, and the last run's noise multiplier."""

    runs: int = 0
    steps: int = 0
    noise: float = 0.0


class Probe(Finetuning):
    """A linear probe to tune, which counts its runs."""

    def __init__(self, task: Task, training: Training, *, delta: float, seed: int) -> None:
        inputs, labels = task.rows("train")
        torch.manual_seed(seed)  # a head that starts at random
        head = nn.Linear(inputs.shape[1], task.classes, bias=training.bias)
        super().__init__(
            nn.Sequential(nn.Identity(), head),
            (inputs, labels),
            size=task.private,
            classes=task.classes,
            delta=delta,
            optimizer=partial(_optimizer, training),
            head="new" if training.start == "zero" else "keep",
            bias=training.bias,
            measure="accuracy",
            standardise=RowNorm() if training.rows == "unit" else None,
        )
        self.known = self.knows_guess = True
        self._rule = training == Training(rows="unit")
        self.accounting = training.accounting
        self.count = Count()

    def event(self, hyperparameters: Hyperparameters, mu: float, neighbours: Neighbours) -> events.DpEvent:
        if self.accounting == "pld":
            return super().event(hyperparameters, mu, neighbours)
        budget = Budget(epsilon_of(mu, self.delta), self.delta)
        noise = noise_multiplier(
            budget, partial(self.event_with, hyperparameters), neighbours=neighbours, accountant="rdp"
        )
        return self.event_with(hyperparameters, noise)

    @property
    def guess(self) -> float | None:
        """What a model that knows nothing scores, unless a study wants that unknown."""
        return super().guess if self.knows_guess else None

    def default(self, mu: float) -> Hyperparameters | None:
        """`tune.suggest`, where training is what it speaks of."""
        if not (self._rule and self.known):
            return None
        head = head_of(self._model)[1]
        budget = Budget(epsilon_of(mu, self.delta), self.delta)
        return suggest(budget, size=self.size, features=head.in_features, classes=head.out_features)

    def __call__(self, hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> nn.Module:
        if receipt.mode != "rehearsal":
            self.count.runs += 1
            self.count.steps += hyperparameters.steps
        self.count.noise = self.optimizer(hyperparameters).scale_of(receipt.event, self.size) or 0.0
        return super().__call__(hyperparameters, mu, receipt)


def _optimizer(training: Training, point: Hyperparameters) -> Optimizer:
    clip = training.clip if point.clip is None else point.clip
    batch_size = training.batch_size if point.batch_size is None else point.batch_size
    if batch_size is None:
        return DPGD(lr=point.lr, steps=point.steps, clip=clip, momentum=training.momentum)
    return DPSGD(lr=point.lr, steps=point.steps, clip=clip, momentum=training.momentum, batch_size=batch_size)


# -- searching --------------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """What every search is given: the same box, the same total, a ledger of its own."""

    probe: Probe
    space: Space
    budget: Budget
    ledger: Ledger
    draw_seed: int
    seed: int | None


class Search(Protocol):
    def __call__(self, given: Given) -> Tuned: ...


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """`tune.linear_scaling`; the trials of each sweep at these shares of epsilon."""

    trials: int = 3
    sweeps: tuple[float, ...] = (0.1, 0.2)
    degree: int = 1
    axis: Literal["epsilon", "mu"] = "epsilon"
    way: Literal["balanced", "steps", "sampled"] = "balanced"
    draw: Literal["following", "stratified", "uniform", "independent", "paper"] = "following"
    default: bool = False  # whether a blind sweep ends in `tune.suggest`
    measure: Literal["loss", "accuracy"] = "loss"
    precision: float = 0.01

    def __call__(self, given: Given) -> Tuned:
        made = plan(given.budget, self.trials, sweeps=self.sweeps, size=given.probe.size, precision=self.precision)
        given.probe.measure = self.measure
        given.probe.known = self.default
        return linear_scaling(
            given.probe,
            given.space,
            given.budget,
            ledger=given.ledger,
            subject=SUBJECT,
            plan=made,
            degree=self.degree,
            axis=self.axis,
            way=self.way,
            draw=self.draw,
            draw_seed=given.draw_seed,
            seed=given.seed,
        )


@dataclass(frozen=True, kw_only=True)
class RandomSearch:
    """`tune.random_search`: one run has the whole budget; several share it, and the best by its score is kept."""

    trials: int = 1
    precision: float = 0.01

    def __call__(self, given: Given) -> Tuned:
        return random_search(
            given.probe,
            given.space,
            given.budget,
            ledger=given.ledger,
            subject=SUBJECT,
            trials=self.trials,
            precision=self.precision,
            draw_seed=given.draw_seed,
            seed=given.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """`tune.repeat_and_select` (Papernot and Steinke)."""

    mean: float = 10.0
    shape: float = 1.0
    precision: float = 0.01

    def __call__(self, given: Given) -> Tuned:
        return repeat_and_select(
            given.probe,
            given.space,
            given.budget,
            ledger=given.ledger,
            subject=SUBJECT,
            mean=self.mean,
            shape=self.shape,
            precision=self.precision,
            seed=given.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Hypo:
    """`tune.dp_hypo` (Wang et al., 2023): repeat and select that learns from the scores so far."""

    mean: float = 10.0
    ratio: float | None = None
    precision: float = 0.01

    def __call__(self, given: Given) -> Tuned:
        return dp_hypo(
            given.probe,
            given.space,
            given.budget,
            ledger=given.ledger,
            subject=SUBJECT,
            mean=self.mean,
            ratio=self.ratio,
            precision=self.precision,
            seed=given.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Subset:
    """`tune.subset_search` (Koskela and Kulkarni): repeat and select on a part of the rows, the rest for the model."""

    rate: float = 0.2
    mean: float = 10.0
    precision: float = 0.01

    def __call__(self, given: Given) -> Tuned:
        return subset_search(
            given.probe,
            given.space,
            given.budget,
            ledger=given.ledger,
            subject=SUBJECT,
            rate=self.rate,
            mean=self.mean,
            precision=self.precision,
            seed=given.seed,
        )


@dataclass(frozen=True, kw_only=True)
class WithoutSearch:
    """`tune.adam_without_second_moment`: the noise says the learning rate, the recipe says the steps."""

    steps: int
    lr: float = 0.001

    def __call__(self, given: Given) -> Tuned:
        given.probe.optimizer = dpgd_wosm
        return adam_without_second_moment(
            given.probe,
            given.budget,
            steps=self.steps,
            lr=self.lr,
            ledger=given.ledger,
            subject=SUBJECT,
            seed=given.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Default:
    """`tune.suggest` with the whole budget; with `search`, `tune.default_search`.

    `guess`: a search ends if the default's own trial is no better than a blind guess.
    """

    search: bool = False
    guess: bool = True

    def __call__(self, given: Given) -> Tuned:
        given.probe.measure, given.probe.knows_guess = "loss", self.guess
        if self.search:
            return default_search(given.probe, given.budget, ledger=given.ledger, subject=SUBJECT, seed=given.seed)
        point = given.probe.default(given.budget.mu * SHAVE)
        if point is None:
            raise ValueError("The default is for rows of norm 1, trained as the paper has it.")
        return one_run(given, point)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run with the whole budget, at a point that somebody knew."""

    lr: float
    steps: int

    def __call__(self, given: Given) -> Tuned:
        return one_run(given, Hyperparameters(lr=self.lr, steps=self.steps))


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Every point of a grid with the whole budget, chosen by accuracy on the test data: no search that pays can.

    The grid has `lr` and `steps`, or so many `points` of each over the box, evenly on a logarithmic scale. Each point
    is run once; the `best` ones are run `repeats` more times, and the best mean of these is the oracle's.
    """

    lr: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    points: tuple[int, int] = (7, 6)
    best: int = 2
    repeats: int = 3

    def __post_init__(self) -> None:
        if min(*self.points, self.best, self.repeats) < 1:
            raise ValueError("points, best and repeats are at least 1.")

    def grid(self, space: Space) -> list[Point]:
        rates = self.lr or _spaced(*space.lr, self.points[0])
        steps = self.steps or dict.fromkeys(round(value) for value in _spaced(*space.steps, self.points[1]))
        return [Point(**values) for values in combinations({"lr": tuple(rates), "steps": tuple(steps)})]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A name, one way to search, a way to train, and the `table` that it stands in (the comparison, if none is named).

    `epsilon`, `seeds` and `tasks` are the study's unless they are given.
    """

    name: str
    table: str = ""
    linear: LinearScaling | None = None
    random: RandomSearch | None = None
    repeat: Repeat | None = None
    hypo: Hypo | None = None
    subset: Subset | None = None
    adam: WithoutSearch | None = None
    default: Default | None = None
    at: Point | None = None
    oracle: Oracle | None = None
    training: Training = field(default_factory=Training)
    epsilon: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if sum(getattr(self, name) is not None for name in SEARCHES) != 1:
            raise ValueError(f"a method has one way to search, one of {', '.join(SEARCHES)}; {self.name!r} has not")

    @property
    def search(self) -> Search | None:
        """How it searches; None for the oracle, which is many cells."""
        ways = (getattr(self, name) for name in SEARCHES if name != "oracle")
        return next((way for way in ways if way is not None), None)


SEARCHES = ("linear", "random", "repeat", "hypo", "subset", "adam", "default", "at", "oracle")


def one_run(given: Given, point: Hyperparameters) -> Tuned:
    """The whole budget for one run, without a score."""
    probe, ledger, budget = given.probe, given.ledger, given.budget
    mu = budget.mu * SHAVE
    event = probe.event(point, mu, Neighbours.ADD_REMOVE)
    ledger.subject(SUBJECT, budget, plan=[event] if probe.sampled(point) else None)
    receipt = ledger.charge(SUBJECT, event, stage="tune", note="the only run", seed=given.seed)
    model = probe(point, mu, receipt)
    return Tuned(model=model, hyperparameters=point, trials=(), guarantee=ledger.spent(SUBJECT))


def _spaced(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (place / max(count - 1, 1)) for place in range(count)]
