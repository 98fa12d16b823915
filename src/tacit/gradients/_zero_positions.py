"""Positions whose output gradient is zero by the structure of the model, as all but the class token's are at the end.

Formal guarantee: which positions are left out follows from synthetic rows and the graph, never from private ones. That
what is left out is exactly zero is verified in every pass; rows for which it is not take a way that was not checked,
and are found and added one by one like any other such rows (see `Engine`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Nodes that choose places by the values of a row: a gradient that is zero here may be anywhere in another row.
_CHOOSING = (
    "Index",
    "Gather",
    "Scatter",
    "Masked",
    "Where",
    "Topk",
    "Sort",
    "Max",
    "Min",
    "Amax",
    "Amin",
    "Aminmax",
    "AdaptiveMax",
    "FractionalMax",
    "Kthvalue",
    "Median",
    "Mode",
    "Take",
    "Put",
)
Use = tuple[str, int]  # the parameter, and how many positions it is applied to


def chooses(losses: Tensor) -> bool:
    """Whether somewhere between the parameters and the losses a place is chosen by values."""
    seen: set[Any] = set()
    stack: list[Any] = [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__.startswith(_CHOOSING):
            return True
        stack += [following for following, _ in node.next_functions]
    return False


@dataclass(frozen=True)
class Live:
    """The positions to compute with, and the stretches between them, which are expected to be zero."""

    index: Tensor
    gaps: tuple[tuple[int, int], ...]

    def left_out(self, g: Tensor) -> list[Tensor]:
        """How many entries in each stretch of (rows, positions, features) are not zero; NaN is not."""
        return [torch.count_nonzero(g[:, start:end]) for start, end in self.gaps]

    def spread(self, values: Tensor, positions: int) -> Tensor:
        """Values at the live positions, zeros elsewhere."""
        shape = values.shape[0], positions, *values.shape[2:]
        return values.new_zeros(shape).index_copy_(1, self.index, values)


@dataclass
class ZeroPositions:
    """What was found about each use; a use that is not known keeps all its positions."""

    looking: bool = False  # during a pass over synthetic rows
    known: dict[Use, tuple[int, ...] | None] = field(default_factory=dict)  # which positions may have a gradient
    _ready: dict[tuple[Use, torch.device], Live | None] = field(default_factory=dict)

    def forget(self) -> None:
        self.known.clear()
        self._ready.clear()

    def look(self, name: str, g: Tensor, fixed: bool) -> None:
        """Note which positions of (rows, positions, features) are zero, if that is the same for all rows seen."""
        use, nonzero = (name, g.shape[1]), (g != 0).any(2)
        found = tuple(torch.nonzero(nonzero[0]).flatten().tolist())
        alike = fixed and bool((nonzero == nonzero[:1]).all()) and self.known.get(use, found) == found
        self.known[use] = found if alike and found else None
        self._ready.clear()

    def live(self, name: str, positions: int, device: torch.device) -> Live | None:
        """The positions to compute with; None for all of them."""
        use = name, positions
        if (use, device) not in self._ready:
            self._ready[use, device] = _live(self.known.get(use), positions, device)
        return self._ready[use, device]


def _live(known: tuple[int, ...] | None, positions: int, device: torch.device) -> Live | None:
    if known is None or 2 * len(known) > positions:
        return None
    gaps = tuple((a + 1, b) for a, b in pairwise((-1, *known, positions)) if b - a > 1)
    return Live(torch.tensor(known, device=device), gaps)
