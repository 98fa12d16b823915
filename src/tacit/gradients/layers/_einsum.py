"""Einstein sums with a parameter: relative positions of multiscale and windowed transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tacit.gradients._grad_factors import PerRow
from tacit.gradients._recorder import Recorder, UnsupportedPattern
from tacit.gradients._traced_parameter import TracedParameter, plain, rule

_FOLD = "Z"  # the letter of rows that one row of the batch was folded into


class _Einsum(torch.autograd.Function):
    """y = einsum(x, w); a row's gradient is the sum of its x and its output gradient over what w does not have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, letters: tuple[str, str, str], use: Any, _: Tensor) -> Tensor:
        ctx.letters, ctx.use = letters, use
        ctx.save_for_backward(x, weight)
        rows, parts, out = letters
        # As it is, but no view of the product that nobody else has: views of views made here must not be changed.
        return torch.einsum(f"{rows},{parts}->{out}", x, weight).data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        recorder, target = ctx.use
        x, weight = ctx.saved_tensors
        rows, parts, out = ctx.letters
        x_rows, g_rows = recorder.rows_first(target, x), recorder.rows_first(target, g)
        dim = max(recorder.plan.batch_dim.get(target.names[0], 0), 0)
        first = rows[dim]
        if out[dim] != first or first in parts:  # no letter of rows
            raise UnsupportedPattern(target.names[0])
        (left, right), lead = (letters.replace(first, "") for letters in (rows, out)), first + _FOLD
        per_row = f"{lead}{left},{lead}{right}->{first}{parts}"
        recorder.record(target, PerRow(torch.einsum(per_row, x_rows, g_rows)))
        back = torch.einsum(f"{out},{parts}->{rows}", g, weight) if ctx.needs_input_grad[0] else None
        return back, None, None, None, None


@rule(torch.einsum)
def einsum(recorder: Recorder, equation: Any, *operands: Any) -> Any:
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    letters = _letters(equation) if len(given) == 2 and isinstance(equation, str) else None
    if letters is None or isinstance(given[0], TracedParameter) == isinstance(given[1], TracedParameter):
        return NotImplemented
    left, right, out = letters
    if isinstance(given[0], TracedParameter):
        left, right, given = right, left, (given[1], given[0])
    x, weight = given
    every_sum_can_be_undone = set(right) <= set(left) | set(out) and set(left) <= set(right) | set(out)
    if not every_sum_can_be_undone or left[0] != out[0] or left[0] in right:
        return NotImplemented
    if len(right) == 2 and left[:-1] == out[:-1] and {left[-1], out[-1]} == set(right):  # a linear layer
        return torch.matmul(x, weight if right[0] == left[-1] else weight.T)
    use = (recorder, recorder.uses(weight, "einsum"))
    return _Einsum.apply(x, plain(weight), (left, right, out), use, recorder.anchor)  # type: ignore[no-untyped-call]


def _letters(equation: str) -> tuple[str, str, str] | None:
    """The letters of two operands and of the result; None if any comes twice in one of them, or is left out."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, comma, right = inputs.partition(",")
    parts = (left, right, out)
    plain_letters = all(part.isalpha() and len(set(part)) == len(part) and _FOLD not in part for part in parts)
    return parts if arrow and comma and plain_letters else None
