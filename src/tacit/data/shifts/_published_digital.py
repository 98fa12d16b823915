"""What software does to a picture, as published: colour, shape and resolution."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tacit.data.shifts._dice import Dice
from tacit.data.shifts._published_blur import gaussian


def saturate(images: Tensor, dice: Dice, factor: float, more: float) -> Tensor:  # noqa: ARG001
    """Scale the saturation (of hue, saturation and value) and add to it. A grey pixel counts as red; a picture with one
    channel, which has no colour, stays as it is."""
    if images.shape[1] == 1:
        return images
    value, low = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    before = (value - low) / value.clamp(min=1e-12)
    after = (before * factor + more).clamp(0, 1)
    coloured = value - (value - images) * after / before.clamp(min=1e-12)
    red = torch.cat([value, value * (1 - after), value * (1 - after)], 1)
    return torch.where(before > 0, coloured, red)


def elastic_transform(images: Tensor, dice: Dice, stretch: float, width: float, affine: float) -> Tensor:
    """Rubber: smooth random displacements, after a random affine map where the strengths have one.

    Displacements are uniform noise of `stretch` sides, smoothed over `width` sides.
    """
    height, wide = images.shape[-2:]
    side = min(height, wide)
    if affine:
        images = _stretched(images, dice, affine * side)
    right, down = (
        stretch * side * gaussian(2 * dice.uniform(1, height, wide) - 1, width * side, truncate=3, edge="mirror")[:, 0]
        for _ in range(2)
    )
    return _read(images, *(part.to(images) for part in (down, right)), corners=False)


def _stretched(images: Tensor, dice: Dice, reach: float) -> Tensor:
    """The affine map that moves three points around the middle by up to `reach` pixels each way."""
    height, width = images.shape[-2:]
    across, size = torch.tensor([height // 2, width // 2], dtype=torch.float64), min(height, width) // 3
    points = torch.stack([across + size, across + torch.tensor([size, -size]), across - size])
    moved = points + reach * (2 * dice.uniform(3, 2).double().cpu() - 1)
    ones = torch.ones(len(images), 3, 1, dtype=torch.float64)
    back = torch.linalg.solve(torch.cat([moved, ones], 2), points.expand(len(images), 3, 2))  # target -> source
    x, y = torch.arange(width, dtype=torch.float64), torch.arange(height, dtype=torch.float64)
    grid = torch.stack([x.expand(height, width), y[:, None].expand(height, width)], -1)
    source = grid @ back[:, None, :2] + back[:, None, 2:]
    right, down = ((source - grid)[..., i].to(images) for i in range(2))
    return _read(images, down, right, corners=True)


def _read(images: Tensor, down: Tensor, right: Tensor, *, corners: bool) -> Tensor:
    """Each pixel from a place so far away, bilinear; mirrored at the middle of the outermost pixels, or at the rim."""
    count, _, height, width = images.shape
    rows = torch.arange(height, dtype=images.dtype, device=images.device)[:, None] + down
    columns = torch.arange(width, dtype=images.dtype, device=images.device)[None, :] + right
    if corners:
        places = (2 * columns / (width - 1) - 1, 2 * rows / (height - 1) - 1)
    else:
        places = ((2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1)
    grid = torch.stack([place.expand(count, height, width) for place in places], -1)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=corners)


def pixelate(images: Tensor, dice: Dice, share: float) -> Tensor:  # noqa: ARG001
    """Fewer and larger pixels: `share` of them per side, each the mean of those whose middle it covers."""
    height, width = images.shape[-2:]
    down, right = (_boxes(side, int(side * share)).to(images) for side in (height, width))
    small = ((images @ right.T * 255).round() / 255).transpose(2, 3) @ down.T
    small = ((small.transpose(2, 3) * 255).round() / 255).clamp(0, 1)
    rows, columns = (
        (2 * torch.arange(side, device=images.device) + 1) * small.shape[axis] // (2 * side)
        for axis, side in ((2, height), (3, width))
    )
    return small[:, :, rows][..., columns]


def _boxes(side: int, parts: int) -> Tensor:
    """Which pixels each part is the mean of, as Pillow's box filter has it: parts x side."""
    ratio = side / parts
    weights = torch.zeros(parts, side)
    for i in range(parts):
        middle = (i + 0.5) * ratio
        first, last = max(0, int(middle - ratio / 2 + 0.5)), min(side, int(middle + ratio / 2 + 0.5))
        places = (torch.arange(first, last, dtype=torch.float64) - middle + 0.5) / ratio
        weights[i, first:last] = ((places > -0.5) & (places <= 0.5)).float()
    return weights / weights.sum(1, keepdim=True)
