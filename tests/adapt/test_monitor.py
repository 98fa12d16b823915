"""What is watched of a stream, what it costs, when it warns; and the rate that needs no tuning."""

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from obvious import images, net, sigma_of
from torch import nn

from tacit._guard_rails import GuardRailWarning
from tacit.adapt import DP, EATA, SAR, Adapter, Clip, Monitor, RedundancyFilter, Tent, Watch, entropy
from tacit.adapt._default_rate import DRIFT, STRAIN, growth, rate_for, strain_of_noise
from tacit.adapt._monitor import ENTROPY, PREDICTION, watched_rows
from tacit.adapt._side_blocks import split
from tacit.adapt._strain import Strain, strain
from tacit.privacy import Budget, Ledger
from tacit.privacy.correlated import buffered, independent

ROWS, CLIP = 6, 0.3


def watched(form: Any, make: Any = Tent, model: nn.Module | None = None, **more: Any) -> Adapter:
    options: dict[str, Any] = {
        "batch_size": ROWS,
        "lr": 0.01,
        "monitor": True,
        "ledger": Ledger("sqlite://"),
        "seed": 5,
    }
    return make(model or net(), privacy=form, **options | more)


def test_without_noise_it_is_the_mean_entropy_and_the_mean_prediction() -> None:
    adapter = watched(DP(math.inf, clip=CLIP))
    means, shapes = [], []
    for step in range(3):
        logits = adapter(images(ROWS, seed=step))
        means.append(float(entropy(logits).mean()) / math.log(5))
        shapes.append(logits.softmax(1).mean(0))
    wanted, shape = means[0], shapes[0]
    for mean, each in zip(means[1:], shapes[1:], strict=True):
        wanted, shape = 0.9 * wanted + 0.1 * mean, 0.9 * shape + 0.1 * each
    assert adapter.watch.entropy[-1] == pytest.approx(wanted, rel=1e-4)
    assert adapter.watch.prediction is not None
    torch.testing.assert_close(adapter.watch.prediction, shape, rtol=1e-3, atol=1e-4)


def test_the_gradient_loses_less_than_two_per_cent_and_the_price_stays() -> None:
    form = DP(4.0, 1e-6, clip=CLIP)
    paid = form.noise_multiplier()
    bounds = {"gradient": CLIP, ENTROPY: 0.5, PREDICTION: 1.0}
    noise = split(paid, bounds, Monitor().shares, CLIP, ROWS)
    assert noise is not None
    assert 1 < noise["gradient"] / paid < 1.02
    mu = math.sqrt(sum((2 / each) ** 2 for each in noise.values()))
    assert mu == pytest.approx(Budget(4.0, 1e-6).mu, rel=1e-9)
    adapter = watched(form)
    adapter(images(ROWS))
    assert adapter.guarantee is not None
    assert adapter.guarantee.epsilon == pytest.approx(4.0, rel=1e-6)


def test_noise_of_the_watched_numbers_is_that_of_their_share() -> None:
    """Rows that are not numbers add nothing: what is left is noise. 200 steps; 6 standard errors."""
    adapter = watched(DP(5.0, 1e-6, clip=CLIP), lr=1e-9, monitor=Monitor(rate=1.0))
    found, shapes = [], []
    for _ in range(200):
        adapter(images(ROWS) * math.nan)
        found.append((adapter.watch.entropy[-1] - 0.5) * ROWS)
        shapes.append((adapter.watch.prediction - 0.2) * ROWS)  # type: ignore[operator]
    wanted = sigma_of(5.0, 1e-6) / math.sqrt(0.019)
    assert np.std(found) == pytest.approx(0.5 * wanted, rel=6 / math.sqrt(400))
    assert torch.cat(shapes).std().item() == pytest.approx(wanted, rel=6 / math.sqrt(2000))
    assert adapter.watch.entropy_noise[-1] * ROWS == pytest.approx(0.5 * wanted, rel=1e-6)


def test_a_row_adds_no_more_than_its_bounds() -> None:
    extreme = torch.tensor([[1e4, 0.0, 0.0], [0.0, 0.0, 0.0], [-1e30, 1e30, 0.0], [5.0, 1.0, -3.0]])
    for values, bound in watched_rows(extreme).values():
        assert bool((values.norm(dim=1) <= bound).all())


def test_a_careless_rate_is_spoken_of_and_the_default_is_not_careless() -> None:
    """With epsilon 1 in a batch of six, noise carries the model away within a few steps."""
    with pytest.warns(GuardRailWarning, match="noise alone will carry the model away"):  # before anything is charged
        careless = watched(DP(1.0, clip=CLIP), lr=0.5, monitor=False)
    assert careless.stream is not None
    assert careless.stream.receipt is None
    with pytest.warns(UserWarning, match="looks lost: its normalisation layers have moved far"):
        for_twenty(careless)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = watched(DP(1.0, clip=CLIP), lr="auto")
        for_twenty(adapter)
    assert adapter.watch.alarm is None
    assert adapter.watch.strain[-1] < 0.25


def for_twenty(adapter: Adapter) -> None:
    for step in range(20):
        adapter(images(ROWS, seed=step))


@pytest.mark.parametrize("action", ["reset", "shrink"])
def test_an_alarm_can_bring_the_model_back(action: Any) -> None:
    adapter = watched(DP(1.0, clip=CLIP), lr=0.5, monitor=Monitor(on_alarm=action))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        while not any("looks lost" in str(each.message) for each in said) and adapter.steps < 30:
            adapter(images(ROWS, seed=adapter.steps))
    far = adapter.watch.strain[-1] if adapter.watch.strain else 0.0
    gone = strain(dict(adapter.parameters), adapter.origin)
    if action == "reset":
        assert gone == 0
        assert adapter.watch.strain == []
    else:
        assert far > 2.5
        assert gone == pytest.approx(far / 2, rel=1e-6)


def test_the_strain_of_every_step_is_that_of_all_parameters_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5,), "a.bias": (5,), "b.weight": (3, 4), "c.weight": (200, 200), "d.weight": (7,)}
    origin = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    origin["d.weight"] = origin["d.weight"].bfloat16()
    values = {
        name: nn.Parameter(value.float() + torch.randn(value.shape, generator=generator))
        for name, value in origin.items()
    }
    values["a.bias"] = nn.Parameter(values["a.bias"].detach().double())
    measure = Strain(values, origin)
    for _ in range(2):
        assert measure() == pytest.approx(strain(values, origin), rel=1e-12)
        with torch.no_grad():
            values["b.weight"] += 1
        values["c.weight"].data = values["c.weight"].data + 1  # another memory
    with torch.no_grad():
        for name, value in values.items():
            value.copy_(origin[name])
    assert measure() == 0


def test_alarms_by_what_was_released() -> None:
    sure = Watch(entropy=[0.01], entropy_noise=[0.001])
    assert "certain of everything" in str(sure.look(0.029))
    assert Watch(entropy=[0.01], entropy_noise=[0.01]).look(0.029) is None  # it may be noise
    even, one = torch.tensor([0.5, 0.5]), torch.tensor([0.99, 0.01])
    assert "one class" in str(Watch(prediction=one, prediction_noise=0.01, first=even, first_noise=0.01).look(0.029))
    assert Watch(prediction=one, prediction_noise=0.03, first=even, first_noise=0.03).look(0.029) is None
    assert Watch(prediction=one, prediction_noise=0.0, first=one).look(0.029) is None  # as the stream began


def test_sar_resets_and_eata_filters_by_released_values() -> None:
    sar = watched(DP(math.inf, clip=CLIP), SAR, recovery=5.0)  # any model is too certain for this threshold
    sar(images(ROWS))
    assert all(p.equal(sar.origin[name]) for name, p in sar.parameters.items())
    eata = watched(DP(math.inf, clip=CLIP, filters="per-sample"), EATA, margin=2.0, similarity=0.01)
    eata(images(ROWS))
    assert eata.memory.mean_probs is not None
    moved = {name: p.detach().clone() for name, p in eata.parameters.items()}
    eata.optimizer.state.clear()
    eata(images(ROWS, seed=2))  # all of them are like the mean by more than 0.01: nobody passes
    assert all(p.equal(moved[name]) for name, p in eata.parameters.items())
    noisy = watched(DP(1.0, clip=CLIP, filters="per-sample"), EATA)
    noisy(images(ROWS))
    assert noisy.memory.mean_probs is None  # too much noise to compare with
    assert not any(isinstance(each, RedundancyFilter) for each in noisy._step.filters)  # type: ignore[attr-defined]


def test_growth_of_noise_by_the_loop() -> None:
    """The variance of a parameter after n steps, from the covariance of the noise and momentum's recursion."""
    steps, momentum = 30, 0.8
    for strategy in (independent(steps), buffered(steps)):
        mixing = np.zeros((steps, steps))
        for column in range(steps):
            mixing[column:, column] = strategy.inverse()[: steps - column]
        velocity, position = np.zeros(steps), np.zeros(steps)
        for row in mixing:
            velocity = momentum * velocity + row
            position = position + velocity
        wanted = strategy.sensitivity() * np.linalg.norm(position)
        assert growth(strategy, momentum) == pytest.approx(wanted, rel=1e-9)


def test_the_default_rate_keeps_its_two_promises() -> None:
    origin = {"a.weight": torch.ones(50), "a.bias": torch.zeros(50), "b.weight": 2 * torch.ones(25)}
    norm, layers, numbers = math.sqrt(150), 2, 125
    common: dict[str, Any] = {"batch_size": 8, "momentum": 0.9, "optimizer": "sgd"}
    calm = rate_for(Clip(0.5), origin, noise=0.0, **common)
    assert layers * calm * 0.5 / 0.1 / norm == pytest.approx(DRIFT)
    form = DP(1.0, clip=0.5, noise="independent", horizon=64)
    rate = rate_for(form, origin, noise=8.0, **common)
    noise = 8.0 * 0.5 / 8 * math.sqrt(numbers) * growth(independent(64), 0.9)
    assert layers * rate * noise / norm == pytest.approx(STRAIN)
    assert rate < calm
    told: dict[str, Any] = {"batch_size": 8, "momentum": 0.9, "noise": 8.0}
    assert strain_of_noise(form, origin, lr=3 * rate, **told) == pytest.approx(3 * STRAIN)
    twice = replace(form, contributions=2)
    assert strain_of_noise(twice, origin, lr=rate, **told) == pytest.approx(math.sqrt(2) * STRAIN)
    assert rate_for(twice, origin, noise=8.0, **common) == pytest.approx(rate / math.sqrt(2))
    correlated = rate_for(DP(1.0, clip=0.5, noise="correlated", horizon=64), origin, noise=8.0, **common)
    assert rate < correlated <= calm
    assert rate_for(None, origin, noise=0.0, **common) == 0.005


def test_only_forms_with_sums_can_be_watched() -> None:
    with pytest.raises(ValueError, match="goes with DP"):
        Tent(net(), monitor=True)
    with pytest.raises(ValueError, match="on_alarm is"):
        Monitor(on_alarm="stop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr must be positive"):
        Tent(net(), lr="fast")  # type: ignore[arg-type]
