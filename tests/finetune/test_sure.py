"""How sure of the right answer: 1 less a loss that is cut, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tacit.data._tensor_records import TensorRecords
from tacit.finetune import Classes, Labels, NextToken
from tacit.finetune._evaluation import right_by_unit


def test_classes() -> None:
    probs = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    found = Classes(3).confidence(probs, torch.tensor([0, 1, 0, 2]))
    blind = math.log(3)
    expected = [1.0, 0.5, 1 - math.log(2) / (2 * blind), 0.0]  # certain, a guess, half sure, certainly wrong
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_several_labels() -> None:
    probs = torch.tensor([[0.5, 0.9], [1.0, 0.0], [0.2, 0.3]])
    labels = torch.tensor([[1.0, math.nan], [0.0, 1.0], [math.nan, math.nan]])
    assert Labels(2).confidence(probs, labels).tolist() == pytest.approx([0.5, 0.0, 1.0])


def test_next_tokens() -> None:
    summaries = torch.tensor([[3 * math.log(50.0), 1.0, 3.0], [0.0, 2.0, 2.0], [100.0, 0.0, 1.0]], dtype=torch.float64)
    assert NextToken(50).confidence(summaries, torch.zeros(3)).tolist() == pytest.approx([0.5, 1.0, 0.0])


def test_by_unit_it_is_within_0_and_1_whatever_the_rows() -> None:
    inputs = torch.tensor([[1.0, 0.0], [0.0, 1e30], [math.nan, 1.0], [math.inf, 0.0]])
    records = TensorRecords(inputs, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2]))
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    found = right_by_unit(model, records, Classes(2), confidence=True)
    alone = 1 - math.log(1 + math.exp(-1)) / (2 * math.log(2))
    assert float(found[0]) == pytest.approx(alone / 2)  # of two rows, one of them as wrong as can be
    assert bool(((found >= 0) & (found <= 1) | found.isnan()).all())  # what is no number counts as zero in the sum
