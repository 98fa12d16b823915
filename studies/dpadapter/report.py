"""What a study of robust pretraining found, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from studies.dpadapter.arms import OPTIMIZERS, Pretraining, Upstream
from studies.dpadapter.cells import After, Finetuned, Pretrained
from studies.dpadapter.study import Result
from studies.findings import Findings
from studies.render import band, cell, seeds, spread
from tacit.pretrain import Noisy
from tacit.report import Cell, Column, Picture, Section, Spread, Table, plots, theme

T = TypeVar("T")
WORDS = {"radius": "radius", "perturb_batch": "perturbing batch", "batch": "batch", "reuse": "steps per perturbation"}


def render(result: Result) -> Findings:
    """How nets withstand noise, what private fine-tuning makes of them, and what the sweeps say."""
    tables = [upstream(result), *downstream(result)]
    sweeps = [table for group in result.study.pretrain if (table := sweep(result, group)) is not None]
    sections = [
        Section("Public training", text=_about(result), tables=tables[:1], figures=_noise_figures(result)),
        Section("Private fine-tuning", tables=[*tables[1:], rates(result)], figures=_scatter(result)),
    ]
    if sweeps:
        sections.append(Section("Sweeps", tables=sweeps, figures=_sweep_figures(result)))
    return Findings(
        title=result.study.title,
        lead="Accuracies are of held-out data, all declared public. Each fine-tuning is a simulation with a model, "
        "noise and a ledger of its own: no epsilon speaks for two of them.",
        sections=sections,
        summary=tables,
        facts={"pretrained": _upstream_facts(result), "finetuned": _downstream_facts(result)},
        assumptions=["one row per person", "the number of private rows is public (each study declares it)"],
        not_covered=[
            "everybody in the public data: it was declared public",
            "the choice of learning rates: it was made on data declared public",
        ],
    )


def upstream(result: Result) -> Table:
    """A line per way to pretrain: accuracy with and without noise on the weights, rho, and what it cost."""
    noise = result.study.noise
    rows: list[list[Cell]] = []
    for name, way in _main(result):
        found = result.of(way)
        cells: list[Cell] = [_over(found, lambda one: 100 * one.clean)]
        cells += [_over(found, _under(std, False)) for std in noise.stds]
        cells += [_over(found, _under(std, True)) for std in noise.relative]
        cells += [_over(found, lambda one: one.rho.ascent), found[0].passes]
        rows.append([name, *cells])
    columns: list[Column | str] = ["", Column("clean", ".1f", best="max")]
    columns += [Column(f"std {std:.3g}", ".1f", best="max") for std in noise.stds]
    columns += [Column(f"relative {std:.3g}", ".1f", best="max") for std in noise.relative]
    columns += [Column("rho", ".1f", best="min"), Column("rows passed", _thousands)]
    return Table(
        "Pretrained nets on public test rows: accuracy (%) under noise on all weights",
        columns,
        rows,
        note=f"{seeds(result.study.seeds)} Each accuracy under noise is a mean over {noise.draws} draws. N(0, 0.1) is "
        "std 0.1, or std 0.316 if 0.1 is a variance.",
    )


def downstream(result: Result) -> list[Table]:
    """For each optimizer and epsilon a column: accuracy after private fine-tuning, and then under noise."""
    ways = result.ways()
    if not ways:
        return []
    kinds: list[tuple[str, Callable[[Finetuned], float]]] = [
        ("Accuracy (%) after private fine-tuning", lambda one: 100 * one.accuracy),
        (
            f"The same under noise of std {result.study.noise.after:g} on all fine-tuned weights",
            lambda one: 100 * one.robust,
        ),
    ]
    columns: list[Column | str] = [
        "",
        *(Column(f"{OPTIMIZERS[kind]}, ε = {epsilon:g}", ".1f", best="max") for kind, epsilon in ways),
    ]
    tables = []
    for title, value in kinds:
        rows: list[list[Cell]] = []
        for name, way in _main(result):
            cells = [_over(result.tuned(way, *one), value) for one in ways]
            if any(cell is not None for cell in cells):
                rows.append([name, *cells])
        tables.append(Table(title, columns, rows, note=f"{seeds(result.study.seeds)} delta is {result.study.delta:g}."))
    return tables


def sweep(result: Result, group: Pretraining) -> Table | None:
    """What the constants that a group varies do, upstream and downstream; None if it varies none."""
    if not group.swept:
        return None
    found = result.study.upstreams()[group.name]
    ways = [one for one in result.ways() if sum(bool(result.tuned(way, *one)) for way in found) > 1]
    after = result.study.noise.after
    rows: list[list[Cell]] = []
    for way in found:
        cells: list[Cell] = [way.value(field) for field in group.swept]
        cells += [_over(result.of(way), lambda one: 100 * one.clean), _over(result.of(way), _under(after, False))]
        cells += [_over(result.tuned(way, *one), lambda one: 100 * one.accuracy) for one in ways]
        rows.append([*cells, way.passes(result.study.data.public)])
    columns: list[Column | str] = [
        *(Column(WORDS.get(field, field), "g") for field in group.swept),
        Column("clean", ".1f", best="max"),
        Column(f"std {after:g}", ".1f", best="max"),
        *(Column(f"{OPTIMIZERS[kind]}, ε = {epsilon:g}", ".1f", best="max") for kind, epsilon in ways),
        Column("rows passed", _thousands),
    ]
    return Table(group.name, columns, rows, note=seeds(result.study.seeds))


def rates(result: Result) -> Table:
    """The learning rate that was chosen for each way to pretrain and fine-tune, and the noise of its run."""
    rows: list[list[Cell]] = []
    for name, way in _lines(result):
        for kind, epsilon in result.ways():
            cells = [cell for cell in result.after if _is(cell, way, kind, epsilon)]
            if cells:
                first = cells[0]
                rows.append(
                    [name, OPTIMIZERS[kind], epsilon, first.downstream.lr, result.after[first].noise_multiplier]
                )
    columns: list[Column | str] = ["", "optimizer", Column("ε", "g"), Column("lr", "g"), Column("noise", ".3g")]
    return Table("Chosen learning rates", columns, rows)


def _noise_figures(result: Result) -> list[Picture]:
    figures = []
    for relative, words in ((False, "on all weights"), (True, "relative to each weight tensor")):
        series, clean = {}, {}
        for name, way in _main(result):
            found = result.of(way)
            stds = {one.std for run in found for one in run.noisy if one.relative == relative}
            if stds and way.perturb is not None:
                series[name] = [_pooled(found, std, relative) for std in sorted(stds)]
                clean[name] = sum(one.clean for one in found) / len(found)
        if series:
            figure = plots.accuracy_against_noise(series, clean)
            caption = f"Accuracy of the pretrained nets under noise {words}; bands over draws and seeds."
            figures.append(Picture(figure, caption=caption))
    return figures


def _pooled(found: Sequence[Pretrained], std: float, relative: bool) -> Noisy:
    every = [one for run in found for one in run.noisy if one.std == std and one.relative == relative]
    return Noisy(std=std, relative=relative, accuracies=tuple(value for one in every for value in one.accuracies))


def _scatter(result: Result) -> list[Picture]:
    """Downstream accuracy against robust accuracy before fine-tuning: one dot per pretrained net and epsilon."""
    ways = [one for one in result.ways() if one[0] == "dpsgd"] or result.ways()[:1]
    if not ways:
        return []
    with theme.styled():
        figure = theme.figure(theme.WIDTH, 4.0)
        axes = figure.add_subplot()
        for place, (kind, epsilon) in enumerate(ways):
            dots = [
                (100 * result.before[cell.before].under(result.study.noise.after), 100 * found.accuracy)
                for cell, found in result.after.items()
                if (cell.downstream.optimizer, cell.downstream.epsilon) == (kind, epsilon)
                and cell.before.upstream.perturb is not None
                and cell.before in result.before
            ]
            if dots:
                x, y = zip(*dots, strict=True)
                label = f"{OPTIMIZERS[kind]}, ε = {epsilon:g}"
                axes.plot(x, y, ls="none", marker=theme.mark(place), color=theme.colour(place), ms=6, label=label)
        axes.grid(True)
        axes.set_xlabel(f"accuracy of the pretrained net under noise of std {result.study.noise.after:g} (%)")
        axes.set_ylabel("accuracy after fine-tuning (%)")
        axes.legend(frameon=False)
    return [Picture(figure, caption="Does a net that withstands noise end better? One dot per pretrained net.")]


def _sweep_figures(result: Result) -> list[Picture]:
    """Accuracy over a constant, for groups that vary one."""
    figures = []
    for group in result.study.pretrain:
        if len(group.swept) != 1:
            continue
        field, found = group.swept[0], result.study.upstreams()[group.name]
        values: dict[str, Callable[[Upstream], Cell]] = {
            "clean": lambda way: _over(result.of(way), lambda one: 100 * one.clean),
            f"std {result.study.noise.after:g}": lambda way: _over(
                result.of(way), _under(result.study.noise.after, False)
            ),
        }
        for kind, epsilon in result.ways():
            values[f"{OPTIMIZERS[kind]}, ε = {epsilon:g}"] = partial(_reached, result, kind, epsilon)
        lines = {name: _line(found, field, value) for name, value in values.items()}
        shown = {name: line for name, line in lines.items() if len(line.x) > 1}
        if shown:
            label = WORDS.get(field, field)
            figure = plots.curve(shown, x_label=label, y_label="accuracy (%)")
            figures.append(Picture(figure, caption=f"{group.name}: accuracy against the {label}."))
    return figures


def _reached(result: Result, kind: str, epsilon: float, way: Upstream) -> Cell:
    return _over(result.tuned(way, kind, epsilon), lambda one: 100 * one.accuracy)


def _line(ways: Sequence[Upstream], field: str, value: Callable[[Upstream], Cell]) -> plots.Curve:
    points: list[tuple[float, float, float]] = []
    for way in ways:
        found = value(way)
        if isinstance(found, Spread):
            points.append((way.value(field), *found))
        elif isinstance(found, float):
            points.append((way.value(field), found, 0.0))
    return band(points)


def _main(result: Result) -> list[tuple[str, Upstream]]:
    """Without the sweeps, which have tables of their own; if there is nothing else, with them."""
    return _lines(result, swept=False) or _lines(result)


def _lines(result: Result, *, swept: bool = True) -> list[tuple[str, Upstream]]:
    """Every way to pretrain once, as tables call it."""
    found: dict[Upstream, str] = {}
    for group in result.study.pretrain:
        if group.swept and not swept:
            continue
        for way in result.study.upstreams()[group.name]:
            said = ", ".join(f"{way.value(field):g}" for field in group.swept)
            found.setdefault(way, group.name + (f": {said}" if said else ""))
    return [(name, way) for way, name in found.items() if result.of(way)]


def _under(std: float, relative: bool) -> Callable[[Pretrained], float]:
    return lambda one: 100 * one.under(std, relative=relative)


def _over(found: Sequence[T], value: Callable[[T], float]) -> Cell:
    return cell([value(one) for one in found])


def _is(cell: After, way: Upstream, kind: str, epsilon: float) -> bool:
    return cell.before.upstream == way and (cell.downstream.optimizer, cell.downstream.epsilon) == (kind, epsilon)


def _thousands(value: float) -> str:
    return f"{value / 1000:,.0f}k"


def _about(result: Result) -> str:
    data = result.study.data
    return (
        f"{data.public:,} public rows of {data.public_labels} classes, {data.private:,} private rows of "
        f"{data.private_labels} classes; {data.tested:,} others of each are tried."
    )


def _upstream_facts(result: Result) -> list[dict[str, object]]:
    return [
        {
            "pretrained": name,
            "clean": _mean([one.clean for one in result.of(way)]),
            "robust": {
                f"{std:g}": _mean([one.under(std) for one in result.of(way)]) for std in result.study.noise.stds
            },
            "rho": _mean([one.rho.ascent for one in result.of(way)]),
            "passes": result.of(way)[0].passes,
            "seconds": _mean([one.seconds for one in result.of(way)]),
        }
        for name, way in _lines(result)
    ]


def _downstream_facts(result: Result) -> list[dict[str, object]]:
    facts: list[dict[str, object]] = []
    for name, way in _lines(result):
        for kind, epsilon in result.ways():
            found = result.tuned(way, kind, epsilon)
            if found:
                facts.append(
                    {
                        "pretrained": name,
                        "optimizer": OPTIMIZERS[kind],
                        "epsilon": epsilon,
                        "accuracy": _mean([one.accuracy for one in found]),
                        "robust": _mean([one.robust for one in found]),
                        "lr": next(c.downstream.lr for c in result.after if _is(c, way, kind, epsilon)),
                        "noise_multiplier": found[0].noise_multiplier,
                        "seconds": _mean([one.seconds for one in found]),
                        "promise": found[0].promise,
                    }
                )
    return facts


def _mean(values: Sequence[float]) -> float | None:
    found = spread(values)
    return None if found is None else found.mean
