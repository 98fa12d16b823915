"""Optuna's samplers in charge of private trials: they see what was released, and every trial is charged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator
from tacit.privacy import Budget, BudgetExceeded, Ledger, Neighbours, Unit
from tacit.privacy.events import check_count
from tacit.progress import shown
from tacit.recipes import Progress
from tacit.tune import _budget_split as equal
from tacit.tune._rehearsal import ends, lowest, rehearse_search
from tacit.tune._runners import Runner, SerialRunner
from tacit.tune._sampled import is_sampled
from tacit.tune._search import ENOUGH, SearchSession, Tuned, needed, open_subject, unit_of
from tacit.tune._space import Hyperparameters, Space
from tacit.tune._trainable import Score, Trainable, check_space, score_of, size_of
from tacit.tune._trials import Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The box as Optuna has it: every value on a logarithmic scale, steps and batch_size whole."""
    optuna = _optuna()
    whole, real = optuna.distributions.IntDistribution, optuna.distributions.FloatDistribution
    return {
        name: whole(int(low), int(high), log=True) if name in ("steps", "batch_size") else real(low, high, log=True)
        for name, (low, high) in space.ranges.items()
    }


@takes_context
def optuna_search(
    study: Study,
    trainable: Trainable,
    space: Space,
    budget: Budget,
    *,
    trials: int,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    of: int | None = None,
    score: Score | None = None,
    size: int | None = None,
    precision: float = 0.01,
    scores: float = 0.1,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    runner: Runner | None = None,
    curator: Curator | None = None,
    seed: int | None = None,
    progress: Progress | bool = False,
    context: PrivacyContext | None = None,
) -> Tuned:
    """`trials` charged trials at the points that an Optuna study's sampler asks for; the best model is the result.

    The study maximises. It receives each trial's noisy score, or that the trial failed (which stays charged); a trial's
    receipt and mu are its user attributes. If the subject has nothing left, the search stops, says so, and returns the
    best so far.

    Formal guarantee: mu^2 = of * (mu_run^2 + mu_score^2), at most that of the budget and charged run by run. The
    sampler sees scores that were released, so its choices depend on nothing else; that later charges depend on earlier
    releases is what the ledger's filter on sums of mu^2 allows for. Subsampled batches need a list of runs that is
    fixed in advance, which a sampler does not give: they are refused.

    Args:
        study: The study.
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`.
        space: The box of hyperparameters, fixed before anything is searched.
        budget: What the whole search may spend.
        trials: Trials of this process.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        of: Trials that share the budget (by default `trials`): several processes with one study in a database and one
            ledger each make some of them.
        score: `score(model)`: one number in [0, 1] per private unit; a `Finetuning` has its own.
        size: The public number of units; a `Finetuning` has its own.
        precision: The standard deviation of a score's noise that is enough, as a share.
        scores: The largest share of mu^2 that scores may take.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        runner: How trials run: `SerialRunner` (the default), `Processes(2)`, `RayRunner`.
        curator: Called with a `tacit.TrialEvent` for each trial.
        seed: Reproducible noise: "seeded: not private".
        progress: True shows a bar; a function gets the same facts.
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The best model, all trials and what the search cost.

    Raises:
        Refusal: The trainable or the score failed in a dry run; nothing was charged.
        RunFailed: No trial gave a model; after three that failed the rest of the budget is left.
    """
    del context  # its arguments are here; see takes_context
    check_count(trials, "trials")
    optuna = _optuna()
    if len(study.directions) != 1 or study.direction != optuna.study.StudyDirection.MAXIMIZE:
        raise ValueError("Scores are the higher the better: create the study with direction='maximize'.")
    if is_sampled(trainable, space, curator):
        raise ValueError(
            "A sampler chooses each run by what was released before, and subsampled batches compose only if all "
            "runs are fixed in advance: take steps over everybody, or random_search."
        )
    unit = unit_of(trainable, unit)
    box = distributions(space)
    session = SearchSession(
        trainable=trainable,
        ledger=ledger,
        subject=subject,
        neighbours=Neighbours(neighbours),
        delta=budget.delta,
        score=needed(score_of(trainable, score), "score"),
        size=needed(size_of(trainable, size), "size"),
        runner=runner or SerialRunner(),
        curator=curator,
        seed=seed,
    )
    check_space(trainable, space)
    rehearse_search(session, lowest(space), budget.mu, others=ends(space), keep=True)
    mu, mu_score = equal.share(budget, of or trials, size=session.size, precision=precision, scores=scores)
    open_subject(ledger, subject, budget, unit=unit, neighbours=neighbours)
    done: list[Trial] = []
    said: tuple[str, ...] = ()
    with shown(progress) as bar:
        session = replace(session, progress=bar)
        for number in range(trials):
            asked = study.ask(box)
            try:
                trial = _run(session, asked, mu, mu_score, number, trials)
            except BaseException as error:
                study.tell(asked, state=optuna.trial.TrialState.FAIL)
                if not isinstance(error, BudgetExceeded):
                    raise
                said = (f"Stopped after {number} of {trials} trials: {subject} has nothing left for another.",)
                break
            if trial.failed:
                study.tell(asked, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(asked, trial.score)
            done = _with(done, trial)
            if len(done) == ENOUGH and all(trial.failed for trial in done):
                said = (f"Stopped after {len(done)} of {trials} trials: all have failed.",)
                break
    return equal.chosen(session, done, mu, unit=unit, decisions=said)


def _run(session: SearchSession, asked: Any, mu: float, mu_score: float, number: int, trials: int) -> Trial:
    point = Hyperparameters(**asked.params)
    found = session.trials([point], mu, mu_score, name="optuna", before=number, of=trials, keep=True)[0]
    asked.set_user_attr("receipt", found.receipt)
    asked.set_user_attr("mu", mu)
    return found


def _with(done: list[Trial], trial: Trial) -> list[Trial]:
    """One more; the best so far keeps its model."""
    top = max((other.score for other in done if other.score is not None), default=None)
    if trial.score is None or (top is not None and trial.score <= top):
        return [*done, replace(trial, model=None)]
    return [*(replace(other, model=None) for other in done), trial]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError("Optuna is not installed: pip install 'tacit[optuna]'.") from None
    return optuna
