"""Mixing that three rows of one shape, looked at once, do not show."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_close, brute_force
from torch import Tensor, nn

from tacit.gradients import Engine, RowsMixed, clipped_sum


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def labelled(rows: int = 32, width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randint(0, 3, (rows,))


SWITCH = 0.0


def by_global(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    losses = classify(model, batch)
    return losses + SWITCH * losses.mean()


def test_a_number_of_the_closure_that_is_switched_on_later() -> None:
    weight = 0.0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = classify(model, batch)
        return losses + weight * losses.mean()

    settings = {"weight": 0.0}

    def by_dictionary(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = classify(model, batch)
        return losses + settings["weight"] * losses.mean()

    engines = [Engine(nn.Linear(4, 3), each, clip=1.0) for each in (loss, by_dictionary, by_global)]
    for engine in engines:
        engine(labelled())
    weight, settings["weight"], globals()["SWITCH"] = 1.0, 1.0, 1.0
    try:
        for engine in engines:
            with pytest.raises(RowsMixed, match="by per_sample_loss"):
                engine(labelled())
    finally:
        globals()["SWITCH"] = 0.0


def test_a_number_of_a_partial_or_of_the_object_of_a_method() -> None:
    class Trainer:
        weight = 0.0

        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            losses = classify(model, batch)
            return losses + self.weight * losses.mean()

    def loss(weight: float, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = classify(model, batch)
        return losses + weight * losses.mean()

    trainer, model = Trainer(), nn.Linear(4, 3)
    engine = Engine(model, trainer.loss, clip=1.0)
    engine(labelled())
    trainer.weight = 1.0
    with pytest.raises(RowsMixed):
        engine(labelled())
    clipped_sum(model, functools.partial(loss, 0.0), labelled(), clip=1.0)
    with pytest.raises(RowsMixed):
        clipped_sum(model, functools.partial(loss, 1.0), labelled(), clip=1.0)


def test_an_attribute_of_the_model_that_is_switched_on_later() -> None:
    class Centre(nn.Module):
        share = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return x - self.share * x.mean(0)

    model = nn.Sequential(nn.Linear(4, 4), Centre(), nn.Linear(4, 3))
    engine = Engine(model, classify, clip=1.0)
    engine(labelled())
    model[1].share = 1.0
    with pytest.raises(RowsMixed, match="in layer 1"):
        engine(labelled())


def test_mixing_of_longer_rows_only() -> None:
    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean((0, 1)) if x.shape[1] > 8 else x

    model = nn.Sequential(nn.Linear(4, 4), Long(), nn.Linear(4, 3))
    engine = Engine(model, lambda m, x: m(x).square().sum((1, 2)), clip=1.0)
    engine(torch.randn(6, 4, 4))
    with pytest.raises(RowsMixed, match="in layer 1"):
        engine(torch.randn(6, 9, 4))


def test_a_loss_that_drops_the_top_of_the_batch() -> None:
    def trimmed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = classify(model, batch)
        highest = losses.detach().topk(len(losses) // 10).indices
        return losses * torch.ones_like(losses).index_fill(0, highest, 0.0)

    with pytest.raises(RowsMixed):
        Engine(nn.Linear(4, 3), trimmed, clip=1.0)(labelled(40))
    engine = Engine(nn.Linear(4, 3), trimmed, clip=1.0)
    engine(labelled(8))
    with pytest.raises(RowsMixed):
        engine(labelled(40))
    engine = Engine(nn.Linear(4, 3), trimmed, clip=1.0)
    with pytest.raises(RowsMixed):
        engine.validate(labelled(4), rows=64)


class Experts(nn.Module):
    """Top-1 routing in which an expert takes so many rows and no more, first come, first served."""

    def __init__(self, experts: int, limited: bool, sparse: bool = False) -> None:
        super().__init__()
        self.route = nn.Linear(4, experts)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(experts))
        self.limited, self.sparse = limited, sparse

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.route(x).softmax(1).max(1)
        if self.sparse:
            out = x.new_zeros(len(x), 3)
            for number, expert in enumerate(self.experts):
                mine = torch.nonzero(chosen == number).flatten()
                if len(mine):
                    out = out.index_copy(0, mine, expert(x[mine]) * share[mine, None])
            return out
        out = torch.stack([expert(x) for expert in self.experts], 1)
        out = out[torch.arange(len(x)), chosen] * share[:, None]
        if not self.limited:
            return out
        place = F.one_hot(chosen, len(self.experts)).cumsum(0).gather(1, chosen[:, None])[:, 0]
        return out * (place <= max(4, len(x) // len(self.experts)))[:, None]


def test_experts_with_a_capacity_mix_rows_and_without_do_not() -> None:
    torch.manual_seed(0)
    with pytest.raises(RowsMixed):
        Engine(Experts(4, True), classify, clip=1.0)(labelled(64))
    Engine(Experts(4, False), classify, clip=1.0)(labelled(64))


def test_experts_that_few_rows_miss_are_reached() -> None:
    torch.manual_seed(1)
    model, batch = Experts(8, False, sparse=True).double(), (torch.randn(24, 4).double(), torch.randint(0, 3, (24,)))
    expected, _ = brute_force(model, classify, batch, 0.2, list(range(24)))
    assert_close(Engine(model, classify, clip=0.2)(batch).sum, expected, 1e-9)


def test_a_loss_divided_by_the_labels_that_count() -> None:
    def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none", ignore_index=-100)
        return losses.sum(1) / (batch[1] != -100).sum() * len(losses)

    labels = torch.randint(0, 3, (16, 6))
    labels[3, 2] = -100
    with pytest.raises(RowsMixed):
        Engine(nn.Linear(4, 3), mean, clip=1.0)((torch.randn(16, 6, 4), labels))


def sorted_by(key: Any) -> Any:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            order = torch.argsort(key(x), stable=True)
            return self.last(self.inner(x[order]).tanh()[torch.argsort(order)])

    return Sorted().double()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rows", [3, 6, 24])
@pytest.mark.parametrize(
    "key", [lambda x: -x[:, 0], lambda x: x[:, 0].sign(), lambda x: x.abs().sum(1)], ids=["value", "sign", "size"]
)
def test_rows_that_are_sorted_and_put_back_are_not_taken_for_others(seed: int, rows: int, key: Any) -> None:
    torch.manual_seed(seed)
    model, batch = sorted_by(key), (torch.randn(rows, 4).double() * 10, torch.randint(0, 3, (rows,)))
    expected, _ = brute_force(model, classify, batch, 0.1, list(range(rows)))
    assert_close(Engine(model, classify, clip=0.1)(batch).sum, expected, 1e-9)


def lengths(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, size, y = batch
    order = torch.argsort(size, descending=True, stable=True)
    mask = (torch.arange(x.shape[1]) < size[order, None]).to(x)
    out = (model[0](x[order]) * mask[..., None]).sum(1) / size[order, None]
    return F.cross_entropy(model[1](out)[torch.argsort(order)], y, reduction="none")


@pytest.mark.parametrize("seed", range(8))
def test_rows_sorted_by_their_length(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    batch = torch.randn(6, 7, 4).double(), torch.randint(1, 8, (6,)), torch.randint(0, 3, (6,))
    expected, _ = brute_force(model, lengths, batch, 0.05, list(range(6)))
    assert_close(Engine(model, lengths, clip=0.05)(batch).sum, expected, 1e-9)


def test_what_no_synthetic_row_shows_is_found_during_the_run() -> None:
    class Far(nn.Module):
        def forward(self, x: Tensor) -> Tensor:  # values that are drawn for no check
            return x - x.mean(0) * (x > 500).any()

    model = nn.Sequential(Far(), nn.Linear(4, 3))
    engine = Engine(model, classify, clip=1.0)
    with pytest.raises(RowsMixed, match="Nothing of this step was released"):
        engine((torch.rand(32, 4) * 1000, torch.randint(0, 3, (32,))))


def test_a_model_with_dropout_passes_the_check_during_the_run() -> None:
    model = nn.Sequential(nn.Linear(4, 24), nn.Dropout(0.5), nn.Linear(24, 3))
    engine = Engine(model, classify, clip=1.0, microbatch=10)
    for _ in range(40):
        engine(labelled(), unit_ids=torch.arange(32) // 3)


def test_the_check_during_the_run_is_rare() -> None:
    from tacit.gradients._spot import due

    looked = [step for step in range(20000) if due(step, 10) is not None]
    assert looked[0] == 0
    assert len(looked) <= 260  # 20,000 / 128 and some at the start
    assert {due(step, 10) for step in looked} == set(range(10))


class Clinics(nn.Module):
    """A head for every clinic."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor, clinic: Tensor) -> Tensor:
        found = x.new_zeros(len(x), 3)
        for number, head in enumerate(self.heads):
            mine = torch.nonzero(clinic == number).flatten()
            if len(mine):
                found = found.index_put((mine,), head(x[mine]))
        return found


def test_a_batch_of_one_clinic_raises_nothing_that_tells_which() -> None:
    """The sentence "the loss does not reach heads.1, heads.2" said that everybody in the batch is of clinic 0."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2], reduction="none")

    engine = Engine(Clinics(), loss, clip=1.0)
    for clinics in (torch.arange(12) % 3, torch.zeros(12, dtype=torch.long), torch.tensor([1])):
        rows = len(clinics)
        total = engine((torch.randn(rows, 4), clinics, torch.randint(0, 3, (rows,))))
        assert total.private.nonfinite == 0
