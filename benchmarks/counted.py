"""What a step does, counted: the limit of its time if only multiplications took any, and what else it does.

    python benchmarks/counted.py [--work NAME ...] [--markdown FILE]

Multiplications are those of matrix products, convolutions and attention, as `torch.utils.flop_counter` counts them, one
in float64 as two, for half as many fit into a register; the kernels of `tacit.gradients` are counted as the products of
torch that they replace (with both halves of a Gram matrix).
Bytes are what torch's operations read and write, views left out; calls are those operations, Python calls those
that Python makes, of functions in Python or C. Nothing is timed, so this may run beside anything.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, shape_wrapper

from arms import build
from gradients import works
from paired import Step
from tacit.gradients import _kernels

STEPS = 4  # of which the least counts: the first one checks the model, and some check a unit


@dataclass(frozen=True)
class Count:
    """Of one step."""

    multiplications: int
    bytes: int
    calls: int
    python: int = 0
    grams: int = 0  # multiplications in compiled Gram norms, each pair of positions once
    sums: int = 0  # in compiled sums of units


class _Traffic(TorchDispatchMode):
    """Calls, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls += 1
        if not func.is_view:
            seen = tree_leaves((args, kwargs, found))
            self.bytes += sum(t.numel() * t.itemsize for t in seen if isinstance(t, Tensor))
        return found


class _Products(TorchDispatchMode):
    """Multiplications, those in float64 twice."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in _COUNTS:
            weight = 2 if any(t.dtype == torch.float64 for t in tree_leaves(found) if isinstance(t, Tensor)) else 1
            self.multiplications += weight * _COUNTS[packet](*args, **(kwargs or {}), out_val=found) // 2
        return found


def _backward(g: Any, x: Any, w: Any, *others: Any, out_shape: Any = None) -> int:  # noqa: ARG001
    """Of a convolution with groups, which torch counts as if it had none."""
    transposed, wanted = others[4], others[-1]
    return sum(wanted[:2]) * conv_flop_count(x, w, g, transposed=transposed)


def _added_product(_: Any, a: Any, b: Any, *__: Any, out_shape: Any = None, **___: Any) -> int:  # noqa: ARG001
    """Of a product that is added in place, which torch does not count."""
    return 2 * a[0] * a[1] * (b[1] if len(b) > 1 else 1)


def _product(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return _added_product(None, a, b, out_shape=out_shape)


_COUNTS = flop_registry | {
    torch.ops.aten.convolution_backward: shape_wrapper(_backward),
    torch.ops.aten.addmm_: shape_wrapper(_added_product),
    torch.ops.aten.addmv_: shape_wrapper(_added_product),
    torch.ops.aten.mv: shape_wrapper(_product),
}


def count(step: Step, steps: int = STEPS) -> Count:
    """Multiplications as torch would do them, calls and bytes as they are."""
    products, traffic = [], []
    in_turn = patch.object(torch, "get_num_threads", return_value=1)  # other threads are not looked at
    with in_turn, patch.object(_kernels, "serves", return_value=False), patch.object(_kernels, "built", _built):
        for _ in range(steps):
            with _Products() as counter:
                step()
            products.append(counter.multiplications)
    for _ in range(steps):
        with in_turn, _Traffic() as seen:
            step()
        traffic.append((seen.calls, seen.bytes))
    calls, size = min(traffic)
    found = [_in_python(step) for _ in range(steps)]
    grams, sums = min(kernels for _, kernels in found)
    return Count(min(products), size, calls, min(python for python, _ in found), grams, sums)


def _built(u: Tensor, v: Tensor, _run: int) -> tuple[Tensor, Tensor]:
    """What the kernel does, by torch: one product whose result is kept."""
    values = torch.bmm(u.mT, v)
    return values, values.double().square().sum((1, 2))


def _in_python(step: Step) -> tuple[int, tuple[int, int]]:
    """Calls that Python makes in a step, and the multiplications of the compiled Gram norms and sums."""
    work, share = Counter[str](), _kernels._share
    events = Counter[str]()

    def shared(kernel: str, parts: int, amount: int, *given: int) -> None:
        work[kernel] += amount
        share(kernel, parts, amount, *given)

    with patch.object(_kernels, "_share", shared):
        sys.setprofile(lambda _frame, event, _arg: events.update((event,)))
        try:
            step()
        finally:
            sys.setprofile(None)
    return events["call"] + events["c_call"], (work["ghost"] // 2, work["weighted_sum"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=list(works()), metavar="NAME", help=", ".join(works()))
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options, _ = parser.parse_known_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = ["| work | multiplications (limit) | bytes | calls |", "|---|---|---|---|"]
    for name in options.work or works():
        work = works()[name]
        plain, private = (count(build(work, arm)) for arm in (work.reference, "tacit"))
        lines.append(
            f"| {name} | {private.multiplications / plain.multiplications:.3f} | {private.bytes / plain.bytes:.2f} | "
            f"{plain.calls} -> {private.calls} |"
        )
        print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
