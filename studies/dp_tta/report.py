"""What a study of test-time adaptation found, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from studies.dp_tta.arms import Arm
from studies.dp_tta.cells import Setting
from studies.dp_tta.study import Result
from studies.findings import Findings
from studies.render import cell, seeds
from studies.tradeoff import Point, tradeoff
from tacit.privacy import Ledger
from tacit.report import Book, Cell, Column, Picture, Section, Table, plots

SHORT = {
    "gaussian_noise": "gauss",
    "shot_noise": "shot",
    "impulse_noise": "impul",
    "defocus_blur": "defoc",
    "glass_blur": "glass",
    "motion_blur": "motion",
    "zoom_blur": "zoom",
    "brightness": "bright",
    "contrast": "contr",
    "elastic_transform": "elast",
    "pixelate": "pixel",
    "jpeg_compression": "jpeg",
    "speckle_noise": "speckle",
    "gaussian_blur": "blur",
}
_SHOWN = 6  # arms in the plot by shift


def render(result: Result) -> Findings:
    """Tables and plots for every setting of the study."""
    study = result.study
    sections = []
    summary = []
    for setting in study.settings:
        table = by_shift(result, setting)
        summary.append(overview(result, setting) if len(result.arms) > _SHOWN else for_terminal(result, setting))
        sections.append(
            Section(
                f"{setting.capitalize()} stream",
                text=_about(result, setting),
                tables=[table, overview(result, setting), *paired(result, setting)],
                figures=_figures(result, setting),
            )
        )
    return Findings(
        title=study.title,
        lead="Accuracy of predictions made before each update, on images declared public. Each arm is a simulation "
        "with a model, noise and (where it is private) a ledger of its own: no epsilon speaks for two of them.",
        sections=sections,
        summary=summary,
        facts={"cells": [_facts(result, arm, setting) for setting in study.settings for arm in result.arms]},
        ledgers=[Book.of(Ledger(path, create=False), name) for name, path in result.ledgers.items()],
        assumptions=[
            "one row per person: "
            + (
                "a base image may occur under several shifts, and each occurrence stands for another person"
                if result.study.data.reuse
                else "every base image occurs once in a stream, under one shift"
            ),
            "arrival times, batch sizes and the length of the stream are public",
        ],
        not_covered=[
            "the prediction for a person's own image, which depends on their own image",
            "the choice of hyperparameters: it was made on other, public data and other shifts",
        ],
    )


def by_shift(result: Result, setting: Setting) -> Table:
    """Mean accuracy over seeds, an arm per row and a shift per column."""
    names = _shifts(result)
    rows: list[list[Cell]] = []
    for arm in result.arms:
        found = result.by_shift(arm, setting)
        cells: list[Cell] = [None if found is None else found[name] for name in names]
        rows.append([_label(result, arm), *cells, cell(result.means(arm, setting))])
    shifts = [Column(SHORT.get(name, name), ".1f") for name in names]
    columns: list[Column | str] = ["", *shifts, Column("mean", ".1f", best="max")]
    return Table(f"Accuracy in percent, {setting}", columns, rows, note=_seeds(result))


def for_terminal(result: Result, setting: Setting) -> Table:
    """The same turned round, a shift per row: it fits a narrow terminal."""
    names = _shifts(result)
    found = {arm: result.by_shift(arm, setting) or {} for arm in result.arms}
    rows: list[list[Cell]] = [[name.replace("_", " "), *(f.get(name) for f in found.values())] for name in names]
    rows.append(["mean", *(cell(result.means(arm, setting)) for arm in result.arms)])
    columns = [Column(arm.name, ".1f") for arm in result.arms]
    return Table(f"Accuracy in percent, {setting}", ["", *columns], rows, note=_seeds(result))


def overview(result: Result, setting: Setting) -> Table:
    """One line per arm: its constants, its mean and how far above the source it is."""
    source = next((result.mean(arm, setting) for arm in result.arms if arm.method == "source"), None)
    rows: list[list[Cell]] = []
    for arm in result.arms:
        mean = result.mean(arm, setting)
        gain = None if mean is None or source is None or arm.method == "source" else mean[0] - source[0]
        adapted = arm.method != "source"
        rows.append(
            [
                arm.name,
                arm.batch_size,
                arm.lr if adapted else None,
                arm.clip,
                cell(result.means(arm, setting)),
                gain,
                _touched(result, arm, setting),
            ]
        )
    columns = (
        "arm",
        "batch",
        Column("lr", "g"),
        Column("clip", "g"),
        Column("mean", ".2f", best="max"),
        Column("above source", "+.2f"),
        Column("clipped or filtered", ".0%"),
    )
    return Table(f"All arms, {setting}", columns, rows, note=_seeds(result))


def paired(result: Result, setting: Setting) -> list[Table]:
    """Every arm against the source, its published form and the default rate, image by image.

    A form published with several rates counts with its best one. Columns without any value are left out; there is no
    table if no cell has kept its hits.
    """
    source = next((arm for arm in result.arms if arm.method == "source"), None)
    arms = [arm for arm in result.arms if arm != source]
    others = {
        "above source": [source for _ in arms],
        "above published": [_published(result, arm, setting) for arm in arms],
        "above lr = auto": [_untuned(result, arm) for arm in arms],
    }
    found = {
        name: [o and result.against(arm, o, setting) for arm, o in zip(arms, other, strict=True)]
        for name, other in others.items()
    }
    columns = {name: gains for name, gains in found.items() if any(gains)}
    rows: list[list[Cell]] = [
        [_label(result, arm), *gains] for arm, *gains in zip(arms, *columns.values(), strict=True) if any(gains)
    ]
    if not rows:
        return []
    note = "In points of accuracy; ± is the standard error of the difference over images, which are the same in both."
    return [Table(f"Paired, {setting}", ["arm", *(Column(name, ".2f") for name in columns)], rows, note=note)]


def _published(result: Result, arm: Arm, setting: Setting) -> Arm | None:
    """The published form of an arm's method at its batch size, with the best of its rates that were run."""
    means = {
        other: mean.mean
        for other in result.arms
        if (other.method, other.batch_size, other.form, other.parts) == (arm.method, arm.batch_size, "original", ())
        and (mean := result.mean(other, setting)) is not None
    }
    return None if arm.form == "original" or not means else max(means, key=lambda other: means[other])


def _untuned(result: Result, arm: Arm) -> Arm | None:
    """The same arm with the default's rate."""
    other = replace(arm, lr="auto")
    return other if other != arm and other in result.arms else None


def _figures(result: Result, setting: Setting) -> list[Picture]:
    figures = []
    arms = [arm for arm in result.arms if result.by_shift(arm, setting) is not None]
    shown = arms[: _SHOWN + 1] if arms and arms[0].method == "source" else arms[:_SHOWN]
    names = _shifts(result)
    values: dict[str, Sequence[Cell]] = {}
    for arm in shown:
        found = result.by_shift(arm, setting) or {}
        values[_label(result, arm)] = [found.get(name) for name in names]
    reference = "source" if "source" in values else None
    if len(names) > 1 and len(values) > 1:
        figure = plots.bars_by_shift([n.replace("_", " ") for n in names], values, reference=reference)
        figures.append(Picture(figure, caption="Accuracy under each shift."))
    series, levels = _tradeoff(result, setting)
    if any(len({point.epsilon for point in line}) > 1 for line in series.values()):
        figure = tradeoff(series, levels)
        figures.append(Picture(figure, caption="Accuracy against the privacy budget; error bars over seeds."))
    return figures


def _tradeoff(result: Result, setting: Setting) -> tuple[dict[str, list[Point]], dict[str, float]]:
    series: dict[str, list[Point]] = {}
    levels: dict[str, float] = {}
    for arm in result.arms:
        mean = result.mean(arm, setting)
        if mean is None:
            continue
        if arm.method == "source":
            levels["source"] = mean[0]
        elif arm.private and arm.epsilon is not None:
            name = arm.name.partition(" (")[0] + ("" if arm.noise == "independent" else f", {arm.noise}")
            series.setdefault(name, []).append(Point(arm.epsilon, *mean))
        elif arm.form == "clip":
            series.setdefault(f"DP-{arm.name.removesuffix(' + clip')}", []).append(Point(math.inf, *mean))
    return series, levels


def _about(result: Result, setting: Setting) -> str:
    data = result.study.data
    names = ", ".join(name.replace("_", " ") for name in _shifts(result))
    return f"{data.per_shift:,} images per shift at severity {data.severity}, in this order: {names}. " + (
        "The model is reset at each new shift." if setting == "episodic" else "The model is never reset."
    )


def _label(result: Result, arm: Arm) -> str:
    """The arm's name; with its constants where a name stands for several arms."""
    same = [other for other in result.arms if other.name == arm.name]
    if len(same) == 1:
        return arm.name
    parts = [
        f"{field} {_told(getattr(arm, field))}"
        for field in ("batch_size", "lr", "clip", "similarity", "fisher_alpha", "loss_threshold")
        if getattr(arm, field) is not None and len({getattr(other, field) for other in same}) > 1
    ]
    return f"{arm.name}: {', '.join(parts)}".replace("batch_size", "batch")


def _told(constant: float | str) -> str:
    return constant if isinstance(constant, str) else f"{constant:g}"


def _shifts(result: Result) -> list[str]:
    return list(next(iter(result.outcomes.values())).accuracy)


def _seeds(result: Result) -> str:
    noise = " Noise is seeded (not private) so that the table can be reproduced." if result.study.seeded_noise else ""
    return seeds(result.study.seeds) + noise


def _touched(result: Result, arm: Arm, setting: Setting) -> float | None:
    found = [
        outcome.touched
        for cell, outcome in result.outcomes.items()
        if cell.arm == arm and cell.setting == setting and outcome.touched is not None
    ]
    return sum(found) / len(found) if found else None


def _facts(result: Result, arm: Arm, setting: Setting) -> dict[str, object]:
    mean = result.mean(arm, setting)
    promises = [o.promise for c, o in result.outcomes.items() if c.arm == arm and c.setting == setting]
    return {
        "arm": arm.name,
        "setting": setting,
        "method": arm.method,
        "form": arm.form,
        "epsilon": arm.epsilon if arm.private else None,
        "batch_size": arm.batch_size,
        "lr": arm.lr,
        "clip": arm.clip,
        "noise": arm.noise,
        "accuracy": None if mean is None else mean[0],
        "spread": None if mean is None else mean[1],
        "by_shift": result.by_shift(arm, setting),
        "promise": next((text for text, _ in groupby(promises)), None),
    }
