"""`attack`: what an attacker finds out from a model. Membership by loss, by gradient, or with shadow models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tacit.audit._mechanism import Array
from tacit.audit._scores import CanaryScoreAuditor

Method = Literal["loss", "gradient", "lira"]
Loss = Callable[[nn.Module, Any], Tensor]  # (model, rows) -> one loss per row


@dataclass(frozen=True, kw_only=True)
class Membership:
    """How well members are distinguished from others; ``inside`` and ``outside`` are the attack's scores."""

    name: str
    inside: Array = field(repr=False)
    outside: Array = field(repr=False)

    @property
    def auroc(self) -> float:
        return CanaryScoreAuditor(self.inside, self.outside).attack_auroc()

    def found_at(self, false_positives: float) -> float:
        """The share of members that are found where this share of others is mistaken for one."""
        return CanaryScoreAuditor(self.inside, self.outside).tpr_at_given_fpr(false_positives)

    @property
    def error(self) -> float:
        """The standard error of the area for members and others that are alike: how far from 0.5 chance leads."""
        ins, outs = len(self.inside), len(self.outside)
        return float(np.sqrt((ins + outs + 1) / (12 * ins * outs)))

    def together(self, other: Membership) -> Membership:
        """Two attacks of one kind as one, with the members and others of both."""
        inside = np.concatenate([self.inside, other.inside])
        return Membership(name=self.name, inside=inside, outside=np.concatenate([self.outside, other.outside]))

    def __str__(self) -> str:
        return f"{self.name}: AUROC {self.auroc:.3f} (chance: 0.5 ± {self.error:.3f})"


def attack(
    after: nn.Module,
    members: Any,
    others: Any,
    *,
    loss: Loss,
    before: nn.Module | None = None,
    method: Method = "loss",
    shadows: Sequence[nn.Module] = (),
    name: str | None = None,
) -> Membership:
    """Membership inference: were these rows in the data that made a model what it is?

    Args:
        after: The model that was fine-tuned or adapted.
        members: Rows that were in its data; ``others``: rows of the same kind that were not.
        loss: One loss per row, as it was trained with: cross-entropy of (inputs, labels), the entropy of images.
        before: The public model that it comes from.
        method: ``"loss"`` (Yeom et al. 2018): how low a row's loss is, compared with the model before, if there is one.
            ``"gradient"``: how well what changed fits to the row's gradient at the model before; it sees all weights.
            ``"lira"`` (Carlini et al. 2022, offline): how unlikely the row's loss is among ``shadows``, models that
            were made in the same way from public data.

    Returns:
        The scores of both groups, with ``auroc`` and ``found_at``.
    """
    if method == "gradient":
        if before is None:
            raise ValueError("An attack by gradients needs before=, the model that was there at first.")
        score = _by_gradient(before, after, loss)
    elif method == "lira":
        if len(shadows) < 2:
            raise ValueError("LiRA compares with shadow models: give at least two, made from public data.")
        score = _by_shadows(after, shadows, loss)
    elif method == "loss":
        score = _by_loss(before, after, loss)
    else:
        raise ValueError(f"An attack goes by loss, gradient or lira; got {method!r}.")
    return Membership(name=name or method, inside=score(members), outside=score(others))


def _losses(model: nn.Module, rows: Any, loss: Loss) -> Array:
    with torch.no_grad():
        return loss(model, rows).detach().double().cpu().numpy()


def _by_loss(before: nn.Module | None, after: nn.Module, loss: Loss) -> Callable[[Any], Array]:
    def score(rows: Any) -> Array:
        first = 0.0 if before is None else _losses(before, rows, loss)
        return first - _losses(after, rows, loss)

    return score


def _by_shadows(after: nn.Module, shadows: Sequence[nn.Module], loss: Loss) -> Callable[[Any], Array]:
    """log(p / (1 - p)) of the right answer, p = e^-loss, is nearly normal over shadow models: a z-score per row."""

    def odds(model: nn.Module, rows: Any) -> Array:
        found = np.maximum(_losses(model, rows, loss), 1e-12)
        return np.asarray(-found - np.log(-np.expm1(-found)))

    def score(rows: Any) -> Array:
        known = np.stack([odds(model, rows) for model in shadows])
        spread = np.sqrt(known.var(axis=0, ddof=1).mean())  # one for all rows: few shadows know no more
        return np.asarray((odds(after, rows) - known.mean(axis=0)) / max(float(spread), 1e-12))

    return score


def _by_gradient(before: nn.Module, after: nn.Module, loss: Loss) -> Callable[[Any], Array]:
    moved = {
        name: (dict(before.named_parameters())[name] - p).detach().double().flatten()
        for name, p in after.named_parameters()
        if not torch.equal(p, dict(before.named_parameters())[name])
    }

    def score(rows: Any) -> Array:
        parameters = {n: p.requires_grad_(True) for n, p in before.named_parameters() if n in moved}
        with torch.enable_grad():
            losses = loss(before, rows)
            found = []
            for one in losses:
                gradients = torch.autograd.grad(one, list(parameters.values()), retain_graph=True, allow_unused=True)
                pairs = zip(parameters, gradients, strict=True)
                found.append(sum(float(moved[n] @ g.double().flatten()) for n, g in pairs if g is not None))
        return np.array(found, dtype=np.float64)

    return score


def invert(gradient: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The row behind a gradient, where the first layer is linear with a bias: exactly (Phong et al. 2017).

    The gradient of unit j's weights is its bias's gradient times the row, so the quotient is the row. Of several rows
    it is a mixture; of a sum with noise it is noise.
    """
    names = [n.removesuffix("weight") for n, g in gradient.items() if n.endswith("weight") and g.dim() == 2]
    first = next((n for n in names if f"{n}bias" in gradient), None)
    if first is None or gradient[f"{first}weight"].shape[1] != int(np.prod(shape)):
        raise ValueError("The first layer has to be linear with a bias, over all numbers of a row.")
    weight, bias = gradient[f"{first}weight"].double(), gradient[f"{first}bias"].double()
    strongest = int(bias.abs().argmax())
    return (weight[strongest] / bias[strongest]).reshape(shape)
