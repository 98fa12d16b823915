"""The only place that draws noise. Every call takes a receipt and refuses one that does not cover it.

What comes in is a bounded sum; what goes out is public. The noise is relative to the bound that the sum carries, never
to anything that was seen in the data.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import opendp.prelude as dp
import torch
from dp_accounting import dp_event
from torch import Tensor

from tacit.privacy import _grids as grids
from tacit.privacy._budget import Neighbours
from tacit.privacy._grids import Grid
from tacit.privacy._noise import NoiseKey
from tacit.privacy._queries import BoundedSum, GridSum, Norm
from tacit.privacy._receipt_state import released
from tacit.privacy._receipts import Receipt, ReceiptError, consume
from tacit.privacy.correlated import Mixer, Strategy
from tacit.privacy.events import DpEvent, NoisyMaxDpEvent, StreamDpEvent, is_sampled, joint_noise, leaves
from tacit.privacy.mechanisms._strategies import check_strategy, strategy_of

dp.enable_features("contrib")

Released = dict[str, Tensor]
SMOOTHING = 3.0  # in grid steps, see gaussian_query
_SMALL = 1 << 14  # coordinates of tensors that are released together, see `_alike`
_LARGEST = 2**62  # what OpenDP's 64-bit integers hold, with room
UP = 1 + 2.0**-48  # noise is rounded up, never down
_WIDEST = 2.0**55  # of Laplace noise, in grid steps: 64 bits are passed with a probability below 1e-50


def gaussian(total: BoundedSum, receipt: Receipt, *, noise: Mapping[str, float] | None = None) -> Released:
    """Release a gradient-sized sum with Gaussian noise, all its blocks in one call (the Gaussian mechanism).

    By default every coordinate gets the same noise: the receipt's noise multiplier times the joint bound of the blocks.

    Formal guarantee: one unit moves the blocks jointly by at most the relation's factor times sqrt(sum (bound_i /
    std_i)^2) standard deviations, which is the factor over the receipt's noise multiplier: the charged Gaussian. Sum
    and noise are rounded to a public grid before they are added, which makes this true of the floats that leave, too;
    what the rounding moves is in the noise (``privacy.grids``).

    Args:
        total: A sum with its per-unit bounds, such as ``gradients.clipped_sum`` returns.
        receipt: Pays for the release; one release of it is consumed before any noise is drawn.
        noise: A multiplier per block instead (relative to that block's bound), as AdpClip has for gradient and count;
            together they must cost no more than the receipt states.

    Returns:
        The noisy sum, one tensor per name. Public.

    Raises:
        ReceiptError: The receipt does not cover this release: other kind, used up, a larger bound.
        ValueError: The noise is too small or too large for a public grid.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from tacit.gradients import clipped_sum
        >>> from tacit.privacy import Budget, Ledger, events, mechanisms
        >>> ledger = Ledger("sqlite://")
        >>> subject = ledger.subject("visits", Budget(epsilon=2.0, delta=1e-6))
        >>> receipt = ledger.charge(subject, events.gaussian(4.0), stage="finetune")
        >>> loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)
        >>> total = clipped_sum(nn.Linear(3, 1), loss, (torch.ones(8, 3), torch.zeros(8, 1)), clip=1.0)
        >>> sorted(mechanisms.gaussian(total, receipt))
        ['bias', 'weight']
    """
    bounds = _bounds(total)
    event, release, key = _take_gaussian(receipt, _joint(bounds))
    fixed = _grids(total, bounds, event.noise_multiplier, noise)
    return _add(_seen(total, receipt), _draw(total.sum, key, release), fixed)


class GaussianStream:
    """Noise for a stream that was charged as one release (``StreamDpEvent``), step by step.

    Formal guarantee: that of ``privacy.correlated``, with the sensitivity of the event's strategy, contributions and
    separation folded into the scale. A clip that changes from step to step (by what was released before) is covered,
    for the stream of sums divided by their clips is what the theorem speaks of. Noise is never continued past a reset
    or the horizon: a new block starts. The noise is mixed in float64 and then rounded to the step's public grid, as
    the sum is: each step is post-processing of the joint Gaussian (``privacy.grids``). All of it holds for one sequence
    of steps, so a receipt has one stream at a time: opening a new one (which starts a new block) ends the one before,
    and a stream is never copied.

    Args:
        receipt: Covers a ``StreamDpEvent``.
        strategy: The coefficients that the stream began with, if it began elsewhere; see ``check_strategy``.

    Raises:
        ReceiptError: The receipt covers something else.
    """

    def __init__(self, receipt: Receipt, *, strategy: Strategy | None = None) -> None:
        if not isinstance(receipt, Receipt) or not isinstance(receipt.event, StreamDpEvent):
            raise ReceiptError("A noise stream needs a receipt for a stream event (tacit.privacy.events.stream).")
        self.receipt = receipt
        event = receipt.event
        self.strategy: Strategy = strategy_of(event) if strategy is None else check_strategy(strategy, event)
        self.sensitivity = self.strategy.sensitivity(event.contributions, event.separation, event.blocks)
        self._mixer: Mixer = self.strategy.mixer()
        self._lock = threading.Lock()
        receipt._state.stream = self

    def reset(self) -> None:
        """Start a new block with fresh noise (after the model was reset, say)."""
        with self._lock:  # a release that is being made puts its own noise back
            self._mixer = self.strategy.mixer()

    def release(self, total: BoundedSum, *, noise: Mapping[str, float] | None = None) -> Released:
        """The next step's sum with its noise.

        Args:
            total: The step's sum with its bounds.
            noise: A multiplier per block, as in ``gaussian``.

        Returns:
            The noisy sum. Public.

        Raises:
            ReceiptError: The stream is over, or another one was opened on this receipt.
        """
        bounds = _bounds(total)
        with self._lock:
            if self.receipt._state.stream is not self:
                raise ReceiptError("Another noise stream was opened on this receipt: use that one.")
            event, release, key = consume(self.receipt, type(self.receipt.event), _joint(bounds))
            fixed = _grids(total, bounds, event.noise_multiplier, noise, self.sensitivity)
            mixer = self.strategy.mixer() if self._over(event, release) else self._mixer
            self._mixer = self.strategy.mixer()  # what an interrupted step leaves behind must not be continued
            mixed = mixer.mix(_draw(total.sum, key, release), _shapes(total.sum))
            self._mixer = mixer
        return _add(_seen(total, self.receipt), mixed, fixed)

    def _over(self, event: StreamDpEvent, release: int) -> bool:
        """Whether a new block starts: where each unit participates once any division into blocks costs the same."""
        return self._mixer.finished if event.contributions == 1 else release % event.steps == 0


def gaussian_query(query: GridSum, receipt: Receipt) -> Tensor:
    """Release a small query with Gaussian noise from OpenDP's exact integer sampler.

    Formal guarantee: the discrete Gaussian of variance s^2 + 9 around an integer is, up to a factor within 1e-76 of 1,
    what one gets by adding N(0, s^2) and then drawing an integer from the discrete Gaussian of variance 9 around the
    result: that integer's normaliser is constant to 2 exp(-2 pi^2 9) (Poisson summation), so the two densities
    convolve as continuous ones do. The release is post-processing of the Gaussian that was charged.

    Args:
        query: A bounded sum from ``grid_sum``.
        receipt: Pays for the release.

    Returns:
        The noisy sums. Public.

    Raises:
        ReceiptError: The receipt does not cover this release.
    """
    bound = bound_of(query, "l2", receipt)
    event, release, key = _take_gaussian(receipt, bound)
    scale = event.noise_multiplier * bound / query.grid * UP
    if key.seeded:
        return _seeded(query, key.normals(release, len(query.total)) * scale)
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    wide = math.hypot(scale, SMOOTHING) if scale else 0.0
    noisy = (space >> dp.m.then_gaussian(scale=wide))(integers(query, receipt))
    return torch.tensor(noisy, dtype=torch.float64) * query.grid


def laplace(query: GridSum, receipt: Receipt) -> Tensor:
    """Release a small query with Laplace noise, rounded to the query's grid, from OpenDP's exact integer sampler.

    Formal guarantee: what is added to the integers s is round(L), drawn exactly, where L is continuous Laplace noise of
    the charged scale: s + round(L) = round(s + L) is post-processing of the Laplace mechanism, so its pure epsilon, its
    privacy loss distribution and its Renyi divergences all hold (discrete Laplace noise has the first of the three
    only). A contribution that is spread over several values costs no more than one of the same L1 norm in one value:
    with shifts e_i that add up to e, and |a| <= e, the integral of min(p, exp(a) q) is at least the product over i of
    those of min(p_i, exp(a e_i / e) q_i), which is exp((a - e) / 2), the value for one shift of e.

    Args:
        query: A bounded sum from ``grid_sum``.
        receipt: Pays for the release.

    Returns:
        The noisy sums. Public.

    Raises:
        ReceiptError: The receipt does not cover this release.

    Examples:
        >>> import torch
        >>> from tacit.privacy import Budget, Ledger, events, grid_sum, mechanisms
        >>> ledger = Ledger("sqlite://")
        >>> subject = ledger.subject("ages", Budget(epsilon=1.0, delta=0.0))
        >>> receipt = ledger.charge(subject, events.laplace(2.0), stage="statistics")  # epsilon 1/2
        >>> noisy = mechanisms.laplace(grid_sum(torch.tensor([31.0, 47.0]), low=0.0, high=100.0), receipt)
        >>> receipt.used
        1
    """
    bound = bound_of(query, "l1", receipt)
    event, release, key = consume(receipt, dp_event.LaplaceDpEvent, bound)
    scale = event.noise_multiplier * bound / query.grid * UP
    if key.seeded:
        u = key.uniforms(release, len(query.total)) - 0.5
        return _seeded(query, -scale * torch.sign(u) * torch.log1p((-2 * u.abs()).clamp_min(-1 + 2**-53)))
    noise = _rounded_laplace(scale, len(query.total))
    noisy = [float(value + more) for value, more in zip(integers(query, receipt), noise, strict=True)]
    return torch.tensor(noisy, dtype=torch.float64) * query.grid


def _rounded_laplace(scale: float, count: int) -> list[int]:
    """Exact samples of round(L), where L is continuous Laplace noise of this scale.

    With y = exp(-1 / (2 scale)) the number G of whole half steps in |L| is geometric, P(G >= k) = y^k, and |round(L)| =
    (G + 1) // 2. Discrete Laplace noise M of scale 2 ``scale``, P(M = m) in proportion to y^|m|, folded at zero gives
    G: M if M >= 0, else -M - 1. The sign of L is a fair coin of its own.
    """
    if not scale:
        return [0] * count
    if not scale < _WIDEST:
        raise ReceiptError("This noise is wider than 2^55 grid steps: give the query a coarser grid.")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l1_distance(T="i64")
    drawn = (space >> dp.m.then_laplace(scale=2 * scale))([0] * count)
    sizes = (((m if m >= 0 else -m - 1) + 1) // 2 for m in drawn)
    return [size if coin & 1 else -size for size, coin in zip(sizes, secrets.token_bytes(count), strict=True)]


def noisy_max(scores: GridSum, receipt: Receipt) -> int:
    """Release which of several scores is the largest, and nothing else (OpenDP's noisy max, pure epsilon).

    Formal guarantee: if one unit moves every score by at most d, the index is pure (2d/b)-DP for noise of scale b
    (McKenna & Sheldon 2020, permute-and-flip: exponential noise); d is the relation's factor times the score's bound.

    Args:
        scores: One bounded sum per candidate.
        receipt: Pays for the release.

    Returns:
        The index of the chosen candidate. Public.

    Raises:
        ReceiptError: The receipt does not cover this release.
    """
    bound = bound_of(scores, "linf", receipt)
    event, release, key = consume(receipt, NoisyMaxDpEvent, bound)
    scale = event.noise_multiplier * bound / scores.grid * UP
    if key.seeded:
        noise = -scale * torch.log(key.uniforms(release, len(scores.total)))
        return int(torch.argmax(torch.tensor(scores.total, dtype=torch.float64) + noise))
    return int(_noisy_max_at(scale)(integers(scores, receipt)))


@lru_cache(maxsize=16)
def _noisy_max_at(scale: float) -> Any:
    """OpenDP's measurement at a scale; it holds nothing of any data, and half of a call's time goes into making it."""
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.linf_distance(T="i64")
    return space >> dp.m.then_noisy_max(dp.max_divergence(), scale=scale)


def check(total: BoundedSum, event: DpEvent, *, noise: Mapping[str, float] | None = None) -> None:
    """Refuse, before a charge, an event whose noise no public grid holds for sums like this (its values are not read).

    Args:
        total: A sum like those that will be released; its values are not read.
        event: What will be charged.
        noise: A multiplier per block, as in ``gaussian``.

    Raises:
        ValueError: What ``gaussian`` or ``GaussianStream`` would refuse once the charge is made.
    """
    most = 0.0
    for leaf in (released(leaf) for leaf, _ in leaves(event)):
        if isinstance(leaf, StreamDpEvent):
            stretch = strategy_of(leaf).sensitivity(leaf.contributions, leaf.separation, leaf.blocks)
            most = max(most, leaf.noise_multiplier * stretch)
        elif isinstance(leaf, dp_event.GaussianDpEvent):
            most = max(most, leaf.noise_multiplier)
    if most:
        try:
            _grids(total, _bounds(total), most if noise is None else 0.0, noise)
        except ReceiptError as reason:
            raise ValueError(str(reason)) from None


def prepare(receipt: Receipt, numbers: int) -> None:
    """Draw the normals of the receipt's next release while its sum is still under way; nothing is released or consumed.

    Formal guarantee: the normals are a function of the receipt's key and the number of the release, and the release
    that follows adds the same ones whether they were drawn early or not. They stay in this process, with the key.

    Args:
        receipt: The receipt of the release to come; one that is not live here is left alone.
        numbers: How many numbers the sum will have.
    """
    if receipt.live and receipt._key is not None:
        receipt._key.prepare(receipt.used, numbers)


def _take_gaussian(receipt: Receipt, bound: float) -> tuple[dp_event.GaussianDpEvent, int, NoiseKey]:
    if isinstance(receipt, Receipt) and isinstance(receipt.event, StreamDpEvent):
        raise ReceiptError("This receipt pays for a stream: release through mechanisms.GaussianStream.")
    return consume(receipt, dp_event.GaussianDpEvent, bound)


def bound_of(query: GridSum, norm: Norm, receipt: Receipt) -> float:
    """The bound of one unit's contribution to a query.

    From a Poisson draw a unit may be missing, in REPLACE_ONE's two data sets as well, and the accountant's pair of
    distributions takes contributions as distances from zero: the middle of [low, high] will not do there.
    """
    if not isinstance(query, GridSum):
        raise ReceiptError("A query carries its bounds: make it with tacit.privacy.grid_sum.")
    if isinstance(receipt, Receipt) and receipt._state.replays and not receipt.seeded:
        raise ReceiptError(
            f"The key of receipt {receipt.id[:8]} was kept, so that its releases may be made again; a query's noise "
            "is not drawn from a key: the second time it would be another release. Charge the query by itself."
        )
    if not isinstance(receipt, Receipt) or is_sampled(receipt.event):
        return query.bound(norm, Neighbours.ADD_REMOVE)
    return query.bound(norm, receipt.neighbours)


def integers(query: GridSum, receipt: Receipt) -> list[int]:
    """The total, cut to what 64 bits hold: that moves no two totals further apart, and nothing is an error."""
    if receipt._state.rehearsal:
        return [0] * len(query.total)
    return [max(-_LARGEST, min(_LARGEST, value)) for value in query.total]


def _bounds(total: BoundedSum) -> dict[str, float]:
    """The bound of each block, after checking that the blocks cover every tensor of the sum exactly once."""
    if not all(hasattr(total, part) for part in ("sum", "bounds", "blocks")):  # a BoundedSum; isinstance is slow
        raise ReceiptError(
            f"A {type(total).__name__} is no bounded sum: give the result of clipped_sum, then the receipt."
        )
    if not total.bounds:
        raise ReceiptError("This sum carries no bounds, so no noise makes it private: use a clip policy that has some.")
    covered = [name for block in total.bounds for name in total.blocks.get(block, ())]
    if sorted(covered) != sorted(total.sum):
        raise ReceiptError("The blocks of a bounded sum must cover each of its tensors exactly once.")
    if not all(0 <= bound < math.inf for bound in total.bounds.values()):
        raise ReceiptError("A release needs a finite bound on each unit's contribution; this sum has a block without.")
    return dict(total.bounds)


def _joint(bounds: Mapping[str, float]) -> float:
    return math.hypot(*bounds.values())


def _grids(
    total: BoundedSum,
    bounds: Mapping[str, float],
    paid: float,
    noise: Mapping[str, float] | None,
    sensitivity: float = 1.0,
) -> dict[str, Grid]:
    """The grid and the noise of each tensor: of all blocks together, or of each block with noise of its own."""
    sizes = {block: sum(total.sum[name].numel() for name in total.blocks[block]) for block in bounds}
    if noise is None:
        found = dict.fromkeys(bounds, _fix(paid * sensitivity, _joint(bounds), sum(sizes.values())))
    elif set(noise) != set(bounds):
        raise ReceiptError(f"Give the noise of each block: {', '.join(bounds)}.")
    elif not joint_noise(noise.values()) >= paid * (1 - 1e-12):  # not a number is refused as well
        raise ReceiptError("The noise of the blocks together is less than what the receipt states.")
    else:
        found = {block: _fix(noise[block] * sensitivity, bounds[block], sizes[block]) for block in bounds}
    return {name: found[block] for block in bounds for name in total.blocks[block]}


def _fix(multiplier: float, bound: float, size: int) -> Grid:
    try:
        return grids.fix(float(multiplier), float(bound), size)  # in a scalar of 16 bits noise would be rounded down
    except ValueError as reason:
        raise ReceiptError(str(reason)) from None


def _draw(like: Mapping[str, Tensor], key: NoiseKey, release: int) -> Tensor:
    """Fresh standard normals for all of the sum, tensor after tensor in one line; one stream per release."""
    return key.normals(release, sum(value.numel() for value in like.values()))


def _shapes(like: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in like.items()}


def _seen(total: BoundedSum, receipt: Receipt) -> Mapping[str, Tensor]:
    """The sum; on a receipt for a rehearsal zeros in its place."""
    if receipt._state.rehearsal:
        return {name: torch.zeros_like(value) for name, value in total.sum.items()}
    return total.sum


def _add(total: Mapping[str, Tensor], noise: Tensor, fixed: Mapping[str, Grid]) -> Released:
    """Sum and noise, added on their grid in float64 on the CPU and only then cast to the sum's own type and device."""
    found: Released = {}
    alike = _alike(total, fixed)
    parts = dict(zip(total, torch.split(noise, [value.numel() for value in total.values()]), strict=True))
    for names in alike:
        grid = fixed[names[0]]
        if len(names) == 1:
            found[names[0]] = grids.add(total[names[0]], parts[names[0]].view(total[names[0]].shape), grid)
            continue
        fresh = noise if len(alike) == 1 else torch.cat([parts[name] for name in names])
        sums = [total[name] for name in names]
        value = torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in sums])
        noisy, sizes = grids.add(value, fresh, grid), [each.numel() for each in sums]
        own: list[Tensor] = torch.split_with_sizes_copy(noisy, sizes)  # type: ignore[func-returns-value,assignment]
        for name, part, each in zip(names, own, sums, strict=True):
            found[name] = part if each.dim() == 1 else part.view(each.shape)
    return {name: found[name] for name in total}


def _alike(total: Mapping[str, Tensor], fixed: Mapping[str, Grid]) -> list[list[str]]:
    """Which tensors are added together: small ones of one type on one grid; coordinate by coordinate it is the same."""
    found: dict[Any, list[str]] = {}
    for name, value in total.items():
        grid = fixed[name]
        kind = name if value.numel() > _SMALL else (grid.step, grid.std, value.dtype, value.device)
        found.setdefault(kind, []).append(name)
    return list(found.values())


def _seeded(query: GridSum, noise: Tensor) -> Tensor:
    return (torch.tensor(query.total, dtype=torch.float64) + noise.round()) * query.grid
