"""The one JSON form of a number that JSON has none for: "inf", "-inf" and "nan"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_NAMED = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_plain(value: Any) -> Any:
    """A value as JSON has it: tuples are lists, keys are strings, and a number that is not finite is its name.

    Example:
        >>> to_plain({"epsilon": float("inf"), 2: (0.5, 1)})
        {'epsilon': 'inf', '2': [0.5, 1]}
    """
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def to_number(value: Any) -> Any:
    """A number that ``to_plain`` has written; anything else as it is.

    Example:
        >>> to_number("inf"), to_number(0.5), to_number("epsilon")
        (inf, 0.5, 'epsilon')
    """
    return _NAMED.get(value, value) if isinstance(value, str) else value
