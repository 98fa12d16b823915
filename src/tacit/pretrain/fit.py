"""Plain supervised training on public data: AdamW, one cycle of the learning rate, augmentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit.pretrain.augment import Augment


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained."""

    epochs: int = 8
    batch: int = 128
    lr: float = 4e-3
    weight_decay: float = 0.05
    augment: Augment | None = field(default_factory=Augment)
    seed: int = 0


def fit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    *,
    public: bool = False,
    progress: Callable[[int, int, float], None] | None = None,
) -> nn.Module:
    """Train `model` in place on images in [0, 1] that the caller declares public, and return it in evaluation mode.

    `progress` is told the step, the number of steps and the loss. Nothing here is private: without `public=True` the
    call is refused.
    """
    if not public:
        raise ValueError("Pretraining protects nobody: say public=True if this data is public, or use finetune.")
    if len(images) != len(labels) or len(images) < recipe.batch:
        raise ValueError(f"{len(images)} images and {len(labels)} labels do not fill one batch of {recipe.batch}.")
    generator = torch.Generator().manual_seed(recipe.seed)
    optimiser = torch.optim.AdamW(_groups(model, recipe.weight_decay), lr=recipe.lr)
    per_epoch = len(images) // recipe.batch
    total = recipe.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=recipe.lr, total_steps=total)
    model.train()
    for step in range(total):
        if step % per_epoch == 0:
            order = torch.randperm(len(images), generator=generator)
        rows = order[(step % per_epoch) * recipe.batch :][: recipe.batch]
        shown = images[rows] if recipe.augment is None else recipe.augment(images[rows], generator)
        loss = functional.cross_entropy(model(shown), labels[rows])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, total, float(loss.detach()))
    return model.eval()


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decay matrices and kernels only: scales and biases have nothing to shrink to."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
