"""Private statistics of BatchNorm layers against frozen ones and against those of the batch, on fifteen shifts.

    python -m studies.dp_tta.batch_norm OUT [IMAGES_PER_SHIFT]

trains a small net with five BatchNorm layers on Fashion-MNIST (OUT/net.pt; kept) and writes OUT/accuracy.json: the mean
accuracy over shifts of each arm, seed by seed. Rate and clip were chosen on the four extra shifts.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tacit import adapt
from tacit.data import fashion_mnist, shifts, streams

EPSILONS, SEEDS, EPOCHS = (10.0, 4.0, 1.0), (0, 1, 2), 4


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


def main(out: Path, per_shift: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    images, labels = fashion_mnist("unseen")
    found: dict[str, list[float]] = {}
    forms: dict[str, dict[str, Any]] = {"as published": {}}
    for epsilon in EPSILONS:
        privacy = adapt.DP(epsilon, clip=0.3)
        forms[f"private, eps {epsilon:g}"] = {"privacy": privacy, "statistics": "private"}
        forms[f"frozen, eps {epsilon:g}"] = {"privacy": privacy, "statistics": "source"}
    for seed in SEEDS:
        stream = streams.corrupted(images, labels, shifts=shifts.TEST, severity=3, per_shift=per_shift, seed=seed)
        source = adapt.follow(trained(out / "net.pt"), stream, batch_size=100, public=True)
        found.setdefault("source", []).append(source.mean)
        for name, form in forms.items():
            adapter = adapt.Tent(trained(out / "net.pt"), batch_size=64, lr=0.003, seed=seed, **form)
            scores = adapt.follow(adapter, stream, batch_size=64, public=True)
            found.setdefault(name, []).append(scores.mean)
            (out / "accuracy.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="No ledger was given")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300)
