"""Handles: what a model sees in place of its trainable parameters while the engine watches.

A handle behaves like the parameter's value. Each torch function that receives one is looked up among the rules of
`layers`; a function without a rule is either applied to the parameter alone (its result is a handle again: a reshaped
layer scale, a slice of a position embedding) or goes through the slow path of `fallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tacit.gradients._recorder import Recorder


class UnsupportedPattern(Exception):
    """A use of a parameter whose rows the engine cannot tell apart; the engine then takes the slow path."""


Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}

_DETACHED = {torch.Tensor.detach, torch.Tensor.data.__get__, torch.detach}  # type: ignore[attr-defined]


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Serve these torch functions by the decorated rule, which takes the recorder and then the same arguments."""

    def register(serve: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, serve))
        return serve

    return register


@dataclass(eq=False, slots=True)
class Target:
    """What a gradient is for: a parameter, or a value computed from parameters alone."""

    names: tuple[str, ...]
    shape: torch.Size
    origin: Tensor | None = None  # for a computed value: the value with its graph back to the parameters
    lines: Tensor | None = None  # for lines of a table that are the same for all rows (positions): which ones


class TracedParameter(torch.Tensor):
    """A target's value, under watch."""

    plain: Tensor
    recorder: Recorder
    target: Target

    @classmethod
    def of(
        cls, value: Tensor, recorder: Recorder, names: tuple[str, ...], origin: Tensor | None = None
    ) -> TracedParameter:
        plain = value.detach()
        handle = plain.as_subclass(cls)
        handle.__dict__.update(plain=plain, recorder=recorder, target=Target(names, plain.shape, origin))
        return handle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handles, others = _apart(args, kwargs)
        recorder: Recorder = handles[0].__dict__["recorder"]
        if recorder.closed or not torch.is_grad_enabled() or func in _DETACHED:
            return func(*unwrapped(args), **unwrapped(kwargs))
        try:
            if not recorder.enters(func, args, kwargs, handles, others):
                return _compute(func, args, kwargs, handles)
            serve = RULES.get(func)
            result = serve(recorder, *args, **kwargs) if serve else NotImplemented
            if result is NotImplemented:
                result = recorder.without_rule(func, args, kwargs, handles)
            return result
        except (RuntimeError, IndexError) as error:
            if recorder.plan.learning:  # on synthetic rows, where plain autograd has no trouble: say whose it is
                raise UnsupportedPattern(handles[0].target.names[0]) from error
            raise


def graph_value(handle: TracedParameter) -> Tensor:
    """The handle's value with its graph back to the parameters."""
    target = handle.target
    return handle.recorder.leaf(target.names[0]) if target.origin is None else target.origin


def plain(value: Any) -> Any:
    """The value to compute with."""
    return value.__dict__["plain"] if isinstance(value, TracedParameter) else value


def unwrapped(tree: Any, value: Callable[[TracedParameter], Tensor] = plain) -> Any:
    """Replace every handle in nested arguments."""
    if isinstance(tree, TracedParameter):
        return value(tree)
    if isinstance(tree, dict):
        return {key: unwrapped(item, value) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(unwrapped(item, value) for item in tree)
    return tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors(item)


def _apart(args: Any, kwargs: Any) -> tuple[list[TracedParameter], list[Tensor]]:
    """The handles among the arguments, and the other tensors."""
    handles: list[TracedParameter] = []
    others: list[Tensor] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, TracedParameter):
            handles.append(item)
        elif isinstance(item, Tensor):
            others.append(item)
        elif isinstance(item, dict | list | tuple):
            for t in tensors(item):
                (handles if isinstance(t, TracedParameter) else others).append(t)  # type: ignore[arg-type]
    return handles, others


def _look_up(wrap: Callable[[Any], Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Lines of a table at fixed places, as position embeddings are: cheap to undo, if it is known which ones."""
    found = wrap(func(*unwrapped(args, graph_value), **unwrapped(kwargs, graph_value)))
    given = dict(zip(("input", "weight", "padding_idx", "max_norm"), args, strict=False)) | kwargs
    table = given["weight"]
    plain_table = (
        isinstance(table, TracedParameter)
        and table.target.origin is None
        and not isinstance(given["input"], TracedParameter)
    )
    if plain_table and given.get("padding_idx") is None and given.get("max_norm") is None:
        found.target.lines = given["input"]
    return found


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _change(func: Any, args: Any, kwargs: Any, names: tuple[str, ...]) -> TracedParameter:
    """A value computed from parameters is changed in place: the handle stays, with the new value and all its names."""
    handle: TracedParameter = args[0]
    fresh = graph_value(handle).clone()
    value = func(fresh, *unwrapped(args[1:], graph_value), **unwrapped(kwargs, graph_value))
    handle.__dict__.update(plain=value.detach(), target=Target(names, value.shape, value))
    return handle


def _compute(func: Any, args: Any, kwargs: Any, handles: list[TracedParameter]) -> Any:
    """Apply a function to parameters alone; what comes out is a handle again."""
    recorder = handles[0].recorder
    names = tuple(dict.fromkeys(name for h in handles for name in h.target.names))

    def wrap(result: Any) -> Any:
        if isinstance(result, Tensor) and result.requires_grad:
            return TracedParameter.of(result, recorder, names, result)
        if type(result) in (list, tuple):
            return type(result)(wrap(item) for item in result)
        return result

    if _in_place(func) and args and args[0] is handles[0] and args[0].target.origin is not None:
        return _change(func, args, kwargs, names)
    result = func(*unwrapped(args), **unwrapped(kwargs))
    if func is F.embedding:
        return _look_up(wrap, func, args, kwargs)
    if not any(t.is_floating_point() for t in tensors(result)):
        return result
    return wrap(func(*unwrapped(args, graph_value), **unwrapped(kwargs, graph_value)))
