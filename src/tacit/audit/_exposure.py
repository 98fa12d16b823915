"""The attacks as people understand them: the same model and images, published, clipped, and private."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tacit import adapt
from tacit.audit._attack import Membership, attack, invert
from tacit.audit._mechanism import Array
from tacit.audit._releases import paid
from tacit.data import fashion_mnist
from tacit.gradients import clipped_sum
from tacit.models import embedded
from tacit.privacy import Ledger, events, mechanisms

FORMS = ("as published", "clip only", "DP")


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """What was found out about the images that a model adapted to, in each of three forms."""

    epsilon: float
    members: dict[str, Membership]
    image: Tensor = field(repr=False)
    inverted: dict[str, Tensor] = field(repr=False)

    def correlation(self, form: str) -> float:
        """Of the reconstructed image with the true one: 1 is the image itself."""
        return float(np.corrcoef(self.image.flatten().numpy(), self.inverted[form].flatten().numpy())[0, 1])

    def picture(self, path: str | Path) -> None:
        """Both attacks as one plot: reconstructed images above, the curves of membership below."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        axes = figure.subplot_mosaic([["true", *FORMS], ["curves"] * 4], height_ratios=(1, 1.7))
        for name, image in {"true": self.image, **self.inverted}.items():
            low, high = (float(image.min()), float(image.max()))
            axes[name].imshow((image.squeeze() - low) / max(high - low, 1e-12), cmap="gray_r")
            axes[name].set_title("the private image" if name == "true" else self._label(name), fontsize=9)
            axes[name].set_axis_off()
        curves = axes["curves"]
        for form, found in self.members.items():
            line = _curve(found)
            curves.plot(*line, label=f"{self._label(form)}: area {found.auroc:.2f}", linewidth=1.8)
        curves.plot([0, 1], [0, 1], color="0.6", linestyle=":", label="a blind guess")
        curves.set(xlabel="others taken for members", ylabel="members found", xlim=(0, 1), ylim=(0, 1))
        curves.legend(frameon=False, fontsize=9, loc="lower right")
        figure.savefig(path, dpi=130)

    def _label(self, form: str) -> str:
        return f"DP, epsilon {self.epsilon:g}" if form == "DP" else form

    def __str__(self) -> str:
        lines = [f"{self._label(name)}: {found}" for name, found in self.members.items()]
        for name in FORMS:
            lines.append(f"{self._label(name)}: the image comes back with correlation {self.correlation(name):.2f}")
        return "\n".join(lines)


def exposure(*, epsilon: float = 1.0, episodes: int = 24, batch: int = 4, clip: float = 1.0, seed: int = 0) -> Exposure:
    """Attack Tent on the embedded model and images: once as published, once clipped, once private.

    In every episode the model adapts to ``batch`` images, and the attacker, who has the model of before and after and
    as many other images, says which were in (by gradients). The picture comes from one gradient of a small net.
    """
    source, (images, _) = embedded(), fashion_mnist("test")
    chance = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=chance)[: 2 * batch * episodes]
    rows = images[order].float().div(255).view(episodes, 2, batch, *images.shape[1:])
    found: dict[str, Membership] = {}
    for form in FORMS:
        for inside, outside in rows:
            after = _adapted(source, inside, form, epsilon, clip)
            first = copy.deepcopy(source)
            one = attack(after, inside, outside, loss=_entropy, before=first, method="gradient", name="Tent")
            one = replace(one, inside=_scaled(one.inside, one), outside=_scaled(one.outside, one))
            found[form] = one if form not in found else found[form].together(one)
    image = rows[0, 0, 0]
    inverted = {form: _inverted(image, form, epsilon, clip) for form in FORMS}
    return Exposure(epsilon=epsilon, members=found, image=image, inverted=inverted)


def _scaled(scores: Array, whole: Membership) -> Array:
    """Scores of an episode in its own unit, so that episodes can be put together; it looks at no label."""
    both = np.concatenate([whole.inside, whole.outside])
    return np.asarray((scores - np.median(both)) / max(float(both.std()), 1e-300))


def _adapted(source: nn.Module, batch: Tensor, form: str, epsilon: float, clip: float) -> nn.Module:
    forms: dict[str, adapt.Privacy] = {
        "as published": None,
        "clip only": adapt.Clip(clip),
        "DP": adapt.DP(epsilon, 1e-6, clip=clip),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = adapt.Tent(
            copy.deepcopy(source), privacy=forms[form], batch_size=len(batch), ledger=Ledger("sqlite://")
        )
        adapter(batch)
    return adapter.model


def _entropy(model: nn.Module, rows: Tensor) -> Tensor:
    return adapt.entropy(model(rows))


def _inverted(image: Tensor, form: str, epsilon: float, clip: float) -> Tensor:
    """What one step's gradient of a net with a linear first layer tells of the one image that it saw."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(image.numel(), 64), nn.ReLU(), nn.Linear(64, 10))

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(rows), torch.zeros(len(rows), dtype=torch.long), reduction="none")

    bound = 1e9 if form == "as published" else clip
    total = clipped_sum(net, loss, image[None], clip=bound)
    released = dict(total.sum)
    if form == "DP":
        with paid(events.gaussian(adapt.DP(epsilon, 1e-6).noise_multiplier()), "replace-one") as receipt:
            released = mechanisms.gaussian(total, receipt)
    return invert(released, tuple(image.shape))


def _curve(found: Membership) -> tuple[Array, Array]:
    scores = np.concatenate([found.inside, found.outside])
    labels = np.concatenate([np.ones(len(found.inside)), np.zeros(len(found.outside))])
    ordered = labels[np.argsort(-scores, kind="stable")]
    hits, misses = np.cumsum(ordered) / len(found.inside), np.cumsum(1 - ordered) / len(found.outside)
    return np.concatenate([[0.0], misses]), np.concatenate([[0.0], hits])
