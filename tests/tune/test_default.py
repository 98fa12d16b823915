"""The default without search, a search that starts there, and searches that know when they are blind."""

from __future__ import annotations

import math

import pytest
import torch
from made_up import Hill, half, works
from torch import Tensor, nn

from tacit import finetune, tune
from tacit.finetune import DPGD, DPSGD
from tacit.privacy import Budget, Ledger, Neighbours, Receipt, mu_of
from tacit.privacy.events import from_json, gaussian_noise
from tacit.tune._significance import blind, significant_difference

BOX = tune.Space(lr=(0.01, 10.0), steps=(1, 50))
ONE = Budget(1.0, 1e-5)


def rows(count: int = 600, width: int = 8, classes: int = 3) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, width, generator=made)
    return 0.05 * inputs, (inputs @ torch.randn(width, classes, generator=made)).argmax(1)


def probe(**more: object) -> tune.Finetuning:
    return tune.Finetuning(nn.Linear(8, 3), rows(), classes=3, size=600, **more)  # type: ignore[arg-type]


def spent(ledger: Ledger, subject: str) -> float:
    bodies = [entry.body for entry in ledger.entries(subject) if entry.kind == "charge"]
    noises = [gaussian_noise(from_json(body["event"])) for body in bodies]
    return math.sqrt(sum(z**-2 for z in noises if z is not None))


class Known(Hill):
    """A hill whose top is known, up to a factor; below its scores are steep or flat."""

    off: float = 1.0

    def default(self, mu: float) -> tune.Hyperparameters:
        from tacit.privacy import epsilon_of

        best = self.slope * epsilon_of(mu, self.delta) + self.offset
        return tune.Hyperparameters(lr=self.off * best / 10, steps=10)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_the_rule_is_what_it_says(epsilon: float) -> None:
    """Recomputed: r = 2 (mu n)^0.7, sqrt(r) steps from 5 to 80."""
    r = 2 * (mu_of(epsilon, 1e-5) * 8000) ** 0.7
    found = tune.suggest(Budget(epsilon, 1e-5), size=8000, features=192, classes=10)
    assert found.steps == min(80, max(5, round(r**0.5)))
    assert found.r == pytest.approx(r, rel=1e-12)


def test_the_rule_refuses_what_it_knows_nothing_of() -> None:
    for budget in (Budget(math.inf, 1e-5), Budget(1.0, 0.0)):
        with pytest.raises(ValueError, match="finite epsilon and a delta above 0"):
            tune.suggest(budget, size=100, features=3, classes=2)
    with pytest.raises(ValueError, match="size"):
        tune.suggest(ONE, size=0, features=3, classes=2)


def test_a_probe_knows_its_default_and_others_do_not() -> None:
    expected = tune.suggest(ONE, size=600, features=8, classes=3)
    found = probe().default(ONE.mu)
    assert found is not None
    assert (found.steps, found.lr) == (expected.steps, pytest.approx(expected.lr, rel=1e-6))
    assert probe(standardise=None).default(ONE.mu) is None
    assert probe(scheme="full").default(ONE.mu) is None
    assert probe(optimizer=lambda p: DPGD(lr=p.lr, steps=p.steps, momentum=0.0)).default(ONE.mu) is None


def test_small_features_are_worth_what_large_ones_are() -> None:
    """Rows of norm 1 whatever they were: the same noise, the same model outside, at a hundredth of the size."""
    inputs, labels = rows()
    large = tune.Finetuning(nn.Linear(8, 3), (100 * inputs, labels), classes=3, size=600)
    models = []
    for trainable, seen in ((probe(), inputs), (large, 100 * inputs)):
        ledger = Ledger("sqlite://")
        found = tune.train(
            trainable, tune.suggest(ONE, size=600, features=8, classes=3), ONE, ledger=ledger, subject="s", seed=1
        )
        models.append(found.model(seen))
    torch.testing.assert_close(models[0], models[1], rtol=1e-3, atol=1e-3)


def test_a_released_centre_is_charged_once_and_taken_off() -> None:
    inputs, labels = rows()
    shifted = inputs + 0.2
    ledger = Ledger("sqlite://")
    ledger.subject("people", Budget(3.0, 1e-5))
    plain = tune.Finetuning(nn.Linear(8, 3), (shifted, labels), classes=3, size=600)
    centred = plain.centred(finetune.Standardise(noise=5.0, bound=1.0), ledger=ledger, subject="people", seed=3)
    assert spent(ledger, "people") == pytest.approx(1 / 5.0)
    with pytest.raises(ValueError, match="released once"):
        centred.centred(finetune.Standardise(noise=5.0, bound=1.0), ledger=ledger, subject="people")
    found = tune.train(centred, tune.Hyperparameters(lr=4.0, steps=8), ONE, ledger=ledger, subject="people", seed=2)
    head = [part for part in found.model.modules() if isinstance(part, nn.Linear)][-1]
    centre = next(value for name, value in found.model.state_dict().items() if name.endswith("centre"))
    unit = shifted / shifted.norm(dim=1, keepdim=True)
    assert float((centre - unit.mean(0)).norm()) < 0.15  # noise of 5 / 600 in each of eight numbers
    moved = unit - centre
    expected = (moved / moved.norm(dim=1, keepdim=True)) @ head.weight.T + head.bias
    torch.testing.assert_close(found.model(shifted), expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_used_is_not_searched() -> None:
    with pytest.raises(ValueError, match=r"does not use batch_size.*everybody in every step"):
        tune.random_search(
            probe(),
            tune.Space(lr=(0.1, 1.0), steps=(2, 5), batch_size=(10, 100)),
            ONE,
            ledger=Ledger("sqlite://"),
            subject="s",
        )
    sampled = probe(optimizer=lambda p: DPSGD(lr=p.lr, steps=p.steps, batch_size=p.batch_size or 50))
    sampled.check_space(tune.Space(lr=(0.1, 1.0), steps=(2, 5), batch_size=(10, 100)))
    probe().check_space(tune.Space(lr=(0.1, 1.0), steps=(2, 5), clip=(0.1, 1.0)))


def test_noise_alone_is_seldom_taken_for_a_difference() -> None:
    """Three scores of the same model: their range passes three deviations of a difference with about 0.8%."""
    generator = torch.Generator().manual_seed(0)
    point, noise = tune.Hyperparameters(lr=1.0, steps=1), 0.02
    false_alarms = 0
    for _ in range(1000):
        scores = (0.5 + noise * torch.randn(3, generator=generator, dtype=torch.float64)).tolist()
        trials = [tune.Trial(hyperparameters=point, mu=0.1, score=score, score_noise=noise) for score in scores]
        false_alarms += blind(trials, "sweep 1") is None
    assert false_alarms < 35
    assert significant_difference(0.02) == pytest.approx(3 * math.sqrt(2) * 0.02)


def test_a_blind_search_says_so_and_uses_the_default_with_all_that_is_left() -> None:
    ledger = Ledger("sqlite://")
    known = tune.Hyperparameters(lr=0.5, steps=7)
    found = tune.linear_scaling(
        works, BOX, ONE, ledger=ledger, subject="people", score=half, size=1000, default=known, draw_seed=0
    )
    assert found.hyperparameters == known
    assert len(found.trials) == 3  # the second sweep was not run
    assert "do not tell its trials apart" in found.decisions[0]
    assert "default is used" in found.decisions[1]
    assert spent(ledger, "people") <= ONE.mu
    assert spent(ledger, "people") == pytest.approx(ONE.mu, rel=1e-6)
    assert all("± " in str(trial) for trial in found.trials)


def test_a_search_that_can_tell_does_not_use_the_default() -> None:
    found = tune.linear_scaling(
        Hill(size=20_000),
        BOX,
        ONE,
        ledger=Ledger("sqlite://"),
        subject="people",
        default=tune.Hyperparameters(lr=0.01, steps=1),
        draw_seed=1,
    )
    assert len(found.trials) == 6
    assert not any("default" in said for said in found.decisions)


def test_without_a_default_a_blind_search_goes_on_and_says_so() -> None:
    found = tune.linear_scaling(works, BOX, ONE, ledger=Ledger("sqlite://"), subject="people", score=half, size=1000)
    assert len(found.trials) == 6
    assert sum("do not tell" in said for said in found.decisions) == 2


def test_the_papers_form_draws_r_evenly_and_then_above_the_winner() -> None:
    low, high = BOX.ends
    firsts: list[float] = []
    for seed in range(8):
        found = tune.linear_scaling(
            Hill(size=20_000), BOX, ONE, ledger=Ledger("sqlite://"), subject="p", draw="paper", draw_seed=seed
        )
        first, second = found.trials[:3], found.trials[3:]
        firsts += [trial.hyperparameters.r for trial in first]
        winner = max(first, key=lambda trial: trial.score or 0.0).hyperparameters.r
        assert all(trial.hyperparameters.r >= winner * 0.94 for trial in second)  # whole steps
    # uniform on a line: the mean of 24 is within 5 deviations (chance below 1e-6) of the middle
    middle, deviation = (low + high) / 2, (high - low) / math.sqrt(12 * 24)
    assert abs(sum(firsts) / 24 - middle) < 5 * deviation


@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_a_search_from_the_default_keeps_its_total(neighbours: Neighbours) -> None:
    ledger, hill = Ledger("sqlite://"), Known(size=20_000)
    hill.off = 0.25
    found = tune.default_search(hill, ONE, ledger=ledger, subject="people", neighbours=neighbours)
    assert spent(ledger, "people") * neighbours.factor == pytest.approx(ONE.mu, rel=1e-6)
    assert found.guarantee.epsilon <= 1.0
    assert len(found.trials) == 3
    assert "4 times the default's learning rate" in found.decisions[0]
    final, mu = hill.seen[-1]
    assert final == found.hyperparameters
    start = hill.default(mu)
    assert final.lr == pytest.approx(4 * start.lr)


def test_a_good_default_is_kept_and_a_blind_search_is_not_paid_for() -> None:
    found = tune.default_search(Known(size=20_000), ONE, ledger=Ledger("sqlite://"), subject="people")
    assert "the default is used" in found.decisions[0]
    ledger, few = Ledger("sqlite://"), Known(size=300)
    alone = tune.default_search(few, ONE, ledger=ledger, subject="people")
    assert alone.trials == ()
    assert len(few.seen) == 1
    assert "no trial was run" in alone.decisions[0]
    assert spent(ledger, "people") == pytest.approx(ONE.mu, rel=1e-6)


class Drowned(Known):
    """The least learning rate scores best; the default's trial is below a blind guess, or above it."""

    guess: float | None = 0.5
    known: float = 0.5

    def __call__(self, hyperparameters: tune.Hyperparameters, mu: float, receipt: Receipt) -> float:
        super().__call__(hyperparameters, mu, receipt)
        return 0.7 if hyperparameters.lr < 0.99 * self.default(mu).lr else self.known


@pytest.mark.parametrize(
    ("guess", "known", "trials", "factor"),
    [(0.5, 0.49, 1, 1.0), (0.5, 0.52, 3, 0.25), (None, 0.49, 3, 0.25)],
    ids=["no better", "better", "nobody says"],
)
def test_a_default_that_is_no_better_than_a_guess_ends_the_search(
    guess: float | None, known: float, trials: int, factor: float
) -> None:
    """The margins are ten deviations of the noise (0.001) and more; what is not searched is the final run's."""
    drowned, ledger = Drowned(size=20_000), Ledger("sqlite://")
    drowned.guess, drowned.known = guess, known
    found = tune.default_search(drowned, ONE, ledger=ledger, subject="people", precision=0.001)
    assert len(found.trials) == trials
    final, mu = drowned.seen[-1]
    assert final == found.hyperparameters
    assert final.lr == pytest.approx(factor * drowned.default(mu).lr)
    assert ("no better than a blind guess" in found.decisions[0]) is (trials == 1)
    assert spent(ledger, "people") == pytest.approx(ONE.mu, rel=1e-6)
    assert found.guarantee.epsilon <= 1.0


def test_what_a_probe_scores_that_knows_nothing() -> None:
    trainable = probe()
    assert trainable.guess == 0.5
    assert float(trainable.score(trainable._with_head()).mean()) == pytest.approx(0.5, abs=1e-6)  # a head of zeros
    assert probe(measure="accuracy").guess is None


def test_what_a_search_from_the_default_refuses() -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="no default of its own"):
        tune.default_search(works, ONE, ledger=ledger, subject="s", score=half, size=1000)
    sampled = probe(optimizer=lambda p: DPSGD(lr=p.lr, steps=p.steps, batch_size=50))
    with pytest.raises(ValueError, match="subsamples its batches"):
        tune.default_search(sampled, ONE, ledger=ledger, subject="s", default=tune.Hyperparameters(lr=1.0, steps=3))
    with pytest.raises(ValueError, match="factors"):
        tune.default_search(probe(), ONE, ledger=ledger, subject="s", factors=(1.0,))
    assert ledger.get_subject("s") is None
