"""One private step after another against brute force, with the noise re-derived from the seed."""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from obvious import (
    Curious,
    Loss,
    Slow,
    assert_same,
    belief_entropy,
    images,
    net,
    norm_of,
    normals,
    orders_of,
    seeded_key,
    sigma_of,
    slow,
)
from scipy.linalg import toeplitz
from torch import Tensor, nn

from tacit.adapt import COME, DP, EATA, SAR, Adapter, DeYO, Tent, fisher
from tacit.gradients import AdaptiveQuantile
from tacit.privacy import Ledger, Neighbours
from tacit.privacy.correlated import buffered

SEED, DELTA, EPSILON, CLIP, ROWS = 11, 1e-6, 20.0, 0.3, 6
SIGMA = sigma_of(EPSILON, DELTA)
SIZES = (ROWS, ROWS, 4)  # the last batch is not full: the denominator stays
BATCHES = [images(size, seed=20 + i) for i, size in enumerate(SIZES)]


def private(make: Callable[..., Adapter], model: nn.Module, form: DP | None = None, **more: Any) -> Adapter:
    options = {"batch_size": ROWS, "lr": 0.05, "momentum": 0.9, "seed": SEED, "ledger": Ledger("sqlite://"), **more}
    return make(model, privacy=form or DP(EPSILON, DELTA, clip=CLIP), **options)


def noise_at(twin: Slow, release: int, scale: float = SIGMA * CLIP) -> dict[str, Tensor]:
    z, _ = normals(twin.parameters(), seeded_key(SEED), release)
    return {n: scale * value for n, value in z.items()}


CASES: dict[str, tuple[Callable[..., Adapter], dict[str, Any], Loss, float | None]] = {
    "Tent": (Tent, {}, Loss(), None),
    "EATA": (EATA, {}, Loss(margin=0.4), None),
    "SAR": (SAR, {}, Loss(), 0.05),
    "DeYO": (DeYO, {}, Loss(margin=0.4, patches=4), None),
    "COME": (COME, {}, Loss(unsure=belief_entropy), None),
    "EATA-COME": (COME, {"base": "eata"}, Loss(unsure=belief_entropy, margin=0.4), None),
    "SAR-COME": (COME, {"base": "sar"}, Loss(unsure=belief_entropy), 0.05),
    "DeYO-COME": (COME, {"base": "deyo"}, Loss(unsure=belief_entropy, margin=0.4, patches=4), None),
}


@pytest.mark.parametrize("name", CASES)
def test_every_method_against_brute_force(name: str) -> None:
    """Rows in a loop, clipped, added, + noise, / batch size, + pull, SGD with momentum; the last batch is partial."""
    make, options, loss, radius = CASES[name]
    model = net()
    pull = None
    if name.startswith("EATA"):
        anchor = fisher(model, images(5, seed=9), public=True)
        options = {**options, "anchor": anchor}
        pull = lambda n, p: 2 * anchor.importance[n] * (p - anchor.origin[n])  # noqa: E731
    adapter = private(make, model, **options)
    twin = slow(adapter, model, loss, CLIP, radius=radius, pull=pull)
    orders = orders_of(SEED, *SIZES)
    for release, batch in enumerate(BATCHES):
        adapter(batch)
        twin.step(batch, noise_at(twin, release), orders=orders[release])
        assert_same(adapter, twin)


def test_sar_and_deyo_leave_the_last_quarter_alone() -> None:
    kept = {"first.weight", "first.bias", "second.weight", "second.bias", "third.weight", "third.bias"}
    for make in (SAR, DeYO):
        adapter = make(net())
        assert set(adapter.parameters) == kept
        assert {n for n, p in adapter.model.named_parameters() if p.requires_grad} == kept
    assert set(Tent(net()).parameters) == kept | {"fourth.weight", "fourth.bias"}


@pytest.mark.parametrize("name", ["EATA", "SAR", "DeYO", "DeYO-COME"])
def test_per_sample_filters_keep_the_denominator(name: str) -> None:
    """v2: a row that does not pass counts as zero; EATA's filter on the past is not there."""
    make, options, loss, radius = CASES[name]
    margin = 0.75
    if make is not COME:
        options = {**options, "margin": margin}
        loss = Loss(unsure=loss.unsure, margin=margin if make is EATA else loss.margin, patches=loss.patches)
    limit = margin if make is not COME else 0.5

    def passes(model: nn.Module, image: Tensor, order: Tensor | None) -> bool:
        x = model(image[None])[0].detach()
        return bool(loss.unsure(x) < limit * math.log(5)) and (
            loss.patches is None or loss.lost(model, image, order) > 0.2
        )

    model = net()
    adapter = private(make, model, DP(EPSILON, DELTA, clip=CLIP, filters="per-sample"), **options)
    twin = slow(adapter, model, loss, CLIP, radius=radius)
    orders = orders_of(SEED, *SIZES)
    counts = [passes(twin.model, image, orders[0][i]) for i, image in enumerate(BATCHES[0])]
    assert make is COME or 0 < sum(counts) < ROWS
    for release, batch in enumerate(BATCHES):
        adapter(batch)
        twin.step(batch, noise_at(twin, release), orders=orders[release], passes=passes)
        assert_same(adapter, twin)


def test_adaptive_clip_releases_its_count_with_the_gradient() -> None:
    """Two noises that together cost what was charged; the bound moves by the noisy count alone."""
    first, quantile, rate = 0.3, 0.5, 0.2
    model = net()
    adapter = private(Tent, model, DP(EPSILON, DELTA, clip=AdaptiveQuantile(first, quantile, rate)))
    twin = slow(adapter, model, Loss(), first)
    z_count = max(ROWS / 10, 2 * SIGMA)
    z_gradient = (SIGMA**-2 - z_count**-2) ** -0.5
    for release, batch in enumerate(BATCHES):
        gradients = twin.unit_gradients(batch)
        count = sum(0.5 if norm_of(g) <= twin.clip else -0.5 for g in gradients)
        z, last = normals(twin.parameters(), seeded_key(SEED), release, extra=1)
        twin.step(batch, {n: z_gradient * twin.clip * v for n, v in z.items()})
        adapter(batch)
        assert_same(adapter, twin)
        share = (count + z_count * 0.5 * float(last[0])) / ROWS + 0.5
        twin.clip *= math.exp(-rate * (min(max(share, 0), 1) - quantile))
        assert adapter.memory.bound == pytest.approx(twin.clip, rel=2e-5)
    assert adapter.memory.bound != first
    assert z_gradient**-2 + z_count**-2 == pytest.approx(SIGMA**-2)


def correlated_noise(twin: Slow, releases: list[int], strategy_steps: int, scale: float) -> list[dict[str, Tensor]]:
    """scale * C^-1 z for one block, by inverting the matrix."""
    c = buffered(strategy_steps).coefficients()
    inverse = np.linalg.inv(toeplitz(c, np.zeros_like(c)))
    z = [normals(twin.parameters(), seeded_key(SEED), release)[0] for release in releases]
    return [
        {n: scale * sum(inverse[t, s] * z[s][n] for s in range(t + 1)) for n in twin.names}
        for t in range(len(releases))
    ]


def test_correlated_noise_against_the_inverse_matrix() -> None:
    """A horizon of 4, seven steps and a reset: blocks [0..3], [4], then after the reset [5, 6]."""
    horizon = 4
    model = net()
    adapter = private(Tent, model, DP(EPSILON, DELTA, clip=CLIP, noise="correlated", horizon=horizon))
    twin = slow(adapter, model, Loss(), CLIP)
    scale = float(np.linalg.norm(buffered(horizon).coefficients())) * SIGMA * CLIP
    blocks = [[0, 1, 2, 3], [4], [5, 6]]
    noises = [noise for block in blocks for noise in correlated_noise(twin, block, horizon, scale)]
    source = {n: p.detach().clone() for n, p in twin.parameters().items()}
    for release in range(7):
        if release == 5:
            adapter.reset()
            twin.put_back(source)
            twin.velocity.clear()
        batch = images(ROWS, seed=40 + release)
        adapter(batch)
        twin.step(batch, noises[release])
        assert_same(adapter, twin)


def test_correlated_noise_for_people_who_come_twice() -> None:
    """k = 2, b = 2: the scale is the largest norm of two columns, in one block or in two; blocks end at the horizon."""
    horizon, k, b = 4, 2, 2
    c = buffered(horizon).coefficients()
    columns = toeplitz(c, np.zeros_like(c)).T
    together = max(np.linalg.norm(columns[i] + columns[j]) for i, j in combinations(range(horizon), 2) if j - i >= b)
    apart = math.sqrt(2) * np.linalg.norm(columns[0])
    scale = max(together, apart) * SIGMA * CLIP
    model = net()
    form = DP(EPSILON, DELTA, clip=CLIP, noise="correlated", horizon=horizon, contributions=k, separation=b)
    adapter = private(Tent, model, form)
    twin = slow(adapter, model, Loss(), CLIP)
    noises = [noise for block in ([0, 1, 2, 3], [4, 5]) for noise in correlated_noise(twin, block, horizon, scale)]
    for release in range(6):
        batch = images(ROWS, seed=40 + release)
        adapter(batch)
        twin.step(batch, noises[release])
        assert_same(adapter, twin)


def test_units_are_averaged_then_clipped() -> None:
    model = net()
    adapter = private(Tent, model)
    twin = slow(adapter, model, Loss(), CLIP)
    labels = [[30, 10, 30, 20, 10, 10], [7, 7, 7, 7, 7, 7], [-1, 5, 900, 5]]
    for release, (batch, units) in enumerate(zip(BATCHES, labels, strict=True)):
        adapter(batch, unit_ids=torch.tensor(units))
        twin.step(batch, noise_at(twin, release), units=units)
        assert_same(adapter, twin)


@pytest.mark.parametrize(("make", "microbatch"), [(DeYO, 1), (DeYO, 2), (SAR, 2), (SAR, 4)])
def test_microbatches_change_nothing(make: Callable[..., Adapter], microbatch: int) -> None:
    """With units as well, one of which is larger than what fits."""
    labels = torch.tensor([30, 10, 30, 20, 10, 10])
    for units_given in (True, False):
        if not units_given and microbatch != 2:
            continue
        whole, parts = private(make, net()), private(make, net(), microbatch=microbatch)
        for batch, shift in ((BATCHES[0], 0), (BATCHES[1], 100)):
            units = labels + shift if units_given else None
            torch.testing.assert_close(whole(batch, unit_ids=units), parts(batch, unit_ids=units))
        for name, parameter in whole.parameters.items():
            torch.testing.assert_close(parameter, parts.parameters[name])


def test_batch_size_one() -> None:
    model = net()
    adapter = private(COME, model, base="deyo", batch_size=1)
    twin = slow(adapter, model, Loss(unsure=belief_entropy, margin=0.4, patches=4), CLIP)
    orders = orders_of(SEED, 1, 1, 1)
    for release in range(3):
        batch = images(1, seed=50 + release)
        adapter(batch)
        twin.step(batch, noise_at(twin, release), orders=orders[release])
        assert_same(adapter, twin)


def test_zero_out_needs_half_the_noise() -> None:
    model = net()
    adapter = private(Tent, model, DP(EPSILON, DELTA, clip=CLIP, neighbours=Neighbours.ZERO_OUT))
    twin = slow(adapter, model, Loss(), CLIP)
    adapter(BATCHES[0])
    half = sigma_of(EPSILON, DELTA, factor=1)
    assert half == pytest.approx(SIGMA / 2)
    twin.step(BATCHES[0], noise_at(twin, 0, half * CLIP))
    assert_same(adapter, twin)


def test_a_mask_of_classes_is_the_whole_world() -> None:
    """Entropy, weights and the shuffled probabilities are all over the masked classes; predictions are over all."""
    mask = torch.tensor([True, False, True, True, False])
    model = net()
    adapter = private(DeYO, model, classes=mask)
    twin = slow(adapter, model, Loss(margin=0.4, patches=4, classes=mask), CLIP)
    orders = orders_of(SEED, *SIZES)
    for release, batch in enumerate(BATCHES):
        expected = twin.model(batch).detach()
        torch.testing.assert_close(adapter(batch), expected)
        twin.step(batch, noise_at(twin, release), orders=orders[release])
        assert_same(adapter, twin)


def test_adam_by_its_formula() -> None:
    model = net()
    adapter = private(Tent, model, optimizer="adam", lr=0.01)
    twin = slow(adapter, model, Loss(), CLIP)
    m = {n: torch.zeros_like(p) for n, p in twin.parameters().items()}
    v = {n: torch.zeros_like(p) for n, p in twin.parameters().items()}
    for release, batch in enumerate(BATCHES):
        adapter(batch)
        noise, total = noise_at(twin, release), twin.total(twin.unit_gradients(batch))
        for name, p in twin.parameters().items():
            g = (total[name] + noise[name]) / ROWS
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g**2
            t = release + 1
            p.data -= 0.01 * (m[name] / (1 - 0.9**t)) / ((v[name] / (1 - 0.999**t)).sqrt() + 1e-8)
        assert_same(adapter, twin)


def test_without_noise_the_step_is_the_clipped_mean() -> None:
    """epsilon = inf: no noise, no ledger, not private."""
    model = net()
    adapter = Tent(model, privacy=DP(math.inf, clip=CLIP), batch_size=ROWS, lr=0.05)
    twin = slow(adapter, model, Loss(), CLIP)
    for batch in BATCHES:
        adapter(batch)
        twin.step(batch)
        assert_same(adapter, twin)
    assert adapter.stream is None
    assert adapter.guarantee is None
    assert adapter.assumptions == []
    assert "not private" in repr(adapter)


def test_in_single_precision_too() -> None:
    model = net().float()
    adapter = private(Tent, model)
    twin = slow(adapter, model, Loss(), CLIP)
    for release, batch in enumerate(BATCHES):
        adapter(batch.float())
        twin.step(batch.float(), {n: v.float() for n, v in noise_at(twin, release).items()})
    assert_same(adapter, twin, tolerance=1e-4)


# -- DP-SAR ----------------------------------------------------------------------------------------------------------


def watched(adapter: Adapter) -> list[Tensor]:
    """What the model's first adapted weight is, at every forward pass."""
    seen: list[Tensor] = []
    adapter.model.register_forward_pre_hook(lambda model, _: seen.append(model.first.weight.detach().clone()))
    return seen


def test_sar_climbs_along_the_last_release_whatever_the_batch_is() -> None:
    """The perturbation is radius * g / |g| of the step before, noise included; replacing the batch changes nothing."""
    perturbations = []
    for second in (images(ROWS, seed=60), 5 * images(ROWS, seed=61), images(1, seed=62)):
        adapter = private(SAR, net())
        seen = watched(adapter)
        adapter(BATCHES[0])
        assert torch.equal(seen[-1], adapter.origin["first.weight"])  # the first step climbs nowhere
        released, here = adapter.memory.last, adapter.parameters["first.weight"].detach().clone()
        assert released is not None
        expected = 0.05 * released["first.weight"] / norm_of(released)
        seen.clear()
        adapter(second)
        assert torch.equal(seen[0], here)  # predictions: not perturbed
        torch.testing.assert_close(seen[-1] - here, expected)
        perturbations.append(seen[-1] - here)
    assert all(torch.equal(p, perturbations[0]) for p in perturbations)


def test_the_last_release_of_sar_is_the_noisy_mean() -> None:
    curator = Curious()
    adapter = private(SAR, net(), curator=curator)
    adapter(BATCHES[0])
    twin = slow(adapter, net(), Loss(), CLIP)
    noise = noise_at(twin, 0)
    assert adapter.memory.last is not None
    for name, value in adapter.memory.last.items():
        torch.testing.assert_close(value, (curator.sums[0][name] + noise[name]) / ROWS, rtol=2e-5, atol=2e-5)


def test_after_a_reset_sar_climbs_nowhere() -> None:
    adapter = private(SAR, net())
    for batch in BATCHES[:2]:
        adapter(batch)
    adapter.reset()
    assert adapter.memory.last is None
    seen = watched(adapter)
    adapter(BATCHES[0])
    assert seen
    assert all(torch.equal(w, adapter.origin["first.weight"]) for w in seen)
