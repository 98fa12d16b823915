"""What is checked before anything is charged: labels, and the model on blank or synthetic rows."""

from __future__ import annotations

import torch
from torch import nn

from tacit._curator import Curator
from tacit._refusals import Refusal, attempt
from tacit.data import Records, Rows, synthetic_rows
from tacit.finetune._predictions import rows_that_fit, units_at_once
from tacit.finetune._queries import GradientQuery
from tacit.finetune._reading import likeness, to, where_of
from tacit.finetune._tasks import Task, outputs_of
from tacit.gradients import change

LABELS = "Some labels are invalid. Nothing was charged. What is wrong with them may reveal rows: see curator=."


def check_labels(task: Task, records: Records, curator: Curator | None = None) -> None:
    """Refuse invalid labels, in a sentence that reveals none of them."""
    attempt(lambda: task.check(records.labels()), sentence=LABELS, curator=curator)


def dry_run(
    body: nn.Module, records: Records, query: GradientQuery | None = None, curator: Curator | None = None
) -> Rows:
    """Does the model take such rows, and does every rule hold? On blank or synthetic ones, before anything is charged.

    Returns a blank row: what rows look like (see `reading`).
    """
    like = likeness(records, training=query is not None, curator=curator)
    inputs, labels, _ = synthetic_rows(records) or like
    where = where_of(body)
    inputs, labels = to(inputs, where), labels.to(where.device)
    try:
        with torch.no_grad():
            outputs_of(body, inputs)
        reason = ""
    except (RuntimeError, TypeError, IndexError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason:
        raise Refusal(f"The model does not take these rows ({reason}).")
    if query is not None:
        query.check(inputs, labels)
    return like


def rehearse_portion(query: GradientQuery, like: Rows, expected: float, records: Records, model: nn.Module) -> None:
    """`rehearse` the largest portion, but on a CPU, where the engine bounds what it keeps."""
    if where_of(model).device.type != "cpu":
        rehearse(query, like, min(rows_that_fit(like), units_at_once(expected) * records.most_rows), model)


def rehearse(query: GradientQuery, like: Rows, rows: int, model: nn.Module) -> None:
    """Ask for as many blank rows as a portion may ever have: memory that does not suffice shows before the charge."""
    whole = change((like.inputs, like.labels), lambda t: t[:1].expand(rows, *t.shape[1:]).contiguous())
    inputs, labels = whole
    query.sum(to(Rows(inputs, labels, torch.arange(rows)), where_of(model)))
