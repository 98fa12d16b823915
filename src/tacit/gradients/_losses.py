"""When two loss functions are the same for an engine that checked one of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor


class _Same:
    """Stands for one object, whether or not it can be hashed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def same_loss(loss: Any) -> tuple[Any, ...]:
    """What tells losses apart: a lambda in a training loop is a new function at each step, but the same code.

    What may decide whether rows are mixed counts: the object of a method, and the functions, modules and switches that
    the loss closes over. Data do not, because they change from step to step.
    """
    if isinstance(loss, partial):
        return (*same_loss(loss.func), *_deciding((*loss.args, *loss.keywords.values())))
    code = getattr(loss, "__code__", None)
    if code is None:
        return (_Same(loss),)
    cells = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
    defaults = (*(loss.__defaults__ or ()), *(loss.__kwdefaults__ or {}).values())
    return code, _Same(getattr(loss, "__self__", None)), *_deciding((*cells, *defaults))


def _deciding(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, bool | str) or value is None:
            yield value
        elif callable(value) and not isinstance(value, Tensor):
            yield _Same(value)
