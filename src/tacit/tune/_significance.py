"""Whether released scores of trials differ by more than their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tacit.tune._trials import Trial

DEVIATIONS = 3.0  # of the noise of a difference of two scores: by noise alone three trials differ so with 0.8%


def significant_difference(noise: float) -> float:
    """The least difference of two scores that noise of this standard deviation on each hardly ever makes.

    Args:
        noise: The standard deviation of a score's noise.

    Returns:
        Three standard deviations of the noise of a difference.
    """
    return DEVIATIONS * math.sqrt(2) * noise


def blind(trials: Sequence[Trial], what: str) -> str | None:
    """A sentence, if the scores of these trials do not differ significantly; None if they do (or are fewer than two).

    Args:
        trials: Of one mu.
        what: How the sentence calls them.

    Returns:
        What to say.
    """
    scores = [trial.score for trial in trials if trial.score is not None]
    noise = max((trial.score_noise for trial in trials if trial.score_noise is not None), default=None)
    if len(scores) < 2 or noise is None:
        return None
    low, high, least = min(scores), max(scores), significant_difference(noise)
    if high - low >= least:
        return None
    return (
        f"The scores of {what}, {low:.4f} to {high:.4f}, differ by less than {least:.4f}, three "
        f"deviations of the noise of a difference ({noise:.4f} each): they do not tell its trials apart."
    )
