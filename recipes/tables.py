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
from tacit.pretrain import study as pretrain
from tacit.report import adapt as adapted
from tacit.report import finetune as finetuned
from tacit.report import pretrain as pretrained
from tacit.report import tune as tuned
from tacit.report.tables import Table
from tacit.tune import study as tune

KINDS = {"adapt": adapt.Study, "finetune": finetune.Study, "pretrain": pretrain.Study, "tune": tune.Study}
Study = adapt.Study | finetune.Study | pretrain.Study | tune.Study


def tables(study: Study, out: Path, *, shifts: bool) -> Iterator[Table]:
    if isinstance(study, finetune.Study):
        found = finetune.read(study, out)
        yield finetuned.by_epsilon(found)
        if any(found.shifted(arm) for arm in found.chosen):
            yield finetuned.by_epsilon(found, shifted=True)
        yield finetuned.chosen(found)
        return
    if isinstance(study, pretrain.Study):
        robust = pretrain.read(study, out)
        yield pretrained.upstream(robust)
        yield from pretrained.downstream(robust)
        yield from filter(None, (pretrained.sweep(robust, group) for group in study.pretrain))
        yield pretrained.rates(robust)
        return
    if isinstance(study, tune.Study):
        yield from tuned.tables(tune.read(study, out))
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
