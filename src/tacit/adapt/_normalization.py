"""Images in [0, 1] as a model wants them: less the mean, over the deviation of what it was trained on."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from tacit.data import ImageShape


class Normalization:
    """(x - mean) / std, channel by channel; it acts on each row alone."""

    def __init__(self, shape: ImageShape) -> None:
        self.mean, self.std = shape.mean, shape.std

    def __call__(self, inputs: Any) -> Any:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ValueError("normalize= is for images: one float tensor, rows x channels x height x width.")
        mean, std = (inputs.new_tensor(part).view(-1, 1, 1) for part in (self.mean, self.std))
        return (inputs - mean) / std

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in part) for part in (self.mean, self.std))
        return f"normalized by mean ({mean}) and std ({std})"


def normalization(given: ImageShape | Literal["model"] | None, model: nn.Module) -> Normalization | None:
    """What was given, or what the model's own configuration says.

    Raises:
        ValueError: Neither, or the model has none.
    """
    if given is None:
        return None
    if given == "model":
        given = ImageShape.of(model)
    if not isinstance(given, ImageShape):
        raise ValueError(f'normalize is an ImageShape or "model", not {given!r}.')
    return Normalization(given)
