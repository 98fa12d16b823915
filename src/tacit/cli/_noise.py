"""`tacit noise`: how much noise meets a target, and what it then promises."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from tacit.cli._output import AsJson, console, print_json


def noise(
    epsilon: Annotated[float, typer.Option(help="What may be spent.")],
    delta: Annotated[float, typer.Option(help="With it; 0 is pure epsilon (Laplace noise).")],
    neighbours: Annotated[str, typer.Option(help="add-remove, replace-one or zero-out.")] = "add-remove",
    steps: Annotated[int, typer.Option(help="Releases in all.")] = 1,
    sample_rate: Annotated[float, typer.Option(help="Each unit is drawn with this probability at each step.")] = 1.0,
    unit: Annotated[str, typer.Option(help="Whom it protects: sample, video, patient, user.")] = "sample",
    accountant: Annotated[str, typer.Option(help="pld, rdp or gdp.")] = "pld",
    as_json: AsJson = False,
) -> None:
    """The noise multiplier (standard deviation over clip) that meets a target, and the guarantee it gives."""
    from tacit.privacy import Budget, Neighbours, events, guarantee, noise_multiplier
    from tacit.privacy.accounting import ACCOUNTANTS

    budget, relation = Budget(epsilon, delta), Neighbours(neighbours)
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"Unknown accountant {accountant!r}: choose one of {', '.join(ACCOUNTANTS)}.")

    def plan(sigma: float) -> events.DpEvent:
        one = events.laplace(sigma) if budget.pure else events.gaussian(sigma)
        return events.poisson(sample_rate, one, steps)

    sigma = noise_multiplier(budget, plan, neighbours=relation, accountant=accountant)
    promised = guarantee(plan(sigma), delta=delta, neighbours=relation, unit=unit, accountant=accountant)
    facts = {
        "noise_multiplier": sigma,
        "distribution": "laplace" if budget.pure else "gaussian",
        "epsilon": promised.epsilon,
        "delta": delta,
        "mu": promised.mu,
        "neighbours": relation.value,
        "unit": unit,
        "steps": steps,
        "sample_rate": sample_rate,
        "accountant": promised.accountant,
        "private": promised.private,
        "guarantee": str(promised),
    }
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("noise multiplier", f"[bold]{sigma:.6g}[/bold] times the clip ({facts['distribution']})")
    table.add_row(
        "steps", f"{steps}" + (f", each unit drawn with probability {sample_rate:g}" if sample_rate < 1 else "")
    )
    table.add_row("guarantee", str(promised))
    console().print(table)
