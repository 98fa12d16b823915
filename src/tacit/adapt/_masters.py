"""Float32 copies of what is adapted, for models in half precision: their own numbers are too coarse to learn in.

Around 1 the next bfloat16 is 0.008 away, so a learning rate of 0.001 changes nothing, step after step. Steps add up in
the copies, and the model gets what they round to.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

_SMALL = 1 << 20  # numbers that are converted together


class Masters:
    """What the optimizer moves: a float32 copy of each half-precision parameter, and every other parameter itself."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.values = {
            name: p if p.dtype.itemsize >= 4 else nn.Parameter(p.detach().float()) for name, p in parameters.items()
        }

    def publish(self) -> None:
        """Round the copies into the model."""
        with torch.no_grad():
            for name, master in self.values.items():
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)

    def load(self, values: dict[str, Tensor]) -> None:
        """Take these values, in the copies and in the model."""
        with torch.no_grad():
            for name, master in self.values.items():
                master.copy_(values[name])
        self.publish()

    def stuck(self, origin: dict[str, Tensor]) -> str | None:
        """Why the model is still where it started, in a sentence; None if it has moved. Reads released values alone.

        What starts at zero (biases) does not count beside what does not: any type can show how little it has moved.
        """
        pairs = [(p.detach(), origin[name]) for name, p in self._parameters.items()]
        counted = [(p, start) for p, start in pairs if bool(start.any())] or pairs
        if any(bool(((p != start) & ((start != 0) | ~start.any())).any()) for p, start in counted):
            return None
        moved = max(
            float((master.detach() - origin[name]).abs().max())
            for name, master in self.values.items()
            if master.numel()
        )
        if not moved:
            return "no row passed the filters, or every gradient was zero"
        dtype = str(next(iter(self._parameters.values())).dtype).removeprefix("torch.")
        return (
            f"their float32 copies have moved by at most {moved:.1g}, which {dtype} cannot show: raise lr, or adapt "
            "the model in float32"
        )

    def note_if_stuck(self, origin: dict[str, Tensor], steps: int) -> None:
        """Warn if nothing has moved after so many steps, and why."""
        why = self.stuck(origin)
        if why is not None:
            warnings.warn(f"After {steps} steps no adapted parameter has moved: {why}.", stacklevel=4)


def cast(values: list[Tensor], like: list[nn.Parameter]) -> list[Tensor]:
    """Each value in the type of its parameter; small ones by one conversion, as parts of one tensor."""
    kinds = {(value.dtype, value.device, p.dtype) for value, p in zip(values, like, strict=True)}
    if len(kinds) != 1 or len(values) == 1 or sum(value.numel() for value in values) > _SMALL:
        return [value.to(p.dtype) for value, p in zip(values, like, strict=True)]
    if values[0].dtype == like[0].dtype:
        return values
    flat = torch.cat([value if value.dim() == 1 else value.reshape(-1) for value in values]).to(like[0].dtype)
    parts = torch.split(flat, [value.numel() for value in values])
    return [part if value.dim() == 1 else part.view(value.shape) for part, value in zip(parts, values, strict=True)]
