"""`tacit audit`: attack what is claimed, and say how much of it was found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tacit._files import write_atomically
from tacit.cli._output import AsJson, console, print_json

if TYPE_CHECKING:
    from tacit.audit import Finding


def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A ledger or PIPELINE.toml (what it charged, or will charge, is attacked), module:function (a release "
            "of your own; say --mu, or --epsilon and --delta), or nothing: every release of the package."
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="What module:function claims, at --delta.")] = None,
    delta: Annotated[float, typer.Option(help="The delta of that claim.")] = 0.0,
    mu: Annotated[float | None, typer.Option(help="What it claims, as a mu.")] = None,
    trials: Annotated[int, typer.Option(help="Trials per finding (of a ledger or a function).")] = 100_000,
    canaries: Annotated[
        int | None,
        typer.Option(help="PIPELINE.toml: also run all of it once, on so many synthetic people that a coin puts in."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A fiftieth of the trials: a minute, looser bounds.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the table into this page, between its audit marks.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write page and card of the ledger here, with what was found.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw here what attacks find of adapted images: published, clipped, private.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep findings here until all are made: after a kill, the same command goes on from there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack claims: a lower bound with its confidence beside each; exit code 1 if any is above its claim."""
    from tacit.audit import checks, exposure, markdown, sentence  # slow to load

    findings: list[Finding] = []
    remarks: list[str] = []
    checked: list[checks.Check] = []
    for each in _attacks(
        target, epsilon=epsilon, delta=delta, mu=mu, trials=trials, quick=quick, keep=keep, canaries=canaries
    ):
        if isinstance(each, str):
            remarks.append(each)
        else:
            findings.append(each)
            if not as_json:
                console().print(_line(each), soft_wrap=True)
    if target is None:
        checked = checks.all_checks()
    if report is not None:
        _report(report, target, findings)
    if picture is not None:
        picture.resolve().parent.mkdir(parents=True, exist_ok=True)
        exposure().picture(picture)
    broken = not (all(each.holds for each in findings) and all(each.holds for each in checked))
    if out is not None and not broken:
        _write(out, markdown(findings))
    if keep is not None:
        keep.unlink(missing_ok=True)
    if as_json:
        facts = [{"name": c.name, "holds": c.holds, "detail": c.detail} for c in checked]
        shown = [finding.to_json() for finding in findings]
        print_json({"holds": not broken, "findings": shown, "checks": facts, "not_attacked": remarks})
    else:
        console().print(_table(findings))
        for check in checked:
            console().print(f"{'holds' if check.holds else 'BROKEN'}: {check.name} ({check.detail})", soft_wrap=True)
        for remark in remarks:
            console().print(remark, soft_wrap=True)
        console().print(sentence(findings), soft_wrap=True)
    if broken:
        raise typer.Exit(1)


def _attacks(
    target: str | None,
    *,
    epsilon: float | None,
    delta: float,
    mu: float | None,
    trials: int,
    quick: bool,
    keep: Path | None,
    canaries: int | None,
) -> Iterator[Finding | str]:
    from tacit import audit as attacks
    from tacit.privacy import Ledger

    trials = max(1_000, trials // 50) if quick else trials
    if canaries is not None and not (target or "").endswith(".toml"):
        raise ValueError("Canaries are put into a pipeline: tacit audit PIPELINE.toml --canaries 200.")
    if target is None:
        yield from attacks.everything(attacks.QUICK if quick else attacks.FULL, keep=keep)
    elif _names_a_function(target):
        if mu is None and epsilon is None:
            raise ValueError(f"Say what {target} claims: --mu, or --epsilon with --delta.")
        claim = attacks.Claim(mu=mu) if mu is not None else attacks.Claim(epsilon=epsilon, delta=delta)
        yield attacks.mechanism(_function(target), claim, name=target, trials=trials, strict=False)
    elif target.endswith(".toml"):
        from tacit import pipeline

        recipe = pipeline.read(target)
        with pipeline.planned_ledger(recipe) as book:
            yield from attacks.ledger(book, trials=trials)
        if canaries is not None:
            train, name = pipeline.CanaryRun(recipe, canaries), "the whole pipeline, one run"
            yield attacks.run(train, canaries, train.claim, neighbours=train.neighbours, name=name, strict=False)
    else:
        with Ledger(target, create=False) as book:
            yield from attacks.ledger(book, trials=trials)


def _report(out: Path, target: str | None, findings: list[Finding]) -> None:
    from tacit.privacy import Ledger
    from tacit.report import page

    if target is None or _names_a_function(target) or target.endswith(".toml"):
        raise ValueError("A report is written about a ledger: tacit audit LEDGER --report DIR.")
    with Ledger(target, create=False) as book:
        page(book, out, title=f"the ledger {Path(target).name}", attacked=findings)


def _names_a_function(target: str) -> bool:
    module, colon, name = target.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _function(target: str) -> Any:
    module, _, name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"There is no function {name} in {module}: {error}.") from None
    if not callable(found):
        raise ValueError(f"{target} is not a function of (present, trials).")
    return found


def _line(finding: Finding) -> str:
    mark = "[green]holds[/green]" if finding.holds else "[bold red]BROKEN[/bold red]"
    return f"{mark} {finding.name}: {finding.measured:.4g} of {finding.claimed:.4g}, {finding.seconds:.0f} s"


def _table(findings: Iterable[Finding]) -> Table:
    table = Table("attacked", "measure", "claimed", "found", "tightness", "trials", "confidence")
    for each in findings:
        measure = each.measure + (f" (delta {each.delta:g})" if each.delta else "")
        found = f"{each.measured:.4g}" if each.holds else f"[bold red]{each.measured:.4g}[/bold red]"
        share, sure = f"{100 * each.tightness:.0f}%", f"1 - {1 - each.confidence:.0e}"
        table.add_row(each.name, measure, f"{each.claimed:.4g}", found, share, f"{each.trials:,}", sure)
    return table


_BEGIN, _END = "<!-- audit: begin -->", "<!-- audit: end -->"


def _write(page: Path, text: str) -> None:
    before = page.read_text() if page.exists() else f"{_BEGIN}\n{_END}\n"
    if _BEGIN not in before or _END not in before:
        raise ValueError(f"{page} has no place for the table: put {_BEGIN} and {_END} there.")
    head, tail = before.split(_BEGIN)[0], before.split(_END)[1]
    write_atomically(page, f"{head}{_BEGIN}\n\n{text}\n{_END}{tail}")
