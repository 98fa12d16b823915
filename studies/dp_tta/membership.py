"""Was this image in the batch? An attack on the parameters before and after a step, of each form of Tent.

    python -m studies.dp_tta.membership OUT [RUNS]

adapts the embedded model to one batch of foggy clothes and asks of each of its images, and of as many others, whether
it was there. The attacker sees all parameters before and after the step, has the image, and knows how images of this
kind usually move the model: mean and covariance of the gradients of 2,000 other foggy images. Under a normal
approximation the released gradient is N(mu, S) without the image x and N(mu + (g_x - mu) / B, S) with it, where g_x is
the image's own gradient (clipped as the form clips), B the batch size and S the covariance of a batch's mean plus that
of the noise: the score is the logarithm of the likelihood ratio. Writes OUT/membership.json: of each form and batch
size the area under the curve over all runs, its standard error under no effect, and the share of members found where
one in a hundred others is mistaken for one. Everything here is public data.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tacit import adapt, audit
from tacit.data import fashion_mnist, shifts
from tacit.models import embedded

BATCHES, KNOWN = (64, 16), 2000
CLIP, RATE = 0.3, 0.01
RIDGE = 0.01  # of the mean variance: 2,000 images do not know all of 1,024 directions
FORMS: dict[str, adapt.Privacy] = {
    "published": None,
    "clip": adapt.Clip(CLIP),
    "DP, eps 10": adapt.DP(10.0, clip=CLIP),
    "DP, eps 1": adapt.DP(1.0, clip=CLIP),
}


@torch.no_grad()  # of the other parameters nothing is kept: it would be gigabytes
def gradients(model: nn.Module, names: list[str], images: Tensor, clip: float | None) -> Tensor:
    """Of each image's entropy for the adapted parameters: one row per image, clipped if the form clips."""
    adapted = {name: p.detach() for name, p in model.named_parameters() if name in names}

    def unsure(values: dict[str, Tensor], image: Tensor) -> Tensor:
        return adapt.entropy(functional_call(model, values, (image[None],))).sum()

    parts = [vmap(grad(unsure), (None, 0))(adapted, part) for part in images.split(128)]
    rows = torch.cat([torch.cat([part[name].flatten(1) for name in names], 1) for part in parts]).double()
    return rows if clip is None else rows * (clip / rows.norm(dim=1, keepdim=True)).clamp(max=1)


class Attacker:
    """Knows the model, the form, and other images of this kind."""

    def __init__(self, form: adapt.Privacy, names: list[str], known: Tensor) -> None:
        self.names, self.clip = names, None if form is None else CLIP
        self.noise = CLIP * form.noise_multiplier() if isinstance(form, adapt.DP) else 0.0
        rows = gradients(embedded(), names, known, self.clip)
        self.mean = rows.mean(0)
        self.spread, self.axes = torch.linalg.eigh(torch.cov(rows.T))
        self.spread = self.spread.clamp(min=0) + RIDGE * self.spread.mean()

    def scores(self, released: Tensor, images: Tensor, batch: int) -> Tensor:
        """The logarithm of the likelihood ratio, image by image."""
        variance = self.spread / batch + (self.noise / batch) ** 2
        added = (gradients(embedded(), self.names, images, self.clip) - self.mean) @ self.axes / batch
        seen = (released - self.mean) @ self.axes
        return (added * (seen - added / 2) / variance).sum(1)


def attacked(form: adapt.Privacy, attacker: Attacker, images: Tensor, run: int) -> audit.Membership:
    """One step on half of these images, and the attack on all of them."""
    members, others = images.chunk(2)
    adapter = adapt.Tent(embedded(), privacy=form, batch_size=len(members), lr=RATE, momentum=0.0, seed=run)
    before, names = adapter.state_dict(), attacker.names
    adapter(members)
    after = adapter.state_dict()
    released = torch.cat([(before[name] - after[name]).double().flatten() for name in names]) / RATE
    inside, outside = (attacker.scores(released, rows, len(members)).numpy() for rows in (members, others))
    return audit.Membership(name="likelihood ratio", inside=inside, outside=outside)


def foggy(images: Tensor, seed: int) -> Tensor:
    return shifts.corrupt(images, "fog", 3, seed=seed).float() / 255


def main(out: Path, runs: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    names = list(adapt.Tent(embedded()).parameters)
    known = foggy(fashion_mnist("seen")[0][:KNOWN], runs)
    attackers = {name: Attacker(form, names, known) for name, form in FORMS.items()}
    images = fashion_mnist("unseen")[0]
    found: dict[tuple[str, int], audit.Membership] = {}
    for run in range(runs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(run))
        for batch in BATCHES:
            shown = foggy(images[order[: 2 * batch]], run)
            for name, form in FORMS.items():
                once = attacked(form, attackers[name], shown, run)
                key = name, batch
                found[key] = found[key].together(once) if key in found else once
        facts = [
            {
                "form": name,
                "batch": batch,
                "auroc": each.auroc,
                "chance": each.error,
                "found at 1%": each.found_at(0.01),
            }
            for (name, batch), each in found.items()
        ]
        (out / "membership.json").write_text(json.dumps({"runs": run + 1, "found": facts}, indent=1))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
