"""Units split into two parts by independent coins."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import torch
from torch import Tensor

from tacit.data import Groupable, Records, Rows, TensorRecords, unit_ids_of
from tacit.privacy import NoiseKey

_COIN = 1  # the purpose of uniforms: who takes part


def coins(count: int, rate: float, seed: int | None = None) -> Tensor:
    """For each of `count` units whether it is in the first part: a fresh coin each, true with probability `rate`.

    A seed makes them reproducible, and then they go by place: not private under add-remove (see `subset_search`).
    """
    key = NoiseKey() if seed is None else NoiseKey((seed, "coins", 0))
    return key.uniforms(0, count, _COIN) <= rate


def part_of(records: Records, units: Tensor) -> Records:
    """Some of the units, as records of their own; a plain table stays one, with its rows in memory."""
    if not isinstance(records, TensorRecords) or records.grouped or records.augmented or not len(units):
        return Part(records, units)
    return TensorRecords(records.read(units), records.labels()[units])


class Part(Groupable):
    """Some units of other records."""

    def __init__(self, whole: Records, units: Tensor) -> None:
        self._whole, self._units = whole, units

    @property
    def unit(self) -> str:
        return self._whole.unit

    @property
    def unit_ids(self) -> list[Any] | None:
        ids = unit_ids_of(self._whole)
        return None if ids is None else [ids[unit] for unit in self._units.tolist()]

    @property
    def uniforms(self) -> int:
        return self._whole.uniforms

    @property
    def most_rows(self) -> int:
        return self._whole.most_rows

    @property
    def scored_by(self) -> Literal["row", "unit"]:
        return self._whole.scored_by

    @property
    def draws(self) -> bool:
        return bool(getattr(self._whole, "draws", True))

    def __len__(self) -> int:
        return len(self._units)

    def labels(self) -> Tensor:
        """Those of everybody: they are all alike to a check."""
        return self._whole.labels()

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        return self._whole.rows(self._units[units], uniforms)

    def scored(self, units: Tensor) -> tuple[Records, Tensor, Tensor]:
        """What is right or wrong about these units, in the whole."""
        return self._whole, self._units[units], torch.arange(len(units))

    def fingerprint(self) -> str:
        content = f"{self._whole.fingerprint()} {self._units.tolist()}"
        return hashlib.sha256(content.encode()).hexdigest()

    def __getattr__(self, name: str) -> Any:
        """What only some records have: `sizes`, a number per unit, `blank()` and `synthetic()`."""
        if name not in ("sizes", "blank", "synthetic", "made_up"):
            raise AttributeError(name)
        found = getattr(self._whole, name)
        return found[self._units] if name == "sizes" and found is not None else found
