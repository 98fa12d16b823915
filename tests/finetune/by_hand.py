"""Private training as one would do it by hand: a unit at a time, in float64, with the noise of the seeded key."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit.finetune import Update
from tacit.privacy._noise import NoiseKey

SEED, SUBJECT = 3, "fine-tuning"
Weights = dict[str, Tensor]


def net(seed: int = 1) -> nn.Sequential:
    """Two linear layers in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def people(count: int = 24, seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def key(charge: int = 1, subject: str = SUBJECT) -> NoiseKey:
    """The key of a seeded run's charge."""
    return NoiseKey((SEED, subject, charge))


def drawn(step: int, count: int, rate: float) -> list[int]:
    return [i for i, u in enumerate(key().uniforms(step, count, 1).tolist()) if rate >= 1 or u <= rate]


def clipped_sum(model: nn.Module, units: Sequence[tuple[Tensor, Tensor]], clip: float) -> Weights:
    """The sum over units of their mean gradients, each clipped; one unit and one autograd call at a time."""
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    total = {name: torch.zeros_like(p) for name, p in zip(names, parameters, strict=True)}
    for inputs, labels in units:
        loss = functional.cross_entropy(model(inputs), labels)
        gradient = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
        for name, g in zip(names, gradient, strict=True):
            total[name] += g * min(1.0, clip * (1 - 1e-5) / norm)
    return total


def released(total: Tensor, fresh: Tensor, multiplier: float, bound: float) -> Tensor:
    """A block on its public grid, the largest power of two that is 2^-20 of the noise and 2^-14 of the bound in all."""
    if multiplier == 0:
        return total
    root = math.sqrt(total.numel())
    grid = 2.0 ** math.floor(math.log2(bound * min(2**-20 * multiplier, 2**-14 / root)))
    noise = multiplier * (bound + grid * root) * fresh
    return grid * ((total / grid).round() + (noise / grid).round())


def flat(total: Weights) -> Tensor:
    return torch.cat([value.reshape(-1) for value in total.values()])


def shaped(values: Tensor, like: Weights) -> Weights:
    parts = torch.split(values, [v.numel() for v in like.values()])
    return {n: part.view(v.shape) for (n, v), part in zip(like.items(), parts, strict=True)}


def with_noise(total: Weights, step: int, multiplier: float, clip: float) -> Weights:
    whole = flat(total)
    return shaped(released(whole, key().normals(step, len(whole)), multiplier, clip), total)


class ByHand:
    """Momentum, Adam, decay, schedules and averages as the text books have them."""

    def __init__(self, update: Update, weights: Weights, steps: int) -> None:
        self.update, self.steps = update, steps
        self.weights = {n: w.detach().clone() for n, w in weights.items()}
        self.first = {n: torch.zeros_like(w) for n, w in weights.items()}
        self.second = {n: torch.zeros_like(w) for n, w in weights.items()}
        self.past: list[Weights] = []

    def rate(self, step: int) -> float:
        update = self.update
        if step < update.warmup:
            return update.lr * (step + 1) / update.warmup
        share = (step - update.warmup) / (self.steps - update.warmup)
        shape = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}
        return update.lr * shape[update.schedule]

    def step(self, gradient: Weights, number: int) -> None:
        update, rate = self.update, self.rate(number)
        for name, weight in self.weights.items():
            g = gradient[name]
            if update.rule != "adamw":
                g = g + update.weight_decay * weight
            if update.rule == "sgd":
                self.first[name] = update.momentum * self.first[name] + g
                change = self.first[name]
            else:
                b1, b2 = update.betas
                self.first[name] = b1 * self.first[name] + (1 - b1) * g
                self.second[name] = b2 * self.second[name] + (1 - b2) * g**2
                mean, square = self.first[name] / (1 - b1 ** (number + 1)), self.second[name] / (1 - b2 ** (number + 1))
                change = mean / (square.sqrt() + 1e-8)
                if update.rule == "adamw":
                    change = change + update.weight_decay * weight
            self.weights[name] = weight - rate * change
        if update.free_step and number + 1 == self.steps:
            self.weights = {n: w - rate * self.first[n] for n, w in self.weights.items()}
        self.past.append(dict(self.weights))

    def averaged_weights(self) -> Weights:
        update = self.update
        if update.average == "swa":
            last = [w for t, w in enumerate(self.past) if t >= update.swa_start * self.steps]
            return {n: torch.stack([w[n] for w in last]).mean(0) for n in self.weights}
        if update.average == "ema":
            mean = dict(self.past[0])
            for t, w in enumerate(self.past[1:], 2):
                share = max(1 / t, 1 - update.decay)
                mean = {n: (1 - share) * mean[n] + share * w[n] for n in w}
            return mean
        return self.weights


def train(
    model: nn.Module,
    units: Sequence[tuple[Tensor, Tensor]],
    update: Update,
    *,
    steps: int,
    clip: float,
    rate: float,
    scale: float,
    divisor: float,
) -> Weights:
    """All of a seeded run."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    hand = ByHand(update, dict(parameters), steps)
    for step in range(steps):
        chosen = [units[i] for i in drawn(step, len(units), rate)]
        noisy = with_noise(clipped_sum(model, chosen, clip), step, scale, clip)
        hand.step({n: v / divisor for n, v in noisy.items()}, step)
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(hand.weights[name])
    return hand.averaged_weights()


def weights(model: nn.Module) -> Weights:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def gap(found: Weights, expected: Weights) -> float:
    """The largest difference."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - v).abs().max()) for n, v in expected.items())


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(v, b.state_dict()[n]) for n, v in a.state_dict().items())


def one_row_units(inputs: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(inputs[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]


def rows_in_checks(rows: int, kinds: int = 1) -> int:
    """The most rows that a frozen part is shown in checks, if so many rows of so many kinds are cached.

    Of four, twice, whether it draws random numbers. Whether rows stay apart: for each kind one row of three changes,
    three times, and one in eight of as many as there are (seven at least), with two passes each; and once all of a
    portion are copies of one real row.
    """
    return 2 * 4 + kinds * 2 * 3 * 3 + 2 * (rows + 7 * kinds) + rows
