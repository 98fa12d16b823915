"""The only place that draws noise. Every call takes a receipt and refuses one that does not cover it.

What comes in is a bounded sum; what goes out is public. The noise is relative to the bound that the sum carries, never
to anything that was seen in the data.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import opendp.prelude as dp
import torch
from dp_accounting import dp_event
from torch import Tensor

from tacit.privacy.budget import Neighbours
from tacit.privacy.correlated import Mixer, Strategy, by_name
from tacit.privacy.events import NoisyMaxDpEvent, StreamDpEvent, is_sampled, joint_noise
from tacit.privacy.noise import NoiseKey
from tacit.privacy.queries import BoundedSum, GridSum, Norm
from tacit.privacy.receipts import Receipt, ReceiptError, take

dp.enable_features("contrib")

Released = dict[str, Tensor]
_SMOOTHING = 3.0  # in grid steps, see gaussian_query
_LARGEST = 2**62  # what OpenDP's 64-bit integers hold, with room


def gaussian(total: BoundedSum, receipt: Receipt, *, noise: Mapping[str, float] | None = None) -> Released:
    """Release a gradient-sized sum with Gaussian noise, all its blocks in one go.

    By default every coordinate gets the same noise: the receipt's noise multiplier times the joint bound of the blocks.
    ``noise`` gives each block its own multiplier instead (relative to that block's bound), as AdpClip does for
    gradient and count; together they must cost no more than the receipt states.

    Formal guarantee: one unit moves the blocks jointly by at most the relation's factor times sqrt(sum (bound_i /
    std_i)^2) standard deviations, which is the factor over the receipt's noise multiplier: the charged Gaussian. The
    noise is float64 and added in float64; what remains open is that floats are not reals (see the guarantees page).
    """
    bounds = _bounds(total)
    event, release, key = _take_gaussian(receipt, _joint(bounds))
    stds = _stds(bounds, event.noise_multiplier, noise)
    fresh = _draw(total.sum, key, release)
    return _add(total, fresh, stds)


class GaussianStream:
    """Noise for a stream that was charged as one release (``StreamDpEvent``), step by step.

    Formal guarantee: that of ``privacy.correlated``, with the sensitivity of the event's strategy, contributions and
    separation folded into the scale. A clip that changes from step to step (by what was released before) is covered,
    for the stream of sums divided by their clips is what the theorem speaks of. Noise is never continued past a reset
    or the horizon: a new block starts. All of it holds for one sequence of steps, so a receipt has one stream at a
    time: opening a new one (which starts a new block) ends the one before, and a stream is never copied.
    """

    def __init__(self, receipt: Receipt) -> None:
        if not isinstance(receipt, Receipt) or not isinstance(receipt.event, StreamDpEvent):
            raise ReceiptError("A noise stream needs a receipt for a stream event (tacit.privacy.events.stream).")
        self.receipt = receipt
        event = receipt.event
        self.strategy: Strategy = strategy_of(event)
        self.sensitivity = self.strategy.sensitivity(event.contributions, event.separation, event.blocks)
        self._mixer: Mixer = self.strategy.mixer()
        self._lock = threading.Lock()
        receipt._use["stream"] = self

    def reset(self) -> None:
        """Start a new block with fresh noise (after the model was reset, say)."""
        self._mixer = self.strategy.mixer()

    def release(self, total: BoundedSum, *, noise: Mapping[str, float] | None = None) -> Released:
        """The next step's sum with its noise."""
        bounds = _bounds(total)
        with self._lock:
            if self.receipt._use.get("stream") is not self:
                raise ReceiptError("Another noise stream was opened on this receipt: go on with that one.")
            event, release, key = take(self.receipt, StreamDpEvent, _joint(bounds))
            stds = _stds(bounds, event.noise_multiplier, noise)
            mixer = self.strategy.mixer() if self._over(event, release) else self._mixer
            self.reset()  # what an interrupted step leaves behind must not be continued
            mixed = mixer.step(_draw(total.sum, key, release))
            self._mixer = mixer
        return _add(total, mixed, {block: std * self.sensitivity for block, std in stds.items()})

    def _over(self, event: StreamDpEvent, release: int) -> bool:
        """Whether a new block starts: where nobody comes twice any division into blocks costs the same."""
        return self._mixer.finished if event.contributions == 1 else release % event.steps == 0


def gaussian_query(query: GridSum, receipt: Receipt) -> Tensor:
    """Release a small query with Gaussian noise from OpenDP's exact integer sampler.

    Formal guarantee: the discrete Gaussian of variance s^2 + 9 around an integer is, up to a total variation below
    1e-70 per value, what one gets by adding N(0, s^2) and then drawing an integer from the discrete Gaussian of
    variance 9 around the result: that integer's normaliser is constant to 2 exp(-2 pi^2 9) (Poisson summation), so the
    two densities convolve as continuous ones do. The release is post-processing of the Gaussian that was charged.
    """
    bound = _bound(query, "l2", receipt)
    event, release, key = _take_gaussian(receipt, bound)
    scale = event.noise_multiplier * bound / query.grid
    if key.seeded:
        return _seeded(query, key.normals(release, len(query.total)) * scale)
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    noisy = (space >> dp.m.then_gaussian(scale=math.hypot(scale, _SMOOTHING) if scale else 0.0))(_integers(query))
    return torch.tensor(noisy, dtype=torch.float64) * query.grid


def laplace(query: GridSum, receipt: Receipt) -> Tensor:
    """Release a small query with Laplace noise from OpenDP's exact integer sampler.

    Formal guarantee: integers that move by at most d in L1 and get discrete Laplace noise of scale b are pure (d/b)-DP,
    exactly (Ghosh et al. 2012); d is the relation's factor times the query's L1 bound on the grid.
    """
    bound = _bound(query, "l1", receipt)
    event, release, key = take(receipt, dp_event.LaplaceDpEvent, bound)
    scale = event.noise_multiplier * bound / query.grid
    if key.seeded:
        u = key.uniforms(release, len(query.total)) - 0.5
        return _seeded(query, -scale * torch.sign(u) * torch.log1p((-2 * u.abs()).clamp_min(-1 + 2**-53)))
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l1_distance(T="i64")
    noisy = (space >> dp.m.then_laplace(scale=scale))(_integers(query))
    return torch.tensor(noisy, dtype=torch.float64) * query.grid


def noisy_max(scores: GridSum, receipt: Receipt) -> int:
    """Release which of several scores is the largest, and nothing else (OpenDP's noisy max, pure epsilon).

    Formal guarantee: if one unit moves every score by at most d, the index is pure (2d/b)-DP for noise of scale b
    (McKenna & Sheldon 2020, permute-and-flip: exponential noise); d is the relation's factor times the score's bound.
    """
    bound = _bound(scores, "linf", receipt)
    event, release, key = take(receipt, NoisyMaxDpEvent, bound)
    scale = event.noise_multiplier * bound / scores.grid
    if key.seeded:
        noise = -scale * torch.log(key.uniforms(release, len(scores.total)))
        return int(torch.argmax(torch.tensor(scores.total, dtype=torch.float64) + noise))
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.linf_distance(T="i64")
    return int((space >> dp.m.then_noisy_max(dp.max_divergence(), scale=scale))(_integers(scores)))


def strategy_of(event: StreamDpEvent) -> Strategy:
    """The correlated-noise strategy that an event names: ``"buffered"``, or ``"banded:16"`` with its size."""
    name, _, size = event.strategy.partition(":")
    sizes = {"banded": "bands", "buffered": "buffers"}
    options = {sizes[name]: int(size)} if size and name in sizes else {}
    return by_name(name, event.steps, **options)


def _take_gaussian(receipt: Receipt, bound: float) -> tuple[dp_event.GaussianDpEvent, int, NoiseKey]:
    if isinstance(receipt, Receipt) and isinstance(receipt.event, StreamDpEvent):
        raise ReceiptError("This receipt pays for a stream: release through mechanisms.GaussianStream.")
    return take(receipt, dp_event.GaussianDpEvent, bound)


def _bound(query: GridSum, norm: Norm, receipt: Receipt) -> float:
    """The bound of one unit's contribution to a query.

    From a Poisson draw a unit may be missing, in REPLACE_ONE's two data sets as well, and the accountant's pair of
    distributions takes contributions as distances from zero: the middle of [low, high] will not do there.
    """
    if not isinstance(query, GridSum):
        raise ReceiptError("A query carries its bounds: make it with tacit.privacy.queries.grid_sum.")
    if not isinstance(receipt, Receipt) or is_sampled(receipt.event):
        return query.bound(norm, Neighbours.ADD_REMOVE)
    return query.bound(norm, receipt.neighbours)


def _integers(query: GridSum) -> list[int]:
    """The total, cut to what 64 bits hold: that moves no two totals further apart, and nothing is an error."""
    return [max(-_LARGEST, min(_LARGEST, value)) for value in query.total]


def _bounds(total: BoundedSum) -> dict[str, float]:
    """The bound of each block, after checking that the blocks cover every tensor of the sum exactly once."""
    if not isinstance(total, BoundedSum):
        raise ReceiptError(
            f"A {type(total).__name__} is no bounded sum: give the result of clipped_sum, then the receipt."
        )
    if not total.bounds:
        raise ReceiptError("This sum carries no bounds, so no noise makes it private: use a clip policy that has some.")
    covered = [name for block in total.bounds for name in total.blocks.get(block, ())]
    if sorted(covered) != sorted(total.sum):
        raise ReceiptError("The blocks of a bounded sum must cover each of its tensors exactly once.")
    return dict(total.bounds)


def _joint(bounds: Mapping[str, float]) -> float:
    return math.sqrt(math.fsum(bound**2 for bound in bounds.values()))


def _stds(bounds: Mapping[str, float], paid: float, noise: Mapping[str, float] | None) -> dict[str, float]:
    if noise is None:
        return dict.fromkeys(bounds, paid * _joint(bounds))
    if set(noise) != set(bounds):
        raise ReceiptError(f"Give the noise of each block: {', '.join(bounds)}.")
    if not joint_noise(noise.values()) >= paid * (1 - 1e-12):  # not a number is refused as well
        raise ReceiptError("The noise of the blocks together is less than what the receipt states.")
    return {block: noise[block] * bound for block, bound in bounds.items()}


def _draw(like: Mapping[str, Tensor], key: NoiseKey, release: int) -> Released:
    """Fresh standard normals in the shape of the sum, one stream per release."""
    sizes = {name: value.numel() for name, value in like.items()}
    flat = key.normals(release, sum(sizes.values()))
    parts = torch.split(flat, list(sizes.values()))
    return {name: part.view(like[name].shape) for name, part in zip(sizes, parts, strict=True)}


def _add(total: BoundedSum, noise: Released, stds: Mapping[str, float]) -> Released:
    """Sum and noise, added in float64 on the CPU and only then cast to the sum's own type and device."""
    std_of = {name: stds[block] for block in total.bounds for name in total.blocks[block]}
    return {
        name: noise[name].mul_(std_of[name]).add_(value.detach().cpu().double()).to(value.dtype).to(value.device)
        for name, value in total.sum.items()
    }


def _seeded(query: GridSum, noise: Tensor) -> Tensor:
    return (torch.tensor(query.total, dtype=torch.float64) + noise.round()) * query.grid
