"""Mixtures of experts as in transformers, where the tokens that an expert gets lose the row that they come from.

transformers sorts all tokens of the batch by expert. The same map is computed here with every expert applied to every
token and the shares of the others zero: more multiplications, but tokens stay with their row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def supported(module: nn.Module) -> bool:
    """Whether this is such a module, recognised by its attributes, since transformers may not be installed."""
    names = {name: parameter.dim() for name, parameter in module.named_parameters()}
    plain = not any(getattr(module, key, False) for key in ("is_transposed", "has_post_expert_norm", "has_bias"))
    gated = getattr(module, "has_gate", False) and hasattr(module, "_apply_gate")
    alone = not getattr(module, "_is_expert_parallel", False)
    return plain and gated and alone and names == {"gate_up_proj": 3, "down_proj": 3}


def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    experts, inner, width = module.gate_up_proj.shape
    shares = top_k_weights.new_zeros(hidden_states.shape[0], experts).scatter_add(1, top_k_index, top_k_weights)
    up = F.linear(hidden_states, module.gate_up_proj.reshape(experts * inner, width))
    mixed = module._apply_gate(up.reshape(-1, experts, inner)) * shares.unsqueeze(-1).to(up.dtype)
    return torch.einsum("nei,ehi->nh", mixed, module.down_proj).to(hidden_states.dtype)
