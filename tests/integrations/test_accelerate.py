"""Accelerate's loop with private gradients: the weights of `fit`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from reference import BATCH, CLIP, PROMISE, RATE, STEPS, dataset, fitted, net, rows, weights
from torch import nn
from torch.utils.data import DataLoader

from tacit.finetune import PrivateLoop
from tacit.integrations import prepare_private
from tacit.privacy import Ledger


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(accelerator: Accelerator, batch: int = BATCH, *, prepared: bool = True) -> PrivateLoop:
    """The loop of the page."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    loader = DataLoader(dataset(), batch_size=batch, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    if prepared:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    else:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    promise = PROMISE | {"clip": CLIP, "ledger": Ledger("sqlite://")}
    private = prepare_private(accelerator, model, optimizer, loader, nn.CrossEntropyLoss(), epochs=2, **promise)
    for _ in range(2):
        for batch_of_rows in private.loader:
            private.backward(batch_of_rows)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return private


@pytest.mark.parametrize("prepared", [True, False])
def test_the_weights_are_those_of_fit(prepared: bool) -> None:
    private = trained(Accelerator(cpu=True), prepared=prepared)
    assert private.done == STEPS
    assert torch.equal(weights(private.model), weights(fitted(net(), rows())))


def test_gradient_accumulation_is_one_poisson_batch_in_parts() -> None:
    private = trained(Accelerator(cpu=True, gradient_accumulation_steps=2), batch=BATCH // 2)
    assert private.done == STEPS
    assert torch.allclose(weights(private.model), weights(fitted(net(), rows())), atol=1e-6)


def test_mixed_precision_is_the_accelerators() -> None:
    low = weights(trained(Accelerator(cpu=True, mixed_precision="bf16")).model)
    high = weights(fitted(net(), rows()))
    assert 0 < float((low - high).norm()) < 0.05 * float((high - weights(net())).norm())


def test_losses_are_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "mixed_precision", "fp16")
    with pytest.raises(ValueError, match="scales losses"):
        trained(accelerator)
