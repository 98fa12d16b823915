"""Lightning's `Trainer.fit` with the callback: the weights of `fit`, and no training loss anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from reference import BATCH, CLIP, COUNT, PROMISE, RATE, STEPS, dataset, fitted, net, rows, weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tacit.integrations import PrivacyArguments, PrivateTraining
from tacit.privacy import BudgetExceeded, Ledger


class Module(lightning.LightningModule):
    """What its author had: it logs its training loss, and validates."""

    def __init__(self, *, scheduled: str | None = None) -> None:
        super().__init__()
        self.net, self.scheduled = net(), scheduled

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, index: int) -> Tensor:
        del index
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        del index
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)
        if self.scheduled is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.scheduled}}


def loader() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=BATCH, shuffle=True)


def privacy(**more: Any) -> PrivacyArguments:
    return PrivacyArguments(**(PROMISE | {"clip": CLIP, "ledger": Ledger("sqlite://")} | more))


def trained(
    folder: Path, module: Module | None = None, *, validate: bool = False, unit_ids: Any = None, **more: Any
) -> tuple[Module, PrivateTraining]:
    callback = PrivateTraining(nn.CrossEntropyLoss(), privacy=more.pop("privacy", privacy()), unit_ids=unit_ids)
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 1} | more
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[callback, *options.pop("callbacks", [])],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = module or Module()
    trainer.fit(module, loader(), loader() if validate else None)
    return module, callback


def test_the_weights_are_those_of_fit(tmp_path: Path) -> None:
    module, callback = trained(tmp_path)
    assert callback.private.done == STEPS
    assert torch.equal(weights(module), weights(fitted(net(), rows())))
    assert module.automatic_optimization
    assert "training_step" not in vars(module)


def test_max_steps_units_and_a_scheduler(tmp_path: Path) -> None:
    ids = [i % 9 for i in range(COUNT)]
    module, callback = trained(
        tmp_path,
        Module(scheduled="step"),
        max_epochs=None,
        max_steps=STEPS,
        unit_ids=ids,
        privacy=privacy(size=9, unit="patient"),
    )
    assert callback.private.done == STEPS
    same = fitted(net(), rows(), size=9, unit="patient", unit_ids=ids, update={"schedule": "linear"})
    assert torch.allclose(weights(module), weights(same), atol=1e-6)
    assert str(callback.private.guarantee.unit) == "patient"


def test_nothing_unnoised_is_logged(tmp_path: Path) -> None:
    """Neither by the logger nor in checkpoints; validation has to be called public."""
    with pytest.raises(ValueError, match="public_evaluation"):
        trained(tmp_path, validate=True)
    callback = PrivateTraining(nn.CrossEntropyLoss(), privacy=privacy())
    later = lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[callback], logger=False)
    with pytest.raises(ValueError, match="public_evaluation"):
        later.validate(Module(), loader())
    logger = CSVLogger(tmp_path)
    module, _ = trained(
        tmp_path,
        validate=True,
        logger=logger,
        privacy=privacy(public_evaluation=True),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=tmp_path)],
    )
    written = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "val_loss" in written
    assert "train_loss" not in written
    (kept,) = tmp_path.glob("*.ckpt")
    told = torch.load(kept, weights_only=False)
    assert "train_loss" not in json.dumps(told, default=str)
    assert torch.equal(told["state_dict"]["net.0.weight"], module.net[0].weight)


def test_training_again_is_charged_to_the_same_budget(tmp_path: Path) -> None:
    """Also without a ledger: the weights of a second call hold both runs."""
    module, callback = trained(tmp_path, privacy=privacy(ledger=None))
    after = weights(module).clone()
    options: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    again = lightning.Trainer(default_root_dir=tmp_path, callbacks=[callback], enable_progress_bar=False, **options)
    with pytest.raises(BudgetExceeded):
        again.fit(module, loader())
    assert torch.equal(weights(module), after)


def test_mixed_precision_is_the_trainers(tmp_path: Path) -> None:
    module, _ = trained(tmp_path, precision="bf16-mixed")
    high = weights(fitted(net(), rows()))
    assert 0 < float((weights(module) - high).norm()) < 0.05 * float((high - weights(net())).norm())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no end": ({"max_epochs": -1}, "max_epochs= or max_steps="),
    "precision": ({"precision": "16-true"}, "scales losses"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused_before_any_charge(what: str, tmp_path: Path) -> None:
    options, said = REFUSED[what]
    with Ledger("sqlite://") as ledger:
        with pytest.raises(ValueError, match=said):
            trained(tmp_path, privacy=privacy(ledger=ledger), **options)
        assert not list(ledger.entries())


def test_lightnings_own_checkpoints_do_not_resume_a_private_run(tmp_path: Path) -> None:
    trained(tmp_path, enable_checkpointing=True, callbacks=[ModelCheckpoint(dirpath=tmp_path)])
    (kept,) = tmp_path.glob("*.ckpt")
    callback = PrivateTraining(nn.CrossEntropyLoss(), privacy=privacy())
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ValueError, match="resumed by its key"):
        trainer.fit(Module(), loader(), ckpt_path=kept)
    with pytest.raises(RuntimeError, match=r"Trainer\.fit first"):
        _ = callback.private


def test_a_stopped_run_is_resumed_by_its_key(tmp_path: Path) -> None:
    """Interrupted in its fourth step and run again: the weights of the run that never was."""

    class Interrupts(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                raise RuntimeError("interrupted")

    def again(*callbacks: Any) -> Module:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            told = privacy(ledger=ledger, checkpoint=tmp_path / "run.st", every=2)
            return trained(tmp_path, Module(scheduled="step"), privacy=told, callbacks=list(callbacks))[0]

    with pytest.raises(RuntimeError, match="interrupted"):
        again(Interrupts())
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        assert [entry.kind for entry in ledger.entries()].count("charge") == 1
    whole, _ = trained(tmp_path, Module(scheduled="step"))
    assert torch.equal(weights(again()), weights(whole))


def test_one_loader_and_one_optimizer(tmp_path: Path) -> None:
    callback = PrivateTraining(nn.CrossEntropyLoss(), privacy=privacy())
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ValueError, match="one DataLoader"):
        trainer.fit(Module(), [loader(), DataLoader(TensorDataset(*rows()))])
