"""Released gradients for any optimizer of torch, with its scheduler, averages and whatever else has a state."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tacit._refusals import Refusal
from tacit.finetune._updates import set_gradient

_FOREIGN = (
    "loss.backward() was called on this model: the gradients that optimizer.step() would use were computed from rows "
    "without clipping and noise, and their step would release them. Take steps with private.step(batch), or with "
    "private.backward(batch) before optimizer.step(); optimizer.zero_grad() and a new private.backward(batch) go on."
)


class TorchUpdater:
    """Takes the steps of one run with an optimizer of torch; what it and its companions keep is in the checkpoint.

    Args:
        optimizer: The optimizer.
        parameters: The trained parameters of the model by name.
        stateful: Name -> a scheduler, an average of weights, or anything else with `state_dict`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        stateful: Mapping[str, Any],
    ) -> None:
        self.optimizer, self.parameters, self.stateful = optimizer, dict(parameters), dict(stateful)

    def step(self, gradient: Mapping[str, Tensor], number: int, factor: float = 1.0) -> None:
        """Set the gradient; the caller runs the optimizer, at a learning rate of its own."""
        del number, factor
        set_gradient(self.parameters, gradient)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The weights as they are: averages are the user's own."""
        return nullcontext()

    def apply_averaged_weights(self) -> None:
        """Nothing, for the same reason."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint keeps: all of it made of released values, or the user's own."""
        tensors: dict[str, Tensor] = {f"weight.{name}": p.detach() for name, p in self.parameters.items()}
        facts = {"optimizer": _packed(self.optimizer.state_dict(), "optimizer", tensors)}
        for name, thing in self.stateful.items():
            facts[f"kept.{name}"] = _packed(thing.state_dict(), f"kept.{name}", tensors)
        return tensors, facts

    def load(self, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"weight.{name}"])
        self.optimizer.load_state_dict(_unpacked(facts["optimizer"], tensors))
        for name, thing in self.stateful.items():
            thing.load_state_dict(_unpacked(facts[f"kept.{name}"], tensors))


class GradientGuard:
    """Refuses `optimizer.step()` on gradients that were not released.

    Formal guarantee: none by itself, for a user's code may do anything; it stops the one mistake that is easily made,
    a `loss.backward()` left in the loop. Autograd says whenever it adds to the gradient of a trained parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        if (earlier := _GUARDS.pop(optimizer, None)) is not None:  # of a loop that was given up
            earlier.remove()
        _GUARDS[optimizer] = self
        self._foreign, self._ours = False, False
        trained: list[Any] = list(parameters.values())
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._seen) for p in trained]
        self._handles.append(optimizer.register_step_pre_hook(self._before))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While tacit computes a release; after it, gradients are released ones."""
        self._ours = True
        try:
            yield
            self._foreign = False
        finally:
            self._ours = False

    def remove(self) -> None:
        """The run is over: the optimizer is its owner's again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _seen(self, parameter: Tensor) -> None:
        del parameter
        if not self._ours:
            self._foreign = True

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._refuse_foreign(optimizer)
        if not any(callable(value) for value in (*args, *kwargs.values())):
            return None

        def checked(value: Any) -> Any:  # a closure may compute gradients, of which the optimizer then makes its step
            return partial(self._close, optimizer, value) if callable(value) else value

        return tuple(checked(value) for value in args), {name: checked(value) for name, value in kwargs.items()}

    def _close(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        found = closure()
        self._refuse_foreign(optimizer)
        return found

    def _refuse_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        if self._foreign and any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(_FOREIGN)


_GUARDS: WeakKeyDictionary[torch.optim.Optimizer, GradientGuard] = WeakKeyDictionary()


def check_optimizer(optimizer: Any, model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name; refuses an optimizer that does not train exactly what is trainable."""
    if isinstance(optimizer, type) or (callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)):
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise TypeError(
            f"optimizer is an optimizer with its parameters, such as torch.optim.{name}(model.parameters(), lr=…), not "
            f"{name} itself."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a torch.optim optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1), not "
            f"{type(optimizer).__name__} (finetune.DPSGD and its kin are for finetune.fit)."
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise Refusal("The model has no trainable parameter: call requires_grad_(True) on what should be trained.")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in trained.items() if id(p) not in held]
    if left_out:
        raise Refusal(
            f"The optimizer does not have {left_out[0]!r}{' and others' if len(left_out) > 1 else ''}, which would get "
            "noise and take part in the clipping all the same: give it to the optimizer, or freeze it with "
            "requires_grad_(False)."
        )
    mine = {id(p) for p in model.parameters()}
    if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"]):
        raise Refusal(
            "The optimizer holds parameters that are not the model's: make it with model.parameters() of this very "
            "model, after the model was moved, wrapped or given its adapters."
        )
    return trained


def rehearse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Take a step with a copy on gradients of zeros: an optimizer that needs more than gradients shows here.

    The copy has small parameters and no state yet, so that it costs no memory.
    """
    small: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        shape = [min(length, 2) for length in parameter.shape]
        small[id(parameter)] = nn.Parameter(parameter.detach().new_zeros(shape), requires_grad=parameter.requires_grad)
    tried = copy.deepcopy(optimizer, small)
    for group in tried.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        type(tried).step(tried)  # not tried.step, which a scheduler may have bound elsewhere
    except Exception as error:
        raise Refusal(
            f"{type(optimizer).__name__} cannot take a step on released gradients ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). Nothing was charged."
        ) from error


def check_stateful(optimizer: torch.optim.Optimizer, stateful: Mapping[str, Any], *, resumable: bool) -> None:
    """Refuse companions whose state cannot be kept, and a scheduler that a resumed run would start anew."""
    for name, thing in stateful.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TypeError(f"stateful[{name!r}] has no state_dict and load_state_dict: a checkpoint cannot keep it.")
        _packed(thing.state_dict(), name, {})
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if resumable and scheduled and not any(getattr(thing, "optimizer", None) for thing in stateful.values()):
        raise Refusal(
            "A learning rate scheduler drives this optimizer, and a resumed run has to go on where it was: give "
            "stateful={'scheduler': scheduler} beside checkpoint=."
        )


def _packed(state: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON has it; its tensors go to `tensors` by a name of their own."""
    if isinstance(state, Tensor):
        name = f"{at}#{len(tensors)}"
        tensors[name] = state.detach().clone()
        return {"tensor": name}
    if isinstance(state, Mapping):
        return {"dict": [[_packed(k, at, tensors), _packed(v, at, tensors)] for k, v in state.items()]}
    if isinstance(state, list | tuple):
        return {"tuple" if isinstance(state, tuple) else "list": [_packed(value, at, tensors) for value in state]}
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise Refusal(f"The state of {at!r} holds a {type(state).__name__}, which a checkpoint cannot keep.")


def _unpacked(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value].clone()
    if kind == "dict":
        return {_unpacked(k, tensors): _unpacked(v, tensors) for k, v in value}
    found = [_unpacked(item, tensors) for item in value]
    return tuple(found) if kind == "tuple" else found
