"""No unit ever contributes more than the bound, in floating point, whatever is in the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tacit.gradients import Automatic, Engine, PerLayer, Policy, clipped_sum
from tacit.gradients._norms import ghost_square_norms, square_norms

MAGNITUDES = [
    0.0,
    1e-45,
    1e-38,
    1e-30,
    1e-19,
    1e-10,
    1.0,
    1e10,
    1e15,
    1e18,
    1e19,
    1e25,
    3e38,
    float("inf"),
    float("nan"),
]
magnitude = st.sampled_from(MAGNITUDES)


def linear_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Its output gradient is the second part of the batch: both factors of the gradient are the adversary's."""
    out = model(batch[0])
    return (out * batch[1]).flatten(1).sum(1)


def contribution(engine: Engine, batch: tuple[Tensor, Tensor], policy: float | Policy) -> float:
    found = engine(tuple(t[:1] for t in batch), clip=policy)
    return float(torch.stack([v.double().square().sum() for v in found.sum.values()]).sum().sqrt())


def adversarial(
    left: list[float], right: list[float], tokens: int, width: int, out: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(left) + 7 * tokens)
    x = torch.rand(1, tokens, width, generator=generator) * 2 - 1
    g = torch.rand(1, tokens, out, generator=generator) * 2 - 1
    scale = lambda t, sizes: t * torch.tensor(sizes)[torch.arange(t.shape[1]) % len(sizes)][None, :, None]  # noqa: E731
    return scale(x, left).to(dtype), scale(g, right).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4, 3), (6, 30, 20), (60, 3, 2)])  # product of norms, Gram matrices, built
@given(
    left=st.lists(magnitude, min_size=1, max_size=3),
    right=st.lists(magnitude, min_size=1, max_size=3),
    clip=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_the_bound_holds_for_any_magnitudes(
    dtype: torch.dtype, shape: tuple[int, int, int], left: list[float], right: list[float], clip: float
) -> None:
    tokens, width, out = shape
    model = nn.Linear(width, out).to(dtype)
    engine = _engine(model)
    batch = adversarial(left, right, tokens, width, out, dtype)
    assert contribution(engine, batch, clip) <= clip
    assert contribution(engine, batch, Automatic(clip)) <= clip


@given(size=st.sampled_from([1.0, 1e4, 1e8, 1e12]), clip=st.sampled_from([0.01, 1.0]), seed=st.integers(0, 5))
def test_the_bound_holds_when_positions_cancel(size: float, clip: float, seed: int) -> None:
    # Pairs of positions cancel up to rounding, which is where Gram matrices lose all digits.
    generator = torch.Generator().manual_seed(seed)
    x, g = torch.randn(1, 8, 40, generator=generator), torch.randn(1, 8, 30, generator=generator)
    small = torch.randn(1, 8, 30, generator=generator)
    batch = (torch.cat([x, x], 1) * size, torch.cat([g, -g * (1 + 1e-7) + small / size], 1))
    assert contribution(_engine(nn.Linear(40, 30)), batch, clip) <= clip


@given(scale=magnitude, clip=st.sampled_from([0.1, 3.0]))
def test_the_bound_holds_for_whole_nets(scale: float, clip: float) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Flatten(),
        nn.LayerNorm(64),
        nn.Linear(64, 3),
    )
    engine = _engine(model, (2, 8, 8), (3,))
    batch = torch.randn(1, 2, 8, 8) * scale, torch.randn(1, 3) * min(scale, 1e30)
    assert contribution(engine, batch, clip) <= clip
    found = engine(batch, clip=PerLayer(clip))
    for block, names in found.blocks.items():
        size = torch.stack([found.sum[n].double().square().sum() for n in names]).sum().sqrt()
        assert float(size) <= found.bounds[block]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_bad_row_contributes_zero_and_does_not_touch_the_rest(dtype: torch.dtype, value: float) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.LayerNorm(6), nn.Flatten(), nn.Linear(24, 5)).to(dtype)
    x, g = torch.randn(5, 2, 8).to(dtype), torch.randn(5, 5).to(dtype)
    engine = _engine(model, (2, 8), (5,))
    rest = torch.tensor([0, 1, 3, 4])
    expected = engine((x[rest], g[rest]), clip=0.5)
    x[2, 1, 3] = value
    x[2, 0, 3] = value
    g[2] = value
    found = engine((x, g), clip=0.5)
    if not torch.isfinite(found.private.norms[2]):
        assert found.private.nonfinite == 1
        for name in expected.sum:
            assert torch.allclose(found.sum[name], expected.sum[name], rtol=1e-5, atol=1e-6), name
    assert all(bool(torch.isfinite(v).all()) for v in found.sum.values())


def test_a_bad_row_takes_its_unit_with_it() -> None:
    model = nn.Linear(4, 3)
    x, g = torch.randn(5, 4), torch.randn(5, 3)
    expected = clipped_sum(model, linear_loss, (x[3:], g[3:]), clip=1.0, unit_ids=[1, 1])
    x[0, 0] = float("nan")
    found = clipped_sum(model, linear_loss, (x, g), clip=1.0, unit_ids=[0, 0, 0, 1, 1])
    assert found.private.nonfinite == 1
    for name in expected.sum:
        assert torch.allclose(found.sum[name], expected.sum[name])


@given(seed=st.integers(0, 20), exponent=st.sampled_from([-30, -10, 0, 10, 15, 18]))
def test_norms_are_never_too_small(seed: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    u, v = torch.randn(3, 5, 4, generator=generator) * 10.0**exponent, torch.randn(3, 5, 6, generator=generator)
    true = torch.bmm(u.double().mT, v.double()).square().sum((1, 2))
    found = ghost_square_norms(u, v)
    assert bool((found >= true * (1 - 1e-6) - 1e-36).all())
    assert bool((found <= true * (1 + 1e-3) + 1e-30).all())
    flat = u.flatten(1)
    assert torch.allclose(square_norms(flat), flat.double().square().sum(1), rtol=1e-5, atol=1e-30)


def _engine(model: nn.Module, row: tuple[int, ...] = (), target: tuple[int, ...] = ()) -> Engine:
    """An engine that has met its model on harmless rows."""
    engine = Engine(model, linear_loss, clip=1.0)
    dtype = next(model.parameters()).dtype
    if row:
        engine.validate((torch.rand(1, *row, dtype=dtype), torch.rand(1, *target, dtype=dtype)))
    return engine
