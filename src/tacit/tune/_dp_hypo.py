"""DP-HyPO (Wang et al., 2023): repeat and select whose trials learn from the noisy scores of those before.

Formal guarantee. One trial at any point is eps(order)-RDP. A trial draws its point from a density that may depend on
all earlier trials, but lies between c and C times that of a fixed draw from the box, whatever these were; the number of
trials T is geometric, of halting probability gamma, and depends on nothing. Then the winner (its model and its point)
is eps'-RDP (Wang et al., theorem 1, at shape 1), for any second order a,

    eps'(order) = eps(order) + 2 ((1 - 1/a) eps(a) + log(1/gamma) / a) + log(E T) / (order - 1)
                  + (3 + 1/(order - 1)) log(C/c).

Why. Let q(y) be the density of an outcome y under the fixed draw, Q(y) the probability of outcomes that rank no higher,
and p, P those of the search; a prime marks the neighbouring data set. Whatever came before, an outcome y has a density
between c q(y) and C q(y), and one that ranks higher a probability between c (1 - Q(y)) and C (1 - Q(y)). With f the
generating function of T, f'(x) = gamma (1 - (1 - gamma) x)^-2, summing over the place of the winner gives

    p(y) <= C q(y) f'(1 - c (1 - Q(y)))    and    p'(y) >= c q'(y) f'(max(0, 1 - C (1 - Q'(y)))).

Since c <= 1 <= C, the ratio of the two f' is at most ((C/c) (gamma + (1 - gamma)(1 - Q')) / (gamma + (1 - gamma)(1 -
Q)))^2, and the rest is the proof of Papernot & Steinke (2022, theorem 2): the fraction without C/c is that of the
probabilities of one randomised event under q' and q, at most gamma^(-1/a) e^((1 - 1/a) eps(a)), and f' is at most E T.
Factors C and c outside of f' add log(C/c) + log(C)/(order - 1), the squared ratio 2 log(C/c); the theorem has
log(C/c)/(order - 1) in place of log(C)/(order - 1), which is more, and is what is charged here. Scores that tie are
ranked by their place: in place of f' stands its mean between two arguments, each pair of which is bounded as above.

How it is charged. The theorem's eps' is that of plain repeat and select with the halting probability gamma c/C, of a
trial that costs a constant divergence of log(C/c) more (substitute and see). That is the one event in the ledger; the
receipt's own number of trials is cut short by an independent geometric one, so that the lesser of the two has the
halting probability gamma. Distributions of other shapes have no such form and are not offered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tacit._context import IN_CONTEXT, PrivacyContext, takes_context
from tacit._curator import Curator
from tacit.privacy import Budget, Ledger, Neighbours, Unit, UnsupportedEvent, selection
from tacit.privacy.events import gaussian_noise
from tacit.tune._repeat import Numbers, Outcome, RunTrial, carried_out
from tacit.tune._repeat_plan import Number, Repeats, planned
from tacit.tune._search import Tuned, needed, unit_of
from tacit.tune._space import Space
from tacit.tune._trainable import Score, Trainable, size_of

CANDIDATES = 64  # of a trial, drawn from the box; an even number
SCALE = 0.3  # over which scores are alike, as a share of each range (on its logarithmic scale)
_UP = 1 + 1e-9  # the halting probability is rounded up, so that there are no more trials than charged for
_DOWN = 1 - 1e-12  # the probability of the better half is rounded down, by more than uniforms of 53 bits are coarse
_PLAIN = 1 + 1e-9  # a ratio below it changes nothing


def plan_dp_hypo(
    trainable: Trainable,
    space: Space,
    budget: Budget,
    *,
    mean: float = 10.0,
    ratio: float | None = None,
    size: int | None = None,
    precision: float = 0.01,
    scores: float = 0.1,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    curator: Curator | None = None,
) -> Repeats:
    """What `dp_hypo` will charge with these arguments: one event that meets the budget.

    Args:
        trainable: As in `dp_hypo`.
        space: The box of hyperparameters.
        budget: What the whole search may spend.
        mean: The mean number of trials.
        ratio: C/c, as in `dp_hypo`.
        size: The public number of units; a `Finetuning` has its own.
        precision: The standard deviation of a score's noise that is enough, as a share.
        scores: The largest share of mu^2 that scores may take.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        curator: Called with a `tacit.ErrorEvent` if the trainable cannot say what it releases.

    Returns:
        What the search charges, and what one trial may spend.

    Raises:
        ValueError: The budget does not pay for such a ratio.
    """
    ratio = _checked(ratio, budget)
    if not 1 <= mean < math.inf:
        raise ValueError(f"A search has at least one trial in the mean, and finitely many; got {mean}.")
    number = Number(mean=mean * ratio, shape=1.0, tilt=math.log(ratio))
    try:
        return planned(trainable, space, budget, number, size, precision, scores, unit, neighbours, curator)
    except UnsupportedEvent as error:
        if ratio == 1:
            raise
        raise ValueError(
            f"Epsilon {budget.epsilon:g} does not pay for a ratio of {ratio:g}, which takes about "
            f"{3 * math.log(ratio):.2g} of it: give a smaller one."
        ) from error


@takes_context
def dp_hypo(
    trainable: Trainable,
    space: Space,
    budget: Budget,
    *,
    ledger: Ledger = IN_CONTEXT,
    subject: str = IN_CONTEXT,
    mean: float = 10.0,
    ratio: float | None = None,
    score: Score | None = None,
    size: int | None = None,
    precision: float = 0.01,
    scores: float = 0.1,
    unit: Unit | str | None = None,
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    curator: Curator | None = None,
    seed: int | None = None,
    context: PrivacyContext | None = None,
) -> Tuned:
    """Train a secret number of models, `mean` on average, each where earlier scores are promising, and release the best
    one (DP-HyPO; Wang et al., 2023).

    Each trial draws 64 points of the box and ranks them by a Gaussian process over the noisy scores so far. One of the
    better half is tried with a probability that is `ratio` times that of the other half. All else is as in
    `repeat_and_select`: the subject's mode, what stays secret, and what a failing trial does.

    Learning from scores is expensive: about 3 log(ratio) of epsilon, so that a small budget allows hardly more than
    plain repeat and select.

    Formal guarantee: (epsilon, delta) of the budget for what is returned, the winner's model and hyperparameters; see
    the top of this module for the theorem, its proof and how it is charged. Ranks decide which candidates are the
    better half, so that one is drawn with 2 ratio/(1 + ratio) or 2/(1 + ratio) times its density under a plain draw: C
    and c. It does not hold for who sees the number of trials, their timing, or anything of a trial that lost.

    Args:
        trainable: `trainable(hyperparameters, mu, receipt)` trains a model on a receipt; `Finetuning` makes one of
            `finetune.fit`.
        space: The box of hyperparameters, fixed before anything is searched.
        budget: What the whole search may spend.
        ledger: Where everything is charged.
        subject: The data set's name in the ledger.
        mean: The mean number of trials, which is geometric.
        ratio: C/c, at least 1: how much more likely a promising point is than another. By default e^(epsilon/30), which
            takes about a tenth of epsilon.
        score: `score(model)`: one number in [0, 1] per private unit; a `Finetuning` has its own.
        size: The public number of units; a `Finetuning` has its own.
        precision: The standard deviation of a score's noise that is enough, as a share.
        scores: The largest share of mu^2 that scores may take.
        unit: The kind of unit; by default that of the trainable or score.
        neighbours: The neighbouring relation.
        curator: Called with a `tacit.TrialEvent` for each trial.
        seed: Reproducible noise: "seeded: not private".
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Returns:
        The winner's model and hyperparameters, and what the search cost.

    Raises:
        Refusal: The trainable or the score failed in a dry run; nothing was charged.
        BudgetExceeded: The subject cannot afford it; nothing was charged.
        RunFailed: No trial has won.
    """
    del context  # its arguments are here; see takes_context
    unit = unit_of(trainable, unit)
    plan = plan_dp_hypo(
        trainable,
        space,
        budget,
        mean=mean,
        ratio=ratio,
        size=size,
        precision=precision,
        scores=scores,
        unit=unit,
        neighbours=neighbours,
        curator=curator,
    )
    tilt = _checked(ratio, budget)
    halt = halting_besides(mean, tilt)
    noise = (gaussian_noise(plan.score) or 0.0) / needed(size_of(trainable, size), "size")

    def trials(each: Iterator[selection.SelectionTrial], run: RunTrial) -> Iterator[Outcome]:
        sides = len(space.ranges)
        process = Process(noise)
        for trial in each:
            last, side, place, *drawn = trial.uniforms(3 + CANDIDATES * sides).tolist()
            candidates = torch.tensor(drawn, dtype=torch.float64).view(CANDIDATES, sides)
            chosen = candidates[tilted(process.promise(candidates), tilt, side, place)]
            outcome = run(trial, space.draw(Numbers(chosen.tolist())))
            process.learn(chosen, outcome[0])
            yield outcome
            if last <= halt:
                return

    return carried_out(
        trainable,
        space,
        budget,
        plan,
        trials,
        ledger=ledger,
        subject=subject,
        score=score,
        size=size,
        unit=unit,
        neighbours=neighbours,
        curator=curator,
        seed=seed,
        note="DP-HyPO",
    )


def halting_besides(mean: float, ratio: float) -> float:
    """The probability to end after each trial with which a geometric number of mean `mean * ratio` gets mean `mean`.

    The lesser of two independent geometric numbers is geometric, and goes on with the product of the probabilities with
    which they go on.
    """
    if mean == 1:
        return 1.0
    return min(1.0, _UP * (1 - (1 - 1 / mean) / (1 - 1 / (mean * ratio))))


def tilted(promise: Tensor, ratio: float, side: float, place: float) -> int:
    """Which candidate is tried: one of the better half with probability ratio/(1 + ratio), each as likely as the others
    there. `side` and `place` are uniform in (0, 1].
    """
    if ratio < _PLAIN:
        return 0
    order = torch.argsort(promise, descending=True, stable=True)
    half = len(order) // 2
    better = side <= _DOWN * ratio / (1 + ratio)
    return int(order[min(int(place * half), half - 1) + (0 if better else half)])


class Process:
    """A Gaussian process over the scores so far, in the unit cube.

    Args:
        noise: The standard deviation of a score's noise.
    """

    def __init__(self, noise: float) -> None:
        self._noise = noise
        self._points: list[Tensor] = []
        self._scores: list[float] = []

    def learn(self, point: Tensor, score: float) -> None:
        """A trial; one that failed has the least score."""
        self._points.append(point)
        self._scores.append(score if math.isfinite(score) else 0.0)

    def promise(self, points: Tensor) -> Tensor:
        """Mean and one standard deviation of each point's score."""
        if not self._points:
            return torch.zeros(len(points), dtype=torch.float64)
        known, scores = torch.stack(self._points), torch.tensor(self._scores, dtype=torch.float64)
        centre = scores.mean()
        signal = max(float(scores.std(correction=0)), self._noise, 1e-3)
        alike = _alike(known, known) + torch.eye(len(known), dtype=torch.float64) * (1e-6 + (self._noise / signal) ** 2)
        across = _alike(points, known)
        solved = torch.linalg.solve(alike, torch.cat([(scores - centre)[:, None], across.T], 1))
        spread = (1 - (across * solved[:, 1:].T).sum(1)).clamp_min(0).sqrt()
        found: Tensor = centre + across @ solved[:, 0] + signal * spread
        return found


def _alike(a: Tensor, b: Tensor) -> Tensor:
    apart: Tensor = torch.cdist(a, b) / SCALE
    likeness: Tensor = torch.exp(-0.5 * apart.square())
    return likeness


def _checked(ratio: float | None, budget: Budget) -> float:
    found = math.exp(budget.epsilon / 30) if ratio is None else ratio
    if not 1 <= found < math.inf:
        raise ValueError(f"ratio is C/c, at least 1 (1: nothing is learnt from scores); got {found:g}.")
    return found
