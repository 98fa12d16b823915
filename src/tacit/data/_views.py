"""Views of images: flipped and shifted copies, each decided by random numbers from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tacit._refusals import Refusal


class Augment(Protocol):
    """Changes rows; what it does to a row is decided by that row's `uniforms` (random numbers) and by nothing else."""

    @property
    def uniforms(self) -> int: ...

    def __call__(self, rows: Tensor, uniforms: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class FlipAndShift:
    """Mirror half of the images and move each by up to `shift` pixels; what comes in from outside repeats the edge."""

    flip: bool = True
    shift: int = 4

    @property
    def uniforms(self) -> int:
        return 3

    def __call__(self, rows: Tensor, uniforms: Tensor) -> Tensor:
        """`rows`: N x ... x H x W; `uniforms`: N x 3."""
        if rows.dim() < 3:
            raise Refusal(f"Only images can be flipped and shifted, N x ... x H x W; got {rows.dim()} dimensions.")
        count, height, width = len(rows), rows.shape[-2], rows.shape[-1]
        reach = 2 * self.shift + 1
        down, right = ((uniforms[:, i] * reach).ceil().long().clamp(1, reach) - 1 - self.shift for i in (1, 2))
        ys = (torch.arange(height) + down[:, None]).clamp(0, height - 1)
        xs = (torch.arange(width) + right[:, None]).clamp(0, width - 1)
        if self.flip:
            xs = torch.where((uniforms[:, :1] <= 0.5), xs.flip(1), xs)
        flat = rows.reshape(count, -1, height, width)
        places = torch.arange(count)[:, None, None]
        moved = flat.permute(0, 2, 3, 1)[places, ys[:, :, None], xs[:, None, :]]
        return moved.permute(0, 3, 1, 2).reshape(rows.shape).contiguous()
