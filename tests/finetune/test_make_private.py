"""A loop of one's own through `make_private`: the weights of `fit`, refusals before any charge, and no way around."""

import contextlib
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, net, people, same_bits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import tacit
from tacit.finetune import DPSGD, Classes, PrivateLoop, fit
from tacit.finetune._torch_optimizer import rehearse_optimizer
from tacit.privacy import Budget, BudgetExceeded, Ledger, Mode, accounting, events

COUNT, BATCH, STEPS, CLIP = 24, 8, 6, 0.5
RUN: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "clip": CLIP, "size": COUNT, "seed": SEED}


def loader(data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(data or TensorDataset(*people(COUNT)), **({"batch_size": BATCH, "shuffle": True} | options))


LOADER = loader()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.3, "momentum": 0.9} | options))


def begin(model: nn.Module | None = None, **more: Any) -> PrivateLoop:
    """`make_private` on the usual net and rows, on a ledger in memory unless one is given."""
    model = model or net()
    optimizer = more.pop("optimizer", None) or sgd(model)
    rows, loss = more.pop("loader", LOADER), more.pop("loss", None) or nn.CrossEntropyLoss()
    if "steps" not in more:
        more = {"epochs": STEPS // (COUNT // BATCH)} | more
    return tacit.make_private(model, optimizer, rows, loss, **({"ledger": Ledger("sqlite://")} | RUN | more))


def go(loop: PrivateLoop) -> PrivateLoop:
    for batch in loop:
        loop.step(batch)
    return loop


def fitted(model: nn.Module | None = None, data: Any = None, **more: Any) -> nn.Module:
    """The same run through `fit`."""
    optimizer = more.pop("optimizer", None) or DPSGD(batch_size=BATCH, steps=STEPS, clip=CLIP, lr=0.3, momentum=0.9)
    options = {k: v for k, v in RUN.items() if k != "clip"} | {"scheme": "full", "head": "keep"} | more
    return fit(model or net(), data or people(COUNT), optimizer=optimizer, ledger=Ledger("sqlite://"), **options).model


# The same weights as `fit`


def test_the_weights_are_those_of_fit() -> None:
    assert same_bits(go(begin()).model, fitted())


@pytest.mark.parametrize("rule", ["adam", "adamw"])
def test_other_optimizers_give_the_weights_of_fit(rule: str) -> None:
    model = net()
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[rule]
    loop = begin(model, optimizer=kind(model.parameters(), lr=0.05, weight_decay=0.01, foreach=True))
    same = DPSGD(batch_size=BATCH, steps=STEPS, clip=CLIP, lr=0.05, weight_decay=0.01, rule=rule)
    assert same_bits(go(loop).model, fitted(optimizer=same))


def test_units_give_the_weights_of_fit() -> None:
    ids = [f"patient {i % 9}" for i in range(COUNT)]
    both = {"unit": "patient", "unit_ids": ids, "size": 9}
    loop = go(begin(steps=STEPS, batch_size=4, **both))
    same = DPSGD(batch_size=4, steps=STEPS, clip=CLIP, lr=0.3, momentum=0.9)
    assert same_bits(loop.model, fitted(optimizer=same, **both))
    assert str(loop.guarantee.unit) == "patient"


def test_some_rows_of_each_unit_give_the_weights_of_fit() -> None:
    ids = [f"patient {min(i, 8)}" for i in range(COUNT)]  # the last one has sixteen rows
    both = {"unit": "patient", "unit_ids": ids, "size": 9, "rows_each": 2}
    loop = go(begin(steps=STEPS, batch_size=4, **both))
    same = DPSGD(batch_size=4, steps=STEPS, clip=CLIP, lr=0.3, momentum=0.9)
    assert same_bits(loop.model, fitted(optimizer=same, **both))
    assert not same_bits(loop.model, go(begin(steps=STEPS, batch_size=4, **(both | {"rows_each": None}))).model)


def test_a_scheduler_gives_the_weights_of_fit() -> None:
    model = net()
    optimizer = sgd(model, momentum=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / STEPS)
    loop = begin(model, optimizer=optimizer)
    for batch in loop:
        loop.step(batch)
        scheduler.step()
    same = DPSGD(batch_size=BATCH, steps=STEPS, clip=CLIP, lr=0.3, momentum=0.0, schedule="linear")
    assert same_bits(loop.model, fitted(optimizer=same))


def per_sample(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Named(Dataset[Any]):
    """Rows as mappings, as transformers has them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        inputs, labels = people(COUNT)
        return {"x": inputs[i], "labels": labels[i]}


class Keyed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


LOSSES: dict[str, Callable[[], Any]] = {
    "a function of outputs and targets": lambda: functional.cross_entropy,
    "a criterion without reduction": lambda: nn.CrossEntropyLoss(reduction="none"),
    "a function of model and batch": lambda: per_sample,
    "a task": lambda: Classes(3),
}


@pytest.mark.parametrize("form", LOSSES)
def test_every_form_of_loss_is_the_same_loss(form: str) -> None:
    criterion = nn.CrossEntropyLoss()
    loop = go(begin(loss=LOSSES[form]()))
    assert same_bits(loop.model, fitted())
    assert criterion.reduction == "mean"


def test_rows_as_mappings_and_a_collate_function() -> None:
    model = Keyed(*net())
    loop = go(begin(model, loader=loader(Named())))
    assert same_bits(loop.model, fitted())

    def stacked(items: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([i["x"] for i in items]), "labels": torch.stack([i["labels"] for i in items])}

    loop = go(begin(Keyed(*net()), loader=loader(Named(), collate_fn=stacked)))
    assert same_bits(loop.model, fitted())


def test_workers_read_the_same_rows() -> None:
    assert same_bits(go(begin(loader=loader(Named(), num_workers=2), model=Keyed(*net()))).model, fitted())


def test_the_mean_over_a_rows_entries_is_torchs() -> None:
    """Mean squares of several outputs, and cross entropy over positions of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(COUNT, 4, generator=generator), torch.randn(COUNT, 3, generator=generator)

    def squares(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean(1)

    one = go(begin(net().float(), loader=loader(TensorDataset(x, y)), loss=nn.MSELoss()))
    other = go(begin(net().float(), loader=loader(TensorDataset(x, y)), loss=squares))
    assert same_bits(one.model, other.model)

    words = torch.randint(0, 5, (COUNT, 6), generator=generator)
    words[:, 4:] = -100
    classes = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.ConvTranspose1d(1, 5, 3))  # rows x classes x positions

    def entropies(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0])[:, :, :4], batch[1][:, :4], reduction="none").mean(1)

    start = {name: value.clone() for name, value in classes.state_dict().items()}
    one = go(begin(classes, loader=loader(TensorDataset(x, words)), loss=nn.CrossEntropyLoss()))
    first = [p.detach().clone() for p in one.model.parameters()]
    classes.load_state_dict(start)
    other = go(begin(classes, loader=loader(TensorDataset(x, words)), loss=entropies))
    for a, b in zip(first, other.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


# What is promised


def test_one_charge_for_the_whole_run_at_the_price_of_its_event() -> None:
    """q, T and sigma of the receipt, put into the accountant by hand, give the epsilon that was asked for."""
    with Ledger("sqlite://") as ledger:
        loop = begin(ledger=ledger, subject="clinic", seed=None)
        assert [entry.kind for entry in ledger.entries()] == ["subject", "charge"]
        event = events.poisson(BATCH / COUNT, events.gaussian(loop.noise_multiplier), steps=STEPS)
        found = accounting.guarantee(event, delta=1e-5, neighbours="add-remove").epsilon
        assert 4.98 < found <= 5.0
        assert found == pytest.approx(loop.guarantee.epsilon, abs=0.02)
        go(loop)
        assert loop.done == STEPS
        assert [entry.kind for entry in ledger.entries()] == ["subject", "charge", "settle"]
        with pytest.raises(BudgetExceeded):
            begin(ledger=ledger, subject="clinic", seed=None)


def test_without_a_size_the_number_of_units_is_public_and_the_relation_says_so() -> None:
    loop = begin(size=None)
    assert str(loop.guarantee.neighbours) == "zero-out"
    assert same_bits(go(loop).model, go(begin()).model)  # at the same noise
    with pytest.raises(ValueError, match="Give size="):
        begin(size=None, neighbours="add-remove")


def test_empty_batches_take_part_and_rows_without_a_number_are_zero() -> None:
    """At a rate of 1/200 most draws are empty; NaN and infinite rows leave no trace in the weights."""
    inputs, labels = people(COUNT)
    inputs[3], inputs[5] = math.nan, math.inf
    loop = go(begin(loader=loader(TensorDataset(inputs, labels)), size=200, batch_size=1, steps=30))
    assert loop.done == 30
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())

    inputs[3], inputs[5] = 77.0, -77.0

    def odd(model: nn.Module, batch: Any) -> Tensor:
        return per_sample(model, batch) / (batch[0][:, 0].abs() < 70).double()  # x / 0 for two rows

    loop = go(begin(loader=loader(TensorDataset(inputs, labels)), loss=odd))
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())


class Measured(Dataset[Any]):
    """Targets that are Python's numbers, every third a whole one, as JSON has them; the row at `fails` is missing."""

    def __init__(self, fails: int | None, **shape: Any) -> None:
        self.fails, self.shape = fails, shape

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        if i == self.fails:
            raise OSError("no such file")
        target = i if i % 3 == 2 else i + 0.5
        return {"x": people(COUNT)[0][i], "labels": target} | (self.shape if i % 3 == 2 else {})


def alone(items: list[Any]) -> Any:
    """Rows as they are, with what only some have."""
    return {key: torch.as_tensor(items[0][key])[None] for key in items[0]}


@pytest.mark.parametrize("options", [{}, {"collate_fn": alone}])
@pytest.mark.parametrize("shape", [{}, {"weight": 2.0}])
def test_one_row_that_fails_does_not_change_how_others_are_read(shape: Any, options: Any) -> None:
    def summed(fails: int | None) -> Tensor:
        found: list[Tensor] = []
        more: dict[str, Any] = {"loader": loader(Measured(fails, **shape), **options), "steps": 1, "batch_size": COUNT}
        more["curator"] = lambda event: found.extend(getattr(event, "clipped_sum", event).sum.values())
        go(begin(loss=lambda model, batch: (model(batch["x"]).sum(1) - batch["labels"]).square(), **more))
        return torch.cat([part.flatten() for part in found])

    assert 0 < float((summed(None) - summed(COUNT - 2)).norm()) <= CLIP * (1 + 1e-9)


def test_the_noise_is_not_that_of_the_next_run() -> None:
    a, b = (go(begin(seed=None)) for _ in range(2))
    assert not same_bits(a.model, b.model)


# Nothing but Poisson subsamples


def test_batches_of_another_loader_are_refused() -> None:
    loop, shuffled = begin(), loader()
    before = [p.detach().clone() for p in loop.model.parameters()]
    for batch in shuffled:
        with pytest.raises(TypeError, match="no such subsample"):
            loop.step(batch)
    inputs, labels = people(COUNT)
    drawn = torch.rand(COUNT) < BATCH / COUNT
    with pytest.raises(TypeError, match="drawn by hand"):
        loop.step((inputs[drawn], labels[drawn]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="another private loop"):
        loop.step(next(iter(begin())))
    assert loop.done == 0
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(*people(COUNT), strict=True)


ODD_LOADERS: dict[str, Callable[[], Any]] = {
    "a sampler of its own": lambda: loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT)),
    "sampler of its own": lambda: loader(
        shuffle=False, sampler=RandomSampler(TensorDataset(*people(COUNT)), replacement=True)
    ),
    "makes its batches itself": lambda: DataLoader(
        TensorDataset(*people(COUNT)), batch_sampler=Mine(SequentialSampler(range(COUNT)), 4, False)
    ),
    "A stream": lambda: DataLoader(Stream(), batch_size=4),
    "not list": lambda: [people(COUNT)],
}


class Mine(BatchSampler):
    pass


@pytest.mark.parametrize("said", ODD_LOADERS)
def test_loaders_whose_order_is_part_of_them_are_refused(said: str) -> None:
    with Ledger("sqlite://") as ledger, pytest.raises((ValueError, TypeError), match=said):
        begin(loader=ODD_LOADERS[said](), ledger=ledger)


def test_a_plain_or_shuffled_loader_is_re_made() -> None:
    assert same_bits(go(begin(loader=loader(shuffle=False))).model, go(begin()).model)


# The loop is the user's


def test_epochs_of_the_loader_are_the_whole_run() -> None:
    loop = begin()
    assert len(loop.loader) == COUNT // BATCH
    for _ in range(STEPS // len(loop.loader)):
        for batch in loop.loader:
            loop.step(batch)
    assert same_bits(loop.model, fitted())
    with pytest.raises(RuntimeError, match="All 6 private steps"):
        next(iter(loop.loader))
    with pytest.raises(RuntimeError, match="All 6 private steps"):
        next(iter(loop))


def test_backward_and_the_users_own_lines() -> None:
    loop = begin()
    for batch in loop:
        loop.optimizer.zero_grad()
        loop.backward(batch)
        loop.optimizer.step()
    assert same_bits(loop.model, fitted())


def test_a_batch_is_for_one_step() -> None:
    loop = begin()
    batch = next(iter(loop))
    loop.step(batch)
    with pytest.raises(RuntimeError, match="was used"):
        loop.step(batch)
    assert loop.done == 1


def test_a_backward_of_ones_own_is_refused_at_the_optimizer() -> None:
    loop = begin()
    inputs, labels = people(COUNT)
    optimizer = loop.optimizer
    loop.backward(next(iter(loop)))
    functional.cross_entropy(loop.model(inputs), labels).backward()
    with pytest.raises(RuntimeError, match="without clipping and noise"):
        optimizer.step()
    optimizer.zero_grad()
    functional.cross_entropy(loop.model(inputs), labels).backward()
    with pytest.raises(RuntimeError, match="without clipping and noise"):
        optimizer.step()
    optimizer.zero_grad()
    loop.backward(next(iter(loop)))
    optimizer.step(lambda: 0.0)  # a closure that computes nothing is harmless
    with pytest.raises(RuntimeError, match="without clipping and noise"):
        optimizer.step(lambda: functional.cross_entropy(loop.model(inputs), labels).backward())  # type: ignore[arg-type]
    go(loop)  # what was added is replaced; and when the run is over, the optimizer is its owner's again
    functional.cross_entropy(loop.model(inputs), labels).backward()
    optimizer.step()


def test_what_a_loop_does_in_between_changes_nothing() -> None:
    """A second step on a released gradient, evaluation, an average of weights: all of it is post-processing."""
    loop, inputs = begin(), people(COUNT)[0]
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    for batch in loop:
        loop.step(batch)
        average.update_parameters(loop.model)
        loop.model.eval()
        with torch.no_grad():
            loop.model(inputs)
        torch.rand(7)
        loop.model.train()
    assert same_bits(loop.model, fitted())
    twice = begin()
    batch = next(iter(twice))
    twice.backward(batch)
    twice.optimizer.step()
    twice.optimizer.step()
    assert twice.done == 1


def test_several_groups_and_frozen_parameters() -> None:
    model = net()
    model[0].requires_grad_(False)
    kept = model[0].weight.clone()
    groups = [{"params": model[2].weight, "lr": 0.3}, {"params": model[2].bias, "lr": 0.0}, {"params": model[0].weight}]
    bias = model[2].bias.detach().clone()
    loop = go(begin(model, optimizer=torch.optim.SGD(groups, lr=1.0)))
    assert torch.equal(model[0].weight, kept)
    assert torch.equal(model[2].bias, bias)
    assert not torch.equal(model[2].weight, net()[2].weight)
    assert loop.done == STEPS


def test_parameters_that_change_later_are_refused_and_the_step_is_not_lost() -> None:
    loop = begin()
    head, loop.model[2] = loop.model[2], nn.Linear(5, 3).double()
    batch = next(iter(loop))
    with pytest.raises(ValueError, match="created, replaced or unfrozen"):
        loop.step(batch)
    loop.model[2] = head
    go(loop)
    assert same_bits(loop.model, fitted())


def test_errors_in_the_middle_of_an_epoch_lose_nothing() -> None:
    """The same batch again is the same release: the run ends with the weights that it would have had."""
    calls = [-(10**9)]

    def sometimes(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 0:
            raise KeyboardInterrupt
        return per_sample(model, batch)

    loop = begin(loss=sometimes)
    calls[0] = -20
    with contextlib.suppress(KeyboardInterrupt):
        go(loop)
    assert 0 < loop.done < STEPS
    go(loop)
    assert loop.done == STEPS
    assert same_bits(loop.model, fitted())


def test_leaving_early_settles_what_was_not_used() -> None:
    """In a mode that refunds; two of six Gaussian releases cost a third of mu squared."""
    with Ledger("sqlite://") as ledger:
        ledger.subject("clinic", Budget(5.0, 1e-5), neighbours="zero-out")
        with begin(ledger=ledger, subject="clinic", size=None, batch_size=COUNT, steps=6, seed=None) as loop:
            whole = ledger.spent("clinic").mu or 0.0
            for batch in loop:
                loop.step(batch)
                if loop.done == 2:
                    break
        assert (ledger.spent("clinic").mu or 0.0) == pytest.approx(whole / math.sqrt(3), rel=1e-6)
        assert loop.guarantee.epsilon == pytest.approx(5.0)  # releases may have chosen when: the cap holds
        with pytest.raises(RuntimeError, match="the loop has ended"):
            loop.step(batch)
    with Ledger("sqlite://") as ledger:
        loop = begin(ledger=ledger)
        loop.step(next(iter(loop)))
        loop.finish()
        assert ledger.get_subject("fine-tuning") is not None
        assert loop.guarantee.epsilon == pytest.approx(5.0, abs=0.02)  # a plan refunds nothing


def test_a_loop_is_not_pickled_and_its_model_is() -> None:
    loop = begin()
    with pytest.raises(TypeError, match=r"private\.save"):
        pickle.dumps(loop)
    pickle.dumps(loop.model)
    assert "0 of 6 steps" in repr(loop)
    assert "PrivateBatch" in repr(next(iter(loop)))


def test_dropout_and_frozen_statistics() -> None:
    """Training mode may come later; layers with running statistics stay frozen in private steps."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    with pytest.raises(ValueError, match="is live"):
        begin(model)
    model[1].eval()
    loop = begin(model)
    before = model[1].running_mean.clone()  # type: ignore[union-attr,operator]
    model.train()
    go(loop)
    assert torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]
    assert loop.done == STEPS


def test_running_statistics_that_private_rows_moved_are_put_back() -> None:
    """A loss that is computed to be looked at, in training mode, must not leave the rows' mean in the model."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    model[1].eval()
    kept = {name: value.clone() for name, value in model[1].named_buffers()}
    loop = begin(model)
    for batch in loop:
        loop.step(batch)
        model.train()
        model(100 * people(COUNT)[0])
    assert all(torch.equal(value, kept[name]) for name, value in model[1].named_buffers())


def test_a_loop_that_was_given_up_does_not_stand_in_the_way_of_the_next() -> None:
    model = net()
    optimizer = sgd(model)
    given_up = begin(model, optimizer=optimizer)
    given_up.step(next(iter(given_up)))
    assert go(begin(model, optimizer=optimizer)).done == STEPS


def test_the_rehearsal_needs_no_second_model() -> None:
    """Of a layer of 16 million numbers, the copy that takes a step on zeros has four."""
    seen: list[int] = []

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
            return super().step(closure)

    large = nn.Linear(4000, 4000, bias=False)
    rehearse_optimizer(Counts(large.parameters(), lr=0.1, momentum=0.9))
    assert seen == [4]


def test_what_is_saved(tmp_path: Path) -> None:
    loop = go(begin(ledger=Ledger(f"sqlite:///{tmp_path / 'l.db'}"), seed=None))
    folder = loop.save(tmp_path / "out", format="state_dict")
    assert {"privacy-card.md", "guarantee.json"} <= {path.name for path in folder.iterdir()}
    assert loop.receipt in (folder / "guarantee.json").read_text()
    loop.finish()  # again: nothing


# Mistakes cost nothing


def charged(ledger: Ledger) -> list[str]:
    return [entry.kind for entry in ledger.entries() if entry.kind == "charge"]


class Broken(Named):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        found = super().__getitem__(i)
        return {"x": torch.tensr(found["x"]), "labels": found["labels"]}  # type: ignore[attr-defined]


def broken_collate(items: list[Any]) -> Any:
    return torch.stack([item["inputs"] for item in items])


def twice(items: list[Any]) -> Any:
    return {key: torch.stack([items[0][key]] * 2) for key in items[0]}


def broken_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropi(model(batch[0]), batch[1])  # type: ignore[attr-defined, no-any-return]


TYPOS: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"loss": broken_loss}, "cross_entropi"),
    "loss of one number": ({"loss": lambda m, b: per_sample(m, b).mean()}, "one number per row"),
    "loss with a sum": ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "reduction='sum'"),
    "loss class": ({"loss": nn.CrossEntropyLoss}, "the class CrossEntropyLoss"),
    "transform": ({"loader": loader(Broken())}, "tensr"),
    "collate": ({"loader": loader(Named(), collate_fn=broken_collate)}, "Rows cannot be read"),
    "collate of two rows": ({"loader": loader(Named(), collate_fn=twice)}, "one row for each item"),
    "rows with words": ({"loader": loader(Named(), collate_fn=lambda _: ["x"])}, "hold a str"),
    "targets": ({"loader": loader(TensorDataset(torch.randn(24, 4).double()))}, r"\(inputs, targets\)"),
    "rows of the wrong width": ({"loader": loader(TensorDataset(torch.randn(24, 9), torch.zeros(24).long()))}, "take"),
    "labels from 1 to 3": (
        {"loader": loader(TensorDataset(people(COUNT)[0], people(COUNT)[1] + 1))},
        "number them from 0",
    ),
    "labels of a task": (
        {"loader": loader(TensorDataset(people(COUNT)[0], people(COUNT)[1] + 1)), "loss": Classes(3)},
        "number them from 0",
    ),
    "ids too few": ({"unit_ids": [1, 2, 3]}, "one integer or string per row"),
    "unit without ids": ({"unit": "patient"}, "needs to know whose"),
    "no epochs": ({"epochs": None}, "needs epochs="),
    "clip": ({"clip": -1.0}, "clip"),
    "optimizer class": ({"optimizer": torch.optim.SGD}, "not SGD itself"),
    "optimizer of tacit": ({"optimizer": DPSGD(batch_size=4, steps=2)}, "finetune.fit"),
    "optimizer of another model": ({"optimizer": sgd(net())}, "does not have"),
    "optimizer with a closure": ({"optimizer": "lbfgs"}, "LBFGS cannot take a step"),
    "sparse optimizer": ({"optimizer": "sparse"}, "SparseAdam cannot take a step"),
    "checkpoint in memory": ({"checkpoint": "run.st", "ledger": None}, "ledger"),
    "stateful": ({"stateful": {"scheduler": 3}}, "no state_dict"),
}


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_costs_nothing(typo: str) -> None:
    changes, said = TYPOS[typo]
    model = net()
    kinds = {"lbfgs": torch.optim.LBFGS, "sparse": torch.optim.SparseAdam}
    kind = changes.get("optimizer")
    if isinstance(kind, str):
        changes = changes | {"optimizer": kinds[kind](list(model.parameters()))}
    with Ledger("sqlite://") as ledger:
        with pytest.raises((ValueError, TypeError), match=said):
            begin(model, **({"ledger": ledger} | changes))
        assert not charged(ledger)


def test_the_optimizer_is_not_stepped_by_its_rehearsal() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    begin(model, optimizer=optimizer)
    assert same_bits(model, net())
    assert not optimizer.state
    assert scheduler.last_epoch == 0


def test_subjects_in_the_renyi_mode_pay_too() -> None:
    with Ledger("sqlite://") as ledger:
        ledger.subject("clinic", Budget(5.0, 1e-5), mode=Mode.RENYI, order=8.0)
        loop = begin(ledger=ledger, subject="clinic", seed=None)
        loop.step(next(iter(loop)))
        before = ledger.spent("clinic").epsilon
        loop.finish()
        assert ledger.spent("clinic").epsilon < before
