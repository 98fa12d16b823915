"""The compiled kernels against their twins in torch and against float64; and what serves where there is no compiler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tacit._checkpoints import precision
from tacit.gradients import Engine
from tacit.gradients import _grad_factors as factors
from tacit.gradients import _kernels as kernels
from tacit.gradients._norms import _ghost, _ghost_in_place, ghost_norms, square_norms
from tacit.gradients.layers._norm import in_products

compiled = pytest.mark.skipif(not kernels.kernels_in_use(), reason="needs a C compiler")
SHAPES = [
    (3, 2, 1, 1),
    (2, 5, 3, 25),
    (4, 50, 97, 193),
    (2, 128, 8, 200),
    (3, 7, 192, 24),
    (1, 9, 2050, 31),
    (2, 127, 70, 9),
]


def whole_numbers(rows: int, positions: int, m: int, k: int) -> tuple[Tensor, Tensor]:
    """Small integers: every sum of their products is exact in float32, in any order."""
    torch.manual_seed(rows * positions + m)
    return torch.randint(-3, 4, (rows, positions, m)).float(), torch.randint(-3, 4, (rows, positions, k)).float()


@compiled
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact(shape: tuple[int, int, int, int]) -> None:
    u, v = whole_numbers(*shape)
    weights = torch.randint(1, 9, (shape[0],)).double() / 8
    expected = torch.einsum("n,ntm,ntk->mk", weights, u.double(), v.double())
    for run in (shape[1], 3):
        assert torch.equal(kernels.weighted_sum(u, v, weights, None, run), expected)
        values, norms = kernels.built(u, v, run) or (u, v)
        assert torch.equal(values.double(), torch.bmm(u.mT.double(), v.double()))
        assert torch.allclose(norms, values.double().square().sum((1, 2)), rtol=1e-9)
    built = torch.bmm(u.mT.double(), v.double())
    squares, most, largest = kernels.ghost(u, v)
    assert torch.equal(squares, built.square().sum((1, 2)))
    lengths = (u.double().norm(dim=2), v.double().norm(dim=2))
    assert torch.allclose(most, torch.mul(*lengths).sum(1).square(), rtol=1e-12)
    assert torch.equal(largest, torch.cat(lengths, 1).square().amax(1).round())


@compiled
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_gradients_that_are_built_have_no_larger_norm_than_is_said(scale: float) -> None:
    """In exact arithmetic, in any place, over any number of threads, and from views."""
    torch.manual_seed(0)
    u, v = torch.randn(5, 130, 9)[:, 1:] * scale, torch.randn(5, 129, 33)[..., 2:31]
    values, norms = kernels.built(u, v, 100) or (u, v)
    for matrix, norm in zip(values.flatten(1).tolist(), norms.tolist(), strict=True):
        exact = sum(Fraction(x) ** 2 for x in matrix)
        assert exact <= Fraction(norm) <= exact * (1 + Fraction(1, 10**9)) + Fraction(1, 10**70)
    kept = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            again = kernels.built(u.repeat(40, 1, 1), v.repeat(40, 1, 1), 100)
            assert again is not None
            assert torch.equal(again[0], values.repeat(40, 1, 1))
            assert torch.equal(again[1], norms.repeat(40))
    finally:
        torch.set_num_threads(kept)


@compiled
@pytest.mark.parametrize("shape", [(5, 50, 96, 145), (3, 128, 200, 64), (4, 2, 7, 9)])
def test_the_twins_in_torch_agree(shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    rows, positions, m, k = shape
    u, v, weights = torch.randn(rows, positions, m), torch.randn(rows, positions, k), torch.rand(rows).double()
    left_out = torch.arange(rows) == 1
    for skip in (None, left_out):
        given = u if skip is None else u.masked_fill(skip[:, None, None], torch.nan)
        found = kernels.weighted_sum(given, v, weights, skip, positions)
        twin = factors._few(given, v, weights, skip, positions)
        assert float((found - twin).norm()) < 1e-6 * float(twin.norm())
    true = torch.bmm(u.mT.double(), v.double()).square().sum((1, 2))
    for norms in (_ghost(u, v, positions), _ghost_in_place(u, v, positions)):
        assert bool((norms >= true).all())
        assert bool((norms <= true * (1 + 1e-2)).all())


@compiled
@pytest.mark.parametrize(("length", "width"), [(2, 65536), (700, 96), (64, 8192)])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
def test_norms_are_never_too_small(length: int, width: int, value: float) -> None:
    """Equal entries round the same way every time, which is the worst a long sum can do."""
    u, v = torch.full((1, length, width), value), torch.full((1, length, 16), value)
    true = (length * float(u[0, 0, 0]) ** 2) ** 2 * width * 16
    assert true <= float(_ghost_in_place(u, v, 0)) <= true * (1 + 1e-4)


@compiled
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-12])
def test_norms_hold_what_is_formed_when_positions_cancel(scale: float) -> None:
    torch.manual_seed(1)
    half = torch.randn(4, 20, 48)
    u = torch.cat([half, -half], 1)
    v = torch.cat([(first := torch.randn(4, 20, 96)), first + scale * torch.randn(4, 20, 96)], 1)
    norms = ghost_norms(u, v, run=40)[0].sqrt()
    for unit in range(4):
        alone = torch.zeros(4, dtype=torch.float64)
        alone[unit] = 1
        assert float(kernels.weighted_sum(u, v, alone, None, 40).norm()) <= float(norms[unit])


@compiled
def test_threads_and_places_change_no_bit() -> None:
    torch.manual_seed(2)
    u, v, weights = torch.randn(40, 50, 100), torch.randn(40, 50, 210), torch.rand(40).double()
    kept = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((kernels.weighted_sum(u, v, weights, None, 50), *kernels.ghost(u, v)))
    finally:
        torch.set_num_threads(kept)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    one = torch.ones(1, dtype=torch.float64)
    alone = kernels.weighted_sum(u[7:8], v[7:8], one, None, 50)
    others = torch.arange(40) != 7
    assert torch.equal(kernels.weighted_sum(u, v, torch.ones(40).double(), others, 50), alone)
    assert torch.equal(kernels.ghost(u, v)[0][7:8], kernels.ghost(u[7:8], v[7:8])[0])


@compiled
def test_rows_with_other_strides() -> None:
    u, v = whole_numbers(6, 10, 33, 20)
    strided = u.transpose(0, 1).contiguous().transpose(0, 1)
    weights = torch.ones(6, dtype=torch.float64)
    assert torch.equal(
        kernels.weighted_sum(strided, v, weights, None, 10), kernels.weighted_sum(u, v, weights, None, 10)
    )
    assert torch.equal(kernels.ghost(strided, v)[0], kernels.ghost(u, v)[0])
    assert not kernels.serves(u.mT, v)
    assert not kernels.serves(u.double(), v.double())


@compiled
@pytest.mark.parametrize("shape", [(3, 1, 5), (4, 6, 33), (5, 50, 192), (2, 131, 8)])
def test_sums_of_a_norm_layer(shape: tuple[int, int, int]) -> None:
    rows, positions, width = shape
    g, x = whole_numbers(rows, positions, width, width)
    mean, rstd = torch.randint(-2, 3, (rows, positions)).float(), torch.randint(1, 3, (rows, positions)).float()
    expected = (g * (x - mean[..., None]) * rstd[..., None]).sum(1), g.sum(1)
    for found in (kernels.norm_sums(g, x, mean, rstd), in_products(g, x, mean, rstd)):
        assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(found, expected, strict=True))
    g, x = torch.randn(rows, positions, width), 5 + torch.randn(rows, positions, width)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    found = kernels.norm_sums(g, strided, x.mean(2), 1 / x.std(2, unbiased=False).clamp(min=0.1))
    exact = in_products(
        g.double(), x.double(), x.mean(2).double(), 1 / x.std(2, unbiased=False).double().clamp(min=0.1)
    )
    for a, b in zip(found, exact, strict=True):
        assert torch.allclose(a, b.reshape(a.shape).float(), rtol=1e-4, atol=1e-4)
    alone = kernels.norm_sums(g[1:2], x[1:2], x.mean(2)[1:2], torch.ones(1, positions))
    g[0], x[0] = torch.nan, torch.inf
    among = kernels.norm_sums(g, x, x.mean(2), torch.ones(rows, positions))
    assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, among, strict=True))


@compiled
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, 1e30])
def test_what_float32_is_too_narrow_for_is_infinite(odd: float) -> None:
    u, v = torch.rand(3, 5, 12), torch.rand(3, 5, 9)
    v[1, 3, 4] = odd
    found = _ghost_in_place(u, v, 5)
    assert torch.equal(torch.isinf(found), torch.tensor([False, True, False]))


@compiled
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 13, 29), (130, 97, 25), (300, 130, 193), (5, 260, 400), (9000, 3, 5)])
def test_sums_of_outer_products(shape: tuple[int, int, int]) -> None:
    """One position per row: exact for integers; for others as close to the truth as float64 is."""
    rows, m, k = shape
    u, v = (t[:, 0] for t in whole_numbers(rows, 1, m, k))
    weights = torch.randint(1, 9, (rows,)).double() / 8
    left_out = torch.arange(rows) % 5 == 1
    assert torch.equal(
        kernels.outer_sum(u, v, weights, None), torch.einsum("n,nm,nk->mk", weights, u.double(), v.double())
    )
    odd = u.masked_fill(left_out[:, None], torch.nan), v.masked_fill(left_out[:, None], torch.inf)
    kept = torch.einsum("n,nm,nk->mk", weights * ~left_out, u.double(), v.double())
    assert torch.equal(kernels.outer_sum(*odd, weights, left_out), kept)
    u, v = torch.randn(rows, m + 2)[:, 1:-1], 1e30 * torch.randn(rows, k)
    twin = (u.double() * weights[:, None]).T @ v.double()
    most = (u.double() * weights[:, None]).abs().T @ v.double().abs()
    assert bool(((kernels.outer_sum(u, v, weights, None) - twin).abs() <= 2 * rows * 2.0**-53 * most).all())


@compiled
def test_outer_products_over_threads() -> None:
    u, v, weights = torch.randn(600, 110), torch.randn(600, 90), torch.rand(600).double()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(kernels.outer_sum(u, v, weights, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@compiled
@pytest.mark.parametrize("shape", [(1, 1), (7, 29), (64, 400), (9000, 5), (3, 1 << 21)])
def test_sums_of_rows(shape: tuple[int, int]) -> None:
    """Built gradients: exact for integers, the same bits over any number of threads, and rows left out are not read."""
    values, weights = torch.randint(-9, 9, shape).float(), torch.randint(1, 9, shape[:1]).double() / 8
    left_out = torch.arange(shape[0]) % 5 == 1
    kept = (weights * ~left_out) @ values.double()
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(kernels.row_sum(values.masked_fill(left_out[:, None], torch.nan), weights, left_out))
            assert torch.equal(found[-1], kept)
    finally:
        torch.set_num_threads(before)
    values = 1e30 * torch.randn(shape[0], shape[1] + 2)[:, 1:-1]
    most = weights @ values.double().abs()
    assert bool(
        ((kernels.row_sum(values, weights, None) - weights @ values.double()).abs() <= shape[0] * 2.0**-52 * most).all()
    )
    assert kernels.row_sum(values.double(), weights, None) is None


@compiled
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (4, 16), (5, 33), (2, 4992), (512, 100)])
@pytest.mark.parametrize("scale", [1.0, 1e-42, 1e-30, 1e37])
def test_square_norms_of_rows(shape: tuple[int, int], scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(shape[1])
    values = torch.randn(shape) * scale
    strided = torch.randn(shape[0], shape[1] + 3)[:, 1:-2].copy_(values)
    found = square_norms(values)
    for row, norm in zip(values[:9].tolist(), found.tolist(), strict=False):
        true = sum(Fraction(x) ** 2 for x in row)
        assert true <= Fraction(norm) <= true * (1 + Fraction(1, 10**11)) + Fraction(1, 10**70)
    assert torch.equal(found, square_norms(strided))
    assert torch.equal(found[-1:], square_norms(values[-1:]))
    monkeypatch.setattr(kernels, "square_norms", lambda _: None)
    assert torch.allclose(square_norms(values), found, rtol=1e-5, atol=1e-33)


@compiled
def test_outer_norms_are_the_same_beside_a_row_that_is_too_large() -> None:
    """Multiplied out with one rounding or with two: in integers one in twenty had another last bit."""
    for m, k in ((3, 1), (8, 40), (17, 3)):
        u, v = torch.randint(-4, 5, (500, 1, m)).float(), torch.randint(-4, 5, (500, 1, k)).float()
        assert torch.equal(ghost_norms(u, v, run=0)[0], kernels.outer_norms(u, v))
    model, x = nn.Linear(8, 3), torch.randint(-4, 5, (400, 8)).float()
    engine = Engine(model, lambda net, batch: net(batch[0]).mul(batch[1]).sum(1), clip=1.0)
    g = torch.randint(-4, 5, (400, 3)).float()
    alone = engine((x, g)).private.norms[1:]
    g[0] = 1e25
    assert torch.equal(engine((x, g)).private.norms[1:], alone)


@compiled
def test_small_stacks_serve() -> None:
    """Half a megabyte at a time on a thread's stack ended the process where threads have a quarter."""
    code = """
import threading, torch
from tacit.gradients import _kernels as kernels
u, v, weights = torch.ones(3, 40, 30), torch.ones(3, 40, 20), torch.ones(3, dtype=torch.float64)
def work():
    total = kernels.weighted_sum(u, v, weights, None, 40) + kernels.outer_sum(u[:, :1], v[:, :1], weights, None)
    print(float(total.sum()))
threading.stack_size(1 << 18)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    given = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 600 * (3 * 40 + 3)


@compiled
def test_square_norms_of_odd_rows() -> None:
    values = torch.ones(4, 40)
    values[1, 7], values[2, 39] = torch.nan, -torch.inf
    found = square_norms(values, repair=False)
    assert torch.equal(torch.isfinite(found), torch.tensor([True, False, False, True]))
    assert float(found[0]) == float(square_norms(torch.ones(1, 40)))
    assert kernels.square_norms(values.T) is None


@compiled
@pytest.mark.parametrize("shape", [(1, 1), (3, 2, 5), (2, 3, 7, 7), (4, 6, 4, 4), (2, 2, 3, 16, 17), (70, 64, 16, 16)])
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_moments_of_channels(shape: tuple[int, ...], far: float) -> None:
    """Against float64 written out; the same bits over any number of threads, and for a row alone."""
    torch.manual_seed(len(shape))
    x, mean, scale = far + torch.randn(shape), far + torch.randn(shape[1]), 0.5 + torch.rand(shape[1])
    around = [1] * (len(shape) - 2)
    z = (x.double() - mean.double().reshape(-1, *around)) * scale.double().reshape(-1, *around)
    z = z.reshape(*shape[:2], -1)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given = kernels.channel_moments(x, mean, scale)
            assert given is not None
            found.append(given)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(found[0].double(), torch.stack([z.mean(2), z.square().mean(2) - 1]), rtol=1e-6, atol=1e-7)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    alone = kernels.channel_moments(x[-1:].clone(), mean, scale)
    assert alone is not None
    assert torch.equal(alone, found[0][:, -1:])


@compiled
def test_sums_over_threads_are_those_of_one() -> None:
    """The same bits however many threads there are."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for width in (64, 64, 64, 64)])
    rows, positions = 40, 20
    inputs, before, found = torch.randn(rows, positions, 64), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            engine = Engine(model, lambda net, batch: net(batch).square().mean((1, 2)), clip=0.1)
            found.append(engine(inputs))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for name, value in found[0].sum.items():
            assert torch.equal(value, other.sum[name])


@compiled
def test_a_forked_child_has_its_kernels_and_waits_for_nobody() -> None:
    """OpenMP's threads stay with the parent: a child that asked for them would wait for ever."""
    x, mean, scale = torch.randn(64, 8, 40, 40), torch.zeros(8), torch.ones(8)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wanted = kernels.channel_moments(x, mean, scale)
        assert wanted is not None
        child = os.fork()
        if child == 0:
            found = kernels.channel_moments(x, mean, scale)
            same = found is not None and found.numpy().tobytes() == wanted.numpy().tobytes()
            os._exit(0 if same else 1)
        deadline = time.monotonic() + 60
        ended, status = os.waitpid(child, os.WNOHANG)
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    finally:
        torch.set_num_threads(before)
    assert ended
    assert os.waitstatus_to_exitcode(status) == 0


@compiled
def test_a_compiler_without_openmp_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:  # noqa: ARG001
    x, mean, scale = torch.randn(64, 8, 40, 40), torch.zeros(8), torch.ones(8)
    wanted = kernels.channel_moments(x, mean, scale)
    real = shutil.which(os.environ.get("CC") or "cc")
    poor = tmp_path / "cc"
    poor.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec {real} "$@"\n')
    poor.chmod(0o700)
    monkeypatch.setenv("CC", str(poor))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for cached in (kernels._library, kernels._function):
        cached.cache_clear()
    found = kernels.channel_moments(x, mean, scale)
    assert found is not None
    assert wanted is not None
    assert torch.equal(found, wanted)


@compiled
def test_moments_of_odd_rows() -> None:
    """A row that is not finite, or too large for float32, says so and touches no other row."""
    x, mean, scale = torch.ones(5, 2, 20), torch.zeros(2), torch.ones(2)
    wanted = kernels.channel_moments(x, mean, scale)
    x[1, 0, 7], x[2, 1, 19], x[3] = torch.nan, -torch.inf, 3e38
    found = kernels.channel_moments(x, mean, scale)
    assert found is not None
    assert wanted is not None
    assert torch.equal(
        torch.isfinite(torch.cat(list(found), 1)).all(1), torch.tensor([True, False, False, False, True])
    )
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine[[0, 4]], other[[0, 4]])
    for unsuited in (x.double(), x.mT, x[:0], x.bfloat16()):
        assert kernels.channel_moments(unsuited, mean, scale) is None
    for channels in (1, 3):  # a map of another layer: beyond the ends of mean and scale lies what is no one's business
        assert kernels.channel_moments(torch.ones(5, channels, 20), mean, scale) is None
    assert kernels.channel_moments(x, torch.zeros(4)[::2], scale) is None
    good = torch.empty(2, 5, 2)
    for out in (good[:1], good[:, :4], good[..., :1], good.double(), good.repeat_interleave(2, 2)[..., ::2]):
        assert kernels.channel_moments(x, mean, scale, out) is None  # it would write beyond its end, or between


@pytest.fixture
def forgotten() -> Iterator[None]:
    """The library is looked for again, in the test and after it."""
    for cached in (kernels._library, kernels._function):
        cached.cache_clear()
    yield
    for cached in (kernels._library, kernels._function):
        cached.cache_clear()


@pytest.mark.parametrize("way", ["off", "no compiler", "a broken compiler", "a folder of others"])
@pytest.mark.usefixtures("forgotten")
def test_without_kernels_torch_serves(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if way == "off":
        monkeypatch.setenv("TACIT_KERNELS", "0")
    elif way == "a folder of others":
        (tmp_path / "tacit").mkdir()
        (tmp_path / "tacit").chmod(0o777)
    else:
        monkeypatch.setenv("CC", "no-such-compiler" if way == "no compiler" else "false")
    assert not kernels.kernels_in_use()
    assert list(tmp_path.rglob("*.so")) == []
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    x = torch.randn(5, 20, 12)
    found = Engine(model, lambda m, t: m(t).square().mean((1, 2)), clip=0.1)(x)
    monkeypatch.undo()
    kernels._library.cache_clear()
    again = Engine(model, lambda m, t: m(t).square().mean((1, 2)), clip=0.1)(x)
    for name, value in again.sum.items():
        assert torch.allclose(value, found.sum[name], rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("forgotten")
def test_a_run_is_not_resumed_with_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = precision()["compiled kernels"]
    monkeypatch.setattr(kernels, "_processor", lambda: b"flags : sse2")
    others = precision()["compiled kernels"]
    monkeypatch.setenv("TACIT_KERNELS", "0")
    kernels._library.cache_clear()
    assert precision()["compiled kernels"] == ""
    assert before == others == "" or (others and before.removesuffix("+avx512") == others)
