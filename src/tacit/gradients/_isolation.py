"""What an engine learns once, on synthetic rows: do rows stay apart, what does the loss reach, which rule is right.

Formal guarantee: the checks look at the shapes and types of the batch and at which integers occur in it (so that tokens
and labels are valid), never at a row; whether they pass depends on the model and on the loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from tacit.gradients._batches import change
from tacit.gradients._synthetic import mirrored, synthetic, with_other_rows

PART = 1 << 20  # entries that are compared at a time
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor]]  # one loss per row, perhaps with other outputs


def with_outputs(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The losses, and what the loss function returned beside them, one entry per row."""
    if not isinstance(found, tuple):
        return found, None
    losses, outputs = found
    if outputs.shape[:1] != losses.shape[:1]:
        raise ValueError(
            f"What per_sample_loss returns beside the losses must have one entry per row, {tuple(losses.shape[:1])} of "
            f"them, but is of shape {tuple(outputs.shape)}."
        )
    return losses, outputs


@dataclass
class Probe:
    """Losses and gradients of synthetic rows by plain autograd, on slightly moved parameters."""

    model: nn.Module
    loss: Loss
    parameters: dict[str, Tensor]

    def losses(self, batch: Any) -> Tensor:
        seed_all()
        drop(caches_of(self.model))
        return with_outputs(self.loss(self.model, batch))[0]

    def gradient(self, batch: Any, weights: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The losses and the gradient of their weighted sum; None for a parameter that the graph does not reach."""
        losses = self.losses(batch)
        if losses.shape != weights.shape:
            raise wrong_shape(losses.shape, len(weights))
        if not losses.requires_grad:
            return losses.detach(), dict.fromkeys(self.parameters)
        refuse_strangers(losses, self.parameters)
        kept = {n: p.grad for n, p in self.parameters.items()}
        try:
            for p in self.parameters.values():
                p.grad = None
            # Not autograd.grad, which one form of gradient checkpointing refuses.
            with torch.autocast(losses.device.type, enabled=False):  # backward in the precision of the forward
                torch.autograd.backward(losses, weights.to(losses))
            return losses.detach(), {n: _dense(p.grad) for n, p in self.parameters.items()}
        finally:
            for n, p in self.parameters.items():
                p.grad = kept[n]


class RowsMixed(ValueError):
    """Rows are not kept apart: no clipped sum of this model under this loss is bounded."""


def seed_all() -> None:
    """The same random numbers in every run, whoever draws them."""
    torch.manual_seed(0)
    np.random.seed(0)  # what models use
    random.seed(0)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and put it, the buffers and the random state back after."""
    buffers = buffers_of(model)
    rates = [(m, key, getattr(m, key)) for m in model.modules() for key in _dropout(m)]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    try:
        for module, key, _ in rates:
            setattr(module, key, 0.0)
        with torch.random.fork_rng(devices):
            yield
    finally:
        put_back(model, buffers)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for module, key, rate in rates:
            setattr(module, key, rate)


@contextmanager
def moved(model: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Move the parameters a little (a zero-initialised head hides what it multiplies) and put all back after."""
    kept = {n: p.detach().clone() for n, p in parameters.items()}
    generator = torch.Generator().manual_seed(1)
    try:
        with torch.no_grad():
            for p in parameters.values():
                p.add_(torch.randn(p.shape, generator=generator).to(p) * 0.02)
        with undisturbed(model):
            yield
    finally:
        with torch.no_grad():
            for n, p in parameters.items():
                p.copy_(kept[n])


def _dropout(module: nn.Module) -> tuple[str, ...]:
    """The dropout rates of torch's own modules: the same seed drops other positions on another memory layout."""
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return ("dropout",)
    return ("p",) if isinstance(module, _DropoutNd) else ()


def check_rows_apart(probe: Probe, batch: Any) -> None:
    """Change one row of three: every other row's loss and gradient must stay.

    Once among rows alike, and twice for a row that stands out, which decides a maximum or who is whose neighbour.
    """
    for row, spread, other in ((0, 0.0, 0.0), (0, 1.0, 10.0), (1, 1.0, 10.0)):
        changed = torch.arange(3) == row
        compare(probe, synthetic(batch, 3, 0, spread), synthetic(batch, 3, 1, other), changed)


def check_many_apart(
    probe: Probe, batch: Any, rows: int, seed: int = 3
) -> tuple[Any, Tensor, dict[str, Tensor | None]]:
    """Change one row in eight of so many for one that stands out: every other row's loss and gradient must stay.

    The rows, which are returned as in `compare`, are in order by no key (see `mirrored`).
    """
    given = mirrored(synthetic(batch, rows, seed, 1.0), rows)
    return given, *compare(probe, given, synthetic(batch, rows, seed + 1, 10.0), torch.arange(rows) % 8 == 0)


def compare(probe: Probe, batch: Any, other: Any, which: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Change some rows for others: everybody else's loss and gradient must stay.

    Returns the weights of the losses (zero for rows that were changed) and the gradient of their weighted sum.
    """
    changed = with_other_rows(batch, other, which)
    del other  # these may be large: no more copies than are looked at
    generator = torch.Generator().manual_seed(2)  # of one sign: rows alike must not cancel
    weights = (0.5 + 1.5 * torch.rand(which.numel(), generator=generator)).masked_fill(which, 0)
    start, buffers, results = buffers_of(probe.model), [], []
    for rows_given in (batch, changed):
        put_back(probe.model, start)  # a counter of calls is no memory of rows
        results.append(probe.gradient(change(rows_given, Tensor.clone), weights))
        buffers.append(buffers_of(probe.model))
    (losses, gradient), (losses_after, gradient_after) = results
    others = ~which.to(losses.device)
    mixed = not close(losses[others], losses_after[others])
    slack = 1e-7 * whole_norm(gradient)
    for name, value in gradient.items():
        after = gradient_after[name]
        if value is not None and after is not None:  # a changed row without a weight may make it not finite: 0 * inf
            mixed = mixed or not close(value, after, slack, either=True)
    if mixed:
        put_back(probe.model, start)
        refuse_chance(probe, batch)
        put_back(probe.model, start)
        place = _first_mixing(probe, batch, changed, which)
        raise RowsMixed(
            f"Rows are mixed {place}: changing one row changed another row's loss or gradient, so clipping a row's "
            f"gradient would not bound what that row can do. Remove what mixes rows (batch statistics, mixup, in-batch "
            f"negatives), or make the rows that belong together one row."
        )
    for name, value in buffers[0].items():
        if name in buffers[1] and not close(value, buffers[1][name]):
            raise RowsMixed(
                f"The buffer {name!r} changes with the rows that the model sees, without noise. Put its layer into "
                f"eval mode."
            )
    return weights, gradient


def refuse_chance(probe: Probe, batch: Any) -> None:
    """Two runs on the same rows with the same seeds must agree, or nothing can be checked."""
    start = buffers_of(probe.model)
    with torch.no_grad():
        first = probe.losses(change(batch, Tensor.clone))
        put_back(probe.model, start)
        second = probe.losses(change(batch, Tensor.clone))
    if not close(first, second):
        raise ValueError(
            "The losses of the same rows differ from one run to the next, with the same seeds (torch, numpy, random): "
            "the model or the loss draws random numbers of its own, so it cannot be checked whether rows stay apart. "
            "Switch that off (an augmentation, a time mask), or draw from torch's generator."
        )


def refuse_strangers(losses: Tensor, parameters: dict[str, Tensor]) -> None:
    """The backward would leave unclipped gradients on trainable parameters that are not the model's."""
    known = {id(p) for p in parameters.values()}
    seen: set[Any] = set()
    stack: list[Any] = [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise ValueError(
                f"The loss uses a trainable parameter of shape {tuple(leaf.shape)} that is not the model's: its "
                f"gradient would be neither clipped nor noised. Make it part of the model, or freeze it with "
                f"requires_grad_(False)."
            )
        stack += [following for following, _ in node.next_functions]


def whole_norm(gradient: dict[str, Tensor | None]) -> float:
    """The norm over all parameters, of what is finite."""
    squares = [part.square().sum() for v in gradient.values() if v is not None for part in in_parts(v)]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def in_parts(values: Tensor) -> Iterator[Tensor]:
    """In float64, what is not finite as zero, some entries at a time: a copy of a word table would be large."""
    for part in _raw_parts(values):
        yield part.nan_to_num(0, 0, 0)


def _raw_parts(values: Tensor) -> Iterator[Tensor]:
    if values.is_complex():
        values = torch.view_as_real(values)
    for part in torch.split(values.detach().reshape(-1), PART):
        yield part.double()


def distance(a: Tensor, b: Tensor, *, either: bool = False) -> tuple[float, float, float]:
    """The norm of a - b, of a and of b; what is not finite counts as zero, with `either` in both of them."""
    total = torch.zeros(3, dtype=torch.float64, device=a.device)
    for left, right in zip(_raw_parts(a), _raw_parts(b), strict=True):
        if either:
            finite = torch.isfinite(left) & torch.isfinite(right)
            left, right = (torch.where(finite, t, 0) for t in (left, right))
        left, right = (t.nan_to_num(0, 0, 0) for t in (left, right))
        total += torch.stack([t.square().sum() for t in (left - right, left, right)])
    gap, first, second = total.sqrt().tolist()
    return gap, first, second


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in _named_buffers(model)}


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As the model's own, several times faster where most modules have none: this is asked at every step."""
    seen: set[int] = set()
    stack = [("", model)]
    while stack:
        prefix, module = stack.pop()
        if module._buffers:
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield prefix + name, buffer
        if module._modules:
            stack += [(f"{prefix}{key}.", child) for key, child in module._modules.items() if child is not None]


def caches_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Where modules keep what they computed from their parameters in evaluation mode (attention biases, in timm)."""
    return [
        value
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule) and module._parameters
        for key, value in module.__dict__.items()
        if type(value) is dict and "cache" in key
    ]


def drop(caches: list[dict[Any, Any]]) -> None:
    """Have it computed anew: from parameters as they are now, and with a graph."""
    for cache in caches:
        for key in [key for key, value in cache.items() if isinstance(value, Tensor)]:
            del cache[key]


def put_back(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for n, b in _named_buffers(model) if buffers else ():
            if n in buffers and b.shape == buffers[n].shape:
                b.copy_(buffers[n])


def check_reached(names: list[str], reached: set[str]) -> None:
    missing = [name for name in names if name not in reached]
    if missing:
        raise ValueError(
            f"The loss does not reach {len(missing)} of {len(names)} trainable parameters: {', '.join(missing[:10])}"
            f"{', …' if len(missing) > 10 else ''}. Freeze them with requires_grad_(False), or use them in the forward."
        )


def close(a: Tensor, b: Tensor, slack: float = 0.0, *, either: bool = False) -> bool:
    """Equal up to rounding and `slack`; what is not finite counts as zero, with `either` in both of them."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    share = 1e-5 if a.dtype.itemsize >= 4 else 1e-2  # the same rows in the same places: rounding is all there may be
    gap, first, second = distance(a, b, either=either)
    return gap <= share * max(first, second) + slack


def wrong_shape(shape: torch.Size, rows: int) -> ValueError:
    return ValueError(
        f"per_sample_loss must return one loss per row, of shape ({rows},), but returned {tuple(shape)}. "
        f"Losses of torch need reduction='none' and, for sequences, a mean over positions."
    )


def _first_mixing(probe: Probe, batch: Any, changed: Any, which: Tensor) -> str:
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
                probe.losses(change(given, Tensor.clone))
        finally:
            for hook in hooks:
                hook.remove()
        traces.append(trace)
    last = ""
    for (where, label, a), (_, _, b) in zip(*traces, strict=False):
        if a.shape == b.shape and _others_changed(a, b, which):
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


def _others_changed(a: Tensor, b: Tensor, which: Tensor) -> bool:
    rows = which.numel()
    if a.shape[0] == 0 or a.shape[0] % rows or not a.is_floating_point():
        return False
    others = ~which.to(a.device)
    return not close(a.reshape(rows, -1)[others], b.reshape(rows, -1)[others])
