"""A small language: a tokenizer and tiny models of transformers, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["good", "bad", "film", "plot", "very", "not", "a", "the", "so", "dull"]


def tokenizer(*, marks: bool = True, pad: str | None = "[PAD]") -> Any:
    """Words to numbers, with [CLS] and [SEP] around a text as BERT has them."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if marks:
        ends = ("[SEP]", 3), ("[CLS]", 2)
        made.post_processor = processors.BertProcessing(*ends)
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if marks else ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, unk_token="[UNK]", model_input_names=inputs, padding_side="right"
    )


def bert(kind: str = "BertModel", **options: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=4 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        **options,
    )
    return getattr(transformers, kind)(config).eval()


def gpt2(kind: str = "GPT2LMHeadModel", **options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=4 + len(WORDS),
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **options,
    )
    return getattr(transformers, kind)(config).eval()


def saved(model: Any, folder: Path, *, marks: bool = True) -> Path:
    """A folder as people have them: a model and its tokenizer."""
    model.save_pretrained(folder)
    tokenizer(marks=marks).save_pretrained(folder)
    return folder


def sayings(count: int, seed: int = 0) -> tuple[list[str], list[int]]:
    """Texts of two to twelve words that say "good" or "bad" more often, and which."""
    generator = torch.Generator().manual_seed(seed)
    texts, labels = [], []
    for _ in range(count):
        label = int(torch.randint(2, (1,), generator=generator))
        length = int(torch.randint(1, 10, (1,), generator=generator))
        rest = [WORDS[int(i)] for i in torch.randint(2, len(WORDS), (length,), generator=generator)]
        texts.append(" ".join([*rest, *[WORDS[1 - label]] * (1 + length // 4)]))
        labels.append(label)
    return texts, labels
