"""What an adapter remembers from step to step, beside parameters and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tacit.adapt._methods import Method
from tacit.adapt._views import View


@dataclass
class Memory:
    """`mean_probs` and `ema_entropy` read un-noised data: only the forms that are not private ever fill them."""

    mean_probs: Tensor | None = None  # EATA: moving average of predictions
    ema_entropy: float | None = None  # SAR: moving average of the uncertainty
    last: dict[str, Tensor] | None = None  # the last released gradient, noise included: DP-SAR climbs along it
    bound: float | None = None  # the clip of an adaptive policy, moved by released counts

    def forget(self) -> None:
        for each in fields(self):
            setattr(self, each.name, None)

    def note(self, method: Method, view: View, kept: Tensor) -> None:
        """What the forms without privacy remember of the rows that passed."""
        logits = view.logits.detach()[kept]
        if any(not each.per_sample for each in method.filters):
            self.note_predictions(logits.softmax(1))
        if method.recovery is not None:
            self.note_mood(method.uncertainty(logits))

    def note_predictions(self, probabilities: Tensor, momentum: float = 0.9) -> None:
        """EATA's moving average over the rows that passed its filters."""
        if len(probabilities) == 0:
            return
        mean = probabilities.mean(0)
        self.mean_probs = mean if self.mean_probs is None else momentum * self.mean_probs + (1 - momentum) * mean

    def note_mood(self, unsure: Tensor, momentum: float = 0.9) -> None:
        """SAR's moving average of its loss."""
        if len(unsure) == 0 or not bool(torch.isfinite(unsure).all()):
            return
        mean = float(unsure.mean())
        self.ema_entropy = mean if self.ema_entropy is None else momentum * self.ema_entropy + (1 - momentum) * mean
