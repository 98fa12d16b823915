"""Accelerate: the loop of its users, with private gradients in place of `accelerator.backward(loss)`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from tacit.finetune import PrivateLoop, batching, make_private

_PRECISIONS = {"no": None, "bf16": torch.bfloat16}


def prepare_private(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, loss: Any, **options: Any
) -> PrivateLoop:
    """`tacit.make_private` of what `accelerator.prepare` returned, or of what it would be given.

    In the loop, `private.backward(batch)` takes the place of `accelerator.backward(loss)`; `optimizer.step()`, the
    scheduler and `optimizer.zero_grad()` stay. Mixed precision and gradient accumulation are the accelerator's:
    `gradient_accumulation_steps` batches become one Poisson batch that is computed in parts, so that every batch of
    `private.loader` is a step.

    Formal guarantee: that of `tacit.make_private`.

    Args:
        accelerator: Of one process, or of each of several (``accelerate launch``, torchrun). A step then has the
            loader's batch size in all, whatever the number of processes, and they make the run of one; see
            ``tacit.distributed``.
        model: Prepared, or not.
        optimizer: Prepared, or not.
        loader: Prepared, or not; its order is replaced by Poisson subsampling.
        loss: As for `tacit.make_private`.
        **options: Of `tacit.make_private`: epsilon, delta, epochs, clip, …

    Returns:
        The loop.

    Raises:
        ValueError: A precision that scales losses.

    Examples:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from tacit.integrations import prepare_private
        >>> accelerator, model = Accelerator(cpu=True), nn.Linear(4, 2)
        >>> loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.arange(40) % 2), batch_size=10)
        >>> model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        >>> promise = {"epsilon": 4.0, "delta": 1e-3, "clip": 1.0}
        >>> private = prepare_private(
        ...     accelerator, model, optimizer, loader, nn.CrossEntropyLoss(), epochs=1, **promise
        ... )
        >>> for batch in private.loader:
        ...     private.backward(batch)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> private.done
        4
    """
    if accelerator.mixed_precision not in _PRECISIONS:
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision!r} scales losses, which private gradients do not have: use "
            "'bf16' or 'no'."
        )
    plain = _unsharded(getattr(loader, "base_dataloader", loader))
    together = accelerator.gradient_accumulation_steps
    if together > 1:
        accelerator.gradient_accumulation_steps = 1
        each, _ = batching(plain)
        options = {"batch_size": together * each, "microbatch": each} | options
    precision = _PRECISIONS[accelerator.mixed_precision]
    return make_private(
        accelerator.unwrap_model(model, keep_fp32_wrapper=False),
        getattr(optimizer, "optimizer", optimizer),
        plain,
        loss,
        **({"autocast": precision} | options),
    )


def _unsharded(loader: Any) -> Any:
    """The loader as it was before its batches were split between several processes."""
    batches = getattr(loader.batch_sampler, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or batches is None:
        return loader
    return DataLoader(
        loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn, num_workers=loader.num_workers
    )
