"""What `tacit demo` found, for people: accuracy under each shift, and against the privacy budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tacit.cli._demo_runs import BATCH_SIZE, Arm, Demo, Outcome, ledger_of
from tacit.privacy import Ledger
from tacit.report import Book, Cell, Column, Findings, Picture, Section, Table, plots

TITLE = "A model adapts to what it meets, and remembers nobody"
SETTING = "continual"
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
}
Outcomes = Mapping[Arm, Outcome]


def render(demo: Demo, found: Outcomes, ledgers: Path) -> Findings:
    """Tables and plots of the demo, and the ledger of each private arm."""
    return Findings(
        title=TITLE,
        lead="Accuracy of predictions made before each update, on images declared public. Each arm is a simulation "
        "with a model, noise and (where it is private) a ledger of its own: no epsilon speaks for two of them.",
        sections=[
            Section(
                f"{SETTING.capitalize()} stream",
                text=f"{demo.per_shift:,} images per shift at severity {demo.severity}, in this order: "
                f"{', '.join(name.replace('_', ' ') for name in _shifts(found))}. The model is never reset.",
                tables=[by_shift(found), overview(found)],
                figures=_figures(found),
            )
        ],
        summary=[for_terminal(found)],
        facts={"cells": [_facts(arm, outcome) for arm, outcome in found.items()]},
        ledgers=[
            Book.of(Ledger(ledger_of(arm, ledgers), create=False), f"{arm.name}, seed {demo.seed}")
            for arm in found
            if arm.epsilon is not None
        ],
        assumptions=[
            "one row per person: every base image occurs once in a stream, under one shift",
            "arrival times, batch sizes and the length of the stream are public",
        ],
        not_covered=[
            "what a person is told about their own image, which depends on their own image",
            "the choice of hyperparameters: it was made on other, public data and other shifts",
        ],
    )


def by_shift(found: Outcomes) -> Table:
    """An arm per row and a shift per column."""
    rows: list[list[Cell]] = [[arm.name, *one.accuracy.values(), one.mean] for arm, one in found.items()]
    shifts = [Column(SHORT.get(name, name), ".1f") for name in _shifts(found)]
    columns: list[Column | str] = ["", *shifts, Column("mean", ".1f", best="max")]
    return Table(f"Accuracy in percent, {SETTING}", columns, rows, note="One seed.")


def for_terminal(found: Outcomes) -> Table:
    """The same turned round, a shift per row: it fits a narrow terminal."""
    rows: list[list[Cell]] = [
        [name.replace("_", " "), *(one.accuracy[name] for one in found.values())] for name in _shifts(found)
    ]
    rows.append(["mean", *(one.mean for one in found.values())])
    columns = [Column(arm.name, ".1f") for arm in found]
    return Table(f"Accuracy in percent, {SETTING}", ["", *columns], rows, note="One seed.")


def overview(found: Outcomes) -> Table:
    """One line per arm: its constants, its mean and how far above the source it is."""
    source = next(one.mean for arm, one in found.items() if arm.lr is None)
    rows: list[list[Cell]] = [
        [
            arm.name,
            BATCH_SIZE,
            arm.lr,
            arm.clip,
            one.mean,
            None if arm.lr is None else one.mean - source,
            one.touched,
        ]
        for arm, one in found.items()
    ]
    columns = (
        "arm",
        "batch",
        Column("lr", "g"),
        Column("clip", "g"),
        Column("mean", ".2f", best="max"),
        Column("above source", "+.2f"),
        Column("clipped or filtered", ".0%"),
    )
    return Table(f"All arms, {SETTING}", columns, rows, note="One seed.")


def _figures(found: Outcomes) -> list[Picture]:
    values: dict[str, Sequence[Cell]] = {arm.name: list(one.accuracy.values()) for arm, one in found.items()}
    names = [name.replace("_", " ") for name in _shifts(found)]
    private = [
        plots.Point(arm.epsilon or math.inf, one.mean) for arm, one in found.items() if arm.form in ("clip", "dp")
    ]
    source = {arm.name: one.mean for arm, one in found.items() if arm.lr is None}
    return [
        Picture(plots.bars_by_shift(names, values, reference="source"), caption="Accuracy under each shift."),
        Picture(
            plots.tradeoff({"DP-Tent": private}, source),
            caption="Accuracy against the privacy budget, one run each.",
        ),
    ]


def _shifts(found: Outcomes) -> list[str]:
    return list(next(iter(found.values())).accuracy)


def _facts(arm: Arm, outcome: Outcome) -> dict[str, object]:
    return {
        "arm": arm.name,
        "setting": SETTING,
        "method": "source" if arm.lr is None else "tent",
        "form": arm.form,
        "epsilon": arm.epsilon,
        "batch_size": BATCH_SIZE,
        "lr": arm.lr,
        "clip": arm.clip,
        "noise": "independent",
        "accuracy": outcome.mean,
        "spread": 0.0,
        "by_shift": dict(outcome.accuracy),
        "promise": outcome.promise,
    }
