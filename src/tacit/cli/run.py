"""`tacit run`: any life of a model that is described in TOML, from the recipe to the report.

A kind of recipe is three names: the dataclass that its file fills, the function that does the work and the one that
turns what came out into a report. They are loaded when a recipe asks for them and not before.

    run(config, *, out: Path, progress: recipes.Progress) -> result
    render(result) -> report.write.Findings
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit import recipes
from tacit.cli.output import AsJson, console, print_json
from tacit.progress import Bar

if TYPE_CHECKING:
    from tacit.report.write import Findings


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Where a kind of recipe lives, each as ``package.module:name``."""

    config: str
    run: str
    render: str


KINDS: dict[str, Kind] = {
    "adapt": Kind(config="tacit.adapt.study:Study", run="tacit.adapt.study:run", render="tacit.report.adapt:render"),
    "finetune": Kind(
        config="tacit.finetune.study:Study",
        run="tacit.finetune.study:run",
        render="tacit.report.finetune:render",
    ),
    "pretrain": Kind(
        config="tacit.pretrain.study:Study",
        run="tacit.pretrain.study:run",
        render="tacit.report.pretrain:render",
    ),
    "recalibration": Kind(
        config="tacit.calibrate.study:Study",
        run="tacit.calibrate.study:run",
        render="tacit.report.recalibration:render",
    ),
    "source-model": Kind(
        config="tacit.pretrain.source:SourceModel",
        run="tacit.pretrain.source:run",
        render="tacit.report.source_model:render",
    ),
    "tune": Kind(config="tacit.tune.study:Study", run="tacit.tune.study:run", render="tacit.report.tune:render"),
}


def run(
    recipe: Annotated[Path, typer.Argument(help="A TOML file with a kind and its settings.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where the report goes; runs/NAME-OF-THE-RECIPE by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe and write its report, its privacy card and its facts."""
    out = out or Path("runs") / recipe.stem
    try:
        findings, facts = _run(recipe, out)
    except KeyboardInterrupt:
        typer.echo(f"Stopped: no report was written to {out}. What was charged to a ledger stays spent.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(facts)
        return
    screen = console()
    for table in findings.summary:
        screen.print(table.rich())
    if findings.ledgers:
        from tacit.report.ledger import Book, overview  # slow to load

        screen.print(overview([Book.of(ledger) for ledger in findings.ledgers]).rich())
    screen.print(facts["privacy"]["sentence"], markup=False)
    typer.echo(f"The report is {out / 'report.html'}, its privacy card {out / 'privacy-card.md'}.")  # never wrapped


def _run(recipe: Path, out: Path) -> tuple[Findings, dict[str, Any]]:
    """From the recipe to the files; whatever goes wrong, no folder is left behind that was made for nothing."""
    kind, config = recipes.read(recipe, _Configs())
    from tacit.report import write  # slow to load

    made = write.prepare(out)
    try:
        with Bar() as progress:
            result = _load(KINDS[kind].run)(config, out=out, progress=progress)
            findings: Findings = _load(KINDS[kind].render)(result)
            facts = write.write_run(
                out,
                title=findings.title,
                lead=findings.lead,
                sections=findings.sections,
                ledgers=findings.ledgers,
                facts=findings.facts,
                assumptions=findings.assumptions,
                not_covered=findings.not_covered,
                about={"kind": kind, "recipe": recipes.plain(config), "fingerprint": recipes.fingerprint(config)},
            )
            write.write_pictures(out, findings.sections)
    except BaseException:
        write.discard(made)
        raise
    return findings, facts


class _Configs(Mapping[str, type]):
    """The dataclass of each kind, loaded when it is looked up."""

    def __getitem__(self, kind: str) -> type:
        found: type = _load(KINDS[kind].config)
        return found

    def __contains__(self, kind: object) -> bool:
        return kind in KINDS

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
