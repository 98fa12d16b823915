"""Mistakes that cost a budget and raise nothing: each is one sentence, before anything is charged.

What cannot be meant is refused. What is unusual, and may be meant, is a `GuardRailWarning`. Only public values decide,
but for `warn_of_pixels`, which says when several units agree.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import Tensor

from tacit._refusals import Refusal

# What people call a unit. Other nouns are welcome, unless they look like one of these with a slip of the pen.
UNITS = (
    "account",
    "author",
    "child",
    "client",
    "clinic",
    "clip",
    "customer",
    "device",
    "document",
    "employee",
    "family",
    "film",
    "hospital",
    "household",
    "image",
    "message",
    "patient",
    "person",
    "record",
    "row",
    "sample",
    "school",
    "session",
    "speaker",
    "student",
    "study",
    "subject",
    "user",
    "video",
    "visit",
    "writer",
)
_MEANT = frozenset(["patent", "clap", "recording"])  # nouns of their own that lie near one of them
_LIKE = 0.79  # "pateint" is 0.86 like "patient", and "vidoe" 0.8 like "video"


class GuardRailWarning(UserWarning):
    """Something unusual about a call, said before anything is charged."""


def check_unit_name(unit: str) -> None:
    """Refuse a unit that is nearly a usual one: a guarantee for a "pateint" protects no one.

    Args:
        unit: The name of a new unit.

    Raises:
        Refusal: It is nearly a usual name.
    """
    name = str(unit).strip().lower()
    if name in UNITS or name in _MEANT:
        return
    near = get_close_matches(name, UNITS, n=1, cutoff=_LIKE)
    if near:
        raise Refusal(f"unit={str(unit)!r}: did you mean {near[0]!r}? Nothing was charged.")


def warn_of_delta(delta: float, size: int | None, unit: str, *, stacklevel: int = 3) -> None:
    """Say that delta is not below 1/(number of units): publishing everything of one unit at random would satisfy it.

    Args:
        delta: Of the promise.
        size: The public number of units; None: not declared.
        unit: What one is.
        stacklevel: Whose line the warning points at.
    """
    if size is not None and size > 1 and delta >= 1 / size:
        warnings.warn(
            f"delta = {delta:g} is not below 1/{size:,}, one over the number of units: publishing one {unit}'s data in "
            f"full would keep such a promise. Choose delta well below it, such as {_tenth(1 / size):g}.",
            GuardRailWarning,
            stacklevel=stacklevel,
        )


def check_batch(batch: int, size: int) -> None:
    """Refuse a batch of more units than there are: every unit would take part in every step, which is another method.

    Args:
        batch: The expected batch size.
        size: The public number of units.

    Raises:
        Refusal: The batch is larger.
    """
    if batch > size:
        raise Refusal(
            f"batch_size={batch:,} is larger than size={size:,}, the public number of units: say a smaller batch, or "
            "use all units in every step with finetune.DPGD. Nothing was charged."
        )


def warn_of_pixels(rows: Sequence[Tensor], *, stacklevel: int = 3) -> None:
    """Say that rows are pixels from 0 to 255 as floats, where models take [0, 1] or normalized values.

    Formal guarantee: it is said only if all of these rows, of several units, look so: replacing one takes the sentence
    away at most.

    Args:
        rows: One row of each of several units.
        stacklevel: Whose line the warning points at.
    """
    if pixels_0_to_255(rows):
        warnings.warn(
            "Rows are whole numbers from 0 to 255, as floats: most models take images in [0, 1], less a mean and over "
            "a standard deviation. Divide by 255 (and normalize as the model says: data.ImageShape.of(model)).",
            GuardRailWarning,
            stacklevel=stacklevel,
        )


def pixels_0_to_255(rows: Sequence[Tensor]) -> bool:
    """Whether all of these rows, at least two, are whole numbers from 0 to 255 as floats.

    Args:
        rows: One row of each of several units.

    Returns:
        True only if all agree.
    """
    return len(rows) >= 2 and all(_pixels(row) for row in rows)


def warn_near_chance(accuracy: float, labels: Tensor, when: str, *, stacklevel: int = 3) -> None:
    """Say that a model is no better than always naming the commonest class; of public labels.

    Args:
        accuracy: In percent, on these labels.
        labels: Class numbers. Public.
        when: "before training", "after training".
        stacklevel: Whose line the warning points at.
    """
    if labels.dim() != 1 or labels.is_floating_point() or len(labels) < 20:
        return
    chance = float(torch.bincount(labels).max()) / len(labels)
    spread = math.sqrt(chance * (1 - chance) / len(labels))
    if chance < 1 and accuracy / 100 <= chance + 2 * spread:
        warnings.warn(
            f"{when[0].upper()}{when[1:]} the model is right about {accuracy:.3g}% of the public evaluation data, and "
            f"always naming the commonest class is about {100 * chance:.3g}%: check the labels' numbers, the images' "
            "size, mean and std (data.ImageShape.of(model)), the learning rate and the clip.",
            GuardRailWarning,
            stacklevel=stacklevel,
        )


def _pixels(row: Tensor) -> bool:
    if not row.is_floating_point() or row.dim() < 3 or not row.numel():
        return False
    whole = bool((row == row.round()).all()) and float(row.min()) >= 0 and float(row.max()) <= 255
    return whole and float(row.max()) > 2


def _tenth(value: float) -> float:
    """A tenth of it, at most, as a power of ten."""
    return float(10.0 ** math.floor(math.log10(value / 10)))
