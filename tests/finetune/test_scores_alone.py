"""One unit more or less changes nobody else's score, to the last bit: ties are decided by it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit.data import Rows
from tacit.data._tensor_records import TensorRecords
from tacit.finetune._evaluation import right_by_unit
from tacit.finetune._predictions import _TOKENS, _worth
from tacit.finetune._tasks import Classes
from tacit.gradients import in_own_places


class NearTies(nn.Module):
    """Two logits that are the same sum in another order, and far apart in their last bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(64, 256), nn.Linear(256, 1)
        self.order = torch.randperm(256)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        other = nn.functional.linear(h[:, self.order], self.head.weight[:, self.order], self.head.bias)
        return 1e5 * torch.cat([self.head(h), other], 1)


def test_a_unit_that_goes_takes_its_own_score_and_nobody_elses() -> None:
    """Before, four equal rows scored 4 and three of them 0: a sum that was paid for as moving by 1 moved by 4."""
    model, task = NearTies().eval(), Classes(2)
    rows = torch.randn(60, 64, generator=torch.Generator().manual_seed(1))
    for count in (2, 3, 4, 5, 9, 15, 16, 17, 18, 31, 33, 47):
        inputs, labels = rows[:count], torch.zeros(count, dtype=torch.long)
        whole = right_by_unit(model, TensorRecords(inputs, labels), task)
        for gone in {0, count // 2, count - 1}:
            kept = torch.arange(count) != gone
            assert torch.equal(right_by_unit(model, TensorRecords(inputs[kept], labels[kept]), task), whole[kept])


def near_ties(features: int, rows: int) -> tuple[nn.Linear, Tensor]:
    """Two classes that are the same sum in another order, for each row."""
    half, generator = features // 2, torch.Generator().manual_seed(0)
    left, inputs = torch.randn(half, generator=generator), torch.zeros(rows, features)
    inputs[:, :half] = torch.randn(rows, half, generator=generator)
    inputs[:, half : 2 * half] = inputs[:, :half].flip(1)
    model = nn.Linear(features, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[0, :half], model.weight[1, half : 2 * half] = left, left.flip(0)
    return model, inputs


@pytest.mark.parametrize("features", [10, 33, 50, 64, 197])
def test_whoever_goes_first_moves_nobody_to_a_place_where_ties_fall_otherwise(features: int) -> None:
    """Rows whose length is no multiple of 16 bytes are rounded by place: of 48 others, up to 21 had other answers."""
    model, inputs = near_ties(features, 49)
    labels, task = torch.zeros(49, dtype=torch.long), Classes(2)
    whole = right_by_unit(model, TensorRecords(inputs, labels), task)
    for gone in range(0, 49, 6):
        kept = torch.arange(49) != gone
        assert torch.equal(right_by_unit(model, TensorRecords(inputs[kept], labels[kept]), task), whole[kept])


class Counting(nn.Module):
    """Notes how many rows come at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Any = None, *, input_ids: Tensor | None = None) -> Tensor:
        given: Tensor = x if input_ids is None else input_ids
        self.seen.append(len(given))
        return given.flatten(1)[:, :2].float()


def test_large_rows_are_no_more_at_a_time_than_fit() -> None:
    """One clip of 24 MB went through the model sixteen times at once, and so did a long text with its vocabulary."""
    model, clips = Counting(), torch.arange(3.0)[:, None].expand(3, 6 * 2**20)
    found = in_own_places(model, clips, 3)
    assert torch.equal(found, clips[:, :2])
    assert set(model.seen) == {2}  # of 24 MB each


@pytest.mark.parametrize("length", [16, 512, _TOKENS, 3 * _TOKENS])
def test_long_texts_are_no_more_at_a_time_than_their_tokens_allow(length: int) -> None:
    labels, owners = torch.tensor([0, 1, 0]), torch.arange(3)
    texts = {"input_ids": torch.tensor([[0], [1], [1]]).expand(3, length)}
    records: Any = SimpleNamespace(sizes=torch.full((3,), length), scored_by="row")
    model, task = Counting(), Classes(2)
    _worth(model, records, task, task.right, owners, Rows(texts, labels, owners), None)
    assert set(model.seen) == {max(1, min(16, _TOKENS // length))}
