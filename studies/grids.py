"""Grids: every combination of lists, as recipes write them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any


def combinations(lists: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination, the last list running fastest; what is not a tuple is the same in all of them."""
    tuples = [value if isinstance(value, tuple) else (value,) for value in lists.values()]
    for values in itertools.product(*tuples):
        yield dict(zip(lists, values, strict=True))
