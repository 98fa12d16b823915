"""A default without search: learning rate and steps of a private linear probe from public numbers alone."""

from __future__ import annotations

from tacit.finetune import rate_and_steps
from tacit.privacy import Budget
from tacit.privacy.events import check_count
from tacit.tune._space import Hyperparameters


def suggest(budget: Budget, *, size: int, features: int, classes: int) -> Hyperparameters:
    """Learning rate and steps for a linear probe on rows of norm 1, trained by `DPGD` with unit clip and momentum 0.9.

    Of such a probe the total step size r = lr * steps decides most. Its best value depends on how much signal there is
    to noise, and that is public: mu * size. The rule r = 2 (mu size)^0.7 with sqrt(r) steps (5 to 80) was fitted on
    public tasks (digits, turned digits, X-rays, docstrings) that the studies do not evaluate, and then frozen; the
    page on linear scaling has what it is worth. Width and number of classes made no difference there that the rule
    could use: they are checked and kept in the call so that a later rule may. It reads no data and costs nothing.

    Args:
        budget: Of the run.
        size: The public number of units.
        features: The width of the features.
        classes: The number of classes.

    Returns:
        Hyperparameters for `tune.train`, `tune.Finetuning` and `finetune.DPGD`; `finetune.fit(scheme="linear")` takes
        them by itself if it is given no optimizer.

    Raises:
        ValueError: A budget without noise, or counts below 1.

    Examples:
        >>> from tacit.privacy import Budget
        >>> from tacit.tune import suggest
        >>> little = suggest(Budget(0.1, 1e-5), size=10_000, features=192, classes=10)
        >>> more = suggest(Budget(1.0, 1e-5), size=10_000, features=192, classes=10)
        >>> little.r < more.r
        True
    """
    for value, what in ((size, "size"), (features, "features"), (classes, "classes")):
        check_count(value, what)
    lr, steps = rate_and_steps(budget, size)
    return Hyperparameters(lr=lr, steps=steps)
