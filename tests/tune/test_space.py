"""The box, and r taken apart."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tacit.tune import Hyperparameters, Space

positive = st.floats(1e-6, 1e3)
wide = st.floats(1.0, 1e5)


@st.composite
def boxes(draw: st.DrawFn, *, more: bool = False) -> Space:
    lr, steps = draw(positive), draw(st.integers(1, 200))
    batch, clip = draw(st.integers(1, 512)), draw(positive)
    return Space(
        lr=(lr, lr * draw(wide)),
        steps=(steps, steps + draw(st.integers(0, 2000))),
        batch_size=(batch, batch + draw(st.integers(0, 4000))) if more and draw(st.booleans()) else None,
        clip=(clip, clip * draw(wide)) if more and draw(st.booleans()) else None,
    )


def inside(space: Space, point: Hyperparameters) -> bool:
    found = {name: getattr(point, name) for name in space.ranges}
    return all(low <= found[name] <= high for name, (low, high) in space.ranges.items())


@settings(deadline=None, max_examples=300)
@given(boxes(more=True), st.floats(0, 1), st.sampled_from(["balanced", "steps"]), st.integers(0, 99))
def test_r_is_hit_inside_the_box(space: Space, share: float, way: str, seed: int) -> None:
    r = space.at(share)
    point = space.decompose(r, way, random.Random(seed))  # type: ignore[arg-type]
    assert inside(space, point)
    low, high = space.lr
    # whole numbers cannot always be made up for: by half of one where the learning rate has no room for it
    steps = space.steps
    rest = 0.0 if space.batch_size is None else 0.5 / space.batch_size[0]
    slack = 0.0 if high / low >= 2 * (1 + rest) ** 2 else 0.5 / steps[0] + rest
    assert abs(math.log(point.r / r)) <= math.log1p(slack) + math.log(1 + 1e-9) + (slack > 0) * math.log(high / low)


@settings(deadline=None, max_examples=100)
@given(boxes(), st.floats(0, 1))
def test_the_learning_rate_makes_up_for_rounded_steps(space: Space, share: float) -> None:
    assume(space.lr[1] / space.lr[0] >= 2)
    r = space.at(share)
    assert space.decompose(r).r == pytest.approx(r, rel=1e-9)


def test_sampled_is_within_its_tolerance_and_ends() -> None:
    space = Space(lr=(1e-3, 10.0), steps=(1, 100))
    for r in (0.01, 1.0, 300.0):
        assert space.decompose(r, "sampled", random.Random(0)).r == pytest.approx(r, rel=0.05)
    fixed = Space(lr=(0.1, 0.1), steps=(1, 3))  # 0.25 is no product of these: the nearest, not for ever
    assert fixed.decompose(0.25, "sampled", random.Random(0)).r in (pytest.approx(0.2), pytest.approx(0.3))


def test_balanced_is_the_same_share_of_every_range() -> None:
    point = Space(lr=(0.01, 1.0), steps=(1, 10_000)).decompose(0.01 * 10**3)  # half of two and of four decades
    assert point.steps == 100
    assert point.lr == pytest.approx(0.1)


def test_outside_is_the_nearest_end() -> None:
    space = Space(lr=(0.1, 1.0), steps=(2, 20))
    assert space.decompose(1e9) == Hyperparameters(lr=1.0, steps=20)
    assert space.decompose(1e-9) == Hyperparameters(lr=0.1, steps=2)
    with pytest.raises(ValueError, match="above 0"):
        space.decompose(0.0)


def test_r_is_the_product_of_what_is_searched() -> None:
    assert Hyperparameters(lr=0.5, steps=10).r == 5
    made = Hyperparameters(lr=0.5, steps=10, batch_size=32, clip=0.1)
    assert made.r == pytest.approx(0.5)  # lr acts on the mean: a larger batch makes no longer steps


@pytest.mark.parametrize(
    "ranges",
    [
        {"lr": (0.0, 1.0), "steps": (1, 2)},
        {"lr": (2.0, 1.0), "steps": (1, 2)},
        {"lr": (0.1, 1.0), "steps": (1.5, 2)},
        {"lr": (0.1, math.inf), "steps": (1, 2)},
    ],
)
def test_no_box(ranges: dict[str, tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="The range of"):
        Space(**ranges)  # type: ignore[arg-type]


def test_a_grid_has_every_corner_and_nothing_twice() -> None:
    grid = list(Space(lr=(0.01, 1.0), steps=(1, 3)).grid(5))
    assert len(grid) == len(set(grid)) == 5 * 3
    assert {(p.lr, p.steps) for p in grid} >= {(0.01, 1), (1.0, 3)}
    assert len(list(Space(lr=(0.1, 0.1), steps=(5, 5)).grid(4))) == 1


def test_draws_fill_the_box_evenly_on_a_logarithmic_scale() -> None:
    space, chance = Space(lr=(1e-3, 10.0), steps=(1, 1000)), random.Random(1)
    shares = [math.log10(space.draw(chance).lr / 1e-3) / 4 for _ in range(2000)]
    # the mean of 2,000 uniforms is off by more than 0.032 with a chance below 1e-6
    assert abs(sum(shares) / 2000 - 0.5) < 0.032
