"""`python -m studies`: run a recipe, list them all, or print the tables of finished ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from studies import runner
from studies.findings import show
from studies.part import wanted
from studies.tables import tables
from tacit.privacy import LedgerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 2 for bad input (one sentence on stderr), 130 if it was stopped."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.do(options))
    except (LedgerError, ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    out = options.out or Path("runs") / options.recipe.stem
    try:
        findings, facts = runner.run(options.recipe, out, wanted(options.only))
    except KeyboardInterrupt:
        print(f"Stopped: no report was written to {out}. What was charged to a ledger stays spent.", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        show(findings, facts, out)
    return 0


def _list(_: argparse.Namespace) -> int:
    for path in runner.listed():
        kind, config = runner.read(path)
        print(f"{path.as_posix():48} {kind:14} {config.title}")
    return 0


def _tables(options: argparse.Namespace) -> int:
    for path in options.recipe:
        _, study = runner.read(path, wanted(options.only))
        print(f"\n### {study.title} ({path.name})\n")
        for table in tables(study, options.out, shifts=options.shifts):
            print(table.markdown())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m studies", description="Reproduce the papers with tacit.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a recipe and write its report, its privacy card and its facts")
    run.add_argument("recipe", type=Path, help="PAPER/NAME.toml as in the list, or a TOML file of your own")
    run.add_argument("--out", type=Path, help="where the report goes; runs/NAME by default")
    run.add_argument("--json", action="store_true", help="print the facts as JSON")
    _part_of(run)
    run.set_defaults(do=_run)
    commands.add_parser("list", help="every recipe, its kind and its title").set_defaults(do=_list)
    printing = commands.add_parser(
        "tables", help="the tables of finished recipes as Markdown; what was not run is empty"
    )
    printing.add_argument("out", type=Path, help="the folder of the run")
    printing.add_argument("recipe", type=Path, nargs="+")
    printing.add_argument("--shifts", action="store_true", help="shift by shift as well")
    _part_of(printing)
    printing.set_defaults(do=_tables)
    return parser


def _part_of(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="a part of the recipe: seeds, and values of its arms, as in method=tent lr=0.01,0.03",
    )


if __name__ == "__main__":
    sys.exit(main())
