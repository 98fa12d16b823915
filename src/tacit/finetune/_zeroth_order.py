"""Slopes along random directions, from forward passes alone (Tang et al., 2024): what DPZO asks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tacit.data import Rows
from tacit.finetune._isolation_checks import IsolationChecks
from tacit.finetune._queries import Gradient, GradientQuery, Loss, cut, placed, row_losses, unit_means
from tacit.finetune._reading import in_place
from tacit.gradients import (
    MIXED,
    ClippedSum,
    Flat,
    Private,
    Probe,
    RowsMixed,
    change,
    copied,
    due,
    moved,
    plain_numbers,
    refuse_live_statistics,
    seed_all,
    undisturbed,
    wrong_shape,
)
from tacit.privacy.events import check_count


@dataclass(frozen=True, kw_only=True)
class ZerothOrderQuery:
    """How steeply each unit's loss rises along `directions` random directions z: (l(w + mu z) - l(w - mu z)) / 2mu.

    The directions come from a public seed and the number of the step.

    Formal guarantee: a unit's slope, the mean over its rows, is rounded to a multiple of 2^-30 of the clip (of a power
    of two below it) and cut to [-clip, clip]; it is 0 if it is not finite. So one unit adds at most clip *
    sqrt(directions), and sums of up to 2^22 units are exact in float64: no unit's slope changes how the others round.
    The sum leaves on the grid of ``mechanisms.gaussian``. The direction is public. That slopes depend on no other unit
    is checked on synthetic rows, as many as there are, and now and then on a real unit (`gradients.spot`).
    """

    clip: float = 1.0
    scale: float = 1e-3  # mu
    directions: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", Flat(self.clip).bound)
        check_count(self.directions, "directions")
        if not 0 < self.scale < math.inf:
            raise ValueError("scale is how far the parameters are moved: above 0.")

    def open(self, model: nn.Module, loss: Loss, *, expected: float, microbatch: int | None) -> GradientQuery:
        return SlopeAsker(model, loss, expected, microbatch, self)


class SlopeAsker:
    """Asks two forward passes per direction. Nothing is kept for a backward pass."""

    factor: float = 1.0

    def __init__(
        self, model: nn.Module, loss: Loss, expected: float, microbatch: int | None, query: ZerothOrderQuery
    ) -> None:
        self._model, self._loss = model, loss
        self._expected, self._microbatch, self._query = expected, microbatch, query
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError("The model has no trainable parameter: call requires_grad_(True) on what should be.")
        refuse_live_statistics(list(model.named_modules()))
        self._step = self._calls = 0
        self._isolation = IsolationChecks()
        self._numbers: set[int] = set()

    def sum(self, rows: Rows, mute: Tensor | None = None) -> ClippedSum:
        return in_place(self._sum, rows, mute)

    def _sum(self, rows: Rows, mute: Tensor | None) -> ClippedSum:
        self._check((rows.inputs, rows.labels), len(rows.owner), private=True)
        self._look_at(rows, mute)
        slopes = [self._slopes(rows, direction) for direction in range(self._query.directions)]
        return self._bounded(unit_means(torch.stack(slopes, 1), rows.owner, mute))

    def zero_sum(self) -> ClippedSum:
        return self._bounded(torch.zeros(0, self._query.directions, dtype=torch.float64))

    def check(self, inputs: Any, labels: Tensor) -> None:
        self._check((inputs, labels), max(math.ceil(self._expected), len(labels)))

    def _check(self, batch: Any, rows: int, *, private: bool = False) -> None:
        """Do synthetic rows like these stay apart, three and as many as there are at a time?

        Again for rows of another shape, for integers that vary where they did not, for more rows than before, and when
        a number changed that the model or the loss could decide by; a counter's, ever more rarely.
        """
        numbers = hash(plain_numbers(self._model, self._loss))
        if numbers not in self._numbers:
            self._numbers.add(numbers)
            if len(self._numbers).bit_count() == 1:
                self._isolation.forget()
        self._isolation.check(self._probing, batch, min(rows, self._microbatch or rows), private=private)

    @contextmanager
    def _probing(self) -> Iterator[Probe]:
        with moved(self._model, dict(self._parameters)):
            yield _Forward(self._model, self._loss, {})

    def _look_at(self, rows: Rows, mute: Tensor | None) -> None:
        """The check during the run: is a unit's slope the same among others and among copies of itself?

        Formal guarantee: that of `gradients.spot`, whose steps it takes. Not in 16 bits, where a difference of two
        losses is rounding.
        """
        self._calls += 1
        place = due(self._calls - 1, len(rows.owner)) if len(rows.owner) else None
        if place is None or any(p.dtype.itemsize < 4 for p in self._parameters.values()):
            return
        mine = torch.nonzero(rows.owner == rows.owner[place]).flatten()
        if mute is not None and bool(mute[mine].any()):
            return
        found = []
        for index in (torch.arange(len(rows.owner), device=mine.device), copied(mine, len(rows.owner))):
            given = change((rows.inputs, rows.labels), lambda t, index=index: t[index.to(t.device)])  # type: ignore[misc]
            with undisturbed(self._model):
                slope = self._slopes(Rows(given[0], given[1], rows.owner), 0, seeded=True)[mine.cpu()].mean()
            found.append(slope.clamp(-self._query.clip, self._query.clip))
        gap = abs(float(found[0] - found[1]))  # which is not a number if a slope is none
        if gap > 0.01 * self._query.clip:
            raise RowsMixed(MIXED)

    def split(self, noise: float) -> Mapping[str, float] | None:
        del noise
        return None

    def gradient(self, released: Mapping[str, Tensor]) -> Gradient:
        found: Gradient = {}
        for direction, slope in enumerate((released["slopes"] / (self._expected * self._query.directions)).tolist()):
            for name, z in self._directions(direction):
                part = slope * z
                found[name] = found[name] + part if name in found else part
        self._step += 1
        return found

    def state(self) -> dict[str, Tensor]:
        return {"step": torch.tensor(self._step)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._step = int(state["step"])

    def _bounded(self, slopes: Tensor) -> ClippedSum:
        clip = self._query.clip
        kept = cut(slopes, clip)
        norms, after = slopes.norm(dim=1), kept.norm(dim=1)
        private = Private(norms, torch.where(after < norms, after / norms, 1.0))
        bounds = {"slopes": clip * math.sqrt(self._query.directions)}
        return ClippedSum({"slopes": kept.sum(0)}, bounds, {"slopes": ("slopes",)}, private)

    def _slopes(self, rows: Rows, direction: int, *, seeded: bool = False) -> Tensor:
        """The slope of each row's loss; `seeded`: with random numbers that are always the same."""
        found = []
        for sign in (1, -1):
            if seeded:
                seed_all()
            found.append(self._losses(rows, direction, sign))
        return (found[0] - found[1]) / (2 * self._query.scale)

    def _losses(self, rows: Rows, direction: int, sign: int) -> Tensor:
        """The loss of each row with the parameters moved along a direction."""
        far = sign * self._query.scale
        values = ((name, self._parameters[name].data + far * z) for name, z in self._directions(direction))
        with placed(self._parameters, values):
            return row_losses(self._model, self._loss, rows, self._microbatch)

    def _directions(self, direction: int) -> Iterator[tuple[str, Tensor]]:
        """A standard normal of each parameter's shape, made anew whenever it is needed: it takes no memory."""
        seed = hashlib.sha256(f"{self._query.seed} {self._step} {direction}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big"))
        for name, p in self._parameters.items():
            yield name, torch.randn(p.shape, generator=generator).to(p)


class _Forward(Probe):
    """Do rows stay apart? Asked of losses alone, for models too large for a backward pass."""

    def gradient(self, batch: Any, weights: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        with torch.no_grad():
            losses = self.losses(batch)
        if losses.shape != weights.shape:
            raise wrong_shape(losses.shape, len(weights))
        return losses, {}
