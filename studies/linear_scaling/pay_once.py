"""One search, read at every budget (paper 3, figure 2): accuracy against epsilon along one line.

    python -m studies.linear_scaling.pay_once linear_scaling/linear-scaling-default.toml OUT [--seeds 20] [--searched 1]

The tasks, the box and delta are the recipe's. A linear scaling with a total of `searched` finds a line; what its sweeps
and scores cost is paid once. For each total epsilon a run gets what is left of it and reads its r off that line. Beside
it: the default without search and one random run, which have the whole epsilon, and the line's r at the whole epsilon,
as if the search had cost nothing, which is how it is usually reported. Data are declared public.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from studies import runner, store
from studies.linear_scaling.data import Task
from studies.linear_scaling.methods import Default, Given, LinearScaling, Probe, RandomSearch, Training, one_run
from studies.linear_scaling.plots import along
from tacit.privacy import Budget, Ledger, epsilon_of
from tacit.recipes import fingerprint
from tacit.tune import Scaled, Space, Tuned

BUDGETS = (0.7, 1.0, 2.0, 4.0, 8.0)
ARMS = ("default, no search", "random search, one run", "one line, search paid", "one line, search not counted")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A search, and what its line and the others come to at every budget."""

    task: Task
    space: Space
    searched: float
    delta: float
    seed: int


def compute(cell: Cell) -> dict[str, Any]:
    """A search and the runs after it, all with noise of their own."""
    draw_seed = int(fingerprint(cell)[:8], 16)
    inputs, labels = cell.task.rows("test")

    def given(budget: Budget) -> Given:
        probe = Probe(cell.task, Training(rows="unit"), delta=cell.delta, seed=draw_seed)
        ledger = Ledger("sqlite://")
        return Given(probe=probe, space=cell.space, budget=budget, ledger=ledger, draw_seed=draw_seed, seed=None)

    def accuracy(found: Tuned) -> float:
        assert found.model is not None
        with torch.inference_mode():
            return 100 * float((found.model(inputs).argmax(1) == labels).double().mean())

    search = LinearScaling()(given(Budget(cell.searched, cell.delta)))
    assert isinstance(search, Scaled)
    paid = math.sqrt(search.plan.mu**2 - search.plan.mu_final**2)
    scores: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for epsilon in BUDGETS:
        whole = Budget(epsilon, cell.delta)
        rest = Budget(epsilon_of(math.sqrt(whole.mu**2 - paid**2), cell.delta), cell.delta)
        ways: list[Callable[[], Tuned]] = [
            lambda whole=whole: Default()(given(whole)),  # type: ignore[misc]
            lambda whole=whole: RandomSearch()(given(whole)),  # type: ignore[misc]
            lambda rest=rest: one_run(given(rest), search.line.at(rest.epsilon)),  # type: ignore[misc]
            lambda whole=whole: one_run(given(whole), search.line.at(whole.epsilon)),  # type: ignore[misc]
        ]
        for arm, way in zip(ARMS, ways, strict=True):
            scores[arm].append(accuracy(way()))
    return {"scores": scores, "paid": epsilon_of(paid, cell.delta), "decisions": list(search.decisions)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--searched", type=float, default=1.0, help="epsilon of the search, its own final run included")
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    _, study = runner.read(options.recipe)
    titles = " | ".join(f"ε = {epsilon:g}" for epsilon in BUDGETS)
    print(f"| task | | {titles} |\n|---|---|{'---:|' * len(BUDGETS)}")
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for task in study.tasks.values():
        plain = {"task": task, "space": study.space, "searched": options.searched, "delta": study.delta}
        cells = [Cell(seed=seed, **plain) for seed in range(options.seeds)]
        found = list(
            store.outcomes(
                cells, compute, folder=options.out, workers=1, progress=_quiet, name=lambda cell: cell.task.title
            ).values()
        )
        panels[task.title] = {}
        for arm in ARMS:
            columns = list(zip(*(one["scores"][arm] for one in found), strict=True))
            spreads = [(statistics.fmean(column), statistics.stdev(column)) for column in columns]
            panels[task.title][arm] = [(epsilon, *spread) for epsilon, spread in zip(BUDGETS, spreads, strict=True)]
            print(f"| {task.title} | {arm} | " + " | ".join(f"{mean:.1f} ± {dev:.1f}" for mean, dev in spreads) + " |")
        print(f"{task.title}: the search costs ε = {found[0]['paid']:.3f}", flush=True)
    along(panels).savefig(options.out / "pay-once.png", dpi=160)


def _quiet(*_: Any, **__: Any) -> None:
    pass


if __name__ == "__main__":
    main()
