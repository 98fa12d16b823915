"""`mechanism`: many releases on two neighbouring inputs, and how well the best test tells them apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.audit._bounds import Errors
from tacit.audit._findings import CONFIDENCE, Claim, Finding, PromiseBroken

Array = NDArray[np.float64]
Release = Callable[[bool, int], Any]  # (is the unit there?, trials) -> one number, or one row of numbers, per trial
_TUNING = 0.2  # share of the trials from which the test is made; it is then judged on the others
_THRESHOLDS, _AT_ONCE = 400, 100_000


def mechanism(
    release: Release,
    claim: Any,
    *,
    name: str = "mechanism",
    trials: int = 200_000,
    confidence: float = CONFIDENCE,
    strict: bool = True,
    note: str = "",
) -> Finding:
    """Attack a mechanism on two worst-case neighbouring inputs, and bound its mu or epsilon from below.

    Args:
        release: ``release(present, trials)`` runs the mechanism that often (independently) on the input with the unit
            or on its neighbour without, and returns what left: one number per trial, or one row of numbers.
        claim: What is promised: a ``Claim``, a ``Guarantee``, a ``Budget`` or an event.
        trials: How many trials per world judge the test; a fifth more make it.
        confidence: The probability, over the trials, that the bound returned is a bound.
        strict: Raise if the bound is above the claim, instead of returning a finding that does not hold.

    Returns:
        The finding. The test is a threshold on the likelihood ratio of two normals with the means and the covariance
        of the first trials (for one number: on that number). Direction and threshold are chosen on these trials and
        judged on fresh ones, by Clopper–Pearson bounds on both error rates, so nothing is chosen by peeking.

    Raises:
        PromiseBroken: The claim does not hold (with ``strict``).

    Example:
        >>> from numpy.random import default_rng
        >>> chance = default_rng(0)
        >>> found = mechanism(lambda there, n: chance.normal(float(there), 1.0, n), Claim(mu=1.0), trials=100_000)
        >>> 0.9 < found.measured <= 1.0
        True
    """
    promised, begun = Claim.of(claim), time.perf_counter()
    if trials < 100:
        raise ValueError(f"An audit of {trials} trials finds nothing: give at least 100.")
    first = max(int(_TUNING * trials), 50)
    project = _projection(*(_rows(release(there, min(first, _AT_ONCE))) for there in (False, True)))
    out, into = (_scored(release, there, first, project) for there in (False, True))
    threshold = _threshold(out, into, promised, 1 - confidence)
    out, into = (_scored(release, there, trials, project) for there in (False, True))
    errors = _errors(out, into, threshold)
    found = Finding(
        name=name,
        measure=promised.measure,
        claimed=promised.value,
        measured=promised.lower(*errors.upper(1 - confidence)),
        delta=promised.delta if promised.mu is None else 0.0,
        trials=2 * trials,
        confidence=confidence,
        seconds=time.perf_counter() - begun,
        note=note or promised.note,
    )
    if strict and not found.holds:
        raise PromiseBroken([found])
    return found


def _scored(release: Release, there: bool, trials: int, project: Callable[[Array], Array]) -> Array:
    """The scores of so many trials, asked for in portions that fit into memory."""
    parts = [min(_AT_ONCE, trials - start) for start in range(0, trials, _AT_ONCE)]
    return np.concatenate([project(_rows(release(there, part))) for part in parts])


def _rows(released: Any) -> Array:
    rows = np.asarray(released, dtype=np.float64)
    return rows[:, None] if rows.ndim == 1 else rows


def _projection(out: Array, into: Array) -> Callable[[Array], Array]:
    """The linear discriminant of two samples: the log-likelihood ratio of normals with their common covariance.

    A direction without any noise (noise that is used twice) has nothing to divide by: it gets a tiny variance instead,
    and then counts for everything.
    """
    if out.shape[1] == 1:
        sign = -1.0 if into.mean() < out.mean() else 1.0
        return lambda rows: sign * rows[:, 0]
    scale = np.maximum(np.concatenate([out, into]).std(axis=0), 1e-300)
    shift = (into.mean(axis=0) - out.mean(axis=0)) / scale
    covariance = (np.cov(out / scale, rowvar=False) + np.cov(into / scale, rowvar=False)) / 2
    values, vectors = np.linalg.eigh(covariance)
    direction = vectors @ ((vectors.T @ shift) / np.maximum(values, 1e-14)) / scale
    length = float(np.linalg.norm(direction))
    direction = direction / length if length > 0 else direction
    return lambda rows: rows @ direction


def _errors(out: Array, into: Array, threshold: float) -> Errors:
    """Of the attacker who says "in" where the score is above the threshold."""
    return Errors(
        false_positives=int((out > threshold).sum()),
        outs=len(out),
        false_negatives=int((into <= threshold).sum()),
        ins=len(into),
    )


def _threshold(out: Array, into: Array, claim: Claim, significance: float) -> float:
    """The threshold with the best bound on these trials; they are not used again."""
    both = np.sort(np.concatenate([out, into]))
    places = np.linspace(0, len(both) - 1, _THRESHOLDS).astype(int)
    found = [(claim.lower(*_errors(out, into, t).upper(significance)), float(t)) for t in np.unique(both[places])]
    best = max(found)
    if best[0] > 0:
        return best[1]
    return float(min(found, key=lambda each: sum(_errors(out, into, each[1]).upper(0.5)))[1])
