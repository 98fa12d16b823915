"""What `fit` is asked, checked before anything is charged: a receipt, the task, an evaluation, the loss to follow."""

from __future__ import annotations

from typing import Any

from torch import nn

from tacit._guard_rails import warn_near_chance
from tacit.data import Records
from tacit.finetune._dry_run import check_labels
from tacit.finetune._evaluation import Evaluation, Evaluator, check_rows_alone
from tacit.finetune._loss_curve import TrackLoss
from tacit.finetune._optimizers import Optimizer
from tacit.finetune._sources import read_records
from tacit.finetune._tasks import Classes, Task
from tacit.models import head_of
from tacit.privacy import Ledger, Neighbours, Receipt, Unit


def check_receipt(receipt: Receipt, unit: Unit | None, evaluate: Evaluation | None, *, given: tuple[Any, ...]) -> None:
    """Refuse what does not go with a run that is paid for.

    Args:
        receipt: What paid.
        unit: That the caller names.
        evaluate: Of the run.
        given: Arguments that say what else to charge: none of them may be.

    Raises:
        ValueError: One of them is, or the receipt is for others.
    """
    if any(each is not None for each in given):
        raise ValueError(
            "A run on a receipt is paid for: leave epsilon, ledger, subject, checkpoint and standardise out."
        )
    if evaluate is not None and not evaluate.public:
        raise ValueError("A run on a receipt has no ledger to charge an evaluation to: its data must be public.")
    if unit is not None and unit != receipt.unit:
        raise ValueError(f"This receipt is for a {receipt.unit}, not for a {unit}: leave unit= out.")


def task_of(task: Task | None, classes: int | None, model: nn.Module) -> Task:
    """The task as given, or to tell as many classes apart as are said or the model's head has.

    Raises:
        ValueError: The two do not agree.
    """
    if task is None:
        return Classes(classes if classes is not None else head_of(model)[1].out_features)
    if classes is not None and classes != task.outputs:
        raise ValueError(f"classes={classes} and a task with {task.outputs} outputs do not agree.")
    return task


def tracking(how: TrackLoss | bool, optimizer: Optimizer) -> TrackLoss | None:
    """How the loss is followed, if the optimizer allows it.

    Raises:
        TypeError: It is said in another way.
        ValueError: The optimizer does not allow it.
    """
    if how is False:
        return None
    found = TrackLoss() if how is True else how
    if not isinstance(found, TrackLoss):
        raise TypeError(f"track_loss is True or a finetune.TrackLoss, not {type(how).__name__}.")
    found.check(optimizer)
    return found


def read_held_out(
    evaluate: Evaluation, task: Task, unit: Unit, neighbours: Neighbours, ledger: Ledger | None, **how: Any
) -> Records:
    """The data of an evaluation, with labels that fit; of private ones also a task and a subject that fit.

    Args:
        evaluate: How the model is evaluated.
        task: What scores it.
        unit: That of the run.
        neighbours: Those of the run.
        ledger: Where an evaluation is charged.
        **how: Model and curator, as in `read_records`.

    Returns:
        The records.

    Raises:
        ValueError: Something does not fit.
    """
    records = read_records(evaluate.data, unit, public=evaluate.public, **how)
    check_labels(task, records, how["curator"])
    if not evaluate.public:
        check_rows_alone(task, records.labels())
        payer = None if ledger is None else ledger.get_subject(str(evaluate.subject))
        if payer is not None:
            payer.check_terms(unit=unit, neighbours=neighbours)
    return records


def rehearse_evaluation(evaluator: Evaluator, model: nn.Module, held_out: Records, *, trained: bool) -> None:
    """Score public data before the charge; of a model that was trained before say if it is no better than a guess."""
    if evaluator.evaluation.public:
        scores = evaluator.rehearse(model, few=not trained)
        if trained:
            warn_if_blind(scores, held_out, stacklevel=6)


def warn_if_blind(
    scores: dict[str, float], held_out: Records, when: str = "before training", *, stacklevel: int = 5
) -> None:
    """Say that a model is no better than a guess on public data: something does not fit."""
    if "accuracy" in scores and held_out.scored_by == "row":
        warn_near_chance(scores["accuracy"], held_out.labels(), when, stacklevel=stacklevel)
