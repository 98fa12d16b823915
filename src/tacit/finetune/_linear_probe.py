"""What is really trained: the whole model on its rows, or its head alone on cached features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from tacit.data import Records, Table
from tacit.finetune._features import Backbone, Layers, Probe, cached, is_linear
from tacit.finetune._reading import likeness, to
from tacit.finetune._standardise import Statistics
from tacit.models import head_of


@dataclass(kw_only=True)
class LinearProbe:
    """What lies on the bench: `body` is trained on `records` and tried on `held_out`; `model` is handed back."""

    model: nn.Module
    body: nn.Module
    records: Records
    held_out: Records | None
    statistics: Statistics | None = None

    def standardised(self, statistics: Statistics) -> None:
        """Go on with features from which a released centre and scale were taken."""
        self.statistics = statistics
        self.records = _changed(self.records, statistics)
        self.held_out = None if self.held_out is None else _changed(self.held_out, statistics)

    def finish(self) -> nn.Module:
        """The whole model, as it takes rows."""
        if self.statistics is not None:
            self.statistics.fold(head_of(self.body)[1])
        return self.model.eval()


@contextmanager
def linear_probe(
    model: nn.Module,
    records: Records,
    held_out: Records | None,
    *,
    scheme: str,
    layers: Layers | None,
    wanted: bool = False,
    curator: object = None,
) -> Iterator[LinearProbe]:
    """The head on features where that is the same as the whole model, or `wanted`; otherwise all of it."""
    wanted = wanted or layers is not None
    tabled = isinstance(records, Table) and (held_out is None or isinstance(held_out, Table))
    possible = scheme == "linear" and tabled and not getattr(records, "augmented", False)
    if wanted and not possible:
        raise ValueError("Cached features are for scheme='linear' on tensors or data sets that are not augmented.")
    if not possible or (layers != "all" and not is_linear(model, blank_row(model, records, curator))):
        if wanted:
            raise ValueError("This model is more than a head on features of one vector per row: leave features= out.")
        yield LinearProbe(model=model, body=model, records=records, held_out=held_out)
        return
    with ExitStack() as stack:
        yield _on_features(stack, model, records, held_out, layers or "last", curator)


def _on_features(
    stack: ExitStack,
    model: nn.Module,
    records: Any,
    held_out: Records | None,
    layers: Layers,
    curator: object,
) -> LinearProbe:
    backbone = Backbone(model, layers)
    each = [one for one in (records, held_out) if isinstance(one, Table)]
    tables = [stack.enter_context(cached(backbone, one, curator)) for one in each]
    head = head_of(model)[1]
    if layers == "all":
        old = head
        head = nn.Linear(tables[0].inputs.shape[1], old.out_features, bias=old.bias is not None).to(old.weight)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        model = Probe(backbone.requires_grad_(False), head)
    return LinearProbe(model=model, body=head, records=tables[0], held_out=tables[1] if len(tables) > 1 else None)


def _changed(records: Any, statistics: Statistics) -> Table:
    changed: Table = records.with_inputs(statistics.apply(records.inputs))
    return changed


def blank_row(model: nn.Module, records: Records, curator: object = None) -> Any:
    """A blank row: the values of a real one decide nothing."""
    row = likeness(records, training=False, curator=curator).inputs
    return to(row, next(model.parameters()).device)
