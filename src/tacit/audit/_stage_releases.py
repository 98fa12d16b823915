"""Releases of the stages that are not gradients, through the stages themselves: answers, statistics, scores."""

from __future__ import annotations

import math
import warnings
from typing import Literal

import numpy as np
import torch
from torch import nn

from tacit.adapt import DP, Tent
from tacit.audit._mechanism import Array, Release
from tacit.audit._recorded import Stage, releases_of
from tacit.calibrate import Cells, Gap, GapCells, Histogram, LogitCells, Price, Query, Shares, Source
from tacit.data import TensorRecords
from tacit.finetune import DPGD, Evaluation, Labels, Standardise, fit
from tacit.privacy import Budget, Ledger, Neighbours, epsilon_of
from tacit.tune import noisy_selection

Noise = Literal["laplace", "gaussian"]
_WIDTH = 500  # features of a table whose every column is a trial
_FIRST_BIN, _BINS, _CLASSES = 6, 300, 64  # of a histogram: from 1/64 on, every bin is a trial


def source_answers(price: Price, statistic: type[Histogram] | type[GapCells] = Histogram) -> Release:
    """A calibration source that is asked for the counts or gaps of 300 bins, through `Source.answer` itself.

    Every unit is right, with a confidence of its own: a unit adds 1 to its bin's total and 1 to its correct (or its
    gap, and what that leaves of 1), which is all that it may add, and no other unit touches that bin. So every bin
    of an answer is one trial.
    """
    noise = price.noise
    confidences = (torch.arange(_FIRST_BIN, _BINS) + 0.5) / _BINS
    rest = (1 - confidences)[:, None] / (_CLASSES - 1)
    probs = torch.cat([confidences[:, None], rest.expand(-1, _CLASSES - 1)], dim=1).double()
    bins = slice(_FIRST_BIN, _BINS), slice(_BINS + _FIRST_BIN, 2 * _BINS)
    added = np.ones((len(probs), 2))
    if statistic is GapCells:
        added = np.stack([1 - confidences.numpy(), confidences.numpy()], axis=1)

    def release(present: bool, trials: int) -> Array:
        rows = probs if present else probs[:0]
        budget = Budget(math.inf, 0.0 if noise == "laplace" else 1e-5)
        source = Source("audit", probs=rows, labels=torch.zeros(len(rows)).long(), budget=budget, noise=noise)
        found: list[Array] = []
        while sum(map(len, found)) < trials:
            query = Query(id=f"q{len(found)}", statistic=statistic(bins=_BINS), price=price)
            values = np.array(source.answer(query).values)
            each = np.stack([values[part] for part in bins], axis=1)
            # beyond 0 and what is added the likelihood ratio of Laplace noise stays as it is
            found.append(each.clip(0.0, added).sum(1) if noise == "laplace" else (each * added).sum(1))
        return np.concatenate(found)[:trials]

    return release


def source_shares(price: Price, honest: int = 2) -> Release:
    """The total of what two sources give through `Source.share`, of which the first has the units that are attacked.

    As in ``source_answers`` every bin is one trial: a unit adds 1 to the correct ones of its bin.
    """
    noise = price.noise
    confidences = (torch.arange(_FIRST_BIN, _BINS) + 0.5) / _BINS
    rest = (1 - confidences)[:, None] / (_CLASSES - 1)
    probs = torch.cat([confidences[:, None], rest.expand(-1, _CLASSES - 1)], dim=1).double()
    shares = Shares(needed=2 * honest, honest=honest, steps=8 if noise == "laplace" else 4096)

    def release(present: bool, trials: int) -> Array:
        budget = Budget(math.inf, 0.0 if noise == "laplace" else 1e-5)
        parties = []
        for party in range(honest):
            rows = probs if present and not party else probs[:0]
            labels = torch.zeros(len(rows)).long()
            parties.append(
                Source(f"s{party}", probs=rows, labels=labels, budget=budget, noise=noise, trust="secure-aggregation")
            )
        found: list[Array] = []
        while sum(map(len, found)) < trials:
            query = Query(id=f"q{len(found)}", statistic=Cells(bins=_BINS), price=price, shares=shares)
            total = np.sum([np.array(source.share(query)) for source in parties], axis=0)
            values = np.array([shares.centred(int(value)) / shares.steps for value in total[_FIRST_BIN:_BINS]])
            found.append(values.clip(0.0, 1.0) if noise == "laplace" else values)
        return np.concatenate(found)[:trials]

    return release


def gap_of_source(noise: Noise) -> Stage:
    """A source that is asked for its gap: a row that is sure and wrong (it adds -1), or is not there."""

    def stage(present: bool) -> None:
        probs, labels = torch.tensor([[0.334, 0.333, 0.333], [1.0, 0.0, 0.0]]), torch.tensor([0, 1])
        budget = Budget(math.inf, 0.0 if noise == "laplace" else 1e-5)
        rows = 1 + present
        source = Source("audit", probs=probs[:rows], labels=labels[:rows], budget=budget, noise=noise)
        source.answer(Query(id="gap", statistic=Gap(temperature=1.0), price=Price(noise=noise, amount=2.0)))

    return stage


def logit_cells_of_source(price: Price) -> Release:
    """A source that is asked for ``LogitCells``: a row of confidence 0.6 that is wrong, or nobody.

    The row adds -0.6 to a wide bin and 0.4 to a narrow one: 1 in all, which is all that it may add.
    """

    def stage(present: bool) -> None:
        rows = int(present)
        source = Source(
            "audit",
            probs=torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64)[:rows],
            labels=torch.tensor([1])[:rows],
            budget=Budget(math.inf, 0.0 if price.noise == "laplace" else 1e-5),
            noise=price.noise,
        )
        source.answer(Query(id="cells", statistic=LogitCells(), price=price))

    again, _ = releases_of(stage, name="logit cells")
    added = np.array([0.6, 0.4])

    def release(present: bool, trials: int) -> Array:
        values: Array = again(present, trials) * np.array([-1.0, 1.0])
        # beyond 0 and what is added the likelihood ratio of Laplace noise stays as it is
        score: Array = values.clip(0.0, added).sum(1) if price.noise == "laplace" else (values * added).sum(1)
        return score

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


def evaluation(mu: float) -> Stage:
    """A charged `Evaluation` at the end of a run of `fit`: of an unreadable unit and of one that is right.

    The second is present, or is not. One release of ``mu``.
    """

    def stage(present: bool) -> None:
        model = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(model.weight)
        train = (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
        rows = torch.tensor([[math.nan, math.nan], [1.0, 0.0]])[: 1 + present]
        held_out = Evaluation(
            data=(rows, torch.zeros(len(rows)).long()),
            subject="held out",
            epsilon=epsilon_of(mu, 1e-5),
            delta=1e-5,
            size=1,
        )
        with warnings.catch_warnings(), Ledger("sqlite://") as ledger:
            warnings.simplefilter("ignore")
            fit(
                model,
                train,
                optimizer=DPGD(steps=1, lr=1e-9),
                epsilon=math.inf,
                delta=1e-5,
                size=2,
                scheme="full",
                head="keep",
                ledger=ledger,
                evaluate=held_out,
            )

    return stage


def selected(epsilon: float, kind: Literal["scores", "winner"]) -> Stage:
    """`tune.noisy_selection` between two candidates: one unit prefers the first or the second, another the second.

    Under replace-one a unit moves one score up and the other down, which is the worst that it can do.
    """

    def stage(present: bool) -> None:
        delta = 0.0 if kind == "winner" else 1e-5
        with Ledger("sqlite://") as ledger:
            noisy_selection(
                [0, 1],
                lambda candidate: torch.tensor([float((candidate == 0) == present), float(candidate == 1)]),
                Budget(epsilon, delta),
                size=2,
                ledger=ledger,
                subject="audit",
                neighbours="replace-one",
                release=kind,
            )

    return stage


def watched_step(epsilon: float, *, batchnorm: bool) -> Stage:
    """One step of Tent with a monitor, and with private statistics of BatchNorm: all blocks of one joint release.

    The row is certain of one class, and its gradient is longer than the clip; it is there, or is not a number
    (zero-out).
    """

    def stage(present: bool) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            norm: nn.Module = nn.BatchNorm1d(6) if batchnorm else nn.LayerNorm(6)
            model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), norm, nn.Linear(6, 3)).eval()
        form = DP(epsilon, 1e-5, clip=1e-3, neighbours=Neighbours.ZERO_OUT)
        row = torch.full((1, 1, 2, 2), 3.0 if present else math.nan)
        with warnings.catch_warnings(), Ledger("sqlite://") as ledger:
            warnings.simplefilter("ignore")
            kind = {"statistics": "private"} if batchnorm else {}
            Tent(model, privacy=form, batch_size=1, ledger=ledger, monitor=True, **kind)(row)  # type: ignore[arg-type]

    return stage


def areas(mu: float) -> Stage:
    """A charged evaluation of several labels (a histogram of scores) of a unit that is present, or is not."""

    def stage(present: bool) -> None:
        model = nn.Linear(2, 2, bias=False)
        nn.init.eye_(model.weight)
        rows = torch.tensor([[math.nan, math.nan], [4.0, -4.0]])[: 1 + present]
        settings = Evaluation(
            data=(rows, torch.tensor([[1.0, 0.0]]).expand(len(rows), 2).clone()),
            subject="held out",
            epsilon=epsilon_of(mu, 1e-5),
            delta=1e-5,
            size=1,
        )
        with warnings.catch_warnings(), Ledger("sqlite://") as ledger:
            warnings.simplefilter("ignore")
            fit(
                model,
                (torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])),
                optimizer=DPGD(steps=1, lr=1e-9),
                epsilon=math.inf,
                delta=1e-5,
                size=2,
                scheme="full",
                head="keep",
                task=Labels(2),
                ledger=ledger,
                evaluate=settings,
            )

    return stage
