"""The slow, obvious answers: formulas written out, every row's gradient by its own backward pass, sums in a loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from torch import Tensor, nn

from tacit import CuratorEvent, StepEvent
from tacit.adapt import DP, Adapter
from tacit.adapt._views import patch_orders
from tacit.gradients import ClippedSum
from tacit.privacy._noise import NoiseKey

Gradient = dict[str, Tensor]
CLASSES = 5


class Net(nn.Module):
    """A convolution, two linear layers and four normalisation layers, for 8 x 8 images."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.first = nn.GroupNorm(2, 4)
        self.lower = nn.Linear(4 * 64, 8)
        self.second = nn.LayerNorm(8)
        self.upper = nn.Linear(8, 8)
        self.third = nn.LayerNorm(8)
        self.fourth = nn.LayerNorm(8)
        self.head = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.conv(images))).flatten(1)
        hidden = torch.tanh(self.second(self.lower(hidden)))
        hidden = hidden + self.third(torch.tanh(self.upper(hidden)))
        return 4 * self.head(self.fourth(hidden))


def net(classes: int = CLASSES, seed: int = 0) -> Net:
    """The same net for the same seed, in float64, so that comparisons can be strict."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(classes).double()


def images(rows: int, seed: int = 1, size: int = 8) -> Tensor:
    return torch.rand(rows, 1, size, size, generator=torch.Generator().manual_seed(seed)).double()


# -- one row's loss, from the formulas -------------------------------------------------------------------------------


def plain_entropy(x: Tensor) -> Tensor:
    """-sum p log p of one row of logits."""
    p = (x - x.max()).exp() / (x - x.max()).exp().sum()
    return -sum((p_k * p_k.log() for p_k in p), torch.zeros(()))


def belief_entropy(x: Tensor, length: Tensor | None = None) -> Tensor:
    """COME: -sum b log b - u log u with b = e^x / (sum e^x + K), u = K / (sum e^x + K) and |x| a constant."""
    length = x.norm().detach() if length is None else length
    x = x / x.norm() * length
    total = x.exp().sum() + len(x)
    b, u = x.exp() / total, len(x) / total
    return -(b * b.log()).sum() - u * u.log()


@dataclass
class Loss:
    """weight(row) * uncertainty(row), weights without gradient."""

    unsure: Callable[[Tensor], Tensor] = plain_entropy
    margin: float | None = None
    patches: int | None = None
    classes: Tensor | None = None

    def __call__(self, model: nn.Module, image: Tensor, order: Tensor | None) -> Tensor:
        x = self.logits(model, image)
        h = self.unsure(x)
        if self.margin is None:
            return h
        weight = math.exp(self.margin * math.log(len(x)) - h.item())
        if self.patches is not None:
            weight += math.exp(self.lost(model, image, order))
        return weight * h

    def logits(self, model: nn.Module, image: Tensor) -> Tensor:
        x = model(image[None])[0]
        return x if self.classes is None else x[self.classes]

    def lost(self, model: nn.Module, image: Tensor, order: Tensor | None) -> float:
        """PLPD: what the predicted class loses when the image is shuffled."""
        assert order is not None
        assert self.patches is not None
        with torch.no_grad():
            before = self.logits(model, image).softmax(0)
            after = self.logits(model, shuffled_by_hand(image, self.patches, order)).softmax(0)
        best = int(before.argmax())
        return float(before[best] - after[best])


def shuffled_by_hand(image: Tensor, patches: int, order: Tensor) -> Tensor:
    """Tile by tile: place i gets what was at place order[i]."""
    high, wide = image.shape[1] // patches, image.shape[2] // patches
    out = torch.empty_like(image)
    for place in range(patches**2):
        there, here = divmod(place, patches), divmod(int(order[place]), patches)
        tile = image[:, here[0] * high : (here[0] + 1) * high, here[1] * wide : (here[1] + 1) * wide]
        out[:, there[0] * high : (there[0] + 1) * high, there[1] * wide : (there[1] + 1) * wide] = tile
    return out


# -- a run, step by step ---------------------------------------------------------------------------------------------


def norm_of(gradient: Gradient) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))


def row_gradient(model: nn.Module, names: Iterable[str], loss: Tensor) -> Gradient:
    parameters = {n: p for n, p in model.named_parameters() if n in set(names)}
    found = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


@dataclass
class Slow:
    """A private or clip-only run by brute force: rows one at a time, noise as it is handed in."""

    model: nn.Module
    names: list[str]
    loss: Loss
    clip: float
    batch_size: int
    lr: float = 0.05
    momentum: float = 0.9
    radius: float | None = None
    pull: Callable[[str, Tensor], Tensor] | None = None
    velocity: Gradient = field(default_factory=dict)
    last: Gradient | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if n in self.names}

    def unit_gradients(
        self,
        batch: Tensor,
        orders: Tensor | None = None,
        kept: list[bool] | None = None,
        units: list[int] | None = None,
    ) -> list[Gradient]:
        """Each unit's mean over its rows, in the order of the labels; a row that was filtered out counts as zero."""
        rows = []
        for i, image in enumerate(batch):
            gradient = row_gradient(self.model, self.names, self.loss(self.model, image, _at(orders, i)))
            rows.append(gradient if kept is None or kept[i] else {n: 0 * g for n, g in gradient.items()})
        units = list(range(len(batch))) if units is None else units
        members = [[row for row, unit in zip(rows, units, strict=True) if unit == u] for u in sorted(set(units))]
        return [{n: sum(row[n] for row in own) / len(own) for n in own[0]} for own in members]

    def total(self, gradients: list[Gradient]) -> Gradient:
        """The sum of the clipped gradients; the engine leaves 1e-5 of the clip for rounding."""
        total = {n: torch.zeros_like(p) for n, p in self.parameters().items()}
        for gradient in gradients:
            size = norm_of(gradient)
            factor = min(1.0, self.clip * (1 - 1e-5) / size) if size else 0.0
            for name, value in gradient.items():
                total[name] = total[name] + factor * value
        return total

    def climb(self, along: Gradient | None) -> Gradient:
        """Move by the radius along a gradient; returns the parameters from before."""
        before = {n: p.detach().clone() for n, p in self.parameters().items()}
        if along is not None and self.radius is not None:
            for name, p in self.parameters().items():
                p.data += self.radius * along[name] / norm_of(along)
        return before

    def put_back(self, before: Gradient) -> None:
        for name, p in self.parameters().items():
            p.data.copy_(before[name])

    def descend(self, mean: Gradient) -> None:
        """The pull, then SGD with momentum."""
        for name, p in self.parameters().items():
            step = mean[name] if self.pull is None else mean[name] + self.pull(name, p.detach())
            self.velocity[name] = self.momentum * self.velocity[name] + step if name in self.velocity else step
            p.data -= self.lr * self.velocity[name]

    def step(self, batch: Tensor, noise: Gradient | None = None, **given: object) -> Gradient:
        """One step of a DP form: climb along the last release, sum, noise, mean, pull, momentum."""
        before = self.climb(self.last)
        if callable(passes := given.pop("passes", None)):
            orders = given.get("orders")
            given["kept"] = [passes(self.model, image, _at(orders, i)) for i, image in enumerate(batch)]  # type: ignore[arg-type]
        total = self.total(self.unit_gradients(batch, **given))  # type: ignore[arg-type]
        self.put_back(before)
        mean = {n: (t if noise is None else t + noise[n]) / self.batch_size for n, t in total.items()}
        self.last = mean
        self.descend(mean)
        return total


def _at(orders: Tensor | None, row: int) -> Tensor | None:
    return None if orders is None else orders[row]


def slow(adapter: Adapter, model: nn.Module, loss: Loss, clip: float, **more: object) -> Slow:
    """A brute-force twin that starts where the adapter does."""
    twin = copy.deepcopy(model)
    options = {"lr": adapter.optimize["lr"], "momentum": adapter.optimize["momentum"], **more}
    return Slow(twin, list(adapter.parameters), loss, clip, adapter.batch_size, **options)  # type: ignore[arg-type]


def orders_of(seed: int, *sizes: int, patches: int = 4) -> list[Tensor]:
    """The orders of the patches for batches of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [patch_orders(size, patches, generator) for size in sizes]


# -- noise and its price ---------------------------------------------------------------------------------------------


def delta_of(epsilon: float, mu: float) -> float:
    """delta(eps; mu) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)."""
    return float(ndtr(-epsilon / mu + mu / 2) - math.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2)))


def sigma_of(epsilon: float, delta: float, factor: float = 2.0) -> float:
    """The noise multiplier of one Gaussian release with this budget; the factor is that of the relation."""
    return float(brentq(lambda s: delta_of(epsilon, factor / s) - delta, 0.05, 500, xtol=1e-13, rtol=1e-13))


def epsilon_of(mu: float, delta: float) -> float:
    return float(brentq(lambda e: delta_of(e, mu) - delta, 1e-9, 200, xtol=1e-12))


def normals(
    parameters: dict[str, nn.Parameter], key: NoiseKey, release: int, extra: int = 0
) -> tuple[Gradient, Tensor]:
    """The standard normals of a release, in the parameters' shapes, and those of what comes after them."""
    sizes = [p.numel() for p in parameters.values()]
    flat = key.normals(release, sum(sizes) + extra)
    parts = torch.split(flat[: sum(sizes)], sizes)
    return {n: part.view(p.shape) for (n, p), part in zip(parameters.items(), parts, strict=True)}, flat[sum(sizes) :]


def seeded_key(seed: int, subject: str = "stream", charges: int = 1) -> NoiseKey:
    """The key of a seeded ledger's charge."""
    return NoiseKey((seed, subject, charges))


def assert_same(adapter: Adapter, twin: Slow, tolerance: float = 2e-5) -> None:
    """Equal parameters, up to a share of how far they moved from the source model.

    Releases lie on a grid of 2^-20 of the noise, which pays for the rounding of the sum with a few millionths more.
    """
    moved = norm_of({n: p.detach() - adapter.origin[n] for n, p in adapter.parameters.items()})
    own = twin.parameters()
    gap = norm_of({n: p.detach() - own[n].detach() for n, p in adapter.parameters.items()})
    assert moved > 0
    assert gap <= tolerance * moved, f"off by {gap / moved:.1e} of the way"


class Curious:
    """A curator who keeps every sum, copied."""

    def __init__(self) -> None:
        self.sums: list[Gradient] = []
        self.told: list[ClippedSum] = []

    def __call__(self, event: CuratorEvent) -> None:
        assert isinstance(event, StepEvent)
        total = event.clipped_sum
        assert isinstance(total, ClippedSum)
        self.told.append(total)
        self.sums.append({n: v.detach().clone() for n, v in total.sum.items()})


def apart(a: Gradient, b: Gradient) -> float:
    return norm_of({n: a[n] - b[n] for n in a})


def same_bits(a: Adapter, b: Adapter) -> bool:
    """Whether two adapters stand at exactly the same parameters."""
    return all(torch.equal(p, b.parameters[n]) for n, p in a.parameters.items())


LOOSE = DP(20.0, 1e-6, clip=0.5)
