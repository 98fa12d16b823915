"""How an engine gets to know its model: compare the fast path with plain autograd on synthetic rows, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tacit._refusals import ENDING
from tacit.gradients._batches import change, leaves, row_shapes
from tacit.gradients._isolation import (
    PART,
    Loss,
    Probe,
    RowsMixed,
    check_many_apart,
    check_reached,
    check_rows_apart,
    moved,
    seed_all,
    whole_norm,
)
from tacit.gradients._parameter_swap import ParameterSwap
from tacit.gradients._recorder import STACKED, Plan, Recorder, UnsupportedPattern
from tacit.gradients._synthetic import synthetic
from tacit.gradients._units import Units

Watch = Callable[[Any, Units], tuple[Recorder, Tensor]]
Weighted = Callable[[], Iterator[tuple[str, Tensor]]]
Gradient = dict[str, Tensor | None]

# Few rows, but not a number that sizes in models often are, so that rows are not mistaken for something else; and the
# seeds of both draws: with the same one the first three rows of seven would be those that were tried before.
_ROWS = ((3, 0, 2), (7, 8, 9))
FEWEST = 7  # rows of a check of a new shape
_MANY, _TRIES = 64, 8
# Seeds: a number within rounding of a kink (ReLU) may fall to either side, a path that is wrong is wrong every time.
_DRAWS = (3, 5)


def blank_plan(model: nn.Module, before: Plan | None = None) -> Plan:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    constants = {t.untyped_storage().data_ptr() for t in [*model.buffers(), *frozen] if t.numel()}
    if before is None:
        return Plan(constants=frozenset(constants))
    return Plan(constants=frozenset(constants), said=before.said, reached=before.reached, quiet=before.quiet)


def validate(plan: Plan, model: nn.Module, loss: Loss, slots: ParameterSwap, batch: Any, watch: Watch) -> None:
    """Check that rows stay apart and that the loss reaches everything, then find a path with autograd's answer."""
    probe = Probe(model, loss, slots.parameters)
    device = next(leaves(batch)).device
    reached = plan.reached  # what was reached once is not asked again: rows of one kind would tell what they lack
    unwatched = "The model was compiled by torch.jit, which no fast rule can look into" if slots.compiled else ""
    if skipped := slots.skipped_at_random(model):
        unwatched = (
            f"The layers of {skipped!r} are skipped at random while training (layerdrop; 0 trains all of them, fast), "
            f"each row its own"
        )
    with moved(model, slots.parameters), torch.enable_grad():
        check_rows_apart(probe, batch)
        wrong: list[str] = []
        for rows, seed, other in _ROWS:
            plan.forget()
            weights = torch.tensor([(-1.0) ** i * (1 + i / 2) for i in range(rows)], device=device)
            draw = partial(synthetic, batch, rows, seed)
            _, truth = probe.gradient(draw(), weights)
            reached |= {name for name, value in truth.items() if value is not None}
            if unwatched:
                break
            wrong = _find_path(plan, partial(_weighted, plan, watch, draw, weights), truth)
            if not wrong:  # again, because numbers of one sign may all take the same branch
                draw = partial(synthetic, batch, rows, other, 1.0)
                _, truth = probe.gradient(draw(), weights)
                wrong = _wrong(plan, partial(_weighted, plan, watch, draw, weights), truth, again=True)
            if not wrong:
                break
        if not skipped:
            _reach(probe, batch, reached)
    plan.learning = False
    if unwatched:
        plan.by_row = True
        if not plan.quiet:
            warnings.warn(
                f"{unwatched}; the gradients of the whole model are computed row by row: much slower.", stacklevel=2
            )
    elif wrong:
        _say_slow(plan, wrong[0])
    if plan.by_row:
        plan.served = dict.fromkeys(slots.parameters, "autograd, row by row")


def _reach(probe: Probe, batch: Any, reached: set[str]) -> None:
    """Few rows may miss an expert of many: draw more, and another router, before saying that a parameter is unused."""
    names = list(probe.parameters)
    kept = {n: p.detach().clone() for n, p in probe.parameters.items()}
    generator = torch.Generator().manual_seed(3)
    for seed in range(_TRIES):
        if len(reached) == len(names):
            break
        with torch.no_grad():
            for n, p in probe.parameters.items():
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.copy_(kept[n] + noise * float(kept[n].float().square().mean().sqrt()) * seed)
        _, gradient = probe.gradient(synthetic(batch, _MANY, seed, float(seed)), torch.ones(_MANY))
        reached |= {name for name, value in gradient.items() if value is not None}
    with torch.no_grad():
        for n, p in probe.parameters.items():
            p.copy_(kept[n])
    check_reached(names, reached)


def check_again(
    plan: Plan, model: nn.Module, loss: Loss, slots: ParameterSwap, batch: Any, rows: int, watch: Watch
) -> None:
    """Check rows of this shape, so many at a time: do they stay apart, and is the fast path right for them?"""
    probe = Probe(model, loss, slots.parameters)
    device = next(leaves(batch)).device
    shapes = row_shapes(batch)
    with moved(model, slots.parameters), torch.enable_grad():
        for seed in _DRAWS:
            given, weights, truth = check_many_apart(probe, batch, rows, seed)
            plan.specimens[shapes] = change(given, lambda t: t[:2].clone())
            plan.folds.pop(shapes, None)
            again = partial(change, given, Tensor.clone)
            wrong = _wrong(plan, partial(_weighted, plan, watch, again, weights.to(device)), truth, again=True)
            if not wrong:
                break
    if wrong and any(fold is not None for other, fold in plan.folds.items() if other != shapes):
        plan.folds[shapes] = None  # rows of this shape go one by one
    elif wrong:
        _say_slow(plan, wrong[0])
        plan.served = dict.fromkeys(slots.parameters, "autograd, row by row")


def check_private_apart(probe: Probe, batch: Any, rows: int) -> None:
    """Do rows with the integers of private ones stay apart, three and so many at a time?

    Synthetic rows mix integers of different rows. That a model refuses such a mixture says nothing of its rows, and
    must not stop a run.
    """
    try:
        check_rows_apart(probe, batch)
        check_many_apart(probe, batch, rows)
    except (RowsMixed, *ENDING):
        raise
    except BaseException:
        return


def _say_slow(plan: Plan, name: str) -> None:
    plan.by_row = True
    if not plan.quiet:
        warnings.warn(
            f"The layer {name.rpartition('.')[0] or name!r} uses {name!r} in a way that no fast rule covers; the "
            f"gradients of the whole model are computed row by row: the same result, much slower.",
            stacklevel=2,
        )


def misleads(plan: Plan, model: nn.Module, loss: Loss, slots: ParameterSwap, batch: Any, watch: Watch) -> bool:
    """Whether the path in use gives another answer than plain autograd for such rows, and does not raise either.

    In bfloat16, where the gradients of single parameters may be all rounding, by a tenth of the whole gradient.
    """
    probe = Probe(model, loss, slots.parameters)
    for seed in _DRAWS:
        with moved(model, slots.parameters), torch.enable_grad():
            try:
                given, weights, truth = check_many_apart(probe, batch, FEWEST, seed)
                units = Units.singletons(FEWEST, weights.device)
                recorder, _ = watch(change(given, Tensor.clone), units)
            except (RowsMixed, *ENDING):
                raise
            except BaseException:  # integers that do not go together; rows that raise are found one by one, in the pass
                return False
        slack = (0.1 if plan.coarse else 1e-6) * whole_norm(truth)
        pieces = {name: recorder.settled.pop(name, None) for name in truth}
        if all(
            _agrees(
                torch.zeros_like(slots.parameters[name])
                if (piece := pieces[name]) is None
                else piece.weighted_sum(weights.double(), units, None),
                torch.zeros_like(slots.parameters[name]) if value is None else value,
                plan.coarse,
                slack,
                True,
            )
            for name, value in truth.items()
        ):
            return False
    return True


def _find_path(plan: Plan, weighted: Weighted, truth: Gradient) -> list[str]:
    """Try the rows in the first, second and third dimension, and in the first once for each view.

    Returns the parameters for which nothing was right.
    """
    wrong = list(truth)
    first: list[str] = []  # where rows come first, as they mostly do: what is wrong there is to blame
    stuck = False  # a parameter is wrong that was right before: another dimension for the others will not help
    for dim in (0, 1, 2, STACKED):
        if stuck and dim != STACKED:
            continue
        plan.batch_dim.update(dict.fromkeys(first if dim == STACKED else wrong, dim))
        plan.folds.clear()
        wrong = _wrong(plan, weighted, truth)
        first = first or wrong
        if not wrong:
            break
        stuck = plan.batch_dim[wrong[0]] != dim
    return ([name for name in first if name in wrong] or first) if wrong else []


def _wrong(plan: Plan, weighted: Weighted, truth: Gradient, *, again: bool = False) -> list[str]:
    """The parameters for which the fast path is not seen to be right; `again` if it was before, on other rows."""
    slack = 1e-6 * whole_norm(truth)
    right = {name for name, value in truth.items() if again and value is None}
    try:
        for name, seen in weighted():
            value = truth[name]
            agrees = _agrees(seen, torch.zeros_like(seen) if value is None else value, plan.coarse, slack, again)
            right = right | {name} if agrees else right - {name}
    except UnsupportedPattern as misfit:
        return [str(misfit.args[0])]
    except (RuntimeError, IndexError):  # plain autograd could, so this is a limit of the fast path
        return list(truth)
    return [name for name in truth if name not in right]


def _weighted(plan: Plan, watch: Watch, draw: Callable[[], Any], weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weighted sum of each parameter, one after another: they are float64 and as large as the model."""
    seed_all()
    units = Units.singletons(weights.numel(), weights.device)
    given = draw()
    plan.zeros.looking = True
    try:
        recorder, _ = watch(given, units)
    finally:
        plan.zeros.looking = False
    plan.folds[row_shapes(given)] = recorder.folds
    plan.kept[row_shapes(given)] = sum(piece.nbytes for piece in recorder.settled.values()) / units.rows
    for name in list(recorder.settled):
        with torch.no_grad(), torch.autocast(weights.device.type, enabled=False):
            total = recorder.settled.pop(name).weighted_sum(weights.double(), units, None)
        yield name, total


def _agrees(found: Tensor, truth: Tensor, coarse: bool, slack: float, unseen: bool) -> bool:
    """The same up to the rounding of the model's arithmetic (a tenth in bfloat16; a wrong path is wrong by much more).

    What is not finite is not compared; if nothing is, the path was not seen to be right: `unseen`.
    """
    gap = size = 0.0
    seen = not truth.numel()
    for left, right in zip(*(torch.split(t.detach().reshape(-1), PART) for t in (found, truth)), strict=True):
        finite = torch.isfinite(left) & torch.isfinite(right)
        seen = seen or bool(finite.any())
        left, right = left[finite].double(), right[finite].double()
        gap, size = gap + float((left - right).square().sum()), size + float(right.square().sum())
    return gap**0.5 <= (0.1 if coarse else 1e-3) * size**0.5 + slack if seen else unseen
