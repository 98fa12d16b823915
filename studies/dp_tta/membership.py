"""Was this image in the stream? An attack on the adapted parameters, of each form of Tent.

    python -m studies.dp_tta.membership OUT [RUNS]

adapts the embedded model to batches of foggy clothes and asks of each image of the stream, and of as many
others, how well the change of the parameters fits to its own gradient (`audit.attack`, method "gradient").
Writes OUT/membership.json: of each form the area under the curve over all runs, its standard error under no effect, and
the share of members found where one in a hundred others is mistaken for one. Everything here is public data.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit import adapt, audit
from tacit.data import fashion_mnist, shifts
from tacit.models import embedded

BATCH, STEPS = 16, 4
CLIP, RATE = 0.3, 0.01
FORMS: dict[str, adapt.Privacy] = {
    "published": None,
    "clip": adapt.Clip(CLIP),
    "DP, eps 10": adapt.DP(10.0, clip=CLIP),
    "DP, eps 1": adapt.DP(1.0, clip=CLIP),
}


def unsure(model: nn.Module, rows: Any) -> Tensor:
    """What Tent minimises, row by row."""
    return adapt.entropy(model(rows))


def attacked(form: adapt.Privacy, run: int, images: Tensor) -> audit.Membership:
    """One run: adapt to half of these images, and tell them from the other half."""
    members, others = torch.split(images, BATCH * STEPS)
    adapter = adapt.Tent(embedded(), privacy=form, batch_size=BATCH, lr=RATE, seed=run)
    for batch in torch.split(members, BATCH):
        adapter(batch)
    before = embedded().eval()
    return audit.attack(adapter.model, members, others, loss=unsure, before=before, method="gradient", name="gradient")


def main(out: Path, runs: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    images = fashion_mnist("unseen")[0]
    found: dict[str, audit.Membership] = {}
    for run in range(runs):
        chosen = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(run))[: 2 * BATCH * STEPS]]
        foggy = shifts.corrupt(chosen, "fog", 3, seed=run).float() / 255
        for name, form in FORMS.items():
            once = attacked(form, run, foggy)
            found[name] = found[name].together(once) if name in found else once
        told = {
            name: {"auroc": each.auroc, "chance": each.error, "found at 1%": each.found_at(0.01), "runs": run + 1}
            for name, each in found.items()
        }
        (out / "membership.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
