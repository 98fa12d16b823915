"""A part of a recipe: some of its cells, with constants that are known instead of tuned.

    python -m studies run finetune/finetune-image.toml --only optimizer=dpgd epsilon=1 steps=30 lr=0.3 seeds=0

A cell of a part is the cell of the whole: both find it in the same folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tacit.recipes import nearest

Only = Mapping[str, tuple[str, ...]]


def wanted(said: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """``KEY=VALUE[,VALUE...]`` as it was written on the command line."""
    found = {}
    for one in said:
        key, equals, values = one.partition("=")
        if not (key and equals and values):
            raise ValueError(f"{one!r} is not of the form KEY=VALUE or KEY=VALUE,VALUE.")
        found[key] = (values, *values.split(","))  # a name may have a comma of its own
    return found


def part(study: Any, only: Only) -> Any:
    """The study with these values alone.

    A key is a field of the study (seeds, tasks) or of its entries (the arms, methods, sweeps: method, epsilon, lr). Of
    a list the wanted values stay, and an entry that has none of them is left out; one without the field stays.

    Raises:
        ValueError: No field has the name, or nothing is left.
    """
    known = {each.name for each in fields(study)} | {each.name for entry in _entries(study) for each in fields(entry)}
    for key in only:
        if key not in known:
            raise ValueError(f"There is no {key!r} in this recipe{nearest(key, known, 'fields')}")
    changed: dict[str, Any] = {}
    for each in fields(study):
        value = getattr(study, each.name)
        if each.name in only and isinstance(value, dict):
            changed[each.name] = {name: value[name] for name in only[each.name] if name in value}
        elif _of_entries(value):
            changed[each.name] = tuple(made for entry in value if (made := _narrowed(entry, only)) is not None)
        elif each.name in only:
            changed[each.name] = _kept(value, only[each.name])
        else:
            continue
        if not changed[each.name] and each.default != ():
            raise ValueError(f"Nothing of {each.name} is left: see the values in the recipe.")
    return replace(study, **changed)


def _narrowed(entry: Any, only: Only) -> Any | None:
    changed: dict[str, Any] = {}
    for key in (each.name for each in fields(entry) if each.name in only):
        value = getattr(entry, key)
        if value == ():  # as the study has it
            continue
        changed[key] = _kept(value, only[key])
        if changed[key] is None or changed[key] == ():
            return None
    return replace(entry, **changed)


def _kept(value: Any, values: tuple[str, ...]) -> Any:
    """Of a list, what is wanted; of a single value, itself or None."""
    if isinstance(value, tuple):
        return tuple(one for one in value if _is(one, values))
    return value if _is(value, values) else None


def _is(value: Any, values: tuple[str, ...]) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return any(_number(one) == value for one in values)
    return str(value).lower() in (one.lower() for one in values)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _entries(study: Any) -> list[Any]:
    values = [getattr(study, each.name) for each in fields(study)]
    return [entry for value in values if _of_entries(value) for entry in value]


def _of_entries(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(map(is_dataclass, value))
