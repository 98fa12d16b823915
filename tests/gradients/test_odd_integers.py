"""An integer that the model cannot take is its own unit's affair, also in the checks that draw from what occurs."""

import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import Engine

CLIP = 1.0


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))


def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="none")


WORDS, LABELS = torch.tensor([[0, 1], [2, 9], [3, 4]]), torch.tensor([0, 1, 2])


def test_a_word_that_the_table_does_not_have_adds_nothing_and_stops_nobody() -> None:
    odd = Engine(model(), loss, clip=CLIP)((WORDS, LABELS))
    without = Engine(model(), loss, clip=CLIP)((WORDS[[0, 2]], LABELS[[0, 2]]))
    assert max(float((odd.sum[name] - value).abs().max()) for name, value in without.sum.items()) < 1e-7
    assert odd.private.nonfinite == 1


def test_it_may_come_at_any_step() -> None:
    engine = Engine(model(), loss, clip=CLIP)
    good = torch.tensor([[0, 1], [2, 2], [3, 4]])
    engine((good, LABELS))
    total = engine((WORDS, LABELS))
    muted = Engine(model(), loss, clip=CLIP)((good, LABELS), mute=torch.tensor([False, True, False]))
    assert max(float((total.sum[name] - value).abs().max()) for name, value in muted.sum.items()) < 1e-7


def test_a_model_that_takes_no_row_at_all_is_an_error() -> None:
    with pytest.raises(IndexError):
        Engine(model(), loss, clip=CLIP)((WORDS + 7, LABELS))
