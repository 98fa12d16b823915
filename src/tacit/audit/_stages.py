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

from tacit import adapt, tune
from tacit.audit._canaries import Canaries, gradient_directions, loss_scores
from tacit.audit._run import Train
from tacit.finetune import Optimizer, fit
from tacit.privacy import Budget, Ledger
from tacit.tune import Finetuning, Space


def finetuning(
    optimizer: Optimizer, *, canaries: int, epsilon: float, delta: float = 1e-5, blank: bool = False, **options: Any
) -> Train:
    """`finetune.fit` on canaries of orthogonal gradients, of which the scores are their own columns of the weights.

    ``blank``: a canary that is out keeps its place as a row of zeros, whose gradient is zero (zero-out).
    """

    def train(included: Tensor) -> Tensor:
        model, made_up = gradient_directions(canaries)
        rows, labels = made_up.chosen(included)
        if blank:
            rows, labels = made_up.rows * included[:, None], made_up.labels
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
            scores.append(float(torch.cat(moved) @ torch.cat(wanted)))
        return torch.tensor(scores)

    return train


def search(
    method: Callable[..., Any], *, canaries: int, budget: Budget, space: Space | None = None, **options: Any
) -> Train:
    """A whole search of `tune` on canaries of orthogonal gradients; scores are columns of the model that it returns."""

    def train(included: Tensor) -> Tensor:
        model, made_up = gradient_directions(canaries)
        rows, labels = made_up.chosen(included)
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
