"""The model of a recipe, with what its rows must look like. Built the same every time, so that a run can resume."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tacit.data import ImageShape
from tacit.models import embedded, load, load_net, text, tokenizer_of
from tacit.pipeline._schema import Model, Pipeline
from tacit.pipeline._schema_data import Images, Texts, count_of

_SEED = 0  # of weights that nothing pretrained: a resumed run must start from the same ones


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model, the tokenizer of one that reads texts, and the shape of images for one that sees."""

    model: nn.Module
    tokenizer: Any = None
    shape: ImageShape | None = None


def build(recipe: Pipeline) -> Built:
    """The recipe's model in evaluation mode.

    Raises:
        ValueError: There is no such model; the sentence says what was looked for.
    """
    settings = recipe.model
    if settings is None:
        raise ValueError("This recipe has no [model].")
    stages = [stage.data for stage in (recipe.adapt, recipe.calibrate) if stage is not None]
    data = next((one for one in (recipe.data, *stages) if one is not None), None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        made = _made(recipe, settings, texts=isinstance(data, Texts), classes=count_of(getattr(data, "classes", 2)))
    if settings.weights is not None:
        _fill(made.model, recipe.path(settings.weights))
    if isinstance(data, Images):
        made = replace(made, shape=_shape(data, made.shape))
    made.model.eval()
    return made


def _made(recipe: Pipeline, settings: Model, *, texts: bool, classes: int) -> Built:
    kind, _, rest = settings.name.partition(":")
    place = recipe.path(Path(settings.name))
    if settings.name == "embedded":
        return Built(model=embedded(), shape=ImageShape(channels=1, height=28, width=28))
    if kind == "timm":
        return _timm(settings, rest)
    if kind == "transformers":
        inside = recipe.path(Path(rest))
        name = str(inside) if inside.is_dir() else rest
        return _texts(name, settings, classes) if texts else _pictures(name)
    if kind == "package" or place.is_dir():
        return (
            _texts(settings.name if kind == "package" else str(place), settings, classes)
            if texts
            else _pictures(str(place))
        )
    if place.is_file():
        return Built(model=load_net(place))
    if kind == "small":
        model = load(settings.name).model
        return Built(model=model, shape=ImageShape(height=32, width=32))
    return Built(model=_own(recipe, settings.name, kind, rest))


def _timm(settings: Model, name: str) -> Built:
    loaded = load(f"timm:{name}").model  # refuses names that timm does not have
    if settings.pretrained and settings.weights is None:
        timm = importlib.import_module("timm")
        try:
            loaded = timm.create_model(name, pretrained=True)
        except Exception as error:  # whatever a hub or a network says
            reason = " ".join(str(error).split())[:150]
            raise ValueError(
                f"The published weights of {settings.name} cannot be loaded ({type(error).__name__}: {reason}). Give "
                "model.weights a local file, or say model.pretrained = false."
            ) from None
    config = importlib.import_module("timm.data").resolve_model_data_config(loaded)
    channels, height, width = config["input_size"]
    known = config["interpolation"] in ("nearest", "bilinear", "bicubic", "lanczos")
    shape = ImageShape(
        channels=channels,
        height=height,
        width=width,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        crop=float(config["crop_pct"]),
        resampling=config["interpolation"] if known else "bicubic",
    )
    return Built(model=loaded, shape=shape)


def _texts(name: str, settings: Model, classes: int) -> Built:
    if settings.pooling == "mean":
        model, tokenizer = text(name, classes=classes)
        return Built(model=model, tokenizer=tokenizer)
    tokenizer = tokenizer_of(name)  # refuses what is neither a folder nor in the cache
    transformers = importlib.import_module("transformers")
    logs = transformers.utils.logging
    level = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, local_files_only=True, num_labels=classes, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{name} cannot be loaded: {' '.join(str(error).split())[:200]}") from None
    finally:
        logs.set_verbosity(level)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return Built(model=model, tokenizer=tokenizer)


def _pictures(name: str) -> Built:
    try:
        transformers = importlib.import_module("transformers")
        model = transformers.AutoModelForImageClassification.from_pretrained(name, local_files_only=True)
        processor = transformers.AutoImageProcessor.from_pretrained(name, local_files_only=True)
    except ImportError:
        raise ValueError("transformers models need an extra: pip install 'tacit[text]'.") from None
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{name} cannot be loaded: {' '.join(str(error).split())[:200]}") from None
    shape = ImageShape.of(processor)
    return Built(model=model, shape=shape)


def _own(recipe: Pipeline, name: str, module: str, function: str) -> nn.Module:
    """What `module:function` returns; the recipe's folder and the current one are looked in."""
    if not function:
        raise ValueError(
            f"{name!r} is no model: write timm:NAME, transformers:NAME_OR_FOLDER, small:NAME, module:function, or the "
            "path of a folder or file."
        )
    places = [str(recipe.home.resolve()), ""]
    sys.path[:0] = places
    try:
        found = getattr(importlib.import_module(module), function)
        made = found if isinstance(found, nn.Module) else found()
    except Exception as error:  # whatever a user's own module does; no data was read yet
        raise ValueError(f"{name!r} cannot be loaded: {type(error).__name__}: {error}.") from None
    finally:
        del sys.path[: len(places)]
    model = made[0] if isinstance(made, tuple) else made
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name!r} returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def _fill(model: nn.Module, path: Path) -> None:
    """Weights from a file; those of a head of another size are left out."""
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
            state = found.get("state_dict", found)
    except FileNotFoundError:
        raise ValueError(f"There is no file of weights {path}.") from None
    except (SafetensorError, RuntimeError, ValueError, EOFError, OSError, AttributeError, KeyError):
        raise ValueError(f"{path} is no file of weights (.safetensors, or torch's with weights alone).") from None
    own = model.state_dict()
    fits = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    lost = [name for name in own if name not in fits]
    if len(lost) > max(2, len(own) // 10):
        raise ValueError(
            f"{path} has weights for another model: {len(lost)} of {len(own)} are missing, first {lost[0]}."
        )
    model.load_state_dict(fits, strict=False)


def _shape(data: Images, found: ImageShape | None) -> ImageShape:
    """What the model's configuration says, with what the recipe says over it."""
    if found is None and data.size is None:
        raise ValueError("This model does not say what size of images it takes: say data.size (and mean and std).")
    shape = found or ImageShape()
    if data.size is not None:
        height, width = (data.size, data.size) if isinstance(data.size, int) else data.size
        shape = replace(shape, height=height, width=width)
    if data.channels is not None and data.channels != shape.channels:
        shape = replace(shape, channels=data.channels, mean=shape.mean[:1], std=shape.std[:1])
    given = {"mean": data.mean, "std": data.std, "crop": data.crop}
    return replace(shape, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
