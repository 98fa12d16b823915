"""Sums as the real loops hand them over, before any noise, with one row that may be anything."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tacit import adapt
from tacit.audit._steps import optimizers
from tacit.finetune import Optimizer, fit, make_private
from tacit.privacy import Ledger

Sums = Callable[[object], Mapping[str, Tensor]]
_PEOPLE, _WIDTH, _PLACE = 8, 4, 3


def odd_rows() -> dict[str, object]:
    """Rows that a loop must survive: huge, tiny, not finite, of another shape, type or kind."""
    return {
        "plain": torch.tensor([1.0, -2.0, 0.5, 3.0]),
        "huge": torch.full((_WIDTH,), 1e30),
        "largest": torch.full((_WIDTH,), torch.finfo(torch.float32).max),
        "tiny": torch.full((_WIDTH,), 1e-40),
        "not a number": torch.full((_WIDTH,), math.nan),
        "infinite": torch.tensor([math.inf, 0.0, 0.0, 0.0]),
        "another shape": torch.ones(_WIDTH - 1),
        "another type": torch.ones(_WIDTH, dtype=torch.float16),
        "a word": "fever",
    }


class _People:
    """A data set of which one row may be anything; ``None`` is a row that cannot be read, which is a blank one."""

    def __init__(self, odd: object, place: int = _PLACE) -> None:
        self.place = place
        chance = torch.Generator().manual_seed(1)
        self.rows, self.odd = torch.randn(_PEOPLE, _WIDTH, generator=chance), odd
        self.targets = torch.arange(_PEOPLE) % 2

    def __len__(self) -> int:
        return _PEOPLE

    def __getitem__(self, place: int) -> tuple[Any, Tensor]:
        if place != self.place:
            return self.rows[place], self.targets[place]
        if self.odd is None:
            raise OSError("blank")
        return self.odd, self.targets[place]


def sums_of_fit(names: tuple[str, ...]) -> dict[str, tuple[Sums, float]]:
    """The first step's sum of `fit` over all units, with each query, and its joint bound."""
    return {name: _of_fit(made) for name, made in optimizers(batch=_PEOPLE).items() if name in names}


def _of_fit(optimizer: Optimizer) -> tuple[Sums, float]:
    bounds: list[float] = []

    def sums(row: object) -> Mapping[str, Tensor]:
        found: list[Mapping[str, Tensor]] = []

        def curator(event: Any) -> None:
            total = event.clipped_sum
            found.append({name: value.clone() for name, value in total.sum.items()})
            bounds.append(math.hypot(*total.bounds.values()))

        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(
                nn.Linear(_WIDTH, 2, bias=False),
                _People(row),
                optimizer=optimizer,
                epsilon=math.inf,
                delta=1e-5,
                size=_PEOPLE,
                scheme="full",
                head="keep",
                seed=0,
                curator=curator,
            )
        return found[0]

    sums(None)
    return sums, bounds[0]


def sums_of_own_loop(clip: float = 0.5) -> tuple[Sums, float]:
    """The first step's sum of a user's own loop behind `make_private`, over all units."""

    def sums(row: object) -> Mapping[str, Tensor]:
        found: list[Mapping[str, Tensor]] = []

        def kept(event: Any) -> None:
            if hasattr(event, "clipped_sum"):  # others say what was wrong with a row
                found.append({name: value.clone() for name, value in event.clipped_sum.sum.items()})

        torch.manual_seed(0)
        model = nn.Linear(_WIDTH, 2, bias=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop = make_private(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                DataLoader(_People(row, _PEOPLE - 1), batch_size=_PEOPLE),  # type: ignore[arg-type]
                nn.functional.cross_entropy,
                epsilon=math.inf,
                delta=1e-5,
                steps=1,
                clip=clip,
                seed=0,
                curator=kept,
            )
            for batch in loop:
                loop.step(batch)
        return found[0]

    return sums, clip


def sums_of_tent(clip: float = 0.25) -> tuple[Sums, float]:
    """The sum of a private step of Tent; a row of another shape or kind is none for a stream, and counts as blank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(_WIDTH, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    found: list[Mapping[str, Tensor]] = []
    adapter = adapt.Tent(
        model,
        privacy=adapt.DP(5.0, clip=clip),
        batch_size=_PEOPLE,
        ledger=Ledger("sqlite://"),
        curator=lambda event: found.append({name: v.clone() for name, v in event.clipped_sum.sum.items()}),
    )
    batch = torch.randn(_PEOPLE, 1, 2, 2, generator=torch.Generator().manual_seed(1))

    def sums(row: object) -> Mapping[str, Tensor]:
        odd = batch.clone()
        fits = isinstance(row, Tensor) and row.shape == (_WIDTH,)
        odd[_PLACE] = row.float().view(1, 2, 2) if fits and isinstance(row, Tensor) else math.nan
        adapter.reset()
        adapter(odd)
        return found[-1]

    return sums, clip
