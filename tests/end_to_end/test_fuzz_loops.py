"""A fuzzer through the real loops: one odd row never moves a sum by more than its clip (1 + 1e-9).

Sums are taken where they leave for the mechanism, before the noise. Two relations: one unit is blanked in its place
(zero-out: by at most C) or replaced (2 C); where a row is left out altogether (add-remove: C) the model is in float64,
since matrix products of float32 may round others' rows differently at another batch size (see `Run.step`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tacit import tune
from tacit.adapt import DP, Tent
from tacit.finetune import DPGD, DPSGD, DPZO, GEP, AdpClip, Classes, Optimizer, fit
from tacit.finetune._evaluation import right_by_unit
from tacit.finetune._sources import as_records
from tacit.privacy import Ledger, grid_sum
from tacit.tune._trials import GRID

PEOPLE, WIDTH, CLIP, STRICT = 40, 6, 0.25, 1 + 1e-9
FUZZ = settings(max_examples=6, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)


class Picky(nn.Module):
    """A net that raises on rows whose first number is above 9."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if bool(((x[:, 0] > 9) & (x[:, 0] < 10)).any()):
            raise ArithmeticError("patient 4711")
        return self.head(torch.tanh(self.norm(self.body(x))))  # type: ignore[no-any-return]


class People:
    """Rows and labels, of which one row may be anything."""

    def __init__(self, seed: int, dtype: torch.dtype, place: int | None = None, odd: Any = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randn(PEOPLE, WIDTH, generator=generator).to(dtype)
        if seed % 3 == 0:  # equal rows add up to the largest sums
            self.rows = self.rows[:1].expand(PEOPLE, WIDTH)
        self.targets = torch.randint(0, 3, (PEOPLE,), generator=generator)
        self.place, self.odd = place, odd
        self.left_out = False

    def __len__(self) -> int:
        return PEOPLE

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        return (self.odd(self.rows[i]) if i == self.place else self.rows[i]), self.targets[i]


def _raise(_: Tensor) -> Any:
    raise OSError("patient 4711, scan corrupt")


def zero(_: Tensor) -> Any:
    """The unit replaced by nothing, as `reading` blanks it."""
    raise OSError


KINDS: dict[str, Callable[[int], Callable[[Tensor], Any]]] = {
    "plain": lambda s: lambda row: row.roll(s % WIDTH),
    "huge": lambda s: lambda row: row * 10.0 ** (s % 40),
    "largest": lambda s: lambda row: torch.full_like(row, torch.finfo(row.dtype).max * (-1) ** s),
    "tiny": lambda s: lambda row: row * 10.0 ** -(s % 45),
    "nan": lambda s: lambda row: row.clone().index_fill(0, torch.tensor([s % WIDTH]), math.nan),
    "inf": lambda s: lambda row: row.clone().index_fill(0, torch.tensor([s % WIDTH]), math.inf * (-1) ** s),
    "another shape": lambda s: lambda row: row[: s % WIDTH],
    "more dimensions": lambda s: lambda row: row.expand(1 + s % 3, WIDTH),
    "another type": lambda s: lambda row: row.to([torch.int64, torch.float16, torch.bool, torch.complex64][s % 4]),
    "a word": lambda s: lambda _: "fever" * (s % 3),
    "nothing": lambda _: lambda _: None,
    "raises on read": lambda _: _raise,
    "raises in the model": lambda _: lambda row: row.clone().fill_(9.5),
}
odd_rows = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 10**6)).map(lambda told: KINDS[told[0]](told[1]))


def optimizer(name: str) -> tuple[Optimizer, float]:
    """An optimizer whose every step asks everybody that it draws, and the joint bound of its sum."""
    if name == "GEP":
        public = (torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(5)), torch.arange(12) % 3)
        made = GEP(public=public, batch_size=30, steps=1, dimensions=3, clip_embedding=CLIP, clip_residual=CLIP, lr=0.1)
        return made, math.hypot(CLIP, CLIP)
    if name == "AdpClip":
        return AdpClip(batch_size=30, steps=1, clip=CLIP, lr=0.1), math.hypot(CLIP, 0.5)
    if name == "DPZO":
        return DPZO(batch_size=30, steps=1, clip=CLIP, directions=2, lr=0.1), CLIP * math.sqrt(2)
    return (DPSGD(batch_size=30, steps=1, clip=CLIP, lr=0.1) if name == "DPSGD" else DPGD(steps=1, clip=CLIP)), CLIP


def asked(name: str, data: People, dtype: torch.dtype, microbatch: int | None = None) -> dict[str, Tensor]:
    """The sum of the first step before its noise, always over the same draw."""
    sums: list[dict[str, Tensor]] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No ledger was given")
        fit(
            Picky(dtype),
            data,
            optimizer=optimizer(name)[0],
            epsilon=math.inf,
            delta=1e-5,
            size=PEOPLE,
            scheme="full",
            classes=3,
            seed=11,
            microbatch=microbatch,
            curator=lambda event: sums.append({n: v.double().clone() for n, v in event.clipped_sum.sum.items()}),
        )
    return sums[0]


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert all(bool(torch.isfinite(v).all()) for v in (*a.values(), *b.values()))
    return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a))


@pytest.mark.parametrize("name", ["DPSGD", "DPGD", "AdpClip", "GEP", "DPZO"])
@FUZZ
@given(
    seed=st.integers(0, 1000),
    place=st.integers(0, PEOPLE - 1),
    first=odd_rows,
    second=odd_rows,
    microbatch=st.sampled_from([None, 7]),
)
def test_training(name: str, seed: int, place: int, first: Any, second: Any, microbatch: int | None) -> None:
    bound = optimizer(name)[1]
    dtype = torch.float32
    a, b, gone = (asked(name, People(seed, dtype, place, odd), dtype, microbatch) for odd in (first, second, zero))
    assert apart(a, gone) <= bound * STRICT
    assert apart(b, gone) <= bound * STRICT
    assert apart(a, b) <= 2 * bound * STRICT


class Without(People):
    """The same people without one."""

    def __len__(self) -> int:
        return PEOPLE - 1

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        j = i + (self.place is not None and i >= self.place)
        return self.rows[j], self.targets[j]


@FUZZ
@given(seed=st.integers(0, 1000), place=st.integers(0, PEOPLE - 1), odd=odd_rows)
def test_training_without_one(seed: int, place: int, odd: Any) -> None:
    """Add-remove, over everybody: the row is there and odd, or was never there."""
    there = People(seed, torch.float64, place, odd)
    gone = Without(seed, torch.float64, place)
    gone.targets = torch.cat([gone.targets[:place], gone.targets[place + 1 :], gone.targets[place : place + 1]])
    gone.rows = torch.cat([gone.rows[:place], gone.rows[place + 1 :], gone.rows[place : place + 1]])
    gone.place = None
    gone.targets, gone.rows = gone.targets[:-1], gone.rows[:-1]
    found = asked("DPGD", there, torch.float64)
    assert apart(found, asked("DPGD", gone, torch.float64)) <= CLIP * STRICT


_streams: dict[torch.dtype, tuple[Any, list[dict[str, Tensor]]]] = {}


def streamed(batch: Tensor) -> dict[str, Tensor]:
    """The sum of a private test-time step of the source model on this batch."""
    if batch.dtype not in _streams:
        sums: list[dict[str, Tensor]] = []
        adapter = Tent(
            Picky(batch.dtype),
            privacy=DP(5.0, clip=CLIP),
            batch_size=PEOPLE,
            ledger=Ledger("sqlite://"),
            curator=lambda event: sums.append({n: v.double().clone() for n, v in event.clipped_sum.sum.items()}),
        )
        _streams[batch.dtype] = adapter, sums
    adapter, sums = _streams[batch.dtype]
    adapter.reset()
    adapter(batch)
    return sums[-1]


values = st.sampled_from([0.0, -0.0, 9.5, 1e-45, 1e-30, 1.0, 1e20, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan])


@FUZZ
@given(seed=st.integers(0, 1000), place=st.integers(0, PEOPLE - 1), first=values, second=values)
def test_a_stream(seed: int, place: int, first: float, second: float) -> None:
    """Tent: huge, not finite, or such that the model raises."""
    batch = People(seed, torch.float32).rows.clone().view(PEOPLE, 1, 1, WIDTH)
    found = []
    for value in (first, second, math.nan):
        odd = batch.clone()
        odd[place] = value
        found.append(streamed(odd))
    assert apart(found[0], found[2]) <= CLIP * STRICT
    assert apart(found[1], found[2]) <= CLIP * STRICT
    assert apart(found[0], found[1]) <= 2 * CLIP * STRICT


@FUZZ
@given(seed=st.integers(0, 1000), place=st.integers(0, PEOPLE - 1), odd=odd_rows)
def test_a_score(seed: int, place: int, odd: Any) -> None:
    """Of a trial: exactly on its grid, so that one unit moves the sum by 1 at most, and nobody else's number."""
    model = Picky(torch.float32).eval()
    found, plain = (
        right_by_unit(model, as_records(People(seed, torch.float32, place, how)), Classes(3), confidence=True)
        for how in (odd, lambda row: row)
    )
    others = torch.arange(PEOPLE) != place
    assert torch.equal(found[others], plain[others])
    assert 0 <= float(found[place]) <= 1
    sums = [grid_sum(values, low=0.0, high=1.0, grid=GRID).total[0] * GRID for values in (found, plain)]
    assert abs(sums[0] - sums[1]) <= 1


@FUZZ
@given(place=st.integers(0, PEOPLE - 1), odd=st.sampled_from([math.nan, math.inf, -1e300, 7.0, "fever", None, _raise]))
def test_a_score_of_ones_own(place: int, odd: Any) -> None:
    def one(model: float, unit: int) -> Any:
        if unit == place:
            return odd(torch.ones(1)) if callable(odd) else odd
        return model

    numbers = tune.by_unit(range(PEOPLE), one)(0.5)
    total = grid_sum(numbers, low=0.0, high=1.0, grid=GRID).total[0] * GRID
    assert abs(total - 0.5 * (PEOPLE - 1)) <= 1
