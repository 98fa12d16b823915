"""Lightning: a callback that makes `Trainer.fit` private."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader

from tacit.finetune import PrivateBatch, PrivateLoop, make_private, steps_per_epoch
from tacit.integrations._privacy_arguments import PrivacyArguments

_PRECISIONS = {"32-true": None, "64-true": None, "bf16-true": None, "bf16-mixed": torch.bfloat16}


class PrivateTraining(lightning.Callback):  # type: ignore[misc]
    """Makes the training of a `LightningModule` private: `Trainer(callbacks=[PrivateTraining(…)])`.

    Optimizer and scheduler are those of `configure_optimizers`; validation, checkpoints and other callbacks stay.
    `training_step` is replaced by a private step, so what it would log (the training loss) is not computed at all.

    Formal guarantee: that of `tacit.make_private`, which is called once the trainer has its optimizer.

    Args:
        loss: As for `tacit.make_private`.
        privacy: Epsilon, delta, clip, ledger, …
        unit_ids: One integer or string per row of the training data.

    Examples:
        >>> from torch import nn
        >>> from tacit.integrations import PrivacyArguments, PrivateTraining
        >>> callback = PrivateTraining(nn.CrossEntropyLoss(), privacy=PrivacyArguments(epsilon=3.0, delta=1e-5))
    """

    def __init__(self, loss: Any, *, privacy: PrivacyArguments, unit_ids: Any = None) -> None:
        self._loss, self._privacy, self._unit_ids = loss, privacy, unit_ids
        self._private: PrivateLoop | None = None
        self._automatic = True

    @property
    def private(self) -> PrivateLoop:
        """The private loop, for its guarantee and `save`; there once training has begun."""
        if self._private is None:
            raise RuntimeError("Nothing was trained yet: call Trainer.fit first.")
        return self._private

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Take the optimization over, before the trainer asks how it is done; scores are of public data, or refused."""
        if stage in ("validate", "test"):
            self._privacy.check_evaluation("validation and test data")
        if stage != "fit":
            return
        _refuse(trainer, self._privacy)
        self._automatic, pl_module.automatic_optimization = pl_module.automatic_optimization, False

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to go on with a checkpoint of Lightning's, which has no key to replay steps with."""
        del pl_module, checkpoint
        if trainer.state.fn == "fit":
            raise ValueError(
                "A private run is resumed by its key: give PrivacyArguments(checkpoint=…) and run the same program "
                "again, without ckpt_path."
            )

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Charge, now that optimizer and scheduler are there, and give the trainer Poisson batches."""
        if len(trainer.optimizers) != 1:
            raise ValueError("Private training takes one optimizer: configure_optimizers returned another number.")
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        if not isinstance(loader, DataLoader):
            raise ValueError("Private training takes one DataLoader for training.")
        units = self._privacy.size or (len(loader.dataset) if self._unit_ids is None else len(set(self._unit_ids)))  # type: ignore[arg-type]
        steps = _steps(trainer, steps_per_epoch(units, loader))
        schedulers = {f"scheduler{i}": each.scheduler for i, each in enumerate(trainer.lr_scheduler_configs)}
        private = make_private(
            pl_module,
            trainer.optimizers[0],
            loader,
            self._loss,
            steps=steps,
            unit_ids=self._unit_ids,
            autocast=_PRECISIONS[str(trainer.precision)],
            stateful=schedulers if self._privacy.checkpoint is not None else None,
            **self._privacy.options(self._private),
        )
        self._private = private
        source.instance = private.loader
        pl_module.training_step = partial(_step, trainer, private)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Schedulers that go by epochs: Lightning leaves them to who optimizes."""
        del pl_module
        _schedule(trainer, "epoch", trainer.current_epoch + 1)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Settle; the module is as it was."""
        del trainer
        self.private.finish()
        pl_module.__dict__.pop("training_step", None)
        pl_module.automatic_optimization = self._automatic


def _step(trainer: lightning.Trainer, private: PrivateLoop, batch: PrivateBatch, index: int = 0) -> None:
    del index
    (optimizer,) = trainer.strategy._lightning_optimizers
    optimizer.zero_grad()
    private.backward(batch)
    optimizer.step()
    _schedule(trainer, "step", private.done)


def _schedule(trainer: lightning.Trainer, interval: str, count: int) -> None:
    for each in trainer.lr_scheduler_configs:
        if each.interval == interval and count % each.frequency == 0:
            each.scheduler.step()


def _steps(trainer: lightning.Trainer, length: int) -> int:
    """As many as the trainer will make; the whole run is charged before its first step."""
    share = trainer.limit_train_batches
    each = min(length, share) if isinstance(share, int) else int(length * share)
    most = math.inf if trainer.max_steps < 0 else trainer.max_steps
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        most = min(most, trainer.max_epochs * each)
    if not 0 < most < math.inf:
        raise ValueError("A private run is charged before its first step: give Trainer max_epochs= or max_steps=.")
    return int(most)


def _refuse(trainer: lightning.Trainer, privacy: PrivacyArguments) -> None:
    if trainer.world_size > 1:
        raise ValueError(
            f"This trainer has {trainer.world_size} processes, each of which would draw and release by itself: use "
            "devices=1."
        )
    if str(trainer.precision) not in _PRECISIONS:
        raise ValueError(f"precision={trainer.precision!r} scales losses, which private gradients do not have.")
    if trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined() and trainer.limit_val_batches:
        privacy.check_evaluation("validation data")
