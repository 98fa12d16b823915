"""Rows that stand for a batch in checks: of its shapes and types, but drawn."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tacit.gradients._batches import change, leaves

Domains = tuple[Tensor | None, ...]  # for each tensor of a batch the integers that stand for its own; None for floats


def synthetic(batch: Any, rows: int, seed: int, spread: float = 0.0) -> Any:
    """Rows of the same shape and type: floats uniform in [0, 1), integers from those that occur, each equally often.

    With a `spread`, floats are normal with that deviation. Where there is room, every integer occurs.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        shape = torch.Size((rows, *t.shape[1:]))
        if t.is_floating_point() or t.is_complex():
            drawn: Tensor = (torch.randn if spread else torch.rand)(shape, generator=generator)
            return (drawn * (spread or 1)).to(t.device, t.dtype)
        values = torch.unique(t)
        if not values.numel():
            return t.new_zeros(shape)
        places = torch.cat([torch.randperm(values.numel(), generator=generator), torch.arange(shape.numel())])
        places = places[: shape.numel()] % values.numel()
        order = torch.randperm(shape.numel(), generator=generator)
        return torch.reshape(values[places[order].to(t.device)], shape)

    return change(batch, draw)


def mirrored(batch: Any, rows: int) -> Any:
    """The first half of the rows, every second the negative of the one before, and then the same backwards.

    They are in order by no key at all that tells rows apart: a model that sorts them has to move some, so that rows
    taken for others show.
    """
    order = torch.arange(rows)
    order = torch.minimum(order, rows - 1 - order)
    odd = order % 2 == 1

    def mirror(t: Tensor) -> Tensor:
        if not (t.is_floating_point() or t.is_complex()):
            return t[order.to(t.device)]
        sign = torch.where(odd, -1.0, 1.0).to(t.device, t.dtype).reshape(-1, *[1] * (t.dim() - 1))
        return t[(order - odd.long()).to(t.device)] * sign

    return change(batch, mirror)


def constant(t: Tensor) -> bool:
    """Whether all entries are the same, so that what is drawn from them cannot differ."""
    return bool((t == t.reshape(-1)[:1]).all()) if t.numel() else True


def varies(t: Tensor) -> bool:
    """Whether integers differ; floats are drawn anew in any case."""
    return t.is_floating_point() or t.is_complex() or not constant(t)


def with_other_rows(batch: Any, other: Any, changed: Tensor) -> Any:
    """The rows that are to be changed from `other`, the rest as it was."""
    found: list[Tensor] = []
    change(other, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    queue = iter(found)

    def mix(t: Tensor) -> Tensor:
        mask = changed.to(t.device).reshape(-1, *[1] * (t.dim() - 1))
        return torch.where(mask, next(queue), t)

    return change(batch, mix)


def integers_of(batch: Any) -> Domains:
    """The integers that occur in each tensor of a batch."""
    return tuple(torch.unique(t) if _whole(t) else None for t in leaves(batch))


def united(one: Domains | None, other: Domains) -> Domains:
    """Both; the other alone if they are of different batches."""
    if one is None or [each is None for each in one] != [each is None for each in other]:
        return other
    return tuple(
        b if a is None or b is None else torch.unique(torch.cat([a.to(b), b])) for a, b in zip(one, other, strict=True)
    )


def widened(domains: Domains) -> Domains:
    """With 0 and 1 where there is one integer only: what labels, masks, tokens and flags can be, as a rule."""
    narrow = [each is not None and len(each) == 1 for each in domains]
    if not any(narrow):
        return domains
    return tuple(
        torch.unique(torch.cat([each, each.new_tensor([0, 1])])) if single and each is not None else each
        for each, single in zip(domains, narrow, strict=True)
    )


def above_zero(domains: Domains) -> tuple[Domains, ...]:
    """1 and 2 where there is one integer only: a length of 0, as blank rows have it, may leave nothing to compare.

    In all tensors, and in all but the last, which may be labels of two classes.
    """
    wider = widened(domains)
    if wider is domains:
        return ()
    above = tuple(
        torch.unique(each.new_tensor([1, 2])) if each is not None and len(each) == 1 else each for each in domains
    )
    return above, (*above[:-1], wider[-1])


def several(domains: Domains) -> tuple[bool, ...]:
    """Of which tensors checks draw different values."""
    return tuple(each is None or len(each) > 1 for each in domains)


def fits(domains: Domains, batch: Any) -> bool:
    """Whether these are the domains of such a batch: as many tensors, integers where there are integers."""
    return [each is None for each in domains] == [not _whole(t) for t in leaves(batch)]


def with_integers(batch: Any, domains: Domains) -> Any:
    """Rows like those of the batch with all the integers of the domains, and of floats whatever is there."""
    if all(values is None for values in domains):
        return batch
    each = [max(1, t[:1].numel()) for t in leaves(batch)]
    needed = (math.ceil(len(values) / size) for values, size in zip(domains, each, strict=True) if values is not None)
    rows, queue = max(1, *needed), iter(domains)

    def replaced(t: Tensor) -> Tensor:
        values = next(queue)
        if values is None or not len(values):
            return t[:1].expand(rows, *t.shape[1:])
        places = torch.arange(rows * t[:1].numel(), device=t.device) % len(values)
        return values.to(t)[places].reshape(rows, *t.shape[1:])

    return change(batch, replaced)


def _whole(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())
