"""Linear probing without running the backbone twice: features are computed once and cached.

Features are as private as the rows they come from. They stay in memory, or in a file that only their owner can read
and that is gone when the run ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tacit.data.tabled import Table
from tacit.finetune.predictions import rows_that_fit, to, to_look_at
from tacit.finetune.tasks import outputs_of
from tacit.models import blocks_of, head_of

Layers = Literal["last", "all"]
LARGE = 2**30  # bytes of features beyond which they are kept in a file


class Backbone(nn.Module):
    """A model up to its head: what comes into the head ("last"), or the mean output of every block as well ("all")."""

    def __init__(self, model: nn.Module, layers: Layers = "last") -> None:
        super().__init__()
        if layers not in ("last", "all"):
            raise ValueError(f"Features are of the last layer or of all: 'last' or 'all', not {layers!r}.")
        self.model = model
        self.layers = layers

    def forward(self, inputs: Any) -> Tensor:
        return self.both(inputs)[0]

    def both(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Features and the model's own output."""
        seen: list[Tensor] = []
        hooks = []
        if self.layers == "all":
            blocks = [block for _, block in blocks_of(self.model)]
            hooks = [block.register_forward_hook(lambda _, __, out: seen.append(_pooled(out))) for block in blocks]
        hooks.append(head_of(self.model)[1].register_forward_pre_hook(lambda _, args: seen.append(args[0])))
        try:
            out = outputs_of(self.model, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return (torch.cat(seen, 1) if self.layers == "all" else seen[-1]), out


class Probe(nn.Module):
    """A backbone and a linear head on all its features."""

    def __init__(self, backbone: Backbone, head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, inputs: Any) -> Tensor:
        return self.head(self.backbone(inputs))  # type: ignore[no-any-return]


@contextmanager
def cached(backbone: Backbone, records: Table) -> Iterator[Table]:
    """The same records with features in place of their inputs; `backbone` runs over each row once."""
    with tempfile.TemporaryDirectory(prefix="tacit-features-") as folder:  # 0700: nobody else can look
        features = extract(backbone, records, Path(folder) / "features")
        yield records.with_inputs(features)


def extract(backbone: Backbone, records: Table, path: Path | None = None) -> Tensor:
    """Features of every row, in order; beyond a gigabyte memory-mapped from `path`."""
    device = next(backbone.parameters()).device
    out: Tensor | None = None
    sizes: Tensor | None = getattr(records, "row_sizes", None)
    with torch.no_grad():
        for rows in to_look_at(sizes, len(records.labels()), rows_that_fit(records)):
            found = backbone(to(records.read(rows), device)).cpu()
            if out is None:
                out = _space((len(records.labels()), *found.shape[1:]), found.dtype, path)
            out[rows] = found
    if out is None:
        raise ValueError("There are no rows to extract features from.")
    return out


def is_linear(model: nn.Module, inputs: Any) -> bool:
    """Whether the model's output is its head's, on vectors: then the head alone is the rest of the model.

    Told by numbers put in the place of the head's own, which may all be zero: what comes after would not show.
    """
    said: list[Tensor] = []

    def instead(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        said.append((torch.arange(out.numel(), device=out.device).to(out.dtype) - 0.3).view_as(out))
        return said[-1]

    hook = head_of(model)[1].register_forward_hook(instead)
    try:
        with torch.no_grad():
            features, out = Backbone(model).both(inputs)
    finally:
        hook.remove()
    return features.dim() == 2 and len(said) == 1 and torch.equal(said[0], out)


def _pooled(out: Any) -> Tensor:
    """A block's output as one vector per row: the mean over places (or tokens)."""
    value: Tensor = out[0] if isinstance(out, tuple) else out
    if value.dim() == 4:
        return value.mean((2, 3))
    return value.mean(tuple(range(1, value.dim() - 1))) if value.dim() > 2 else value


def _space(shape: tuple[int, ...], dtype: torch.dtype, path: Path | None) -> Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    if path is None or size <= LARGE:
        return torch.empty(shape, dtype=dtype)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.truncate(size)
    return torch.from_file(str(path), shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)
