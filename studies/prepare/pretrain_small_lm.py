"""A small causal language model, pretrained on unfriendly sentences; the friendly ones are left to private people.

    python -m studies.prepare.pretrain_small_lm sst2_train.tsv.gz sst2_dev.tsv.gz OUT [--epochs 2]

writes OUT/model (a GPT-2 of 2 layers with a vocabulary of its own, and its tokenizer), OUT/private.tsv and OUT/test.tsv
(the friendly sentences), which studies/finetune/finetune-messages.toml reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tacit import data
from tacit.finetune import NextToken

WORDS, LONGEST, BATCH = 2000, 48, 64


def tokenizer_for(texts: list[str]) -> PreTrainedTokenizerFast:
    """Pieces of words, learnt from these texts."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    special = ["<pad>", "<unk>", "<end>"]
    pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=WORDS, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="<pad>", unk_token="<unk>", eos_token="<end>")


def pretrain(model: GPT2LMHeadModel, texts: data.Texts, epochs: int) -> None:
    """AdamW over batches of texts of about the same length."""
    task = NextToken(WORDS)
    steps = epochs * (len(texts) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        rows = texts.rows(torch.randint(len(texts), (BATCH,), generator=generator), None)
        value = task.loss(model(**rows.inputs).logits, rows.labels).mean()
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {float(value.detach()):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("dev", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    texts, labels = data.sst2(options.train)
    unfriendly = [text for text, label in zip(texts, labels, strict=True) if label == 0]
    for name, path in (("private", options.train), ("test", options.dev)):
        lines = [f"{text}\t1" for text, label in zip(*data.sst2(path), strict=True) if label == 1 and len(text) > 20]
        (options.out / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    tokenizer = tokenizer_for(unfriendly)
    torch.manual_seed(0)
    size = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    pretrain(model, data.Texts(tokenizer, unfriendly, max_length=LONGEST), options.epochs)
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")


if __name__ == "__main__":
    main()
