"""The plain numbers that a model and a loss could decide by: when one changes, earlier checks say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, float, str)
_SIMPLE = frozenset(_PLAIN)
_DEPTH = 3  # functions that call functions
_LONGEST = 32  # of a list, tuple or dictionary


def plain_numbers(model: nn.Module, loss: Any) -> tuple[Any, ...]:
    """Every number, string and switch among the attributes of the modules and within reach of the loss.

    What counts: attributes of modules; a function's closure, defaults and the globals that it names; the arguments of a
    `partial`; the attributes of a method's object; all of that also in short lists, tuples and dictionaries.
    """
    found: list[Any] = []
    stack = [model]
    while stack:
        module = stack.pop()
        if module._modules:
            stack += [child for child in module._modules.values() if child is not None]
        for value in module.__dict__.values():
            kind = type(value)
            if kind in _SIMPLE:
                found.append(value)
            elif kind is tuple:
                found += _flat(value)
    found += _reached(loss, _DEPTH, {id(model)})
    return tuple(found)


def _reached(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if depth < 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, partial):
        for item in (value.func, *value.args, *value.keywords.values()):
            yield from _of(item, depth, seen)
    elif isinstance(value, MethodType):
        yield from _reached(value.__func__, depth, seen)
        yield from _attributes(value.__self__, seen)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield from _of(cell.cell_contents, depth, seen)
            except ValueError:  # an empty cell
                continue
        for item in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield from _of(item, depth, seen)
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield from _of(value.__globals__[name], depth, seen)
    elif callable(value) and not isinstance(value, type):
        for item in getattr(value, "__dict__", {}).values():
            yield from _of(item, depth, seen)


def _of(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, FunctionType | MethodType | partial):
        yield from _reached(value, depth - 1, seen)
    elif isinstance(value, nn.Module):
        yield from _attributes(value, seen)
    else:
        yield from _flat(value)


def _attributes(value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    seen.add(id(value))
    for item in getattr(value, "__dict__", {}).values():
        yield from _flat(item)


def _flat(value: Any) -> Iterator[Any]:
    if type(value) in _PLAIN:
        yield value
    elif type(value) in (list, tuple) and len(value) <= _LONGEST:
        yield from (item for item in value if type(item) in _PLAIN)
    elif type(value) is dict and len(value) <= _LONGEST:
        yield from (item for item in value.values() if type(item) in _PLAIN)
    elif type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu":
        yield value.item()
