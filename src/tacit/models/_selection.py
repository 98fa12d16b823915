"""Which parameters a scheme trains: chosen by the type of the layer, never by a part of its name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tacit.models._adapters import adapters_of, insert_adapters
from tacit.models._blocks import blocks_of
from tacit.models._heads import head_of, is_tied
from tacit.models._lora import insert_lora, lora_of, lora_parts
from tacit.recipes import nearest

_NORMALISERS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


def normalisers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The normalisation layers, by name: torch's own and those of libraries that write their own class.

    Args:
        model: The model.

    Returns:
        Pairs of name and layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, _NORMALISERS) or _looks_like_one(module):
            yield name, module


def _looks_like_one(module: nn.Module) -> bool:
    """A layer without children that has one scale per feature and an epsilon (LlamaRMSNorm, T5LayerNorm, ...)."""
    weight = getattr(module, "weight", None)
    has_epsilon = hasattr(module, "eps") or hasattr(module, "variance_epsilon")
    return has_epsilon and weight is not None and weight.dim() == 1 and not any(True for _ in module.children())


def _within(model: nn.Module, *modules: nn.Module) -> Iterator[str]:
    """The names of all parameters of these parts of the model."""
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    return (name for name, parameter in model.named_parameters() if id(parameter) in inside)


def _full(model: nn.Module) -> Iterator[str]:
    """Everything."""
    return (name for name, _ in model.named_parameters())


def _norms(model: nn.Module) -> Iterator[str]:
    """The scales and shifts of the normalisers."""
    for name, module in normalisers(model):
        yield from (f"{name}.{own}".lstrip(".") for own, _ in module.named_parameters(recurse=False))


def _linear(model: nn.Module) -> Iterator[str]:
    """The head."""
    return _within(model, head_of(model)[1])


def _selective(model: nn.Module) -> Iterator[str]:
    """The normalisers and the head."""
    yield from _norms(model)
    yield from _linear(model)


def _bias(model: nn.Module) -> Iterator[str]:
    """Every bias, and the head whole: BitFit (Ben Zaken et al., 2022) trains the new task's classifier as well."""
    biases = {id(p) for module in model.modules() for p in _biases(module)}
    yield from (name for name, parameter in model.named_parameters() if id(parameter) in biases)
    yield from _linear(model)


def _biases(module: nn.Module) -> Iterator[nn.Parameter]:
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.RNNBase):
        yield from (parameter for name, parameter in own.items() if name.startswith("bias"))
    wanted = "in_proj_bias" if isinstance(module, nn.MultiheadAttention) else "bias"
    if wanted in own:
        yield own[wanted]


def _adapter(model: nn.Module) -> Iterator[str]:
    """The adapters, which are inserted if there are none yet, and the head."""
    head = head_of(model)[1]  # first: a model without one is refused before anything is inserted
    if not adapters_of(model):
        insert_adapters(model)
    return _within(model, *(adapter for _, adapter in adapters_of(model)), head)


def _lora(model: nn.Module) -> Iterator[str]:
    """The low-rank factors, which are inserted if there are none yet, and the head; not one tied to embeddings."""
    head = head_of(model)[1]
    if not lora_of(model):
        insert_lora(model)
    return _within(model, *lora_parts(model), *(() if is_tied(model, head) else (head,)))


def _last_block(model: nn.Module) -> Iterator[str]:
    """The last block and the head; a normaliser between them stays frozen."""
    return _within(model, blocks_of(model)[-1][1], head_of(model)[1])


def _first_last_block(model: nn.Module) -> Iterator[str]:
    """The first block, the last block and the head; what comes before and between them stays frozen."""
    blocks = blocks_of(model)
    return _within(model, blocks[0][1], blocks[-1][1], head_of(model)[1])


SCHEMES = {
    "full": _full,
    "linear": _linear,
    "norms": _norms,
    "selective": _selective,
    "bias": _bias,
    "adapter": _adapter,
    "lora": _lora,
    "last_block": _last_block,
    "first_last_block": _first_last_block,
}


def check_scheme(scheme: str) -> None:
    """Refuse a scheme that is none, with the nearest one.

    Args:
        scheme: As in `select`.

    Raises:
        ValueError: An unknown scheme.
    """
    if scheme not in SCHEMES:
        near = (
            "; did you mean 'linear', the head alone?" if scheme == "head" else nearest(str(scheme), SCHEMES, "schemes")
        )
        raise ValueError(f"Unknown scheme {scheme!r}{near}")


def select(model: nn.Module, scheme: str) -> list[str]:
    """Make exactly the scheme's parameters trainable; returns their names.

    `full`: everything. `linear`: the head. `norms`: scales and shifts of the normalisers. `selective`: norms and head.
    `bias`: every bias, and the head whole (BitFit). `adapter`: a small MLP after every block, inserted here unless the
    model has them, and the head. `lora`: low-rank changes beside linear layers of the blocks, inserted here unless the
    model has them (see `insert_lora`), and the head, unless it is tied to the embeddings. `last_block`,
    `first_last_block`: these blocks and the head, without any normaliser outside of them.

    Args:
        model: The model.
        scheme: One of the above.

    Returns:
        The names of the trainable parameters.

    Raises:
        ValueError: An unknown scheme, or the model has no such parameters.

    Examples:
        >>> from tacit import models
        >>> net = models.embedded()
        >>> len(models.select(net, "linear")), models.trainable(net)  # weight and bias of the head
        (2, 650)
    """
    check_scheme(scheme)
    chosen = set(SCHEMES[scheme](model))
    if not chosen:
        raise ValueError(f"The scheme {scheme!r} finds nothing to train in this model.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def trainable(model: nn.Module) -> int:
    """How many numbers would be trained.

    Args:
        model: The model.

    Returns:
        The number of trainable parameters.
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
