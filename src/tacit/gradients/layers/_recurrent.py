"""LSTM, GRU and RNN, unrolled in time: the weights are then linear layers used once per step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def forward(module: nn.RNNBase, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
    """The same map as the module's own forward."""
    if isinstance(input, PackedSequence):
        raise TypeError(
            "A packed sequence hides which row a step belongs to: pad the sequences and mask the loss instead."
        )
    unbatched = input.dim() == 2
    if unbatched:
        x, hx = input[None], _each(hx, lambda h: h[:, None])
    else:
        x = input if module.batch_first else input.transpose(0, 1)
    directions = 2 if module.bidirectional else 1
    lasts: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        outputs = []
        for way in range(directions):
            state = _first_state(module, hx, layer * directions + way, x)
            suffix = f"_l{layer}" + ("_reverse" if way else "")
            out, last = _scan(module, x.flip(1) if way else x, state, suffix)
            outputs.append(out.flip(1) if way else out)
            lasts.append(last)
        x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
        if module.dropout and layer + 1 < module.num_layers:
            x = F.dropout(x, module.dropout, module.training)
    final: Any = tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))
    if not isinstance(module, nn.LSTM):
        final = final[0]
    if unbatched:
        return x[0], _each(final, lambda h: h[:, 0])
    return (x if module.batch_first else x.transpose(0, 1)), final


def cell(module: nn.RNNCellBase, input: Tensor, hx: Any = None) -> Any:
    """One step, for the cells that people unroll themselves."""
    unbatched = input.dim() == 1
    x = input[None] if unbatched else input
    if hx is None:
        zeros = x.new_zeros(x.shape[0], module.hidden_size)
        state: tuple[Tensor, ...] = (zeros, zeros) if isinstance(module, nn.LSTMCell) else (zeros,)
    else:
        state = tuple(h[None] if unbatched else h for h in (hx if isinstance(hx, tuple) else (hx,)))
    given = F.linear(x[:, None], module.weight_ih, module.bias_ih)[:, 0]
    back = F.linear(state[0][:, None], module.weight_hh, module.bias_hh)[:, 0]
    step = _lstm if isinstance(module, nn.LSTMCell) else _gru if isinstance(module, nn.GRUCell) else _plain
    state = step(module, given, back, state)
    found = tuple(h[0] for h in state) if unbatched else state
    return found if isinstance(module, nn.LSTMCell) else found[0]


def _scan(module: nn.RNNBase, x: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction."""

    def weight(name: str) -> Any:
        return getattr(module, name + suffix, None)

    step = {"LSTM": _lstm, "GRU": _gru}.get(module.mode, _plain)
    given = F.linear(x, weight("weight_ih"), weight("bias_ih") if module.bias else None)
    outputs = []
    for t in range(x.shape[1]):
        # One position per step, so that a row stays a row.
        back = F.linear(state[0][:, None], weight("weight_hh"), weight("bias_hh") if module.bias else None)[:, 0]
        state = step(module, given[:, t], back, state)
        if getattr(module, "proj_size", 0):
            state = (F.linear(state[0][:, None], weight("weight_hr"))[:, 0], *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def _lstm(module: nn.Module, given: Tensor, back: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # noqa: ARG001
    i, f, g, o = (given + back).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(module: nn.Module, given: Tensor, back: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # noqa: ARG001
    (r, z, n), (hr, hz, hn) = given.chunk(3, -1), back.chunk(3, -1)
    keep = torch.sigmoid(z + hz)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return ((1 - keep) * new + keep * state[0],)


def _plain(module: nn.Module, given: Tensor, back: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # noqa: ARG001
    total = given + back
    mode = getattr(module, "mode", "") or getattr(module, "nonlinearity", "")
    return (torch.relu(total) if mode in ("RNN_RELU", "relu") else torch.tanh(total),)


def _first_state(module: nn.RNNBase, hx: Any, index: int, x: Tensor) -> tuple[Tensor, ...]:
    if hx is not None:
        return tuple(h[index] for h in hx) if isinstance(hx, tuple) else (hx[index],)
    hidden = x.new_zeros(x.shape[0], getattr(module, "proj_size", 0) or module.hidden_size)
    cell = x.new_zeros(x.shape[0], module.hidden_size)
    return (hidden, cell) if isinstance(module, nn.LSTM) else (hidden,)


def _each(value: Any, change: Any) -> Any:
    if value is None:
        return None
    return tuple(change(v) for v in value) if isinstance(value, tuple) else change(value)
