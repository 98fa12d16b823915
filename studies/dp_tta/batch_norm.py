"""Private statistics of BatchNorm layers against frozen ones and against those of the batch, on fifteen shifts.

    python -m studies.dp_tta.batch_norm OUT [IMAGES_PER_SHIFT]

trains a small net with five BatchNorm layers on Fashion-MNIST (OUT/net.pt; kept), adapts it in every form with every
seed and prints a table; OUT/curve.png is the picture. OUT/accuracy.json keeps the accuracy under each shift, arm by arm
and seed by seed: a run that was stopped goes on. Rate and clip were chosen on the four extra shifts.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from studies.render import spread
from studies.tradeoff import Point, tradeoff
from tacit import adapt
from tacit.data import fashion_mnist, shifts, streams
from tacit.report import Spread

EPSILONS, SEEDS, EPOCHS = (10.0, 4.0, 2.0, 1.0), (0, 1, 2), 4
CLIP, RATE = 0.3, 0.003
Found = dict[str, dict[str, dict[str, float]]]  # accuracy by arm, seed and shift


def net(width: int = 24) -> nn.Sequential:
    """Five convolutions with BatchNorm."""
    sizes = ((1, width, 2), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1))
    blocks: list[nn.Module] = []
    for before, after, stride in (*sizes, (2 * width, 2 * width, 1)):
        conv = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        blocks.append(nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU()))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def trained(file: Path) -> nn.Sequential:
    """The net, trained on clean images with flips and small moves; from the file, if it is there."""
    torch.manual_seed(0)
    model = net()
    if not file.exists():
        images, labels = fashion_mnist("seen")
        values = images.float() / 255
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        steps = EPOCHS * len(values) // 128 + 5
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
        for _ in range(EPOCHS):
            for chosen in torch.split(torch.randperm(len(values)), 128):
                batch = values[chosen]
                batch = torch.where(torch.rand(len(batch), 1, 1, 1) < 0.5, batch.flip(3), batch)
                move = torch.randint(-2, 3, (2,)).tolist()
                loss = nn.functional.cross_entropy(model(batch.roll((move[0], move[1]), (2, 3))), labels[chosen])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
        torch.save(model.state_dict(), file)
    model.load_state_dict(torch.load(file))
    return model.eval()


def forms() -> dict[str, dict[str, Any] | None]:
    """Arguments of the adapter, by arm; None is the model without adaptation."""
    found: dict[str, dict[str, Any] | None] = {"source": None, "as published": {}}
    for epsilon in EPSILONS:
        privacy = adapt.DP(epsilon, clip=CLIP)
        found[f"private, eps {epsilon:g}"] = {"privacy": privacy, "statistics": "private"}
        found[f"frozen, eps {epsilon:g}"] = {"privacy": privacy, "statistics": "source"}
    return found


def main(out: Path, per_shift: int) -> Found:
    """Run what OUT does not have yet, and keep every cell as soon as it is known."""
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "accuracy.json"
    found: Found = json.loads(kept.read_text()) if kept.exists() else {}
    images, labels = fashion_mnist("unseen")
    for seed in SEEDS:
        stream = streams.corrupted(images, labels, shifts=shifts.TEST, severity=3, per_shift=per_shift, seed=seed)
        for name, form in forms().items():
            if str(seed) in found.setdefault(name, {}):
                continue
            net = trained(out / "net.pt")
            model = net if form is None else adapt.Tent(net, batch_size=64, lr=RATE, seed=seed, **form)
            found[name][str(seed)] = adapt.follow(model, stream, batch_size=64, public=True).accuracy
            kept.write_text(json.dumps(found, indent=1))
    return found


def means(found: Found, name: str) -> dict[str, float]:
    """Mean accuracy over shifts, seed by seed."""
    return {seed: statistics.fmean(by_shift.values()) for seed, by_shift in found.get(name, {}).items()}


def above(found: Found, name: str, other: str) -> Spread | None:
    """How far an arm is above another: the mean difference over the seeds of both, and its standard deviation."""
    mine, theirs = means(found, name), means(found, other)
    return spread([mine[seed] - theirs[seed] for seed in mine if seed in theirs])


def table(found: Found) -> str:
    """Means over seeds with their standard deviation, as Markdown."""
    lines = ["| arm | mean | above source | above frozen |", "|---|---:|---:|---:|"]
    for name in found:
        frozen = name.replace("private", "frozen")
        cells = [
            spread(list(means(found, name).values())),
            None if name == "source" else above(found, name, "source"),
            None if frozen == name else above(found, name, frozen),
        ]
        written = ["" if cell is None else f"{cell[0]:.1f} ± {cell[1]:.1f}" for cell in cells]
        lines.append("| " + " | ".join([name, *written]) + " |")
    return "\n".join(lines)


def curve(found: Found) -> Figure:
    """Accuracy against epsilon, private and frozen statistics."""
    series: dict[str, list[Point]] = {"private": [], "frozen": []}
    for epsilon in EPSILONS:
        for kind, line in series.items():
            reached = spread(list(means(found, f"{kind}, eps {epsilon:g}").values()))
            if reached is not None:
                line.append(Point(epsilon, *reached))
    levels = {name: statistics.fmean(means(found, name).values()) for name in ("source", "as published")}
    return tradeoff(series, levels)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="No ledger was given")
    result = main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300)
    print(table(result))
    curve(result).savefig(Path(sys.argv[1]) / "curve.png", dpi=160)
