"""What an engine learns once, on synthetic rows: do rows stay apart, what does the loss reach, which rule is right.

Formal guarantee: the checks look at the shapes and types of the batch and at which integers occur in it (so that tokens
and labels are valid), never at a row; whether they pass depends on the model and on the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from tacit.gradients.batches import change

Loss = Callable[[nn.Module, Any], Tensor]


def synthetic(batch: Any, rows: int, seed: int) -> Any:
    """Rows of the same shape and type: floats uniform in [0, 1), integers drawn from those that occur."""
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        shape = (rows, *t.shape[1:])
        if t.is_floating_point() or t.is_complex():
            return torch.rand(shape, generator=generator).to(t.device, t.dtype)
        values = t.reshape(-1)
        if not values.numel():
            return t.new_zeros(shape)
        return values[torch.randint(values.numel(), shape, generator=generator).to(t.device)]

    return change(batch, draw)


def with_other_first_row(batch: Any, other: Any) -> Any:
    """The first row from `other`, the rest as it was."""
    firsts: list[Tensor] = []
    change(other, lambda t: firsts.append(t[:1]) or t)  # type: ignore[func-returns-value]
    queue = iter(firsts)
    return change(batch, lambda t: torch.cat([next(queue), t[1:]]))


@dataclass
class Probe:
    """Losses and gradients of synthetic rows by plain autograd, on slightly moved parameters."""

    model: nn.Module
    loss: Loss
    parameters: dict[str, Tensor]

    def losses(self, batch: Any) -> Tensor:
        torch.manual_seed(0)  # the same dropout in every run
        return self.loss(self.model, batch)

    def gradient(self, batch: Any, weights: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The losses and the gradient of their weighted sum; None for a parameter that the graph does not reach."""
        losses = self.losses(batch)
        if losses.shape != weights.shape:
            raise wrong_shape(losses.shape, len(weights))
        if not losses.requires_grad:
            return losses.detach(), dict.fromkeys(self.parameters)
        kept = {n: p.grad for n, p in self.parameters.items()}
        try:
            for p in self.parameters.values():
                p.grad = None
            # Not autograd.grad, which one form of gradient checkpointing refuses.
            with torch.autocast(losses.device.type, enabled=False):  # backward in the precision of the forward
                torch.autograd.backward(losses, weights.to(losses))
            return losses.detach(), {n: p.grad for n, p in self.parameters.items()}
        finally:
            for n, p in self.parameters.items():
                p.grad = kept[n]


@contextmanager
def moved(model: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Move the parameters a little (a zero-initialised head hides what it multiplies) and put all back after."""
    kept = {n: p.detach().clone() for n, p in parameters.items()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    rates = [(m, key, getattr(m, key)) for m in model.modules() for key in _dropout(m)]
    generator = torch.Generator().manual_seed(1)
    devices = {p.device.index for p in parameters.values() if p.is_cuda}
    try:
        with torch.no_grad():
            for p in parameters.values():
                p.add_(torch.randn(p.shape, generator=generator).to(p) * 0.02)
        for module, key, _ in rates:
            setattr(module, key, 0.0)
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for n, p in parameters.items():
                p.copy_(kept[n])
            for n, b in model.named_buffers():
                if n in buffers and b.shape == buffers[n].shape:
                    b.copy_(buffers[n])
        for module, key, rate in rates:
            setattr(module, key, rate)


def _dropout(module: nn.Module) -> tuple[str, ...]:
    """The dropout rates of torch's own modules: the same seed drops other positions on another memory layout."""
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return ("dropout",)
    return ("p",) if isinstance(module, _DropoutNd) else ()


def check_rows_apart(probe: Probe, batch: Any, other: Any, rows: int) -> None:
    """Change the first row: every other row's loss and gradient must stay."""
    changed = with_other_first_row(batch, other)
    weights = torch.tensor([0.0, *[(-1.0) ** i * (1 + i / 2) for i in range(1, rows)]])
    buffers = []
    results = []
    for rows_given in (batch, changed):
        results.append(probe.gradient(rows_given, weights))
        buffers.append({n: b.clone() for n, b in probe.model.named_buffers()})
    (losses, gradient), (losses_after, gradient_after) = results
    mixed = not close(losses[1:], losses_after[1:])
    for name, value in gradient.items():
        after = gradient_after[name]
        mixed = mixed or (value is not None and after is not None and not close(value, after))
    if mixed:
        place = _first_mixing(probe, batch, changed, rows)
        raise ValueError(
            f"Rows are mixed {place}: changing one row changed another row's loss or gradient, so clipping a row's "
            f"gradient would not bound what that row can do. Remove what mixes rows (batch statistics, mixup, in-batch "
            f"negatives), or make the rows that belong together one row."
        )
    for name, value in buffers[0].items():
        if name in buffers[1] and not close(value, buffers[1][name]):
            raise ValueError(
                f"The buffer {name!r} changes with the rows that the model sees, without noise. Put its layer into "
                f"eval mode."
            )


def check_reached(gradient: dict[str, Tensor | None]) -> None:
    missing = [name for name, value in gradient.items() if value is None]
    if missing:
        raise ValueError(
            f"The loss does not reach {len(missing)} of {len(gradient)} trainable parameters: {', '.join(missing[:10])}"
            f"{', …' if len(missing) > 10 else ''}. Freeze them with requires_grad_(False), or use them in the forward."
        )


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding; what is not finite is not compared."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    share = 1e-5 if a.dtype.itemsize >= 4 else 1e-2  # the same rows in the same places: rounding is all there may be
    a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
    return bool((a - b).norm() <= share * max(float(a.norm()), float(b.norm())) + 1e-7)


def wrong_shape(shape: torch.Size, rows: int) -> ValueError:
    return ValueError(
        f"per_sample_loss must return one loss per row, of shape ({rows},), but returned {tuple(shape)}. "
        f"Losses of torch need reduction='none' and, for sequences, a mean over positions."
    )


def _first_mixing(probe: Probe, batch: Any, changed: Any, rows: int) -> str:
    """Run twice, compare what enters and leaves each module, and name the first place where other rows changed."""
    traces: list[list[tuple[str, str, Tensor]]] = []
    for given in (batch, changed):
        trace: list[tuple[str, str, Tensor]] = []
        hooks = []
        for name, module in probe.model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            hooks.append(module.register_forward_pre_hook(_note(trace, "before", label), with_kwargs=True))
            hooks.append(module.register_forward_hook(_note(trace, "in", label)))
        try:
            with torch.no_grad():
                probe.losses(given)
        finally:
            for hook in hooks:
                hook.remove()
        traces.append(trace)
    last = ""
    for (where, label, a), (_, _, b) in zip(*traces, strict=False):
        if a.shape == b.shape and _others_changed(a, b, rows):
            if where == "in":
                return f"in layer {label}"
            return f"between {last} and {label}" if last else "by per_sample_loss, before the model"
        last = label
    return f"by per_sample_loss, after {last}" if last else "by per_sample_loss"


def _note(trace: list[tuple[str, str, Tensor]], where: str, label: str) -> Callable[..., None]:
    def hook(module: nn.Module, *seen: Any) -> None:  # noqa: ARG001
        tree = seen[-1] if where == "in" else list(seen)
        change(tree, lambda t: trace.append((where, label, t.detach().clone())) or t)  # type: ignore[func-returns-value]

    return hook


def _others_changed(a: Tensor, b: Tensor, rows: int) -> bool:
    if a.shape[0] % rows or not a.is_floating_point():
        return False
    first = a.shape[0] // rows
    return not close(a[first:], b[first:])
