"""transformers' `Trainer` with private training: the weights of `fit`, and no training loss anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from reference import BATCH, CLIP, COUNT, PROMISE, RATE, STEPS, fitted, weights
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tacit.finetune import NextToken
from tacit.integrations import PrivacyArguments, PrivateTrainer
from tacit.integrations._trainer import fixed_length, loss_of
from tacit.privacy import BudgetExceeded, Ledger

LENGTH, WORDS = 7, 40


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def texts() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (COUNT, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[::3, 5:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}, torch.randint(0, 3, (COUNT,), generator=generator)


class Items(Dataset[Any]):
    def __init__(self, count: int = COUNT) -> None:
        self.inputs, self.labels = texts()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: value[i] for name, value in self.inputs.items()} | {"labels": int(self.labels[i])}


def privacy(**more: Any) -> PrivacyArguments:
    return PrivacyArguments(**(PROMISE | {"clip": CLIP, "ledger": Ledger("sqlite://")} | more))


def trainer(
    folder: Path, model: nn.Module | None = None, *, dataset: Any = None, told: Any = None, **more: Any
) -> PrivateTrainer:
    model = model or bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return PrivateTrainer(
        model,
        TrainingArguments(**(settings | more.pop("settings", {}))),
        train_dataset=dataset or Items(),
        optimizers=more.pop("optimizers", (optimizer, scheduler)),
        privacy=told or privacy(),
        **more,
    )


def test_the_weights_are_those_of_fit(tmp_path: Path) -> None:
    """Also after the Trainer's own clipping of gradients, which is left out."""
    private = trainer(tmp_path)
    private.train()
    assert private.private.done == STEPS
    assert torch.equal(weights(private.model), weights(fitted(bert(), texts())))


def test_units_steps_and_accumulation(tmp_path: Path) -> None:
    ids = [f"user {i % 9}" for i in range(COUNT)]
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    private = trainer(tmp_path, settings=settings, unit_ids=ids, told=privacy(size=9, unit="user"))
    private.train()
    same = fitted(bert(), texts(), batch_size=4, unit_ids=ids, unit="user", size=9)
    assert private.private.done == STEPS
    assert torch.allclose(weights(private.model), weights(same), atol=1e-6)
    assert str(private.private.guarantee.unit) == "user"


def test_nothing_unnoised_is_logged(tmp_path: Path) -> None:
    """Not to callbacks, not in the state that is saved, not in what `train` returns; the true number is not either."""
    seen: list[dict[str, Any]] = []

    class Notes(TrainerCallback):
        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            seen.append(dict(logs))

    settings = {"save_strategy": "epoch", "include_num_input_tokens_seen": "all"}
    private = trainer(tmp_path, settings=settings, callbacks=[Notes()], told=privacy(size=20))
    found = private.train()
    assert found.training_loss != found.training_loss  # not a number
    state = json.loads((tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    logged = {name for entry in (*seen, *state["log_history"], found.metrics) for name in entry}
    assert logged.isdisjoint({"loss", "train_loss", "num_input_tokens_seen", "total_flos"})
    assert {"learning_rate", "epsilon", "grad_norm"} <= logged
    assert {entry["epsilon"] for entry in seen} == {private.private.guarantee.epsilon}
    assert private.num_examples(private.get_train_dataloader()) == 20
    assert state["num_input_tokens_seen"] == 0
    assert state["total_flos"] == 0


def test_evaluation_data_are_public_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="public_evaluation"):
        trainer(tmp_path, eval_dataset=Items(8))
    private = trainer(tmp_path, eval_dataset=Items(8), told=privacy(public_evaluation=True))
    private.train()
    assert "eval_loss" in private.evaluate()
    quiet = trainer(tmp_path)
    with pytest.raises(ValueError, match="public_evaluation"):  # its loss would be in the log, without noise
        quiet.evaluate(Items(8))
    assert not any("eval_loss" in entry for entry in quiet.state.log_history)


def test_predictions_come_without_scores(tmp_path: Path) -> None:
    """Trackers log what callbacks are handed: the loss of private rows, what is computed of them, their number."""
    seen: list[dict[str, Any]] = []

    class Tracker(TrainerCallback):
        def on_predict(self, *_: Any, metrics: Any = None, **__: Any) -> None:
            seen.append(dict(metrics))

    how: dict[str, Any] = {"callbacks": [Tracker()], "compute_metrics": lambda found: {"rows": len(found.label_ids)}}
    found = trainer(tmp_path, **how).predict(Items(8))
    assert found.predictions.shape == (8, 3)
    for metrics in (found.metrics, *seen):
        assert "test_runtime" in metrics
        assert metrics.keys().isdisjoint({"test_loss", "test_rows"})
        assert metrics["test_samples_per_second"] == metrics["test_steps_per_second"] == 0
    public = trainer(tmp_path, **how, told=privacy(public_evaluation=True)).predict(Items(8))
    assert public.metrics["test_rows"] == 8
    assert public.metrics["test_loss"] > 0
    assert len(seen) == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"settings": {"fp16": True}}, "bf16=True"),
    "a loss of the batch": ({"compute_loss_func": lambda *_, **__: 0}, "one loss per row"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused(what: str, tmp_path: Path) -> None:
    options, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, **options)


def test_the_trainers_checkpoints_do_not_resume_a_private_run(tmp_path: Path) -> None:
    private = trainer(tmp_path)
    with pytest.raises(ValueError, match="resumed by its key"):
        private.train(resume_from_checkpoint=True)
    with pytest.raises(RuntimeError, match="call train first"):
        _ = private.private
    with pytest.raises(RuntimeError, match="private steps alone"):
        iter(private.get_train_dataloader())


def test_a_stopped_run_is_resumed_by_its_key(tmp_path: Path) -> None:
    class Interrupts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            del args
            if state.global_step == 4:
                raise RuntimeError("interrupted")

    def again(*callbacks: Any) -> PrivateTrainer:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            told = privacy(ledger=ledger, checkpoint=tmp_path / "run.st", every=2)
            made = trainer(tmp_path, told=told, callbacks=list(callbacks), optimizers=(None, None))
            made.train()
            return made

    with pytest.raises(RuntimeError, match="interrupted"):
        again(Interrupts())
    resumed = again()
    assert resumed.state.global_step == STEPS
    whole = trainer(tmp_path, optimizers=(None, None))
    whole.train()
    assert torch.equal(weights(resumed.model), weights(whole.model))
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        assert [entry.kind for entry in ledger.entries()].count("charge") == 1


def test_training_again_is_charged_to_the_same_budget(tmp_path: Path) -> None:
    """Also without a ledger: the weights of a second call hold both runs."""
    private = trainer(tmp_path, told=privacy(ledger=None))
    private.train()
    trained = weights(private.model).clone()
    with pytest.raises(BudgetExceeded):
        private.train()
    assert torch.equal(weights(private.model), trained)
    assert private.private.ledger.total().epsilon <= PROMISE["epsilon"]


def test_mixed_precision_is_the_trainers(tmp_path: Path) -> None:
    private = trainer(tmp_path, settings={"bf16": True})
    private.train()
    high = weights(fitted(bert(), texts()))
    assert 0 < float((weights(private.model) - high).norm()) < 0.1 * float((high - weights(bert())).norm())


def test_a_language_model_and_its_loss(tmp_path: Path) -> None:
    """The loss per row of the model's task has the mean that transformers computes, where texts have one length."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    ids = texts()[0]["input_ids"].clamp_min(1)
    loss = loss_of(model)
    assert isinstance(loss, NextToken)
    mine = loss.loss(model(input_ids=ids).logits, ids).mean()
    assert torch.allclose(mine, model(input_ids=ids, labels=ids).loss, atol=1e-6)

    class Lines(Items):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"input_ids": ids[i], "labels": ids[i]}

    private = trainer(tmp_path, model, dataset=Lines())
    private.train()
    assert private.private.done == STEPS


def test_losses_of_the_models_tasks() -> None:
    for labels, kind in ((torch.randn(4, 1), "regression"), (torch.rand(4, 3).round(), "multi_label_classification")):
        model = bert()
        model.config.problem_type = kind
        if kind == "regression":
            model.classifier, model.num_labels = nn.Linear(16, 1), 1
            model.config.num_labels = 1
        inputs = {name: value[:4] for name, value in texts()[0].items()}
        whole = model(**inputs, labels=labels).loss
        loss = loss_of(model)
        if isinstance(loss, nn.Module):
            assert torch.allclose(loss(model(**inputs).logits, labels), whole)
        else:
            assert torch.allclose(loss(model, inputs | {"labels": labels}).mean(), whole)
    with pytest.raises(ValueError, match="give loss="):
        loss_of(nn.Linear(2, 2))


def test_texts_of_many_lengths(tmp_path: Path) -> None:
    """A `datasets.Dataset` with its tokenizer's collator: refused until there is one length, before any charge."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(WORDS - 5))]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    rows = [" ".join(f"w{(i * j) % 30}" for j in range(1, 3 + i % 6)) for i in range(COUNT)]
    table = datasets.Dataset.from_dict({"text": rows, "label": [i % 3 for i in range(COUNT)]})
    table = table.map(lambda row: tokenizer(row["text"]))
    with Ledger("sqlite://") as ledger:
        for length, said in ((None, "Say max_length="), (6, "longer than the 6 tokens")):
            private = trainer(
                tmp_path, dataset=table, told=privacy(ledger=ledger), processing_class=tokenizer, max_length=length
            )
            with pytest.raises(ValueError, match=said):
                private.train()
        assert not list(ledger.entries())
    private = trainer(tmp_path, dataset=table, processing_class=tokenizer, max_length=12)
    private.train()
    assert private.private.done == STEPS


def test_texts_are_padded_to_one_length() -> None:
    class Pads:
        pad_token_id = 0

    collator = fixed_length(DataCollatorWithPadding(Pads()), 12)  # type: ignore[arg-type]
    assert (collator.padding, collator.max_length) == ("max_length", 12)
    with pytest.raises(ValueError, match="does not pad"):
        fixed_length(object(), 12)
    assert issubclass(PrivateTrainer, Trainer)
