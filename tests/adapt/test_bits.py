"""A seeded private step to the last bit: tensor by tensor, as obvious as can be, from the curator's sums on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from obvious import Curious, Net, images
from torch import Tensor, nn

from tacit.adapt import COME, DP, EATA, SAR, Adapter, DeYO, Tent, fisher
from tacit.adapt._side_blocks import split
from tacit.privacy import Ledger, _grids
from tacit.privacy._noise import NoiseKey
from tacit.privacy.mechanisms import _mechanisms

SEED, ROWS, STEPS, MOMENTUM, LR = 11, 6, 4, 0.9, 0.005


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        return 4 * self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class OneByOne:
    """What follows the sum, parameter by parameter: normals, mixing, grid, denominator, anchor, type, momentum."""

    def __init__(self, adapter: Adapter, curious: Curious) -> None:
        assert adapter.stream is not None
        self.adapter, self.curious, self.stream = adapter, curious, adapter.stream
        self.values = {name: p.detach().clone() for name, p in adapter.parameters.items()}
        self.velocity: dict[str, Tensor] = {}
        self.mixer: Any = None

    def _key(self) -> NoiseKey:
        receipt = self.stream.receipt
        assert receipt is not None
        assert receipt._key is not None
        return receipt._key

    def step(self, release: int) -> None:
        total, stream = self.curious.told[release], self.stream.stream
        assert stream is not None
        self.mixer = self.mixer or stream.strategy.mixer()
        sizes = [value.numel() for value in total.sum.values()]
        drawn = torch.split(self._key().normals(release, sum(sizes)), sizes)
        z = {name: part.clone().view(total.sum[name].shape) for name, part in zip(total.sum, drawn, strict=True)}
        paid = self.stream.noise_multiplier
        noise = split(paid, total.bounds, self.adapter.shares, None, ROWS)
        fixed = _mechanisms._grids(total, total.bounds, paid, noise, stream.sensitivity)
        mixed = self.mixer.step(z)
        for name, value in self.values.items():
            gradient = _grids.add(self.curious.sums[release][name], mixed[name], fixed[name]) / ROWS
            anchor = self.adapter.method.anchor
            if anchor is not None:
                gradient = gradient + self.adapter.method.fisher_alpha * anchor.gradient(name, value)
            gradient = gradient.to(value.dtype)
            before = self.velocity.get(name)
            self.velocity[name] = gradient if before is None else before * MOMENTUM + gradient
            value.add_(self.velocity[name], alpha=-LR)


@pytest.mark.parametrize("options", [{}, {"monitor": True}, {"monitor": True, "statistics": "private"}], ids=str)
@pytest.mark.parametrize("noise", ["independent", "correlated"])
@pytest.mark.parametrize("make", [Tent, EATA, SAR, DeYO, COME], ids=lambda make: make.__name__)
def test_what_follows_the_sum_has_the_bits_of_one_parameter_after_the_other(
    make: Any, noise: Any, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = (WithBatchNorm() if "statistics" in options else Net()).eval()
    curious, form = Curious(), DP(4.0, 1e-6, clip=0.3, noise=noise, horizon=STEPS if noise == "correlated" else None)
    if make is EATA:
        options = options | {"anchor": fisher(model, images(5, seed=9).float(), public=True)}
    adapter = make(
        copy.deepcopy(model),
        privacy=form,
        batch_size=ROWS,
        lr=LR,
        momentum=MOMENTUM,
        seed=SEED,
        ledger=Ledger("sqlite://"),
        curator=curious,
        **options,
    )
    twin = OneByOne(adapter, curious)
    for release in range(STEPS):
        adapter(images(ROWS, seed=release).float())
        twin.step(release)
        for name, parameter in adapter.parameters.items():
            assert torch.equal(parameter, twin.values[name]), name
