"""The embedded source model: a small ConvNeXt-like net that knows clothes (studies/dp_tta/source-model.toml)."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from tacit.models._convnet import ConvNet

MEAN, STD = 0.2860, 0.3530  # of Fashion-MNIST's pixels


def architecture() -> ConvNet:
    """The embedded model's shape, untrained: 103,530 parameters, 11 LayerNorms."""
    return ConvNet(channels=1, classes=10, widths=(32, 64), depths=(4, 4), mean=(MEAN,), std=(STD,))


def embedded() -> ConvNet:
    """The trained source model, in evaluation mode. It takes images in [0, 1] and normalises them inside."""
    with as_file(files("tacit.models").joinpath("files/source.safetensors")) as path:
        return load_convnet(architecture(), path)


def load_convnet(model: ConvNet, path: Path) -> ConvNet:
    """Fill a net from a file of weights, its normalisation included."""
    try:
        model.load_state_dict(load_file(path))
    except FileNotFoundError:
        raise ValueError(f"There is no file of weights {path}.") from None
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} does not fit this net: {str(error).splitlines()[0]}") from None
    return model.eval()
