"""A row's last bits do not depend on where it stands: behind a kink they decide about a whole contribution."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import AdaptiveQuantile, Engine
from tacit.gradients._rounding import rounds_alike

CLIP = 1e-2
ENGINE = """
import warnings, torch
{before}
from tacit.gradients import Engine
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        Engine(torch.nn.Linear(2, 2), lambda model, rows: model(rows).sum(1), clip=1.0)
from tacit.gradients._rounding import rounds_alike
print(rounds_alike(), [each.category.__name__ for each in said])
"""


def said(before: str, **environment: str) -> str:
    given = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "TACIT_KERNELS": "0", **environment}
    command = [sys.executable, "-c", ENGINE.format(before=before)]
    return subprocess.run(command, env=given, check=True, capture_output=True, text=True).stdout.strip()


class Kink(nn.Module):
    """What enters the ReLU is zero but for rounding."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(features, 4, bias=False), nn.Linear(4, 2)
        half = torch.randn(4, features // 2)
        with torch.no_grad():
            self.body.weight.copy_(torch.cat([half, -half.flip(1)], 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.body(x)))
        return found


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) * batch[1]).sum(1)


@pytest.mark.parametrize("features", [10, 50, 64])
def test_neighbouring_sums_differ_by_one_contribution_behind_a_kink(features: int) -> None:
    """Without MKL's switch those of 10 features differ by 8.5 clips."""
    model, half = Kink(features), torch.randn(65, features // 2)
    x, y = torch.cat([half, half.flip(1)], 1), torch.randn(65, 2)
    engine = Engine(model, weighted, clip=CLIP)
    whole = engine((x, y)).sum
    for gone in range(8):
        kept = torch.arange(65) != gone
        rest = engine((x[kept], y[kept])).sum
        assert sum(float((whole[n] - rest[n]).square().sum()) for n in whole) ** 0.5 <= CLIP


def test_nobody_elses_norm_falls_to_the_other_side_of_the_bound() -> None:
    """Others stand where a norm would be above the bound; without the switch the count moves by up to 32."""
    model, rows = nn.Linear(10, 2), 65
    labels = torch.zeros(rows, dtype=torch.long)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    engine, kept = Engine(model, loss, clip=1.0), torch.arange(rows) != 0
    for _ in range(10):
        row = torch.randn(1, 10)
        norms = engine((row.expand(rows, 10).clone(), labels)).private.norms
        policy = AdaptiveQuantile(float(norms.min()))
        x = torch.where((norms <= policy.bound)[:, None], row, 100 * torch.randn(rows, 10))
        counts = [float(engine(each, clip=policy).sum["count"]) for each in ((x, labels), (x[kept], labels[kept]))]
        assert abs(counts[0] - counts[1]) <= 0.5


def test_import_sets_the_switch_and_what_comes_too_late_is_said() -> None:
    assert rounds_alike()
    assert said("") == "True []"
    late = "torch.ones(3, 5) @ torch.ones(5, 2)"
    assert said(late, MKL_CBWR="AUTO,STRICT") == "True []"
    assert said(late) in ("False ['GuardRailWarning']", "True []")  # once, for two engines; no MKL, nothing to say
