"""`nn.MultiheadAttention` hides its projections inside one function: written out, the linear rule serves them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same map as the module's own forward, from linear layers and one attention."""
    unbatched, same = query.dim() == 2, query is key is value
    if unbatched:
        query, key, value = query[None], key[None], value[None]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not module.batch_first:
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    heads = module.num_heads
    projected = _project(module, same, query, key, value)
    q, k, v = (_split(t, heads) for t in projected)
    mask = _mask(attn_mask, key_padding_mask, q, k, is_causal)
    more = _more_keys(module, projected[1])
    if more:
        k, v = (torch.cat([t, *(_split(extra[i], heads) for extra in more)], 2) for i, t in enumerate((k, v)))
        mask = None if mask is None else F.pad(mask, (0, len(more)))
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout, module.training)
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    out = F.linear(mixed.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if unbatched:
        return out[0], None if weights is None else weights[0]
    return (out if module.batch_first else out.transpose(0, 1)), weights


def _project(module: nn.MultiheadAttention, same: bool, *inputs: Tensor) -> list[Tensor]:
    bias: Any = module.in_proj_bias
    if same and module._qkv_same_embed_dim:
        return list(F.linear(inputs[0], module.in_proj_weight, bias).chunk(3, -1))
    weights = (
        module.in_proj_weight.chunk(3)
        if module._qkv_same_embed_dim
        else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    )
    biases = bias.chunk(3) if bias is not None else (None, None, None)
    return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def _more_keys(module: nn.MultiheadAttention, key: Tensor) -> list[tuple[Tensor, Tensor]]:
    """One more key and value for each row: trained ones, and zeros."""
    rows, more = key.shape[0], []
    if module.bias_k is not None and module.bias_v is not None:
        more.append((module.bias_k.expand(rows, -1, -1), module.bias_v.expand(rows, -1, -1)))
    if module.add_zero_attn:
        zeros = key.new_zeros(rows, 1, key.shape[2])
        more.append((zeros, zeros))
    return more


def _split(t: Tensor, heads: int) -> Tensor:
    return t.reshape(*t.shape[:2], heads, -1).transpose(1, 2)


def _mask(attn: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    """One additive mask that broadcasts to (rows, heads, queries, keys)."""
    rows, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    total: Tensor | None = None
    if attn is None and causal:
        attn = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
    if attn is not None:
        total = _additive(attn, q)
        if total.dim() == 3:
            total = total.reshape(rows, heads, queries, keys)
    if padding is not None:
        extra = _additive(padding, q)[:, None, None, :]
        total = extra if total is None else total + extra
    return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -torch.inf)
    return mask.to(like.dtype)
