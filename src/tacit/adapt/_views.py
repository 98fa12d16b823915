"""What a method sees of a batch: one row of everything per sample, and nothing that mixes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class View:
    """The logits of some rows (with their graph) and what else a method may weigh or filter them by."""

    logits: Tensor
    shuffled: Tensor | None = None  # probabilities for the same images with their patches shuffled, no graph
    mean_probs: Tensor | None = None  # EATA's moving average of predictions; None before the first and in private forms

    @property
    def scale(self) -> float:
        """ln K: thresholds are given as shares of it, so that they fit any number of classes."""
        return math.log(self.logits.shape[1])

    def plpd(self) -> Tensor:
        """How much probability the predicted class loses when the patches are shuffled (DeYO's PLPD), no graph."""
        if self.shuffled is None:
            raise ValueError("This view has no shuffled images: the method must ask for them.")
        probabilities = self.logits.detach().softmax(1)
        best = probabilities.argmax(1, keepdim=True)
        return (probabilities - self.shuffled).gather(1, best).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a batch that may take part, whose they are, and how their patches are to be shuffled."""

    images: Tensor
    units: Tensor | None = None
    orders: Tensor | None = None

    def chosen(self, index: Tensor) -> Rows:
        """Some of the rows, or all in another order."""
        units, orders = (None if part is None else part[index.cpu()] for part in (self.units, self.orders))
        return Rows(images=self.images[index.to(self.images.device)], units=units, orders=orders)


def patch_orders(count: int, patches: int, generator: Generator) -> Tensor:
    """An order of the patches x patches tiles for each place in a batch, whoever stands there."""
    return torch.rand(count, patches**2, generator=generator).argsort(1)


def shuffle_patches(images: Tensor, patches: int, orders: Tensor) -> Tensor:
    """Cut each image into patches x patches tiles and put them back in its own order (Lee et al., 2024).

    Images whose sides the tiles do not divide are resized down to the next that they do, and back.
    """
    if images.dim() != 4 or min(images.shape[2:]) < patches:
        shape = tuple(images.shape[1:])
        raise ValueError(f"Images of shape {shape} cannot be cut into {patches} x {patches} patches.")
    count, channels, height, width = images.shape
    high, wide = height // patches * patches, width // patches * patches
    resized = _resize(images, high, wide)
    tiles = resized.reshape(count, channels, patches, high // patches, patches, wide // patches)
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    tiles = tiles[torch.arange(count, device=images.device)[:, None], orders.to(images.device)]
    tiles = tiles.view(count, patches, patches, channels, high // patches, wide // patches).permute(0, 3, 1, 4, 2, 5)
    return _resize(tiles.reshape(count, channels, high, wide), height, width)


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[2:] == (height, width):
        return images
    return functional.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """The logits, from models that return a tensor and from those that return an object with `.logits`."""
    out = model(images)
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError("Adaptation needs a classifier: one row of at least two logits per image.")
    return logits
