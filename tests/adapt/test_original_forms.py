"""The published forms, step by step, against their formulas: filters, moving averages, two passes, resets."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from obvious import Loss, Slow, assert_same, images, net, norm_of, orders_of, row_gradient, slow
from torch import Tensor, nn

from tacit.adapt import COME, EATA, SAR, Adapter, DeYO, Tent, entropy, fisher, opinion
from tacit.adapt._views import Rows

ROWS, K = 8, 5
BATCHES = [images(ROWS, seed=70), images(ROWS, seed=71), images(5, seed=72)]
OPTIONS: dict[str, Any] = {"batch_size": ROWS, "lr": 0.05, "momentum": 0.9, "seed": 3}


def mean_of(twin: Slow, batch: Tensor, kept: list[bool], orders: Tensor | None = None) -> dict[str, Tensor]:
    """The mean over the rows that were kept, and over nothing else."""
    rows = [g for g, k in zip(twin.unit_gradients(batch, orders), kept, strict=True) if k]
    return {n: sum(row[n] for row in rows) / len(rows) for n in twin.names}


def certain(model: nn.Module, batch: Tensor, margin: float, unsure: Callable[[Tensor], Tensor] = entropy) -> list[bool]:
    return [h < margin * math.log(K) for h in unsure(model(batch).detach()).tolist()]


def between(model: nn.Module, batch: Tensor, unsure: Callable[[Tensor], Tensor] = entropy) -> float:
    """A margin that lets some rows pass and not others."""
    h = unsure(model(batch).detach()).sort().values
    return float(h[len(h) // 2] + h[len(h) // 2 - 1]) / 2 / math.log(K)


def test_tent_is_the_gradient_of_the_mean_entropy() -> None:
    model = net()
    adapter = Tent(model, **OPTIONS)
    twin = slow(adapter, model, Loss(), clip=1.0)
    for batch in BATCHES:
        before = twin.model(batch).detach()
        torch.testing.assert_close(adapter(batch), before)
        twin.descend(row_gradient(twin.model, twin.names, entropy(twin.model(batch)).mean()))
        assert_same(adapter, twin)


def test_eata_filters_twice_and_remembers_what_it_kept() -> None:
    """Certain, then unlike the average; the average is 0.9 old + 0.1 of the kept rows' mean prediction."""
    model = net()
    margin, similarity = 0.95, 0.99
    anchor = fisher(model, images(4, seed=5), public=True)
    adapter = EATA(model, margin=margin, similarity=similarity, anchor=anchor, fisher_alpha=2.0, **OPTIONS)
    pull = lambda n, p: 2.0 * 2 * anchor.importance[n] * (p - anchor.origin[n])  # noqa: E731
    twin = slow(adapter, model, Loss(margin=margin), clip=1.0, pull=pull)
    mean_probs: Tensor | None = None
    second_filter_bites, updates = False, 0
    for batch in BATCHES:
        p = twin.model(batch).detach().softmax(1)
        kept = certain(twin.model, batch, margin)
        if mean_probs is not None:
            like = [abs(float(row @ mean_probs / row.norm() / mean_probs.norm())) < similarity for row in p]
            second_filter_bites |= any(k and not u for k, u in zip(kept, like, strict=True))
            kept = [k and u for k, u in zip(kept, like, strict=True)]
        adapter(batch)
        if any(kept):
            twin.descend(mean_of(twin, batch, kept))
            mean = torch.stack([row for row, k in zip(p, kept, strict=True) if k]).mean(0)
            mean_probs = mean if mean_probs is None else 0.9 * mean_probs + 0.1 * mean
            updates += 1
        assert_same(adapter, twin)
        torch.testing.assert_close(adapter.memory.mean_probs, mean_probs)
    assert second_filter_bites
    assert updates >= 2


@pytest.mark.parametrize("come", [False, True])
def test_sar_takes_two_passes_and_filters_after_each(come: bool) -> None:
    """Ascent along the kept rows' mean, then the mean over those that pass again at the perturbed parameters."""
    unsure = opinion if come else entropy
    model = net()
    margin, radius = between(model, BATCHES[0], unsure), 1.0  # large, so that the second filter bites
    adapter = SAR(model, margin=margin, radius=radius, recovery=0.0, share=1.0, **OPTIONS)
    if come:
        adapter = Adapter(model, replace(adapter.method, uncertainty=opinion), **OPTIONS)
    twin = slow(adapter, model, Loss(), clip=1.0, radius=radius)
    ema_entropy: float | None = None
    bites = False
    for batch in BATCHES:
        adapter(batch)
        kept = certain(twin.model, batch, margin, unsure)
        if not any(kept):
            continue
        before = twin.climb(row_gradient(twin.model, twin.names, unsure(twin.model(batch))[kept].mean()))
        again = [k and c for k, c in zip(kept, certain(twin.model, batch, margin, unsure), strict=True)]
        bites |= again != kept
        losses = unsure(twin.model(batch))[again]
        gradient = row_gradient(twin.model, twin.names, losses.mean()) if any(again) else None
        twin.put_back(before)
        if gradient is not None:
            twin.descend(gradient)
            mean = float(losses.mean().detach())
            ema_entropy = mean if ema_entropy is None else 0.9 * ema_entropy + 0.1 * mean
        assert_same(adapter, twin)
        assert adapter.memory.ema_entropy == pytest.approx(ema_entropy)
    assert bites


def test_sar_goes_back_to_the_source_and_forgets_why() -> None:
    """Below the threshold all is as at the start: parameters, momentum and the average, which is not put back."""
    model = net()
    losses = entropy(model(BATCHES[0])).detach()
    h = float(losses.mean()) / math.log(K)
    adapter = SAR(model, margin=10.0, radius=1e-6, recovery=h * 0.9, share=1.0, **OPTIONS)
    fresh = copy.deepcopy(adapter.origin)
    adapter(BATCHES[0])
    assert adapter.memory.ema_entropy == pytest.approx(float(losses.mean()), rel=1e-4)
    assert norm_of({n: p.detach() - fresh[n] for n, p in adapter.parameters.items()}) > 0
    adapter.memory.ema_entropy = 0.0  # as if the loss had collapsed: 0.9 * 0 + 0.1 * loss is below the threshold
    adapter(BATCHES[1])
    assert all(torch.equal(p, fresh[n]) for n, p in adapter.parameters.items())
    assert adapter.memory.ema_entropy is None
    assert not adapter.optimizer.state
    adapter(BATCHES[0])  # and then it begins anew
    other = SAR(net(), margin=10.0, radius=1e-6, recovery=h * 0.9, share=1.0, **OPTIONS)
    other(BATCHES[0])
    assert all(torch.equal(p, other.parameters[n]) for n, p in adapter.parameters.items())


def test_sars_threshold_is_used() -> None:
    """In the published code the constant was ignored: here a high one resets at once, zero never does."""
    for recovery, back in ((10.0, True), (0.0, False)):
        adapter = SAR(net(), margin=10.0, recovery=recovery, **OPTIONS)
        adapter(BATCHES[0])
        assert all(torch.equal(p, adapter.origin[n]) for n, p in adapter.parameters.items()) is back


def test_deyo_filters_by_certainty_and_structure() -> None:
    model = net()
    margin = between(model, BATCHES[0])
    adapter = DeYO(model, margin=margin, threshold=0.0, share=1.0, **OPTIONS)
    loss = Loss(margin=0.4, patches=4)
    twin = slow(adapter, model, loss, clip=1.0)
    kinds = set()
    for batch, orders in zip(BATCHES, orders_of(3, ROWS, ROWS, 5), strict=True):
        sure = certain(twin.model, batch, margin)
        lost = [loss.lost(twin.model, image, order) > 0.0 for image, order in zip(batch, orders, strict=True)]
        kinds |= set(zip(sure, lost, strict=True))
        kept = [s and d for s, d in zip(sure, lost, strict=True)]
        adapter(batch)
        if any(kept):
            twin.descend(mean_of(twin, batch, kept, orders))
        assert_same(adapter, twin)
    assert len(kinds) >= 3  # each filter decided for some row


def zero_sum(make: Callable[..., Adapter], **more: Any) -> Adapter:
    return make(net(), margin=-1.0, **more, **OPTIONS)


@pytest.mark.parametrize("make", [EATA, SAR, DeYO])
def test_where_nobody_passes_nothing_changes(make: Callable[..., Adapter]) -> None:
    """Not even the anchor pulls, and nothing is remembered."""
    more = {"anchor": fisher(net(), images(3), public=True)} if make is EATA else {}
    adapter = zero_sum(make, **more)
    for parameter in adapter.parameters.values():
        parameter.data += 0.1
    before = {n: p.detach().clone() for n, p in adapter.parameters.items()}
    expected = adapter.model(BATCHES[0]).detach()
    torch.testing.assert_close(adapter(BATCHES[0]), expected)
    assert all(torch.equal(p, before[n]) for n, p in adapter.parameters.items())
    assert adapter.memory.mean_probs is None
    assert adapter.memory.ema_entropy is None
    assert adapter.steps == 1


@pytest.mark.parametrize("make", [Tent, EATA, SAR, DeYO, COME])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_a_bad_row_gets_a_prediction_and_no_say(make: Callable[..., Adapter], bad: float) -> None:
    """Not finite, or so large that its logits are not: the others learn as if it were not there."""
    batch = BATCHES[0].clone()
    batch[3] = bad
    others = torch.arange(ROWS) != 3
    wide = {} if make in (Tent, COME) else {"margin": 10.0}
    if make is DeYO:
        wide["threshold"] = -2.0
    with_it, without = (make(net(), **wide, **OPTIONS) for _ in range(2))
    if make is DeYO:  # the orders go by place, so the other run gets them handed in
        orders = orders_of(3, ROWS)[0][others]
        without._step.rows = lambda images, units: Rows(images=images, units=units, orders=orders)  # type: ignore[method-assign]
    predictions = with_it(batch)
    assert predictions.shape == (ROWS, K)
    torch.testing.assert_close(predictions[others], without(batch[others]))
    for name, parameter in with_it.parameters.items():
        torch.testing.assert_close(parameter, without.parameters[name])


@pytest.mark.parametrize("make", [Tent, EATA, SAR, DeYO, COME])
def test_a_batch_of_bad_rows_teaches_nothing(make: Callable[..., Adapter]) -> None:
    adapter = make(net(), **OPTIONS)
    found = adapter(torch.full_like(BATCHES[0], math.nan))
    torch.testing.assert_close(found, net()(torch.zeros_like(BATCHES[0])).detach())
    assert all(torch.equal(p, adapter.origin[n]) for n, p in adapter.parameters.items())
