"""A study of private tuning: the same box and the same total for every method, on data declared public."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from studies import store
from studies.linear_scaling.data import Task
from studies.linear_scaling.methods import Given, Method, Oracle, Point, Probe
from studies.render import spread
from tacit.privacy import Budget, Ledger, epsilon_of
from tacit.recipes import Progress, fingerprint
from tacit.report import Spread
from tacit.tune import BudgetTooSmall, Scaled, Space

FORMAT = 3  # of a cell's file; raised when the same recipe would give other numbers
_GRID_SEED = -1  # of the oracle's look at every point; its repeats are -2, -3, ...


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared, on which tasks. Nothing of it is private: it is a simulation on data declared public."""

    title: str
    public: bool
    tasks: dict[str, Task]
    space: Space
    methods: tuple[Method, ...]
    epsilon: tuple[float, ...] = (0.1, 0.5, 1.0)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    delta: float = 1e-5
    seeded_noise: bool = False
    workers: int = field(default=2, compare=False)

    def __post_init__(self) -> None:
        if not self.public:
            raise ValueError("a study prints exact scores of its data: declare public = true or do not run it")
        unknown = {name for method in self.methods for name in method.tasks} - set(self.tasks)
        if unknown:
            raise ValueError(f"there is no [tasks.{sorted(unknown)[0]}]; there are {', '.join(self.tasks)}")
        names = [(method.table, method.name) for method in self.methods]
        if len(set(names)) < len(names):
            raise ValueError("two methods of one table have the same name")
        if any(seed < 0 for method in self.methods for seed in (*self.seeds, *method.seeds)):
            raise ValueError("seeds are not below 0")
        for epsilon in (*self.epsilon, *(each for method in self.methods for each in method.epsilon)):
            Budget(epsilon, self.delta)

    def places(self) -> list[tuple[str, Method, float]]:
        """Every task, method and epsilon."""
        return [
            (task, method, epsilon)
            for task in self.tasks
            for method in self.methods
            if not method.tasks or task in method.tasks
            for epsilon in method.epsilon or self.epsilon
        ]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One search, from nothing, with a ledger of its own."""

    task: Task
    method: Method
    epsilon: float
    seed: int
    space: Space
    delta: float
    seeded_noise: bool
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A trial as it was released: its epsilon alone, where it was, and its noisy score (None: it failed)."""

    epsilon: float
    lr: float
    steps: int
    score: float | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search came to. The accuracy (in percent) is of test data declared public."""

    accuracy: float
    lr: float
    steps: int
    spent: float  # epsilon of everything, from the ledger
    final: float | None  # epsilon of the final run alone, where there is one
    trials: tuple[Tried, ...]
    winners: tuple[tuple[float, float], ...]  # (epsilon, r) of each sweep's
    line: tuple[tuple[float, float], ...]  # (epsilon, r) along what was fitted to them, up to the final run
    decisions: tuple[str, ...]
    noise: float  # multiplier of the last run
    runs: int
    all_steps: int
    seconds: float
    promise: str

    @property
    def r(self) -> float:
        return self.lr * self.steps

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Outcome:
        trials = tuple(Tried(**trial) for trial in stored["trials"])
        pairs = {name: tuple((epsilon, r) for epsilon, r in stored[name]) for name in ("winners", "line")}
        return cls(**(stored | pairs | {"trials": trials, "decisions": tuple(stored["decisions"])}))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What every cell came to."""

    study: Study
    outcomes: dict[Cell, Outcome]

    def of(self, task: str, method: Method, epsilon: float) -> list[Outcome]:
        """Over the seeds; of the oracle, over the repeats of its best point."""
        if method.oracle is not None:
            repeated = self._repeats(task, method, epsilon)
            return max(repeated, key=mean, default=[])
        cells = [_cell(self.study, task, method, epsilon, seed) for seed in method.seeds or self.study.seeds]
        return [self.outcomes[cell] for cell in cells if cell in self.outcomes]

    def grid(self, task: str, method: Method, epsilon: float) -> dict[Point, Outcome]:
        """What the oracle saw at every point, one run each."""
        return {
            cell.method.at: self.outcomes[cell]
            for cell in grid_cells(self.study, task, method, epsilon)
            if cell in self.outcomes and cell.method.at is not None
        }

    def spread(self, task: str, method: Method, epsilon: float) -> Spread | None:
        """Mean accuracy and standard deviation; None if it was not run."""
        return spread([outcome.accuracy for outcome in self.of(task, method, epsilon)])

    def reduction(self, task: str, method: Method, epsilon: float) -> float | None:
        """The relative error-rate reduction, against the random search and the oracle of its table."""
        peers = [peer for peer in self.study.methods if peer.table == method.table]
        random = next((peer for peer in peers if peer.random is not None and peer.random.trials == 1), None)
        oracle = next((peer for peer in peers if peer.oracle is not None), None)
        if random is None or oracle is None or method in (random, oracle):
            return None
        ours, low, high = (self.spread(task, each, epsilon) for each in (method, random, oracle))
        return relative(ours[0], low[0], high[0]) if ours and low and high else None

    def _repeats(self, task: str, method: Method, epsilon: float) -> list[list[Outcome]]:
        found: dict[Point | None, list[Outcome]] = {}
        for cell in repeat_cells(self.study, task, method, epsilon, self.grid(task, method, epsilon)):
            if cell in self.outcomes:
                found.setdefault(cell.method.at, []).append(self.outcomes[cell])
        return list(found.values())


def relative(ours: float, random: float, oracle: float) -> float | None:
    """RERR (paper 3, table 3): the way from random search to the oracle, in percent; None if there is none."""
    return 100 * (ours - random) / (oracle - random) if oracle > random else None


def mean(outcomes: list[Outcome]) -> float:
    return statistics.fmean(outcome.accuracy for outcome in outcomes)


def run(study: Study, *, out: Path, progress: Progress) -> Result:
    """Run every search and every grid, then the best points of the grids again."""
    for task in study.tasks.values():
        task.rows("train"), task.rows("test")  # what is missing is said before anything is run

    def outcomes(cells: list[Cell]) -> dict[Cell, Outcome]:
        found = store.outcomes(
            cells, compute, folder=out / "cells", workers=study.workers, progress=progress, name=_name
        )
        return _made(found)

    cells = [cell for place in study.places() for cell in first_cells(study, *place)]
    cells.sort(key=lambda cell: cell.seed)  # whoever stops early has as many seeds of every task
    first = outcomes(cells)
    seen = Result(study=study, outcomes=first)
    return replace(seen, outcomes=first | outcomes(_again(seen)))


def read(study: Study, out: Path) -> Result:
    """What an earlier run left; nothing is computed, and what is missing stays missing."""

    def outcomes(cells: list[Cell]) -> dict[Cell, Outcome]:
        return _made(store.known(cells, out / "cells"))

    first = outcomes([cell for place in study.places() for cell in first_cells(study, *place)])
    seen = Result(study=study, outcomes=first)
    return replace(seen, outcomes=first | outcomes(_again(seen)))


def _made(found: dict[Cell, dict[str, Any]]) -> dict[Cell, Outcome]:
    """The searches that were made; one that refused its budget has no outcome."""
    return {cell: Outcome.read(stored) for cell, stored in found.items() if "refused" not in stored}


def first_cells(study: Study, task: str, method: Method, epsilon: float) -> list[Cell]:
    """What can be run at once: a search with every seed, or every point of the oracle's grid."""
    if method.oracle is not None:
        return grid_cells(study, task, method, epsilon)
    return [_cell(study, task, method, epsilon, seed) for seed in method.seeds or study.seeds]


def grid_cells(study: Study, task: str, method: Method, epsilon: float) -> list[Cell]:
    points = [] if method.oracle is None else method.oracle.grid(study.space)
    return [_cell(study, task, _at(method, point), epsilon, _GRID_SEED) for point in points]


def repeat_cells(study: Study, task: str, method: Method, epsilon: float, grid: dict[Point, Outcome]) -> list[Cell]:
    """The best points of a grid again, with noise of their own; nothing until the whole grid is there."""
    oracle: Oracle | None = method.oracle
    if oracle is None or len(grid) < len(oracle.grid(study.space)):
        return []
    best = sorted(grid, key=lambda point: grid[point].accuracy, reverse=True)[: oracle.best]
    seeds = range(_GRID_SEED - 1, _GRID_SEED - 1 - oracle.repeats, -1)
    return [_cell(study, task, _at(method, point), epsilon, seed) for point in best for seed in seeds]


def _again(seen: Result) -> list[Cell]:
    return [
        cell
        for task, method, epsilon in seen.study.places()
        for cell in repeat_cells(seen.study, task, method, epsilon, seen.grid(task, method, epsilon))
    ]


def compute(cell: Cell) -> dict[str, Any]:
    """One search from nothing, with a ledger of its own in memory; raises if the ledger has more than the budget.

    A search may refuse: then what it said is kept, and the table has no number.
    """
    draw_seed = int(fingerprint(cell)[:8], 16)  # of the cell, so that no two cells try the same points by chance
    search = cell.method.search
    if search is None:
        raise ValueError("An oracle is the cells of its grid.")
    probe = Probe(cell.task, cell.method.training, delta=cell.delta, seed=draw_seed)
    budget, ledger = Budget(cell.epsilon, cell.delta), Ledger("sqlite://")
    start = time.perf_counter()
    try:
        found = search(
            Given(
                probe=probe,
                space=cell.space,
                budget=budget,
                ledger=ledger,
                draw_seed=draw_seed,
                seed=draw_seed if cell.seeded_noise else None,
            )
        )
    except BudgetTooSmall as refused:
        return {"refused": str(refused)}
    seconds = time.perf_counter() - start
    spent = ledger.total()
    if spent.epsilon > budget.epsilon or spent.delta > budget.delta:
        raise RuntimeError(f"{_name(cell)} spent {spent}, and its budget is {budget}.")
    if found.model is None or found.hyperparameters is None:
        raise RuntimeError(f"{_name(cell)}: no trial gave a model.")
    point = found.hyperparameters
    inputs, labels = cell.task.rows("test")
    with torch.inference_mode():
        right = (found.model(inputs).argmax(1) == labels).double().mean()
    scaled = found if isinstance(found, Scaled) else None
    return asdict(
        Outcome(
            accuracy=100 * float(right),
            lr=point.lr,
            steps=point.steps,
            spent=spent.epsilon,
            final=found.final_run_guarantee.epsilon if scaled and found.final_run_guarantee else None,
            trials=tuple(
                Tried(
                    epsilon=epsilon_of(trial.mu, cell.delta),
                    lr=trial.hyperparameters.lr,
                    steps=trial.hyperparameters.steps,
                    score=trial.score,
                )
                for trial in found.trials
            ),
            winners=scaled.line.points if scaled else (),
            line=_along(scaled) if scaled else (),
            decisions=found.decisions,
            noise=probe.count.noise,
            runs=probe.count.runs,
            all_steps=probe.count.steps,
            seconds=seconds,
            promise=str(spent),
        )
    )


def _along(found: Scaled, places: int = 25) -> tuple[tuple[float, float], ...]:
    """The fitted line from the first sweep's epsilon to the final run's."""
    ends = found.plan.epsilon(found.plan.mu1), found.plan.epsilon(found.plan.mu_final)
    shares = [place / (places - 1) for place in range(places)]
    epsilons = [(1 - share) * ends[0] + share * ends[1] for share in shares]  # which has both ends exactly
    return tuple((epsilon, found.line.r(epsilon)) for epsilon in epsilons)


def _at(method: Method, point: Point) -> Method:
    """A point of a grid as a cell: which oracle asks is no part of it."""
    return Method(name="", at=point, training=method.training)


def _cell(study: Study, task: str, method: Method, epsilon: float, seed: int) -> Cell:
    return Cell(
        task=study.tasks[task],
        method=replace(method, name="", table="", epsilon=(), seeds=(), tasks=()),
        epsilon=epsilon,
        seed=seed,
        space=study.space,
        delta=study.delta,
        seeded_noise=study.seeded_noise,
    )


def _name(cell: Cell) -> str:
    return f"{cell.task.title}, epsilon {cell.epsilon:g}: {type(cell.method.search).__name__}"
