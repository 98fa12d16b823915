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
from tacit.audit._shadows import shadowed
from tacit.data import fashion_mnist
from tacit.gradients import clipped_sum
from tacit.models import embedded
from tacit.privacy import Ledger, events, mechanisms

FORMS = ("as published", "clip only", "DP")
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


_COLOURS = {"as published": "#c1272d", "clip only": "#e69f00", "DP": "#0072b2"}


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """What was found out about private images in each of three forms.

    Args:
        epsilon: Of the form with DP.
        members: Who was in a stream that Tent adapted to, by gradients.
        trained_on: Who a small net was fine-tuned on, by LiRA with shadow models.
        image: A private image.
        inverted: What one gradient of it gives back.
    """

    epsilon: float
    members: dict[str, Membership]
    trained_on: dict[str, Membership]
    image: Tensor = field(repr=False)
    inverted: dict[str, Tensor] = field(repr=False)

    def correlation(self, form: str) -> float:
        """Of the reconstructed image with the true one: 1 is the image itself."""
        return float(np.corrcoef(self.image.flatten().numpy(), self.inverted[form].flatten().numpy())[0, 1])

    def picture(self, path: str | Path) -> None:
        """All three attacks as one picture: reconstructed images above, the curves of membership below."""
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        figure = Figure(figsize=(9.2, 7.1), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
        above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(1, 1.45), hspace=0.04)).tolist()
        above.suptitle("Can an attacker get a private image back from one training step?", fontsize=11, weight="bold")
        for axes, (form, image) in zip(
            above.subplots(1, 4), {"true": self.image, **self.inverted}.items(), strict=True
        ):
            low, high = float(image.min()), float(image.max())
            axes.imshow((image.squeeze() - low) / max(high - low, 1e-12), cmap="gray_r")
            axes.set_title("the private image" if form == "true" else self._label(form), fontsize=10)
            verdict = "" if form == "true" else "yes: the image itself" if self.correlation(form) > 0.9 else "no: noise"
            axes.set_xlabel(verdict, fontsize=10, color=_COLOURS.get(form, "black"))
            axes.set(xticks=[], yticks=[])
            for side in axes.spines.values():
                side.set_color(_COLOURS.get(form, "0.6"))
                side.set_linewidth(1.6)
        below.suptitle("Can an attacker tell whose data was used?", fontsize=11, weight="bold")
        panels = {
            "Model adapted to a stream (Tent),\nattack by gradients": self.members,
            "Model fine-tuned on labelled images,\nattack with shadow models (LiRA)": self.trained_on,
        }
        for axes, (title, forms) in zip(below.subplots(1, 2), panels.items(), strict=True):
            chance = f"tossing a coin: 0.50 ± {forms['DP'].error:.2f}"
            axes.plot([0, 1], [0, 1], color="0.55", linestyle=":", label=chance)
            for form, found in forms.items():
                name = f"{self._label(form)}: {found.auroc:.2f}"
                axes.plot(*_curve(found), label=name, color=_COLOURS[form], linewidth=2)
            axes.set_title(title, fontsize=10)
            axes.set(xlabel="others who are taken for members", ylabel="members who are found")
            axes.set(xlim=(0, 1), ylim=(0, 1), xticks=_TICKS, yticks=_TICKS)
            axes.set_xticklabels([f"{100 * tick:g}%" for tick in _TICKS])
            axes.set_yticklabels([f"{100 * tick:g}%" for tick in _TICKS])
            axes.legend(frameon=False, fontsize=9, loc="lower right", title="area under the curve", title_fontsize=9)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        figure.savefig(path, dpi=130)

    def _label(self, form: str) -> str:
        return f"DP, epsilon {self.epsilon:g}" if form == "DP" else form

    def __str__(self) -> str:
        attacks = {"stream": self.members, "fine-tuning": self.trained_on}
        lines = [f"{self._label(n)}: {what}: {found}" for what, by in attacks.items() for n, found in by.items()]
        for name in FORMS:
            lines.append(f"{self._label(name)}: the image comes back with correlation {self.correlation(name):.2f}")
        return "\n".join(lines)


def exposure(
    *, epsilon: float = 1.0, episodes: int = 48, batch: int = 4, models: int = 8, clip: float = 1.0, seed: int = 0
) -> Exposure:
    """Attack adaptation and fine-tuning on the embedded images: once as published, once clipped, once private.

    In every episode Tent adapts the embedded model to ``batch`` images, and the attacker, who has the model of before
    and after and as many other images, says which were in (by gradients). ``models`` small nets are fine-tuned on 60
    images each, and attacked with shadow models (LiRA). The picture comes from one gradient of a small net.
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
    trained_on = {form: shadowed(form, epsilon=epsilon, clip=clip, models=models, seed=seed) for form in FORMS}
    return Exposure(epsilon=epsilon, members=found, trained_on=trained_on, image=image, inverted=inverted)


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
