"""What every method's adapter takes, and what of it cannot be."""

from __future__ import annotations

import math
from typing import Literal, TypedDict

from torch import Tensor

from tacit._context import PrivacyContext
from tacit._curator import Curator
from tacit.adapt._monitor import Monitor
from tacit.adapt._privacy_config import DP, Clip, Privacy
from tacit.adapt._statistics import Statistics
from tacit.adapt._views import Read
from tacit.data import ImageShape
from tacit.privacy import Ledger, Unit
from tacit.privacy.events import check_count


class Options(TypedDict, total=False):
    """What every method's adapter takes beside model, method and privacy."""

    batch_size: int  # the denominator of every update; a batch may have fewer rows, never more
    lr: float | Literal["auto"]
    momentum: float
    optimizer: Literal["sgd", "adam"]
    optimiser: Literal["sgd", "adam"]  # the earlier name of optimizer; warns
    steps: int  # updates by each batch
    scheme: str  # which parameters, by the type of their layer; see tacit.models.select
    classes: Tensor | None  # a mask over the classes that may occur; predictions stay over all
    ledger: Ledger | None
    subject: str | None
    unit: Unit | str
    seed: int | None  # reproducible noise: not private
    lease: int  # steps that are recorded as used at a time
    microbatch: int | None
    statistics: Statistics | None  # of BatchNorm layers: "source", "batch" or "private"
    normalize: ImageShape | Literal["model"] | None  # images in [0, 1] are normalized so first
    logits: Read | None  # from the model's output to logits, classes last
    monitor: Monitor | bool  # release mean entropy and mean prediction with the gradient
    curator: Curator | None  # called with a tacit.StepEvent, before the noise
    context: PrivacyContext | None  # ledger, subject, unit, seed and curator in one; neighbours are those of DP(...)


def check_counts(*counts: int) -> None:
    """Refuse counts that are none: of batch_size, steps, lease and microbatch."""
    for value in counts:
        check_count(value, "batch_size, steps, lease and microbatch")


def check_options(
    privacy: Privacy,
    lr: float | Literal["auto"],
    momentum: float,
    optimizer: str,
    steps: int,
    *,
    watched: bool,
    shown: bool,
) -> None:
    """Refuse what cannot be, before anything is charged or changed; `shown`: there is a curator."""
    if not (lr == "auto" or (isinstance(lr, int | float) and 0 < lr < math.inf)) or not 0 <= momentum < 1:
        raise ValueError(f"lr must be positive and momentum in [0, 1), not {lr!r} and {momentum!r}.")
    if optimizer not in ("sgd", "adam"):
        raise ValueError(f"The optimizer is sgd or adam, not {optimizer!r}.")
    if privacy is not None and not isinstance(privacy, Clip | DP):
        raise TypeError(f"privacy is None, Clip(...) or DP(...), not {privacy!r}.")
    if watched and privacy is None:
        raise ValueError("monitor= goes with DP(...) or Clip(...): it is part of their sums.")
    if shown and privacy is None:
        raise ValueError("curator= is shown clipped sums, which the published form does not have: leave it out.")
    if not isinstance(privacy, DP) or not privacy.private or steps == 1:
        return
    if privacy.contributions < steps or privacy.separation > 1:
        raise ValueError(
            f"steps={steps} takes every row into {steps} releases: say DP(..., contributions={steps}), which is "
            "charged for, and leave separation at 1."
        )
