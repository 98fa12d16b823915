"""The statistics of BatchNorm layers under shift: those of the source, of each batch, or private ones.

A BatchNorm layer normalises by a mean and a variance per channel. Under shift those of the training data are wrong,
and much of what adaptation gives such nets is new statistics. Published methods take those of the batch, which mixes
rows. Here each unit's own moments are bounded and released with its gradient, and move the layer's from step to step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tacit.gradients import channel_moments

Statistics = Literal["source", "batch", "private"]
KINDS = ("source", "batch", "private")
CALM = 0.1  # the deviation of the noise in a moment, in deviations of the source, that a net bears
_PER_NUMBER = 0.5  # the root mean square of what a unit may add to each number, in deviations of the source
_FAR = 30.0  # deviations of the source between its mean and zero
_SMALLEST, _LARGEST = 0.05, 20.0  # of a variance, relative to the source's


class _Source:
    """What moments of a layer's inputs are measured against: their mean and deviation in the source."""

    def __init__(self, mean: Tensor, var: Tensor, eps: float) -> None:
        self._mean, self._scale = mean.float(), torch.rsqrt(var.float() + eps)
        # E (x - m)^2 from E x^2 saves a copy of the map, and loses digits where m is many deviations
        self._far = bool((self._mean * self._scale).abs().max() > _FAR)

    def moments(self, x: Tensor, out: Tensor) -> None:
        """The mean over a row's positions of z, and of z^2 - 1, for every channel: (2, rows, channels), float32."""
        x = x.float()
        if channel_moments(x, self._mean, self._scale, out) is None:
            out.copy_(self.in_torch(x))

    def in_torch(self, x: Tensor) -> Tensor:
        """The same, in two passes over the map, for whatever the compiled kernel does not take."""
        x = x.flatten(2) if x.dim() > 2 else x[..., None]
        if self._far:
            x = x - self._mean[:, None]
        # a norm makes no copy of the squares: on large maps ten times faster than square().mean()
        square = torch.linalg.vector_norm(x, dim=2).square_().div_(x.shape[2])
        shift = x @ x.new_full((x.shape[2],), 1 / x.shape[2])
        if not self._far:
            shift = shift - self._mean
            square = square - self._mean * (self._mean + 2 * shift)
        return torch.stack([shift * self._scale, square * self._scale.square() - 1])


class BatchStatistics:
    """Per-channel moments of every BatchNorm layer, measured against the source's mean and variance.

    With z = (x - mean) / std by the *source's* statistics, a row's part is the mean over its positions of z and of
    z^2 - 1, for every channel of every layer: zero where nothing has shifted. Released sums divided by the batch
    size enter a moving average a <- (1 - rate) a + rate * new, that starts at the source. The noise
    variance of that average is known, so each layer's part is shrunk by the positive-part James-Stein factor
    max(0, 1 - noise / mean square): where noise drowns the moments, the layer stays with the source.

    Formal guarantee: `width` numbers per unit, mean over the unit's rows, scaled to L2 norm `bound` =
    sqrt(width) / 2 (a root mean square of half a standard deviation), computed from the unit's own rows and from
    released statistics. One unit moves the sum by at most `bound` (twice, when replaced by another: the relation's
    factor), and the sum leaves as a block of the step's joint Gaussian release (`_side_blocks`).

    Args:
        model: Its BatchNorm layers must have running statistics.
        rate: Of the moving average.
    """

    def __init__(self, model: nn.Module, *, rate: float = 0.4) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        self.rate = rate
        sources = [(_buffer(m, "running_mean").clone(), _buffer(m, "running_var").clone(), m.eps) for m in self.layers]
        self._seen = [_Source(*each) for each in sources]
        self._sizes = [m.num_features for m in self.layers]
        self._counts = torch.tensor(self._sizes, dtype=torch.int64)
        self._layer = torch.repeat_interleave(self._counts)  # of every channel
        self._mean = _side_by_side(mean for mean, _, _ in sources)
        self._var = _side_by_side(var for _, var, _ in sources)
        self._deviation = _side_by_side((var.cpu().double() + eps).sqrt() for _, var, eps in sources)
        self.width = 2 * sum(self._sizes)
        self.bound = _PER_NUMBER * math.sqrt(max(self.width, 1))
        self.moments = torch.zeros(self.width, dtype=torch.float64)  # first all means, then all second moments
        self.latest = torch.zeros_like(self.moments)  # what the last release said, per row
        self.noise = 0.0  # the variance that noise has left in each of them

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """While a model runs, its forward notes the moments of its BatchNorm layers' inputs.

        That is one matrix, rows x `width`; of a layer that is used several times, the mean over its uses. What other
        threads have the model predict meanwhile is not of this batch, and is not noted.
        """
        here = threading.get_ident()
        uses = [0] * len(self.layers)
        noted: list[Tensor] = []
        parts: list[Tensor] = []  # of the matrix, for each layer: (2, rows, channels)

        def look(place: int) -> Any:
            def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                if threading.get_ident() != here:
                    return
                x = inputs[0].detach()
                if not parts:
                    noted.append(torch.empty(len(x), self.width, dtype=torch.float32, device=x.device))
                    parts.extend(torch.split(noted[0].view(len(x), 2, -1).transpose(0, 1), self._sizes, 2))
                mine = parts[place]
                if x.shape[:2] != mine.shape[1:]:
                    raise ValueError("Private statistics need BatchNorm layers that see the rows of the batch.")
                uses[place] += 1
                if uses[place] == 1:
                    self._seen[place].moments(x, mine)
                else:
                    again = torch.empty_like(mine)
                    self._seen[place].moments(x, again)
                    mine.lerp_(again, 1 / uses[place])

            return hook

        handles = [layer.register_forward_pre_hook(look(place)) for place, layer in enumerate(self.layers)]
        try:
            yield noted
        finally:
            for handle in handles:
                handle.remove()
            if not all(uses):
                noted.clear()  # a layer was not reached

    def mix(self, total: Tensor, part: float, size: int, deviation: float) -> None:
        """Take in a released sum whose noise has this standard deviation, and set the layers by it.

        `part` is how much of a full batch of `size` rows there was: a small batch moves the average less, and its noise
        is that of a full one.
        """
        self.latest = total.to(self.moments) / size
        self.moments = torch.add((1 - self.rate * part) * self.moments, self.latest, alpha=self.rate)
        self.noise = (1 - self.rate * part) ** 2 * self.noise + (self.rate * deviation / size) ** 2
        self.publish()

    def publish(self) -> None:
        """Set every layer's mean and variance by the moments as they are."""
        first, second = self._shrunk(self.moments.view(2, -1))
        spread = (1 + second - first.square()).clamp_(_SMALLEST, _LARGEST)
        means = torch.split(torch.addcmul(self._mean, first, self._deviation), self._sizes)
        variances = torch.split(self._var * spread, self._sizes)
        places = [_buffer(layer, name) for name in ("running_mean", "running_var") for layer in self.layers]
        if places:
            with torch.no_grad():
                torch._foreach_copy_(places, [*means, *variances])

    def _shrunk(self, parts: Tensor) -> Tensor:
        """First and second moments, each layer's by its own factor."""
        power = parts.new_zeros(2, len(self._sizes)).index_add_(1, self._layer, parts.square()) / self._counts
        factor = torch.where(power > 0, (1 - self.noise / power).clamp(min=0.0), 1.0)
        return parts * factor[:, self._layer]

    def reset(self) -> None:
        """The source's statistics again."""
        self.moments, self.noise = torch.zeros_like(self.moments), 0.0
        self.publish()

    def take_batch(self, forward: Callable[[], Any]) -> None:
        """Set every layer's statistics to those of this batch, exactly: not private."""

        def hook(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].detach()
            axes = [axis for axis in range(x.dim()) if axis != 1]
            _buffer(layer, "running_mean").copy_(x.mean(axes))
            _buffer(layer, "running_var").copy_(x.var(axes, unbiased=False))

        handles = [layer.register_forward_pre_hook(hook) for layer in self.layers]
        try:
            with torch.no_grad():
                forward()
        finally:
            for handle in handles:
                handle.remove()

    def live(self) -> None:
        """As published: every layer normalises by the batch, with its gradient through the batch's statistics."""
        for layer in self.layers:
            layer.train()
            layer.track_running_stats = False  # the source's statistics stay where they are


def best_share(*, lr: float, momentum: float, clip: float, steps: int, bound: float, rate: float) -> float:
    """Which share of the budget the statistics get: what minimises the noise in the normalised activations.

    Noise in a layer's scale or shift and noise in its mean or deviation move its output by the same amount per channel.
    Per unit of the multiplier, the first has grown after T steps of momentum m to lr C sqrt(T) / (1 - m), and the
    second, an average that forgets, stays at S sqrt(rate / (2 - rate)). With a share rho for the statistics the sum of
    squares is a^2 / (1 - rho) + b^2 / rho, whose minimum is at rho = b / (a + b). All of it is public.

    Returns:
        The share, between 0.05 and 0.9.
    """
    grown = lr * clip * math.sqrt(steps) / (1 - momentum)
    kept = bound * math.sqrt(rate / (2 - rate))
    return min(0.9, max(0.05, kept / (grown + kept)))


def calmest_rate(*, noise: float, share: float, bound: float, batch_size: int, fastest: float) -> float:
    """The rate of the moving average: `fastest`, or less where noise would leave more than `CALM` in each number.

    Per step and row the noise has the deviation s = z S / (sqrt(rho) B); an average of rate r keeps s sqrt(r/(2 - r)).
    """
    step = noise * bound / (math.sqrt(share) * batch_size)
    if not step:
        return fastest
    kept = (CALM / step) ** 2
    return min(fastest, 2 * kept / (1 + kept))


def has_batch_norm(model: nn.Module) -> bool:
    """Whether there is a BatchNorm layer."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _buffer(layer: nn.Module, name: str) -> Tensor:
    found = getattr(layer, name)
    if not isinstance(found, Tensor):
        raise ValueError("A BatchNorm layer without running statistics has none to start from.")
    return found


def _side_by_side(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *(part.cpu().double() for part in parts)])
