"""Event trees as plain data: the form in which the ledger keeps them."""

from __future__ import annotations

import numbers
from typing import Any

import attr

from tacit.privacy.events._tree import check
from tacit.privacy.events._types import KNOWN, DpEvent


def to_json(event: DpEvent) -> dict[str, Any]:
    """A tree as plain data, the form in which the ledger keeps it; refused if a number of it is out of its range.

    Args:
        event: The event tree.

    Returns:
        Plain data for JSON.

    Raises:
        ValueError: An invalid value.
    """
    return _tree(check(event))


def _tree(event: DpEvent) -> dict[str, Any]:
    fields = {field.name: getattr(event, field.name) for field in attr.fields(type(event))}
    return {"type": type(event).__name__} | {key: _plain(value) for key, value in fields.items()}


def from_json(data: dict[str, Any]) -> DpEvent:
    """The tree that ``to_json`` wrote; refused if a number of it is out of its range.

    Args:
        data: What ``to_json`` returned.

    Returns:
        The event tree.

    Raises:
        ValueError: An unknown event or an invalid value.
    """
    return check(_event(data))


def _plain(value: Any) -> Any:
    if isinstance(value, DpEvent):
        return _tree(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str) else int(value) if isinstance(value, numbers.Integral) else float(value)


def _event(value: Any) -> Any:
    if isinstance(value, list):
        return [_event(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("type", None)
    if name not in KNOWN:
        raise ValueError(f"Unknown event {name!r}: it was written by a newer tacit, or the file is damaged.")
    made = {key: _event(inner) for key, inner in fields.items()}
    if set(made) - {field.name for field in attr.fields(KNOWN[name])}:
        raise ValueError(f"A {name} has other fields than these: it was written by a newer tacit, or it is damaged.")
    try:
        return KNOWN[name](**made)
    except TypeError:
        raise ValueError(f"A {name} lacks a field: the file is damaged.") from None
