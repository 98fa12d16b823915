"""Who was a small net fine-tuned on? LiRA against the same training as published, with clipping alone, and with DP."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tacit.audit._attack import Membership, attack
from tacit.data import fashion_mnist
from tacit.finetune import DPGD, fit

_PEOPLE, _STEPS, _SHADOWS = 60, 60, 6
_RATE = {"as published": 0.5, "clip only": 0.5, "DP": 0.05}


def shadowed(form: str, *, epsilon: float, clip: float, models: int, seed: int) -> Membership:
    """LiRA (Carlini et al. 2022, offline) on ``models`` nets, each fine-tuned on 60 images in one form.

    The shadow models are trained in the same way on public images, as many as the attacker likes; members and others
    are images of the test split.

    Args:
        form: "as published", "clip only" or "DP".
        epsilon: Of the DP form, at delta 1e-6.
        clip: Of the last two forms.
        models: How many nets are attacked.
        seed: Of who is a member, and of the weights at the start.

    Returns:
        The scores of all members and of as many others.
    """
    parts = _parts("test", 2 * models, seed)
    public = _parts("train", _SHADOWS, seed + 1)
    start = _net(seed)
    shadows = [_trained(start, rows, form, epsilon, clip) for rows in public]
    found: Membership | None = None
    for _ in range(models):
        members, others = next(parts), next(parts)
        after = _trained(start, members, form, epsilon, clip)
        one = attack(after, members, others, loss=_loss, method="lira", shadows=shadows, name="LiRA")
        found = one if found is None else found.together(one)
    if found is None:
        raise ValueError("At least one model is attacked.")
    return found


def _parts(split: str, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of so many disjoint groups of people."""
    images, labels = fashion_mnist(split)  # type: ignore[arg-type]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: count * _PEOPLE]
    for part in order.view(count, _PEOPLE):
        yield images[part].float() / 255, labels[part].long()


def _net(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def _loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="none")


def _trained(start: nn.Module, rows: tuple[Tensor, Tensor], form: str, epsilon: float, clip: float) -> nn.Module:
    model, rate = copy.deepcopy(start), _RATE[form]
    if form == "as published":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            _loss(model, rows).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = fit(
            model,
            rows,
            optimizer=DPGD(steps=_STEPS, lr=rate, clip=clip),
            epsilon=epsilon if form == "DP" else math.inf,
            delta=1e-6,
            size=_PEOPLE,
            scheme="full",
            head="keep",
        )
    return fitted.model
