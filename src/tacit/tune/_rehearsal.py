"""A dry run of a trainable and its score before the first charge: a typo costs no budget."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tacit._curator import Curator, ErrorEvent, report_event
from tacit._refusals import ENDING, Refusal, attempt
from tacit.distributed import team
from tacit.privacy import Ledger, Neighbours, events, rehearsal, sampling
from tacit.tune._runners import Runner, SendingRunner
from tacit.tune._search import SearchSession, unit_of
from tacit.tune._space import Hyperparameters, Space
from tacit.tune._trainable import FAILED, Sampled, Score, Trainable, event_with, sampled_at
from tacit.tune._trials import event_of, event_within, released, trained

_FAILED = (
    "The {what} failed in a dry run at {point}. Nothing was charged. What went wrong may reveal rows: see curator= "
    "(curator=print, beside the data)."
)
_STEPS = 20  # at most: a dry run need not be long


def ends(space: Space) -> list[Hyperparameters]:
    """The points of a box with the fewest and the most steps."""
    return [space.decompose(end) for end in space.ends]


def lowest(space: Space) -> Hyperparameters:
    """The point of a box with the fewest steps."""
    return ends(space)[0]


def rehearse(
    trainable: Trainable,
    point: Hyperparameters,
    mu: float,
    neighbours: Neighbours | str,
    *,
    score: Score | None = None,
    size: int = 1,
    curator: Curator | None = None,
    others: Sequence[Hyperparameters] = (),
    ledger: Ledger | None = None,
    runner: Runner | None = None,
    keep: bool = False,
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
        others: Further points of the search: they are not run, but priced.
        ledger: What trials in other processes would charge.
        runner: Where trials run; None: here.
        keep: Whether trials hand back their models.

    Raises:
        Refusal: One of them raised; a run would cost more than it may; something cannot be sent to another process or
            back; or several ranks search at once: each would charge.
        ReceiptError: The trainable returned without a release, or asked for another than it says.
    """
    if team() is not None:
        raise Refusal(
            "Every rank would charge for a search of its own: search in one process, and give its trials several ranks "
            "with runner=tune.RayRunner(ranks=…). Nothing was charged."
        )
    relation, unit = Neighbours(neighbours), unit_of(trainable, None)
    sending = runner if isinstance(runner, SendingRunner) else None
    if sending is not None and ledger is not None:
        sending.check((trainable, score), ledger, curator)
    points = (point, *others)
    for each in points:
        attempt(event_within, trainable, each, mu, relation, sentence=FAILED.format("event"), curator=curator)
    point = replace(point, steps=min(point.steps, _STEPS))
    if isinstance(trainable, Sampled) and sampled_at(trainable, point, curator):
        event = event_with(trainable, point, 1.0, curator)
    else:
        event = event_of(trainable, point, mu, relation, curator)
    with sampling.restored_generators():  # not secret: what comes of them is thrown away
        model, wrong = trained(trainable, point, mu, rehearsal(event, unit=unit, neighbours=relation))
        what = "trainable" if wrong else ""
        if not wrong and sending is not None and keep:
            what, wrong = "model's way back from another process", _unsendable(model)
        if not wrong and score is not None:
            paid = rehearsal(events.gaussian(1.0), unit=unit, neighbours=relation)
            try:
                values = score(model)
                released(values, paid, size)
                _check_numbers(values, size)
            except Refusal as refusal:  # a sentence of this package, which says nothing of any row
                raise Refusal(f"{refusal} Nothing was charged.") from None
            except ENDING:
                raise
            except BaseException as error:  # whatever a score can do with rows; its text is private
                what, wrong = "score", f"{type(error).__name__}: {error}"
    if wrong:
        sentence = _FAILED.format(what=what, point=point)
        report_event(curator, ErrorEvent(sentence, wrong))
        raise Refusal(sentence)
    if sending is not None and ledger is not None:  # a trainable may keep something of its first run
        sending.check((trainable, score), ledger, curator)


def rehearse_search(
    session: SearchSession,
    point: Hyperparameters,
    mu: float,
    *,
    others: Sequence[Hyperparameters] = (),
    trials: bool = True,
    keep: bool = False,
) -> None:
    """`rehearse` with what a search has: its score, its ledger and where its trials run.

    Args:
        session: The search.
        point: Where it is tried.
        mu: As in a trial.
        others: Further points of the search.
        trials: Whether there are any; otherwise its only run is made here.
        keep: Whether trials hand back their models.

    Raises:
        Refusal: As `rehearse`.
        ReceiptError: As `rehearse`.
    """
    rehearse(
        session.trainable,
        point,
        mu,
        session.neighbours,
        score=session.score,
        size=session.size,
        curator=session.curator,
        others=others,
        ledger=session.ledger,
        runner=session.runner if trials else None,
        keep=keep,
    )


def _check_numbers(values: Tensor, size: int) -> None:
    """Refuse scores of which it is plain that they are no numbers from 0 to 1 of as many units as were declared.

    One unit decides it only where there are exactly twice as many numbers as declared, or half of them are above 1; and
    it decides no more than whether the search is refused before any charge.
    """
    if len(values) > 2 * size:
        raise Refusal(
            f"A score is one number per unit, and there are more than twice as many as size= says ({size:,}): is it "
            "one per row?"
        )
    if 2 * int((values > 1).sum()) > len(values):
        raise Refusal(
            "A score is a number from 0 to 1 per unit, and most of these are larger: are they percent, or losses?"
        )


def _unsendable(model: Any) -> str:
    """Why a model cannot be sent from another process; empty if it can."""
    try:
        pickle.loads(pickle.dumps(model))
    except ENDING:
        raise
    except BaseException as error:  # whatever a class of its own does when it is pickled or read
        return f"{type(error).__name__}: {error}"
    return ""
