"""Which normalisation layers SAR and DeYO leave alone: the last quarter of the depth, by stages where a net has them.

Their authors leave out `layer4` of ResNets and, of a ViT with twelve blocks, 9 to 11 and the final norm. Both are the
last quarter of four stages, or of twelve blocks; by a count of layers ResNet's third stage would lose some as well.
"""

from __future__ import annotations

import math
from itertools import groupby

from torch import nn

from tacit.models import find_blocks, normalisers


def late_layers(model: nn.Module, share: float) -> list[str]:
    """The normalisation layers beyond this share of the depth, by name.

    Where the blocks stand in so many stages that the share leaves out at least one, whole stages are left out, with
    what stands before their blocks (ConvNeXt's downsampling); else blocks. What comes after them goes with them. A net
    without repeated blocks is cut by the number of its layers.

    Args:
        model: The model.
        share: Which part of the depth is adapted.

    Returns:
        Names of layers.
    """
    layers = [name for name, _ in normalisers(model)]
    blocks = [name for name, _ in find_blocks(model)]
    stages = _stages(blocks)
    parts = stages if math.floor((1 - share) * len(stages) + 1e-9) >= 1 else blocks
    kept = max(1, math.floor(share * len(parts) + 1e-9))
    late = parts[kept:]
    first = next((place for place, name in enumerate(layers) if any(_inside(name, part) for part in late)), None)
    if first is None:
        first = max(1, math.floor(share * len(layers) + 1e-9))
    return layers[first:]


def _stages(blocks: list[str]) -> list[str]:
    """The stages that blocks stand in: their names up to where those of neighbouring containers differ."""
    homes = [tuple(name.rpartition(".")[0].split(".")) for name in blocks]
    homes = [home for home, _ in groupby(homes)]
    if len(homes) < 2:
        return [".".join(home) for home in homes if home != ("",)]
    same = 0
    while len({home[: same + 1] for home in homes}) == 1:
        same += 1
    return [".".join(home[: same + 1]) for home, _ in groupby(homes, key=lambda home: home[: same + 1])]


def _inside(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")
