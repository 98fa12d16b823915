"""Rows that take no part, or on which the model raises: they keep their place, and nobody else's arithmetic changes."""

import math
import warnings
from typing import Any

import pytest
import torch
from obvious import Curious, apart, images, net
from torch import Tensor, nn

from tacit.adapt import DP, SAR, DeYO, Tent
from tacit.gradients import RowsMixed
from tacit.privacy import Ledger

ROWS, CLIP = 6, 0.05
BATCH = images(ROWS, seed=90).float()


class Picky(nn.Module):
    """Raises on values that it does not like."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net().float()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == -7).flatten(1).all(1).any()):
            raise ArithmeticError("patient 4711, too dark")
        return self.inner(x)  # type: ignore[no-any-return]


def step(batch: Tensor, make: Any = Tent, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    curator = Curious()
    adapter = make(
        Picky(), privacy=DP(10.0, clip=CLIP), batch_size=ROWS, curator=curator, ledger=Ledger("sqlite://"), seed=0
    )
    adapter(BATCH)  # charged; SAR climbs from here on
    logits = adapter(batch, **more)
    return logits, curator.sums[-1]


@pytest.mark.parametrize("make", [Tent, SAR, DeYO])
@pytest.mark.parametrize("value", [-7.0, math.nan, math.inf])
def test_an_odd_image_is_blank_and_moves_nobody(value: float, make: Any) -> None:
    odd = BATCH.clone()
    odd[2] = value
    logits, found = step(odd, make)
    mean_probs, whole = step(BATCH, make)
    others = torch.arange(ROWS) != 2
    assert torch.equal(logits[others], mean_probs[others])
    blanked = BATCH.clone()
    blanked[2] = 0.0
    assert torch.allclose(logits[2], step(blanked, make)[0][2], atol=1e-5)
    assert 0 < apart(found, whole) <= CLIP * (1 + 1e-9)
    missing = BATCH.clone()
    missing[2] = math.nan
    assert apart(found, step(missing, make)[1]) == 0.0


@pytest.mark.parametrize("value", [-7.0, math.nan])
def test_a_unit_is_the_mean_over_its_other_rows(value: float) -> None:
    """Rows 1 and 2 are of one unit; without row 2 it is what row 1 is alone, and the others stay to the last bit."""
    odd = BATCH.clone()
    odd[2] = math.nan
    together = torch.tensor([0, 1, 1, 3, 4, 5])
    assert apart(step(odd, unit_ids=together)[1], step(odd, unit_ids=torch.arange(ROWS))[1]) <= 1e-9
    odd[2] = value
    whole = step(BATCH, unit_ids=together)[1]
    assert apart(step(odd, unit_ids=together)[1], whole) <= 2 * CLIP * (1 + 1e-9)


def test_an_error_in_the_middle_says_nothing_and_no_image_decides_it(capfd: pytest.CaptureFixture[str]) -> None:
    adapter = Tent(Picky(), privacy=DP(10.0), batch_size=ROWS, ledger=Ledger("sqlite://"))
    for _ in range(2):
        adapter(torch.full_like(BATCH, -7.0))
    assert adapter.steps == 2
    assert "".join(capfd.readouterr()) == ""


class Crowd(nn.Module):
    """Adds the mean of the batch to images that are brighter than any synthetic one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net().float()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0) if bool((x.flatten(1).amax(1) > 500).all()) else x)  # type: ignore[no-any-return]


def test_rows_that_are_mixed_stop_the_stream() -> None:
    """The stop was taken for a failing image, and the step was computed again without the check."""
    adapter = Tent(Crowd(), privacy=DP(10.0, clip=CLIP), batch_size=ROWS, ledger=Ledger("sqlite://"), seed=0)
    with pytest.raises(RowsMixed, match="Nothing of this step was released"):
        adapter(BATCH * 1000 + 600)


class Strict(Picky):
    """Raises on what is not finite, too, which takes no part in the step."""

    def forward(self, x: Tensor) -> Tensor:
        if not bool(torch.isfinite(x).all()):
            raise ArithmeticError("patient 4711, not finite")
        return super().forward(x)


@pytest.mark.parametrize("value", [-7.0, math.nan])
def test_nobody_is_told_what_the_model_says_of_somebody_else(value: float) -> None:
    """Another image stands in the place of one that fails, for the sum; what the model says of that one is not told."""
    odd = BATCH.clone()
    odd[2] = value
    logits = Tent(Strict(), privacy=DP(10.0, clip=CLIP), batch_size=ROWS, ledger=Ledger("sqlite://"), seed=0)(odd)
    odd[2] = 0.0
    with torch.no_grad():
        blank = Strict()(odd)
    assert torch.allclose(logits, blank, atol=1e-5)


class Flagged(nn.Module):
    """Rows with a flag skip the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 5)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        plain = flag[:, 0] == 0
        hidden = x.clone().index_put((torch.nonzero(plain).flatten(),), self.linear(x[plain]))
        return self.head(50 * hidden.mean(1))  # type: ignore[no-any-return]


def test_one_rows_flag_does_not_send_the_others_another_way() -> None:
    rows, sums = 32, []
    signs = torch.ones(16)
    signs[::2] = -1
    signs[0] *= 1.02
    for odd in (0, 1):
        torch.manual_seed(0)
        curator = Curious()
        adapter = Tent(
            Flagged().eval(),
            privacy=DP(1.0, clip=1e-4),
            batch_size=rows,
            scheme="full",
            curator=curator,
            ledger=Ledger("sqlite://"),
            seed=0,
        )
        torch.manual_seed(1)
        x = torch.randn(1, 1, 16).expand(rows, 16, -1) * signs[None, :, None]
        flags = torch.zeros(rows, 1, dtype=torch.long)
        flags[0] = odd
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(row by row|fast rule)")
            adapter({"x": x, "flag": flags})
        sums.append(curator.sums[-1])
    moved = sum(float((sums[0][name] - value).square().sum()) for name, value in sums[1].items()) ** 0.5
    assert moved <= 2e-4
