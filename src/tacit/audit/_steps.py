"""One step of `finetune.fit`: the sum that the real loop hands over, the receipt's own draw, the real release."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.audit._mechanism import Array, Release
from tacit.audit._releases import Sum, paid
from tacit.finetune import DPSGD, DPZO, GEP, AdpClip, HyFreeDP, Optimizer, fit
from tacit.privacy import BoundedSum, events, mechanisms, sampling

_WIDTH = 4


def optimizers(batch: int = 1) -> dict[str, Optimizer]:
    """Every query of `finetune` that samples, for ``batch`` units that are always drawn.

    HyFreeDP's losses are along the way of its first step, so it is attacked at its second.
    """
    public = (torch.eye(_WIDTH)[:2], torch.tensor([0, 1]))
    return {
        "DPSGD": DPSGD(batch_size=batch, steps=1, clip=1.0, lr=0.1),
        "AdpClip": AdpClip(batch_size=batch, steps=1, clip=1.0, lr=0.1, count_noise=1.0),
        "GEP": GEP(
            public=public, batch_size=batch, steps=1, dimensions=2, clip_embedding=1.0, clip_residual=0.5, lr=0.1
        ),
        "DPZO": DPZO(batch_size=batch, steps=1, clip=1.0, directions=2, lr=0.1),
        "HyFreeDP": HyFreeDP(batch_size=batch, steps=2, clip=1.0, every=1, loss_clip=0.02, share=0.5, lr=1e-4),
    }


def contribution(optimizer: Optimizer, row: Tensor, label: int = 0) -> BoundedSum:
    """What one unit adds to the last step's sum: taken where `fit` hands it over, before any noise."""
    found: list[BoundedSum] = []
    model = nn.Linear(_WIDTH, 2, bias=False)
    nn.init.zeros_(model.weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No ledger was given")
        fit(
            model,
            (row[None], torch.tensor([label])),
            optimizer=optimizer,
            epsilon=math.inf,
            delta=1e-5,
            size=1,
            scheme="full",
            head="keep",
            seed=0,
            curator=lambda event: found.append(event.clipped_sum),
        )
    return found[-1]


def training_step(optimizer: Optimizer, *, rate: float, noise: float) -> Release:
    """A step at this sampling rate and noise multiplier: of one unit, whose gradient is as large as can be, or none.

    The unit's sum comes from `fit` itself. As many copies of the unit as trials are drawn by the receipt, each with
    coordinates of its own, and leave in one release with the noise that the query gives to each of its blocks.
    """
    total = contribution(optimizer, torch.tensor([1e3, 0.0, 7e2, 7e2]))
    noises = optimizer.query.open(nn.Linear(_WIDTH, 2), _loss, expected=1.0, microbatch=None).split(noise)
    event = events.poisson(rate, events.gaussian(noise))

    def release(present: bool, trials: int) -> Array:
        with paid(event) as receipt:
            drawn = sampling.draw(receipt, trials)
            tiled = {}
            for name, value in total.sum.items():
                tiled[name] = torch.zeros(trials, *value.shape, dtype=torch.float64)
                if present:
                    tiled[name][drawn] = value.double()
            sums = Sum(tiled, dict(total.bounds), dict(total.blocks))
            out = mechanisms.gaussian(sums, receipt, noise=noises)
        return np.concatenate([out[name].reshape(trials, -1).numpy() for name in tiled], axis=1)

    return release


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
