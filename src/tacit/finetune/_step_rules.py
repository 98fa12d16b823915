"""Step rules for released gradients that know their noise: DP-AdamBC, and steps as long as the way so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class AdamBC(torch.optim.Optimizer):
    """Adam whose second moment has the variance of the noise taken off (DP-AdamBC; Tang, Shpilevskiy, Lecuyer, 2024).

    Under privacy Adam's second moment is mostly noise, so that Adam becomes momentum with one step size for all. With
    the known variance taken off, what is left is the gradient's own: m / sqrt(max(v - noise^2, floor)).

    Args:
        parameters: What is trained.
        lr: The learning rate.
        betas: Of the two moments.
        noise: The standard deviation of the noise in each number of a released gradient. Public.
        floor: What the corrected second moment is at least.
        weight_decay: Decoupled, as in AdamW, if `decoupled`; an L2 penalty otherwise.
        decoupled: See `weight_decay`.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        noise: float,
        floor: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        self._betas, self._variance, self._floor = betas, noise**2, floor
        self._decay, self._decoupled = weight_decay, decoupled
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        del closure
        first, second = self._betas
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state |= {"step": 0.0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
                state["step"] += 1
                if self._decoupled:
                    parameter.mul_(1 - group["lr"] * self._decay)
                elif self._decay:
                    gradient = gradient + self._decay * parameter
                state["m"].lerp_(gradient, 1 - first)
                state["v"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                mean = state["m"] / (1 - first ** state["step"])
                own = state["v"] / (1 - second ** state["step"]) - self._variance
                parameter.sub_(mean / own.clamp_min(self._floor).sqrt(), alpha=group["lr"])


class DoG(torch.optim.Optimizer):
    """Distance over gradients (Ivgi, Hinder, Carmon, 2023): no learning rate to choose.

    The step of all parameters together is lr * (the longest way from the start so far, at least `reach`) / (the root of
    the sum of squared lengths of all gradients so far). All of it is made of released gradients: free. Noise makes
    gradients longer and steps shorter, as it should.

    Args:
        parameters: What is trained.
        lr: A factor, 1 by the paper.
        reach: The way that is assumed before the first step.
        weight_decay: An L2 penalty.
    """

    def __init__(self, parameters: list[nn.Parameter], *, lr: float, reach: float, weight_decay: float) -> None:
        self._decay, self._reach = weight_decay, reach
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter."""
        del closure
        every = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        if not every:
            return
        kept = self.state[every[0]]  # the two sums of all parameters are with the first
        for parameter in every:
            self.state[parameter].setdefault("start", parameter.detach().clone())
        gradients = [parameter.grad + self._decay * parameter for parameter in every]
        kept["squares"] = kept.get("squares", 0.0) + sum(float(g.double().square().sum()) for g in gradients)
        moved = (parameter - self.state[parameter]["start"] for parameter in every)
        way = math.sqrt(sum(float(part.double().square().sum()) for part in moved))
        kept["way"] = max(kept.get("way", self._reach), way)
        if not kept["squares"] > 0:
            return
        rate = self.param_groups[0]["lr"] * kept["way"] / math.sqrt(kept["squares"])
        for parameter, gradient in zip(every, gradients, strict=True):  # a finite rate beyond the type is an error
            parameter.sub_(gradient, alpha=min(rate, torch.finfo(parameter.dtype).max))
