"""`run`: one training or adaptation run with canaries in it, and a lower bound on what it promises."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tacit.audit._bounds import one_run_epsilon, one_run_mu
from tacit.audit._findings import Claim, Finding, PromiseBroken
from tacit.audit._scores import CanaryScoreAuditor
from tacit.privacy import Neighbours, accounting, events, mu_of

Train = Callable[[Tensor], Any]  # (which canaries are in: a bool each) -> one score per canary
_DELTAS = tuple(10.0 ** (-k / 2) for k in range(2, 21))  # at which a promise is compared with a Gaussian's
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
CONFIDENCE = 1 - 1e-8


def run(
    train: Train,
    canaries: int,
    claim: Any,
    *,
    name: str = "run",
    neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
    share: float | None = None,
    confidence: float = CONFIDENCE,
    strict: bool = True,
    note: str = "",
) -> Finding:
    """Audit one run: a coin decides for each canary whether it is in, and the scores guess the coins.

    Args:
        train: Gets a bool per canary, runs whatever is audited with those that are in (and all other data), and
            returns a score per canary, high where it seems to be in. Any code will do: `finetune.fit`, an adapter over
            a stream, a whole search, one's own loop.
        canaries: How many there are. More canaries, a tighter bound: thousands, if they do not get into each other's
            way.
        claim: What the run promises, or a function that returns it once the run is over. Best is the event that it
            charges (under ``neighbours``), or a guarantee with a mu: an event that is not a Gaussian is compared by the
            least mu whose Gaussian promises no more anywhere (at deltas from 0.1 to 1e-10). A mere (epsilon, delta) is
            attacked with a weaker theorem, which finds nothing unless 2 ``canaries`` delta is far below 1 -
            ``confidence``.
        share: How many of the canaries are guessed, the highest scores "in" and as many of the lowest "out"; by default
            several shares are tried, each at a part of the significance (Bonferroni), and the best one counts.
        confidence: The probability that the bound is one.

    Returns:
        A finding in mu (Mahloujifar, Melis & Chaudhuri 2024) with Steinke, Nasr & Jagielski's bound on epsilon in its
        note, or in epsilon by the latter. One run is loose: at confidence 1 - 1e-8 a third of a true mu is a good
        result, whatever the attack. What it finds is true; what it does not find, `mechanism` may.

    Raises:
        PromiseBroken: More was found than was claimed (with ``strict``).
    """
    if canaries < 10:
        raise ValueError(f"{canaries} canaries tell nothing: give at least 10, and thousands if you can.")
    begun = time.perf_counter()
    significance = 1 - confidence
    shares = _SHARES if share is None else (share,)
    coins = _coins(canaries)
    scores = torch.as_tensor(train(coins.clone())).detach().double().flatten().cpu()
    if len(scores) != canaries:
        raise ValueError(f"{len(scores)} scores for {canaries} canaries: train returns one score per canary.")
    scores = torch.nan_to_num(scores, nan=0.0)
    promised = as_mu(claim() if callable(claim) else claim, neighbours)
    auditor = CanaryScoreAuditor(scores[coins], scores[~coins])
    delta = promised.delta if promised.mu is None else promised.delta or 1e-5

    def bound(guessed: tuple[int, int, int]) -> float:
        part = significance / len(shares)
        return one_run_mu(*guessed, part) if promised.mu is not None else one_run_epsilon(*guessed, delta, part)

    measured, guessed = max((bound(each), each) for each in map(auditor.guesses, shares))
    weak = one_run_epsilon(*auditor.guesses(0.2), delta, 0.05)
    found = Finding(
        name=name,
        measure=promised.measure,
        claimed=promised.value,
        measured=measured,
        delta=promised.delta if promised.mu is None else 0.0,
        trials=canaries,
        confidence=confidence,
        seconds=time.perf_counter() - begun,
        note=f"{guessed[2]} of {guessed[1]} guesses right, AUROC {auditor.attack_auroc():.3f}; epsilon at least "
        f"{weak:.3g} at delta {delta:g} with confidence 0.95 (one run is loose). " + note,
    )
    if strict and not found.holds:
        raise PromiseBroken([found])
    return found


def as_mu(claim: Any, neighbours: Neighbours | str = Neighbours.ADD_REMOVE) -> Claim:
    """A claim as a mu where it has one: its own, or that of an event's whole curve of epsilon and delta.

    That is the least mu whose Gaussian has no smaller delta at any epsilon that is looked at. One epsilon with one
    delta says nothing about the rest of the curve, and stays as it is.
    """
    promised = Claim.of(claim, neighbours=neighbours)
    if promised.mu is not None or not isinstance(claim, events.DpEvent) or promised.delta == 0:
        return promised
    points = [(accounting.guarantee(claim, delta=d, neighbours=Neighbours(neighbours)).epsilon, d) for d in _DELTAS]
    return Claim(mu=max(mu_of(epsilon, d) for epsilon, d in points if math.isfinite(epsilon)), delta=promised.delta)


def _coins(count: int) -> Tensor:
    """Fair coins from the operating system."""
    drawn = torch.frombuffer(bytearray(secrets.token_bytes(count)), dtype=torch.uint8)
    return drawn % 2 == 1
