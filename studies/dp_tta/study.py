"""A study: arms x settings x seeds on a stream of shifted images declared public, cell by cell, each cell kept.

Cells are simulations: each has a model, a ledger and noise of its own, and no epsilon speaks for two of them. A cell
that was run before is read from the folder; what was not run stays empty.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from studies.dp_tta.arms import Arm, Grid
from studies.dp_tta.cells import Cell, Data, Model, Outcome, Setting, computed
from tacit.recipes import Progress, fingerprint, plain


@dataclass(frozen=True, kw_only=True)
class Study:
    """A whole comparison. `public = true` is a declaration: labels are read and accuracies are exact."""

    title: str
    public: bool
    arms: tuple[Grid, ...]
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    settings: tuple[Setting, ...] = ("continual",)
    seeds: tuple[int, ...] = (0, 1, 2)
    seeded_noise: bool = True  # reproducible, hence not private: fine for simulations on public data
    keep_ledgers: bool = field(default=False, compare=False)  # one file per private cell, in the run's folder
    workers: int = field(default=2, compare=False)

    def __post_init__(self) -> None:
        if not self.public:
            raise ValueError("a study reads labels and shows exact accuracies: declare public = true or do not run it")
        if not self.seeds or not self.settings:
            raise ValueError("a study needs at least one seed and one setting")

    def cells(self) -> Iterator[Cell]:
        for setting in self.settings:
            for grid in self.arms:
                for arm in grid.arms():
                    for seed in self.seeds:
                        yield Cell(
                            arm=arm,
                            setting=setting,
                            seed=seed,
                            data=self.data,
                            model=self.model,
                            seeded_noise=self.seeded_noise,
                        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """All cells of a study that were run."""

    study: Study
    outcomes: dict[Cell, Outcome]
    ledgers: dict[str, Path] = field(default_factory=dict)  # by the name of the arm

    @property
    def arms(self) -> list[Arm]:
        """In the recipe's order, those that were not run included."""
        return list(dict.fromkeys(arm for grid in self.study.arms for arm in grid.arms()))

    def mean(self, arm: Arm, setting: Setting) -> tuple[float, float] | None:
        """Mean accuracy over shifts and seeds, and the standard deviation over seeds; None if not run."""
        found = [o.mean for c, o in self.outcomes.items() if c.arm == arm and c.setting == setting]
        if not found:
            return None
        return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0

    def by_shift(self, arm: Arm, setting: Setting) -> dict[str, float] | None:
        """Mean accuracy over seeds, shift by shift."""
        found = [o.accuracy for c, o in self.outcomes.items() if c.arm == arm and c.setting == setting]
        return {name: statistics.fmean(f[name] for f in found) for name in found[0]} if found else None


def run(study: Study, *, out: Path, progress: Progress) -> Result:
    """Run what is not there yet, in `workers` processes of one thread each, and read the rest."""
    folder, kept = out / "cells", out / "ledgers"
    folder.mkdir(parents=True, exist_ok=True)
    if study.keep_ledgers:
        kept.mkdir(exist_ok=True)
    cells = list(dict.fromkeys(study.cells()))
    outcomes = {cell: found for cell in cells if (found := _read(folder, cell)) is not None}
    paths = {cell: kept / f"{fingerprint(cell)}.db" for cell in cells if study.keep_ledgers and cell.arm.private}
    waiting = [(cell, paths.get(cell)) for cell in cells if cell not in outcomes]
    for cell, outcome in computed(waiting, study.workers, progress):
        _write(folder, cell, outcome)
        outcomes[cell] = outcome
    ledgers = {f"{cell.arm.name}, seed {cell.seed}": path for cell, path in paths.items() if path.exists()}
    return Result(study=study, outcomes={cell: outcomes[cell] for cell in cells}, ledgers=ledgers)


def read(study: Study, out: Path) -> Result:
    """What an earlier run left in its folder; nothing is computed, and what is missing stays missing."""
    cells = list(dict.fromkeys(study.cells()))
    found = {cell: outcome for cell in cells if (outcome := _read(out / "cells", cell)) is not None}
    return Result(study=study, outcomes=found)


def _path(folder: Path, cell: Cell) -> Path:
    return folder / f"{fingerprint(cell)}.json"


def _read(folder: Path, cell: Cell) -> Outcome | None:
    path = _path(folder, cell)
    if not path.exists():
        return None
    try:
        return Outcome(**json.loads(path.read_text())["outcome"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no cell of a study, or it is damaged: delete it to run the cell again.") from None


def _write(folder: Path, cell: Cell, outcome: Outcome) -> None:
    path = _path(folder, cell)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"cell": plain(cell), "outcome": asdict(outcome)}, indent=1))
    partial.replace(path)
