"""Private training inside other people's loops: transformers' `Trainer`, Lightning, Accelerate.

Each takes the steps of `tacit.make_private`, and with it those of `finetune.fit`: the same key gives the same weights.
A name is loaded, with the library that it belongs to, when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tacit.integrations._privacy_arguments import PrivacyArguments

if TYPE_CHECKING:
    from tacit.integrations._accelerate import prepare_private
    from tacit.integrations._lightning import PrivateTraining
    from tacit.integrations._trainer import PrivateTrainer

__all__ = ["PrivacyArguments", "PrivateTrainer", "PrivateTraining", "prepare_private"]

_LOADED = {  # name -> module, library, extra
    "PrivateTrainer": ("_trainer", "transformers", "trainer"),
    "PrivateTraining": ("_lightning", "lightning", "lightning"),
    "prepare_private": ("_accelerate", "accelerate", "accelerate"),
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED:
        raise AttributeError(f"module 'tacit.integrations' has no attribute {name!r}")
    module, library, extra = _LOADED[name]
    try:
        return getattr(import_module(f"tacit.integrations.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != library:
            raise
        raise ImportError(f"tacit.integrations.{name} needs {library}: pip install 'tacit[{extra}]'.") from None


def __dir__() -> list[str]:
    return sorted(__all__)
