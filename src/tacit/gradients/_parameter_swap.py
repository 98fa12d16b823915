"""Put handles in place of a model's trainable parameters for one pass, and take them out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tacit.gradients._isolation import caches_of, drop
from tacit.gradients._recorder import Recorder, UnsupportedPattern
from tacit.gradients._traced_parameter import TracedParameter, plain
from tacit.gradients.layers import _attention as attention
from tacit.gradients.layers import _experts as experts
from tacit.gradients.layers import _norm as norm_layers
from tacit.gradients.layers import _recurrent as recurrent
from tacit.gradients.layers import _timesformer as timesformer

_CELLS = (nn.LSTMCell.forward, nn.GRUCell.forward, nn.RNNCell.forward)
_RECURRENT = (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)


class ParameterSwap:
    """Where the trainable parameters of a model live."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError(
                "The model has no trainable parameter: call requires_grad_(True) on what should be trained."
            )
        if unreal := [name for name, p in self.parameters.items() if p.is_complex()]:
            raise ValueError(
                f"The parameter {unreal[0]!r} is complex, and sums are of real numbers: train its real and "
                "imaginary parts (torch.view_as_real), or freeze it."
            )
        names = {id(p): n for n, p in self.parameters.items()}
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._rewritten: list[tuple[nn.Module, Any]] = []
        self._norms: list[tuple[nn.LayerNorm, str | None, str | None]] = []
        traced = any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in model.modules())
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            here = [(key, names[id(p)]) for key, p in module._parameters.items() if id(p) in names]
            self._places += [(module._parameters, key, name) for key, name in here]
            own = dict(here)
            affine = type(module).forward is nn.LayerNorm.forward and {"weight", "bias"} <= module._parameters.keys()
            if affine and own and not traced:  # torch.compile would start anew at each step
                self._norms.append((module, own.get("weight"), own.get("bias")))  # type: ignore[arg-type]
            written_out = _written_out(module)
            if written_out and any(p.requires_grad for p in module.parameters()):
                self._rewritten.append((module, written_out))
        self.normalisers: list[tuple[str, nn.Module]] = [
            (n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm | _InstanceNorm)
        ]
        self._known = set(names)
        self._modules = list(model.modules())
        self.compiled = any(isinstance(m, torch.jit.ScriptModule) for m in self._modules)  # nothing to watch in there
        self._caches = caches_of(model)
        self._keeping: list[tuple[nn.Module, str]] = []  # where modules keep what they computed from parameters

    def refuse_changes(self, model: nn.Module) -> None:
        """Name the parameters that the engine does not know; their gradients would be missing from every sum."""
        if changed := self.changed(model):
            raise ValueError(
                f"{len(changed)} trainable parameters were created, replaced or unfrozen after the engine: "
                f"{', '.join(changed[:10])}{', …' if len(changed) > 10 else ''}. Make a new Engine once the model is "
                f"complete."
            )

    def changed(self, model: nn.Module) -> list[str]:
        """Parameters that were created, replaced, tied, frozen or made trainable since."""
        if gone := [
            n for at, key, n in self._places if at.get(key) is not (p := self.parameters[n]) or not p.requires_grad
        ]:
            return gone
        if self.compiled:  # such modules make new objects for the same parameters
            return []
        known, stack = self._known, [model]  # at every step: a plain walk, several times faster than modules()
        while stack:
            module = stack.pop()
            if module._modules:
                stack += [child for child in module._modules.values() if child is not None]
            for q in module._parameters.values():
                if q is not None and q.requires_grad and id(q) not in known:
                    return [n for n, q in model.named_parameters() if q.requires_grad and id(q) not in known]
        return []

    def modes(self, model: nn.Module) -> tuple[tuple[int, bool], ...]:
        """Which modules the model has and which of them are in training mode."""
        found, stack = [], [model]
        while stack:
            module = stack.pop()
            if module._modules:
                stack += [child for child in module._modules.values() if child is not None]
            found.append((id(module), module.training))
        return tuple(found)

    def skipped_at_random(self, model: nn.Module) -> str | None:
        """A module that leaves out layers at random in its present mode, by the name that everybody gives the rate."""
        for name, module in model.named_modules():
            config = getattr(module, "config", None)
            rate = max(float(getattr(holder, "layerdrop", 0) or 0) for holder in (module, config))
            if module.training and rate > 0:
                return name or type(module).__name__
        return None

    @contextmanager
    def watched(self, recorder: Recorder) -> Iterator[None]:
        """While this lasts the model sees handles instead of its trainable parameters."""
        handles = {name: recorder.handle(name) for name in self.parameters}
        kept = [(name, p, p.grad) for name, p in self.parameters.items()]
        rewritten = [
            (m, forward) for m, forward in self._rewritten if "forward" not in m.__dict__
        ]  # else the user's own
        norms = []
        if not recorder.plan.learning:
            norms = [each for each in self._norms if "forward" not in each[0].__dict__]
        stray = None
        try:
            drop(self._caches)
            for _, p, _ in kept:
                p.grad = None
            for places, key, name in self._places:
                places[key] = handles[name]
            for module, forward in rewritten:
                module.__dict__["forward"] = partial(forward, module)
            for norm, weight, bias in norms:
                gain, shift = (None if name is None else handles[name].target for name in (weight, bias))
                use = (recorder, gain, shift)
                names = tuple(name for name in (weight, bias) if name is not None)
                norm.__dict__["forward"] = partial(norm_layers.forward, norm, use, names)
            yield
            stray = next((name for name, p, _ in kept if p.grad is not None), None)
        finally:
            for places, key, name in self._places:
                places[key] = self.parameters[name]
            for module, _ in rewritten:
                module.__dict__.pop("forward", None)
            for norm, _, _ in norms:
                norm.__dict__.pop("forward", None)
            for _, p, grad in kept:
                p.grad = grad
            recorder.closed = True
            drop(self._caches)
            self._drop_handles(recorder.plan.learning)
        if stray is not None:  # the parameter itself was used, past its handle
            raise UnsupportedPattern(stray)

    def _drop_handles(self, learning: bool) -> None:
        """Modules that keep a value computed from parameters (the old weight_norm) get a plain one."""
        if learning:
            found = [(m, key) for m in self._modules for key, v in m.__dict__.items() if isinstance(v, TracedParameter)]
            self._keeping += [place for place in found if place not in self._keeping]
        for module, key in self._keeping:
            module.__dict__[key] = plain(module.__dict__.get(key))


def _written_out(module: nn.Module) -> Any:
    """Our own forward for modules that hide their parameters from torch functions, or mix up whose tokens are whose."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    forward = type(module).forward
    if forward is nn.MultiheadAttention.forward:
        return attention.forward
    if timesformer.supported(module):
        return timesformer.forward
    if experts.supported(module):
        return experts.forward
    if forward in _CELLS:
        return recurrent.cell
    return recurrent.forward if forward in _RECURRENT else None


def refuse_live_statistics(normalisers: list[tuple[str, nn.Module]]) -> None:
    """Refuse layers that compute statistics over the batch, or update running ones: they mix rows.

    Args:
        normalisers: Names and layers.

    Raises:
        ValueError: There is one; the message names it and the way out.
    """
    for name, module in normalisers:
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"The layer {name or 'model'!r} ({type(module).__name__}) is live: it normalises each row by the other "
                f"rows of the batch, so no row's gradient is its own. Call .eval() on it to freeze its statistics, or "
                f"replace it by GroupNorm or LayerNorm."
            )
        if isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None:
            raise ValueError(
                f"The layer {name or 'model'!r} ({type(module).__name__}) keeps running statistics of the rows that it "
                f"sees, without noise. Call .eval() on it, or build it with track_running_stats=False."
            )
