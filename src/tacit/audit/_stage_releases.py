"""Releases of the stages that are not gradients, through the stages themselves: answers, statistics, scores."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import nn

from tacit.audit._mechanism import Array, Release
from tacit.calibrate import Gap, Price, Query, Source
from tacit.data import TensorRecords
from tacit.finetune import DPGD, Evaluation, Standardise, fit
from tacit.privacy import Budget, Ledger, epsilon_of
from tacit.tune import noisy_selection

_WIDTH = 500  # features of a table whose every column is a trial


def source_answers(price: Price) -> Release:
    """A calibration source asked again and again, each time under a new name: a row that adds 1 to a gap, or none.

    A confidence of nearly 0 in the right answer (of three) adds 1 less that confidence.
    """

    def release(present: bool, trials: int) -> Array:
        probs = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.334, 0.333, 0.333]])
        wrong = torch.tensor([[1.0, 0.0, 0.0]])  # and it is the second class: correct - confidence is -1
        rows = torch.cat([probs, wrong]) if present else probs
        labels = torch.tensor([0, 0, 1])[: len(rows)]
        noise = price.noise
        budget = Budget(math.inf, 0.0 if noise == "laplace" else 1e-5)
        source = Source("audit", probs=rows, labels=labels, budget=budget, noise=noise)
        asked = (Query(id=f"q{i}", statistic=Gap(temperature=1.0), price=price) for i in range(trials))
        return np.array([source.answer(query).values[0] for query in asked])

    return release


def feature_mean(noise: float) -> Release:
    """`Standardise`: units whose mean features are as long as the bound, each along a column of its own.

    The first of its two releases: the mean. Each column is one trial.
    """

    def release(present: bool, trials: int) -> Array:
        found, wanted = [], trials
        rows = torch.eye(_WIDTH) if present else torch.zeros(_WIDTH, _WIDTH)
        table = TensorRecords(rows, torch.zeros(_WIDTH, dtype=torch.long))
        while wanted > 0:
            with Ledger("sqlite://") as ledger:
                ledger.subject("audit", Budget(math.inf, 1e-5))
                statistics = Standardise(noise=noise, bound=1.0).release(table, 1, ledger, "audit", None)
            found.append(statistics.mean.double().numpy())
            wanted -= _WIDTH
        return np.concatenate(found)[:trials]

    return release


def evaluations(mu: float, each: int = 50) -> Release:
    """A charged `Evaluation` of one held-out unit, which is right or not there, ``each`` times in a run of `fit`.

    Each evaluation is one release of ``mu``.
    """

    def release(present: bool, trials: int) -> Array:
        found: list[float] = []
        while len(found) < trials:
            model = nn.Linear(2, 2, bias=False)
            nn.init.zeros_(model.weight)
            train = (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
            row = torch.tensor([[1.0, 0.0], [1.0, 0.0]])[: 1 + present]
            held_out = (torch.cat([torch.full((1, 2), math.nan), row[:present]]), torch.zeros(1 + present).long())
            total = mu * math.sqrt(each)
            with warnings.catch_warnings(), Ledger("sqlite://") as ledger:
                warnings.simplefilter("ignore")
                fitted = fit(
                    model,
                    train,
                    optimizer=DPGD(steps=each, lr=1e-9),
                    epsilon=math.inf,
                    delta=1e-5,
                    size=2,
                    scheme="full",
                    head="keep",
                    ledger=ledger,
                    evaluate=Evaluation(
                        data=held_out, every=1, subject="held out", epsilon=epsilon_of(total, 1e-5), delta=1e-5, size=1
                    ),
                )
            found += [score.scores["accuracy"] for score in fitted.history]
        return np.array(found[:trials])

    return release


def selected(epsilon: float, kind: str) -> Release:
    """`tune.noisy_selection` between two candidates: one unit prefers the first or the second, another the second.

    Under replace-one a unit moves one score up and the other down, which is the worst that it can do.
    """

    def release(present: bool, trials: int) -> Array:
        found, delta = [], 0.0 if kind == "winner" else 1e-5
        with Ledger("sqlite://") as ledger:
            ledger.subject("audit", Budget(math.inf, delta), neighbours="replace-one")
            for _ in range(trials):
                chosen = noisy_selection(
                    [0, 1],
                    lambda candidate: torch.tensor([float((candidate == 0) == present), float(candidate == 1)]),
                    Budget(epsilon, delta),
                    size=2,
                    ledger=ledger,
                    subject="audit",
                    neighbours="replace-one",
                    release=kind,  # type: ignore[arg-type]
                )
                found.append([float(chosen.index == 0)] if chosen.scores is None else list(chosen.scores))
        return np.array(found)

    return release
