"""What a study of recalibration found, for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from studies.findings import Findings
from studies.recalibration.data import CLEAN
from studies.recalibration.study import HARM, PAPER, Cell, Result, Sweep
from tacit.calibrate import Reliability
from tacit.report import Cell as TableCell
from tacit.report import Column, Picture, Section, Table, plots

NAMES = {
    "nothing": "no recalibration",
    "one-source": "one source",
    "histogram": "histogram binning",
    "nll-t": "NLL-T",
    "ece-t": "ECE-T",
    "acc-t": "Acc-T",
    "signed-gap": "SignedGap",
    "grid": "grid search",
    "signed-gap@sum": "SignedGap, plain sums",
    "signed-gap@secure": "SignedGap, secure aggregation",
    "gap-curve": "GapCurve",
    "gap-curve@secure": "GapCurve, secure aggregation",
    "platt@secure": "Platt, secure aggregation",
    "one-question@secure": "GapCurve in one question, secure aggregation",
    "acc-t@robust": "Acc-T, robust",
}
_FACTORS = {
    "sources": "sources",
    "samples": "samples per source",
    "epsilon": "epsilon",
    "iterations": "iterations K",
    "bins": "bins",
}


def render(result: Result) -> Findings:
    """The table over all settings, and a section per sweep."""
    summary = headline(result)
    sections = [Section("Over all settings", text=_about(result), tables=summary)] if summary else []
    for sweep in result.study.sweeps:
        tables = [by_data(result, sweep)] if sweep.by_shift else []
        tables += [along(result, sweep, group) for group in groups(result)] if sweep.vary else []
        sections.append(
            Section(sweep.name.capitalize(), text=_setting(sweep), tables=tables, figures=_curves(result, sweep))
        )
    if result.diagrams:
        figure = plots.reliability({NAMES.get(name, name): _bins(one) for name, one in result.diagrams.items()})
        caption = f"{str(result.study.diagram).replace('_', ' ').capitalize()}: how often predictions are right."
        sections.append(Section("Reliability", figures=[Picture(figure, caption=caption)]))
    return Findings(
        title=result.study.title,
        lead="Expected calibration error in 15 equal-width bins, on samples that no source had. All outputs are "
        "declared public and the noise is seeded, so nothing here is private: each trial simulates a private run.",
        sections=sections,
        summary=summary or [by_data(result, sweep) for sweep in result.study.sweeps[:1]],
        facts={
            "trials": result.study.trials,
            "accuracy": result.accuracy,
            "headline": {group: _headline_facts(result, group) for group in groups(result)} if summary else {},
            "sweeps": {sweep.name: _sweep_facts(result, sweep) for sweep in result.study.sweeps},
        },
        not_covered=["the people whose samples are in these outputs, which were declared public"],
    )


# -- what is averaged over what ----------------------------------------------------------------------------------------


def groups(result: Result) -> dict[str, list[str]]:
    """All shifts of the embedded model together; its unshifted images, and every file, by themselves."""
    alone = [one.name for one in result.study.files] + [CLEAN]
    shifts = [name for name in result.data if name not in alone]
    together = {"shifts": shifts} if shifts else {}
    return together | {name: [name] for name in result.data if name in alone}


def methods_of(sweeps: Sequence[Sweep]) -> list[str]:
    return list(dict.fromkeys(name for sweep in sweeps for name in sweep.methods))


def errors(result: Result, cells: Sequence[Cell], data: Sequence[str]) -> list[float]:
    """The mean error over trials of every cell on every data set: what the paper plots and takes the median of."""
    return [result.outcomes[name, cell].mean for name in data for cell in cells]


def harms(result: Result, cells: Sequence[Cell], data: Sequence[str]) -> tuple[float, float, float]:
    """Over all trials: the share that is worse than doing nothing, that is worse by ``HARM``, and by how much."""
    found = [result.outcomes[name, cell] for name in data for cell in cells]
    worse = statistics.fmean(one.worse for one in found)
    size = statistics.fmean(one.worse * one.harm for one in found) / worse if worse else 0.0
    return worse, statistics.fmean(one.harmed for one in found), size


def headline(result: Result) -> list[Table]:
    """The paper's table 1: median and mean over all headline settings and data sets."""
    sweeps = [sweep for sweep in result.study.sweeps if sweep.headline]
    if not sweeps:
        return []
    columns: list[Column | str] = [""]
    for group in groups(result):
        columns += [Column(f"{group}: median", ".4f", best="min"), Column("mean", ".4f", best="min")]
        columns += [Column("worse", ".1%", best="min"), Column("harmed", ".1%", best="min")]
    rows: list[list[TableCell]] = []
    for method in methods_of(sweeps):
        row: list[TableCell] = [NAMES.get(method, method)]
        for data in groups(result).values():
            found = errors(result, _cells(sweeps, method), data)
            row += [statistics.median(found), statistics.fmean(found), *harms(result, _cells(sweeps, method), data)[:2]]
        rows.append(row)
    note = (
        f"Each setting is the mean over {result.study.trials} trials, as in the paper; then median and mean. Worse: "
        f"the share of all trials in which doing nothing is better; harmed: better by more than {HARM}."
    )
    return [Table("Calibration error over all settings", columns, rows, note=note, repeated=result.study.trials > 1)]


def by_data(result: Result, sweep: Sweep) -> Table:
    """A row per data set, a column per method: the mean error over the sweep's settings and trials."""
    methods = methods_of([sweep])
    rows: list[list[TableCell]] = []
    for name in result.data:
        found: list[TableCell] = [statistics.fmean(errors(result, _cells([sweep], one), [name])) for one in methods]
        rows.append([name.replace("_", " "), result.accuracy[name], *found])
    columns: list[Column | str] = [
        "",
        Column("accuracy", ".3f"),
        *(Column(NAMES.get(one, one), ".4f") for one in methods),
    ]
    return Table(f"Calibration error by data set, {sweep.name}", columns, rows)


def along(result: Result, sweep: Sweep, group: str) -> Table:
    """A row per value of the factor that varies: the mean over the data sets of a group."""
    methods = methods_of([sweep])
    rows: list[list[TableCell]] = []
    for value in _values(sweep):
        row: list[TableCell] = [f"{value:g}"]
        for method in methods:
            found = errors(result, _at(sweep, method, value), groups(result)[group])
            row.append(statistics.fmean(found) if found else None)
        rows.append(row)
    factor = _FACTORS[sweep.vary or "sources"]
    columns: list[Column | str] = [factor, *(Column(NAMES.get(one, one), ".4f") for one in methods)]
    return Table(f"Calibration error along {factor}, {group}", columns, rows)


def _cells(sweeps: Sequence[Sweep], method: str) -> list[Cell]:
    return list(dict.fromkeys(cell for sweep in sweeps for cell in sweep.cells() if cell.method == method))


def _values(sweep: Sweep) -> list[float]:
    return sorted({float(value) for value in getattr(sweep, sweep.vary or "sources")})


def _at(sweep: Sweep, method: str, value: float) -> list[Cell]:
    """The cells of a method at a value of the factor; a method without that factor is the same at all of them."""
    factor = sweep.vary or "sources"
    return [cell for cell in _cells([sweep], method) if cell.value(factor) in (value, None)]


# -- figures -----------------------------------------------------------------------------------------------------------


def _curves(result: Result, sweep: Sweep) -> list[Picture]:
    if sweep.vary is None or len([value for value in _values(sweep) if math.isfinite(value)]) < 2:
        return []
    pictures = []
    for group, data in groups(result).items():
        lines, levels = {}, {}
        for method in methods_of([sweep]):
            points = [(x, found) for x in _values(sweep) if (found := errors(result, _at(sweep, method, x), data))]
            finite = [(x, statistics.fmean(found)) for x, found in points if math.isfinite(x)]
            if not finite:
                continue
            if method == "nothing":
                levels[NAMES[method]] = statistics.fmean(y for _, y in finite)
            else:
                lines[NAMES.get(method, method)] = plots.Curve([x for x, _ in finite], [y for _, y in finite])
        what = f"the mean over {len(data)} data sets" if len(data) > 1 else group
        figure = plots.curve(lines, x_label=_FACTORS[sweep.vary], y_label="calibration error", levels=levels)
        pictures.append(Picture(figure, caption=f"Calibration error along {_FACTORS[sweep.vary]}: {what}."))
    return pictures


def _bins(one: Reliability) -> list[plots.Bin]:
    rows = zip(one.confidence, one.accuracy, one.counts, strict=True)
    return [plots.Bin(confidence, accuracy, float(count)) for confidence, accuracy, count in rows if count]


# -- words and facts ---------------------------------------------------------------------------------------------------


def _about(result: Result) -> str:
    shifted = result.study.shifted
    parts = [f"{result.study.trials} trials per setting."]
    if shifted is not None:
        parts.append(
            f"The embedded model on {shifted.per_shift:,} images it has not seen, under each shift at severity "
            f"{shifted.severity}."
        )
    if "signed-gap" in methods_of(result.study.sweeps):
        parts.append("SignedGap's constants were fixed beforehand, on outputs of CIFAR classifiers.")
    return " ".join(parts)


def _setting(sweep: Sweep) -> str:
    def several(values: Sequence[float]) -> str:
        return f"{values[0]:g}" if len(values) == 1 else f"{min(values):g} to {max(values):g}"

    return (
        f"Sources {several(sweep.sources)}, samples per source {several(sweep.samples)}, "
        f"epsilon {several(sweep.epsilon)}"
        + (f", delta {sweep.delta:g}" if sweep.delta else "")
        + f", {sweep.neighbours.value}."
    )


def _headline_facts(result: Result, group: str) -> dict[str, object]:
    sweeps = [sweep for sweep in result.study.sweeps if sweep.headline]
    by_method: dict[str, object] = {}
    for method in methods_of(sweeps):
        found = errors(result, _cells(sweeps, method), groups(result)[group])
        worse, harmed, size = harms(result, _cells(sweeps, method), groups(result)[group])
        by_method[method] = {
            "median": statistics.median(found),
            "mean": statistics.fmean(found),
            "settings": len(found),
            "worse": worse,
            "harmed": harmed,
            "harm": size,
        }
    by_method["best of the paper's methods by median"] = min(
        (method for method in methods_of(sweeps) if method in PAPER),
        key=lambda method: statistics.median(errors(result, _cells(sweeps, method), groups(result)[group])),
    )
    return by_method


def _sweep_facts(result: Result, sweep: Sweep) -> dict[str, object]:
    return {
        group: {
            method: {
                f"{value:g}": statistics.fmean(found)
                for value in (_values(sweep) if sweep.vary else [])
                if (found := errors(result, _at(sweep, method, value), data))
            }
            or statistics.fmean(errors(result, _cells([sweep], method), data))
            for method in methods_of([sweep])
        }
        for group, data in groups(result).items()
    }
