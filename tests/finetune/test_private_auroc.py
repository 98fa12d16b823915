"""AUROC of private data: a histogram of scores on a receipt, its bound, its noise, and what is read off it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tacit.finetune import DPSGD, Evaluation, Labels, auroc, fit
from tacit.finetune import _evaluation as evaluation
from tacit.finetune._measures import BINS, score_histogram, scores_of_histogram
from tacit.privacy import Ledger, Neighbours, accounting, events


def made_up(rows: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(rows, outputs, generator=generator) < 0.3).double()
    scores = (torch.randn(rows, outputs, generator=generator, dtype=torch.float64) + 1.5 * labels).sigmoid()
    return scores, labels


def test_without_noise_it_is_the_auroc_of_binned_scores() -> None:
    scores, labels = made_up(500, 3)
    labels[::7, 1] = math.nan
    binned = (scores * BINS).floor()
    each = [auroc(binned[known, i], labels[known, i]) for i, known in enumerate((~labels.isnan()).T)]
    found = scores_of_histogram(score_histogram(scores, labels).sum(0), 3)
    assert found["auroc"] == pytest.approx(100 * sum(each) / 3, abs=1e-9)  # type: ignore[arg-type]
    exact = Labels(3).scores(scores, labels)["auroc"]
    assert found["auroc"] == pytest.approx(exact, abs=1.0)  # what 16 bins cost
    known = ~labels.isnan()
    right = (((scores >= 0.5) == (labels > 0.5)) & known).sum() / known.sum()
    assert found["accuracy"] == pytest.approx(100 * float(right))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**31))
def test_no_row_is_longer_than_one(outputs: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, outputs, generator=generator)
    labels = torch.randint(0, 3, (rows, outputs), generator=generator).float()
    labels[labels == 2] = math.nan
    scores[torch.rand(rows, outputs, generator=generator) < 0.2] = math.nan
    found = score_histogram(scores, labels)
    assert found.shape == (rows, outputs * 2 * BINS)
    assert float(found.norm(dim=1).max()) <= 1 + 1e-12
    mean = found.mean(0)  # of a unit with several rows
    assert float(mean.norm()) <= 1 + 1e-12


def test_no_number_counts_as_wrong_and_no_side_as_nothing() -> None:
    scores = torch.tensor([[0.9], [math.nan], [math.nan], [0.2]])
    labels = torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    # positive: one at the top, one at the bottom; negative: one at the top, one at 0.2
    assert scores_of_histogram(score_histogram(scores, labels).sum(0), 1)["auroc"] == pytest.approx(100 * 1.0 / 4)
    assert math.isnan(scores_of_histogram(score_histogram(scores[:2], labels[:2]).sum(0), 1)["auroc"])
    assert math.isnan(scores_of_histogram(torch.zeros(2 * BINS), 1)["accuracy"])


class Net(nn.Module):
    """Its output is its input, and a head that is never trained to matter."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(outputs, outputs)
        nn.init.eye_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(rows)  # type: ignore[no-any-return]


def evaluated(epsilon: float, rows: int = 3000, **more: Any) -> tuple[dict[str, float], float, Ledger]:
    scores, labels = made_up(rows, 2, seed=1)
    held_out = scores.logit().float(), labels.float()
    ledger = Ledger("sqlite://")
    fitted = fit(
        Net(2),
        (held_out[0][:50], held_out[1][:50]),
        scheme="full",
        head="keep",
        task=Labels(2),
        optimizer=DPSGD(batch_size=10, steps=2, clip=1e-9, lr=1e-9),
        epsilon=1.0,
        delta=1e-3,
        size=50,
        ledger=ledger,
        subject="train",
        evaluate=Evaluation(data=held_out, subject="held out", epsilon=epsilon, delta=1e-6, size=rows, **more),
    )
    exact = Labels(2).scores(scores, labels)["auroc"]
    return fitted.scores, exact, ledger


def test_a_charged_evaluation_has_an_auroc() -> None:
    """At epsilon 4 the noise multiplier is 1.28: some 16 cells of sigma sqrt(2) each against 900 positives."""
    found, exact, ledger = evaluated(4.0)
    assert set(found) == {"auroc", "accuracy"}
    # the numerator has a standard deviation below sigma sqrt(2 bins) 2100, and 900 x 2100 pairs are its whole
    sigma = 1.4 * math.sqrt(2)
    assert abs(found["auroc"] - exact) < 1.0 + 100 * 6 * sigma * math.sqrt(4 * BINS) / 900
    assert ledger.spent("held out").epsilon <= 4.0


def test_the_noise_is_that_of_the_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was charged prices a sum that moves by 1 in L2; the sum that leaves is bounded by exactly that."""
    seen = []
    query = evaluation.mechanisms.gaussian_query

    def watch(total: Any, receipt: Any) -> Any:
        seen.append((total, receipt))
        return query(total, receipt)

    monkeypatch.setattr(evaluation.mechanisms, "gaussian_query", watch)
    evaluated(2.0, rows=200)
    ((total, receipt),) = seen
    assert total.l2 == 1.0
    assert total.bound("l2", Neighbours.ADD_REMOVE) == 1.0
    assert len(total.total) == 2 * 2 * BINS
    noise = receipt.event.noise_multiplier
    guarantee = accounting.guarantee(events.gaussian(noise), delta=1e-6)
    assert guarantee.epsilon <= 2.0
    assert accounting.guarantee(events.gaussian(noise * 0.98), delta=1e-6).epsilon > 2.0


def test_several_rows_of_a_unit_count_as_one() -> None:
    scores, labels = made_up(12, 2)
    owners = torch.tensor([0] * 10 + [1, 2])
    from tacit.data import TensorRecords

    records = TensorRecords(scores.logit().float(), labels.float(), owners, unit="patient")
    task = Labels(2)
    found = evaluation.mean_by_unit(Net(2), records, task, task.histogram)
    assert found.shape == (3, 2 * 2 * BINS)
    assert torch.allclose(found[0], score_histogram(scores[:10], labels[:10]).mean(0), atol=1e-6)
    assert float(found.norm(dim=1).max()) <= 1 + 1e-12
