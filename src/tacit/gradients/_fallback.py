"""The slow paths, with the same answer: one function through `torch.func`, or the whole model row by row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tacit._refusals import ENDING
from tacit.gradients._batches import rows_of
from tacit.gradients._grad_factors import PerRow
from tacit.gradients._isolation import buffers_of, caches_of, drop, put_back, wrong_shape
from tacit.gradients._recorder import UnsupportedPattern, call_of
from tacit.gradients._traced_parameter import TracedParameter, plain, tensors, unwrapped
from tacit.gradients._units import Units

OF_THE_MACHINE = (MemoryError, torch.OutOfMemoryError)  # errors that no row is to blame for

if TYPE_CHECKING:
    from tacit.gradients._recorder import Recorder


class _Watch(torch.autograd.Function):
    """The identity, which reports its output gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, report: Callable[[Tensor], None], _: Tensor) -> Tensor:
        ctx.report = report
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.report(grads[0])
        return grads[0], None, None


def per_row_by_vmap(recorder: Recorder, func: Any, args: Any, kwargs: Any, handles: list[TracedParameter]) -> Any:
    """A function without a rule: its output as usual, its parameters' gradients by vmap over rows in the backward."""
    name = getattr(func, "__name__", str(func))
    if recorder.plan.learning and not recorder.plan.quiet:
        say_once(recorder.plan.said, handles[0].target.names[0], repr(name))
    for handle in handles:
        recorder.uses(handle, f"torch.func ({name})")
    value = func(*unwrapped(args), **unwrapped(kwargs))
    if not isinstance(value, Tensor) or value.dim() == 0:
        raise UnsupportedPattern(handles[0].target.names[0])
    return _Watch.apply(value, lambda g: _report(recorder, func, args, kwargs, handles, g), recorder.anchor)  # type: ignore[no-untyped-call]


def _report(recorder: Recorder, func: Any, args: Any, kwargs: Any, handles: list[TracedParameter], g: Tensor) -> None:
    rows, size = recorder.units.rows, g.shape[0]
    if size % rows:
        raise UnsupportedPattern(handles[0].target.names[0])
    recorder.folds[handles[0].target.names[0], size // rows] += 1
    flat: list[Tensor] = []  # the tensors with rows, each replaced by a slot in the arguments
    rowed = iter(_rowed(recorder, func, args, kwargs, handles, size))

    def collect(tree: Any) -> Any:
        if isinstance(tree, TracedParameter):
            return tree
        if isinstance(tree, Tensor):
            if not next(rowed):
                return tree
            if tree.dim() == 0 or tree.shape[0] != size:
                raise UnsupportedPattern(handles[0].target.names[0])
            flat.append(tree.detach().reshape(rows, size // rows, *tree.shape[1:]))
            return _Slot(len(flat) - 1)
        if isinstance(tree, dict):
            return {key: collect(item) for key, item in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(collect(item) for item in tree)
        return tree

    template = collect((args, kwargs))

    def one(row: list[Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
        def apply(*values: Tensor) -> Tensor:
            left = iter(values)
            these, named = _fill(template, row, lambda _: next(left))
            return func(*these, **named)  # type: ignore[no-any-return]

        return tuple(torch.func.vjp(apply, *(plain(h) for h in handles))[1](cotangent))

    try:
        found = torch.func.vmap(one, randomness="different")(flat, g.reshape(rows, size // rows, *g.shape[1:]))
    except (RuntimeError, ValueError, IndexError) as error:  # what vmap cannot do (in-place functions, mixed types)
        raise UnsupportedPattern(handles[0].target.names[0]) from error
    for handle, grads in zip(handles, found, strict=True):
        recorder.record(handle.target, PerRow(grads))


def _rowed(
    recorder: Recorder, func: Any, args: Any, kwargs: Any, handles: list[TracedParameter], size: int
) -> tuple[bool, ...]:
    """Which of the other tensors have rows: determined once, because a constant may be as long as some later batch."""
    others = [t for t in tensors((args, kwargs)) if not isinstance(t, TracedParameter)]
    call = call_of(func, others, handles)
    if recorder.plan.learning:
        constants = recorder.plan.constants
        found = (t.dim() > 0 and t.shape[0] == size and t.untyped_storage().data_ptr() not in constants for t in others)
        recorder.learns(recorder.plan.rowed, call, tuple(found))
    return recorder.plan.rowed[call]


class _Slot(int):
    """Stands for the tensor that the current row puts here."""


def _fill(tree: Any, row: list[Tensor], parameter: Callable[[TracedParameter], Tensor]) -> Any:
    if isinstance(tree, _Slot):
        return row[tree]
    if isinstance(tree, TracedParameter):
        return parameter(tree)
    if isinstance(tree, dict):
        return {key: _fill(item, row, parameter) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_fill(item, row, parameter) for item in tree)
    return tree


def say_once(said: set[tuple[str, str]], parameter: str, function: str) -> None:
    """Warn which layer takes the slow path, once per engine."""
    key = (parameter.rpartition(".")[0] or parameter, function)
    if key not in said:
        said.add(key)
        warnings.warn(
            f"There is no fast rule for {function} in layer {key[0]!r}; its gradients come row by row from torch.func: "
            f"the same result, slower.",
            stacklevel=2,
        )


def row_gradients(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    parameters: dict[str, Tensor],
    batch: Any,
    chosen: Tensor,
    rows: int,
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The loss and gradient of each chosen row by plain autograd: slow, and right for any model that keeps rows apart.

    Each row goes twice through the model and counts once: kernels for one row are other kernels, and some are wrong
    (BatchNorm's backward in evaluation mode). Every forward starts from the same buffers.
    """
    state, caches = buffers_of(model), caches_of(model)
    for row in chosen:
        put_back(model, state)
        drop(caches)
        value = loss(rows_of(batch, torch.stack([row, row]), rows))
        if value.shape != (2,):
            raise wrong_shape(value.shape, 2)
        found: tuple[Tensor | None, ...] = (None,) * len(parameters)
        if value.requires_grad:
            found = torch.autograd.grad(value[0], list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.items(), found, strict=True)
        yield value[:1].detach(), {n: torch.zeros_like(p) if f is None else f for (n, p), f in pairs}


def mean_gradient(each: Iterator[tuple[Tensor, dict[str, Tensor]]]) -> tuple[dict[str, Tensor], Tensor]:
    """The mean gradient and the mean loss of rows, in float64."""
    losses, total, count = [], dict[str, Tensor](), 0
    for loss, row in each:
        losses.append(loss.double())
        count += 1
        for name, gradient in row.items():
            total[name] = gradient.double() if name not in total else total[name].add_(gradient)
    return {name: value / count for name, value in total.items()}, torch.stack(losses).mean().reshape(1)


def raising_rows(loss: Callable[[Any], Tensor], batch: Any, grouped: Units) -> Tensor:
    """For each row, whether its unit alone makes model or loss raise."""
    found = torch.zeros_like(grouped.of_row, dtype=torch.bool)
    for unit in range(grouped.count):
        mine = torch.nonzero(grouped.of_row == unit).flatten()
        try:
            loss(rows_of(batch, torch.cat([mine, mine]), grouped.rows))
        except ENDING:
            raise
        except BaseException:  # whatever rows can do
            found[mine] = True
    return found
