"""Adam without its second moment (DPAdamWOSM; Mohapatra et al., 2021): the noise says how large a step is.

Under privacy the squared gradients that Adam averages are nearly all noise, so their average is known beforehand: the
variance of the noise. With that constant in its place Adam is momentum with a learning rate that needs no search.
"""

from __future__ import annotations

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator
from tacit._deprecation import renamed_argument
from tacit.finetune import DPGD, Optimizer
from tacit.privacy import Budget, Ledger, Neighbours, Unit, released
from tacit.privacy.events import DpEvent, leaves
from tacit.tune._budget_split import check_budget, declare
from tacit.tune._plan import SHAVE
from tacit.tune._rehearsal import rehearse
from tacit.tune._search import SearchSession, Tuned, needed, unit_of
from tacit.tune._space import Hyperparameters
from tacit.tune._trainable import Trainable, sampled_at, size_of
from tacit.tune._trials import event_of

BETA = 0.9


def dpgd_wosm(hyperparameters: Hyperparameters) -> Optimizer:
    """Full-batch gradient descent along Adam's first moment: momentum, with the start's bias taken out.

    Args:
        hyperparameters: lr, steps and, where it is searched, clip.

    Returns:
        The optimizer.
    """
    clip = 1.0 if hyperparameters.clip is None else hyperparameters.clip
    return DPGD(
        lr=hyperparameters.lr,
        steps=hyperparameters.steps,
        clip=clip,
        momentum=BETA,
        schedule="debiased",
        free_step=False,
    )


@takes_context
def adam_without_second_moment(
    trainable: Trainable,
    budget: Budget,
    *,
    steps: int,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    lr: float = 0.001,
    clip: float | None = None,
    batch_size: int | None = None,
    size: int | None = None,
    stabiliser: float = 1e-8,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    curator: Curator | None = None,
    seed: int | None = None,
    context: PrivacyContext | None = None,
    batch: int | None = None,
) -> Tuned:
    """One run at the whole budget whose learning rate follows from its noise; the number of steps is given.

    A step is lr * m / (noise + stabiliser), where m is Adam's first moment of the released mean gradients and `noise`
    the standard deviation of the noise in one of them: sigma * clip / size (or / batch_size, for Poisson subsampling).
    So the trainable is called with the learning rate lr / (noise + stabiliser) and has to step along m: for a
    `Finetuning`, give it `optimizer=dpgd_wosm`.

    Formal guarantee: one run of the budget's mu (with Poisson-subsampled batches: of its (epsilon, delta), by PLD). The
    learning rate is made of the noise multiplier, the clip and the declared size, which are public: choosing it reads
    no data.

    Args:
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`.
        budget: What the whole search may spend.
        steps: The number of steps.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        lr: Adam's learning rate.
        clip: The clip, if the trainable takes it from hyperparameters.
        batch_size: The expected batch size, for Poisson subsampling.
        size: The public number of units; a `Finetuning` has its own.
        stabiliser: Keeps the divisor away from zero.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        curator: Called with a `tacit.TrialEvent` for each trial.
        seed: Reproducible noise: "seeded: not private".
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …
        batch: The earlier name of `batch_size`; it warns.

    Returns:
        The model and what it cost.
    """
    del context  # its arguments are here; see takes_context
    batch_size = renamed_argument("batch", batch, "batch_size", batch_size, where="adam_without_second_moment")
    check_budget(budget)
    if not (lr > 0 and stabiliser >= 0):
        raise ValueError("lr is above 0 and stabiliser not negative.")
    relation, people = Neighbours(neighbours), needed(size_of(trainable, size), "size")
    mu = budget.mu * SHAVE
    point = Hyperparameters(lr=lr, steps=steps, batch_size=batch_size, clip=clip)
    by_chance = sampled_at(trainable, point, curator)
    unit = unit_of(trainable, unit)
    session = SearchSession(
        trainable=trainable,
        ledger=ledger,
        subject=subject,
        neighbours=relation,
        delta=budget.delta,
        curator=curator,
        seed=seed,
    )
    if by_chance and batch_size is None:
        raise ValueError("Give batch_size=, the mean size of the batches that are drawn: sums are divided by it.")
    _sigma(event_of(trainable, point, mu, relation, curator))
    rehearse(trainable, point, mu, relation, curator=curator)
    mu = declare(session, [point], mu, None, budget, unit=unit, sampled=by_chance)
    event = event_of(trainable, point, mu, relation, curator)
    noise = _sigma(event) * (1.0 if clip is None else clip) / (batch_size if by_chance and batch_size else people)
    found = Hyperparameters(lr=lr / (noise + stabiliser), steps=steps, batch_size=batch_size, clip=clip)
    return Tuned(
        model=session.train(found, mu, event, note="adam without second moment"),
        hyperparameters=found,
        trials=(),
        guarantee=ledger.spent(subject),
        decisions=(f"The noise in a mean gradient is {noise:.4g}: the learning rate is {found.lr:.4g}.",),
        final_run_guarantee=session.alone(mu, unit),
    )


def _sigma(event: DpEvent) -> float:
    """The noise multiplier of every step."""
    found = {getattr(released(leaf), "noise_multiplier", None) for leaf, _ in leaves(event)}
    if len(found) != 1 or None in found:
        raise ValueError("The steps of this trainable do not all have one noise, so it gives no learning rate.")
    return float(found.pop())  # type: ignore[arg-type]
