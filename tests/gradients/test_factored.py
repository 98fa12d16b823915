"""Weighted sums of outer products: what is formed in float32 row by row has the answer of float64, within the norms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tacit.gradients import _grad_factors as factors
from tacit.gradients import _kernels
from tacit.gradients._norms import built_norms, ghost_norms
from tacit.gradients._units import Units

compiled = pytest.mark.skipif(not _kernels.kernels_in_use(), reason="needs a C compiler")
CPU = torch.device("cpu")
GROUPS = {"rows": None, "pairs": [0, 0, 1, 1, 2, 2], "uneven": [0, 1, 1, 1, 0, 2]}


def drawn(rows: int, positions: int, m: int, n: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows * positions)
    return torch.randn(rows, positions, m), torch.randn(rows, positions, n)


def units_of(labels: list[int] | None, rows: int) -> Units:
    return Units.singletons(rows, CPU) if labels is None else Units.from_labels(torch.tensor(labels))


def obvious(u: Tensor, v: Tensor, weights: Tensor, units: Units) -> Tensor:
    """Every row's gradient in float64, one by one."""
    total = torch.zeros(u.shape[2], v.shape[2], dtype=torch.float64)
    for row, unit in enumerate(units.of_row.tolist()):
        total += u[row].double().T @ v[row].double() * weights[unit] / units.sizes[unit]
    return total


@pytest.mark.parametrize("labels", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("positions", [50, 300])  # one run of positions, three
def test_products_in_float32_have_the_answer_of_float64(labels: list[int] | None, positions: int) -> None:
    u, v = drawn(6, positions, 96, 144)
    units = units_of(labels, 6)
    weights = torch.rand(units.count, dtype=torch.float64)
    piece = factors.Factored(u, v, (96, 144))
    norms = piece.square_norms(units)
    assert piece._normed  # this is the fast path
    found, expected = piece.weighted_sum(weights, units, None), obvious(u, v, weights, units)
    assert float((found - expected).norm()) < 1e-6 * float(expected.norm())
    for unit in range(units.count):
        alone = torch.zeros_like(weights).index_fill_(0, torch.tensor([unit]), 1)
        assert float(piece.weighted_sum(alone, units, None).norm()) <= float(norms[unit].sqrt())


def test_many_at_a_time_and_few_agree() -> None:
    u, v = drawn(5, 40, 70, 90)
    weights = torch.rand(5, dtype=torch.float64)
    for left_out in (None, torch.tensor([False, True, False, False, True])):
        kept = weights if left_out is None else weights.masked_fill(left_out, 0)
        given = u if left_out is None else u.masked_fill(left_out[:, None, None], torch.nan)
        expected = obvious(u, v, kept, Units.singletons(5, CPU))
        for add in (factors._few, factors._many):
            found = add(given, v, weights, left_out, 16)
            assert float((found - expected).norm()) < 1e-6 * float(expected.norm())


def test_a_row_is_computed_alike_whoever_else_is_there() -> None:
    """Bit by bit: alone, among others, in another place, and with a neighbour that float32 is too narrow for."""
    u, v = drawn(9, 50, 96, 145)
    alone = factors.Factored(u[:1], v[:1], (96, 145))
    alone.square_norms(Units.singletons(1, CPU))
    expected = alone.weighted_sum(torch.ones(1, dtype=torch.float64), Units.singletons(1, CPU), None)
    u[3:5] *= 1e18
    for place in (0, 4, 8):
        order = torch.arange(9)
        order[place], order[0] = 0, place
        piece, units = factors.Factored(u[order], v[order], (96, 145)), Units.singletons(9, CPU)
        piece.square_norms(units)
        assert piece._large is not None
        weight = torch.zeros(9, dtype=torch.float64)
        weight[place] = 1
        assert torch.equal(piece.weighted_sum(weight, units, None), expected)


def test_a_row_that_float32_is_too_narrow_for_is_added_in_float64() -> None:
    u, v = drawn(4, 50, 96, 144)
    u[2], v[2] = u[2] * 1e25, v[2] * 1e25
    units, piece = Units.singletons(4, CPU), factors.Factored(u, v, (96, 144))
    norms = piece.square_norms(units).sqrt()
    weights = 1 / norms
    found = piece.weighted_sum(weights, units, None)
    expected = obvious(u, v, weights, units)
    assert bool(torch.isfinite(found).all())
    assert float((found - expected).norm()) < 1e-6 * float(expected.norm())
    dropped = piece.weighted_sum(weights, units, torch.tensor([False, False, True, False]))
    expected = obvious(u, v, weights.masked_fill(torch.arange(4) == 2, 0), units)
    assert float((dropped - expected).norm()) < 1e-6 * float(expected.norm())


def test_norms_allow_for_positions_that_cancel_in_float32() -> None:
    """Pairs of positions cancel but for the rounding of float32, which is all that is left of the gradient."""
    u, v = drawn(8, 25, 96, 144)
    u, v = torch.cat([u, u], 1), torch.cat([v, -v * (1 + 1e-7)], 1)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    u, v = u[:, order], v[:, order]
    found, _ = ghost_norms(u, v, run=50)
    formed = torch.bmm(u.mT, v).double().square().sum((1, 2))
    exact = torch.bmm(u.double().mT, v.double()).square().sum((1, 2))
    assert bool((formed > 1.5 * exact).any())  # rounding is what there is to see
    assert bool((found >= formed).all())
    assert bool((found >= exact).all())


@pytest.mark.parametrize(("positions", "m", "n"), [(8, 24, 40), (50, 96, 144), (1, 16, 12)])
def test_how_many_rows_others_have_changes_nobodys_norm(positions: int, m: int, n: int) -> None:
    """One unit of 60 rows among units of 2 decided, by the mean, whether all gradients were built or not."""
    u, v = drawn(92, positions, m, n)
    few = Units.from_labels(torch.arange(32) // 2)
    many = Units.from_labels(torch.cat([torch.arange(32) // 2, torch.full((60,), 99)]))
    forms, norms = [], []
    for units in (few, many):
        piece = factors.Factored(u[: units.rows], v[: units.rows], (m, n)).settle(units)
        forms.append(type(piece))
        norms.append(piece.square_norms(units))
    assert forms[0] is forms[1]
    assert torch.equal(norms[0], norms[1][:16])


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e25])
@pytest.mark.parametrize("cancelling", [False, True])
def test_norms_of_built_matrices_are_never_too_small(cancelling: bool, scale: float) -> None:
    u, v = drawn(3, 600, 32, 20)
    if cancelling:
        v[:, 1::2] = -v[:, ::2]
        u[:, 1::2] = u[:, ::2] * (1 + 1e-5)
    u = u * scale
    found, in_float64 = built_norms(u, v, run=50)
    true = torch.linalg.matrix_norm(u.double().mT @ v.double())
    most = (u.double().norm(dim=2) * v.double().norm(dim=2)).sum(1)
    allowed = 50 * 2.0**-24 if in_float64 is None else 0.0  # those are added up in float64, too
    assert (in_float64 is None) == (scale < 1e25)
    assert bool((found >= (true + allowed * most).square() * (1 - 1e-12)).all())
    above = 40 * 2.0**-24 * most.square()  # limits how far positions may cancel: Lemma 10
    assert bool((found <= ((true + 700 * 2.0**-24 * most).square() + above) * (1 + 1e-12) + 1e-30).all())
    assert bool((found >= above * (1 - 1e-12)).all())


LONG = [0] * 8 + [1] * 8 + [2] * 3 + [3]  # units of several rows, whose gradients are built once, and one row


def kept(u: Tensor, v: Tensor, labels: list[int]) -> tuple[factors.Factored, Units, Tensor]:
    """A piece with the norms of its units, as the engine asks for them: at first without repair."""
    piece, units = factors.Factored(u, v, (u.shape[2], v.shape[2])), Units.from_labels(torch.tensor(labels))
    squares = piece.square_norms(units, repair=False)
    if not bool(torch.isfinite(squares).all()):
        squares = piece.square_norms(units)
    return piece, units, squares.sqrt()


@compiled
def test_a_unit_of_many_rows_is_built_once_and_added_as_it_is() -> None:
    u, v = drawn(20, 50, 40, 72)
    weights = torch.tensor([0.3, 2.0, 0.7, 1.1], dtype=torch.float64)
    piece, units, norms = kept(u, v, LONG)
    assert [places.tolist() for places, _ in piece._built] == [[2], [0, 1]]
    for unit in range(4):
        mine = units.of_row == unit
        true = torch.einsum("nti,ntj->ij", u[mine].double(), v[mine].double()) / int(mine.sum())
        assert float(true.norm()) * (1 - 1e-6) <= float(norms[unit]) <= float(true.norm()) * (1 + 1e-3)
    found, expected = piece.weighted_sum(weights, units, None), obvious(u, v, weights, units)
    assert float((found - expected).norm()) < 1e-6 * float(expected.norm())
    piece, units, _ = kept(u, v, LONG)
    bad = torch.tensor([True, False, True, False])
    found, expected = piece.weighted_sum(weights, units, bad), obvious(u, v, weights.masked_fill(bad, 0), units)
    assert float((found - expected).norm()) < 1e-6 * float(expected.norm())


@compiled
def test_what_a_built_unit_adds_has_its_norm_and_depends_on_nobody_else() -> None:
    """Also where its positions cancel but for their rounding: what is added is what the norm was taken of."""
    u, v = drawn(20, 50, 40, 72)
    u[:8], v[:4] = torch.cat([u[:4], u[:4]]), -v[4:8] * (1 + 1e-7)
    only = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    piece, units, norms = kept(u, v, LONG)
    among = piece.weighted_sum(only, units, None)
    assert float(among.norm()) <= float(norms[0]) <= float(among.norm()) * (1 + 1e-6)
    for others in (slice(8, 8), slice(8, 16), slice(16, 20)):
        chosen = [*range(8), *range(20)[others]]
        piece, units, alone = kept(u[chosen], v[chosen], [LONG[row] for row in chosen])
        assert torch.equal(piece.weighted_sum(only[: units.count], units, None), among)
        assert torch.equal(alone[0], norms[0])


@compiled
@pytest.mark.parametrize("odd", [1e25, torch.inf, torch.nan])
def test_a_built_unit_that_float32_is_too_narrow_for_goes_back_to_its_factors(odd: float) -> None:
    u, v = drawn(20, 50, 40, 72)
    piece, units, before = kept(u, v, LONG)
    weights = torch.tensor([0.0, 1.0, 0.5, 0.2], dtype=torch.float64)
    expected = piece.weighted_sum(weights, units, None)
    u[:8], v[:8] = u[:8] * odd, v[:8] * odd
    piece, units, after = kept(u, v, LONG)
    bad = ~torch.isfinite(after)
    assert bad.tolist() == [not odd < 1e30, False, False, False]
    assert torch.equal(after[1:], before[1:])
    assert torch.equal(piece.weighted_sum(weights, units, bad), expected)  # everybody else as before, to the last bit
    piece, units, after = kept(u, v, LONG)
    weights = torch.where(bad, 0, 1 / after)
    found = piece.weighted_sum(weights, units, bad)
    expected = obvious(u.nan_to_num(0, 0, 0) if bad[0] else u, v.nan_to_num(0, 0, 0) if bad[0] else v, weights, units)
    assert float((found - expected).norm()) < 1e-6 * float(expected.norm())
