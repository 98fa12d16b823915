"""Every release lies on a public grid: the low-order bits of a sum tell nothing, and the rounding is paid for.

Statistical tests run on fresh secret keys; each has a false-alarm probability below 1e-6.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from tacit.audit import checks
from tacit.finetune import DPFTRL, DPSGD, AdpClip, fit
from tacit.finetune._adaptive import QuantileClip
from tacit.finetune._zeroth_order import ZerothOrderQuery
from tacit.privacy import Ledger, events
from tacit.privacy import _grids as grids
from tacit.privacy._budget import Neighbours, Unit
from tacit.privacy._grids import Grid
from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipts import Receipt, ReceiptError
from tacit.privacy.mechanisms import GaussianStream, gaussian

every_type = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])


@dataclasses.dataclass(frozen=True)
class Sum:
    sum: Mapping[str, Tensor]
    bounds: Mapping[str, float]
    blocks: Mapping[str, tuple[str, ...]]


def one(values: Tensor, bound: float = 1.0) -> Sum:
    return Sum({"w": values}, {"all": bound}, {"all": ("w",)})


def paid(event: events.DpEvent, neighbours: Neighbours = Neighbours.ADD_REMOVE, seed: object = None) -> Receipt:
    facts = {"id": "0123456789abcdef", "subject": "s", "stage": "test", "note": "", "mode": "gaussian", "head": "1:x"}
    receipt = Receipt(**facts, event=event, neighbours=neighbours, unit=Unit.SAMPLE, seeded=seed is not None)
    return receipt.issued(NoiseKey(seed))


# The attack: is a unit of 2^22 coordinates of 2^-11 (norm 1) in the sum? Where it is, an output near zero comes from
# noise of 2^-12 at least, so it is a multiple of that number's last bit.

SIZE, VALUE, NOISE = 2**22, 2.0**-11, 20.0


def seems_present(released: Tensor) -> bool:
    """The audit's distinguisher for a unit of this value."""
    return checks.seems_present(released, VALUE)


def without_grid(total: Tensor) -> Tensor:
    """The broken twin: the same noise, in the sum's own type, added as it is."""
    return total + (NOISE * NoiseKey().normals(0, SIZE)).to(total.dtype)


def by_mechanism(total: Tensor) -> Tensor:
    return gaussian(one(total), paid(events.gaussian(NOISE)))["w"]


def by_stream(total: Tensor) -> Tensor:
    return GaussianStream(paid(events.stream(NOISE, 1), Neighbours.ZERO_OUT)).release(one(total))["w"]


@every_type
def test_low_order_bits_do_not_tell_who_is_there(dtype: torch.dtype) -> None:
    """41 outputs lie near zero in the mean, two thirds of which are no such multiples when the unit is absent.

    So the twin is told apart with an error below e^-27 (epsilon above 20 where 0.16 was paid), and outputs on a grid
    give one answer in both worlds with at least that probability (with certainty, where the type holds the grid).
    """
    present, absent = torch.full((SIZE,), VALUE, dtype=dtype), torch.zeros(SIZE, dtype=dtype)
    assert seems_present(without_grid(present))
    assert not seems_present(without_grid(absent))
    for release in (by_mechanism, by_stream):
        assert seems_present(release(present)) == seems_present(release(absent))


@pytest.mark.parametrize("value", [0.0, VALUE, -1 / 3000])
def test_all_bits_down_to_the_grids_last_are_fair(value: float) -> None:
    """Binomial tests of the four lowest bits of 2^22 outputs each."""
    out = by_mechanism(torch.full((SIZE,), value, dtype=torch.float64))
    steps = (out / grids.fix(NOISE, 1.0, SIZE).step).long()
    for bit in range(4):
        assert binomtest(int((steps >> bit & 1).sum()), SIZE).pvalue > 1e-8


# What lies on the grid, and which one


@every_type
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_releases_are_grid_points_in_the_sums_own_type(dtype: torch.dtype, size: int) -> None:
    step = 2.0 ** math.floor(math.log2(3.0 * min(2**-20 * 1.5, 2**-14 / math.sqrt(size))))
    values = torch.randn(size).to(dtype)
    before = values.clone()
    out = gaussian(one(values, 3.0), paid(events.gaussian(1.5), seed=4))["w"]
    exact = gaussian(one(values.double(), 3.0), paid(events.gaussian(1.5), seed=4))["w"]
    assert torch.equal(values, before)
    assert out.dtype == dtype
    assert torch.equal(exact / step, (exact / step).round())
    assert torch.equal(out, exact.to(dtype))  # the cast comes last
    assert size < 9 or not torch.equal(exact, exact.float().double())  # for many coordinates, more than float32 holds


def test_the_grid_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a function of noise, bound and size; whatever the values are, it is asked for with the same three."""
    asked: list[tuple[float, float, int]] = []
    honest = grids.fix
    monkeypatch.setattr(grids, "fix", lambda *of: asked.append(of) or honest(*of))
    for scale in (0.0, 1e-30, 1.0, 1e30, math.nan):
        gaussian(one(scale * torch.ones(9)), paid(events.gaussian(2.0)))
        GaussianStream(paid(events.stream(2.0, 3), Neighbours.ZERO_OUT)).release(one(scale * torch.ones(9)))
    assert set(asked) == {(2.0, 1.0, 9)}


def test_blocks_with_noise_of_their_own_have_grids_of_their_own() -> None:
    tensors = {"a": torch.zeros(900).double(), "b": torch.zeros(1).double()}
    total = Sum(tensors, {"gradient": 1e-3, "count": 0.5}, {"gradient": ("a",), "count": ("b",)})
    out = gaussian(total, paid(events.gaussian(2.0)), noise={"gradient": 2.5, "count": 1000.0})
    for name, noise, bound, size in (("a", 2.5, 1e-3, 900), ("b", 1000.0, 0.5, 1)):
        steps = out[name] / grids.fix(noise, bound, size).step
        assert torch.equal(steps, steps.round())
    assert grids.fix(2.5, 1e-3, 900).step < grids.fix(1000.0, 0.5, 1).step / 1000


@pytest.mark.parametrize("size", [1, 1000, 10**6, 10**10])
@pytest.mark.parametrize("multiplier", [1e-4, 0.3, 1.0, 50.0, 1e6, 1e12])
@pytest.mark.parametrize("bound", [1e-9, 0.5, 1.0, 1e7])
def test_the_noise_pays_for_the_rounding_at_any_size(size: int, multiplier: float, bound: float) -> None:
    """std >= multiplier (bound + step sqrt(d)), in exact arithmetic; and the floats of the noise are finer than it."""
    if multiplier * math.sqrt(size) > 2**22:
        with pytest.raises(ValueError, match="beyond what float64"):
            grids.fix(multiplier, bound, size)
        return
    grid = grids.fix(multiplier, bound, size)
    assert math.frexp(grid.step)[0] == 0.5  # a power of two
    root = math.isqrt(size) + (math.isqrt(size) ** 2 < size)
    rounding = Fraction(grid.std) / Fraction(multiplier) - Fraction(bound)
    assert rounding > 0
    assert rounding**2 >= Fraction(grid.step) ** 2 * size
    assert grid.step <= 2**-20 * multiplier * bound
    assert grid.step >= 2**-27 * multiplier * bound
    if multiplier * math.sqrt(size) <= 2**12:
        assert grid.step * root <= 2.001 * 2**-14 * bound
        assert grid.std <= multiplier * bound * (1 + 2**-14)


def test_a_noise_that_no_grid_holds_is_refused() -> None:
    for event, bound in ((events.gaussian(1e300), 1e9), (events.gaussian(1e-300), 1.0), (events.gaussian(1.0), 1e-250)):
        with pytest.raises(ReceiptError, match="beyond what float64"):
            gaussian(one(torch.zeros(3), bound), paid(event))


@pytest.mark.parametrize("optimizer", [DPSGD(batch_size=4, steps=3), AdpClip(batch_size=4, steps=3), DPFTRL(batches=2)])
def test_it_is_refused_before_the_charge(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "_DEAREST", 1e-9)
    data, ledger = (torch.randn(8, 4), torch.randint(0, 3, (8,))), Ledger("sqlite://")
    more: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "size": 8, "ledger": ledger, "neighbours": "zero-out"}
    with pytest.raises(ValueError, match="train fewer parameters"):
        fit(torch.nn.Linear(4, 3), data, optimizer=optimizer, scheme="full", head="keep", **more)
    assert "charge" not in {entry.kind for entry in ledger.entries()}


def rounded(values: Tensor, grid: Grid) -> Tensor:
    return grids.add(values, torch.zeros_like(values), grid)


def test_rounding_moves_two_sums_apart_by_no_more_than_was_paid() -> None:
    """The worst pair straddles the middle between two grid points everywhere: the rounded sums are a step apart."""
    size, grid = 10_000, grids.fix(1.0, 1.0, 10_000)
    low = torch.full((size,), grid.step / 2 * (1 - 1e-12), dtype=torch.float64)
    high = torch.full((size,), grid.step / 2 * (1 + 1e-12), dtype=torch.float64)
    worst = float((rounded(high, grid) - rounded(low, grid)).norm())
    assert worst == grid.step * 100
    assert grid.std >= 1.0 + worst
    generator = torch.Generator().manual_seed(1)
    for spread in (1e-9, 1e-3, 1.0):
        base = spread * torch.randn(size, generator=generator, dtype=torch.float64)
        unit = torch.randn(size, generator=generator, dtype=torch.float64)
        unit /= unit.norm()
        assert float((rounded(base + unit, grid) - rounded(base, grid)).norm()) <= grid.std


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e3, 2.0**40, 1e25, 1e200])
def test_the_release_is_the_rounded_gaussian_of_the_rounded_sum(scale: float) -> None:
    """round(s) + round(n) = round(round(s) + n), then the nearest float, in exact arithmetic; for huge sums, too."""
    grid, generator = grids.fix(1.5, 1.0, 500), torch.Generator().manual_seed(3)
    values = scale * torch.randn(500, generator=generator, dtype=torch.float64)
    fresh = NoiseKey().normals(0, 500)
    found = grids.add(values, fresh.clone(), grid)
    step = Fraction(grid.step)
    for s, z, out in zip(values.tolist(), fresh.tolist(), found.tolist(), strict=True):
        n = Fraction(z * (grid.std / grid.step))  # in steps
        middle = round(Fraction(s) / step)
        assert middle + round(n) == round(middle + n)
        assert out == float((middle + round(n)) * step)


def test_zero_has_one_sign() -> None:
    """A sum of -1e-30 rounds to -0.0, and -0.0 + -0.0 is -0.0: the sign of a zero would be that of the sum."""
    grid = grids.fix(1.0, 1.0, 2)
    tiny = torch.full((2,), 0.1 * grid.step, dtype=torch.float64)
    out = grids.add(-tiny, -tiny / grid.std, grid)
    assert out.tolist() == [0.0, 0.0]
    assert not torch.signbit(out).any()


@every_type
def test_what_is_not_finite_is_zero_before_the_noise(dtype: torch.dtype) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=dtype)
    out = gaussian(one(values), paid(events.gaussian(1.0), seed=2))["w"]
    clean = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=dtype)
    if dtype == torch.float16:  # its overflow is a clamp
        clean[1:3] = torch.tensor([65504.0, -65504.0])
    assert torch.equal(out, gaussian(one(clean), paid(events.gaussian(1.0), seed=2))["w"])
    assert torch.isfinite(out).all()


def test_shapes_strides_and_chunks_are_kept() -> None:
    wide = torch.randn(300, 700, dtype=torch.float64)
    turned = gaussian(one(wide.T), paid(events.gaussian(1.0), seed=2))["w"]
    assert torch.equal(turned, gaussian(one(wide.T.contiguous()), paid(events.gaussian(1.0), seed=2))["w"])
    assert gaussian(one(torch.zeros(())), paid(events.gaussian(1.0)))["w"].shape == ()
    assert gaussian(one(torch.zeros(0, 3)), paid(events.gaussian(1.0)))["w"].shape == (0, 3)


def test_without_noise_the_sum_leaves_as_it_is() -> None:
    values = torch.randn(50)
    out = gaussian(one(values), paid(events.gaussian(0.0)))["w"]
    assert torch.equal(out, values)
    assert out.data_ptr() != values.data_ptr()


# The small float64 blocks of every run


def losses_of(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("query", [ZerothOrderQuery(clip=0.7, directions=3, scale=0.1), QuantileClip(clip=0.3)])
def test_slopes_and_counts_lie_on_grids(query: Any) -> None:
    from tacit.data._records import Rows

    torch.manual_seed(1)
    asker = query.open(torch.nn.Linear(4, 3).double(), losses_of, expected=9.0, microbatch=None)
    rows = Rows(torch.randn(9, 4).double(), torch.randint(0, 3, (9,)), torch.arange(9))
    total, noise = asker.sum(rows), asker.split(1.5)
    out = gaussian(total, paid(events.gaussian(1.5)), noise=noise)
    for block, bound in total.bounds.items():
        size = sum(total.sum[name].numel() for name in total.blocks[block])
        step = grids.fix(1.5 if noise is None else noise[block], bound, size).step
        for name in total.blocks[block]:
            assert torch.equal(out[name] / step, (out[name] / step).round())


def test_slopes_add_up_exactly_whatever_their_order() -> None:
    """Each unit's slope is a multiple of 2^-30 of the clip, or so: a sum of them has no rounding to tell of."""
    asker: Any = ZerothOrderQuery(clip=0.7, directions=2).open(
        torch.nn.Linear(2, 2), losses_of, expected=9.0, microbatch=None
    )
    slopes = torch.randn(5001, 2, dtype=torch.float64)
    slopes[17] = math.nan
    whole = asker._bounded(slopes).sum["slopes"]
    assert torch.equal(whole, asker._bounded(slopes.flip(0)).sum["slopes"])
    alone = sum(asker._bounded(row[None]).sum["slopes"] for row in slopes)
    assert torch.equal(whole, alone)
    for row in slopes:
        assert float(asker._bounded(row[None]).sum["slopes"].norm()) <= 0.7 * math.sqrt(2)


def test_the_twin_in_this_file_is_the_attack_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rounding taken out of the mechanism, the distinguisher finds the unit again."""

    def plain(value: Tensor, noise: Tensor, grid: Grid) -> Tensor:
        return noise.mul_(grid.std).add_(value)

    monkeypatch.setattr(grids, "add", plain)
    answers: list[Callable[[Tensor], Tensor]] = [by_mechanism, by_stream]
    for release in answers:
        assert seems_present(release(torch.full((SIZE,), VALUE, dtype=torch.float64)))
        assert not seems_present(release(torch.zeros(SIZE, dtype=torch.float64)))


def test_small_tensors_that_are_released_together_have_the_bits_of_single_ones() -> None:
    from tacit.privacy import _grids
    from tacit.privacy.mechanisms import _mechanisms

    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 4), "b": (5,), "scalar": (), "large": (1 << 15,), "half": (6,), "other grid": (7,)}
    kinds = {"half": torch.float16}
    total = {n: torch.randn(s, generator=generator).to(kinds.get(n, torch.float64)) for n, s in shapes.items()}
    noise = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    fixed = {n: _grids.fix(2.0, 3.0 if n == "other grid" else 1.0, 100) for n in shapes}
    single = {n: _grids.add(total[n], noise[n].clone(), fixed[n]) for n in shapes}
    found = _mechanisms._add(total, torch.cat([t.reshape(-1) for t in noise.values()]), fixed)
    assert list(found) == list(total)
    for name, value in single.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == len(found)  # nothing shares memory
