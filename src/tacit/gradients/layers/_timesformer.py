"""TimeSformer's embeddings, with the class token of each row made for that row.

transformers' own forward makes a class token for each frame of each row and goes on with the first of them: values that
are all alike, but whose gradients then belong to the wrong rows. The same is computed here from one token per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def supported(module: nn.Module) -> bool:
    """Whether this is the module, with a time axis; recognised by its name, since transformers may not be installed."""
    return type(module).__name__ == "TimesformerEmbeddings" and getattr(module, "attention_type", "") != "space_only"


def forward(module: Any, pixel_values: Tensor) -> Tensor:
    if module.training and max(module.pos_drop.p, module.time_drop.p) > 0:
        own: Tensor = type(module).forward(module, pixel_values)
        return own
    rows = pixel_values.shape[0]
    patches, frames, width = module.patch_embeddings(pixel_values)  # (rows x frames, patches, features)
    places = _places(module.position_embeddings, patches.shape[1] + 1, width)
    token = (module.cls_token + places[:, :1]).expand(rows, -1, -1)
    shown = patches + places[:, 1:]
    count, features = shown.shape[1:]
    shown = shown.reshape(rows, frames, count, features).permute(0, 2, 1, 3).reshape(rows * count, frames, features)
    times = module.time_embeddings
    if frames != times.size(1):
        times = functional.interpolate(times.transpose(1, 2), size=frames, mode="nearest").transpose(1, 2)
    shown = shown + times
    return torch.cat((token, shown.reshape(rows, count * frames, features)), dim=1)


def _places(places: Any, tokens: int, width: int) -> Any:
    """Position embeddings for this many tokens, as transformers resizes them."""
    if tokens == places.size(1):
        return places
    others = places[:, 1:].transpose(1, 2)
    side = int(others.size(2) ** 0.5)
    others = others.reshape(1, -1, side, side)
    others = functional.interpolate(others, size=(tokens // width, width), mode="nearest").flatten(2).transpose(1, 2)
    return torch.cat((places[:, :1], others), 1)
