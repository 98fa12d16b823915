"""HyFreeDP: the parabola, one joint release, sensitivity by brute force, a run by hand, and an interrupted run."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SEED, drawn, flat, gap, key, net, one_row_units, people, released, same_bits, shaped, weights
from dp_accounting import dp_event, pld
from interrupted import whole_and_interrupted
from torch import Tensor, nn
from torch.nn import functional

from tacit.data._records import Rows
from tacit.finetune import HyFreeDP, fit
from tacit.finetune._loss_probes import LossProbes, ProbingAsker, way
from tacit.gradients import AdaptiveQuantile, Automatic, PerLayer
from tacit.privacy import accounting

OPTIONS: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep"}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def query(model: nn.Module | None = None, **options: Any) -> ProbingAsker:
    found = LossProbes(**options).open(model or net(), loss, expected=24.0, microbatch=None)
    assert isinstance(found, ProbingAsker)
    return found


@pytest.mark.parametrize("best", [0.6, 1.0, 1.7])
def test_without_noise_the_way_ends_at_the_vertex(best: float) -> None:
    height = lambda s: 3.0 * (s - best) ** 2 - 3.0 * (1 - best) ** 2  # noqa: E731
    assert way(height(0.0), height(2.0), 0.0) == pytest.approx(best, rel=1e-12)


def test_a_way_is_halved_or_doubled_at_most_and_grows_while_nothing_is_seen() -> None:
    assert way(-1.0, 3.0, 0.0) == 0.5  # uphill, and bent: the vertex lies behind
    assert way(1.0, -1.0, 0.0) == 2.0  # straight down
    assert way(-1.0, 1.0, 0.0) == 0.5  # straight up
    assert way(0.01, -0.01, 0.02) == pytest.approx(math.sqrt(2))
    assert way(0.0, 0.0, 0.0) == pytest.approx(math.sqrt(2))
    assert 0.5 <= way(0.1, 0.0, 0.02) <= 2.0


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("z", [0.4, 7.0])
def test_gradient_and_losses_together_are_what_was_charged(z: float, share: float) -> None:
    asked = query(share=share, loss_clip=0.3, clip=0.7)
    split = asked.split(z)
    assert split is not None
    bounds = asked.zero_sum().bounds
    assert bounds == {"gradient": 0.7, "losses": pytest.approx(0.3 * math.sqrt(2))}
    # the distance of neighbours in standard deviations: each block's bound over its own noise
    distance = math.hypot(*(bounds[block] / (split[block] * bounds[block]) for block in bounds))
    assert distance == pytest.approx(1 / z, rel=1e-12)


def test_epsilon_is_that_of_one_sampled_gaussian_per_step() -> None:
    """Derived with dp_accounting alone: 100 steps at rate 0.05, whose two blocks are one Gaussian."""
    optimizer = HyFreeDP(batch_size=50, steps=100, share=0.2)
    event = optimizer.event(1.1, 1000)
    split = LossProbes(share=0.2).open(net(), loss, expected=50.0, microbatch=None).split(1.1)
    assert split is not None
    joint = math.hypot(*(1 / multiplier for multiplier in split.values()))
    accountant = pld.PLDAccountant()
    step = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(1 / joint))
    accountant.compose(dp_event.SelfComposedDpEvent(step, 100))
    assert accounting.guarantee(event, delta=1e-5).epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    apart = pld.PLDAccountant()  # what two sampled events would claim is less: the draw is the same
    for multiplier in split.values():
        one = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(multiplier))
        apart.compose(dp_event.SelfComposedDpEvent(one, 100))
    assert apart.get_epsilon(1e-5) < accountant.get_epsilon(1e-5)


def test_full_batches_are_plain_gaussians() -> None:
    event = HyFreeDP(steps=49).event(7.0, 1000)
    assert accounting.guarantee(event, delta=1e-5).mu == pytest.approx(1.0, rel=1e-9)


def probing(**options: Any) -> tuple[ProbingAsker, nn.Module]:
    """An asker at its first probe, after a long way."""
    model = net()
    asked = query(model, every=1, clip=0.5, **options)
    asked.gradient(asked.zero_sum().sum)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(5), dtype=p.dtype))
    return asked, model


@pytest.mark.parametrize("size", [1.0, 30.0, 1e6, math.inf, math.nan])
def test_one_unit_moves_each_block_by_its_bound_at_most(size: float) -> None:
    inputs, labels = people()
    inputs = inputs.clone()
    inputs[7] *= size
    asked, _ = probing(loss_clip=0.2)
    whole = asked.sum(Rows(inputs, labels, torch.arange(24)))
    others = torch.arange(24) != 7
    without = asked.sum(Rows(inputs[others], labels[others], torch.arange(23)))
    for block, names in whole.blocks.items():
        moved = math.sqrt(sum(float((whole.sum[n] - without.sum[n]).square().sum()) for n in names))
        assert moved <= whole.bounds[block] * (1 + 1e-12)
    far = whole.sum["losses"] - without.sum["losses"]
    if size == 30.0:  # so far that both differences are cut
        assert far.abs().tolist() == pytest.approx([0.2, 0.2], rel=1e-8)
    if not math.isfinite(size):
        assert far.tolist() == [0.0, 0.0]


def test_a_units_rows_are_averaged_and_a_muted_row_silences_its_unit() -> None:
    inputs, labels = people()
    asked, model = probing(loss_clip=50.0)
    owner = torch.arange(24) // 3
    found = asked.sum(Rows(inputs, labels, owner)).sum["losses"]
    here = loss(model, (inputs, labels)).detach()
    behind = loss(net(), (inputs, labels)).detach()
    assert found[0].item() == pytest.approx(float((behind - here).sum() / 3), rel=1e-6)
    mute = torch.zeros(24, dtype=torch.bool)
    mute[4] = True
    fewer = asked.sum(Rows(inputs, labels, owner), mute).sum["losses"]
    assert (found - fewer)[0].item() == pytest.approx(float((behind - here)[3:6].mean()), rel=1e-6)


def test_the_model_is_as_it_was() -> None:
    asked, model = probing()
    before = weights(model)
    asked.sum(Rows(*people(), torch.arange(24)))
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


def test_a_run_by_hand() -> None:
    data, steps, batch, clip, cut, share, every = people(), 7, 8, 0.6, 0.1, 0.3, 3
    model = net()
    optimizer = HyFreeDP(
        batch_size=batch, steps=steps, clip=clip, loss_clip=cut, share=share, every=every, lr=0.3, momentum=0
    )
    fitted = fit(model, data, optimizer=optimizer, seed=SEED, **OPTIONS)
    z = fitted.noise_multiplier
    other, units, factor = net(), one_row_units(*data), 1.0
    anchor: dict[str, Tensor] = {}
    for t in range(steps):
        chosen = [units[i] for i in drawn(t, len(units), batch / 20)]
        probe = t % every == 0
        total = clipped(other, chosen, clip)
        noise = key().normals(t, 43 + 2 * probe)
        noisy = shaped(released(flat(total), noise[:43], z / math.sqrt(1 - share) if probe else z, clip), total)
        if probe:
            differences = torch.zeros(2, dtype=torch.float64)
            for unit in chosen if anchor else []:
                here, start, ahead = (lost(other, unit, anchor, times) for times in (0, -1, 1))
                differences += torch.tensor([start - here, ahead - here]).clamp(-cut, cut)
            bound, multiplier = cut * math.sqrt(2), z / math.sqrt(share)
            behind, before = (released(differences, noise[43:], multiplier, bound) / batch).tolist()
            if anchor:
                factor *= way(behind, before, multiplier * bound / batch)
            anchor = {name: p.detach().clone() for name, p in other.named_parameters()}
        for name, p in other.named_parameters():
            p.data -= factor * 0.3 * noisy[name] / batch
    assert factor != 1.0
    assert gap(weights(model), weights(other)) < 1e-7


def clipped(model: nn.Module, units: list[tuple[Tensor, Tensor]], clip: float) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for inputs, labels in units:
        gradient = torch.autograd.grad(functional.cross_entropy(model(inputs), labels), list(model.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
        for name, g in zip(total, gradient, strict=True):
            total[name] += g * min(1.0, clip * (1 - 1e-5) / norm)
    return total


def lost(model: nn.Module, unit: tuple[Tensor, Tensor], anchor: dict[str, Tensor], times: float) -> float:
    values = {name: p + times * (p - anchor[name]) for name, p in model.named_parameters()}
    return functional.cross_entropy(torch.func.functional_call(model, values, (unit[0],)), unit[1]).item()


def test_a_bad_first_rate_is_mended() -> None:
    """Without noise and from a rate a thousand times too small or too large, the loss comes down all the same."""
    inputs, labels = people(200)
    labels = (inputs[:, 0] > 0).long()
    for lr in (1e-3, 100.0):
        model = net()
        optimizer = HyFreeDP(steps=80, every=2, lr=lr, momentum=0, loss_clip=2.0)
        fit(model, (inputs, labels), optimizer=optimizer, **(OPTIONS | {"size": 200, "epsilon": math.inf}))
        assert float(loss(model, (inputs, labels)).detach().mean()) < 0.2


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="one clip for the whole gradient"):
        HyFreeDP(batch_size=8, steps=4, clip=PerLayer({"0": 1.0, "2": 1.0}))
    with pytest.raises(ValueError, match="use AdpClip"):
        HyFreeDP(batch_size=8, steps=4, clip=AdaptiveQuantile(1.0))
    with pytest.raises(ValueError, match="share between 0 and 1"):
        HyFreeDP(batch_size=8, steps=4, share=1.0)
    assert isinstance(HyFreeDP(batch_size=8, steps=4).query.clip, Automatic)  # type: ignore[attr-defined]


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    optimizer = HyFreeDP(batch_size=8, steps=6, every=2, lr=0.3)
    whole, parts = whole_and_interrupted(tmp_path, optimizer, at=3)
    assert same_bits(whole, parts)
    assert not same_bits(whole, net())


def test_a_loss_clip_in_few_bits_is_a_plain_number() -> None:
    asked, _ = probing(loss_clip=np.float16(0.3), share=np.float16(0.05))
    bound = asked.zero_sum().bounds["losses"]
    assert type(bound) is float
    assert bound == float(np.float16(0.3)) * math.sqrt(2)  # in 16 bits 0.01% less
    split = asked.split(1.1)
    assert split is not None
    assert math.hypot(*(1 / multiplier for multiplier in split.values())) <= 1 / 1.1 * (1 + 1e-12)
