"""How an engine gets to know its model: compare the fast path with plain autograd on synthetic rows, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tacit.gradients.batches import leaves
from tacit.gradients.isolation import Loss, Probe, check_reached, check_rows_apart, moved, synthetic
from tacit.gradients.recorder import Misfit, Plan, Recorder
from tacit.gradients.units import Units
from tacit.gradients.watch import Slots

Watch = Callable[[Any, Units], tuple[Recorder, Tensor]]

# Few rows, but not a number that sizes in models often are, so that rows are not mistaken for something else.
_ROWS = (3, 7)


def blank_plan(model: nn.Module) -> Plan:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    constants = {t.untyped_storage().data_ptr() for t in [*model.buffers(), *frozen] if t.numel()}
    return Plan(constants=frozenset(constants))


def learn(plan: Plan, model: nn.Module, loss: Loss, slots: Slots, batch: Any, watch: Watch) -> None:
    """Check that rows stay apart and that the loss reaches everything, then find a path with autograd's answer."""
    probe = Probe(model, loss, slots.parameters)
    device = next(leaves(batch)).device
    with moved(model, slots.parameters), torch.enable_grad():
        check_rows_apart(probe, synthetic(batch, 3, 0), synthetic(batch, 3, 1), 3)
        wrong: list[str] = []
        for rows in _ROWS:
            rows_given = synthetic(batch, rows, 0)
            weights = torch.tensor([(-1.0) ** i * (1 + i / 2) for i in range(rows)], device=device)
            _, truth = probe.gradient(rows_given, weights)
            check_reached(truth)
            wrong = _find_path(plan, slots, rows_given, weights, truth, watch)
            if not wrong:
                break
            plan.enters.clear()
            plan.batch_dim.clear()
            plan.served.clear()
    if wrong:
        plan.by_row = True
        plan.served = dict.fromkeys(slots.parameters, "autograd, row by row")
        layer = wrong[0].rpartition(".")[0] or wrong[0]
        warnings.warn(
            f"The layer {layer!r} uses {wrong[0]!r} in a way that no fast rule covers; the gradients of the whole "
            f"model are computed row by row: the same result, much slower.",
            stacklevel=2,
        )
    plan.learning = False


def _find_path(
    plan: Plan, slots: Slots, batch: Any, weights: Tensor, truth: dict[str, Tensor | None], watch: Watch
) -> list[str]:
    """Try the rows in the first, second and third dimension; returns the parameters for which nothing was right."""
    wrong: list[str] = list(slots.parameters)
    for dim in range(3):
        plan.batch_dim.update(dict.fromkeys(wrong, dim))
        try:
            found = _weighted(plan, watch, batch, weights)
        except Misfit as misfit:
            wrong = [str(misfit.args[0])]
            if plan.batch_dim[wrong[0]] == dim:
                continue
            return wrong
        wrong = [n for n, t in truth.items() if n not in found or t is None or not _agrees(found[n], t, plan.coarse)]
        if not wrong:
            return []
    return wrong


def _weighted(plan: Plan, watch: Watch, batch: Any, weights: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    units = Units.singletons(weights.numel(), weights.device)
    recorder, _ = watch(batch, units)
    plan.kept_per_row = sum(piece.nbytes for piece in recorder.settled.values()) / units.rows
    with torch.no_grad(), torch.autocast(weights.device.type, enabled=False):
        return {name: piece.weighted_sum(weights.double(), units, None) for name, piece in recorder.settled.items()}


def _agrees(found: Tensor, truth: Tensor, coarse: bool) -> bool:
    """The same up to the rounding of the model's arithmetic (a tenth in bfloat16; a wrong path is wrong by much more).

    What is not finite is not compared; if nothing is, the path was not seen to be right.
    """
    finite = torch.isfinite(truth) & torch.isfinite(found)
    if truth.numel() and not bool(finite.any()):
        return False
    found, truth = found[finite].double(), truth[finite].double()
    return bool((found - truth).norm() <= (0.1 if coarse else 1e-3) * truth.norm() + 1e-6)
