"""The ranks of one run: the first one leads, the others compute sums of the portions that it hands them.

Only the leader has the ledger's receipt, the key of noise and sampling, and the sum of a step. It draws who takes part,
hands out whole portions (whole units, in memory-sized parts that do not depend on the number of ranks), gets the sum of
all ranks, adds the noise, and sends every rank what was released. So a run is one charge and one sequence of releases,
however many ranks there are.

Formal guarantee: every portion's float64 sum is rounded to a public grid of 2^-44 of its block's bound, and what the
ranks add up are integers: the total does not depend on the number of ranks, nor on the order in which they arrive. The
rounding moves the sum of p portions with d numbers by at most p sqrt(d) 2^-44 of the bound (for a thousand portions of
a hundred million numbers 6e-7 of it), which is below what the computation of rows itself rounds (see
``finetune`` ``Run.step``). A sum of more than 2^18 units would leave the integers: it is refused.

Between ranks go indices of units, sums without noise, and keys for what a model draws itself: the group's network has
to be as trusted as the memory of one process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

Value = TypeVar("Value")
_Kind = tuple[str, tuple[int, ...], torch.dtype]
_FINE = 44  # bits of a bound that the integers keep
_CHUNK = 1 << 19  # numbers that are added up at a time
MOST_UNITS = 2**18  # in one step: with 2^44 that is 62 bits


class Team:
    """The ranks of a run.

    Args:
        rank: This process's number.
        size: How many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which holds the ledger and the key."""
        return self.rank == 0

    def share(self, value: Value | None = None) -> Value:
        """The leader's value, on every rank.

        Args:
            value: On the leader, what to share; the others leave it out.

        Returns:
            The leader's value.
        """
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[no-any-return]

    def alone(self, action: Callable[[], Value]) -> Value | None:
        """What only the leader may do: it does it, and where it fails, every rank fails.

        Args:
            action: Called on the leader alone; what it returns stays there.

        Returns:
            The result on the leader, None on the others.

        Raises:
            LeaderFailed: On the other ranks, where the leader raises its own error.
        """
        found = self._try(action, lambda _: None)[0]
        return found if self.leads else None

    def lead(self, action: Callable[[], Value]) -> Value:
        """As `alone`, and every rank gets the result.

        Args:
            action: Called on the leader alone.

        Returns:
            The leader's result.

        Raises:
            LeaderFailed: On the other ranks, where the leader raises its own error.
        """
        said: Value = self._try(action, lambda found: found)[1]
        return said

    def lead_tensors(self, action: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """As `lead`, for tensors.

        Args:
            action: Called on the leader alone.

        Returns:
            The leader's tensors, bit for bit.

        Raises:
            LeaderFailed: On the other ranks, where the leader raises its own error.
        """
        return self._send(*self._try(action, _kinds))

    def share_tensors(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The leader's tensors, on every rank.

        Args:
            values: On the leader, what to share.

        Returns:
            The same tensors, bit for bit.
        """
        found = self._send(values, self.share(None if values is None else _kinds(values)))
        return {name: value.clone() for name, value in found.items()}  # each with a memory of its own, to be kept

    def _try(self, action: Callable[[], Value], told: Callable[[Value], Any]) -> tuple[Value | None, Any]:
        """The leader's result, which the others do not have, and what all are told of it, in one message."""
        if not self.leads:
            answer: tuple[bool, Any] = self.share()
            if not answer[0]:
                raise LeaderFailed("Rank 0 stopped here with an error of its own: see what it says.")
            return None, answer[1]
        try:
            found = action()
            said = told(found)
        except BaseException:
            self.share((False, None))
            raise
        return found, self.share((True, said))[1]

    def _send(self, values: Mapping[str, Tensor] | None, kinds: Sequence[_Kind]) -> dict[str, Tensor]:
        """The leader's tensors, as parts of one line for each dtype."""
        found: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(dtype for _, _, dtype in kinds):
            mine = [(name, shape) for name, shape, kind in kinds if kind == dtype]
            flat = torch.empty(sum(math.prod(shape) for _, shape in mine), dtype=dtype)
            if values is not None and mine:
                torch.cat([values[name].detach().cpu().reshape(-1) for name, _ in mine], out=flat)
            flat = flat.to(self.device)
            dist.broadcast(flat, src=0)
            parts = torch.split(flat.cpu(), [math.prod(shape) for _, shape in mine])
            found |= {name: part.view(shape) for (name, shape), part in zip(mine, parts, strict=True)}
        return {name: found[name] for name, _, _ in kinds}

    def join_rows(self, whole: Tensor) -> Tensor:
        """A tensor of which every rank has filled in some rows, and left zeros in the others; complete on every rank.

        Args:
            whole: This rank's rows; no row is filled in by two ranks.

        Returns:
            All rows, bit for bit.
        """
        raw = whole.detach().cpu().contiguous().view(-1).view(torch.uint8).to(self.device)
        dist.all_reduce(raw)
        return raw.cpu().view(whole.dtype).view(whole.shape).to(whole.device)

    def check_same(self, name: str) -> None:
        """Refuse ranks that are not set up alike.

        Args:
            name: A name for everything that must be the same: the model, the settings, the data.

        Raises:
            ValueError: Some rank says something else; on every rank.
        """
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, name)
        others = [rank for rank, each in enumerate(said) if each != said[0]]
        if others:
            ranks = ", ".join(map(str, others))
            raise ValueError(
                f"Rank {ranks} has another model, other settings or other data than rank 0: start all of them alike "
                "(the same weights, arguments and rows in the same order). Nothing was charged."
            )

    def mine(self, portions: Sequence[Value]) -> list[Value]:
        """The portions of this rank.

        Args:
            portions: Those of a step, the same on every rank.

        Returns:
            Those at rank, rank + size, rank + 2 size, …
        """
        return list(portions[self.rank :: self.size])

    def gather(self, found: list[Value]) -> list[Value]:
        """What all ranks have found, on every rank.

        Args:
            found: This rank's part.

        Returns:
            All parts, rank after rank.
        """
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, found)
        return [each for part in parts for each in part]

    def exchange(self, portions: Sequence[Tensor], whole: Tensor) -> None:
        """Rows of a tensor that every rank has computed for its own portions (`mine`), on all of them, in place.

        Args:
            portions: Places of rows, the same on every rank.
            whole: Has the rows of this rank's portions.
        """
        for number, places in enumerate(portions):
            rows = whole[places].to(self.device)
            dist.broadcast(rows, src=number % self.size)
            whole[places] = rows.to(whole.device)

    def add_up(
        self,
        sums: Iterable[Any],
        zero: Any,
        *,
        everyone: bool = False,
        meanwhile: Callable[[int], None] | None = None,
    ) -> Any:
        """The sum of what all ranks have, on the leader; the same bits for any number of ranks.

        Args:
            sums: Bounded sums of this rank's portions.
            zero: The sum over no unit.
            everyone: Whether every rank gets the total.
            meanwhile: What the leader does while the sums are on their way, given how many numbers they have.

        Returns:
            On the leader (or on every rank) the total; on the others a sum that means nothing.
        """
        grids = {name: grid_of(zero.bounds[block]) for block, names in zero.blocks.items() for name in names}
        names = sorted(zero.sum)
        sizes = [zero.sum[name].numel() for name in names]
        whole = torch.zeros(sum(sizes), dtype=torch.int64)
        seen = replace(zero, sum={})
        for part in sums:
            for name, to in zip(names, torch.split(whole, sizes), strict=True):
                to += (part.sum[name].double().cpu().reshape(-1) / grids[name]).round_().long()
            seen = seen + replace(part, sum={})
        whole = whole.to(self.device)
        under_way = self._send_off(whole, everyone)
        if meanwhile is not None and self.leads:
            meanwhile(len(whole))
        total = torch.empty(len(whole), dtype=torch.float64)
        for there, work in under_way:  # while one chunk is converted the next is on its way
            work.wait()
            total[there] = whole[there].cpu()
        parts = dict(zip(names, torch.split(total, sizes), strict=True))
        for name, part in parts.items():
            part *= grids[name]
        return replace(seen, sum={n: parts[n].view(like.shape).to(like.device) for n, like in zero.sum.items()})

    def _send_off(self, whole: Tensor, everyone: bool) -> list[tuple[slice, Any]]:
        """Have all ranks' integers added up, on the leader (or on every rank), in place: chunks and their work."""
        places = [slice(i, i + _CHUNK) for i in range(0, len(whole), _CHUNK)]
        if everyone:
            return [(each, dist.all_reduce(whole[each], async_op=True)) for each in places]
        return [(each, dist.reduce(whole[each], dst=0, async_op=True)) for each in places]

    @property
    def device(self) -> torch.device:
        """Where tensors have to be for the group to send them: nccl alone knows no CPU."""
        return (
            torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        )


class LeaderFailed(RuntimeError):
    """The first rank could not go on, so no rank can."""


def team() -> Team | None:
    """The ranks that this process is one of; None if it runs alone.

    Returns:
        The team, if `torch.distributed` was initialised.

    Raises:
        ValueError: torchrun started several processes, and they do not know of each other: each would charge.
    """
    if dist.is_available() and dist.is_initialized():
        return Team(dist.get_rank(), dist.get_world_size())
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            "torchrun started several processes, and each of them would charge by itself: call "
            "torch.distributed.init_process_group() first."
        )
    return None


def _kinds(values: Mapping[str, Tensor]) -> list[_Kind]:
    return [(name, tuple(value.shape), value.dtype) for name, value in values.items()]


def grid_of(bound: float) -> float:
    """A power of two, 2^-44 of the bound or up to twice as much."""
    return math.ldexp(1.0, math.frexp(bound)[1] - _FINE)
