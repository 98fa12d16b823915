"""A dry run of a trainable and its score before the first charge: a typo costs no budget."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

from tacit._curator import Curator, ErrorEvent, report_error
from tacit._refusals import ENDING, Refusal
from tacit.distributed import team
from tacit.privacy import Neighbours, events, rehearsal, sampling
from tacit.tune._runners import Runner, SerialRunner
from tacit.tune._search import unit_of
from tacit.tune._space import Hyperparameters, Space
from tacit.tune._trainable import Sampled, Score, Trainable
from tacit.tune._trials import event_of, released, trained

_FAILED = (
    "The {what} failed in a dry run at {point}. Nothing was charged. What went wrong may reveal rows: see curator= "
    "(curator=print, beside the data)."
)


_STEPS = 20  # at most: a dry run need not be long


def lowest(space: Space) -> Hyperparameters:
    """The point of a box with the fewest steps."""
    return space.decompose(space.ends[0])


def rehearse(
    trainable: Trainable,
    point: Hyperparameters,
    mu: float,
    neighbours: Neighbours | str,
    *,
    score: Score | None = None,
    size: int = 1,
    curator: Curator | None = None,
    runner: Runner | None = None,
) -> None:
    """Call the trainable and the score once, as a trial does, on receipts whose releases are noise alone.

    Formal guarantee: what a trainable learns from rows goes through mechanisms on its receipt (see `Trainable`), and
    here these put zero in the place of every sum (`privacy.rehearsal`). So the model is made of noise; it is thrown
    away, and so is its score. What is left is whether something was raised, before any charge, as for data that cannot
    be read; what it says goes to the curator alone. Global generators are put back afterwards.

    Args:
        trainable: What will be tuned.
        point: Where it is tried, with at most 20 steps.
        mu: As in a trial.
        neighbours: The neighbouring relation.
        score: As in the search; None: nothing is scored.
        size: The public number of units.
        curator: Receives what went wrong.
        runner: Whose trials hand back their models; None: models stay where they are made.

    Raises:
        Refusal: One of them raised, the model cannot be handed back from another process, or several ranks search at
            once: each would charge.
        ReceiptError: The trainable returned without a release, or asked for another than it says.
    """
    if team() is not None:
        raise Refusal(
            "Every rank would charge for a search of its own: search in one process, and give its trials several ranks "
            "with runner=tune.RayRunner(ranks=…). Nothing was charged."
        )
    relation, unit = Neighbours(neighbours), unit_of(trainable, None)
    point = replace(point, steps=min(point.steps, _STEPS))
    sampled = isinstance(trainable, Sampled) and trainable.sampled(point)
    event = trainable.event_with(point, 1.0) if isinstance(trainable, Sampled) and sampled else None
    event = event or event_of(trainable, point, mu, relation)
    with sampling.restored_generators():  # not secret: what comes of them is thrown away
        model, wrong = trained(trainable, point, mu, rehearsal(event, unit=unit, neighbours=relation))
        what = "trainable" if wrong else ""
        if not wrong and not isinstance(runner, SerialRunner | None):
            what, wrong = "model's way back from another process", _unsendable(model)
        if not wrong and score is not None:
            paid = rehearsal(events.gaussian(1.0), unit=unit, neighbours=relation)
            try:
                released(score(model), paid, size)
            except ENDING:
                raise
            except BaseException as error:  # whatever a score can do with rows; its text is private
                what, wrong = "score", f"{type(error).__name__}: {error}"
    if wrong:
        sentence = _FAILED.format(what=what, point=point)
        report_error(curator, ErrorEvent(sentence, wrong))
        raise Refusal(sentence)


def _unsendable(model: Any) -> str:
    """Why a model cannot be sent to another process; empty if it can."""
    try:
        pickle.dumps(model)
    except ENDING:
        raise
    except BaseException as error:  # whatever a class of its own does when it is pickled
        return f"{type(error).__name__}: {error}"
    return ""
