"""How much each adapted parameter matters to the source model: EATA's anchor, from public images (Niu et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from tacit.adapt._views import logits_of
from tacit.models import select


@dataclass(frozen=True)
class Fisher:
    """omega of each parameter and where it was measured: R = sum omega (theta - theta_0)^2.

    Args:
        importance: omega of each parameter.
        origin: Where it was measured.
    """

    importance: dict[str, Tensor] = field(repr=False)
    origin: dict[str, Tensor] = field(repr=False)

    def gradient(self, name: str, value: Tensor) -> Tensor:
        """dR / d theta, zero for a parameter that was not measured.

        Args:
            name: The parameter's name.
            value: Its value.

        Returns:
            The gradient.
        """
        if name not in self.importance:
            return torch.zeros_like(value)
        return 2 * self.importance[name] * (value - self.origin[name])


def fisher(model: nn.Module, images: Tensor, *, public: bool = False, scheme: str = "norms", chunk: int = 64) -> Fisher:
    """Fisher information (omega) on public images: the mean over rows of the squared gradient of each row's own loss.

    The loss is the cross entropy against the model's own prediction. (EATA's code squares the gradient of a batch's
    mean: another scale.) The model is left as it was.

    Args:
        model: The source model.
        images: Public images.
        public: Must be True: the caller declares the images public.
        scheme: Which parameters.
        chunk: Rows in memory at a time.

    Returns:
        omega and where it was measured, for `EATA(anchor=...)`.

    Raises:
        ValueError: The images are not declared public.
    """
    if not public:
        raise ValueError("The anchor is measured without noise: give public=True if these images are public.")
    if len(images) == 0:
        raise ValueError("The anchor needs some public images: a few hundred will do.")
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        names = select(model, scheme)
        return _measured(model, names, images, chunk)
    finally:
        for module, mode in training.items():
            module.training = mode
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])


def _measured(model: nn.Module, names: list[str], images: Tensor, chunk: int) -> Fisher:
    own = {name: p.detach() for name, p in model.named_parameters()}
    moved = {name: own[name].clone() for name in names}

    def surprise(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        out = functional_call(model, own | parameters, (image[None],))
        return functional.cross_entropy(getattr(out, "logits", out), label[None])

    per_row = vmap(grad(surprise), in_dims=(None, 0, 0))
    total = {name: torch.zeros_like(value) for name, value in moved.items()}
    for part in torch.split(images, chunk):
        with torch.no_grad():
            labels = logits_of(model, part).argmax(1)
        for name, gradient in per_row(moved, part, labels).items():
            total[name] += gradient.detach().square().sum(0)
    return Fisher({name: value / len(images) for name, value in total.items()}, moved)
