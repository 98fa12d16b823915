"""The slow, obvious answer: every row's gradient by single-row autograd, then units, then clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tacit.gradients import ClippedSum, Engine
from tacit.gradients._batches import change


def row_gradients(model: nn.Module, loss: Any, batch: Any, rows: int) -> list[dict[str, Tensor]]:
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = []
    for i in range(rows):
        value = loss(model, change(batch, lambda t, i=i: t[i : i + 1]))
        gradient = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True)
        found.append(
            {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), gradient, strict=True)}
        )
    return found


def unit_gradients(model: nn.Module, loss: Any, batch: Any, units: list[int]) -> list[dict[str, Tensor]]:
    rows = row_gradients(model, loss, batch, len(units))
    found = []
    for label in sorted(set(units)):
        mine = [row for row, unit in zip(rows, units, strict=True) if unit == label]
        found.append({n: torch.stack([row[n] for row in mine]).mean(0) for n in mine[0]})
    return found


def norm(gradient: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.double().square().sum() for g in gradient.values()]).sum().sqrt()


def brute_force(
    model: nn.Module, loss: Any, batch: Any, clip: float, units: list[int]
) -> tuple[dict[str, Tensor], Tensor]:
    gradients = unit_gradients(model, loss, batch, units)
    norms = torch.stack([norm(g) for g in gradients])
    total = {n: torch.zeros_like(g) for n, g in gradients[0].items()}
    for gradient, size in zip(gradients, norms, strict=True):
        for name, value in gradient.items():
            total[name] += value * min(1.0, clip * (1 - 1e-5) / float(size)) if size > 0 else 0 * value
    return total, norms


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(norm(expected)), 1e-30)
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        gap = float((found[name].double() - value.double()).norm())
        assert gap <= tolerance * scale, f"{name}: off by {gap / scale:.1e} of the whole"


def check(
    model: nn.Module,
    loss: Any,
    batch: Any,
    *,
    units: list[int] | None = None,
    tolerance: float = 1e-10,
    microbatch: int | None = None,
    clips: tuple[float, ...] = (),
) -> ClippedSum:
    """Compare an engine with brute force at a clip that binds for half of the units, and at one that never binds."""
    rows = next(t for t in _tensors(batch)).shape[0]
    labels = units if units is not None else list(range(rows))
    sizes = brute_force(model, loss, batch, 1.0, labels)[1]
    engine = Engine(model, loss, clip=1.0, microbatch=microbatch)
    result = None
    for clip in clips or (float(sizes.median()) or 1.0, float(sizes.max()) * 2 or 1.0):
        expected, norms = brute_force(model, loss, batch, clip, labels)
        result = engine(batch, clip=clip, unit_ids=units)
        assert_close(result.sum, expected, tolerance)
        assert torch.allclose(
            result.private.norms, norms.double(), rtol=max(tolerance, 1e-10), atol=1e-30 + tolerance * 1e-3
        )
        assert result.bounds == {"gradient": clip}
    assert result is not None
    return result


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    change(batch, lambda t: found.append(t) or t)
    return found
