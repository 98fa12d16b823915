"""Files of tensors with a few facts: whole or not at all, and never taken for another's.

A checkpoint holds released values only and may be shared. Keys go to private files (0600), never in here.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tacit._files import write_atomically
from tacit.gradients import kernels_version, rounds_alike
from tacit.privacy import Ledger

write = write_atomically  # all of it or nothing


def pack(kind: str, version: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> bytes:
    """Tensors and facts in one file's worth of bytes, with a digest over both."""
    written = json.dumps({f"tacit {kind}": version} | facts)
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return save(plain, metadata={"tacit": written, "digest": digest(plain, written)})


def unpack(kind: str, version: int, path: Path, raw: bytes | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `pack` packed; a clear error for anything else. `raw`: what was read of the file already."""
    raw = path.read_bytes() if raw is None else raw
    try:
        tensors = load(raw)
        words = metadata(raw)
        facts = json.loads(words["tacit"])
        found = facts.pop(f"tacit {kind}")
    except (SafetensorError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no checkpoint of {_article(kind)} {kind}, or it is damaged.") from None
    if found != version:
        raise ValueError(f"{path} was written by another version of tacit (format {found}).")
    if words.get("digest") != digest(tensors, words["tacit"]):
        raise ValueError(f"{path} is damaged: it is not what was written.")
    return tensors, facts


def facts_of(path: Path) -> dict[str, Any] | None:
    """The facts of a checkpoint of any kind, without its tensors; None for any other file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < 1 << 27:
                return None
            facts: dict[str, Any] = json.loads(json.loads(file.read(length))["__metadata__"]["tacit"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts


def digest(tensors: dict[str, Tensor], written: str = "") -> str:
    """A name for these values and words, the same on every machine."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return hashlib.sha256(save({"": torch.zeros(0, dtype=torch.float32)} | plain) + written.encode()).hexdigest()


def precision() -> dict[str, str]:
    """What decides how numbers are rounded, beside their types: torch's version and switches, and compiled kernels."""
    kinds = ("cpu", "cuda")
    return {
        "torch": str(torch.__version__),
        "default dtype": str(torch.get_default_dtype()),
        "autocast": str({kind: torch.is_autocast_enabled(kind) for kind in kinds}),
        "autocast dtype": str({kind: torch.get_autocast_dtype(kind) for kind in kinds}),
        "float32 products": torch.get_float32_matmul_precision(),
        "tf32 convolutions": str(torch.backends.cudnn.allow_tf32),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "compiled kernels": kernels_version(),
        "rows in other places": f"{os.environ.get('MKL_CBWR', '')}: {'alike' if rounds_alike() else 'otherwise'}",
    }


def metadata(raw: bytes) -> dict[str, str]:
    """The words in a file of tensors."""
    length = int.from_bytes(raw[:8], "little")
    return dict(json.loads(raw[8 : 8 + length])["__metadata__"])


def private_folder(ledger: Ledger, private: str | Path | None) -> Path:
    """Where keys go: the given folder, or the one of the ledger's file."""
    if not ledger.durable:
        raise ValueError("This run's ledger is in memory (not durable), so it cannot be resumed: give ledger= a file.")
    if private is not None:
        return Path(private)
    name = ledger.url.removeprefix("sqlite:///")
    if "://" in name:
        raise ValueError("Say where keys are kept with private=, a folder that only you can read.")
    return Path(name).resolve().parent


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """A torch optimizer's state as tensors by name, and what in it is no tensor."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, float]] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{index}.{key}"] = value
            elif value is not None:
                scalars.setdefault(str(index), {})[key] = value
    return tensors, scalars


def load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: dict[str, dict[str, float]]
) -> None:
    """Put back what `optimizer_state` took."""
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in scalars.items()}
    for key, value in tensors.items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".", 2)
            state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
