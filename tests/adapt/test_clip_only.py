"""Clip-only: the filters stay, each row's gradient is clipped, the denominator is the batch size, and no noise."""

import math
from collections.abc import Callable
from typing import Any

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
    orders_of,
    row_gradient,
    slow,
)
from torch import Tensor

from tacit.adapt import COME, EATA, SAR, Adapter, Clip, DeYO, Tent, entropy
from tacit.gradients import AdaptiveQuantile, BatchClip, FilterByLoss, FilterByNorm, Policy

ROWS, K, CLIP = 8, 5, 0.3
BATCHES = [images(ROWS, seed=80), images(ROWS, seed=81), images(5, seed=82)]
OPTIONS: dict[str, Any] = {"batch_size": ROWS, "lr": 0.05, "seed": 3}


def middle(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[len(ordered) // 2] + ordered[len(ordered) // 2 - 1]) / 2


def margin_between() -> float:
    return middle(entropy(net()(BATCHES[0]).detach()).tolist()) / math.log(K)


def test_tent_and_come() -> None:
    for make, loss in ((Tent, Loss()), (COME, Loss(unsure=belief_entropy))):
        model = net()
        adapter = make(model, privacy=Clip(CLIP), **OPTIONS)
        twin = slow(adapter, model, loss, CLIP)
        for batch in BATCHES:
            adapter(batch)
            twin.step(batch)
            assert_same(adapter, twin)


def test_eata_keeps_both_filters_and_the_denominator() -> None:
    model, margin, similarity = net(), 0.95, 0.8
    adapter = EATA(model, privacy=Clip(CLIP), margin=margin, similarity=similarity, **OPTIONS)
    twin = slow(adapter, model, Loss(margin=margin), CLIP)
    mean_probs: Tensor | None = None
    dropped = updates = 0
    for batch in BATCHES:
        x = twin.model(batch).detach()
        kept = [h < margin * math.log(K) for h in entropy(x).tolist()]
        if mean_probs is not None:
            for i, p in enumerate(x.softmax(1)):
                unlike = abs(float(p @ mean_probs / p.norm() / mean_probs.norm())) < similarity
                dropped += kept[i] and not unlike
                kept[i] = kept[i] and unlike
        adapter(batch)
        twin.step(batch, kept=kept)
        if any(kept):
            mean = x.softmax(1)[kept].mean(0)
            mean_probs = mean if mean_probs is None else 0.9 * mean_probs + 0.1 * mean
            updates += 1
        assert_same(adapter, twin)
        torch.testing.assert_close(adapter.memory.mean_probs, mean_probs)
    assert dropped
    assert updates >= 2


def test_deyo_keeps_both_filters() -> None:
    model, margin = net(), margin_between()
    adapter = DeYO(model, privacy=Clip(CLIP), margin=margin, threshold=0.0, **OPTIONS)
    loss = Loss(margin=0.4, patches=4)
    twin = slow(adapter, model, loss, CLIP)
    for batch, orders in zip(BATCHES, orders_of(3, ROWS, ROWS, 5), strict=True):
        sure = [h < margin * math.log(K) for h in entropy(twin.model(batch).detach()).tolist()]
        kept = [s and loss.lost(twin.model, b, o) > 0.0 for s, b, o in zip(sure, batch, orders, strict=True)]
        adapter(batch)
        twin.step(batch, orders=orders, kept=kept)
        assert_same(adapter, twin)


def sar_step(
    twin: Slow, batch: Tensor, margin: float, *, clipped: bool, units: list[int] | None = None
) -> float | None:
    """Climb along the kept rows (clipped or not), then the clipped sum over the rows that pass again."""
    limit = margin * math.log(K)
    kept = [h < limit for h in entropy(twin.model(batch).detach()).tolist()]
    if clipped:
        ascent = twin.total(twin.unit_gradients(batch, kept=kept, units=units))
    else:
        ascent = row_gradient(twin.model, twin.names, entropy(twin.model(batch))[kept].sum())
    before = twin.climb(ascent if norm_of(ascent) else None)
    h = entropy(twin.model(batch)).detach()
    again = [k and bool(value < limit) for k, value in zip(kept, h, strict=True)]
    total = twin.total(twin.unit_gradients(batch, kept=again, units=units))
    twin.put_back(before)
    twin.descend({n: t / twin.batch_size for n, t in total.items()})
    return float(h[again].mean()) if any(again) else None


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("units", [None, [1, 1, 2, 2, 2, 3, 4, 5]])
def test_sar_with_the_ascent_clipped_or_not(clipped: bool, units: list[int] | None) -> None:
    model, margin, radius = net(), margin_between(), 0.3
    form = Clip(CLIP, ascent=clipped)
    adapter = SAR(model, privacy=form, margin=margin, radius=radius, recovery=0.0, **OPTIONS)
    twin = slow(adapter, model, Loss(), CLIP, radius=radius)
    ema_entropy = None
    for batch in BATCHES[:2]:
        expected = twin.model(batch).detach()
        found = adapter(batch, unit_ids=None if units is None else torch.tensor(units))
        torch.testing.assert_close(found, expected)  # of the parameters before, and not perturbed
        mean = sar_step(twin, batch, margin, clipped=clipped, units=units)
        if mean is not None:
            ema_entropy = mean if ema_entropy is None else 0.9 * ema_entropy + 0.1 * mean
        assert_same(adapter, twin)
        assert adapter.memory.ema_entropy == pytest.approx(ema_entropy)


def test_the_two_ascents_differ() -> None:
    ends = []
    for clipped in (False, True):
        adapter = SAR(net(), privacy=Clip(CLIP, ascent=clipped), margin=10.0, radius=0.5, **OPTIONS)
        adapter(BATCHES[0])
        ends.append(adapter.parameters["first.weight"].detach().clone())
    assert not torch.equal(*ends)


def test_the_count_of_an_adaptive_clip_is_no_direction() -> None:
    """SAR with a clipped ascent climbs by its radius in the parameters, whatever the count is."""
    adapter = SAR(
        net(), privacy=Clip(AdaptiveQuantile(CLIP), ascent=True), margin=10.0, radius=0.5, share=1.0, **OPTIONS
    )
    seen: list[dict[str, Tensor]] = []
    note = lambda model, _: seen.append({n: p.detach().clone() for n, p in model.named_parameters()})  # noqa: E731
    adapter.model.register_forward_pre_hook(note)
    adapter(BATCHES[0])
    moved = norm_of({n: seen[-1][n] - adapter.origin[n] for n in adapter.parameters})
    assert moved == pytest.approx(0.5)


def test_sar_resets_in_this_form_too() -> None:
    adapter = SAR(net(), privacy=Clip(CLIP), margin=10.0, recovery=10.0, **OPTIONS)
    adapter(BATCHES[0])
    assert all(torch.equal(p, adapter.origin[n]) for n, p in adapter.parameters.items())
    assert adapter.memory.ema_entropy is None


def norms_and_losses() -> tuple[list[float], list[float]]:
    model = net()
    adapter = Tent(model, **OPTIONS)
    twin = slow(adapter, model, Loss(), CLIP)
    norms = [norm_of(g) for g in twin.unit_gradients(BATCHES[0])]
    return norms, entropy(model(BATCHES[0])).detach().tolist()


def dropped(how: str) -> tuple[Policy, list[bool]]:
    norms, losses = norms_and_losses()
    by_norm, by_loss = FilterByNorm(middle(norms)), FilterByLoss(middle(losses))
    large = [n > middle(norms) for n in norms]
    unsure = [h > middle(losses) for h in losses]
    both, either = zip(*[(a and b, a or b) for a, b in zip(large, unsure, strict=True)], strict=True)
    policies: dict[str, tuple[Policy, Any]] = {
        "norm": (by_norm, large),
        "loss": (by_loss, unsure),
        "and": (by_norm & by_loss, both),
        "or": (by_norm | by_loss, either),
    }
    return policies[how][0], list(policies[how][1])


@pytest.mark.parametrize("how", ["norm", "loss", "and", "or"])
def test_filters_leave_rows_out_and_scale_nothing(how: str) -> None:
    policy, out = dropped(how)
    assert 0 < sum(out) < ROWS
    curator = Curious()
    model = net()
    adapter = Tent(model, privacy=Clip(policy), curator=curator, **OPTIONS)
    twin = slow(adapter, model, Loss(), math.inf)
    adapter(BATCHES[0])
    kept = [not o for o in out]
    gradients = [g for g, k in zip(twin.unit_gradients(BATCHES[0]), kept, strict=True) if k]
    total = {n: sum(g[n] for g in gradients) for n in twin.names}
    twin.descend({n: t / ROWS for n, t in total.items()})
    assert_same(adapter, twin)
    assert curator.told[0].bounds == {}  # nothing that noise could make private


def test_batch_clip_scales_the_mean() -> None:
    model, bound = net(), 0.02
    adapter = Tent(model, privacy=Clip(BatchClip(bound)), **OPTIONS)
    twin = slow(adapter, model, Loss(), math.inf)
    adapter(BATCHES[0])
    mean = row_gradient(twin.model, twin.names, entropy(twin.model(BATCHES[0])).mean())
    assert norm_of(mean) > bound
    twin.descend({n: g * bound / norm_of(mean) for n, g in mean.items()})
    assert_same(adapter, twin)


def test_adaptive_quantile_without_noise() -> None:
    model = net()
    adapter = Tent(model, privacy=Clip(AdaptiveQuantile(CLIP, 0.5, 0.2)), **OPTIONS)
    twin = slow(adapter, model, Loss(), CLIP)
    for batch in BATCHES:
        below = sum(0.5 if norm_of(g) <= twin.clip else -0.5 for g in twin.unit_gradients(batch))
        twin.step(batch)
        adapter(batch)
        assert_same(adapter, twin)
        twin.clip *= math.exp(-0.2 * (below / ROWS + 0.5 - 0.5))
        assert adapter.memory.bound == pytest.approx(twin.clip)


def test_an_adaptive_clip_never_runs_out_of_numbers() -> None:
    """Where nothing is left to learn the bound falls step by step; it stays a positive number."""
    adapter = Tent(net(), privacy=Clip(AdaptiveQuantile(1e-11, 0.0, 50.0)), **OPTIONS)
    for _ in range(3):
        adapter(torch.full_like(BATCHES[0], math.nan))
    assert adapter.memory.bound is not None
    assert 0 < adapter.memory.bound <= 1e-11
    adapter(BATCHES[0])


@pytest.mark.parametrize("make", [EATA, SAR, DeYO])
def test_where_nobody_passes_the_sum_is_zero(make: Callable[..., Adapter]) -> None:
    curator = Curious()
    adapter = make(net(), privacy=Clip(CLIP), margin=-1.0, curator=curator, **OPTIONS)
    adapter(BATCHES[0])
    assert norm_of(curator.sums[-1]) == 0
    assert all(torch.equal(p, adapter.origin[n]) for n, p in adapter.parameters.items())


@pytest.mark.parametrize("clip", [0, -1.0, math.inf, math.nan, "1", None])
def test_a_clip_is_a_positive_number_or_a_policy(clip: Any) -> None:
    with pytest.raises(ValueError, match="clip is a positive number or a clip policy"):
        Clip(clip)
