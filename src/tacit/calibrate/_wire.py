"""Reading typed values from plain data, with a sentence for whatever does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def checked(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"A {cls.__name__} is read from an object with named fields.")
    names = {field.name: field for field in fields(cls)}
    extra = sorted(set(data) - set(names))
    if extra:
        raise ValueError(f"A {cls.__name__} has no field {extra[0]!r}; it has {', '.join(names)}.")
    return dict(data)


def make(cls: type[T], data: Mapping[str, Any]) -> T:
    """The value, with a plain sentence where the fields do not fit."""
    try:
        return cls(**checked(cls, data))
    except TypeError as error:
        raise ValueError(f"This is no {cls.__name__}: {error}.") from None
