"""A study of recalibration: methods x sources x samples x epsilon on outputs declared public, each cell kept.

A cell is one method in one setting on one data set, in many trials: every trial partitions the samples anew and draws
new noise. Methods are compared on the same partitions. Noise is seeded, so nothing here is private, and nothing needs
to be.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

import torch

from studies import store
from studies.grids import combinations
from studies.recalibration.data import DataSet, OutputsFile, Shifted, from_file, shifted
from studies.recalibration.grid_search import GridSearch
from studies.recalibration.lies import Lie
from studies.recalibration.one_question import OneQuestion
from tacit.calibrate import METHODS, Method, Reliability, Setting, Simulation, Trials, reliability
from tacit.privacy import Budget, Neighbours
from tacit.recipes import Progress, fingerprint, nearest

FORMAT = 3  # of a kept cell; raised when the same recipe would give other numbers
OWN = ("signed-gap", "gap-curve", "platt")
PAPER = ("nothing", "one-source", "histogram", "nll-t", "ece-t", "acc-t")
Factor = Literal["sources", "samples", "epsilon", "iterations", "bins"]
HARM = 0.01  # a calibration error that is larger by more than this than without recalibration
_KNOWN: dict[str, type[Method]] = {**METHODS, GridSearch.name: GridSearch, OneQuestion.name: OneQuestion}


@dataclass(frozen=True)
class Arm:
    """A method and how its answers are put together: ``signed-gap``, ``acc-t@robust``, ``signed-gap!extreme-5``.

    After ``@``: robust, sum or secure; without it the paper's methods are summed, and tacit's own is robust. After
    ``!``: how sources lie, and how many of a hundred.
    """

    method: str
    aggregate: Literal["robust", "sum", "secure"]
    lie: Lie | None

    @classmethod
    def of(cls, text: str) -> Arm:
        rest, _, lie = text.partition("!")
        method, _, aggregate = rest.partition("@")
        if method not in _KNOWN:
            raise ValueError(f"there is no method {method!r}{nearest(method, _KNOWN, 'methods')}")
        aggregate = aggregate or ("robust" if method in OWN else "sum")
        if aggregate not in ("robust", "sum", "secure"):
            raise ValueError(f"answers are put together as robust, sum or secure, not as {aggregate!r}")
        return cls(method, aggregate, Lie.of(lie) if lie else None)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Settings that are run: every combination of the lists. ``vary`` is the factor that is plotted."""

    name: str
    vary: Factor | None = None
    sources: tuple[int, ...] = (50,)
    samples: tuple[int, ...] = (30,)
    epsilon: tuple[float, ...] = (1.0,)  # inf: without noise
    delta: float = 0.0
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    methods: tuple[str, ...] = (*PAPER, "signed-gap")
    iterations: tuple[int, ...] = (5,)  # of methods that search
    bins: tuple[int, ...] = (15,)  # of methods that bin; the error itself is always measured in 15
    goal: Literal["gap", "nll", "ece"] = "gap"  # of the method grid
    ask: Literal["cells", "totals"] = "totals"  # of histogram binning: the paper asks for totals
    by_shift: bool = False  # a table with a row per data set
    headline: bool = False  # counts for the table over all settings

    def __post_init__(self) -> None:
        for name in self.methods:
            Arm.of(name)

    def cells(self) -> Iterator[Cell]:
        names = ("sources", "samples", "epsilon", "delta", "neighbours", "methods")
        for values in combinations({name: getattr(self, name) for name in names}):
            arm = values.pop("methods")
            for method in dict.fromkeys(self._made(Arm.of(arm).method)):
                yield Cell(method=arm, options=json.dumps(asdict(method), sort_keys=True), **values)

    def _made(self, name: str) -> Iterator[Method]:
        known = {one.name for one in fields(_KNOWN[name])}
        for wanted in combinations({"iterations": self.iterations, "bins": self.bins}):
            if name == GridSearch.name:
                wanted["goal"] = self.goal
            elif name == "one-source":
                wanted.pop("iterations")  # it has no noise to fear and searches as far as it likes
            elif name == "histogram":
                wanted["ask"] = self.ask
            elif name in ("gap-curve", OneQuestion.name):
                wanted.pop("bins")  # so few that noise does not drown them
            yield _KNOWN[name](**{key: value for key, value in wanted.items() if key in known})


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method in one setting."""

    method: str  # as the recipe names it (``Arm``)
    options: str  # the method's own settings, as JSON
    sources: int
    samples: int
    epsilon: float
    delta: float
    neighbours: Neighbours

    def value(self, factor: str) -> float | None:
        """A factor of this cell: of its setting, or of its method."""
        if factor in ("sources", "samples", "epsilon"):
            return float(getattr(self, factor))
        found = json.loads(self.options).get(factor)
        return None if found is None else float(found)

    def run(self, simulation: Simulation) -> Trials:
        arm = Arm.of(self.method)
        method = _KNOWN[arm.method](**json.loads(self.options))
        budget = Budget(self.epsilon, self.delta)
        setting = Setting(
            sources=self.sources,
            samples=simulation.samples,
            budget=budget,
            noise="laplace" if budget.pure else "gaussian",
            neighbours=self.neighbours,
            aggregate=arm.aggregate,
            honest=self.sources - self.sources // 2,  # secure aggregation: up to half of the sources may collude
        )
        return simulation.run_in(setting, method, tamper=None if arm.lie is None else arm.lie.tamper(self.samples))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Calibration errors over the trials of a cell, on the samples that no source had."""

    mean: float
    median: float
    low: float  # 10 % of the trials are below
    high: float  # 10 % are above
    before: float
    temperature: float  # the median
    queries: int
    worse: float  # the share of trials in which the error is larger than without recalibration
    harmed: float  # and of those in which it is larger by more than ``HARM``
    harm: float  # by how much it is larger, on average over those in which it is


@dataclass(frozen=True, kw_only=True)
class Study:
    """A whole comparison. `public = true` is a declaration: labels are read and calibration errors are exact."""

    title: str
    public: bool
    sweeps: tuple[Sweep, ...]
    shifted: Shifted | None = field(default_factory=Shifted)
    files: tuple[OutputsFile, ...] = ()
    trials: int = 500
    seed: int = 0
    diagram: str | None = field(default=None, compare=False)  # the data set of the reliability diagram

    def __post_init__(self) -> None:
        if not self.public:
            raise ValueError("a study reads labels and shows exact errors: declare public = true or do not run it")
        if not self.sweeps or self.trials < 1:
            raise ValueError("a study has at least one sweep and one trial")
        if self.shifted is None and not self.files:
            raise ValueError("a study needs outputs: shifted, files or both")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Every cell of a study on every data set; ``diagrams`` maps a way to calibrate to its reliability."""

    study: Study
    data: list[str]
    accuracy: dict[str, float]
    outcomes: dict[tuple[str, Cell], Outcome]
    diagrams: dict[str, Reliability] = field(default_factory=dict)

    def of(self, cells: Iterable[Cell], method: str | None = None) -> list[Outcome]:
        """The outcomes of cells on all data sets."""
        wanted = [cell for cell in cells if method is None or cell.method == method]
        return [self.outcomes[name, cell] for name in self.data for cell in wanted]


def run(study: Study, *, out: Path, progress: Progress) -> Result:
    """Run the cells that are not in the folder yet, and read the rest."""
    kept = out / "cells"
    kept.mkdir(parents=True, exist_ok=True)
    data = shifted(study.shifted, out / "outputs", progress) if study.shifted is not None else []
    data += [from_file(one) for one in study.files]
    cells = list(dict.fromkeys(cell for sweep in study.sweeps for cell in sweep.cells()))
    outcomes: dict[tuple[str, Cell], Outcome] = {}
    accuracy, diagrams = {}, {}
    for place, one in enumerate(data):
        for done, (cell, outcome) in enumerate(_on(one, cells, study, kept)):
            outcomes[one.name, cell] = outcome
            progress(one.name.replace("_", " "), place * len(cells) + done + 1, len(data) * len(cells))
        simulation = Simulation(**one.arrays, sources=1, samples=1, trials=1)
        accuracy[one.name] = float(simulation.outputs.correct.mean())
        if one.name == study.diagram:
            diagrams = _diagrams(one, study)
    return Result(study=study, data=[one.name for one in data], accuracy=accuracy, outcomes=outcomes, diagrams=diagrams)


def _on(data: DataSet, cells: list[Cell], study: Study, kept: Path) -> Iterator[tuple[Cell, Outcome]]:
    """The cells on one data set; those of the same partition are kept in one file."""
    simulation: Simulation | None = None
    order = sorted(cells, key=lambda cell: (cell.sources, cell.samples))
    for setting, together in itertools.groupby(order, key=lambda cell: (cell.sources, cell.samples)):
        one = _Deal(data=data.key, sources=setting[0], samples=setting[1], trials=study.trials, seed=study.seed)
        path = store.path_of(kept, one)
        known = _known(path)
        current: Simulation | None = None
        for cell in together:
            name = fingerprint(cell)
            if name not in known:
                if simulation is None:
                    simulation = Simulation(
                        **data.arrays, sources=setting[0], samples=setting[1], trials=study.trials, seed=study.seed
                    )
                current = current or simulation.repartitioned(sources=setting[0], samples=setting[1])
                known[name] = _outcome(cell.run(current))
            yield cell, known[name]
        if current is not None:
            store.write(path, {name: asdict(found) for name, found in known.items()})


def _known(path: Path) -> dict[str, Outcome]:
    """The cells of one partition that were run before, by their fingerprints."""
    try:
        return {name: Outcome(**found) for name, found in store.read(path).items()}
    except TypeError:
        raise store.damaged(path) from None


@dataclass(frozen=True, kw_only=True)
class _Deal:
    data: str
    sources: int
    samples: int
    trials: int
    seed: int
    format: int = FORMAT


def _outcome(trials: Trials) -> Outcome:
    after = trials.ece_after
    more = after - trials.ece_before
    worse = more > 1e-12
    low, median, high = torch.quantile(after, torch.tensor([0.1, 0.5, 0.9], dtype=after.dtype)).tolist()
    return Outcome(
        mean=float(after.mean()),
        median=median,
        low=low,
        high=high,
        before=float(trials.ece_before.mean()),
        temperature=float(trials.temperature.median()),
        queries=trials.queries,
        worse=float(worse.double().mean()),
        harmed=float((more > HARM).double().mean()),
        harm=float(more[worse].mean()) if worse.any() else 0.0,
    )


def _diagrams(data: DataSet, study: Study) -> dict[str, Reliability]:
    """The first trial of the first setting with finite epsilon and a temperature, before and after."""
    finite = [c for s in study.sweeps for c in s.cells() if math.isfinite(c.epsilon)]
    if not finite:
        return {}
    first = max(finite, key=lambda cell: cell.sources * cell.samples if cell.epsilon == 1.0 else 0)
    simulation = Simulation(**data.arrays, sources=first.sources, samples=first.samples, trials=1, seed=study.seed)
    rest = torch.ones(len(simulation.outputs), dtype=torch.bool)
    rest[simulation.assigned[0]] = False
    logits, labels = simulation.outputs.shifted[rest], torch.as_tensor(data.labels)[rest]
    found = {"before": reliability(logits=logits, labels=labels)}
    same = (first.sources, first.samples, first.epsilon)
    for cell in finite:
        if cell.method in ("acc-t", "signed-gap") and (cell.sources, cell.samples, cell.epsilon) == same:
            temperature = float(cell.run(simulation).temperature[0])
            found.setdefault(cell.method, reliability(logits=logits / temperature, labels=labels))
    return found
