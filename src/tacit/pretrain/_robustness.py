"""How a model withstands noise on its weights, as private training adds it: accuracy under noise, and rho.

Weights are put back bit for bit, whatever happens. Rows are read as they are: the data has to be public.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tacit.pretrain._rows import as_table, checked, said

STDS = (0.1, math.sqrt(0.1))  # the two readings of the paper's N(0, 0.1): as a deviation, and as a variance
RELATIVE = (0.1, 0.2, 0.5)
_ROWS = 500  # tried at a time


@dataclass(frozen=True, kw_only=True)
class Noisy:
    """Accuracies (0 to 1) under draws of N(0, std^2) on every parameter; `relative`: std times the parameter tensor's
    root mean square.

    Args:
        std: The noise's standard deviation.
        relative: Whether it is relative to each parameter tensor's root mean square.
        accuracies: One per draw.
    """

    std: float
    relative: bool = False
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """The standard deviation over draws."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Rho:
    """The largest change of the outputs per unit of change of the weights that was found: a lower bound of rho.

    `random`: along random directions; `ascent`: after gradient ascent from them.

    Args:
        random: Along random directions.
        ascent: After gradient ascent from them.
    """

    random: float
    ascent: float


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """What is left of a model's accuracy under noise, and how far its outputs move.

    Args:
        clean: Accuracy without noise.
        noisy: Accuracies under noise.
        rho: How far outputs move.
    """

    clean: float
    noisy: tuple[Noisy, ...]
    rho: Rho = field(repr=False)

    def under(self, std: float, *, relative: bool = False) -> Noisy:
        """What was found under one noise."""
        for one in self.noisy:
            if one.std == std and one.relative == relative:
                return one
        raise ValueError(f"The noise {std:g}{' (relative)' if relative else ''} was not tried.")


def robust_accuracy(
    model: nn.Module, data: Any, std: float = 0.1, *, relative: bool = False, draws: int = 10, seed: int = 0
) -> float:
    """The share of rows that are right under N(0, std^2) on all parameters: mean over draws (Wang et al., 2024, 2.3).

    The paper writes N(0, 0.1): give std=0.1 or std=0.1**0.5 for the two ways to read it.

    Args:
        model: The model.
        data: (inputs, labels), or a data set of (input, label) items.
        std: The noise's standard deviation.
        relative: Whether it is relative to each parameter tensor's root mean square.
        draws: Draws of noise.
        seed: Of the draws.

    Returns:
        The mean accuracy, between 0 and 1.
    """
    return under_noise(model, data, std, relative=relative, draws=draws, seed=seed).mean


def robustness(
    model: nn.Module,
    data: Any,
    *,
    stds: Sequence[float] = STDS,
    relative: Sequence[float] = RELATIVE,
    draws: int = 10,
    rows: int = 32,
    seed: int = 0,
) -> Robustness:
    """Accuracy without noise, under each noise (absolute, and relative to each parameter tensor), and rho.

    `rows`: on how many rows rho is looked for.

    Args:
        model: The model.
        data: (inputs, labels), or a data set of (input, label) items.
        stds: Absolute standard deviations.
        relative: Relative standard deviations.
        draws: Draws of noise.
        rows: Rows on which rho is looked for.
        seed: Of the draws.

    Returns:
        All of them.
    """
    table = checked(as_table(data), model)
    noises = [(std, False) for std in stds] + [(std, True) for std in relative]
    return Robustness(
        clean=accuracy(model, table),
        noisy=tuple(under_noise(model, table, std, relative=to, draws=draws, seed=seed) for std, to in noises),
        rho=rho(model, table, rows=rows, seed=seed),
    )


def under_noise(
    model: nn.Module, data: Any, std: float, *, relative: bool = False, draws: int = 10, seed: int = 0
) -> Noisy:
    """The accuracy under each of some draws of noise; the same draws for the same seed.

    Args:
        model: The model.
        data: (inputs, labels), or a data set of (input, label) items.
        std: The noise's standard deviation.
        relative: Whether it is relative to each parameter tensor's root mean square.
        draws: Draws of noise.
        seed: Of the draws.

    Returns:
        The accuracies.
    """
    if not 0 <= std < math.inf:
        raise ValueError(f"std is a standard deviation, at least 0; got {std:g}.")
    if draws < 1:
        raise ValueError(f"draws is at least 1; got {draws}.")
    table = checked(as_table(data), model)
    generator = Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        with restored(model) as weights:
            for weight in weights:
                noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight.device)
                weight.add_(noise, alpha=std * (_size(weight) if relative else 1.0))
            found.append(accuracy(model, table))
    return Noisy(std=std, relative=relative, accuracies=tuple(found))


def accuracy(model: nn.Module, data: Any) -> float:
    """The share of rows that are right.

    Args:
        model: The model.
        data: (inputs, labels), or a data set of (input, label) items.

    Returns:
        Between 0 and 1.
    """
    table = as_table(data)
    right = 0
    for index in torch.split(torch.arange(len(table)), _ROWS):
        right += int((said(model, table, index).argmax(1).cpu() == table.labels()[index]).sum())
    return right / len(table)


def rho(
    model: nn.Module,
    data: Any,
    *,
    rows: int = 32,
    directions: int = 4,
    climbs: int = 8,
    length: float = 0.01,
    seed: int = 0,
) -> Rho:
    """An estimate from below of max |f(x; w + d) - f(x; w)| / |d| at these weights, over some rows x and all short d.

    From each of `directions` random d of this length, and for each of `rows` rows drawn from the data, the direction is
    turned `climbs` times to where the change grows fastest (power iteration on the Jacobian of the row's outputs).

    Args:
        model: The model.
        data: (inputs, labels), or a data set of (input, label) items.
        rows: Rows drawn from the data.
        directions: Random directions to start from.
        climbs: Power iterations of each.
        length: Of the change of the weights.
        seed: Of rows and directions.

    Returns:
        The estimate.
    """
    table = checked(as_table(data), model)
    generator = Generator().manual_seed(seed)
    chosen = torch.randperm(len(table), generator=generator)[:rows]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    best_random, best = 0.0, 0.0
    try:
        for row in chosen:
            inputs = table.read(row[None]).to(next(model.parameters()).device)
            for _ in range(directions):
                first, highest = _climb(model, inputs, climbs, length, generator)
                best_random, best = max(best_random, first), max(best, highest)
    finally:
        for module, mode in modes:
            module.training = mode
    return Rho(random=best_random, ascent=best)


def _climb(model: nn.Module, inputs: Tensor, climbs: int, length: float, generator: Generator) -> tuple[float, float]:
    """The change per unit along a random direction, and the largest on the way up from there."""
    with torch.no_grad():
        before = model(inputs)
    weights = list(model.parameters())
    direction = [torch.randn(w.shape, generator=generator, dtype=w.dtype).to(w.device) for w in weights]
    found = []
    for _ in range(climbs + 1):
        size = math.sqrt(sum(float(part.double().square().sum()) for part in direction))
        if size == 0:
            break
        with restored(model):
            for weight, part in zip(weights, direction, strict=True):
                weight.add_(part, alpha=length / size)
            with torch.enable_grad():
                tracked = [weight.requires_grad for weight in weights]
                for weight in weights:
                    weight.requires_grad_(True)
                change = model(inputs) - before
                gradients = torch.autograd.grad(change, weights, change.detach(), allow_unused=True)
                for weight, was in zip(weights, tracked, strict=True):
                    weight.requires_grad_(was)
        found.append(float(torch.linalg.vector_norm(change.detach())) / length)
        direction = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
    return found[0], max(found)


@contextmanager
def restored(model: nn.Module) -> Iterator[list[Tensor]]:
    """The parameters, free to be changed; afterwards each is what it was, bit for bit, also after an error."""
    with torch.no_grad():
        weights: list[Tensor] = list(model.parameters())
        before = [weight.clone() for weight in weights]
        try:
            yield weights
        finally:
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)


def _size(weight: Tensor) -> float:
    """The root mean square of a tensor."""
    return float(weight.double().square().mean().sqrt()) if weight.numel() else 0.0
