"""One rank of loops that other libraries launch: Accelerate, transformers' Trainer, Fabric. Argument: a folder."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from tacit import make_private
from tacit.integrations import PrivacyArguments, PrivateTrainer, prepare_private
from tacit.privacy import Ledger
from tests.distributed.ranks import leave

TERMS: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-3, "clip": 0.7}


def rows() -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(80, 6, generator=drawn), torch.randint(3, (80,), generator=drawn))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def named(start: str, model: nn.Module) -> dict[str, Tensor]:
    return {f"{start}.{name}": p.detach().contiguous() for name, p in model.named_parameters()}


def accelerated(folder: Path) -> dict[str, Tensor]:
    accelerator, model = Accelerator(cpu=True), net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=40, shuffle=True))
    pays = {"ledger": Ledger(f"sqlite:///{folder}/accelerate.db"), "subject": "clinic", "seed": 5}
    private = prepare_private(accelerator, model, optimizer, loader, nn.CrossEntropyLoss(), epochs=2, **TERMS, **pays)
    for _ in range(2):
        for batch in private.loader:
            private.backward(batch)
            optimizer.step()
            optimizer.zero_grad()
    assert private.done == 4
    return named("accelerate", private.model)


def with_fabric(folder: Path) -> dict[str, Tensor]:
    fabric = Fabric(accelerator="cpu", devices=distributed.get_world_size())
    fabric.launch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pays = {"ledger": Ledger(f"sqlite:///{folder}/fabric.db"), "subject": "clinic", "seed": 5}
    loader = DataLoader(rows(), batch_size=40, shuffle=True)
    private = make_private(model, optimizer, loader, nn.CrossEntropyLoss(), epochs=2, **TERMS, **pays)
    for batch in private:
        private.step(batch)
    return named("fabric", private.model)


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(i)
        return {"input_ids": torch.randint(1, 40, (7,), generator=drawn), "labels": i % 3}


def trained(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, **small, **dropout))
    pays = {"ledger": Ledger(f"sqlite:///{folder}/trainer.db"), "subject": "clinic", "seed": 5}
    trainer = PrivateTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=24,
            max_steps=3,
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Texts(),
        privacy=PrivacyArguments(**TERMS, **pays),
    )
    trainer.train()
    return named("trainer", trainer.private.model)


def main(folder: Path) -> None:
    found = accelerated(folder) | trained(folder) | with_fabric(folder)
    rank = distributed.get_rank()
    save_file(found, folder / f"rank{rank}.safetensors")
    (folder / f"rank{rank}.json").write_text(json.dumps({"ranks": distributed.get_world_size()}))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
