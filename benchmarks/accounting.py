"""Calibrating the noise of 10,000 Poisson-sampled steps: tacit beside dp-accounting used directly and opacus' PRV.

Each arm finds the noise multiplier that meets (epsilon, delta); all are run in one process, interleaved, and given as
ratios to dp-accounting. The epsilon of each answer is then computed by one judge, dp-accounting's PLD on a finer grid.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import dp_accounting
from dp_accounting.pld import PLDAccountant
from opacus.accountants import PRVAccountant
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq

from tacit.privacy import Budget, events, noise_multiplier

EPSILON, DELTA, STEPS = 2.0, 1e-5, 10_000


def tacit(rate: float) -> float:
    return noise_multiplier(Budget(EPSILON, DELTA), lambda s: events.poisson(rate, events.gaussian(s), STEPS))


def dp_accounting_directly(rate: float) -> float:
    def make_event(sigma: float) -> dp_accounting.DpEvent:
        return events.poisson(rate, events.gaussian(sigma), STEPS)

    bracket = dp_accounting.ExplicitBracketInterval(0.3, 20.0)
    return float(dp_accounting.calibrate_dp_mechanism(PLDAccountant, make_event, EPSILON, DELTA, bracket, tol=1e-4))


def opacus_prv(rate: float) -> float:
    def spent(sigma: float) -> float:
        accountant = PRVAccountant()
        accountant.history = [(sigma, rate, STEPS)]
        return float(accountant.get_epsilon(DELTA)) - EPSILON

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(brentq(spent, 0.3, 20.0, xtol=1e-4))


ARMS: dict[str, Callable[[float], float]] = {
    "dp-accounting, directly": dp_accounting_directly,
    "opacus PRV": opacus_prv,
    "tacit": tacit,
}


def judged(sigma: float, rate: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=5e-5)
    accountant.compose(events.poisson(rate, events.gaussian(sigma), STEPS))
    return float(accountant.get_epsilon(DELTA))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    rows = []
    for rate in (0.001, 0.01):
        times: dict[str, list[float]] = {name: [] for name in ARMS}
        answers: dict[str, float] = {}
        for _ in range(options.rounds):
            for name, arm in ARMS.items():
                start = time.perf_counter()
                try:
                    answers[name] = arm(rate)
                except Exception as error:  # a peer that fails is a result, not a crash
                    answers[name] = float("nan")
                    Console().print(f"{name} failed at q = {rate}: {error}")
                times[name].append(time.perf_counter() - start)
        base = times["dp-accounting, directly"]
        for name, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
            sigma = answers[name]
            epsilon = judged(sigma, rate) if sigma == sigma else float("nan")
            rows.append({"sample_rate": rate, "arm": name, "ratio": ratio, "sigma": sigma, "epsilon_by_judge": epsilon})
    table = Table(
        "sample rate", "arm", "time, ratio", "sigma", "epsilon by the judge", title=f"Calibrate {STEPS:,} steps"
    )
    for row in rows:
        table.add_row(
            f"{row['sample_rate']:g}",
            str(row["arm"]),
            f"{row['ratio']:.3f}",
            f"{row['sigma']:.5f}",
            f"{row['epsilon_by_judge']:.5f}",
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
