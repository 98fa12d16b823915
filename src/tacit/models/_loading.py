"""Models by name: `timm:NAME`, `transformers:TYPE_OR_FOLDER`, `small:NAME`, or `module:function` of one's own."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tacit.models._convnet import ConvNet
from tacit.models._resnet import ResNet
from tacit.models._video import VideoNet
from tacit.models._vit import ViT

PerSampleLoss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with synthetic rows of the kind that it takes, and a loss per row.

    Args:
        name: What was loaded.
        model: The model.
        batch: Synthetic rows.
        loss: `loss(model, batch)`: one number per row.
    """

    name: str
    model: nn.Module
    batch: Any
    loss: PerSampleLoss


def load(name: str, *, shape: tuple[int, ...] | None = None) -> Loaded:
    """Build a model by name, without downloading anything.

    Args:
        name: `timm:vit_tiny_patch16_224` builds it untrained; `transformers:bert` from the type's default
            configuration, or from a local folder with its weights; `small:vit`, `small:resnet`, `small:convnet` and
            `small:video` one of tacit's own nets for ten classes; `package.module:function` calls the function, which
            returns a model, or a model and a batch (or is a model itself).
        shape: That of one input row, where it cannot be read from the model.

    Returns:
        The model with synthetic rows and a loss per row.

    Raises:
        ValueError: An unknown name.

    Examples:
        >>> from tacit import models
        >>> models.load("small:vit").model(models.load("small:vit").batch[0]).shape[1]
        10
    """
    kind, _, rest = name.partition(":")
    if not rest:
        raise ValueError(
            f"{name!r} is no model: write timm:NAME, transformers:TYPE_OR_FOLDER, small:NAME or module:function."
        )
    if kind == "timm":
        return _timm(name, rest, shape)
    if kind == "transformers":
        return _transformers(name, rest)
    if kind == "small":
        return _small(name, rest, shape)
    return _own(name, kind, rest, shape)


def freeze_statistics(model: nn.Module) -> nn.Module:
    """Put layers with running statistics into evaluation mode: they then act on each row alone.

    Args:
        model: The model.

    Returns:
        The model.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            module.eval()
    return model


def _timm(name: str, rest: str, shape: tuple[int, ...] | None) -> Loaded:
    timm = library("timm", "vision")
    if not timm.is_model(rest.split(".")[0]):
        near = timm.list_models(f"*{rest.split('_')[0]}*")[:3]
        raise ValueError(f"timm has no model {rest!r}" + (f"; near it: {', '.join(near)}." if near else "."))
    model = timm.create_model(rest, pretrained=False)
    size = shape or tuple(model.pretrained_cfg["input_size"])
    return Loaded(name=name, model=model, batch=torch.rand(2, *size), loss=least_surprise)


def _transformers(name: str, rest: str) -> Loaded:
    transformers = library("transformers", "text")
    if Path(rest).is_dir():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(rest, local_files_only=True)
    else:
        try:
            config = transformers.AutoConfig.for_model(rest)
        except ValueError:
            raise ValueError(f"{rest!r} is neither a folder nor a model type of transformers.") from None
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.train()
    tokens = torch.randint(2, model.config.get_text_config().vocab_size - 1, (2, 16))
    return Loaded(name=name, model=model, batch=tokens, loss=least_surprise)


_SMALL: dict[str, tuple[tuple[int, ...], Callable[..., nn.Module]]] = {  # the shape of a row, and a net for such rows
    "vit": ((3, 32, 32), lambda channels, size, _: ViT(channels=channels, classes=10, size=size)),
    "resnet": ((3, 32, 32), lambda channels, *_: ResNet(channels=channels, classes=10)),
    "convnet": ((3, 32, 32), lambda channels, *_: ConvNet(channels=channels, classes=10)),
    "video": (
        (8, 3, 32, 32),
        lambda frames, channels, size, _: VideoNet(frames=frames, channels=channels, classes=10, size=size),
    ),
}


def _small(name: str, rest: str, shape: tuple[int, ...] | None) -> Loaded:
    if rest not in _SMALL:
        raise ValueError(f"There is no small net {rest!r}: choose one of {', '.join(_SMALL)}.")
    usual, build = _SMALL[rest]
    row = shape or usual
    if len(row) != len(usual) or row[-1] != row[-2]:
        raise ValueError(f"{name} takes rows such as {'x'.join(map(str, usual))}, not {'x'.join(map(str, row))}.")
    return Loaded(name=name, model=build(*row), batch=torch.rand(2, *row), loss=least_surprise)


def _own(name: str, module: str, function: str, shape: tuple[int, ...] | None) -> Loaded:
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
        made = found if isinstance(found, nn.Module) else found()
    except Exception as error:  # whatever a user's own module does
        raise ValueError(f"{name!r} cannot be loaded: {type(error).__name__}: {error}.") from None
    finally:
        sys.path.remove("")
    model, batch = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name!r} returned a {type(model).__name__}, not a torch.nn.Module (or one with a batch).")
    if batch is None and shape is None:
        raise ValueError(f"Say what {name!r} takes with --input 3x224x224, or return (model, batch).")
    rows = torch.rand(2, *shape) if shape is not None else batch
    return Loaded(name=name, model=model, batch=rows, loss=least_surprise)


def library(name: str, extra: str) -> Any:
    try:
        with warnings.catch_warnings():  # torchvision warns of what is not used here
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:  # such as a torchvision for another torch: "operator torchvision::nms does not exist"
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ValueError(f"{name} models need an extra: pip install 'tacit[{extra}]'.") from None
        reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"{name} is there and cannot be imported ({type(error).__name__}: {reason}). docs/install.md says what to "
            f"do where no torchvision fits torch {torch.__version__}."
        ) from None


def least_surprise(model: nn.Module, batch: Any) -> Tensor:
    """The cross entropy of each row against the model's own prediction: a loss that needs no labels."""
    out = model(batch)
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise ValueError("A check needs a model that returns one vector of logits per row.")
    return nn.functional.cross_entropy(logits, logits.detach().argmax(1), reduction="none")
