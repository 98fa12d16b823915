"""The sharded parameters of a model (FSDP2, ``fully_shard``), and integers added up shard by shard.

Between steps every rank holds its rows of each parameter. For a step the parameters are gathered, each rank computes
sums over its own units (a unit's norm is then known on the rank that computes it), and what leaves a rank are the same
integers as of a model that is not sharded, of which each rank gets the sum of its own rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from tacit.distributed._team import Team, grid_of

_FSDP = "torch.distributed.fsdp"  # slow to import: whoever has a sharded model has imported it


class Shards:
    """The parameters of a model after ``fully_shard``.

    Args:
        model: Sharded over all ranks.
        team: The ranks.

    Raises:
        ValueError: It is sharded in another way than by rows over all ranks.
    """

    def __init__(self, model: nn.Module, team: Team) -> None:
        from torch.distributed.tensor import DTensor, Shard

        self.team = team
        self._modules: list[Any] = _sharded_modules(model)
        self.parameters: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in self.parameters.items():
            whole = isinstance(parameter, DTensor) and parameter.device_mesh.size() == team.size
            if not (whole and parameter.placements == (Shard(0),)):
                raise ValueError(
                    f"The parameter {name!r} is not sharded by rows over all {team.size} ranks: call fully_shard on "
                    "the model itself (after its blocks), with the default mesh and placement."
                )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While this lasts, every rank holds all parameters as plain tensors. All ranks enter together."""
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                module.set_reshard_after_forward(module is not self._modules[0], recurse=False)
                module.set_reshard_after_backward(True, recurse=False)
                module.reshard()

    def add_up(self, sums: Iterable[Any], zero: Any, rounds: int) -> Any:
        """The sum of what all ranks have, of which each gets its own rows; the same bits for any number of ranks.

        Args:
            sums: Bounded sums of this rank's portions.
            zero: The sum over no unit.
            rounds: The most portions that a rank has.

        Returns:
            The sum with this rank's rows of every tensor.
        """
        grids = {name: grid_of(zero.bounds[block]) for block, names in zero.blocks.items() for name in names}
        mine = {name: torch.zeros(self._local(name), dtype=torch.int64) for name in zero.sum}
        seen, source = replace(zero, sum={}), iter(sums)
        for _ in range(rounds):
            part = next(source, None)
            for name, rows in mine.items():
                whole = torch.zeros(self._padded(name), dtype=torch.int64)
                if part is not None:
                    whole[: len(zero.sum[name])] = (part.sum[name].double().cpu() / grids[name]).round().long()
                own = torch.empty(len(whole) // self.team.size, *whole.shape[1:], dtype=torch.int64)
                own, whole = own.to(self.team.device), whole.to(self.team.device)
                dist.reduce_scatter_tensor(own, whole)
                rows += own.cpu()[: len(rows)]
            if part is not None:
                seen = seen + replace(part, sum={})
        return replace(seen, sum={name: rows.double() * grids[name] for name, rows in mine.items()})

    def hand_out(self, name: str, whole: Tensor | None) -> Tensor:
        """This rank's rows of a tensor that the leader has.

        Args:
            name: The parameter that it is shaped like.
            whole: On the leader, the tensor (float64).

        Returns:
            The rows.
        """
        rows = self._padded(name)
        own = torch.empty(rows[0] // self.team.size, *rows[1:], dtype=torch.float64, device=self.team.device)
        parts = None
        if whole is not None:
            padded = torch.zeros(rows, dtype=torch.float64)
            padded[: len(whole)] = whole
            parts = list(torch.chunk(padded.to(self.team.device), self.team.size))
        dist.scatter(own, parts, src=0)
        return own.cpu()[: self._local(name)[0]].clone()

    def set_gradient(self, gradient: dict[str, Tensor]) -> None:
        """Put this rank's rows of a released gradient in place of whatever gradient the parameters have.

        Args:
            gradient: The rows, by name.
        """
        from torch.distributed.tensor import DTensor

        for name, parameter in self.parameters.items():
            local = gradient[name].to(parameter.dtype).to(parameter.device)
            parameter.grad = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

    def _local(self, name: str) -> torch.Size:
        found: torch.Size = self.parameters[name].to_local().shape
        return found

    def _padded(self, name: str) -> tuple[int, ...]:
        """The parameter's shape with rows for all ranks alike: shards are those of ``torch.chunk``."""
        first, *rest = self.parameters[name].shape
        return (math.ceil(first / self.team.size) * self.team.size, *rest)


def shards_of(model: nn.Module, team: Team | None) -> Shards | None:
    """The shards of a model; None if it is not sharded.

    Args:
        model: Any model.
        team: The ranks.

    Returns:
        Its shards, if ``fully_shard`` was called on it.

    Raises:
        ValueError: It is sharded, and not by rows over all ranks.
    """
    if team is None or _FSDP not in sys.modules or not _sharded_modules(model):
        return None
    return Shards(model, team)


def _sharded_modules(model: nn.Module) -> list[nn.Module]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
