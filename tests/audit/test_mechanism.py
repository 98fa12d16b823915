"""Attacks find most of what is claimed, never more than that, and catch everything that is broken on purpose.

Each finding has a false-alarm probability of 1e-9; all of them together stay far below 1e-6. That an attack finds as
much as a test asks for is a matter of power: margins are six standard errors and more.
"""

import numpy as np
import pytest
import torch

from tacit.audit import TWINS, Claim, PromiseBroken, mechanism, releases, sentence
from tacit.audit._releases import paid
from tacit.finetune import Decaying, Everyone
from tacit.privacy import Budget, events

RELATIONS = ("add-remove", "replace-one", "zero-out")


@pytest.mark.parametrize("neighbours", RELATIONS)
def test_gaussian(neighbours: str) -> None:
    claim = Claim.of(events.gaussian(0.5, 2), neighbours=neighbours)
    assert claim.mu == pytest.approx(2 * 2**0.5 * (2 if neighbours == "replace-one" else 1))
    found = mechanism(releases.gaussian(0.5, 2, neighbours=neighbours), claim, trials=150_000)
    assert found.holds
    assert found.tightness > 0.93  # at eps this large few errors are left, which is what bounds it


@pytest.mark.parametrize("strategy", ["independent", "banded:4", "buffered", "full"])
@pytest.mark.parametrize(
    ("k", "b", "blocks", "reset"), [(1, 1, 1, None), (1, 1, 1, 5), (3, 4, 1, None), (3, 4, 2, None)]
)
def test_streams(strategy: str, k: int, b: int, blocks: int, reset: int | None) -> None:
    """The steps of a unit are the worst ones, so the projected statistic finds all of the charged mu."""
    event = events.stream(1.0, 12, strategy=strategy, contributions=k, separation=b, blocks=blocks)
    claim = Claim.of(event, neighbours="replace-one")
    found = mechanism(releases.stream(event, reset=reset), claim, trials=60_000)
    assert claim.mu == pytest.approx(2.0)
    cut = reset is not None and strategy != "independent"  # the first column of a block that ends early is shorter
    assert found.tightness > (0.80 if cut else 0.94)


def test_a_long_stream_is_projected_as_it_goes() -> None:
    event = events.stream(1.0, 200, strategy="buffered", contributions=3, separation=50)
    found = mechanism(releases.stream(event), Claim.of(event, neighbours="replace-one"), trials=40_000)
    assert found.tightness > 0.92


def test_small_queries() -> None:
    gauss = mechanism(releases.gaussian_query(0.5), Claim.of(events.gaussian(0.5)), trials=8_000)
    assert gauss.tightness > 0.80
    pure = mechanism(releases.laplace(0.5), Claim.of(events.laplace(0.5)), trials=16_000)
    assert (pure.measure, pure.claimed) == ("epsilon", pytest.approx(2.0))
    assert pure.tightness > 0.80
    best = mechanism(releases.noisy_max(1.0), Claim.of(events.noisy_max(1.0)), trials=2_000)
    assert best.claimed == pytest.approx(2.0)
    assert best.tightness > 0.45


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
def test_a_poisson_step_with_the_receipts_own_draw(neighbours: str) -> None:
    event = events.poisson(0.5, events.gaussian(0.5))
    claim = Claim.of(event, neighbours=neighbours, delta=1e-2)
    found = mechanism(releases.poisson(0.5, 0.5, neighbours=neighbours), claim, trials=600_000)
    assert found.tightness > 0.70


def test_the_ratio_of_a_cyclic_stream_is_the_likelihood_ratio() -> None:
    """A likelihood ratio L = p1/p0, and only it, has E0[g(L) L] = E1[g(L)] for every g: here for g(L) = 1/(1 + L).

    g(L) L and g(L) are in [0, 1], so each mean of 200,000 has a standard error below 0.0012; 0.01 is beyond 5 of the
    difference's (false alarms below 1e-8).
    """
    event = events.cyclic_poisson(0.7, 8, strategy="toeplitz", bands=4, sample_rate=0.5)
    release = releases.cyclic_poisson(event)
    out, into = release(False, 200_000), release(True, 200_000)
    assert float((1 / (1 + np.exp(-out))).mean()) == pytest.approx(float((1 / (1 + np.exp(into))).mean()), abs=0.01)
    found = mechanism(release, Claim.of(event, delta=1e-2), trials=200_000)
    assert found.holds
    assert found.tightness > 0.70  # 0.79 is usual


def test_noise_that_decays() -> None:
    """AdpAlloc's schedule: the releases of four steps, all of which one unit moves, have mu^2 = sum of 1/sigma_t^2."""
    schedule, steps = Decaying(shape="step", period=1, end=0.25), 4
    event = schedule.event(2.0, sampler=Everyone(), size=1, steps=steps)
    sigmas = [schedule.multiplier(2.0, step, steps) for step in range(steps)]
    assert sigmas == pytest.approx([2.0, 2.0 * 0.25 ** (1 / 3), 2.0 * 0.25 ** (2 / 3), 0.5])

    def release(present: bool, trials: int) -> np.ndarray:
        with paid(event) as receipt:
            made = schedule.releases(receipt)
            total = releases.Sum.of(torch.full((trials,), float(present), dtype=torch.float64))
            return np.stack([made(total, {"w": sigma})["w"].numpy() for sigma in sigmas], axis=1)

    claim = Claim.of(event)
    assert claim.mu == pytest.approx(sum(sigma**-2 for sigma in sigmas) ** 0.5, rel=1e-6)
    assert 0.94 < mechanism(release, claim, trials=60_000).tightness <= 1


@pytest.mark.parametrize("make", TWINS, ids=lambda make: make.__name__)
def test_a_broken_twin_is_caught_and_its_right_one_is_not(make: object) -> None:
    twin = make()  # type: ignore[operator]
    small = twin.name == "selection without noise"
    with pytest.raises(PromiseBroken, match="do not hold"):
        mechanism(twin.broken, twin.claim, name=twin.name, trials=2_000 if small else 20_000)
    if twin.right is not None:
        right = mechanism(twin.right, twin.claim, name=twin.name, trials=500 if small else 20_000)
        assert right.holds
        assert right.measured > 0 or small


def test_the_threshold_is_not_chosen_by_peeking() -> None:
    """No difference at all: the best threshold of so many would look like a leak, a fresh one finds nothing."""
    chance = np.random.default_rng(0)
    assert mechanism(lambda _, n: chance.normal(size=n), Claim(mu=0.0), trials=2_000).measured == 0


def test_claims() -> None:
    assert Claim.of(Budget(1.0, 1e-5)) == Claim(epsilon=1.0, delta=1e-5)
    assert str(Claim.of(events.laplace(2.0))) == "epsilon 0.5"
    assert str(Claim(epsilon=1, delta=1e-5)) == "epsilon 1 at delta 1e-05"
    for wrong in ({}, {"mu": -1.0}, {"epsilon": 1.0, "delta": 1.0}, {"epsilon": float("nan")}):
        with pytest.raises(ValueError, match="A claim is"):
            Claim(**wrong)
    with pytest.raises(ValueError, match="at least 100"):
        mechanism(lambda _, n: np.zeros(n), Claim(mu=1.0), trials=10)


def test_a_sentence_for_a_card() -> None:
    found = mechanism(releases.gaussian(1.0), Claim.of(events.gaussian(1.0)), name="gaussian", trials=5_000)
    assert sentence([found]).startswith("Attacked 1 kinds of release in 10,000 trials: found at most ")
    assert sentence([found]).endswith("No claim was contradicted.")
    assert sentence([]) == "Not attacked."
