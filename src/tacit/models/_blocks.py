"""The repeated residual blocks of a net, found by its structure and never by a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList)


class _Member(NamedTuple):
    """A child of a container, with children of its own."""

    name: str
    module: nn.Module
    container: int

    @property
    def kind(self) -> type[nn.Module]:
        return type(self.module)


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks, by name and in the order in which the model lists them.

    A block is a child of a Sequential or ModuleList that has children itself and whose type repeats; where such modules
    contain each other (stages and their blocks), the innermost are meant. A module with a single weighted layer (a
    convolution with its norm) counts only if nothing larger repeats.

    Args:
        model: The model.

    Returns:
        Pairs of name and block.
    """
    found = find_blocks(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks (modules of one type in a Sequential or ModuleList): "
            "choose a scheme that needs none, such as 'full', 'linear' or 'selective'."
        )
    return found


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """As `blocks_of`, with an empty list for a net that has none."""
    members = [
        _Member(f"{outer}.{own}".lstrip("."), child, id(container))
        for outer, container in model.named_modules()
        if isinstance(container, _CONTAINERS)
        for own, child in container.named_children()
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.children())
    ]
    deep = [m for m in members if m.kind is not nn.Sequential and _weighted_layers(m.module) > 1]
    for candidates, same in ((deep, _within_one), (deep, _anywhere), (members, _within_one)):
        kinds = _repeated(candidates, same)
        if kinds:
            return _innermost([m for m in candidates if m.kind in kinds])
    return []


def _within_one(member: _Member) -> tuple[type[nn.Module], int]:
    return member.kind, member.container


def _anywhere(member: _Member) -> tuple[type[nn.Module], int]:
    return member.kind, 0


def _repeated(
    members: Iterable[_Member], same: Callable[[_Member], tuple[type[nn.Module], int]]
) -> set[type[nn.Module]]:
    return {kind for (kind, _), times in Counter(map(same, members)).items() if times > 1}


def _innermost(members: list[_Member]) -> list[tuple[str, nn.Module]]:
    chosen = {id(m.module) for m in members}
    inner = [m for m in members if not any(id(d) in chosen for d in m.module.modules() if d is not m.module)]
    return [(m.name, m.module) for m in inner]


def _weighted_layers(module: nn.Module) -> int:
    """Layers with a matrix or a kernel: linear ones, convolutions, and whatever libraries write in their place."""
    return sum(any(p.dim() > 1 for p in layer.parameters(recurse=False)) for layer in module.modules())
