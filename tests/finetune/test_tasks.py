"""Scores and losses against brute force: pairs for AUROC, label by label, clip by clip."""

import itertools

import pytest
import torch
from test_units import Clips
from torch import Tensor, nn
from torch.nn import functional

from tacit.finetune import Classes, Labels, auroc
from tacit.finetune._predictions import predictions
from tacit.finetune._sources import as_records


def pairs(scores: Tensor, labels: Tensor) -> float:
    """Every positive with every negative: 1 if it scores higher, 1/2 if the same."""
    high, low = scores[labels > 0.5].tolist(), scores[labels <= 0.5].tolist()
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(high, low)) / len(high) / len(low)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_auroc_is_over_all_pairs(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    for _ in range(20):
        scores = torch.randint(0, levels, (31,), generator=generator) / levels
        labels = (torch.rand(31, generator=generator) < 0.3).double()
        labels[:2] = torch.tensor([0.0, 1.0])
        assert auroc(scores, labels) == pytest.approx(pairs(scores, labels), abs=1e-12)


def test_auroc_at_its_ends() -> None:
    scores = torch.tensor([0.1, 0.2, 0.3])
    assert auroc(scores, torch.tensor([0.0, 0.0, 1.0])) == 1
    assert auroc(scores, torch.tensor([1.0, 0.0, 0.0])) == 0
    assert auroc(torch.ones(4), torch.tensor([1.0, 0.0, 1.0, 0.0])) == 0.5
    assert auroc(scores, torch.ones(3)) is None
    assert auroc(scores, torch.zeros(3)) is None


def test_labels_that_are_not_known_count_for_nothing() -> None:
    """Loss and gradient are as if they were not there; whatever the model says of them changes nothing."""
    torch.manual_seed(0)
    outputs, nan = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), float("nan")
    labels = torch.tensor([[1, 0, nan], [nan, nan, nan], [0.5, nan, 1], [0, 1, 1]], dtype=torch.float64)
    task = Labels(3)
    expected = [
        sum(
            float(functional.binary_cross_entropy_with_logits(outputs[i, j].detach(), labels[i, j]))
            for j in range(3)
            if labels[i, j] == labels[i, j]
        )
        / 3
        for i in range(4)
    ]
    losses = task.loss(outputs, labels)
    assert losses.tolist() == pytest.approx(expected)
    losses.sum().backward()
    assert outputs.grad is not None
    assert not outputs.grad[labels.isnan()].any()
    assert outputs.grad[~labels.isnan()].all()
    task.check(labels)


def test_scores_of_several_labels() -> None:
    nan = float("nan")
    probs = torch.tensor([[0.9, 0.2, 0.5], [0.4, 0.7, 0.5], [0.6, 0.1, 0.5], [0.2, 0.9, 0.5]])
    labels = torch.tensor([[1, 0, 1], [0, 0, 1], [0, nan, 1], [nan, 1, 1]])
    found = Labels(3).scores(probs, labels)
    known = [~labels[:, j].isnan() for j in range(2)]
    each = [pairs(probs[known[j], j], labels[known[j], j]) for j in range(2)]  # the third has positives only
    assert found["auroc"] == pytest.approx(100 * sum(each) / 2)
    share = [2 / 3, 1 / 3, 0 / 2, 1 / 2]  # the third: 0.5 is not above one half
    assert Labels(3).right(probs, labels).tolist() == pytest.approx(share)
    assert found["accuracy"] == pytest.approx(25 * sum(share))


def test_classes() -> None:
    probs, labels = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.3, 0.7]]), torch.tensor([1, 1, 1])
    assert Classes(2).scores(probs, labels) == {"accuracy": pytest.approx(200 / 3)}
    assert Classes(2).probs(torch.tensor([[0.0, 0.0]])).tolist() == [[0.5, 0.5]]


def test_a_video_is_judged_by_the_mean_of_its_clips_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the mean of their outputs, and not by votes; in portions of any size, in the order of the videos."""
    torch.manual_seed(3)
    values, labels = torch.randn(7, 5, 4), torch.randint(0, 3, (7,))
    model = nn.Linear(4, 3)
    records = Clips(values, labels, 4)
    rows = records.rows(torch.arange(7), None)
    expected = torch.stack([model(rows.inputs[rows.owner == unit]).softmax(1).mean(0) for unit in range(7)])
    for portion in (1, 9, 1000):
        monkeypatch.setattr("tacit.finetune._predictions.rows_that_fit", lambda _, portion=portion: portion)
        said = predictions(model, records, Classes(3))
        assert torch.allclose(said.probs, expected, atol=1e-6)
        assert torch.equal(said.labels, labels)
        assert said.owner.tolist() == list(range(7))


def test_rows_are_judged_one_by_one_and_know_their_owner() -> None:
    torch.manual_seed(3)
    inputs, labels, owners = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([5, 2, 5, 2, 9, 5])
    model = nn.Linear(4, 3)
    said = predictions(model, as_records((inputs, labels, owners), public=True), Classes(3))
    order = torch.tensor([1, 3, 0, 2, 5, 4])
    assert torch.allclose(said.probs, model(inputs[order]).softmax(1))
    assert torch.equal(said.labels, labels[order])
    assert said.owner.tolist() == [0, 0, 1, 1, 1, 2]
