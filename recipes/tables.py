"""The tables of finished studies as Markdown, for docs/reproduction: cells that were not run stay empty.

python recipes/tables.py OUT RECIPE.toml ... [--shifts]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tacit import recipes
from tacit.adapt import study as adapt
from tacit.finetune import study as finetune
from tacit.report import adapt as adapted
from tacit.report import finetune as finetuned
from tacit.report.tables import Table

KINDS = {"adapt": adapt.Study, "finetune": finetune.Study}


def tables(study: adapt.Study | finetune.Study, out: Path, *, shifts: bool) -> Iterator[Table]:
    if isinstance(study, finetune.Study):
        found = finetune.read(study, out)
        yield finetuned.by_epsilon(found)
        if any(found.shifted(arm) for arm in found.chosen):
            yield finetuned.by_epsilon(found, shifted=True)
        yield finetuned.chosen(found)
        return
    result = adapt.read(study, out)
    for setting in study.settings:
        yield adapted.overview(result, setting)
        if shifts:
            yield adapted.by_shift(result, setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("recipe", type=Path, nargs="+")
    parser.add_argument("--shifts", action="store_true", help="shift by shift as well")
    options = parser.parse_args()
    for path in options.recipe:
        _, study = recipes.read(path, KINDS)
        print(f"\n### {study.title} ({path.name})\n")
        for table in tables(study, options.out, shifts=options.shifts):
            print(table.markdown())


if __name__ == "__main__":
    main()
