"""The tables of the page on harm, lying sources and one noise for all, from the runs of the three trust recipes.

`python -m studies.recalibration.page FOLDER` expects runs of `trust`, `trust-severity-5` and `trust-cifar` in folders
of those names in it, and prints Markdown; cells that are missing are run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from studies import runner
from studies.recalibration import report, study

Column = tuple[study.Result, list[str]]
TITLES = {
    ("trust", "shifts"): "severity 3",
    ("trust", "clean"): "clean",
    ("trust-severity-5", "shifts"): "severity 5",
    ("trust-cifar", "CIFAR-10"): "CIFAR-10",
    ("trust-cifar", "CIFAR-100"): "CIFAR-100",
}
METHODS = (
    *study.PAPER,
    "signed-gap@sum",
    "signed-gap",
    "gap-curve",
    "signed-gap@secure",
    "gap-curve@secure",
    "platt@secure",
)
LIES = ("extreme", "hidden", "flipped", "colluding", "small")
NOISES = (
    "nothing",
    "signed-gap",
    "gap-curve",
    "signed-gap@secure",
    "gap-curve@secure",
    "platt@secure",
    "one-question@secure",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    columns = _columns(parser.parse_args(arguments).folder)
    print("\nMedians over the settings and data sets of a column\n")
    _print(columns, METHODS, lambda *of: f"{statistics.median(report.errors(*of)):.4f}")
    print("\nWorse than doing nothing / by more than 0.01 (harmed) / by how much where worse\n")
    _print(columns, METHODS, lambda *of: "{:.1%} / {:.1%} / {:.3f}".format(*report.harms(*of)))
    print("\n5 % of the sources lie: median, harmed\n")
    _print(columns, ("signed-gap", *(f"signed-gap!{lie}-5" for lie in LIES), "acc-t", "acc-t!extreme-5"), _both)
    for epsilon in (0.2, 0.5, 1.0, 2.0):
        print(f"\nepsilon {epsilon:g}: mean over the data sets, median over them, harmed\n")
        _print(columns, NOISES, _three, epsilon=epsilon)
    for epsilon in (0.2, 0.5):
        print(f"\nepsilon {epsilon:g}: a share of SignedGap's local error, by mean / by median over data sets\n")
        for line in _shares(columns, epsilon):
            print(line)


def _columns(folder: Path) -> dict[str, Column]:
    found: dict[str, Column] = {}
    for name in dict.fromkeys(recipe for recipe, _ in TITLES):
        _, config = runner.read(Path("recalibration") / f"{name}.toml")
        result = study.run(config, out=folder / name, progress=lambda *_, **__: None)
        for group, data in report.groups(result).items():
            found[TITLES[name, group]] = (result, data)
    return found


def _print(
    columns: dict[str, Column], methods: Sequence[str], cell: Callable[..., str], epsilon: float | None = None
) -> None:
    for line in _lines(columns, methods, cell, epsilon):
        print(line)


def _lines(
    columns: dict[str, Column], methods: Sequence[str], cell: Callable[..., str], epsilon: float | None
) -> Iterator[str]:
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for method in methods:
        row = []
        for result, data in columns.values():
            row.append(cell(result, _cells(result, method, epsilon), data))
        yield f"| {report.NAMES.get(method, method)} | {' | '.join(row)} |"


def _shares(columns: dict[str, Column], epsilon: float) -> Iterator[str]:
    """One noise for all against local noise: in each column, and over all data sets of the study together."""
    yield f"| | {' | '.join(columns)} | all data sets | all but clean |"
    yield f"|---|{'---:|' * (len(columns) + 2)}"
    local = _by_column(columns, "signed-gap", epsilon)
    for method in NOISES[3:]:
        found = _by_column(columns, method, epsilon)
        groups = [*([name] for name in columns), list(columns), [name for name in columns if name != "clean"]]
        row = []
        for names in groups:
            one, other = ([error for name in names for error in errors[name]] for errors in (found, local))
            mean, median = (of(one) / of(other) for of in (statistics.fmean, statistics.median))
            row.append(f"{mean:.2f} / {median:.2f}")
        yield f"| {report.NAMES.get(method, method)} | {' | '.join(row)} |"


def _by_column(columns: dict[str, Column], method: str, epsilon: float) -> dict[str, list[float]]:
    """The mean error over trials on each data set of each column."""
    return {
        name: report.errors(result, _cells(result, method, epsilon), data) for name, (result, data) in columns.items()
    }


def _cells(result: study.Result, method: str, epsilon: float | None) -> list[study.Cell]:
    """The cells of a method in the headline settings; with an epsilon, those of a sweep over it, of pure epsilon."""
    sweeps = [sweep for sweep in result.study.sweeps if sweep.headline]
    if epsilon is not None:
        sweeps = [sweep for sweep in result.study.sweeps if sweep.vary == "epsilon" and not sweep.delta]
    cells = (one for sweep in sweeps for one in sweep.cells())
    return list(dict.fromkeys(one for one in cells if one.method == method and epsilon in (None, one.epsilon)))


def _both(result: study.Result, cells: list[study.Cell], data: list[str]) -> str:
    return f"{statistics.median(report.errors(result, cells, data)):.4f}, {report.harms(result, cells, data)[1]:.1%}"


def _three(result: study.Result, cells: list[study.Cell], data: list[str]) -> str:
    errors = report.errors(result, cells, data)
    harmed = report.harms(result, cells, data)[1]
    return f"{statistics.fmean(errors):.4f}, {statistics.median(errors):.4f}, {harmed:.1%}"


if __name__ == "__main__":
    main()
