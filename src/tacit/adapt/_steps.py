"""From a batch to its gradient, in each form: as published, or as a sum of clipped gradients with or without noise.

Every form answers with the logits of *before* the update and the mean gradient, or None if there is nothing to learn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tacit.adapt._masters import Masters
from tacit.adapt._memory import Memory
from tacit.adapt._methods import Method
from tacit.adapt._normalization import Normalization
from tacit.adapt._statistics import BatchStatistics, Statistics
from tacit.adapt._views import Read, Rows, Seen, View, patch_orders, seen_by, shuffle_patches
from tacit.data import Rows as Labelled
from tacit.finetune import in_place
from tacit.gradients import count_rows, leaves

Gradient = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What a step of any form needs."""

    model: nn.Module
    method: Method
    parameters: dict[str, nn.Parameter]
    masters: Masters
    memory: Memory
    generator: Generator
    classes: Tensor | None
    statistics: BatchStatistics | None = None  # of BatchNorm layers, where they are not the source's
    kind: Statistics = "source"
    read: Read | None = None  # from the model's output to logits
    normalize: Normalization | None = None


class Step(ABC):
    """What the forms share."""

    def __init__(self, shared: Shared) -> None:
        self.model = shared.model
        self.method = shared.method
        self.parameters = shared.parameters
        self.masters = shared.masters
        self.memory = shared.memory
        self.generator = shared.generator
        self.classes = shared.classes
        self.statistics = shared.statistics
        self.kind = shared.kind
        self.read = shared.read
        self.normalize = shared.normalize

    @abstractmethod
    def __call__(self, rows: Rows, taking: Tensor | None = None, *, step: int = 0) -> tuple[Tensor, Gradient | None]:
        """Logits before the update, and the mean gradient; with `taking`, of those rows alone.

        `step` is the number of this batch in the stream, for the curator.
        """

    def see(self, model: nn.Module, inputs: Any) -> Seen:
        return seen_by(model, inputs if self.normalize is None else self.normalize(inputs), self.read)

    def predict(self, images: Any) -> Tensor:
        """The logits; a row on which the model raises is taken for a blank one, in its place."""
        places = torch.arange(count_rows(images), device=next(leaves(images)).device)
        with torch.no_grad():
            return in_place(
                lambda rows, _: self.see(self.model, rows.inputs).logits, Labelled(images, places, places), None
            )

    def rows(self, images: Any, units: Tensor | None) -> Rows:
        """A batch. Orders go by place: what a row does must not depend on whether the row before it takes part."""
        patches = self.method.patches
        orders = None if patches is None else patch_orders(count_rows(images), patches, self.generator)
        return Rows(images=images, units=units, orders=orders)

    def check(self, images: Any) -> None:
        """Refuse what cannot work with rows of this shape, before anything is charged. Values are not looked at."""
        patches = self.method.patches
        if patches is not None:
            shuffle_patches(images, patches, patch_orders(count_rows(images), patches, Generator()))
            if self.predict(images).dim() > 2:
                raise ValueError("DeYO compares whole predictions: it has none for outputs with positions.")

    def shuffled(self, rows: Rows) -> Tensor | None:
        """The probabilities of the shuffled images."""
        if self.method.patches is None or rows.orders is None:
            return None
        return self.over_classes(self.predict(shuffle_patches(rows.images, self.method.patches, rows.orders))).softmax(
            1
        )

    def over_classes(self, values: Tensor) -> Tensor:
        """The classes that count: all, or those of the mask. In float32 at least: entropies in half are too coarse."""
        values = values if values.dtype.itemsize >= 4 else values.float()
        return values if self.classes is None else values[..., self.classes]

    def view(self, logits: Tensor, shuffled: Tensor | None) -> View:
        """The logits of all rows, position by position, for the method."""
        flat = self.over_classes(logits).flatten(0, -2)
        return View(logits=flat, shuffled=shuffled, mean_probs=self.memory.mean_probs)

    @contextmanager
    def sam_perturbation(self, gradient: Gradient | None) -> Iterator[None]:
        """Parameters moved by `sharpness` along the gradient (sharpness-aware), and put back exactly."""
        radius, norm = self.method.sharpness, 0.0
        if gradient is not None:
            norm = float(torch.stack([gradient[name].double().square().sum() for name in self.parameters]).sum()) ** 0.5
        if radius is None or gradient is None or not 0 < norm < float("inf"):
            yield
            return
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self.masters.values[name] + radius / norm * gradient[name])
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(before[name])


class Plain(Step):
    """The method as published: the mean over the rows that pass its filters, one backward pass (SAR: two)."""

    def __call__(self, rows: Rows, taking: Tensor | None = None, *, step: int = 0) -> tuple[Tensor, Gradient | None]:
        del step  # there is nothing that only the curator may see
        if len(rows) == 0:
            return torch.zeros(0, device=rows.device), None
        with torch.enable_grad():
            seen = self.see(self.model, rows.images)
            logits = seen.logits
            finite = torch.isfinite(logits.detach().flatten(1)).all(
                1
            )  # in a sum even a weight of zero silences no such row
            if taking is not None or not bool(finite.all()):
                chosen = finite if taking is None else finite & taking.to(finite.device)
                return logits.detach(), self(rows.chosen(chosen))[1]
            shuffled = self.shuffled(rows)
            view = self.view(logits, shuffled)
            kept = _counting(self.method.keep(view), seen)
            gradient = self._mean(self.method.weighted(view), kept)
        if self.method.sharpness is not None and gradient is not None:
            gradient = self._second(rows.images, shuffled, kept, gradient)
        elif bool(kept.any()):
            self.memory.note(self.method, view, kept)
        return logits.detach(), gradient

    def _second(self, images: Any, shuffled: Tensor | None, kept: Tensor, ascent: Gradient) -> Gradient | None:
        """SAR's second pass, at the perturbed parameters, over the rows that pass again."""
        with self.sam_perturbation(ascent), torch.enable_grad():
            view = self.view(self.see(self.model, images).logits, shuffled)
            kept = kept & self.method.keep(view, self.method.second_filters)
            gradient = self._mean(self.method.weighted(view), kept)
        self.memory.note(self.method, view, kept)
        return gradient

    def _mean(self, losses: Tensor, kept: Tensor) -> Gradient | None:
        if not bool(kept.any()):
            return None
        found = torch.autograd.grad(losses[kept].mean(), list(self.parameters.values()))
        return dict(zip(self.parameters, found, strict=True))


def _counting(kept: Tensor, seen: Seen) -> Tensor:
    """The positions that pass and count."""
    return kept if seen.counts is None else kept & seen.counts.flatten().bool()
