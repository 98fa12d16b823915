"""transformers: a `Trainer` whose training is private."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from tacit.data import NO_LABEL
from tacit.finetune import NextToken, PrivateBatch, PrivateLoop, make_private, steps_per_epoch
from tacit.integrations._privacy_arguments import PrivacyArguments

_UNNOISED = ("loss", "train_loss", "num_input_tokens_seen", "total_flos")


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with private training: `privacy=` more, everything else as before.

    Optimizer, scheduler, saving, callbacks and logging are the Trainer's. What it would log of private rows is not: the
    training loss, its tokens and flops are left out; the learning rate, the norm of the released gradient and the
    epsilon of the whole run are logged. `predict` returns predictions; its scores are left out, too, unless
    `public_evaluation` is said. `max_grad_norm` has no effect, for `clip` bounds each unit's gradient.
    `gradient_accumulation_steps` batches become one Poisson batch, computed in parts of `per_device_train_batch_size`.
    Under torchrun all processes together make the run of one: a step has that batch size in all, not each.

    Formal guarantee: that of `tacit.make_private`, which is called by `train`, once there is an optimizer.

    Args:
        *args: Of `Trainer`: model, args, data_collator, train_dataset, eval_dataset, …
        privacy: Epsilon, delta, clip, ledger, …
        unit_ids: One integer or string per row of the training data; rows with the same id are one unit.
        loss: As for `tacit.make_private`; by default that of the model's task (classes, labels, next tokens, tokens).
        max_length: Pad texts to this many tokens, always: rows of a private batch have one shape.
        **options: Of `Trainer`.

    Raises:
        ValueError: Several devices of one process, evaluation data that are not public, a loss of the whole batch, or
            an option of the Trainer that cannot be honoured.
    """

    args: Any
    data_collator: Any
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        privacy: PrivacyArguments,
        unit_ids: Any = None,
        loss: Any = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._privacy, self._unit_ids, self._row_loss = privacy, unit_ids, loss
        self._private: PrivateLoop | None = None
        self._refuse()
        self._accumulated = self.args.gradient_accumulation_steps
        self.args = replace_arguments(self.args)
        if max_length is not None:
            self.data_collator = fixed_length(self.data_collator, max_length)

    @property
    def private(self) -> PrivateLoop:
        """The private loop, for its guarantee and `save`; there once training has begun."""
        if self._private is None:
            raise RuntimeError("Nothing was trained yet: call train first.")
        return self._private

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> TrainOutput:
        """`Trainer.train`; a killed run is resumed by `PrivacyArguments(checkpoint=…)`, and this same call."""
        if resume_from_checkpoint:
            raise ValueError(
                "A private run is resumed by its key, not by the Trainer's checkpoints: give "
                "PrivacyArguments(checkpoint=…) and run the same program again, without resume_from_checkpoint."
            )
        return super().train(**options)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """`Trainer.evaluate`, whose scores are printed and kept: of data that are public."""
        self._privacy.check_evaluation("evaluation data")
        found: dict[str, float] = super().evaluate(*args, **options)
        return found

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """What `predict` is made of. Scores, and of how many rows, go to every callback: of public data only."""
        found = super().evaluation_loop(*args, **options)
        return found if self._privacy.public_evaluation else found._replace(metrics={}, num_samples=0)

    def get_train_dataloader(self) -> Any:
        """The length of an epoch, which is all that is asked before there is an optimizer."""
        return _Planned(self, self._plain_loader())

    def _plain_loader(self) -> DataLoader[Any]:
        """What `Trainer` would make, but for its order."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="Training")
            check_lengths(dataset, collate)
        else:
            collate = self._get_collator_with_removed_columns(collate, description="Training")
        return DataLoader(
            dataset,
            batch_size=self._train_batch_size * self._accumulated,
            shuffle=True,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            drop_last=self.args.dataloader_drop_last,
        )

    def num_examples(self, dataloader: Any) -> int:
        """The public number of units where it was given: the true number of rows is then private."""
        if isinstance(dataloader, _Planned):
            return dataloader.units
        return int(super().num_examples(dataloader))

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        model, planned = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        options = self._privacy.options(self._private)
        if self._accumulated > 1 and options["microbatch"] is None:
            options["microbatch"] = self._train_batch_size
        kept = {"scheduler": self.lr_scheduler} if self._privacy.checkpoint is not None else None
        self._private = make_private(
            self.model,
            getattr(self.optimizer, "optimizer", self.optimizer),
            planned.loader,
            self._row_loss if self._row_loss is not None else loss_of(self.model, self.args.label_smoothing_factor),
            steps=max_steps,
            unit_ids=self._unit_ids,
            autocast=torch.bfloat16 if self.args.bf16 else None,
            stateful=kept,
            **options,
        )
        self.state.global_step = self._private.done  # of an earlier process, if this one resumes it
        return model, self._private.loader

    def training_step(self, model: nn.Module, inputs: PrivateBatch, num_items_in_batch: Any = None) -> Tensor:
        """One private gradient. There is no loss to return: it would be that of private rows, without noise."""
        del num_items_in_batch
        model.train()
        self.private.backward(inputs)
        return torch.zeros((), device=self.args.device)

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> None:
        """Not counted: how many tokens were drawn is private."""
        del batch_samples, device

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Not counted, for the same reason."""
        del inputs

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted, for the same reason."""
        del inputs
        return 0

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Without what was computed of private rows; with the epsilon of the whole run."""
        shown = {name: value for name, value in logs.items() if name not in _UNNOISED}
        if self._private is not None and any(name in logs for name in _UNNOISED):
            shown["epsilon"] = self._private.guarantee.epsilon
        super().log(shown, *args, **options)

    def _finalize_training(self, *args: Any, **options: Any) -> TrainOutput:
        self.private.finish()
        found = super()._finalize_training(*args, **options)
        metrics = {name: value for name, value in found.metrics.items() if name not in _UNNOISED}
        return TrainOutput(found.global_step, math.nan, metrics | {"epsilon": self.private.guarantee.epsilon})

    def _refuse(self) -> None:
        args = self.args
        if args.n_gpu > 1 or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "DataParallel, DeepSpeed and the Trainer's FSDP average gradients before they are clipped: "
                "start one process per device with torchrun."
            )
        if args.fp16:
            raise ValueError("fp16=True scales losses, which private gradients do not have: use bf16=True.")
        if self.compute_loss_func is not None:
            raise ValueError("compute_loss_func gives a loss of the whole batch: give loss=, with one loss per row.")
        if self.eval_dataset is not None:
            self._privacy.check_evaluation("eval_dataset")


class _Planned:
    """The training loader before it is private: its length, and nothing to iterate over."""

    def __init__(self, trainer: PrivateTrainer, loader: DataLoader[Any]) -> None:
        self.loader, self.dataset = loader, loader.dataset
        ids, size = trainer._unit_ids, trainer._privacy.size
        self.units = size or (len(loader.dataset) if ids is None else len(set(ids)))  # type: ignore[arg-type]
        self._length = steps_per_epoch(self.units, loader)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("The rows of a private Trainer are read by its private steps alone.")


def replace_arguments(args: Any) -> Any:
    """The Trainer's arguments as they hold for private steps; the given ones stay as they are."""
    found = copy.copy(args)
    found.gradient_accumulation_steps, found.max_grad_norm, found.include_num_input_tokens_seen = 1, 0.0, "no"
    return found


def fixed_length(collator: Any, length: int) -> Any:
    """The collator with every text padded to `length` tokens."""
    if hasattr(collator, "padding") and hasattr(collator, "max_length"):
        return replace(collator, padding="max_length", max_length=length)
    if hasattr(collator, "pad_to_multiple_of"):
        return replace(collator, pad_to_multiple_of=length)
    raise ValueError(f"{type(collator).__name__} does not pad: leave max_length out, and pad the data set's rows.")


def check_lengths(dataset: Any, collator: Any) -> None:
    """Refuse texts that would be padded batch by batch, or are longer than what they are padded to.

    Rows of another length than the others contribute zero, in silence; so it is said before the charge.
    """
    if "input_ids" not in dataset.column_names or not hasattr(collator, "pad_to_multiple_of"):
        return
    lengths = {len(ids) for ids in dataset["input_ids"]}
    fixed = collator.max_length if getattr(collator, "padding", None) == "max_length" else collator.pad_to_multiple_of
    if fixed is None and len(lengths) > 1:
        raise ValueError(
            "The texts differ in length, and their collator pads each batch to its longest: rows of a private batch "
            "have one shape. Say max_length=, to which every text is padded. Nothing was charged."
        )
    if fixed is not None and max(lengths, default=0) > fixed:
        raise ValueError(
            f"Some texts are longer than the {fixed} tokens that they are padded to: truncate them to that length when "
            "you tokenize. Nothing was charged."
        )


def loss_of(model: nn.Module, smoothing: float = 0.0) -> Any:
    """One loss per row, as the model's own loss is the mean of."""
    config: Any = getattr(model, "config", None)
    whole: Any = model
    name = type(whole.get_base_model() if hasattr(whole, "peft_config") else whole).__name__
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        kind = getattr(config, "problem_type", None)
        if kind == "multi_label_classification":
            return nn.BCEWithLogitsLoss()
        if kind == "regression":
            return _squares
        return nn.CrossEntropyLoss(label_smoothing=smoothing)
    if name.endswith(("ForCausalLM", "LMHeadModel")) and not smoothing:
        return NextToken(config.vocab_size)
    if name.endswith(("ForTokenClassification", "ForMaskedLM")) and not smoothing:
        return _tokens
    raise ValueError(f"For {name} the loss of a single row is not known: give loss=, with one loss per row.")


def _squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    found: Tensor = (outputs.flatten(1) - batch["labels"].reshape(len(outputs), -1)).square().mean(1)
    return found


def _tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    labels = batch["labels"]
    each = functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none", ignore_index=NO_LABEL)
    return each.sum(1) / (labels != NO_LABEL).sum(1).clamp_min(1)
