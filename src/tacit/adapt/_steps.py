"""From a batch to its gradient, in each form: as published, or as a sum of clipped gradients with or without noise.

Every form answers with the logits of *before* the update and the mean gradient, or None if there is nothing to learn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor, nn

from tacit.adapt._memory import Memory
from tacit.adapt._methods import Filter, Method
from tacit.adapt._noise import NoisyStream
from tacit.adapt._privacy_config import DP, Clip
from tacit.adapt._views import Rows, View, logits_of, patch_orders, shuffle_patches
from tacit.data import Rows as Labelled
from tacit.finetune import in_place
from tacit.gradients import AdaptiveQuantile, ClippedSum, Engine, Policy

Gradient = dict[str, Tensor]
Curator = Callable[[ClippedSum], None]

_BOUNDS = (1e-12, 1e12)  # an adaptive clip stays a number, even where nothing is left to learn


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What a step of any form needs."""

    model: nn.Module
    method: Method
    parameters: dict[str, nn.Parameter]
    memory: Memory
    generator: Generator
    classes: Tensor | None


class Step(ABC):
    """What the forms share."""

    def __init__(self, shared: Shared) -> None:
        self.model = shared.model
        self.method = shared.method
        self.parameters = shared.parameters
        self.memory = shared.memory
        self.generator = shared.generator
        self.classes = shared.classes

    @abstractmethod
    def __call__(self, rows: Rows, taking: Tensor | None = None) -> tuple[Tensor, Gradient | None]:
        """Logits before the update, and the mean gradient; with `taking`, of those rows alone."""

    def predict(self, images: Tensor) -> Tensor:
        """The logits; a row on which the model raises is taken for a blank one, in its place."""
        places = torch.arange(len(images), device=images.device)
        with torch.no_grad():
            return in_place(lambda rows, _: logits_of(self.model, rows.inputs), Labelled(images, places, places), None)

    def rows(self, images: Tensor, units: Tensor | None) -> Rows:
        """A batch. Orders go by place: what a row does must not depend on whether the row before it takes part."""
        patches = self.method.patches
        orders = None if patches is None else patch_orders(len(images), patches, self.generator)
        return Rows(images=images, units=units, orders=orders)

    def check(self, images: Tensor) -> None:
        """Refuse what cannot work with rows of this shape, before anything is charged. Values are not looked at."""
        if self.method.patches is not None:
            shuffle_patches(images, self.method.patches, patch_orders(len(images), self.method.patches, Generator()))

    def shuffled(self, rows: Rows) -> Tensor | None:
        """The probabilities of the shuffled images."""
        if self.method.patches is None or rows.orders is None:
            return None
        return self.over_classes(self.predict(shuffle_patches(rows.images, self.method.patches, rows.orders))).softmax(
            1
        )

    def over_classes(self, values: Tensor) -> Tensor:
        """The classes that count: all, or those of the mask."""
        return values if self.classes is None else values[:, self.classes]

    def view(self, logits: Tensor, shuffled: Tensor | None) -> View:
        return View(logits=self.over_classes(logits), shuffled=shuffled, mean_probs=self.memory.mean_probs)

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
                    parameter.add_(gradient[name], alpha=radius / norm)
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(before[name])


class Plain(Step):
    """The method as published: the mean over the rows that pass its filters, one backward pass (SAR: two)."""

    def __call__(self, rows: Rows, taking: Tensor | None = None) -> tuple[Tensor, Gradient | None]:
        if len(rows.images) == 0:
            return rows.images.new_zeros(0), None
        with torch.enable_grad():
            logits = logits_of(self.model, rows.images)
            finite = torch.isfinite(logits.detach()).all(1)  # in a sum even a weight of zero silences no such row
            if taking is not None or not bool(finite.all()):
                chosen = finite if taking is None else finite & taking.to(finite.device)
                return logits.detach(), self(rows.chosen(chosen))[1]
            shuffled = self.shuffled(rows)
            view = self.view(logits, shuffled)
            kept = self.method.keep(view)
            gradient = self._mean(self.method.weighted(view), kept)
        if self.method.sharpness is not None and gradient is not None:
            gradient = self._second(rows.images, shuffled, kept, gradient)
        elif bool(kept.any()):
            self.memory.note(self.method, view, kept)
        return logits.detach(), gradient

    def _second(self, images: Tensor, shuffled: Tensor | None, kept: Tensor, ascent: Gradient) -> Gradient | None:
        """SAR's second pass, at the perturbed parameters, over the rows that pass again."""
        with self.sam_perturbation(ascent), torch.enable_grad():
            view = self.view(logits_of(self.model, images), shuffled)
            kept = kept & self.method.keep(view, self.method.second_filters)
            gradient = self._mean(self.method.weighted(view), kept)
        self.memory.note(self.method, view, kept)
        return gradient

    def _mean(self, losses: Tensor, kept: Tensor) -> Gradient | None:
        if not bool(kept.any()):
            return None
        found = torch.autograd.grad(losses[kept].mean(), list(self.parameters.values()))
        return dict(zip(self.parameters, found, strict=True))


class Clipped(Step):
    """The sum over units of their clipped gradients, divided by the batch size; with a stream, noise is added to it.

    Formal guarantee (with a stream): the loss of a row, its weight and its filters are computed from that row and from
    released values alone, so one unit moves the sum by at most the clip, and the stream's noise makes the sum private.
    Rows that take no part (not finite, beyond their unit's contributions, or such that model or loss raise) add exactly
    zero in their place: shapes and order of the float64 sum are the same with and without them. The denominator is the
    declared batch size. What comes after (anchor, momentum, perturbation) reads released values.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        form: Clip | DP,
        batch_size: int,
        stream: NoisyStream | None,
        microbatch: int | None,
        curator: Curator | None,
    ) -> None:
        super().__init__(shared)
        self.form = form
        self.batch_size = batch_size
        self.stream = stream
        self.curator = curator
        self._engine = Engine(shared.model, self._loss, clip=form.clip, microbatch=microbatch)
        self._seen: list[Tensor] | None = None  # the logits of a pass, while one is on

    @property
    def filters(self) -> tuple[Filter, ...]:
        if isinstance(self.form, Clip):
            return self.method.filters
        return self.method.private_filters if self.form.filters == "per-sample" else ()

    @property
    def clip(self) -> float | Policy:
        """The policy of this step: an adaptive one at the bound that it has moved to."""
        policy = self.form.clip
        if isinstance(policy, AdaptiveQuantile) and self.memory.bound is not None:
            return replace(policy, bound=self.memory.bound)
        return policy

    def check(self, images: Tensor) -> None:
        """Try model and loss on made-up rows of this shape: what cannot be private is refused before any charge."""
        super().check(images)
        shuffled = None if self.method.patches is None else self.over_classes(self.predict(images)).softmax(1)
        self._engine.validate(self._batch(images, shuffled, None))

    def __call__(self, rows: Rows, taking: Tensor | None = None) -> tuple[Tensor, Gradient | None]:
        order = None if rows.units is None else torch.argsort(rows.units, stable=True)
        if order is not None:  # the engine then takes the rows in this order, whatever fits into memory at once
            rows, taking = rows.chosen(order), None if taking is None else taking[order]
        logits, total = self._pass(rows, None if taking is None else ~taking)
        if self.curator is not None:
            self.curator(total)
        return logits if order is None else logits[order.argsort()], self._mean(total)

    def _pass(self, rows: Rows, mute: Tensor | None) -> tuple[Tensor, ClippedSum]:
        """The predictions of some rows and the sum of their clipped gradients. Nothing is released.

        Muted rows keep their place, so nobody else's prediction or gradient depends on who takes part.
        """
        images, units = rows.images, _apart(rows.units, mute)
        mute = None if mute is None else mute.to(images.device)
        shuffled = self.shuffled(rows)
        ascent, kept, before = self._ascent(images, shuffled, units, mute)
        with self.sam_perturbation(ascent):
            total, logits = self._sum(self._batch(images, shuffled, kept), units, mute)
        if isinstance(self.form, Clip):
            taken = self._taken(logits, shuffled, kept)
            self.memory.note(self.method, self.view(logits, shuffled), taken if mute is None else taken & ~mute)
        return logits if before is None else before, total

    def _ascent(
        self, images: Tensor, shuffled: Tensor | None, units: Tensor | None, mute: Tensor | None
    ) -> tuple[Gradient | None, Tensor | None, Tensor | None]:
        """Where to climb (SAR), which rows passed the first time, and the predictions if the pass cannot give them."""
        if self.method.sharpness is None:
            return None, None, None
        if isinstance(self.form, DP):  # along the last release: this batch is not asked
            return self.memory.last, None, None if self.memory.last is None else self.predict(images)
        if self.form.ascent:
            total, before = self._sum(self._batch(images, shuffled, None), units, mute)
            return total.sum, self._taken(before, shuffled, None).to(images.dtype), before
        with torch.enable_grad():
            logits = logits_of(self.model, images)
            view = self.view(logits, shuffled)
            kept = self.method.keep(view)
            losses = self.method.weighted(view)[kept if mute is None else kept & ~mute]
        found = torch.autograd.grad(losses.sum(), list(self.parameters.values()))
        return dict(zip(self.parameters, found, strict=True)), kept.to(images.dtype), logits.detach()

    def _sum(self, batch: dict[str, Tensor], units: Tensor | None, mute: Tensor | None) -> tuple[ClippedSum, Tensor]:
        """The clipped sum and the logits of the same pass; rows on which it raises are blanked in their place."""
        places = torch.arange(len(batch["images"]), device=batch["images"].device)
        owner = places if units is None else units.to(places.device)
        return in_place(partial(self._together, units is None), Labelled(batch, places, owner), mute)

    def _together(self, alone: bool, rows: Labelled, mute: Tensor | None) -> tuple[ClippedSum, Tensor]:
        batch, images = rows.inputs, rows.inputs["images"]
        self._engine.validate(batch)
        self._seen = []
        try:
            total = self._engine(batch, unit_ids=None if alone else rows.owner, clip=self.clip, mute=mute)
            seen = self._seen
        finally:
            self._seen = None
        if sum(len(part) for part in seen) != len(images):
            return total, self.predict(images)  # the engine took some rows more than once
        logits, replaced = torch.cat(seen), self._engine.replaced
        if replaced is not None:  # there the model has seen somebody else, of whom nobody is told
            logits[replaced] = self.predict(images)[replaced]
        return total, logits

    def _loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The loss of each row. Filters are off while the engine checks the model: a zero loss would hide all."""
        logits = logits_of(model, batch["images"])
        shuffled = batch.get("shuffled")
        losses = self.method.weighted(self.view(logits, shuffled))
        if "kept" in batch:
            losses = losses * batch["kept"]
        if self._seen is None:
            return losses
        if not self._engine.checking:
            self._seen.append(logits.detach())
        passed = self._passed(logits.detach(), shuffled, batch.get("kept"))
        return losses if passed is None else losses * passed.to(losses.dtype)

    def _passed(self, logits: Tensor, shuffled: Tensor | None, kept: Tensor | None) -> Tensor | None:
        """Which rows pass the filters (after a perturbation only the one that is asked again); None: all."""
        filters = self.filters if kept is None else self.method.second_filters
        return self.method.keep(self.view(logits, shuffled), filters) if filters else None

    def _taken(self, logits: Tensor, shuffled: Tensor | None, kept: Tensor | None) -> Tensor:
        """Which rows contributed."""
        everyone = torch.ones(len(logits), dtype=torch.bool, device=logits.device) if kept is None else kept > 0
        passed = self._passed(logits, shuffled, kept)
        return everyone if passed is None else everyone & passed

    def _mean(self, total: ClippedSum) -> Gradient:
        policy = self.clip
        released = dict(total.sum) if self.stream is None else self.stream.release(total, policy)
        if isinstance(policy, AdaptiveQuantile):
            bound = policy.updated(float(released.pop("count")), units=self.batch_size).bound
            self.memory.bound = min(max(bound, _BOUNDS[0]), _BOUNDS[1])
        mean = {name: value / self.batch_size for name, value in released.items()}
        if self.method.sharpness is not None and isinstance(self.form, DP):
            self.memory.last = mean
        return mean

    @staticmethod
    def _batch(images: Tensor, shuffled: Tensor | None, kept: Tensor | None) -> dict[str, Tensor]:
        parts = {"images": images, "shuffled": shuffled, "kept": kept}
        return {name: part for name, part in parts.items() if part is not None}


def _apart(units: Tensor | None, mute: Tensor | None) -> Tensor | None:
    """Labels under which the muted rows of a unit are a unit of their own, right behind it.

    So the unit is the mean over its other rows, and the order of everybody stays.
    """
    if units is None or mute is None:
        return units
    rank: Tensor = torch.unique(units, return_inverse=True)[1]
    return 2 * rank + mute.to(rank)
