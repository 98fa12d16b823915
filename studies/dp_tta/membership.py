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

import itertools
import json
import math
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

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


def gradients(images: Tensor, names: list[str]) -> Tensor:
    """Of each image's entropy for the adapted parameters of the source model: one row per image."""
    model = embedded()
    chosen = [p for name, p in model.named_parameters() if name in names]
    rows = [torch.autograd.grad(adapt.entropy(model(image[None])).sum(), chosen) for image in images]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).double()


class Attacker:
    """Knows the form, and the gradients of other images of this kind."""

    def __init__(self, form: adapt.Privacy, known: Tensor) -> None:
        self.clip = math.inf if form is None else CLIP
        self.noise = CLIP * form.noise_multiplier() if isinstance(form, adapt.DP) else 0.0
        rows = self.clipped(known)
        self.mean = rows.mean(0)
        self.spread, self.axes = torch.linalg.eigh(torch.cov(rows.T))
        self.spread = self.spread.clamp(min=0) + RIDGE * self.spread.mean()

    def clipped(self, rows: Tensor) -> Tensor:
        """As the form clips."""
        clipped: Tensor = rows * (self.clip / rows.norm(dim=1, keepdim=True)).clamp(max=1)
        return clipped

    def scores(self, released: Tensor, rows: Tensor, batch: int) -> Tensor:
        """The logarithm of the likelihood ratio of each image, by its gradient."""
        variance = self.spread / batch + (self.noise / batch) ** 2
        added = (self.clipped(rows) - self.mean) @ self.axes / batch
        seen = (released - self.mean) @ self.axes
        ratios: Tensor = (added * (seen - added / 2) / variance).sum(1)
        return ratios


def step(form: adapt.Privacy, members: Tensor, names: list[str], seed: int) -> Tensor:
    """What one step of Tent releases of the batch: the gradient by which it has moved the parameters."""
    adapter = adapt.Tent(embedded(), privacy=form, batch_size=len(members), lr=RATE, momentum=0.0, seed=seed)
    before = adapter.state_dict()
    adapter(members)
    after = adapter.state_dict()
    return torch.cat([(before[name] - after[name]).double().flatten() for name in names]) / RATE


def foggy(images: Tensor, seed: int) -> Tensor:
    return shifts.corrupt(images, "fog", 3, seed=seed).float() / 255


def main(out: Path, runs: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    names = list(adapt.Tent(embedded()).parameters)
    known = gradients(foggy(fashion_mnist("seen")[0][:KNOWN], runs), names)
    attackers = {name: Attacker(form, known) for name, form in FORMS.items()}
    images = fashion_mnist("unseen")[0]
    found: dict[tuple[str, int], audit.Membership] = {}
    for run in range(runs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(run))
        shown = foggy(images[order[: 2 * max(BATCHES)]], run)
        rows = gradients(shown, names)
        for batch, (name, form) in itertools.product(BATCHES, FORMS.items()):
            scores = attackers[name].scores(step(form, shown[:batch], names, run), rows[: 2 * batch], batch).numpy()
            once = audit.Membership(name="likelihood ratio", inside=scores[:batch], outside=scores[batch:])
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
