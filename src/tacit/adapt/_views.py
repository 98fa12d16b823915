"""What a method sees of a batch: one row of everything per sample, and nothing that mixes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tacit.gradients import change, count_rows, leaves


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

    def plpd(self, *, graph: bool = False) -> Tensor:
        """How much probability the predicted class loses when the patches are shuffled (DeYO's PLPD).

        Args:
            graph: With the gradient of the prediction; that of the shuffled images never has one.
        """
        if self.shuffled is None:
            raise ValueError("This view has no shuffled images: the method must ask for them.")
        probabilities = (self.logits if graph else self.logits.detach()).softmax(1)
        best = probabilities.argmax(1, keepdim=True)
        return (probabilities - self.shuffled).gather(1, best).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a batch that may take part, whose they are, and how their patches are to be shuffled."""

    images: Any  # a tensor, or a tuple or mapping of tensors
    units: Tensor | None = None
    orders: Tensor | None = None

    def __len__(self) -> int:
        return count_rows(self.images)

    @property
    def device(self) -> torch.device:
        return next(leaves(self.images)).device

    def chosen(self, index: Tensor) -> Rows:
        """Some of the rows, or all in another order."""
        units, orders = (None if part is None else part[index.cpu()] for part in (self.units, self.orders))
        return Rows(images=change(self.images, lambda t: t[index.to(t.device)]), units=units, orders=orders)


def patch_orders(count: int, patches: int, generator: Generator) -> Tensor:
    """An order of the patches x patches tiles for each place in a batch, whoever stands there."""
    return torch.rand(count, patches**2, generator=generator).argsort(1)


def shuffle_patches(images: Tensor, patches: int, orders: Tensor) -> Tensor:
    """Cut each image into patches x patches tiles and put them back in its own order (Lee et al., 2024).

    Images whose sides the tiles do not divide are resized down to the next that they do, and back.
    """
    if not isinstance(images, Tensor):
        raise ValueError("DeYO shuffles the patches of images, and these rows are none: take another method.")
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


Read = Callable[[Any], Any]  # from a model's output to logits, or to logits and which positions count


@dataclass(frozen=True)
class Seen:
    """What a model says of some rows: logits, rows first and classes last, and which positions count (None: all)."""

    logits: Tensor
    counts: Tensor | None = None

    def per_row(self, values: Tensor) -> Tensor:
        """The mean over a row's positions of one value for each; of a row without positions, its value."""
        if self.logits.dim() == 2:
            return values
        each = values.reshape(len(self.logits), -1)
        weights = torch.ones_like(each) if self.counts is None else self.counts.reshape(each.shape).to(each)
        return (each * weights).sum(1) / weights.sum(1).clamp(min=1)

    def rows_kept(self, kept: Tensor) -> Tensor:
        """Which rows have a position that passes."""
        return kept if self.logits.dim() == 2 else kept.reshape(len(self.logits), -1).any(1)


def binary(output: Any) -> Tensor:
    """Two logits of a classifier that has one: for `logits=adapt.binary`.

    Args:
        output: What the model returns: one number per row, or an object with `.logits`.

    Returns:
        Rows x 2: zero for the class "no", and the model's logit for "yes".
    """
    logit: Tensor = getattr(output, "logits", output)
    logit = logit[:, 0] if logit.dim() == 2 and logit.shape[1] == 1 else logit
    return torch.stack([torch.zeros_like(logit), logit], -1)


def seen_by(model: nn.Module, inputs: Any, read: Read | None = None) -> Seen:
    """Run a model on a batch (a tensor, a tuple of arguments, or a mapping of named ones) and find its logits.

    Without `read` the model returns rows x classes, itself or as `.logits`; with it anything, which `read` turns into
    logits with classes last, rows first and any positions between, alone or with a mask of the positions that count.
    """
    if isinstance(inputs, Mapping):
        out = model(**inputs)
    else:
        out = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    found = getattr(out, "logits", out) if read is None else read(out)
    counts = None
    if read is not None and isinstance(found, tuple) and len(found) == 2:
        found, counts = found
    if not isinstance(found, Tensor) or found.dim() < 2 or found.shape[-1] < 2:
        hint = ""
        if isinstance(found, Tensor) and (found.dim() == 1 or found.shape[-1] == 1):
            hint = " One number per row is a regression, which has no entropy, or a binary classifier with one logit: "
            hint += "then say logits=adapt.binary."
        raise ValueError(f"Adaptation needs a classifier: one row of at least two logits per image.{hint}")
    if found.dim() > 2 and read is None:
        raise ValueError(
            f"The model returns {tuple(found.shape)}, not rows x classes: say where the classes are with logits=, a "
            "function that puts them last (segmentation: lambda out: out.movedim(1, -1))."
        )
    if counts is not None and counts.shape != found.shape[:-1]:
        raise ValueError(f"logits= returned a mask of shape {tuple(counts.shape)} for logits {tuple(found.shape)}.")
    return Seen(found, counts)


def logits_of(model: nn.Module, inputs: Any, read: Read | None = None) -> Tensor:
    """The logits alone."""
    return seen_by(model, inputs, read).logits


def blank_rows(model: nn.Module, inputs: Any, rows: int) -> Any:
    """Synthetic rows like these, whose values are not looked at: zeros, and for integers what every embedding knows.

    Masks are ones: a row of which nothing is attended to is no row. Where the model has no embedding integers are 0, 1.
    """
    known = min([2, *(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))])

    def blank(given: Tensor, name: str) -> Tensor:
        shape = (rows, *given.shape[1:])
        if given.is_floating_point():
            return given.new_zeros(shape)
        if "mask" in name or given.dtype == torch.bool:
            return given.new_ones(shape)
        if "type" in name:
            return given.new_zeros(shape)
        return torch.arange(math.prod(shape), device=given.device).reshape(shape).to(given.dtype) % known

    if isinstance(inputs, Tensor):
        return blank(inputs, "")
    if isinstance(inputs, Mapping):
        return {name: blank(each, str(name)) for name, each in inputs.items()}
    return tuple(blank(each, "") for each in inputs)
