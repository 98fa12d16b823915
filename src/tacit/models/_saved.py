"""The small nets as files: weights, and how the net was made, in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tacit.models._convnet import ConvNet
from tacit.models._resnet import ResNet
from tacit.models._video import VideoNet
from tacit.models._vit import ViT

NETS: dict[str, type[nn.Module]] = {"convnet": ConvNet, "resnet": ResNet, "video": VideoNet, "vit": ViT}


def save_net(model: nn.Module, path: str | Path, **arguments: Any) -> None:
    """Write a small net; `arguments` are those that it was made with.

    Args:
        model: The model.
        path: The file.
        **arguments: Those that the net was made with.
    """
    kind = next((name for name, cls in NETS.items() if type(model) is cls), None)
    if kind is None:
        raise ValueError(f"A {type(model).__name__} is none of the small nets ({', '.join(NETS)}).")
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, path, metadata={"net": kind, "arguments": json.dumps(arguments)})


def load_net(path: str | Path) -> nn.Module:
    """The net that `save_net` wrote, in evaluation mode.

    Args:
        path: The file.

    Returns:
        The net.
    """
    try:
        with safe_open(path, "pt") as file:
            words = file.metadata() or {}
        model = NETS[words["net"]](**json.loads(words["arguments"]))
        model.load_state_dict(load_file(path))
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"There is no file of weights {path}.") from None
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} holds no small net: {str(error).splitlines()[0]}.") from None
    return model.eval()
