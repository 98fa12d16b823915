"""From a batch to its gradient, in each form: as published, or as a sum of clipped gradients with or without noise.

Every form answers with the logits of *before* the update and the mean gradient, or None if there is nothing to learn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from tacit.adapt.forms import DP, Clip
from tacit.adapt.memory import Memory
from tacit.adapt.methods import Certain, Filter, Method
from tacit.adapt.noise import NoisyStream
from tacit.adapt.views import View, logits_of, shuffled_probabilities
from tacit.gradients import AdaptiveQuantile, ClippedSum, Engine, Policy

Gradient = dict[str, Tensor]
Curator = Callable[[ClippedSum], None]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a batch that may take part, and what was computed of them beforehand."""

    images: Tensor
    units: Tensor | None = None


class Step(ABC):
    """What the forms share."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        parameters: dict[str, nn.Parameter],
        *,
        memory: Memory,
        generator: Generator,
        classes: Tensor | None,
    ) -> None:
        self.model = model
        self.method = method
        self.parameters = parameters
        self.memory = memory
        self.generator = generator
        self.classes = classes

    @abstractmethod
    def __call__(self, rows: Rows) -> tuple[Tensor, Gradient | None]:
        """Logits before the update, and the mean gradient."""

    def predict(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return logits_of(self.model, images)

    def shuffled(self, images: Tensor) -> Tensor | None:
        if self.method.patches is None or len(images) == 0:
            return None
        return self.over_classes(shuffled_probabilities(self.model, images, self.method.patches, self.generator))

    def over_classes(self, values: Tensor) -> Tensor:
        """The classes that count: all, or those of the mask."""
        return values if self.classes is None else values[:, self.classes]

    def view(self, logits: Tensor, shuffled: Tensor | None) -> View:
        return View(logits=self.over_classes(logits), shuffled=shuffled, usual=self.memory.usual)

    @contextmanager
    def climbed(self, gradient: Gradient | None) -> Iterator[None]:
        """Parameters moved by `sharpness` along the gradient (sharpness-aware), and put back exactly."""
        radius = self.method.sharpness
        norm = (
            0.0
            if gradient is None
            else float(torch.stack([g.double().square().sum() for g in gradient.values()]).sum()) ** 0.5
        )
        if radius is None or gradient is None or not 0 < norm < float("inf"):
            yield
            return
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.add_(gradient[name], alpha=radius / norm)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(before[name])


class Plain(Step):
    """The method as published: the mean over the rows that pass its filters, one backward pass (SAR: two)."""

    def __call__(self, rows: Rows) -> tuple[Tensor, Gradient | None]:
        shuffled = self.shuffled(rows.images)
        with torch.enable_grad():
            logits = logits_of(self.model, rows.images)
            view = self.view(logits, shuffled)
            kept = self.method.keep(view)
            gradient = self._mean(self.method.weighted(view), kept)
        if self.method.sharpness is not None and gradient is not None:
            gradient = self._second(rows.images, shuffled, kept, gradient)
        elif bool(kept.any()):
            self._note(view, kept)
        return logits.detach(), gradient

    def _second(self, images: Tensor, shuffled: Tensor | None, kept: Tensor, ascent: Gradient) -> Gradient | None:
        """SAR's second pass, at the perturbed parameters, over the rows that pass again."""
        with self.climbed(ascent), torch.enable_grad():
            view = self.view(logits_of(self.model, images), shuffled)
            if self.method.filter_again:
                kept = kept & self.method.keep(view, again(self.method))
            gradient = self._mean(self.method.weighted(view), kept)
        self._note(view, kept)
        return gradient

    def _mean(self, losses: Tensor, kept: Tensor) -> Gradient | None:
        if not bool(kept.any()):
            return None
        found = torch.autograd.grad(losses[kept].mean(), list(self.parameters.values()))
        return dict(zip(self.parameters, found, strict=True))

    def _note(self, view: View, kept: Tensor) -> None:
        note(self.memory, self.method, view, kept)


class Clipped(Step):
    """The sum over units of their clipped gradients, divided by the batch size; with a stream, noise is added to it.

    Formal guarantee (with a stream): the loss of a row, its weight and its filters are computed from that row and from
    released values alone, so one unit moves the sum by at most the clip, and the stream's noise makes the sum private.
    The denominator is the declared batch size. What comes after (anchor, momentum, perturbation) reads released values.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        parameters: dict[str, nn.Parameter],
        *,
        memory: Memory,
        generator: Generator,
        classes: Tensor | None,
        form: Clip | DP,
        batch_size: int,
        stream: NoisyStream | None,
        microbatch: int | None,
        curator: Curator | None,
    ) -> None:
        super().__init__(model, method, parameters, memory=memory, generator=generator, classes=classes)
        self.form = form
        self.batch_size = batch_size
        self.stream = stream
        self.curator = curator
        self._engine = Engine(model, self._loss, clip=form.clip, microbatch=microbatch)
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
        shuffled = None if self.method.patches is None else self.over_classes(self.predict(images)).softmax(1)
        self._engine.learn(self._batch(images, shuffled, None))

    def __call__(self, rows: Rows) -> tuple[Tensor, Gradient | None]:
        order, units = _by_unit(rows.units, len(rows.images))
        images = rows.images[order] if rows.units is not None else rows.images
        shuffled = self.shuffled(images)
        ascent, kept, before = self._ascent(images, shuffled, units)
        with self.climbed(ascent):
            total, logits = self._sum(self._batch(images, shuffled, kept), units)
        if self.curator is not None:
            self.curator(total)
        if isinstance(self.form, Clip) and len(images):
            note(self.memory, self.method, self.view(logits, shuffled), self._taken(logits, shuffled, kept))
        predictions = logits if before is None else before
        return predictions[order.argsort()], self._mean(total)

    def _ascent(
        self, images: Tensor, shuffled: Tensor | None, units: Tensor | None
    ) -> tuple[Gradient | None, Tensor | None, Tensor | None]:
        """Where to climb (SAR), which rows passed the first time, and the predictions if the pass cannot give them."""
        if self.method.sharpness is None:
            return None, None, None
        if isinstance(self.form, DP):  # along the last release: this batch is not asked
            before = None if self.memory.last is None else self.predict(images)
            return self.memory.last, None, before
        if len(images) == 0:
            return None, None, None
        if self.form.ascent:
            total, before = self._sum(self._batch(images, shuffled, None), units)
            return total.sum, self._taken(before, shuffled, None).to(images.dtype), before
        with torch.enable_grad():
            logits = logits_of(self.model, images)
            view = self.view(logits, shuffled)
            kept = self.method.keep(view)
            losses = self.method.weighted(view)[kept]
        found = torch.autograd.grad(losses.sum(), list(self.parameters.values()))
        return dict(zip(self.parameters, found, strict=True)), kept.to(images.dtype), logits.detach()

    def _sum(self, batch: dict[str, Tensor], units: Tensor | None) -> tuple[ClippedSum, Tensor]:
        """The clipped sum and the logits of the same pass."""
        images = batch["images"]
        if len(images):
            self._engine.learn(batch)
        self._seen = []
        try:
            total = self._engine(batch, units=units, clip=self.clip)
            seen = self._seen
        finally:
            self._seen = None
        if sum(len(part) for part in seen) == len(images) > 0:
            return total, torch.cat(seen)
        return total, self.predict(images)  # the engine took some rows more than once, or there are none

    def _loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The loss of each row. Filters are off while the engine checks the model: a zero loss would hide all."""
        logits = logits_of(model, batch["images"])
        shuffled = batch.get("shuffled")
        losses = self.method.weighted(self.view(logits, shuffled))
        if "kept" in batch:
            losses = losses * batch["kept"]
        if self._seen is None:
            return losses
        self._seen.append(logits.detach())
        passed = self._passed(logits.detach(), shuffled, batch.get("kept"))
        return losses if passed is None else losses * passed.to(losses.dtype)

    def _passed(self, logits: Tensor, shuffled: Tensor | None, kept: Tensor | None) -> Tensor | None:
        """Which rows pass the filters (after a perturbation only the one that is asked again); None: all."""
        filters = self.filters
        if kept is not None:
            filters = again(self.method) if self.method.filter_again else ()
        return self.method.keep(self.view(logits, shuffled), filters) if filters else None

    def _taken(self, logits: Tensor, shuffled: Tensor | None, kept: Tensor | None) -> Tensor:
        """Which rows contributed."""
        everyone = torch.ones(len(logits), dtype=torch.bool, device=logits.device) if kept is None else kept > 0
        passed = self._passed(logits, shuffled, kept)
        return everyone if passed is None else everyone & passed

    def _mean(self, total: ClippedSum) -> Gradient:
        policy = self.clip
        note = self.method.name
        released = dict(total.sum) if self.stream is None else self.stream.release(total, policy, note)
        if isinstance(policy, AdaptiveQuantile):
            self.memory.bound = policy.updated(float(released.pop("count")), units=self.batch_size).bound
        mean = {name: value / self.batch_size for name, value in released.items()}
        if self.method.sharpness is not None and isinstance(self.form, DP):
            self.memory.last = mean
        return mean

    @staticmethod
    def _batch(images: Tensor, shuffled: Tensor | None, kept: Tensor | None) -> dict[str, Tensor]:
        parts = {"images": images, "shuffled": shuffled, "kept": kept}
        return {name: part for name, part in parts.items() if part is not None}


def again(method: Method) -> tuple[Filter, ...]:
    """SAR asks once more how certain a row is."""
    return tuple(each for each in method.filters if isinstance(each, Certain)) or (Certain(),)


def note(memory: Memory, method: Method, view: View, kept: Tensor) -> None:
    """What the forms without privacy remember of the rows that passed."""
    logits = view.logits.detach()[kept]
    if any(not each.per_sample for each in method.filters):
        memory.note_predictions(logits.softmax(1))
    if method.recovery is not None:
        memory.note_mood(method.uncertainty(logits))


def _by_unit(units: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """Rows sorted by unit, so that the engine takes them in this order whatever fits into memory at once."""
    if units is None:
        return torch.arange(count), None
    order = torch.argsort(units, stable=True)
    return order, units[order]
