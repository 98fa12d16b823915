"""A guarantee for people who do not know what epsilon is: the comparison is a bound, the words fit."""

import json
import math

import numpy as np
import pytest
from scipy.stats import norm

from tacit.privacy import Guarantee, Neighbours, events, guarantee
from tacit.privacy._plain_words import plain_words, right_guesses


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_randomized_response_meets_the_bound_exactly(epsilon: float) -> None:
    """The best guess on a bit that is told truly with probability e^eps/(1 + e^eps) is what was told."""
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert right_guesses(epsilon, 0.0) == pytest.approx(100 * truth)


@pytest.mark.parametrize("mu", [0.05, 0.5, 2.0])
def test_a_gaussian_meets_the_bound_exactly(mu: float) -> None:
    """Between N(0, 1) and N(mu, 1) one guesses by the middle; integrated by brute force."""
    x = np.linspace(-12, 12 + mu, 400_001)
    best = np.trapezoid(np.maximum(norm.pdf(x), norm.pdf(x - mu)), x) / 2
    assert right_guesses(50.0, 1e-9, mu) == pytest.approx(100 * best, abs=1e-5)


def test_the_smaller_of_both_bounds_is_told() -> None:
    promise = guarantee(events.gaussian(8.0), delta=1e-6)
    assert right_guesses(promise.epsilon, promise.delta, promise.mu) < right_guesses(promise.epsilon, promise.delta)
    assert right_guesses(800.0, 0.0) == 100.0


def test_the_words_of_a_patient() -> None:
    told = str(Guarantee(epsilon=1.0, delta=0.0, unit="patient").plain_words)
    assert "Every patient in the data, with all rows of that patient together." in told
    assert "whether the data of one patient were used" in told
    assert "at most 73.2 times out of 100. That is moderate protection." in told  # e/(1 + e) = 0.73106, rounded up
    other = Guarantee(epsilon=1.0, delta=0.0, unit="patient", neighbours=Neighbours.REPLACE_ONE).plain_words
    assert "what the data of one patient were" in other.what


def test_the_words_of_no_promise() -> None:
    for promise in (Guarantee(epsilon=math.inf, delta=1e-6), Guarantee(epsilon=1.0, delta=1e-6, seeded=True)):
        assert promise.plain_words.who == "No one."
        assert promise.plain_words.strength.startswith("Not at all")
    none = plain_words(epsilon=0, delta=0, mu=None, unit="user", relation=None, private=True, charged=False)
    assert none.what == "Nothing was released on it yet."


@pytest.mark.parametrize(
    "promise",
    [
        guarantee(events.gaussian(8.0), delta=1e-6, neighbours="replace-one", unit="patient"),
        Guarantee(epsilon=math.inf, delta=0.0, neighbours=None, notes=("a", "b"), seeded=True),
    ],
)
def test_a_guarantee_survives_json(promise: Guarantee) -> None:
    assert Guarantee.from_json(json.loads(json.dumps(promise.to_json(), allow_nan=False))) == promise


def test_a_notebook_shows_words_and_the_sentence_escaped() -> None:
    shown = Guarantee(epsilon=1.0, delta=0.0, unit="<b>")._repr_html_()
    assert "<dt>How strongly</dt>" in shown
    assert "differential privacy" in shown
    assert "<b>" not in shown
