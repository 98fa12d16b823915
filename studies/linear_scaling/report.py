"""What a study of private tuning found, for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from studies.findings import Findings
from studies.linear_scaling import plots
from studies.linear_scaling.methods import Method
from studies.linear_scaling.study import Outcome, Result
from studies.render import cell
from tacit.report import Cell, Column, Picture, Section, Table


def render(result: Result) -> Findings:
    """The comparison with its totals, a table per ablation, the pictures, and every trial as it was released."""
    study = result.study
    made = by_name(result)
    costs = [totals(result), *(times(result) for name in made if not name)]
    sections = [Section(name or "Comparison", tables=[table]) for name, table in made.items()]
    sections = [
        replace(sections[0], text=_about(result)),
        *sections[1:],
        Section("What the searches cost", tables=costs),
    ]
    figures = pictures(result)
    if figures:
        sections.append(Section("Learning rate, steps and epsilon", figures=figures))
    shown = [table for table in (trials(result), decisions(result)) if table.rows]
    if shown:
        sections.append(Section("Trials as they were released, and decisions", tables=shown, folded=True))
    return Findings(
        title=study.title,
        lead="Accuracy (%) on test data, all data declared public. Every cell is a simulated search with noise and a "
        "ledger of its own: trials, scores and the final run are within the same total, except for the oracle, whose "
        "choice is not paid for.",
        sections=sections,
        summary=[*made.values(), totals(result)],
        facts={"cells": [_facts(result, *place) for place in study.places()]},
        assumptions=["one row per person", "the number of private rows is public (each task declares it)"],
        not_covered=["the oracle's choice, which is made on the test data", "the box, which was fixed before"],
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def tables(result: Result) -> list[Table]:
    """Everything that is a table, in the order of the report."""
    made = by_name(result)
    costs = [totals(result), *(times(result) for name in made if not name)]
    return [table for table in (*made.values(), *costs, trials(result), decisions(result)) if table.rows]


def by_name(result: Result) -> dict[str, Table]:
    """A table for each name that methods stand under; the comparison has none."""
    names = dict.fromkeys(method.table for method in result.study.methods)
    return {name: variants(result, name) if name else comparison(result) for name in names}


def comparison(result: Result) -> Table:
    """A line per task and epsilon, a column per method, and how far linear scaling is from random search to oracle."""
    methods = _of(result, "")
    scaled = [method for method in methods if method.linear is not None and _reducible(result, method)]
    rows: list[list[Cell]] = []
    for task in result.study.tasks:
        for epsilon in _budgets(methods, result):
            cells = [_spread(result, task, method, epsilon) for method in methods]
            if any(cell is not None for cell in cells):
                shares = [result.reduction(task, method, epsilon) for method in scaled]
                rows.append([result.study.tasks[task].title, epsilon, *cells, *shares])
    several = len(scaled) > 1
    columns: list[Column | str] = [
        "task",
        Column("ε", "g"),
        *(Column(method.name, ".1f") for method in methods),
        *(Column(f"RERR of {method.name}" if several else "RERR (%)", ".0f") for method in scaled),
    ]
    return Table("Test accuracy (%), everything paid from one ε", columns, rows, note=_note(result, methods))


def variants(result: Result, table: str) -> Table:
    """A line per method of a table, a column per task and epsilon; then what the methods chose and what they had."""
    methods = _of(result, table)
    places = [
        (task, epsilon)
        for task in result.study.tasks
        for epsilon in _budgets(methods, result)
        if any(result.of(task, method, epsilon) for method in methods)
    ]
    several = len({task for task, _ in places}) > 1
    final = any(outcome.final for outcome in _outcomes(result, methods, places))
    rows: list[list[Cell]] = []
    for method in methods:
        found = _outcomes(result, [method], places)
        if not found:
            continue
        cells = [_spread(result, task, method, epsilon) for task, epsilon in places]
        own: list[Cell] = [_mean(found, lambda one: one.final)] if final else []
        shown = [_mean(found, lambda one: one.lr), _mean(found, lambda one: one.steps)]
        rows.append([method.name, *cells, *own, *shown, _mean(found, lambda one: one.noise)])
    columns: list[Column | str] = [
        "",
        *(
            Column(f"{result.study.tasks[task].title}, ε = {epsilon:g}" if several else f"ε = {epsilon:g}", ".2f")
            for task, epsilon in places
        ),
        *([Column("ε of the final run", ".3f")] if final else []),
        Column("lr", ".3g"),
        Column("steps", ".0f"),
        Column("noise", ".3g"),
    ]
    return Table(table, columns, rows, note=_note(result, methods))


def totals(result: Result) -> Table:
    """The largest epsilon that the ledger of any search of a method had spent at its end."""
    study = result.study
    budgets = sorted({epsilon for _, _, epsilon in study.places()})
    rows: list[list[Cell]] = []
    for method in study.methods:
        cells: list[Cell] = []
        for epsilon in budgets:
            found = [one.spent for task in study.tasks for one in result.of(task, method, epsilon)]
            cells.append(max(found) if found else None)
        if any(cell is not None for cell in cells):
            rows.append([f"{method.table}: {method.name}" if method.table else method.name, *cells])
    columns: list[Column | str] = ["", *(Column(f"budget {epsilon:g}", ".6f") for epsilon in budgets)]
    return Table("Largest ε spent by one search, from its ledger", columns, rows)


def times(result: Result) -> Table:
    """Runs, steps and seconds of a whole search, the mean over all that were run; of the oracle, its whole grid."""
    study = result.study
    rows: list[list[Cell]] = []
    for method in _of(result, ""):
        seconds: list[Cell] = []
        runs, steps = [], []
        for task in study.tasks:
            budgets = method.epsilon or study.epsilon
            found = [search for epsilon in budgets for search in _searches(result, task, method, epsilon)]
            runs += [sum(one.runs for one in search) for search in found]
            steps += [sum(one.all_steps for one in search) for search in found]
            seconds.append(statistics.fmean(sum(one.seconds for one in search) for search in found) if found else None)
        if runs:
            rows.append([method.name, statistics.fmean(runs), statistics.fmean(steps), *seconds])
    columns: list[Column | str] = [
        "",
        Column("runs", ".1f"),
        Column("steps", ".0f"),
        *(Column(f"{task.title} (s)", ".1f") for task in study.tasks.values()),
    ]
    note = "One search, its runs one after the other on one core, which others may have used as well."
    return Table("Runs and time of a search", columns, rows, note=note)


def trials(result: Result) -> Table:
    """Every trial with its noisy score, of searches of the comparison at the largest epsilon, first seed."""
    study = result.study
    rows: list[list[Cell]] = []
    for task, about in study.tasks.items():
        for method in _of(result, ""):
            for outcome in result.of(task, method, max(method.epsilon or study.epsilon))[:1]:
                for one in outcome.trials:
                    shown: list[Cell] = [one.epsilon, one.lr, one.steps, one.lr * one.steps, score(one.score)]
                    rows.append([about.title, method.name, *shown])
                if method.linear is not None:
                    chosen: list[Cell] = [outcome.final, outcome.lr, outcome.steps, outcome.r, None]
                    rows.append([about.title, f"{method.name}: final run", *chosen])
    columns: list[Column | str] = [
        "task",
        "search",
        Column("ε of the run", ".3g"),
        Column("lr", ".3g"),
        "steps",
        Column("r", ".3g"),
        Column("released score (%)", ".1f"),
    ]
    return Table("Trials and their released scores, at the largest ε, first seed", columns, rows)


def decisions(result: Result) -> Table:
    """What searches had to decide besides reading off their line, and how often."""
    rows: list[list[Cell]] = []
    for task, method, epsilon in result.study.places():
        found = result.of(task, method, epsilon) if method.linear is not None else []
        for start in dict.fromkeys(said.split(" ")[0] for one in found for said in one.decisions):
            said = [said for one in found for said in one.decisions if said.startswith(start)]
            rows.append([result.study.tasks[task].title, method.name, epsilon, len(said), said[0]])
    return Table("Decisions", ["task", "search", Column("ε", "g"), "searches", "the first of them"], rows)


# -- pictures ---------------------------------------------------------------------------------------------------------


def pictures(result: Result) -> list[Picture]:
    """Of the comparison: a row of heat maps per task, r against epsilon, and the gap against r."""
    study = result.study
    oracle = next((method for method in _of(result, "") if method.oracle is not None), None)
    found: list[Picture] = []
    gaps: dict[str, dict[str, list[tuple[float, float]]]] = {}
    places: dict[str, list[tuple[float, float]]] = {}
    for task, about in study.tasks.items():
        if oracle is None:
            break
        grids = {
            epsilon: {(at.lr, at.steps): one.accuracy for at, one in result.grid(task, oracle, epsilon).items()}
            for epsilon in oracle.epsilon or study.epsilon
        }
        panels = {f"ε = {epsilon:g}": grid for epsilon, grid in grids.items() if grid}
        if not panels:
            continue
        caption = f"{about.title}: every point of the oracle's grid, one run each; the best is framed."
        found.append(Picture(plots.heat_maps(panels, label=f"{about.title}, accuracy (%)"), caption=caption))
        gaps[about.title] = {
            name: [(lr * steps, value - max(grid.values())) for (lr, steps), value in grid.items()]
            for name, grid in panels.items()
        }
        best = {epsilon: result.of(task, oracle, epsilon) for epsilon in grids}
        places[about.title] = [(epsilon, outcomes[0].r) for epsilon, outcomes in best.items() if outcomes]
    fits = _fits(result)
    if fits:
        caption = (
            "Linear scaling at the largest ε: the winners of the sweeps (dots), the line through them and the final "
            "run (diamond), a colour per seed; the oracle's best r at each ε is the dashed line."
        )
        found.append(Picture(plots.lines(fits, places), caption=caption))
    if gaps:
        caption = "How much worse than the best point of the grid a point is, against its r = learning rate × steps."
        found.append(Picture(plots.gaps(gaps), caption=caption))
    return found


def _fits(result: Result) -> dict[str, list[plots.Fit]]:
    study = result.study
    method = next((method for method in _of(result, "") if method.linear is not None), None)
    if method is None:
        return {}
    found = {
        about.title: [
            plots.Fit(one.winners, one.line, (one.final, one.r))
            for one in result.of(task, method, max(method.epsilon or study.epsilon))
            if one.final is not None
        ]
        for task, about in study.tasks.items()
    }
    return {title: fits for title, fits in found.items() if fits}


# -- parts ------------------------------------------------------------------------------------------------------------


def score(released: float | None) -> Cell:
    return "failed" if released is None else 100 * released


def _of(result: Result, table: str) -> list[Method]:
    return [method for method in result.study.methods if method.table == table]


def _budgets(methods: Sequence[Method], result: Result) -> list[float]:
    return sorted({epsilon for method in methods for epsilon in method.epsilon or result.study.epsilon})


def _outcomes(result: Result, methods: Sequence[Method], places: Sequence[tuple[str, float]]) -> list[Outcome]:
    return [one for method in methods for task, epsilon in places for one in result.of(task, method, epsilon)]


def _searches(result: Result, task: str, method: Method, epsilon: float) -> list[list[Outcome]]:
    if method.oracle is None:
        return [[one] for one in result.of(task, method, epsilon)]
    grid = list(result.grid(task, method, epsilon).values())
    return [grid] if grid else []


def _reducible(result: Result, method: Method) -> bool:
    places = [(task, epsilon) for task, each, epsilon in result.study.places() if each == method]
    return any(result.reduction(task, method, epsilon) is not None for task, epsilon in places)


def _spread(result: Result, task: str, method: Method, epsilon: float) -> Cell:
    return cell([outcome.accuracy for outcome in result.of(task, method, epsilon)])


def _mean(found: Sequence[Outcome], value: Callable[[Outcome], float | None]) -> Cell:
    values = [one for one in map(value, found) if one is not None]
    return statistics.fmean(values) if values else None


def _about(result: Result) -> str:
    study, space = result.study, result.study.space
    tasks = "; ".join(
        f"{task.title}: {task.private:,} private rows, {task.tested:,} to test" for task in study.tasks.values()
    )
    (low, high), (first, last) = space.lr, space.steps
    return (
        f"{tasks}. The box of every search: learning rate {low:g} to {high:g}, {first} to {last} steps. delta is "
        f"{study.delta:g}. RERR = (ours - random) / (oracle - random)."
    )


def _note(result: Result, methods: Sequence[Method]) -> str:
    seeds = len(result.study.seeds)
    others = [
        f"{method.name}: {len(method.seeds) if method.seeds else method.oracle.repeats if method.oracle else 0}"
        for method in methods
        if method.oracle is not None or method.seeds
    ]
    return f"Mean and standard deviation over {seeds} seeds" + (f" ({', '.join(others)})." if others else ".")


def _facts(result: Result, task: str, method: Method, epsilon: float) -> dict[str, object]:
    found, spread = result.of(task, method, epsilon), result.spread(task, method, epsilon)
    return {
        "task": task,
        "table": method.table,
        "method": method.name,
        "epsilon": epsilon,
        "accuracy": spread[0] if spread else None,
        "spread": spread[1] if spread else None,
        "reduction": result.reduction(task, method, epsilon),
        "largest_spent": max((one.spent for one in found), default=None),
        "r": [one.r for one in found],
        "decisions": [said for one in found for said in one.decisions],
    }
