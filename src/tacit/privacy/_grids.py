"""The public grid on which a gradient-sized sum is released, and the noise that pays for it.

Floats are denser near zero: which of them can come out of "sum plus noise" depends on the sum, and the low-order bits
of many coordinates give it away (Mironov, 2012). So the sum and the noise are both rounded to one public grid before
they meet.

Formal guarantee
----------------
Let g be the grid's step, d the number of coordinates, s the sum of one data set and n the charged Gaussian noise.
What leaves is R(round(s) + round(n)), where round goes to the nearest multiple of g and R to the nearest float.

- round(s) + round(n) = round(round(s) + n), for round(s) lies on the grid: it is post-processing of the Gaussian
  mechanism applied to round(s), coordinate by coordinate, whatever the covariance of n (so the argument serves
  correlated noise, which is rounded after it was mixed).
- R is post-processing, too: an IEEE sum is the exact sum, rounded. So is the cast to another type. The product with g
  is exact, because g is a power of two; and zero has one sign.
- One unit moves s by at most the bound, and round(s) by at most bound + g sqrt(d): each of the two sums moves by up to
  g/2 in each coordinate. The noise is that much larger: std = multiplier * (bound + g sqrt(d)), so the multiplier is
  what was charged. Under REPLACE_ONE 2 bound + g sqrt(d) is within twice that. In a step of a stream in which a unit
  takes no part both sums are the same, and so are their roundings.
- g depends on multiplier, bound and d alone, which are public. It is at most 2^-20 std, at most 2^-14 bound / sqrt(d)
  (the noise grows by less than 7e-5) and not finer than 2^-26 std, or 2^-27 as a power of two. For n comes from
  float64: its last bits are off by an ulp or two, so that the probability of a cell of g is off by a relative
  2^-51 std / g, and d such errors must stay far below what one unit moves (see the page of proofs, on randomness). On
  the coarser grid the noise grows by 2^-26 sqrt(d) std / bound: 3e-4 for a million coordinates at a multiplier of
  20, 3e-3 for a hundred million. Noise that would grow by a sixteenth is refused; it is more than 2^22 / sqrt(d)
  times the bound.
- A coordinate of a sum that is not finite is zero before the noise comes. A sum of bounded contributions is finite, so
  this is for producers that break their promise: NaN would show through any noise. Overflow of float16, which can
  happen to honest sums, saturates at 65504: a clamp moves no two sums further apart.

What is idealised: that n is normal. It comes from uniforms of 53 to 106 bits through float64 (``privacy.noise``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.privacy import _kernels

_BELOW_NOISE, _BELOW_BOUND, _FINEST, _DEAREST = 2.0**-20, 2.0**-14, 2.0**-26, 2.0**-4
_RANGE = 1e-200, 1e200  # of a standard deviation and a bound: all that is computed from them is a normal float64
_CHUNK = 1 << 15  # coordinates at a time: a quarter of a megabyte, which stays in cache from pass to pass


@dataclass(frozen=True)
class Grid:
    """A power of two and the standard deviation of the noise that goes with it; both 0 without noise."""

    step: float
    std: float


def fix(multiplier: float, bound: float, size: int) -> Grid:
    """The grid of a block of ``size`` coordinates, and its noise with the rounding paid for."""
    if multiplier == 0:
        return Grid(0.0, 0.0)
    std, root = multiplier * bound, math.sqrt(max(size, 1))
    step = max(min(_BELOW_NOISE * std, _BELOW_BOUND * bound / root), _FINEST * std)
    if not (all(_RANGE[0] < value < _RANGE[1] for value in (std, bound)) and step * root <= _DEAREST * bound):
        raise ValueError(
            f"Noise of {std:g} on {size:,} numbers with contributions up to {bound:g} is beyond what float64 holds on "
            "a grid: train fewer parameters, or make fewer steps or spend more, so that each step needs less noise."
        )
    step = math.ldexp(0.5, math.frexp(step)[1])  # the power of two at or below it
    return Grid(step, multiplier * (bound + step * root) * (1 + 2.0**-48))


def add(value: Tensor, noise: Tensor, grid: Grid) -> Tensor:
    """A part of the sum and its standard noise (float64, CPU; overwritten), on the grid, then in the sum's type."""
    own = value.detach().cpu()
    if not grid.step:
        return own.clone().to(value.device)
    found = _kernels.grid_add(own, noise, grid.std / grid.step, grid.step)
    return (in_torch(own, noise, grid) if found is None else found).to(value.device)


def in_torch(own: Tensor, noise: Tensor, grid: Grid) -> Tensor:
    """The same by torch, in every type: some coordinates at a time, several passes over each."""
    out = torch.empty(own.shape, dtype=own.dtype)
    zero, room = torch.zeros((), dtype=torch.float64), torch.empty(min(own.numel(), _CHUNK), dtype=torch.float64)
    flat = (torch.split(tensor.reshape(-1), _CHUNK) for tensor in (out, own, noise))
    for target, part, fresh in zip(*flat, strict=True):
        steps = room[: len(part)].copy_(part)
        if own.dtype == torch.float16:
            steps.clamp_(-65504.0, 65504.0)
        steps.mul_(1 / grid.step).round_().nan_to_num_(0.0, 0.0, 0.0)
        fresh.mul_(grid.std / grid.step).round_().add_(steps)
        torch.add(zero, fresh, alpha=grid.step, out=fresh)  # 0 + x: a negative zero would reveal the sum's sign
        target.copy_(fresh)
    return out
