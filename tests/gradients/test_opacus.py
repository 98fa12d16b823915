"""The same sum as opacus, on what opacus supports."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_close
from torch import Tensor, nn

from tacit.gradients import clipped_sum


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(8, 6)),
        (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, stride=2),
                nn.GroupNorm(2, 4),
                nn.Conv2d(4, 4, 2, groups=2),
                nn.Flatten(),
                nn.Linear(16, 3),
            ),
            torch.randn(8, 2, 7, 7),
        ),
        (
            nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(20, 3)),
            torch.randint(0, 9, (8, 5)),
        ),
    ],
)
def test_same_sum_as_opacus(model: nn.Module, x: Tensor) -> None:
    from opacus import GradSampleModule

    model = model.double()
    x = x.double() if x.is_floating_point() else x
    batch = (x, torch.randint(0, 3, (8,)))
    mine = clipped_sum(model, loss, batch, clip=0.7)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    loss(wrapped, batch).sum().backward()
    samples = {n: p.grad_sample for n, p in model.named_parameters()}
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples.values()]).norm(dim=0)
    factors = (0.7 * (1 - 1e-5) / norms).clamp(max=1.0)
    assert_close(mine.sum, {n: torch.einsum("i,i...->...", factors, g) for n, g in samples.items()}, 1e-10)
    assert torch.allclose(mine.private.norms, norms)
