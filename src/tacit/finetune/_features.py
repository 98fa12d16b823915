"""Linear probing without running the backbone twice: features are computed once and cached.

Features are as private as the rows they come from. They stay in memory, or in a file that has lost its name by the
time that anything is written to it (see `space_for`), so that it is gone however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tacit._curator import Curator
from tacit._refusals import Refusal
from tacit.data import TensorRecords
from tacit.distributed import Team
from tacit.finetune._one_pass import OnePass
from tacit.finetune._reading import Later
from tacit.finetune._tasks import outputs_of
from tacit.models import blocks_of, head_of

Layers = Literal["last", "all"]
LATE = (
    "Some rows cannot be read: with checkpoint= every row must be readable before the charge, so that steps can be "
    "replayed. Nothing was charged. Details may reveal rows: see curator=."
)
LARGE = 2**30  # bytes of features beyond which they are kept in a file


class Backbone(nn.Module):
    """A model up to its head: what comes into the head ("last"), or the mean output of every block as well ("all").

    Args:
        model: The model.
        layers: "last" or "all".
    """

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
    """A backbone and a linear head on all its features.

    Args:
        backbone: Makes the features.
        head: Is applied to them.
    """

    def __init__(self, backbone: Backbone, head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, inputs: Any) -> Tensor:
        return self.head(self.backbone(inputs))  # type: ignore[no-any-return]


@contextmanager
def cached(
    backbone: Backbone,
    records: TensorRecords,
    curator: Curator | None = None,
    *,
    strict: bool = False,
    workers: int = 0,
    team: Team | None = None,
) -> Iterator[TensorRecords]:
    """The same records with features in place of their inputs; `backbone` runs over each row once, on one rank."""
    with tempfile.TemporaryDirectory(prefix="tacit-features-") as folder:  # 0700: no other user can read it
        features = extract(
            backbone, records, Path(folder) / "features", curator, strict=strict, workers=workers, team=team
        )
        yield records.with_inputs(features)


def extract(
    backbone: Backbone,
    records: TensorRecords,
    path: Path | None = None,
    curator: Curator | None = None,
    *,
    strict: bool = False,
    workers: int = 0,
    team: Team | None = None,
) -> Tensor:
    """Features of every row, in order; beyond a gigabyte memory-mapped from `path`.

    Formal guarantee: a row that cannot be read, is of another kind than the others, or makes the backbone raise has
    features that are NaN, so that its unit adds zero to every sum; it keeps its place, and no other row's features
    depend on it. A backbone that does not keep rows apart in evaluation mode is refused (see `OnePass`): a row that
    changes the features of others has no bound. A backbone that draws random numbers is refused: it draws by position,
    so that one row more or less would change the features of all after it, and features that are computed again after
    a kill would be others. For the same reason a row that cannot be read stops a run that may be resumed (`strict`): it
    might be readable then.

    Args:
        backbone: A frozen model, or its layers up to those whose output is wanted.
        records: The rows.
        path: A file for what is larger than a gigabyte.
        curator: Receives errors about unusable rows (see `tacit.Curator`).
        strict: Raise for a row that cannot be read now and might be later.
        workers: Processes that read rows ahead of time; 0: none.
        team: Ranks that share the rows.

    Returns:
        One line per row. Private.

    Raises:
        RowsMixed: The features of a row depend on other rows.
        ValueError: The backbone draws random numbers; or rows cannot be read, and `strict` is set.

    Examples:
        >>> import torch
        >>> from tacit.data import TensorRecords
        >>> from tacit.finetune import Backbone, extract
        >>> rows = TensorRecords(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> tuple(extract(Backbone(model), rows).shape)  # what the last layer, the head, is given
        (5, 3)
    """
    out: Tensor | None = None
    rows = len(records.labels())
    over = OnePass(backbone, records, curator, strict=strict, workers=workers, team=team)
    late = False
    try:
        for places, found in over:
            if out is None:
                out = space_for((rows, *found.shape[1:]), found.dtype, path)
            out[places] = found
    except Later:
        late = True
    if late if team is None else any(team.gather([late])):
        raise Refusal(LATE)
    if team is not None and over.portions:
        shape, dtype = team.share(None if out is None else (out.shape[1:], out.dtype))  # the leader has the first rows
        out = space_for((rows, *shape), dtype, path) if out is None else out
        team.exchange(over.portions, out)
    if out is None:
        raise Refusal("There are no rows to extract features from.")
    return out


def is_linear(model: nn.Module, inputs: Any) -> bool:
    """Whether the model's output is its head's, on vectors: then the head alone is the rest of the model.

    Determined with numbers put in the place of the head's own, which may all be zero: what comes after would not show.
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


def space_for(shape: tuple[int, ...], dtype: torch.dtype, path: Path | None) -> Tensor:
    """Room for so many numbers: in memory, or beyond a gigabyte in a file that only its owner can read.

    Formal guarantee: the file loses its name as soon as it is mapped, while it holds zeros. So nothing can open it any
    more, and its space is free again when the process ends, also if it is killed. Where a file in use cannot lose its
    name (Windows), it is there until whoever made its folder removes that: a killed process leaves it behind.
    """
    size = dtype.itemsize * torch.Size(shape).numel()
    if path is None or size <= LARGE:
        return torch.empty(shape, dtype=dtype)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.truncate(size)
    room = torch.from_file(str(path), shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)
    with suppress(OSError):
        path.unlink()
    return room
