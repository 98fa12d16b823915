"""A linear probe that nobody has to tune: its learning rate and steps come from public numbers alone."""

from __future__ import annotations

import math

from tacit.finetune._optimizers import DPGD, Optimizer
from tacit.finetune._standardise import RowNorm, Standardise
from tacit.finetune._tasks import Classes, Task
from tacit.privacy import Budget

# Fitted on public tasks that no table of a study has (studies/linear_scaling/fit_default.py), and frozen.
_SCALE, _POWER = 2.0, 0.7
_FEWEST, _MOST = 5, 80


def rate_and_steps(budget: Budget, size: int) -> tuple[float, int]:
    """Learning rate and steps of `DPGD` with unit clip and momentum 0.9 on rows of norm 1; see `tune.suggest`."""
    if budget.pure or not budget.private:
        raise ValueError(f"A default is for a finite epsilon and a delta above 0, not for {budget}.")
    r = _SCALE * (budget.mu * size) ** _POWER
    steps = min(max(round(math.sqrt(r)), _FEWEST), _MOST)
    return r / steps, steps


def default_optimizer(
    budget: Budget, size: int, *, scheme: str, task: Task, rows: RowNorm | Standardise | None
) -> Optimizer:
    """What `fit` trains with if it is given no optimizer.

    Raises:
        TypeError: There is no default for such a run.
    """
    scaled = isinstance(rows, RowNorm) and rows.norm == 1
    if scheme != "linear" or not isinstance(task, Classes) or not scaled:
        raise TypeError(
            "finetune.fit needs optimizer=, such as finetune.DPSGD(batch_size=…, steps=…). Only a classifier's head on "
            "rows of norm 1 (scheme='linear') has a default."
        )
    lr, steps = rate_and_steps(budget, size)
    return DPGD(lr=lr, steps=steps)
