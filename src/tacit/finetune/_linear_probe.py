"""What is really trained: the whole model on its rows, or its head or last blocks alone on what is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from tacit._curator import Curator
from tacit.data import Records, TensorRecords
from tacit.distributed import Team
from tacit.finetune._features import Backbone, Layers, Probe, cached, extract, is_linear
from tacit.finetune._reading import likeness, to, where_of
from tacit.finetune._sources import as_records
from tacit.finetune._standardise import RowNormalizer, Statistics
from tacit.finetune._upper_blocks import CachedBlocks, upper_of
from tacit.models import head_of


@dataclass(kw_only=True)
class LinearProbe:
    """What lies on the bench: `body` is trained on `records` and tried on `held_out`; `model` is handed back."""

    model: nn.Module
    body: nn.Module
    records: Records
    held_out: Records | None
    statistics: Statistics | RowNormalizer | None = None

    def standardised(self, statistics: Statistics | RowNormalizer) -> None:
        """Go on with features from which a centre was taken and that were scaled."""
        self.statistics = statistics
        self.records = _changed(self.records, statistics)
        self.held_out = None if self.held_out is None else _changed(self.held_out, statistics)

    def finish(self) -> nn.Module:
        """The whole model, as it takes rows."""
        model = self.model
        if self.statistics is not None:
            model = self.statistics.before_head(model, head_of(self.body)[1])
        return model.eval()


@contextmanager
def linear_probe(
    model: nn.Module,
    records: Records,
    held_out: Records | None,
    *,
    scheme: str,
    layers: Layers | None,
    last_blocks: int | None = None,
    wanted: bool = False,
    curator: Curator | None = None,
    strict: bool = False,
    workers: int = 0,
    team: Team | None = None,
) -> Iterator[LinearProbe]:
    """The head on features where that is the same as the whole model, or `wanted`; otherwise all of it.

    `strict`: rows that cannot be read are refused; see `extract`. Of several ranks each computes a part.
    """
    wanted = wanted or layers is not None
    if last_blocks is not None:
        if wanted or team is not None:
            raise ValueError("last_blocks= goes without features=, standardise= and several ranks.")
        yield _on_blocks(model, records, held_out, last_blocks, curator=curator, strict=strict, workers=workers)
        return
    if isinstance(records, CachedBlocks):
        raise ValueError(f"These rows are cached for {records.last_blocks} blocks: give last_blocks=.")
    table = _table(records, training=True) if scheme == "linear" else None
    tried = None if table is None or held_out is None else _table(held_out, training=False)
    possible = table is not None and (held_out is None or tried is not None)
    if wanted and not possible:
        raise ValueError(
            "Cached features are for scheme='linear' on tensors, data sets or videos that are not augmented: leave "
            "features= and standardise= out, and give optimizer=."
        )
    if not possible or (layers != "all" and not is_linear(model, blank_row(model, records, curator))):
        if wanted:
            raise ValueError(
                "This model is more than a head on features of one vector per row: leave features= and standardise= "
                "out, and give optimizer=."
            )
        yield LinearProbe(model=model, body=model, records=records, held_out=held_out)
        return
    with ExitStack() as stack:
        keep = partial(cached, curator=curator, strict=strict, workers=workers, team=team)
        yield _on_features(stack, model, table, tried, layers or "last", keep)


def _on_features(
    stack: ExitStack,
    model: nn.Module,
    records: TensorRecords | None,
    held_out: TensorRecords | None,
    layers: Layers,
    keep: Callable[[Backbone, TensorRecords], AbstractContextManager[TensorRecords]],
) -> LinearProbe:
    backbone = Backbone(model, layers)
    each = [one for one in (records, held_out) if one is not None]
    tables = [stack.enter_context(keep(backbone, one)) for one in each]
    head = head_of(model)[1]
    if layers == "all":
        old = head
        head = nn.Linear(tables[0].inputs.shape[1], old.out_features, bias=old.bias is not None).to(old.weight)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        model = Probe(backbone.requires_grad_(False), head)
    return LinearProbe(model=model, body=head, records=tables[0], held_out=tables[1] if len(tables) > 1 else None)


def _on_blocks(
    model: nn.Module, records: Records, held_out: Records | None, last_blocks: int, **how: Any
) -> LinearProbe:
    """The last blocks on what comes into them."""
    body, rows = upper_of(model, records, last_blocks=last_blocks, **how)
    tried = None if held_out is None else upper_of(model, held_out, last_blocks=last_blocks, **how)[1]
    return LinearProbe(model=model, body=body, records=rows, held_out=tried)


def _table(records: Records, *, training: bool) -> TensorRecords | None:
    """Rows of which each has features of its own: those of a table, or the clips of videos; None: there are none."""
    if getattr(records, "augmented", False):
        return None
    if isinstance(records, TensorRecords):
        return records
    as_table = getattr(records, "as_table", None)
    return None if as_table is None else as_table(training=training)


def _changed(records: Any, statistics: Statistics | RowNormalizer) -> TensorRecords:
    changed: TensorRecords = records.with_inputs(statistics.apply_to(records.inputs))
    return changed


def blank_row(model: nn.Module, records: Records, curator: Curator | None = None) -> Any:
    """A blank row: the values of a real one decide nothing."""
    row = likeness(records, training=False, curator=curator).inputs
    return to(row, where_of(model))


def public_centre(model: nn.Module, data: Any, *, layers: Layers = "last") -> Tensor:
    """The mean feature of public rows: a centre for `RowNorm`, free because none of them needs protection.

    Args:
        model: The model whose head will be trained.
        data: Public rows, as in `fit`: other images or texts of the kind that the private ones are.
        layers: As `features` in `fit`.

    Returns:
        One vector, as long as the features of a row.

    Raises:
        ValueError: Rows that have no features of their own.
    """
    table = _table(as_records(data, public=True, model=model), training=False)
    if table is None:
        raise ValueError("A centre is of tensors, data sets or videos that are not augmented.")
    return extract(Backbone(model.eval(), layers), table).double().nanmean(0).float()
