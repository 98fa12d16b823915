"""Private fine-tuning of a text model: tacit and opacus' PrivacyEngine, each against the same epoch without privacy.

    python benchmarks/text.py [--work NAME ...] [--rounds 24] [--quick] [--json FILE] [--markdown FILE]

What an epoch is, what is timed of it and how it is checked is told in loops.py. Every text has the same length, so that
no arm pads; tacit takes them from its own records of texts, the others from tensors. All get the same model, with the
same peft layers for LoRA.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import peft
import torch
import transformers
from torch import nn

from arms import Batch
from gradients import cross_entropy
from loops import BARS, PRELOAD, STANDARD, Epoch, suite
from tacit.data._texts import Texts
from tacit.models import TextClassifier, select

VOCABULARY = 30_522
TOKENS = 32
EXPECTED, STEPS = 32, 4


class Numbers:
    """A tokenizer for texts that are written as the numbers of their tokens."""

    pad_token_id = 0

    def __len__(self) -> int:
        return VOCABULARY

    def __call__(
        self, texts: Sequence[str], pairs: None = None, *, truncation: bool, max_length: int
    ) -> dict[str, list[list[int]]]:
        del pairs, truncation
        return {"input_ids": [[int(number) for number in text.split()[:max_length]] for text in texts]}


def classifier(scheme: str, width: int = 384, depth: int = 6, heads: int = 12) -> nn.Module:
    """BERT in the shape of MiniLM, without dropout, and a head on the masked mean of its tokens.

    Weights are random, and no trained one is left at zero: through a head or LoRA factors of zero no gradient comes
    back, and the check of the sums would see nothing.
    """
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = TextClassifier(transformers.BertModel(config, add_pooling_layer=False), classes=2)
    select(model, scheme)
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return model


def sentences(rows: int) -> Batch:
    """Numbers of tokens, a mask that hides none, labels."""
    ids = torch.randint(1, VOCABULARY, (rows, TOKENS))
    return ids, torch.ones_like(ids), torch.randint(2, (rows,))


def texts(batch: Batch, unit_size: int) -> Texts:
    """The same sentences as tacit's records."""
    ids, _, labels = batch
    owners = torch.arange(len(labels)) // unit_size if unit_size > 1 else None
    written = [" ".join(map(str, numbers)) for numbers in ids.tolist()]
    return Texts(Numbers(), written, labels, owners, max_length=TOKENS)


def works() -> dict[str, Epoch]:
    titles = {"lora": "LoRA of rank 8 on query and value, and the head", "selective": "norms and head"}
    return {
        scheme: Epoch(
            scheme,
            f"Epoch of {title}, BERT 384 x 6, {STEPS} steps of {EXPECTED} texts of {TOKENS} tokens",
            partial(classifier, scheme),
            sentences,
            cross_entropy,
            STEPS * EXPECTED,
            STANDARD,
            BARS,
            check_rows=EXPECTED,
            expected=EXPECTED,
            records=texts,
            row_size=TOKENS,
        )
        for scheme, title in titles.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    suite(
        works(),
        argv,
        description=__doc__.splitlines()[0],
        what="Tokens",
        preload=(*PRELOAD, "transformers.models.bert.modeling_bert", "peft"),
        versions={"transformers": transformers.__version__, "peft": peft.__version__},
    )


if __name__ == "__main__":
    sys.exit(main())
