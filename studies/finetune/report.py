"""What a study of private fine-tuning found, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from studies.findings import Findings
from studies.finetune.arms import Arm, label_of
from studies.finetune.study import Result
from studies.render import band, seeds, spread
from studies.tradeoff import Point, tradeoff
from tacit.report import Cell, Column, Picture, Section, Spread, Table, plots


def render(result: Result) -> Findings:
    """One table of scores over epsilon, one of constants, and the trade-off as a picture."""
    scores, constants = by_epsilon(result), chosen(result)
    tables = [scores]
    if (differences := paired(result)) is not None:
        tables.append(differences)
    if any(result.shifted(arm) for arm in result.chosen):
        tables.append(by_epsilon(result, shifted=True))
    figures = _figures(result)
    study = result.study
    return Findings(
        title=study.title,
        lead=f"Scores are {_measure(result)} on held-out data, all declared public. Each arm is a simulation with "
        "a model, noise and a ledger of its own: no epsilon speaks for two of them. Constants were chosen on a public "
        "split of other units.",
        sections=[
            Section("Scores", text=_about(result), tables=tables, figures=figures),
            Section("Constants", tables=[constants]),
        ],
        summary=tables,
        facts={"arms": [_facts(result, arm) for arm in result.chosen]},
        assumptions=["one unit per person", "the number of private units is public (each study declares it)"],
        not_covered=["the choice of constants: it was made on data declared public"],
    )


def by_epsilon(result: Result, *, shifted: bool = False) -> Table:
    """A line per way to fine-tune, a column per epsilon: the score that constants were chosen by."""
    budgets = sorted({arm.epsilon for arm in result.chosen})
    lines: dict[str, dict[float, Arm]] = {}
    for arm in result.chosen:
        lines.setdefault(result.named(arm), {})[arm.epsilon] = arm
    rows: list[list[Cell]] = []
    for name, arms in lines.items():
        first = next(iter(arms.values()))
        trained = result.of(first)
        cells = [_cell(result, arms.get(epsilon), shifted) for epsilon in budgets]
        rows.append([name, trained[0].trained if trained else None, *cells])
    best: Literal["min", "max"] = "min" if result.measure == "perplexity" else "max"
    columns = [Column(f"ε = {label_of(epsilon)}", ".1f", best=best) for epsilon in budgets]
    what = "Under the shifts: mean" if shifted else "Held out:"
    title = f"{what} {_measure(result)}"
    return Table(title, ["", Column("trained", ",d"), *columns], rows, note=seeds(result.study.seeds))


def paired(result: Result) -> Table | None:
    """What more clips gain over the fewest, seed by seed: runs of one seed draw the same videos and the same noise.

    None where noise was not seeded, or nothing was run with several numbers of clips.
    """
    if not result.study.seeded_noise:
        return None
    found: dict[tuple[str, float], dict[int, Arm]] = {}
    for arm in result.chosen:
        if arm.clips and arm.level == "unit":
            scheme = "from scratch" if arm.init == "scratch" else arm.scheme
            found.setdefault((scheme, arm.epsilon), {})[arm.clips] = arm
    clips = sorted({k for arms in found.values() for k in arms})
    rows: list[list[Cell]] = []
    for (scheme, epsilon), arms in found.items():
        if len(arms) < 2 or min(arms) != clips[0]:
            continue
        base = result.by_seed(arms[clips[0]])
        gains = [gain(base, result.by_seed(arms[k])) if k in arms else None for k in clips[1:]]
        rows.append([scheme, epsilon, *gains])
    if not rows:
        return None
    columns: list[Column | str] = ["scheme", Column("ε", label_of), *[Column(f"{k} clips", "+.1f") for k in clips[1:]]]
    title = f"Gain over {clips[0]} clip{'s' if clips[0] > 1 else ''}, paired by seed"
    return Table(
        title, columns, rows, note="Mean and standard deviation of the differences. " + seeds(result.study.seeds)
    )


def gain(base: dict[int, float], more: dict[int, float]) -> Spread | None:
    """Mean and standard deviation of the differences over the seeds that both have."""
    return spread([more[seed] - base[seed] for seed in sorted(base.keys() & more.keys())])


def chosen(result: Result) -> Table:
    """The constants of each arm, and what its noise was; where clips were protected, what that is worth to a video."""
    naive = any(arm.level == "clip" for arm in result.chosen)
    rows: list[list[Cell]] = []
    for arm in result.chosen:
        found = result.of(arm)
        of_unit = [found[0].unit_epsilon if found and arm.level == "clip" else None] if naive else []
        batch = {"dpgd": "all", "dpftrl": "passes"}.get(arm.optimizer, arm.batch_size)
        noise = found[0].noise_multiplier if found else None
        rows.append([result.named(arm), arm.epsilon, *of_unit, arm.lr, arm.clip, arm.steps, batch, noise])
    columns: list[Column | str] = [
        "arm",
        Column("ε", label_of),
        *([Column("ε of the video", label_of)] if naive else []),
        Column("lr", "g"),
        Column("clip", "g"),
        "steps",
        "batch",
        Column("noise", ".3g"),
    ]
    return Table("Chosen constants", columns, rows)


def _cell(result: Result, arm: Arm | None, shifted: bool) -> Cell:
    if arm is None:
        return None
    found = result.shifted(arm) if shifted else result.score(arm)
    return found if found is None or len(result.of(arm)) > 1 else found.mean


def _figures(result: Result) -> list[Picture]:
    figures = []
    series: dict[str, list[Point]] = {}
    for arm in result.chosen:
        found = result.score(arm)
        if found is not None:
            series.setdefault(result.named(arm), []).append(Point(arm.epsilon, *found))
    if any(len({point.epsilon for point in line}) > 1 for line in series.values()):
        figure = tradeoff(series, label=_measure(result))
        figures.append(Picture(figure, caption="Score against the privacy budget; error bars over seeds."))
    clips = _by_clips(result)
    if clips:
        figure = plots.curve(clips, x_label="clips per video and step", y_label=_measure(result))
        figures.append(Picture(figure, caption="Score against the number of clips, at the same epsilon."))
    return figures


def _by_clips(result: Result) -> dict[str, plots.Curve]:
    """Score over the number of clips, for ways to fine-tune that were run with several."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for arm in result.chosen:
        score = result.score(arm)
        if score is not None and arm.clips and arm.level == "unit":
            scheme = "from scratch" if arm.init == "scratch" else arm.scheme
            found.setdefault(f"{scheme}, ε = {label_of(arm.epsilon)}", []).append((arm.clips, *score))
    return {name: band(points) for name, points in found.items() if len(points) > 2}


def _measure(result: Result) -> str:
    return {"auroc": "AUROC (%)", "perplexity": "perplexity"}.get(result.measure, f"{result.measure} (%)")


def _about(result: Result) -> str:
    data = result.study.data
    unit = "videos" if data.unit == "video" else "rows"
    return (
        f"{data.private:,} private {unit}, {data.classes} {'labels' if data.labels else 'classes'}; tried on "
        f"{data.tested:,} others. delta is {result.study.delta:g}."
    )


def _facts(result: Result, arm: Arm) -> dict[str, object]:
    score, shifted, found = result.score(arm), result.shifted(arm), result.of(arm)
    return {
        "arm": result.named(arm),
        "epsilon": arm.epsilon if math.isfinite(arm.epsilon) else None,
        "score": None if score is None else score[0],
        "spread": None if score is None else score[1],
        "shifted": None if shifted is None else shifted[0],
        "lr": arm.lr,
        "clip": arm.clip,
        "steps": arm.steps,
        "trained": found[0].trained if found else None,
        "unit_epsilon": found[0].unit_epsilon if found else None,
        "promise": _promise(found),
    }


def _promise(found: Sequence[object]) -> str | None:
    return getattr(found[0], "promise", None) if found else None
