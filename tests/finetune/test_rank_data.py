"""What ranks say of their data before a run is charged: the same rows in the same order, or they do not go on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tacit.data import TensorRecords
from tacit.finetune._loader import LoaderRecords
from tacit.finetune._ranks import order_of

COUNT = 200


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(COUNT, 4, generator=generator), torch.arange(COUNT) % 3


class Jittered(Dataset[Any]):
    """Rows with a random transform, of which some cannot be read."""

    def __init__(self, order: torch.Tensor) -> None:
        self.order = order

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        if self.order[i] == 0:
            raise OSError("no such file")
        return rows()[0][self.order[i]] + torch.randn(4), 1


def test_the_same_rows_have_one_name_and_another_order_has_another() -> None:
    inputs, labels = rows()
    swapped = torch.arange(COUNT).flip(0)
    whole = order_of(TensorRecords(inputs, labels))
    assert whole == order_of(TensorRecords(inputs.clone(), labels.clone()))
    assert whole != order_of(TensorRecords(inputs[swapped], labels[swapped]))
    assert whole != order_of(TensorRecords(inputs, labels.flip(0)))
    ids = [f"patient {i // 2}" for i in range(COUNT)]
    named = order_of(TensorRecords(inputs, labels, ids, unit="patient"))
    assert named != order_of(TensorRecords(inputs, labels, ids[::-1], unit="patient"))


def test_rows_of_a_loader_with_random_transforms() -> None:
    order = torch.arange(COUNT)
    whole = order_of(LoaderRecords(DataLoader(Jittered(order), batch_size=10)))
    assert whole == order_of(LoaderRecords(DataLoader(Jittered(order), batch_size=10)))
    assert whole != order_of(LoaderRecords(DataLoader(Jittered(order.flip(0)), batch_size=10)))
    plain = order_of(LoaderRecords(DataLoader(TensorDataset(*rows()), batch_size=10)))
    assert plain != whole
