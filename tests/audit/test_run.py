"""One run with canaries: it finds something, never more than is promised, and catches a run without its noise."""

import math

import pytest
import torch
from torch import Tensor, nn

from tacit import adapt, tune
from tacit.audit import Claim, PromiseBroken, canaries, run, stages
from tacit.audit._run import as_mu
from tacit.finetune import DPGD, DPSGD, plan
from tacit.privacy import Budget, epsilon_of, events, guarantee, mu_of


def planted(mu: float) -> object:
    return lambda included: included * mu + torch.randn(len(included), generator=torch.Generator().manual_seed(0))


def test_a_run_that_is_as_good_as_its_word_passes_and_a_better_attack_does_not() -> None:
    found = run(planted(2.0), 2_000, Claim(mu=2.0))  # type: ignore[arg-type]
    assert 0 < found.measured < 2.0
    with pytest.raises(PromiseBroken):
        run(planted(6.0), 2_000, Claim(mu=0.5))  # type: ignore[arg-type]


def test_a_mere_epsilon_uses_the_theorem_that_needs_no_more() -> None:
    found = run(planted(2.0), 2_000, Budget(3.0, 1e-15), strict=False)  # type: ignore[arg-type]
    assert found.measure == "epsilon"
    assert 0 < found.measured < epsilon_of(2.0, 1e-15)


def test_a_sampled_plan_as_a_mu() -> None:
    """Its Gaussian promises no more at any delta that is looked at; of a tree of Gaussians it is exact."""
    event = events.poisson(0.2, events.gaussian(1.0), 5)
    mu = as_mu(event).value
    for delta in (1e-2, 1e-5, 1e-8):
        assert epsilon_of(mu, delta) >= guarantee(event, delta=delta).epsilon * (1 - 1e-6)
    assert as_mu(events.gaussian(2.0, 4)).value == pytest.approx(1.0)


@pytest.mark.parametrize(
    "optimizer", [DPGD(steps=3, lr=0.1), DPSGD(batch_size=50, steps=4, lr=0.1)], ids=lambda o: o.name
)
def test_fit(optimizer: object) -> None:
    event = plan(optimizer, epsilon=20.0, delta=1e-5, size=200)  # type: ignore[arg-type]
    train = stages.finetuning(optimizer, canaries=400, epsilon=20.0)  # type: ignore[arg-type]
    found = run(train, 400, event)
    assert found.holds  # how much one run shows varies: only a false alarm is excluded (1e-8)


def test_fit_without_its_noise_is_caught() -> None:
    optimizer = DPGD(steps=3, lr=0.1)
    train = stages.finetuning(optimizer, canaries=400, epsilon=math.inf)
    with pytest.raises(PromiseBroken):
        run(train, 400, Claim(mu=mu_of(1.0, 1e-5)))


MODEL = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 5))


@pytest.mark.parametrize("make", [adapt.Tent, adapt.SAR])
def test_adaptation(make: object) -> None:
    form = adapt.DP(30.0, 1e-5, clip=1e-3, neighbours="zero-out")
    rows = canaries.images(150, (1, 4, 4)).rows
    found = run(
        stages.adaptation(make, MODEL, rows, privacy=form),  # type: ignore[arg-type]
        150,
        form.event(form.noise_multiplier()),
        neighbours="zero-out",
    )
    assert found.holds


def test_a_whole_search() -> None:
    budget = Budget(30.0, 1e-5)
    found = run(stages.search(tune.random_search, canaries=300, budget=budget), 300, Claim(mu=budget.mu))
    assert found.holds  # how much one run shows varies: only a false alarm is excluded (1e-8)


def test_any_loop_and_its_losses() -> None:
    """A loop of one's own that learns images by heart is caught at any claim."""

    def by_heart(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data[0]), data[1]).backward()
            optimizer.step()

    made_up = canaries.images(200, (1, 8, 8), classes=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
    public = canaries.images(20, (1, 8, 8), classes=4, seed=1)
    train = stages.finetuning_rows(model, made_up, (public.rows, public.labels), by_heart)
    with pytest.raises(PromiseBroken):
        run(train, 200, Claim(mu=0.1))


def test_generators() -> None:
    moving = canaries.videos(3, (3, 4, 6, 6)).rows
    assert moving.shape == (3, 3, 4, 6, 6)
    assert torch.equal(moving[:, :, 1], moving[:, :, 0].roll(1, -1))
    words = canaries.texts(5, 7, vocabulary=11)
    assert words.rows["input_ids"].shape == (5, 7)
    assert int(words.rows["input_ids"].max()) < 11
    rows, labels = words.chosen(torch.tensor([True, False, True, False, False]))
    assert (len(rows["input_ids"]), len(labels)) == (2, 2)
    model, made_up = canaries.gradient_directions(6)
    loss = nn.functional.cross_entropy(model(made_up.rows[2:3]), made_up.labels[2:3])
    (gradient,) = torch.autograd.grad(loss, list(model.parameters()))
    assert torch.equal(gradient.abs().sum(0) > 0, torch.arange(6) == 2)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="one score per canary"):
        run(lambda included: included[:3].double(), 20, Claim(mu=1.0))
    with pytest.raises(ValueError, match="at least 10"):
        run(lambda included: included.double(), 2, Claim(mu=1.0))
