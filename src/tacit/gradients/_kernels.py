"""Eight kernels in C for CPUs, `kernels.c`, compiled at first use where there is a C compiler; torch serves elsewhere.

Per-unit products in float32 whose sum is float64 have no counterpart in torch: there each product is written to
memory, read again and converted, which costs as much as the product. The kernels have the bounds of the code that they
replace (`_norms`, `_grad_factors`), and no entry's arithmetic depends on threads or on who else is there.

Where the library is kept, and how it is switched off: `tacit._compiled`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tacit._compiled import compiled
from tacit._compiled import processor as _processor

LONGEST = 128  # positions in one product, as in kernels.c
LANES, TERMS = (8, 16), 1024  # of a scalar product: side by side (by processor), and at a time in float32
_SOURCE = Path(__file__).with_name("kernels.c")
_ALONE = 1 << 22  # multiplications below which a second thread costs more than it saves
_POOLS: dict[int, ThreadPoolExecutor] = {}
_WORKER = threading.local()  # .busy: this thread is one of several that take layer after layer

Item = TypeVar("Item")
Found = TypeVar("Found")


def kernels_in_use() -> bool:
    """Whether the kernels serve tensors of a CPU here: sums have other last bits with them than without."""
    return _library() is not None


def kernels_version() -> str:
    """What decides the last bits of sums: the kernels' source and how many lanes the processor has; "" without them."""
    if not kernels_in_use():
        return ""
    return hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16] + ("+avx512" if b"avx512f" in _processor() else "")


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors (rows, positions, features)."""
    return (
        all(t.dtype == torch.float32 and t.device.type == "cpu" and t.stride(2) == 1 for t in tensors)
        and all(t.numel() for t in tensors)
        and type(tensors[0]) is type(tensors[1]) is Tensor
        and kernels_in_use()
    )


def weighted_sum(u: Tensor, v: Tensor, weights: Tensor, left_out: Tensor | None, run: int) -> Tensor:
    """sum_n w_n sum_t u_nt v_nt^T in float64, each product over at most `run` positions in float32."""
    (rows, positions, m), k = u.shape, v.shape[2]
    if run > LONGEST:
        raise ValueError(f"At most {LONGEST} positions are multiplied at a time, not {run}.")
    total = torch.empty(m, k, dtype=torch.float64)
    weights = weights.contiguous()
    skip = torch.zeros(rows, dtype=torch.bool) if left_out is None else left_out.contiguous()
    given = (*_described(u), *_described(v), weights.data_ptr(), skip.data_ptr(), rows, positions, run, k)
    call = _function("tacit_weighted_sum")
    _share(m, rows * positions * m * k, lambda first, last: call(*given, first, last, total.data_ptr()))
    return total


def outer_sum(u: Tensor, v: Tensor, weights: Tensor, left_out: Tensor | None) -> Tensor:
    """sum_n w_n u_n v_n^T for matrices u and v (or rows of one position), every product and sum in float64.

    4,096 rows in a run.
    """
    rows, m, k = u.shape[0], u.shape[-1], v.shape[-1]
    total = torch.empty(m, k, dtype=torch.float64)
    weights = weights.contiguous()
    skip = torch.zeros(rows, dtype=torch.bool) if left_out is None else left_out.contiguous()
    given = (u.data_ptr(), u.stride(0), v.data_ptr(), v.stride(0), weights.data_ptr(), skip.data_ptr(), rows, k)
    call = _function("tacit_outer_sum")
    _share(m, rows * m * k, lambda first, last: call(*given, first, last, total.data_ptr()))
    return total


def row_sum(values: Tensor, weights: Tensor, left_out: Tensor | None) -> Tensor | None:
    """sum_n w_n v_n over the rows of a matrix, every product and sum in float64; None: it does not suit."""
    if not _suits(values):
        return None
    rows, width = values.shape
    total = torch.empty(width, dtype=torch.float64)
    weights = weights.contiguous()
    skip = torch.zeros(rows, dtype=torch.bool) if left_out is None else left_out.contiguous()
    given = (values.data_ptr(), values.stride(0), weights.data_ptr(), skip.data_ptr(), rows)
    call = _function("tacit_row_sum")
    _share(width, values.numel(), lambda first, last: call(*given, first, last, total.data_ptr()))
    return total


def ghost(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each n: |sum_t u_t v_t^T|^2 from scalar products, (sum_t |u_t| |v_t|)^2, the largest |u_t|^2 or |v_t|^2."""
    (rows, positions, m), k = u.shape, v.shape[2]
    found = torch.empty(3, rows, dtype=torch.float64)
    given = (*_described(u), m, *_described(v), k, positions)
    into = [part.data_ptr() for part in found]
    call = _function("tacit_ghost")
    _share(rows, rows * positions * positions * (m + k), lambda first, last: call(*given, first, last, *into))
    return found[0], found[1], found[2]


def norm_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """For each n: sum_t g_t (x_t - mean_t) rstd_t and sum_t g_t, entry by entry; mean and rstd (rows, positions)."""
    rows, positions, width = g.shape
    mean, rstd = mean.contiguous(), rstd.contiguous()
    return _norm_sums(_described(g), _described(x), mean, rstd, rows, positions, width)


def contiguous_norm_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, rows: int) -> tuple[Tensor, Tensor] | None:
    """`norm_sums` over the last dimension of tensors as they come, without a view of any; None: they do not suit."""
    if not (
        g.dtype == x.dtype == mean.dtype == torch.float32
        and g.device.type == "cpu"
        and type(g) is type(x) is Tensor
        and g.is_contiguous()
        and x.is_contiguous()
        and g.shape == x.shape
        and g.numel()
        and kernels_in_use()
    ):
        return None
    width = g.shape[-1]
    positions = g.numel() // (rows * width)
    across = positions * width, width
    return _norm_sums((g.data_ptr(), *across), (x.data_ptr(), *across), mean, rstd, rows, positions, width)


def _norm_sums(
    g: tuple[int, int, int], x: tuple[int, int, int], mean: Tensor, rstd: Tensor, rows: int, positions: int, width: int
) -> tuple[Tensor, Tensor]:
    gain, shift = torch.empty(rows, width), torch.empty(rows, width)
    given = (*g, *x, mean.data_ptr(), rstd.data_ptr(), positions, width)
    into = (gain.data_ptr(), shift.data_ptr())
    call, work = _function("tacit_norm_sums"), 2 * rows * positions * width
    if work < _ALONE:
        call(*given, 0, rows, *into)
    else:
        _share(rows, work, lambda first, last: call(*given, first, last, *into))
    return gain, shift


def square_norms(values: Tensor) -> Tensor | None:
    """The sum of squares of every row of a matrix, in float64, where each square is exact; None: it does not suit."""
    if not _suits(values):
        return None
    rows, width = values.shape
    found = torch.empty(rows, dtype=torch.float64)
    given = (values.data_ptr(), values.stride(0), width)
    call = _function("tacit_square_norms")
    _share(rows, values.numel(), lambda first, last: call(*given, first, last, found.data_ptr()))
    return found


def outer_norms(u: Tensor, v: Tensor) -> Tensor:
    """|u_n|^2 |v_n|^2 for rows of one position that `serves` takes: what `_norms.ghost_norms` is there, in one pass."""
    (rows, _, m), k = u.shape, v.shape[2]
    found = torch.empty(rows, dtype=torch.float64)
    given = (u.data_ptr(), u.stride(0), m, v.data_ptr(), v.stride(0), k)
    call = _function("tacit_outer_norms")
    _share(rows, rows * (m + k), lambda first, last: call(*given, first, last, found.data_ptr()))
    return found


def channel_moments(x: Tensor, mean: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor | None:
    """For each row and channel the means over positions of z and of z^2 - 1, z = (x - mean) scale; None: unsuited.

    x is (rows, channels, …), mean and scale are float32 and (channels,). Sums are float64. The result, or `out`, is
    (2, rows, channels) and float32; its last dimension has no gaps.
    """
    out = torch.empty(2, *x.shape[:2]) if out is None else out
    if not (
        x.dtype == mean.dtype == scale.dtype == torch.float32
        and x.device.type == "cpu"
        and type(x) is Tensor
        and x.is_contiguous()
        and x.numel()
        and mean.shape == scale.shape == x.shape[1:2]  # beyond their ends the kernel would read what lies behind
        and mean.is_contiguous()
        and scale.is_contiguous()
        and out.dtype == torch.float32
        and out.device.type == "cpu"
        and out.shape == (2, *x.shape[:2])  # as above, and it would write there
        and out.stride(2) == 1
        and kernels_in_use()
    ):
        return None
    rows, channels = x.shape[:2]
    given = (x.data_ptr(), channels, x.numel() // (rows * channels), mean.data_ptr(), scale.data_ptr())
    shift = out.data_ptr()
    into = (shift, shift + 4 * out.stride(0), out.stride(1))
    call = _function("tacit_moments")
    _share(rows, x.numel(), lambda first, last: call(*given, first, last, *into))
    return out


def _suits(values: Tensor) -> bool:
    """Whether the kernels take this matrix."""
    return bool(
        values.dtype == torch.float32
        and values.device.type == "cpu"
        and type(values) is Tensor
        and values.numel()
        and values.stride(1) == 1
        and kernels_in_use()
    )


def roundings(width: int) -> int:
    """How often `ghost` rounds on the way to one scalar product of so many terms: a lane, the lanes, what is left."""
    return max(min(width, TERMS) // n + n.bit_length() - 1 + min(width, n - 1) + 1 for n in LANES)


def _described(t: Tensor) -> tuple[int, int, int]:
    return t.data_ptr(), t.stride(0), t.stride(1)


def over_layers(action: Callable[[Item], Found], layers: Sequence[Item], sizes: Sequence[int]) -> list[Found]:
    """What the action gives for each layer, in their order; over torch's number of threads, if that pays.

    A thread has whole layers, the next largest that nobody has taken: the kernels of one layer after the other, each
    over all threads, waited for each other at every layer. Who takes a layer changes nothing in it.

    Args:
        action: Called without gradients; its time is that of the kernels.
        layers: What it is called with.
        sizes: How many numbers each has, about: each is multiplied some tens of times.

    Returns:
        The results.
    """
    threads = min(torch.get_num_threads(), len(layers))
    if threads < 2 or 32 * sum(sizes) < _ALONE or not kernels_in_use():
        return [action(layer) for layer in layers]
    queue = iter(sorted(range(len(layers)), key=lambda place: -sizes[place]))
    found: dict[int, Found] = {}

    def take() -> None:
        _WORKER.busy = True
        try:
            with torch.no_grad():  # each thread has its own mode
                for place in queue:
                    found[place] = action(layers[place])
        finally:
            _WORKER.busy = False

    others = [_pool(threads).submit(take) for _ in range(threads - 1)]
    try:
        take()
    finally:
        wait(others)  # nothing of this step may go on after it
    for other in others:
        other.result()
    return [found[place] for place in range(len(layers))]


def _share(parts: int, work: int, do: Callable[[int, int], None]) -> None:
    """Over torch's number of threads, if that pays."""
    threads = min(torch.get_num_threads(), parts)
    if threads < 2 or work < _ALONE or getattr(_WORKER, "busy", False):
        do(0, parts)
        return
    edges = [parts * i // threads for i in range(threads + 1)]
    others = [_pool(threads).submit(do, a, b) for a, b in pairwise(edges[1:])]
    do(edges[0], edges[1])
    for other in others:
        other.result()


def _pool(threads: int) -> ThreadPoolExecutor:
    if threads not in _POOLS:
        _POOLS[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="tacit-kernels")
    return _POOLS[threads]


os.register_at_fork(after_in_child=_POOLS.clear)  # threads do not survive a fork


@cache
def _function(name: str) -> Callable[..., None]:
    library = _library()
    if library is None:
        raise RuntimeError("The kernels are not compiled: ask `serves` first.")
    function = getattr(library, name)
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    tensor = (pointer, size, size)
    function.restype = None
    function.argtypes = {
        "tacit_weighted_sum": (*tensor, *tensor, pointer, pointer, *[size] * 6, pointer),
        "tacit_ghost": (*tensor, size, *tensor, size, *[size] * 3, pointer, pointer, pointer),
        "tacit_norm_sums": (*tensor, *tensor, pointer, pointer, *[size] * 4, pointer, pointer),
        "tacit_outer_sum": (pointer, size, pointer, size, pointer, pointer, *[size] * 4, pointer),
        "tacit_row_sum": (pointer, size, pointer, pointer, *[size] * 3, pointer),
        "tacit_square_norms": (pointer, *[size] * 4, pointer),
        "tacit_outer_norms": (pointer, size, size, pointer, *[size] * 4, pointer),
        "tacit_moments": (pointer, size, size, pointer, pointer, size, size, pointer, pointer, size),
    }[name]
    return function  # type: ignore[no-any-return]


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled library; None without a compiler, or if anything about it fails: torch serves then."""
    return compiled(_SOURCE)
