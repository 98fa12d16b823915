"""A study: arms x settings x seeds on a stream of shifted images declared public, cell by cell, each cell kept.

Cells are simulations: each has a model, a ledger and noise of its own, and no epsilon speaks for two of them. A cell
that was run before is read from the folder; what was not run stays empty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from studies import store
from studies.dp_tta.arms import Arm, Grid
from studies.dp_tta.cells import Cell, Data, Model, Outcome, Setting, compute
from studies.render import spread
from tacit.recipes import Progress, fingerprint
from tacit.report import Spread


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

    def means(self, arm: Arm, setting: Setting) -> list[float]:
        """Mean accuracy over shifts, seed by seed."""
        return [o.mean for c, o in self.outcomes.items() if c.arm == arm and c.setting == setting]

    def mean(self, arm: Arm, setting: Setting) -> Spread | None:
        """Mean accuracy over shifts and seeds, and the standard deviation over seeds; None if not run."""
        return spread(self.means(arm, setting))

    def by_shift(self, arm: Arm, setting: Setting) -> dict[str, float] | None:
        """Mean accuracy over seeds, shift by shift."""
        found = [o.accuracy for c, o in self.outcomes.items() if c.arm == arm and c.setting == setting]
        return {name: statistics.fmean(f[name] for f in found) for name in found[0]} if found else None

    def against(self, arm: Arm, other: Arm, setting: Setting) -> Spread | None:
        """How far an arm is above another on the same images, and its standard error over images; None if not known.

        An image's difference is -1, 0 or 1. Its mean and variance are taken shift by shift, for every seed that both
        were run with, and averaged. Cells that were kept without their hits do not count.
        """
        means, variances = [], []
        for seed in self.study.seeds:
            mine, theirs = self._hits(arm, setting, seed), self._hits(other, setting, seed)
            for name in mine if mine.keys() == theirs.keys() else ():
                pairs = zip(mine[name], theirs[name], strict=True)
                differences = [100 * (int(a) - int(b)) for a, b in pairs]
                means.append(statistics.fmean(differences))
                variances.append(statistics.variance(differences) / len(differences))
        return Spread(statistics.fmean(means), math.sqrt(sum(variances)) / len(variances)) if means else None

    def _hits(self, arm: Arm, setting: Setting, seed: int) -> dict[str, str]:
        cells = (c for c in self.outcomes if (c.arm, c.setting, c.seed) == (arm, setting, seed))
        return next((self.outcomes[cell].hits for cell in cells), {})


def run(study: Study, *, out: Path, progress: Progress) -> Result:
    """Run what is not there yet, in `workers` processes of one thread each, and read the rest."""
    kept = out / "ledgers"
    if study.keep_ledgers:
        kept.mkdir(parents=True, exist_ok=True)
    cells = [
        replace(cell, ledger=kept / f"{fingerprint(cell)}.db") if study.keep_ledgers and cell.arm.private else cell
        for cell in study.cells()
    ]
    found = store.outcomes(
        cells, compute, folder=out / "cells", workers=study.workers, progress=progress, name=lambda cell: cell.arm.name
    )
    ledgers = {
        f"{cell.arm.name}, seed {cell.seed}": cell.ledger
        for cell in found
        if cell.ledger is not None and cell.ledger.exists()
    }
    return Result(study=study, outcomes={cell: Outcome(**stored) for cell, stored in found.items()}, ledgers=ledgers)


def read(study: Study, out: Path) -> Result:
    """What an earlier run left in its folder; nothing is computed, and what is missing stays missing."""
    found = store.known(list(dict.fromkeys(study.cells())), out / "cells")
    return Result(study=study, outcomes={cell: Outcome(**stored) for cell, stored in found.items()})
