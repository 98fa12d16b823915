"""The stages with canaries in them: what `run` needs to audit `finetune.fit`, an adapter, a search, a source."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tacit import adapt, tune
from tacit.audit._canaries import Canaries, gradient_directions, loss_scores
from tacit.audit._run import Train
from tacit.finetune import Optimizer, fit, make_private
from tacit.privacy import Budget, Ledger
from tacit.tune import Finetuning, Space


def finetuning(
    optimizer: Optimizer, *, canaries: int, epsilon: float, delta: float = 1e-5, blank: bool = False, **options: Any
) -> Train:
    """`finetune.fit` on canaries of orthogonal gradients, of which the scores are their own columns of the weights.

    ``blank``: a canary that is out keeps its place as a row of zeros, whose gradient is zero (zero-out).
    """

    def train(included: Tensor) -> Tensor:
        model, synthetic = gradient_directions(canaries)
        rows, labels = synthetic.chosen(included)
        if blank:
            rows, labels = synthetic.rows * included[:, None], synthetic.labels
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No ledger was given")
            fitted = fit(
                model,
                (rows, labels),
                optimizer=optimizer,
                epsilon=epsilon,
                delta=delta,
                size=canaries if blank else canaries // 2,
                scheme="full",
                head="keep",
                **options,
            )
        return _columns(fitted.model)

    return train


def own_loop(*, canaries: int, epsilon: float, delta: float = 1e-5, batch_size: int, steps: int) -> Train:
    """A training loop of one's own made private (`make_private`) on canaries of orthogonal gradients, under zero-out.

    A canary that is out keeps its place as a row of zeros, whose gradient is zero.
    """

    def train(included: Tensor) -> Tensor:
        model, made_up = gradient_directions(canaries)
        rows = TensorDataset(made_up.rows * included[:, None], made_up.labels)
        with warnings.catch_warnings(), Ledger("sqlite://") as ledger:
            warnings.simplefilter("ignore")
            loop = make_private(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                DataLoader(rows, batch_size=batch_size, shuffle=True),
                nn.functional.cross_entropy,
                epsilon=epsilon,
                delta=delta,
                steps=steps,
                clip=1.0,
                ledger=ledger,
                subject="canaries",
            )
            for batch in loop:
                loop.step(batch)
        return _columns(model)

    return train


def finetuning_rows(
    model: nn.Module, canaries: Canaries, data: tuple[Any, Tensor], fit_with: Callable[[nn.Module, Any], Any]
) -> Train:
    """Any training of a copy of ``model`` on ``data`` and the canaries that are in; scores are falls of the loss.

    ``fit_with(model, (rows, labels))`` trains in place, or returns a model or a result with ``.model``.
    """

    def train(included: Tensor) -> Tensor:
        mine, labels = canaries.chosen(included)
        together = (_joined(data[0], mine), torch.cat([data[1], labels]))
        trained = copy.deepcopy(model)
        result = fit_with(trained, together)
        after = getattr(result, "model", result if isinstance(result, nn.Module) else trained)
        return loss_scores(model, after, canaries)

    return train


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {name: torch.cat([value, other[name]]) for name, value in one.items()}
    return [*one, *other] if isinstance(one, list) else torch.cat([one, other])


def adaptation(
    make: Callable[..., adapt.Adapter], model: nn.Module, rows: Tensor, *, privacy: adapt.DP, **options: Any
) -> Train:
    """An adapter over a stream of one canary per step, who sees every step's parameters.

    A canary that is out is a row that is not a number, which takes no part (zero-out). Its score is how far the
    parameters moved, at its step, along the gradient that it would have: a second adapter without noise tells which.
    Private statistics of BatchNorm layers, which leave in the same release, are read in the same way, and the two are
    added with the weights of a likelihood ratio.
    """
    silent = replace(privacy, epsilon=math.inf)  # the same form without its noise

    def train(included: Tensor) -> Tensor:
        rate: dict[str, Any] = {"batch_size": 1, "lr": 1.0, "momentum": 0.0} | options
        private = make(copy.deepcopy(model), privacy=privacy, ledger=Ledger("sqlite://"), **rate)
        guess = make(copy.deepcopy(model), privacy=silent, **rate)
        scores = []
        for row, there in zip(rows, included.tolist(), strict=True):
            before = {name: p.detach().clone() for name, p in private.parameters.items()}
            guess.reset()
            with torch.no_grad():
                for name, p in guess.parameters.items():
                    p.copy_(before[name])
            guess(row[None])
            private(row[None] if there else torch.full_like(row[None], float("nan")))
            moved = [(p.detach() - before[n]).flatten() for n, p in private.parameters.items()]
            wanted = [(p.detach() - before[n]).flatten() for n, p in guess.parameters.items()]
            scores.append(float(torch.cat(moved) @ torch.cat(wanted)) + _along_statistics(private, guess))
        return torch.tensor(scores)

    return train


def _along_statistics(private: adapt.Adapter, guess: adapt.Adapter) -> float:
    """The same for the statistics of this step, relative to the noise in gradient and statistics."""
    if private.statistics is None or guess.statistics is None or not isinstance(private.privacy, adapt.DP):
        return 0.0
    statistics, clip = private.statistics, float(private.privacy.clip)  # type: ignore[arg-type]
    seen, wanted = statistics.latest, guess.statistics.latest
    share = private.shares["batch statistics"]
    return float(seen @ wanted) * share / (1 - share) * (clip / statistics.bound) ** 2


def search(
    method: Callable[..., Any], *, canaries: int, budget: Budget, space: Space | None = None, **options: Any
) -> Train:
    """A whole search of `tune` on canaries of orthogonal gradients; scores are columns of the model that it returns."""

    def train(included: Tensor) -> Tensor:
        model, synthetic = gradient_directions(canaries)
        rows, labels = synthetic.chosen(included)
        trainable = Finetuning(
            model, (rows, labels), size=canaries // 2, scheme="full", head="keep", delta=budget.delta
        )
        box = space or Space(lr=(0.1, 1.0), steps=(2, 4))
        found: tune.Tuned = method(trainable, box, budget, ledger=Ledger("sqlite://"), subject="canaries", **options)
        return _columns(found.model)

    return train


def _columns(model: nn.Module) -> Tensor:
    """How far each canary's own column moved towards its label."""
    (weight,) = (p.detach() for p in model.parameters())
    return weight[0] - weight[1]
