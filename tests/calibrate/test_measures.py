"""Measures against sums done by hand and loops written out."""

import math

import numpy as np
import pytest
import torch

from tacit.calibrate import adaptive_ece, brier, classwise_ece, ece, nll, reliability

PROBS = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.45, 0.55]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1, 0])


def random_case(n: int = 300, classes: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(2 * rng.standard_normal((n, classes))), torch.from_numpy(rng.integers(0, classes, n))


def test_ece_by_hand() -> None:
    # two bins: all four confidences are in (0.5, 1]; correct - confidence is 0.1, -0.8, 0.3, -0.55
    assert ece(probs=PROBS, labels=LABELS, bins=2) == pytest.approx(abs(0.1 - 0.8 + 0.3 - 0.55) / 4)
    # ten bins: (0.8, 0.9] holds 0.9; (0.7, 0.8] holds 0.8; (0.6, 0.7] holds 0.7; (0.5, 0.6] holds 0.55
    assert ece(probs=PROBS, labels=LABELS, bins=10) == pytest.approx((0.1 + 0.8 + 0.3 + 0.55) / 4)


def test_a_confidence_on_an_edge_belongs_to_the_bin_below() -> None:
    probs = torch.tensor([[0.6, 0.4], [0.61, 0.39], [1.0, 0.0]], dtype=torch.float64)
    assert reliability(probs=probs, labels=torch.tensor([0, 0, 0]), bins=5).counts == (0, 0, 1, 1, 1)


def test_proper_scores_by_hand() -> None:
    expected = (2 * 0.1**2 + 2 * 0.8**2 + 2 * 0.3**2 + 2 * 0.55**2) / 4
    assert brier(probs=PROBS, labels=LABELS) == pytest.approx(expected)
    expected = -sum(map(math.log, (0.9, 0.2, 0.7, 0.45))) / 4
    assert nll(probs=PROBS, labels=LABELS) == pytest.approx(expected)
    assert nll(logits=PROBS.log() + 7, labels=LABELS) == pytest.approx(expected)


def test_against_loops() -> None:
    logits, labels = random_case()
    probs = torch.softmax(logits, 1).numpy()
    confidence, right = probs.max(1), probs.argmax(1) == labels.numpy()
    equal_width = equal_mass = by_class = 0.0
    for i in range(15):
        here = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        equal_width += abs((right[here] - confidence[here]).sum())
    for part in np.array_split(np.argsort(confidence, kind="stable"), 15):
        equal_mass += abs((right[part] - confidence[part]).sum())
    for c in range(5):
        for i in range(15):
            here = (probs[:, c] > i / 15) & (probs[:, c] <= (i + 1) / 15)
            by_class += abs(((labels.numpy() == c)[here] - probs[here, c]).sum()) / 5
    assert ece(logits=logits, labels=labels) == pytest.approx(equal_width / 300)
    assert adaptive_ece(logits=logits, labels=labels) == pytest.approx(equal_mass / 300)
    assert classwise_ece(logits=logits, labels=labels) == pytest.approx(by_class / 300)


def test_reliability_bins() -> None:
    found = reliability(probs=PROBS, labels=LABELS, bins=10)
    assert found.counts == (0, 0, 0, 0, 0, 1, 1, 1, 1, 0)
    assert found.accuracy[5:9] == (0.0, 1.0, 0.0, 1.0)
    assert found.confidence[5:9] == pytest.approx((0.55, 0.7, 0.8, 0.9))
    assert math.isnan(found.accuracy[0])
    assert len(found.edges) == 11


def test_probabilities_of_zero_have_a_floor() -> None:
    probs = torch.tensor([[1.0, 0.0]])
    assert nll(probs=probs, labels=[1]) == pytest.approx(-math.log(2.3e-308), rel=1e-9)  # what float64 has room for


def test_half_precision_probabilities_are_taken() -> None:
    logits, labels = random_case(50, 100)
    probs = torch.softmax(logits, 1).half()
    assert ece(probs=probs, labels=labels) == pytest.approx(ece(logits=logits, labels=labels), abs=1e-2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "logits= or as probs="),
        ({"logits": PROBS + 1, "probs": PROBS}, "one of the two"),
        ({"logits": PROBS}, "These look like probabilities: pass them as probs="),
        ({"probs": PROBS * 2}, "sums to 1"),
        ({"probs": torch.tensor([[1.5, -0.5]] * 4)}, "within"),
        ({"logits": torch.tensor([[math.nan, 1.0]] * 4)}, "not finite"),
        ({"logits": PROBS[0]}, "one row per sample"),
        ({"logits": torch.ones(4, 1)}, "at least two classes"),
        ({"logits": torch.ones(4, 2, dtype=torch.bool)}, "floating-point"),
        ({"logits": PROBS + 1, "labels": torch.tensor([0, 1, 2, 0])}, "between 0 and 1"),
        ({"logits": PROBS + 1, "labels": torch.tensor([0, 1, -1, 0])}, "between 0 and 1"),
        ({"logits": PROBS + 1, "labels": torch.tensor([0, 1])}, "as many as there are rows"),
        ({"logits": PROBS + 1, "labels": torch.zeros(4)}, "whole numbers"),
        ({"logits": torch.ones(0, 2), "labels": torch.zeros(0, dtype=torch.int64)}, "no samples"),
        ({"logits": PROBS + 1, "bins": 0}, "number of bins"),
    ],
)
def test_wrong_inputs_are_refused_with_a_sentence(inputs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ece(**({"labels": LABELS} | inputs))
