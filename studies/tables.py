"""The tables of finished studies, for docs/reproduction: cells that were not run stay empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from studies.dp_tta import report as adapted
from studies.dp_tta import study as adapt
from studies.dpadapter import report as pretrained
from studies.dpadapter import study as pretrain
from studies.finetune import report as finetuned
from studies.finetune import study as finetune
from studies.linear_scaling import report as tuned
from studies.linear_scaling import study as tune
from tacit.report import Table


def tables(study: Any, out: Path, *, shifts: bool = False) -> Iterator[Table]:
    """What an earlier run left in `out`, as tables."""
    if isinstance(study, finetune.Study):
        found = finetune.read(study, out)
        yield finetuned.by_epsilon(found)
        if any(found.shifted(arm) for arm in found.chosen):
            yield finetuned.by_epsilon(found, shifted=True)
        yield finetuned.chosen(found)
    elif isinstance(study, pretrain.Study):
        robust = pretrain.read(study, out)
        yield pretrained.upstream(robust)
        yield from pretrained.downstream(robust)
        yield from filter(None, (pretrained.sweep(robust, group) for group in study.pretrain))
        yield pretrained.rates(robust)
    elif isinstance(study, tune.Study):
        yield from tuned.tables(tune.read(study, out))
    elif isinstance(study, adapt.Study):
        result = adapt.read(study, out)
        for setting in study.settings:
            yield adapted.overview(result, setting)
            if shifts:
                yield adapted.by_shift(result, setting)
            yield from adapted.paired(result, setting)
    else:
        raise ValueError("The tables of this kind of recipe are in its report.")
