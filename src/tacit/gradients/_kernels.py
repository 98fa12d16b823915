"""Ten kernels in C for CPUs, `kernels.c`, compiled at first use where there is a C compiler; torch serves elsewhere.

Per-unit products in float32 whose sum is float64 have no counterpart in torch: there each product is written to
memory, read again and converted, which costs as much as the product. The kernels have the bounds of the code that they
replace (`_norms`, `_grad_factors`), and no entry's arithmetic depends on threads or on who else is there.

Where the library is kept, and how it is switched off: `tacit._compiled`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tacit._compiled import compiled
from tacit._compiled import processor as _processor

LONGEST = 128  # positions in one product, as in kernels.c
LANES, TERMS = (8, 16), 1024  # of a scalar product: side by side (by processor), and at a time in float32
_SOURCE = Path(__file__).with_name("kernels.c")
_ALONE = 1 << 17  # multiplications below which a second thread costs more than it saves


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
        all(t.dtype == torch.float32 and t.device.type == "cpu" and _in_line(t) for t in tensors)
        and all(t.numel() for t in tensors)
        and type(tensors[0]) is type(tensors[1]) is Tensor
        and kernels_in_use()
    )


def in_lines(t: Tensor) -> Tensor:
    """The tensor with the entries of its last dimension side by side; a copy only where they are not.

    What is grouped by unit is a view where all units have equally many rows, and a copy elsewhere. A view in columns
    would go another way than its copy, and so who else is there would decide how a unit is rounded.
    """
    return t if _in_line(t) else t.contiguous()


def _in_line(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def weighted_sum(u: Tensor, v: Tensor, weights: Tensor, left_out: Tensor | None, run: int) -> Tensor:
    """sum_n w_n sum_t u_nt v_nt^T in float64, each product over at most `run` positions in float32."""
    (rows, positions, m), k = u.shape, v.shape[2]
    if run > LONGEST:
        raise ValueError(f"At most {LONGEST} positions are multiplied at a time, not {run}.")
    total = torch.empty(m, k, dtype=torch.float64)
    weights = weights.contiguous()
    skip = torch.zeros(rows, dtype=torch.bool) if left_out is None else left_out.contiguous()
    given = (*_described(u), *_described(v), weights.data_ptr(), skip.data_ptr(), rows, positions, run, k)
    _share("weighted_sum", m, rows * positions * m * k, *given, total.data_ptr())
    return total


def outer_sum(u: Tensor, v: Tensor, weights: Tensor, left_out: Tensor | None) -> Tensor:
    """sum_n w_n u_n v_n^T for matrices u and v (or rows of one position), every product and sum in float64.

    4,096 rows in a run.
    """
    rows, m, k = u.shape[0], u.shape[-1], v.shape[-1]
    total = torch.empty(m, k, dtype=torch.float64)
    weights = weights.contiguous()
    skip = torch.zeros(rows, dtype=torch.bool) if left_out is None else left_out.contiguous()
    given = (u.data_ptr(), u.stride(0), v.data_ptr(), v.stride(0), weights.data_ptr(), skip.data_ptr(), rows, m, k)
    _share("outer_sum", k, rows * m * k, *given, total.data_ptr())
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
    _share("row_sum", width, values.numel(), *given, total.data_ptr())
    return total


def ghost(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each n: |sum_t u_t v_t^T|^2 from scalar products, (sum_t |u_t| |v_t|)^2, the largest |u_t|^2 or |v_t|^2."""
    (rows, positions, m), k = u.shape, v.shape[2]
    found = torch.empty(3, rows, dtype=torch.float64)
    given = (*_described(u), m, *_described(v), k, positions)
    into = [part.data_ptr() for part in found]
    _share("ghost", rows, rows * positions * positions * (m + k), *given, *into)
    return found[0], found[1], found[2]


def built(u: Tensor, v: Tensor, run: int) -> tuple[Tensor, Tensor] | None:
    """For each n the matrix sum_t u_nt v_nt^T in float32, `run` positions at a time, and its squared norm, if it suits.

    Formal guarantee: the norm is that of the very matrix that is returned, never below it: squares and their sum are
    float64 (see `_norms.square_norms`). How a matrix is formed depends on its own shape alone.
    """
    if not serves(u, v):
        return None
    (units, positions, m), k = u.shape, v.shape[2]
    if run > LONGEST:
        raise ValueError(f"At most {LONGEST} positions are multiplied at a time, not {run}.")
    out, found = torch.empty(units, m, k), torch.empty(units, dtype=torch.float64)
    given = (*_described(u), m, *_described(v), k, positions, run, out.data_ptr(), found.data_ptr())
    _share("built", units, units * positions * m * k, *given)
    return out, trusted(found, m * k)


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
    _share("norm_sums", rows, 2 * rows * positions * width, *given, gain.data_ptr(), shift.data_ptr())
    return gain, shift


def square_norms(values: Tensor) -> Tensor | None:
    """The sum of squares of every row of a matrix, in float64, where each square is exact; None: it does not suit."""
    if not _suits(values):
        return None
    rows, width = values.shape
    found = torch.empty(rows, dtype=torch.float64)
    _share("square_norms", rows, values.numel(), values.data_ptr(), values.stride(0), width, found.data_ptr())
    return found


def trusted(squares: Tensor, width: int) -> Tensor:
    """Sums of so many exact squares, raised to where they are not below the true ones, flushed denormals included."""
    return squares.mul_(1 + (width + 8) * 2.0**-53).add_(width * 2.0**-252)


def outer_norms(u: Tensor, v: Tensor) -> Tensor:
    """|u_n|^2 |v_n|^2 for rows of one position that `serves` takes: what `_norms.ghost_norms` is there, in one pass."""
    (rows, _, m), k = u.shape, v.shape[2]
    found = torch.empty(rows, dtype=torch.float64)
    given = (u.data_ptr(), u.stride(0), m, v.data_ptr(), v.stride(0), k)
    _share("outer_norms", rows, rows * (m + k), *given, found.data_ptr())
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
    _share("moments", rows, x.numel(), *given, shift, shift + 4 * out.stride(0), out.stride(1))
    return out


def channel_sums(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """For each row and channel: scale sum_t g_t (x_t - mean) and sum_t g_t, over positions t; None: unsuited.

    g and x are (rows, channels, …), mean and scale (channels,) or (rows, channels). Sums are float64, what is returned
    is float32.
    """
    rows, channels = x.shape[:2]
    if not (
        g.dtype == x.dtype == mean.dtype == scale.dtype == torch.float32
        and g.device.type == x.device.type == "cpu"
        and type(g) is type(x) is Tensor
        and g.shape == x.shape
        and g.is_contiguous()
        and x.is_contiguous()
        and x.numel()
        and mean.shape == scale.shape  # beyond their ends the kernel would read what lies behind
        and mean.shape in (x.shape[1:2], x.shape[:2])
        and mean.is_contiguous()
        and scale.is_contiguous()
        and kernels_in_use()
    ):
        return None
    gain, shift = torch.empty(rows, channels), torch.empty(rows, channels)
    positions, step = x.numel() // (rows * channels), channels if mean.dim() == 2 else 0
    given = (g.data_ptr(), x.data_ptr(), channels, positions, mean.data_ptr(), scale.data_ptr(), step)
    _share("channel_sums", rows, 2 * x.numel(), *given, gain.data_ptr(), shift.data_ptr())
    return gain, shift


def _suits(values: Tensor) -> bool:
    """Whether the kernels take this matrix."""
    return bool(
        values.dtype == torch.float32
        and values.device.type == "cpu"
        and type(values) is Tensor
        and values.numel()
        and _in_line(values)
        and kernels_in_use()
    )


def roundings(width: int) -> int:
    """How often `ghost` rounds on the way to one scalar product of so many terms: lane, lanes, rest, parts."""
    parts = -(-width // TERMS)
    return parts + max(min(width, TERMS) // n + n.bit_length() - 1 + min(width, n - 1) + 1 for n in LANES)


def _described(t: Tensor) -> tuple[int, int, int]:
    return t.data_ptr(), t.stride(0), t.stride(1)


def _share(kernel: str, parts: int, work: int, *given: int) -> None:
    """Run a kernel over torch's number of threads, if that pays; in a forked child alone (OpenMP would not return)."""
    run, function = _function(kernel)
    threads = 1 if work < _ALONE or _forked else min(torch.get_num_threads(), parts)
    run(function, (ctypes.c_ssize_t * len(given))(*given), parts, threads)


_forked = False


def _in_child() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_in_child)


@cache
def _function(kernel: str) -> tuple[Callable[..., None], ctypes.c_void_p]:
    """What shares a kernel among threads, and the kernel."""
    library = _library()
    if library is None:
        raise RuntimeError("The kernels are not compiled: ask `serves` first.")
    run, size = library.tacit_share, ctypes.c_ssize_t
    run.restype, run.argtypes = None, (ctypes.c_void_p, ctypes.POINTER(size), size, size)
    return run, ctypes.cast(getattr(library, f"tacit_{kernel}"), ctypes.c_void_p)


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled library; None without a compiler, or if anything about it fails: torch serves then."""
    return compiled(_SOURCE, wished=("-fopenmp",))
