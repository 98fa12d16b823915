"""Tune on a few, train on the rest (Koskela & Kulkarni, 2023): the two never share a person."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator
from tacit._refusals import Refusal, attempt
from tacit.privacy import Budget, Guarantee, Ledger, Neighbours, Unit
from tacit.privacy.events import DpEvent
from tacit.tune._budget_split import check_budget
from tacit.tune._plan import SHAVE
from tacit.tune._rehearsal import ends, lowest, rehearse
from tacit.tune._repeat import repeat_and_select
from tacit.tune._search import RunFailed, SearchSession, Tuned, needed, unit_of, without_model
from tacit.tune._space import Hyperparameters, Space
from tacit.tune._trainable import Splittable, Trainable, check_space, own_sampled, size_of
from tacit.tune._trials import event_of, event_within

_NO_PRICE = "The trainable does not say what its final run releases: it was not made, nor charged."
_FEWEST = 50  # declared units in a part: with fewer, one that is empty by chance might show

Scale = Literal["size", "keep"]


@takes_context
def subset_search(
    trainable: Trainable | None,
    space: Space,
    budget: Budget,
    *,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    rate: float = 0.2,
    parts: tuple[Trainable, Trainable] | None = None,
    search: Callable[..., Tuned] = repeat_and_select,
    scale: Scale = "size",
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    curator: Curator | None = None,
    seed: int | None = None,
    context: PrivacyContext | None = None,
    **options: Any,
) -> Tuned:
    """Search on a random part of the units, then train on all others; both with the whole budget.

    The ledger gets two subjects, "SUBJECT, to tune on" and "SUBJECT, the rest", declared disjoint: they are new ones
    each time, for the coins are. `guarantee` is the worse of the two. The time between their charges is that of the
    search: where that is secret (`repeat_and_select`), so are the times in the ledger.

    Formal guarantee: that of the budget, for each unit; unit and neighbours as given. Take two data sets that differ in
    one unit, toss the same coins for all others, and one for that unit (where it is absent, too: nothing depends on
    it). If its coin says "tune", the searches see neighbours and are alike to (epsilon, delta); the final run sees the
    same rest and what the search released: post-processing. If it says "rest", the searches see the same part, and for
    whatever they release the final runs see neighbours. The outcome is a mixture of such pairs with the same weights
    in both worlds, so it is alike to the worse of the two (the hockey-stick divergence is jointly convex): the maximum,
    not the sum. It needs coins that do not go by place: under add-remove everybody after a missing row would get their
    neighbour's coin. So they are fresh each time and kept nowhere; `seed` fixes them, and says "seeded: not private".
    Public: the declared sizes, rate * size rounded and the rest; the true ones are not.

    Args:
        trainable: Has `split(rate)`, as `Finetuning` does; or None, with `parts`.
        space: The box of hyperparameters, fixed before anything is searched.
        budget: What the whole search may spend.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        rate: Every unit is in the part to tune on with this probability.
        parts: (the trainable to tune, the one to train), of units assigned by coins.
        search: Any search of `tune`.
        scale: "size": gradients are means here, so the noise in them falls with the number of units, and the step that
            they carry grows: the learning rate found is multiplied by the ratio of the (public) sizes, and so is a
            searched batch_size, which keeps the sampling rate; both stay in the box. Steps and clip stay as they are.
            "keep": all do.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        seed: Reproducible coins and noise: "seeded: not private".
        curator: Called with a `tacit.TrialEvent` for each trial.
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …
        **options: Of the search, such as mean=5.

    Returns:
        The final model and what both parts cost.
    """
    del context  # its arguments are here; see takes_context
    check_budget(budget)
    if scale not in ("size", "keep"):
        raise ValueError(f"scale is 'size' or 'keep'; got {scale!r}.")
    relation = Neighbours(neighbours)
    few, rest = parts or _parts(trainable, rate, seed)
    sizes = {name: needed(size_of(one, None), "size") for name, one in (("few", few), ("rest", rest))}
    if min(sizes.values()) < _FEWEST:
        raise ValueError(
            f"A part of {min(sizes.values())} declared units is too small to keep to itself who is in it: at least "
            f"{_FEWEST} are needed. Nothing was charged."
        )
    unit = unit_of(rest, unit_of(few, unit))
    names = [f"{subject}, to tune on", f"{subject}, the rest"]
    if taken := [name for name in names if ledger.get_subject(name) is not None]:
        raise ValueError(f"There is a subject {min(taken)!r} already, of other coins: choose a new name.")
    middle = space.decompose(space.at(0.5))
    event_of(rest, middle, budget.mu, relation, curator)  # refuses what it cannot price, before paying
    check_space(rest, space)
    rehearse(rest, lowest(space), budget.mu, relation, curator=curator, others=[middle, *ends(space)])
    paying: dict[str, Any] = {"ledger": ledger, "subject": names[0], "unit": unit, "neighbours": relation, "seed": seed}
    try:
        found = search(few, space, budget, **paying, **({} if curator is None else {"curator": curator}), **options)
    except RunFailed as failed:  # the final run is for other people: it is made all the same
        if failed.result is None:
            raise
        found = failed.result
    point, decisions = _scaled(found, space, sizes["rest"] / sizes["few"], scale)
    mu = budget.mu * SHAVE
    try:
        event, sampled = attempt(_priced, rest, point, mu, relation, sentence=_NO_PRICE, curator=curator)
    except Refusal as refusal:
        raise without_model(str(refusal), replace(found, model=None, decisions=decisions)) from None
    plan = [event] if sampled else None
    ledger.subject(names[1], budget, unit=unit, neighbours=relation, plan=plan, disjoint_from=names[:1])
    session = SearchSession(
        trainable=rest,
        ledger=ledger,
        subject=names[1],
        neighbours=relation,
        delta=budget.delta,
        curator=curator,
        seed=seed,
    )
    model = session.train(point, mu, event)
    return Tuned(
        model=model,
        hyperparameters=point,
        trials=found.trials,
        guarantee=_worse(*(ledger.spent(name) for name in names)),
        decisions=decisions,
        final_run_guarantee=session.alone(mu, unit),
    )


def _priced(trainable: Trainable, point: Hyperparameters, mu: float, neighbours: Neighbours) -> tuple[DpEvent, bool]:
    """What the final run releases, and whether of Poisson-subsampled batches."""
    return event_within(trainable, point, mu, neighbours), own_sampled(trainable, point)


def _parts(trainable: Trainable | None, rate: float, seed: int | None) -> tuple[Trainable, Trainable]:
    if not isinstance(trainable, Splittable):
        raise ValueError("This trainable cannot split its people: give parts=(the one to tune, the one to train).")
    return trainable.split(rate, seed=seed)


def _scaled(found: Tuned, space: Space, ratio: float, scale: Scale) -> tuple[Hyperparameters, tuple[str, ...]]:
    """The winner's point for more people; the middle of the box if no trial has won."""
    point, said = found.hyperparameters, found.decisions
    if point is None:
        return space.decompose(space.at(0.5)), (*said, "The search has no winner: the middle of the box.")
    if scale == "keep":
        return point, said
    lr = min(max(point.lr * ratio, space.lr[0]), space.lr[1])
    batch_size = point.batch_size
    if batch_size is not None and space.batch_size is not None:
        batch_size = min(max(round(batch_size * ratio), space.batch_size[0]), space.batch_size[1])
    note = f"{ratio:.3g} times as many people: lr {point.lr:.4g} became {lr:.4g}" + (
        ", kept in the box." if lr != point.lr * ratio else "."
    )
    return replace(point, lr=lr, batch_size=batch_size), (*said, note)


def _worse(one: Guarantee, other: Guarantee) -> Guarantee:
    """Of two guarantees to different people: what holds for everybody."""
    worst = max(one, other, key=lambda guarantee: guarantee.epsilon)
    note = "the worse of two disjoint parts"
    return replace(worst, notes=(*worst.notes, note), seeded=one.seeded or other.seeded)
