"""What can be tuned: a callable that trains on a receipt, and what it may say of itself beyond that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tacit._curator import Curator
from tacit._refusals import Refusal, attempt
from tacit.privacy import Neighbours, Receipt
from tacit.privacy.events import DpEvent
from tacit.tune._space import Hyperparameters, Space

FAILED = (
    "The trainable's `{}` failed. Nothing was charged. What went wrong may reveal rows: see curator= (curator=print, "
    "beside the data)."
)

Score = Callable[[Any], Tensor]  # of a model: one number in [0, 1] per unit, each from that unit alone; see by_unit


@runtime_checkable
class Trainable(Protocol):
    """Trains with these hyperparameters on a receipt that is worth `mu`, and returns a model (or anything else).

    Everything it learns from the data goes through mechanisms on that receipt; one that returns without a single
    release is an error (`ReceiptError`), and the search returns nothing. Whether it raises is seen (not what), so the
    values of rows must not decide that: a bad row contributes zero. The same goes for a score (see `by_unit`).

    Before its first charge a search calls it once on a receipt of the stage "rehearsal", whose releases are noise
    alone, with few steps: what it raises there costs nothing.

    A plain function is a trainable. One that has more to say is an object with further attributes, all optional:

    - `size`, the public number of units, and `score(model)`, one number in [0, 1] per unit: what a search takes if it
      is not given `size=` and `score=`.
    - `unit`, what one unit is; without it a unit is a sample.
    - `event(hyperparameters, mu, neighbours)`, what a run releases; without it a run is `steps` Gaussian sums over
      everybody that are together worth mu.
    - `sampled(hyperparameters)`, whether batches are drawn by Poisson sampling, with `event_with(hyperparameters,
      noise)`, the event at a noise multiplier.
    - `split(rate, seed=)`, two trainables over disjoint units, for `subset_search`.
    - `default(mu)`, hyperparameters for a run of mu that need no search, or None: what a search uses if its scores tell
      nothing, and where `default_search` starts. It is asked before the first charge, for every mu that may be left.
    - `guess`, what a model that knows nothing scores by the trainable's own score, from 0 to 1, or None: where
      `default_search` ends early. It is public and may be printed: do not compute it from rows.
    - `check_space(space)`, which refuses a box with hyperparameters that the trainable does not use.
    """

    def __call__(self, hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> Any: ...


@runtime_checkable
class HasSize(Protocol):
    """Says the public number of its units."""

    size: int


@runtime_checkable
class HasScore(Protocol):
    """Scores a model by itself."""

    @property
    def score(self) -> Score: ...


@runtime_checkable
class HasUnit(Protocol):
    """Says what its units are; None: nothing is said."""

    @property
    def unit(self) -> str | None: ...


@runtime_checkable
class Priced(Trainable, Protocol):
    """Says what it releases; one that does not is taken to make its steps over everybody."""

    def event(self, hyperparameters: Hyperparameters, mu: float, neighbours: Neighbours) -> DpEvent: ...


@runtime_checkable
class Sampled(Priced, Protocol):
    """May subsample its batches (Poisson)."""

    def sampled(self, hyperparameters: Hyperparameters) -> bool: ...

    def event_with(self, hyperparameters: Hyperparameters, noise: float) -> DpEvent: ...


@runtime_checkable
class HasDefault(Protocol):
    """Knows hyperparameters for a run of mu without a search; None: not for such runs."""

    def default(self, mu: float) -> Hyperparameters | None: ...


@runtime_checkable
class HasGuess(Protocol):
    """Says what a model that knows nothing scores; None: nothing is said."""

    @property
    def guess(self) -> float | None: ...


@runtime_checkable
class ChecksSpace(Protocol):
    """Refuses a box with hyperparameters that it does not use."""

    def check_space(self, space: Space) -> None: ...


@runtime_checkable
class Splittable(Protocol):
    """Splits its units between two disjoint trainables."""

    def split(self, rate: float, *, seed: int | None = None) -> tuple[Trainable, Trainable]: ...


def size_of(trainable: object, given: int | None) -> int | None:
    """What the caller says, or the trainable."""
    if given is not None:
        return given
    return trainable.size if isinstance(trainable, HasSize) else None


def score_of(trainable: object, given: Score | None) -> Score | None:
    """What the caller gives, or the trainable has."""
    if given is not None:
        return given
    return trainable.score if isinstance(trainable, HasScore) else None


def guess_of(trainable: object, given: Score | None, curator: Curator | None = None) -> float | None:
    """What a model that knows nothing scores, by the trainable's own score; None: not known."""
    if given is not None:
        return None
    found = attempt(_own_guess, trainable, sentence=FAILED.format("guess"), curator=curator)
    if found is None:
        return None
    if not isinstance(found, Real) or isinstance(found, bool) or not 0 <= float(found) <= 1:
        raise Refusal("The trainable's `guess` is a public number from 0 to 1, or None. Nothing was charged.")
    return float(found)


def _own_guess(trainable: object) -> object:
    return trainable.guess if isinstance(trainable, HasGuess) else None


def own_unit(whose: object) -> str | None:
    """What something, or whatever it is a method or a part of, says that its units are."""
    while isinstance(whose, partial):
        whose = whose.func
    if isinstance(whose, HasUnit) and whose.unit:
        return whose.unit
    owner = getattr(whose, "__self__", None)  # of a bound method
    return owner.unit if isinstance(owner, HasUnit) else None


def sampled_at(trainable: object, point: Hyperparameters, curator: Curator | None = None) -> bool:
    """Whether a run at this point subsamples its batches (Poisson), asked before anything is charged."""
    return attempt(own_sampled, trainable, point, sentence=FAILED.format("sampled"), curator=curator)


def own_sampled(trainable: object, point: Hyperparameters) -> bool:
    """The same, with what the trainable raises, which may be private."""
    return isinstance(trainable, Sampled) and trainable.sampled(point)


def event_with(trainable: Sampled, point: Hyperparameters, noise: float, curator: Curator | None = None) -> DpEvent:
    """The event of a run at a noise multiplier, asked before anything is charged."""
    return attempt(trainable.event_with, point, noise, sentence=FAILED.format("event_with"), curator=curator)


def default_of(
    trainable: object, mu: float, given: Hyperparameters | None = None, curator: Curator | None = None
) -> Hyperparameters | None:
    """What the caller gives as a default, or the trainable knows for a run of mu; None: nothing is known."""
    found: object = given
    if given is None:
        found = attempt(_own_default, trainable, mu, sentence=FAILED.format("default"), curator=curator)
    if not isinstance(found, Hyperparameters | None):
        raise Refusal(f"A default is tune.Hyperparameters, not {type(found).__name__}. Nothing was charged.")
    return found


def _own_default(trainable: object, mu: float) -> object:
    return trainable.default(mu) if isinstance(trainable, HasDefault) else None


def check_space(trainable: object, space: Space) -> None:
    """Let a trainable refuse a box that it cannot use."""
    if isinstance(trainable, ChecksSpace):
        trainable.check_space(space)
