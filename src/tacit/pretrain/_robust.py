"""`Robust`: any torch optimizer, with the gradient taken where the weights are perturbed for the worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tacit.pretrain._plan import Method, Perturbation

_LEAST = 0.01  # what a weight counts for at least, beside its own size, in an adaptive radius (Kwon et al., 2021)


class Robust:
    """A torch optimizer that steps by the gradient at perturbed weights. In a loop of one's own:

        loss(model, large_batch).backward()
        robust.perturb()                     # from that gradient, which it then forgets
        loss(model, batch).backward()
        robust.step()                        # puts the weights back, then steps

    `robust.step(closure)` does it all on one batch, for a closure that clears gradients, computes the loss and its
    gradient, and returns it. With `reuse=m` a perturbation serves m steps: ask `robust.due` whether this one needs a
    new gradient. `model`: its running statistics do not follow what happens under perturbed weights. Learning-rate
    schedules hold on to the optimizer inside, `robust.optimizer`.

    Guarantee: the perturbation is no longer than `radius` (of an adaptive one, each weight's part measured against that
    weight; with `per_tensor`, each tensor's part of it), and `revert` restores the weights bit for bit.

    Args:
        optimizer: The torch optimizer inside.
        method: "standard", "sam", "amp" or "dpadapter".
        radius: The largest length of the perturbation.
        perturb_lr: The step size of the perturbation.
        adaptive: Measure lengths relative to each weight.
        per_tensor: The radius is of each tensor's part alone.
        reuse: Steps that share a perturbation.
        model: Its running statistics do not follow what happens under perturbed weights.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        method: Method = "dpadapter",
        radius: float = 2.0,
        perturb_lr: float = 1.0,
        adaptive: bool = False,
        per_tensor: bool = False,
        reuse: int = 1,
        model: nn.Module | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._how = Perturbation(
            method=method,
            radius=radius,
            perturb_lr=perturb_lr,
            adaptive=adaptive,
            per_tensor=per_tensor,
            reuse=reuse,
        )
        self._statistics = [] if model is None else _running_statistics(model)
        self._delta: list[Tensor] | None = None
        self._left = 0  # steps that the perturbation still serves
        self._kept: list[tuple[Tensor, Tensor]] = []  # what is changed while perturbed, and what it was

    @property
    def due(self) -> bool:
        """Whether `perturb` needs a new gradient now."""
        return self._how.method != "standard" and self._left == 0

    @property
    def perturbed(self) -> bool:
        """Whether the weights are perturbed now."""
        return bool(self._kept)

    @property
    def perturbation(self) -> dict[Tensor, Tensor]:
        """What was last added to each weight."""
        return dict(zip(self._weights(), self._delta or [], strict=False))

    @torch.no_grad()
    def perturb(self) -> None:
        """Go uphill along the gradients that the weights have now, or as in the last step if none is due.

        The gradients are cleared. Under the method "standard" nothing happens.
        """
        if self.perturbed:
            raise ValueError("The weights are perturbed already: call step() or revert() first.")
        if self._how.method == "standard":
            return
        weights = self._weights()
        if self.due:
            if all(weight.grad is None for weight in weights):
                raise ValueError("There is no gradient to go along: call backward() on the perturbing batch first.")
            self._delta = uphill(weights, [_gradient(weight) for weight in weights], self._how)
            self._left = self._how.reuse
            self.optimizer.zero_grad()
        self._kept = [(value, value.clone()) for value in (*weights, *self._statistics)]
        for weight, change in zip(weights, self._delta or [], strict=True):
            weight.add_(change)

    @torch.no_grad()
    def revert(self) -> None:
        """Put weights and running statistics back as they were, bit for bit; nothing if they are not perturbed."""
        for value, before in self._kept:
            value.copy_(before)
        self._kept = []

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Revert, then let the optimizer step by the gradients at hand; with a closure, get these first.

        Returns the closure's loss at the perturbed weights.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                if self.due:
                    closure()
                self.perturb()
                loss = closure()
        self.revert()
        self.optimizer.step()
        self._left = max(0, self._left - 1)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The perturbation in use and the state of the optimizer inside."""
        if self.perturbed:
            raise ValueError("The weights are perturbed now: save after step() or revert().")
        delta = None if not self._left or self._delta is None else [change.clone() for change in self._delta]
        return {"optimizer": self.optimizer.state_dict(), "left": self._left, "delta": delta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._left, self._delta = state["left"], state["delta"]

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"] if weight.requires_grad]


def uphill(weights: Sequence[Tensor], gradients: Sequence[Tensor], how: Perturbation) -> list[Tensor]:
    """The perturbation of a step: along the gradient, within the ball (Wang et al., 2024, algorithm 1, lines 4 to 8).

    `sam` always goes as far as the radius (Foret et al., 2021, equation 2). In an adaptive ball (Kwon et al., 2021)
    lengths are measured after dividing each part by T = |weight| + 0.01, so its steepest way is T^2 times the gradient.
    With `per_tensor` there is a ball for each tensor, as in the public code of AMP (Zheng et al., 2021).
    """
    scales = [weight.abs() + _LEAST for weight in weights] if how.adaptive else None
    inside = list(gradients) if scales is None else [s * g for s, g in zip(scales, gradients, strict=True)]
    norms = [float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in inside]
    length = math.hypot(*norms)
    if not length < math.inf:
        raise ValueError("The gradient is not finite, so nothing is learnt from here on: lower the learning rate.")
    rounding = 1 - 4 * max(torch.finfo(part.dtype).eps for part in inside)  # it must not leave the ball
    factors = [_factor(norm if how.per_tensor else length, how, rounding) for norm in norms]
    moved = [factor * part for factor, part in zip(factors, inside, strict=True)]
    return moved if scales is None else [s * part for s, part in zip(scales, moved, strict=True)]


def _factor(length: float, how: Perturbation, rounding: float) -> float:
    """What a gradient of this length is multiplied by."""
    if length > 0 and (how.method == "sam" or how.perturb_lr * length > how.radius):
        return how.radius / length * rounding
    return how.perturb_lr


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _running_statistics(model: nn.Module) -> list[Tensor]:
    norms = [module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    return [buffer for module in norms for buffer in module.buffers(recurse=False)]
