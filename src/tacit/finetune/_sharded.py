"""Steps of a model whose parameters are sharded over the ranks (FSDP2): every rank updates its own rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tacit.distributed import Shards
from tacit.finetune._team_run import Parts, TeamRun
from tacit.finetune._torch_optimizer import TorchUpdater
from tacit.gradients import ClippedSum
from tacit.privacy import BoundedSum, mechanisms


class ShardedUpdater(TorchUpdater):
    """Sets each rank's rows of a released gradient; the optimizer of torch steps on them."""

    def __init__(self, given: TorchUpdater, shards: Shards) -> None:
        super().__init__(given.optimizer, given.parameters, given.stateful)
        self._shards = shards

    def step(self, gradient: Mapping[str, Tensor], number: int, factor: float = 1.0) -> None:
        del number, factor
        self._shards.set_gradient(dict(gradient))


@dataclass(kw_only=True)
class ShardedRun(TeamRun):
    """A run whose sums and releases are sharded like its parameters.

    Formal guarantee: that of `Run.step`: the integers that are added up, the noise and the grid are those of one
    process, coordinate by coordinate. The leader draws the noise and sends every rank that of its own rows, which is as
    private as the sum.
    """

    sharded: ClassVar[bool] = True
    shards: Shards
    sum_like: BoundedSum  # shapes and bounds of a whole sum; it has no values

    def _agree_on_weights(self) -> None:
        """Nothing: every rank holds its own rows, and they were compared before the charge."""

    def _add_up(self, parts: Parts) -> BoundedSum:
        """This rank's rows of the sum over all ranks."""
        with self.shards.gathered():
            rounds = math.ceil(len(parts) / self.team.size)
            return self.shards.add_up(self._sums(parts), self.sum_like, rounds)  # type: ignore[no-any-return]

    def _released(self, total: Any, noise: Any) -> dict[str, Tensor]:
        """This rank's rows of what is released."""
        like, team = self.sum_like, self.team
        made = team.alone(lambda: mechanisms.GaussianShards(like, self.receipt, noise=noise))
        grids = team.share(None if made is None else made.grids)
        drawn: Iterator[tuple[str, Tensor | None]] = ((name, None) for name in like.sum) if made is None else iter(made)
        return {
            name: mechanisms.add_shard(total.sum[name], self.shards.hand_out(name, whole), grids[name])
            for name, whole in drawn
        }


def without_values(zero: BoundedSum) -> ClippedSum:
    """Names, shapes and bounds of a sum of clipped gradients."""
    assert isinstance(zero, ClippedSum)
    return replace(zero, sum={name: torch.empty_like(value, device="meta") for name, value in zero.sum.items()})
