"""Augmentation in torch, a whole batch at once: flips, affine maps and erased boxes.

None of these is a corruption of `data.shifts`: a model trained with them has seen no shift that it is tested on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Data augmentation: each field is a bound, drawn uniformly per image; zero switches it off.

    Args:
        flip: Horizontally, half of the images.
        rotate: Degrees.
        scale: Share of the size.
        shift: Share of the side.
        erase: The largest erased box, as a share of the side.
    """

    flip: bool = True
    rotate: float = 10.0  # degrees
    scale: float = 0.1  # of the size
    shift: float = 0.1  # of the side
    erase: float = 0.4  # of the side, the largest box

    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        return self._erased(self._moved(images, generator), generator)

    def _moved(self, images: Tensor, generator: Generator) -> Tensor:
        count = len(images)
        angle = math.radians(self.rotate) * _centred(count, generator)
        zoom = 1 + self.scale * _centred(count, generator)
        side = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0) if self.flip else torch.ones(count)
        offset = 2 * self.shift * torch.stack([_centred(count, generator), _centred(count, generator)], 1)
        turn = torch.stack([angle.cos() * side, -angle.sin(), angle.sin() * side, angle.cos()], 1).view(-1, 2, 2)
        affine = torch.cat([turn * zoom.view(-1, 1, 1), offset.unsqueeze(2)], 2)
        grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
        return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)

    def _erased(self, images: Tensor, generator: Generator) -> Tensor:
        count, _, height, width = images.shape
        box = self.erase * torch.rand(count, 2, generator=generator) / 2
        middle = torch.rand(count, 2, generator=generator)
        rows = ((torch.arange(height) + 0.5) / height - middle[:, :1]).abs() < box[:, :1]
        columns = ((torch.arange(width) + 0.5) / width - middle[:, 1:]).abs() < box[:, 1:]
        inside = (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)
        return torch.where(inside, torch.rand(count, 1, 1, 1, generator=generator), images)


def _centred(count: int, generator: Generator) -> Tensor:
    return 2 * torch.rand(count, generator=generator) - 1
