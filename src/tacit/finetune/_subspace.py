"""Gradients in a subspace of public ones (Yu et al., 2021, "Do not let privacy overbill utility"): what GEP asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tacit.data import Records, Rows
from tacit.finetune._queries import Gradient, GradientQuery, Loss
from tacit.finetune._reading import in_place, muted_units, to, where_of
from tacit.gradients import ClippedSum, Engine, Flat, PerUnit, Private, RowsMixed, Units, shrink, square_norms
from tacit.privacy.events import check_count

_START = 20210225  # the seed of the power method's first vectors: public, and always the same
_PUBLIC_ROWS = 256  # loaded at a time


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Each unit's gradient as its coordinates in an anchor subspace and what is left, both clipped on their own.

    The subspace is spanned by `dimensions` orthonormal vectors over all trainable parameters together (one basis; the
    paper cuts parameters into groups to save memory), found by the power method on the gradients of public rows at
    the current weights, every `refresh` steps.

    Formal guarantee: the basis is a function of public rows and released weights. One unit adds to the coordinates at
    most `clip_embedding` and to the residual at most `clip_residual`, as they were computed, however far the basis is
    from orthonormal; with sqrt(2) z of noise each, both from the same draw, they are one Gaussian release with
    multiplier z. The residual may be left out, not released without noise.
    """

    public: Records = field(repr=False)
    dimensions: int
    clip_embedding: float
    clip_residual: float
    residual: bool = True
    refresh: int = 1
    power_iterations: int = 1
    fingerprint: str = field(init=False)  # of the public rows: other ones would make another run

    def __post_init__(self) -> None:
        for value, what in (
            (self.dimensions, "dimensions"),
            (self.refresh, "refresh"),
            (self.power_iterations, "power_iterations"),
        ):
            check_count(value, what)
        for name in ("clip_embedding", "clip_residual"):
            object.__setattr__(self, name, Flat(getattr(self, name)).bound)
        if self.dimensions > len(self.public):
            raise ValueError(
                f"{len(self.public)} public rows span at most as many dimensions, not {self.dimensions}: give more "
                "rows or ask for fewer dimensions."
            )
        object.__setattr__(self, "fingerprint", self.public.fingerprint())

    def open(self, model: nn.Module, loss: Loss, *, expected: float, microbatch: int | None) -> GradientQuery:
        return SubspaceAsker(Engine(model, loss, clip=self.clip_embedding, microbatch=microbatch), expected, self)


class SubspaceAsker:
    """Asks for gradients in the subspace of the step."""

    factor: float = 1.0

    def __init__(self, engine: Engine, expected: float, query: Embedding) -> None:
        self.engine = engine
        self.expected = expected
        self._query = query
        self._parameters = {n: p for n, p in engine.model.named_parameters() if p.requires_grad}
        self._size = sum(p.numel() for p in self._parameters.values())
        if query.dimensions > self._size:
            raise ValueError(f"{self._size} trainable numbers have no subspace of {query.dimensions} dimensions.")
        self._bounds = {"embedding": query.clip_embedding}
        if query.residual:
            self._bounds["residual"] = query.clip_residual
        self._basis: Tensor | None = None
        self._made_at = -1
        self._step = 0

    def sum(self, rows: Rows, mute: Tensor | None = None) -> ClippedSum:
        return in_place(self._sum, rows, mute)

    def _sum(self, rows: Rows, mute: Tensor | None) -> ClippedSum:
        total, silent = self.zero_sum(), muted_units(rows.owner, mute)
        for gradients in self.engine.each((rows.inputs, rows.labels), unit_ids=rows.owner):
            flat = self._flat(gradients)
            total = total + self._bounded(flat, silent[: len(flat)])
            silent = silent[len(flat) :]
        return total

    def zero_sum(self) -> ClippedSum:
        return self._bounded(self.basis.new_zeros(0, self._size), torch.zeros(0, dtype=torch.bool))

    def check(self, inputs: object, labels: Tensor) -> None:
        self.engine.validate((inputs, labels))
        try:
            self._public_gradients(torch.arange(min(len(self._query.public), 2)))
        except RowsMixed:
            raise
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"The public rows are not like the private ones ({type(error).__name__}: {reason}). Give rows of the "
                "same kind with labels of the same classes; where a head is trained on cached features, public "
                "features (`Backbone` makes them)."
            ) from None

    def split(self, noise: float) -> Mapping[str, float] | None:
        return dict.fromkeys(self._bounds, noise * math.sqrt(len(self._bounds)))

    def gradient(self, released: Mapping[str, Tensor]) -> Gradient:
        flat = released["embedding"].to(self.basis) @ self.basis
        if self._query.residual:
            flat = flat + released["residual"].to(flat)
        self._step += 1
        parts = torch.split(flat / self.expected, [p.numel() for p in self._parameters.values()])
        return {n: part.view(p.shape) for (n, p), part in zip(self._parameters.items(), parts, strict=True)}

    def state(self) -> dict[str, Tensor]:
        found = {"step": torch.tensor(self._step)}
        return found if self._basis is None else found | {"basis": self._basis}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._step, self._made_at = int(state["step"]), -1
        basis = state.get("basis")
        self._basis = None if basis is None else basis.to(next(iter(self._parameters.values())).device)

    @property
    def basis(self) -> Tensor:
        """The orthonormal rows (dimensions, numbers) of this step."""
        due = self._step % self._query.refresh == 0 and self._made_at != self._step
        if self._basis is None or due:
            self._basis = power_method(self._all_public_gradients, self._start(), self._query.power_iterations)
            self._made_at = self._step
        return self._basis

    def _bounded(self, gradients: Tensor, muted: Tensor) -> ClippedSum:
        """Clip both parts of every gradient and add them up, in float64.

        A unit that is muted, or has anything that is not finite, adds nothing.
        """
        parts = {"embedding": gradients @ self.basis.T}
        if self._query.residual:
            parts["residual"] = gradients - parts["embedding"] @ self.basis
        norms = torch.stack([square_norms(values).sqrt() for values in parts.values()])
        norms = norms.masked_fill(muted.to(norms.device), math.inf)
        bad = ~torch.isfinite(norms).all(0)
        factors, total = [], {}
        for (name, values), norm in zip(parts.items(), norms, strict=True):
            factors.append(shrink(norm, self._bounds[name]).masked_fill(bad, 0))
            total[name] = PerUnit(values).weighted_sum(factors[-1], Units.singletons(len(values), values.device), bad)
        private = Private(norms.square().sum(0).sqrt(), torch.stack(factors).amin(0))
        return ClippedSum(total, self._bounds, {name: (name,) for name in self._bounds}, private)

    def _flat(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([gradients[name].flatten(1) for name in self._parameters], 1)

    def _all_public_gradients(self) -> Iterable[Tensor]:
        for places in torch.split(torch.arange(len(self._query.public)), _PUBLIC_ROWS):
            yield from self._public_gradients(places)

    def _public_gradients(self, places: Tensor) -> list[Tensor]:
        rows = self._query.public.rows(places, None)
        rows = to(rows, where_of(self.engine.model))
        found = self.engine.each((rows.inputs, rows.labels), unit_ids=rows.owner, public=True)
        return [self._flat(gradients) for gradients in found]

    def _start(self) -> Tensor:
        generator = torch.Generator().manual_seed(_START)
        like = next(iter(self._parameters.values()))
        values = torch.randn(self._query.dimensions, self._size, generator=generator)
        return values.to(like.device, torch.promote_types(like.dtype, torch.float32))


def power_method(gradients: Callable[[], Iterable[Tensor]], start: Tensor, iterations: int) -> Tensor:
    """Orthonormal rows near the span of the largest principal directions of some gradients (Yu et al., algorithm 2).

    `gradients` gives them anew, some at a time, for every iteration, so that they need not be in memory together. Rows
    that are not finite count as zero.
    """
    basis = orthonormal(start.double())
    for _ in range(iterations):
        found = torch.zeros_like(basis)
        for rows in gradients():
            rows = torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0).double()
            found += (rows @ basis.T).T @ rows
        basis = orthonormal(found)
    return basis.to(start.dtype).contiguous()


def orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows that span the same; where rows depend on each other, any that complete them."""
    largest = rows.abs().amax(1, keepdim=True)
    found: Tensor = torch.linalg.qr((rows / torch.where(largest > 0, largest, 1)).T).Q
    return found.T
