"""One rank of a sharded run, as torchrun starts it: arguments are a folder, and whether the model is sharded."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tacit.finetune import PrivateLoop, make_private
from tacit.privacy import Ledger
from tests.distributed.ranks import join, leave


def net() -> nn.Module:
    """Blocks of sizes that two ranks cannot share evenly, and one that has fewer rows than ranks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7)) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 7), *blocks, nn.Linear(7, 1), nn.Linear(1, 3))


def run(folder: Path, *, sharded: bool) -> PrivateLoop:
    drawn = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(90, 6, generator=drawn), torch.randint(3, (90,), generator=drawn)
    model = net()
    if sharded:
        for block in list(model)[1:3]:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    private = make_private(
        model,
        optimizer,
        DataLoader(TensorDataset(inputs, labels), batch_size=40),
        nn.CrossEntropyLoss(),
        epsilon=4.0,
        delta=1e-3,
        steps=3,
        clip=0.7,
        unit_ids=torch.arange(90) // 2,
        unit="patient",
        ledger=Ledger(f"sqlite:///{folder}/ledger.db"),
        subject="clinic",
        seed=5,
    )
    for batch in private:
        private.step(batch)
    return private


def main(folder: Path, sharded: bool) -> None:
    join()
    private = run(folder, sharded=sharded)
    values = {name: p.full_tensor() if sharded else p for name, p in private.model.named_parameters()}  # type: ignore[operator]
    if sharded:
        with pytest.raises(ValueError, match="checkpoint"):
            private.save(folder / "saved")
        shapes = {tuple(state["exp_avg"].to_local().shape) for state in private.optimizer.state.values()}
        assert {(7, 7), (6, 7)} & shapes, "a rank has 7 of 13 rows, or 6, of a matrix and its moments"
    if distributed.get_rank() == 0:
        save_file({name: value.detach().contiguous() for name, value in values.items()}, folder / "weights.safetensors")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "sharded")
