"""Repeat and select, checked against docs/proofs.md by exact enumeration: ties, no trial at all, trials that fail."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import dp_event

from tacit.privacy import events
from tacit.privacy.accounting import halting
from tacit.privacy.selection import best, number_of_trials

Law = np.ndarray  # of the outcomes of one trial, from the worst score to the best


def generating(mean: float, shape: float, x: np.ndarray) -> np.ndarray:
    """E x^K."""
    if math.isinf(shape):
        return np.exp(mean * (x - 1))
    stop = math.exp(-halting(mean, shape))
    if stop > 1 - 1e-9:  # one trial
        return x
    if shape == 0:
        return np.log1p(-(1 - stop) * x) / math.log(stop)
    return ((1 - (1 - stop) * x) ** -shape - 1) / (stop**-shape - 1)


def winner(law: Law, mean: float, shape: float) -> np.ndarray:
    """The law of the winner, by the generating function; the last entry is "no trial"."""
    below = np.concatenate([[0.0], np.cumsum(law)])
    below[-1] = 1.0
    found = np.diff(generating(mean, shape, below))
    return np.append(found, generating(mean, shape, np.zeros(1))[0])


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    kept = p > 0
    return math.log(float((p[kept] ** order * q[kept] ** (1 - order)).sum())) / (order - 1)


def theorem(p: Law, q: Law, mean: float, shape: float, order: float) -> float:
    """What theorems 2 and 6 of Papernot & Steinke promise for a trial that has exactly these two laws."""
    one = max(divergence(p, q, order), divergence(q, p, order))
    if math.isinf(shape):
        alpha = 1 + 1 / (order - 1)
        delta = max(float(np.maximum(a - alpha * b, 0).sum()) for a, b in ((p, q), (q, p)))
        return one + mean * delta + math.log(mean) / (order - 1)
    others = (1.01, 1.1, 1.5, 2.0, 4.0, 16.0, 64.0)
    second = min((1 - 1 / o) * max(divergence(p, q, o), divergence(q, p, o)) + halting(mean, shape) / o for o in others)
    return one + (1 + shape) * second + math.log(mean) / (order - 1)


def laws(random: np.random.Generator, size: int) -> tuple[Law, Law]:
    p, q = (random.dirichlet(np.full(size, random.choice([0.3, 1.0, 5.0]))) + 1e-4 for _ in range(2))
    return p / p.sum(), q / q.sum()


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("mean", [1.0, 1.5, 4.0, 30.0])
def test_the_winner_stays_within_the_theorem_with_no_trial_counted_as_an_outcome(mean: float, shape: float) -> None:
    random = np.random.default_rng(11)
    for _ in range(60):
        p, q = laws(random, int(random.integers(2, 7)))
        for order in (1.05, 1.5, 2.0, 8.0):
            exact = divergence(winner(p, mean, shape), winner(q, mean, shape), order)
            assert exact <= theorem(p, q, mean, shape, order) + 1e-9


def test_below_one_trial_in_the_mean_the_theorem_would_fail_and_is_refused() -> None:
    p, _ = laws(np.random.default_rng(0), 3)
    assert divergence(winner(p, 0.5, math.inf), winner(p, 0.5, math.inf), 2.0) > theorem(p, p, 0.5, math.inf, 2.0)
    with pytest.raises(ValueError, match="at least one trial"):
        events.repeat_and_select(events.gaussian(1.0), mean=0.5, shape=math.inf)


def test_the_sharper_form_with_no_trial() -> None:
    """exp((order - 1) D) <= 1 + mean e^(mean (order - 1) delta) (exp((order - 1) D_1) - 1), for every mean above 0."""
    random = np.random.default_rng(12)
    for mean in (0.3, 1.0, 5.0):
        for _ in range(60):
            p, q = laws(random, 4)
            for order in (1.2, 2.0, 5.0):
                alpha, up = 1 + 1 / (order - 1), order - 1
                delta = float(np.maximum(q - alpha * p, 0).sum())
                exact = math.exp(up * divergence(winner(p, mean, math.inf), winner(q, mean, math.inf), order))
                bound = 1 + mean * math.exp(mean * up * delta) * math.expm1(up * divergence(p, q, order))
                assert exact <= bound * (1 + 1e-12)


def test_the_first_of_equal_scores_is_as_good_as_a_random_one() -> None:
    """All sequences of up to four trials with three scores, two models each: `best` against the generating function."""
    joint = {(0, "a"): 0.1, (0, "b"): 0.25, (1, "a"): 0.2, (1, "b"): 0.05, (2, "a"): 0.3, (2, "b"): 0.1}
    numbers = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.25, 4: 0.15}
    found: dict[object, float] = {}
    for count, share in numbers.items():
        for trials in itertools.product(joint, repeat=count):
            won = best((float(score), model) for score, model in trials)
            found[won] = found.get(won, 0.0) + share * math.prod(joint[trial] for trial in trials)
    scores = [sum(v for (score, _), v in joint.items() if score == s) for s in range(3)]
    below = np.concatenate([[0.0], np.cumsum(scores)])
    law = np.diff(sum(share * below**count for count, share in numbers.items()))
    assert found[None] == pytest.approx(numbers[0])
    for (score, model), share in joint.items():
        assert found[float(score), model] == pytest.approx(law[score] * share / scores[score])


def test_a_trial_that_fails_is_the_lowest_outcome_and_nobody_wins_if_all_do() -> None:
    """A failure is an outcome like any other, -inf; "no winner" joins it with "no trial": post-processing."""
    outcomes = {-math.inf: 0.3, 0.0: 0.5, 1.0: 0.2}
    numbers = {0: 0.2, 1: 0.3, 3: 0.5}
    found: dict[object, float] = {}
    for count, share in numbers.items():
        for trials in itertools.product(outcomes, repeat=count):
            won = best((score, "model") for score in trials)
            found[won] = found.get(won, 0.0) + share * math.prod(outcomes[score] for score in trials)
    power = lambda x: sum(share * x**count for count, share in numbers.items())  # noqa: E731
    assert found[None] == pytest.approx(power(0.3))
    assert found[0.0, "model"] == pytest.approx(power(0.8) - power(0.3))
    assert found[1.0, "model"] == pytest.approx(power(1.0) - power(0.8))


@pytest.mark.parametrize(("mean", "shape"), [(3.0, 0.0), (3.0, 1.0), (5.0, 2.5), (2.0, math.inf)])
def test_the_number_that_is_drawn_has_the_generating_function_of_the_proof(mean: float, shape: float) -> None:
    """By quadrature over the uniform: E x^K of the inverse distribution function."""
    event = dp_event.RepeatAndSelectDpEvent(events.gaussian(1.0), mean, shape)
    points = (np.arange(4000) + 0.5) / 4000
    numbers = np.array([number_of_trials(event, math.ceil(u * 2**53) / 2**53, 0.5) for u in points])
    for x in (0.0, 0.3, 0.9):
        expected = generating(mean, shape, np.array([x]))[0]
        assert float((x**numbers).mean()) == pytest.approx(expected, abs=2e-3)
