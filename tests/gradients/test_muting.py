"""A unit that is muted, odd or failing contributes in its place, and nobody else's arithmetic changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.gradients import AdaptiveQuantile, Engine, clipped_sum


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 24), nn.Tanh(), nn.Linear(24, 3))


def rows(count: int, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, width, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("microbatch", [None, 16])
@pytest.mark.parametrize("blank", [0.0, float("nan"), 1e30])
def test_a_muted_unit_contributes_zero_in_its_place(microbatch: int | None, blank: float) -> None:
    model, (x, y) = net(), rows(48)  # three passes of 16: in smaller ones a processor may give rows other last bits
    engine = Engine(model, classify, clip=0.1, microbatch=microbatch)
    others = torch.arange(48) != 7
    alone = Engine(model, classify, clip=0.1)((x[others], y[others]))
    x[7], mute = blank, ~others
    found = engine((x, y), mute=mute)
    for name, value in alone.sum.items():
        assert float((found.sum[name] - value).abs().max()) <= 1e-15 * 40
    assert found.private.nonfinite == 1
    assert found.bounds == alone.bounds
    x[7] = 3.0
    assert same_bits(found.sum, engine((x, y), mute=mute).sum)
    assert same_bits(found.sum, clipped_sum(model, classify, (x, y), clip=0.1, microbatch=microbatch, mute=mute).sum)


def test_a_muted_row_mutes_its_unit_and_its_count() -> None:
    model, (x, y) = net(), rows(20)
    units = torch.arange(20) // 2
    engine = Engine(model, classify, clip=AdaptiveQuantile(0.1))
    mute = torch.zeros(20, dtype=torch.bool)
    mute[5] = True
    found, rest = (
        engine((x, y), unit_ids=units, mute=mute),
        engine((x[units != 2], y[units != 2]), unit_ids=units[units != 2]),
    )
    assert float(found.sum["count"]) == float(rest.sum["count"])
    assert float((found.sum["0.weight"] - rest.sum["0.weight"]).abs().max()) <= 1e-14
    with pytest.raises(ValueError, match="one boolean per row"):
        engine((x, y), mute=mute[:3])


class Picky(nn.Module):
    """Takes another way, or raises, for rows that start with a large number."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(8, 24), nn.Parameter(torch.ones(24))
        self.last, self.raises = nn.Linear(24, 3), raises

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.other
        if bool((x[:, 0] > 50).any()):
            if self.raises:
                raise ValueError(f"patient {float(x[:, 0].max())} is corrupt")
            hidden = hidden + torch.addcmul(hidden, hidden, self.other).detach() * 0
        return self.last(hidden.tanh())


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("count", [64, 600])
def test_one_odd_row_moves_the_sum_by_no_more_than_the_bound(raises: bool, count: int) -> None:
    torch.manual_seed(0)
    model = Picky(raises)
    x, y = rows(1)
    x, y = x.repeat(count, 1), y.repeat(count)  # equal rows round alike
    engine = Engine(model, classify, clip=0.1)
    before = engine((x, y))
    x, y = torch.cat([x, torch.full((1, 8), 99.0)]), torch.cat([y, y[:1]])
    after = engine((x, y))
    moved = sum(float((after.sum[n] - v).square().sum()) for n, v in before.sum.items()) ** 0.5
    assert moved <= (1e-12 if raises else 0.1)
    assert after.private.nonfinite == (1 if raises else 0)


def test_a_failure_of_the_code_is_raised_and_quotes_no_row() -> None:
    model, broken = net(), False

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if broken:
            raise KeyError(f"first value {float(batch[0][0, 0])}")
        return classify(model, batch)

    engine = Engine(model, loss, clip=1.0)
    x, y = rows(20)
    engine((x, y))
    broken = True
    x[:] = 123.25
    with pytest.raises(KeyError) as caught:
        engine((x, y))
    assert "123.25" not in str(caught.value)


def test_gradients_of_a_failing_unit_are_not_a_number() -> None:
    torch.manual_seed(0)
    engine = Engine(Picky(True), classify, clip=1.0)
    x, y = rows(20)
    engine.validate((x, y))
    x[3, 0] = 99.0
    built: list[dict[str, Any]] = list(engine.each((x, y)))
    bad = torch.cat([part["last.weight"].flatten(1).isnan().all(1) for part in built])
    assert bad.tolist() == [i == 3 for i in range(20)]
