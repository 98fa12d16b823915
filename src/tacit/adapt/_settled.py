"""What is settled about a model and its batches before anything is charged or changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tacit._guard_rails import pixels_0_to_255
from tacit.adapt._default_rate import USUAL_STEPS
from tacit.adapt._late_layers import late_layers
from tacit.adapt._privacy_config import DP, Clip, Privacy
from tacit.adapt._statistics import KINDS, BatchStatistics, Statistics, best_share, calmest_rate, has_batch_norm
from tacit.gradients import count_rows, leaves
from tacit.models import select


def check_batch(images: Any) -> None:
    """Refuse what is no batch: by its kind, never by its values."""
    if isinstance(images, Tensor):
        if images.dim() < 2 or not (images.is_floating_point() or images.dtype in (torch.int64, torch.int32)):
            found = f"{images.dtype} of shape {tuple(images.shape)}"
            raise ValueError(f"A batch is a float tensor, one row per image (images in [0, 1]); got {found}.")
    elif not isinstance(images, Mapping | tuple | list) or not images:
        found = f"or a tuple or mapping of tensors; got {type(images).__name__}"
        raise ValueError(f"A batch is a float tensor, one row per image (images in [0, 1]), {found}.")
    elif not all(isinstance(each, Tensor) and each.dim() for each in parts(images)):
        raise ValueError("A batch is a float tensor, or its parts are tensors, with one entry per row.")


def check_classes(classes: Tensor | None, count: int) -> None:
    """Refuse a mask that is not one bool for each of so many classes, or leaves fewer than two."""
    if classes is not None and (classes.shape != (count,) or classes.dtype != torch.bool or int(classes.sum()) < 2):
        raise ValueError(f"classes is a bool per class of the model: {count} of them, two or more true.")


def refuse_pixels(images: Any, *, charged: bool) -> None:
    """Refuse rows that are pixels from 0 to 255 as floats; before any charge, and only if all of several agree.

    In a stream that is `charged` (it was resumed) no row decides an error any more.
    """
    if not charged and isinstance(images, Tensor) and pixels_0_to_255(list(images)):
        raise ValueError(
            "These rows are whole numbers from 0 to 255, as floats: divide by 255 first (and see normalize=). A model "
            "that takes such numbers can be wrapped in one that multiplies. Nothing was charged."
        )


def finite_rows(images: Any) -> Tensor:
    """Which rows have finite numbers alone, on the CPU."""
    floats = [t for t in leaves(images) if t.is_floating_point()]
    everyone = torch.ones(count_rows(images), dtype=torch.bool)
    return torch.stack([everyone, *(torch.isfinite(t.flatten(1)).all(1).cpu() for t in floats)]).all(0)


def parts(images: Any) -> list[Any]:
    return list(images.values()) if isinstance(images, Mapping) else list(images)


def finite_values(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) if values.is_floating_point() else values


def kind_of(images: Any) -> str:
    """What kind of rows these are, in words. Texts may have any length."""
    if isinstance(images, Tensor):
        return f"shape {tuple(images.shape[1:])}, {images.dtype} on {images.device}"
    names = list(images) if isinstance(images, Mapping) else range(len(images))
    pairs = zip(names, parts(images), strict=True)
    return ", ".join(f"{name}: {t.dtype} of {t.dim()} dimensions on {t.device}" for name, t in pairs)


def statistics_of(model: nn.Module, chosen: Statistics | None, privacy: Privacy) -> Statistics:
    """Whose statistics BatchNorm layers use; refuses what cannot be."""
    if chosen is not None and chosen not in KINDS:
        raise ValueError(f"statistics is one of {', '.join(KINDS)}, not {chosen!r}.")
    if not has_batch_norm(model):
        if chosen in ("batch", "private"):
            raise ValueError(f"statistics={chosen!r} is for BatchNorm layers, and this model has none: leave it out.")
        return "source"
    if chosen == "batch" and isinstance(privacy, DP):
        raise ValueError('Statistics of the batch mix people: with DP(...) give statistics="private" or "source".')
    if chosen == "private" and not isinstance(privacy, DP):
        raise ValueError('statistics="private" goes with DP(...): without noise say "batch" or "source".')
    return chosen or ("batch" if privacy is None else "source")


def adapted(model: nn.Module, scheme: str, share: float) -> list[str]:
    """The parameters of the scheme; with a share, without those of late normalisation layers. Changes nothing."""
    trainable = [(p, p.requires_grad) for p in model.parameters()]
    try:
        names = select(model, scheme)
    finally:
        for parameter, before in trainable:
            parameter.requires_grad_(before)
    late = late_layers(model, share) if share < 1 else []
    return [name for name in names if not any(name.startswith(f"{layer}.") for layer in late)]


def settle(
    statistics: BatchStatistics, form: Privacy, optimize: Mapping[str, Any], batch_size: int, noise: float
) -> float:
    """Set the rate at which private statistics move, and return their share of what is left of the budget."""
    clip = form.clip if isinstance(form, Clip | DP) and isinstance(form.clip, int | float) else 1.0
    steps = form.horizon if isinstance(form, DP) and form.horizon is not None else USUAL_STEPS
    known = {"lr": float(optimize["lr"]), "momentum": float(optimize["momentum"])}
    share = 0.0
    for _ in range(2):  # the share depends on the rate, and the rate on the share
        share = best_share(clip=clip, steps=steps, bound=statistics.bound, rate=statistics.rate, **known)
        statistics.rate = calmest_rate(
            noise=noise, share=share, bound=statistics.bound, batch_size=batch_size, fastest=statistics.rate
        )
    return share
