"""How far a model has moved from the source: the number of adapted layers times |theta - theta_0| / |theta_0|."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_SMALL = 1 << 14  # numbers in a tensor that is measured together with others


def norm_of(values: Mapping[str, Tensor]) -> float:
    """The L2 norm of all of them together; one where all are zero."""
    return math.sqrt(sum(float(p.detach().double().square().sum()) for p in values.values())) or 1.0


def layers_of(values: Mapping[str, Tensor]) -> int:
    """In how many layers these parameters are."""
    return len({name.rpartition(".")[0] for name in values})


def strain(values: Mapping[str, Tensor], origin: Mapping[str, Tensor]) -> float:
    """How far parameters are from the source: the number of layers times |theta - theta_0| / |theta_0|."""
    moved = sum(float((p.detach() - origin[name]).double().square().sum()) for name, p in values.items())
    return layers_of(origin) * math.sqrt(moved) / norm_of(origin)


class Strain:
    """`strain`, step after step: the source is measured once, and small tensors are measured side by side.

    Args:
        values: The parameters that move; always the same objects.
        origin: The same in the source model.
    """

    def __init__(self, values: Mapping[str, Tensor], origin: Mapping[str, Tensor]) -> None:
        self._layers, self._norm = layers_of(origin), norm_of(origin)
        alike: dict[object, list[str]] = {}
        for name, value in values.items():
            alike.setdefault((value.dtype, value.device) if value.numel() <= _SMALL else name, []).append(name)
        self._groups = [([values[n] for n in names], _flat([origin[n] for n in names])) for names in alike.values()]

    def __call__(self) -> float:
        squares = 0.0
        with torch.no_grad():
            for values, origin in self._groups:
                squares += float(torch.linalg.vector_norm(_flat(values) - origin, dtype=torch.float64)) ** 2
        return self._layers * math.sqrt(squares) / self._norm


def _flat(values: list[Tensor]) -> Tensor:
    """Side by side; one alone as it is."""
    return torch.cat([v if v.dim() == 1 else v.reshape(-1) for v in values]) if len(values) > 1 else values[0]
