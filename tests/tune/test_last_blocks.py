"""Tuning what is trained in the last blocks: the blocks below run once, whatever the number of trials."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import half, works
from torch import Tensor, nn

from tacit import finetune, tune
from tacit.finetune import DPSGD
from tacit.models import ViT, blocks_of
from tacit.privacy import Budget, Ledger, Receipt
from tacit.tune import Hyperparameters

BOX = tune.Space(lr=(0.05, 5.0), steps=(2, 4))
ROWS = 2000


def pictures() -> tuple[Tensor, Tensor]:
    labels = torch.arange(ROWS) % 2
    noise = torch.randn(ROWS, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return noise + labels[:, None, None, None].float(), labels


def vit() -> ViT:
    torch.manual_seed(1)
    return ViT(channels=1, classes=2, size=8, patch=4, width=8, depth=3, heads=2)


def sampled(point: Hyperparameters) -> finetune.Optimizer:
    return DPSGD(batch_size=200, steps=point.steps, lr=point.lr)


def trainable(**more: Any) -> tune.Finetuning:
    options: dict[str, Any] = {"size": ROWS, "scheme": "selective", "last_blocks": 1, "optimizer": sampled}
    return tune.Finetuning(vit(), pictures(), **(options | more))


class Counted:
    """How many rows went through the first block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        plain = type(blocks_of(vit())[0][1]).forward

        def forward(block: nn.Module, inputs: Tensor) -> Tensor:
            if getattr(block, "counts", False):
                self.rows += len(inputs)
            return plain(block, inputs)  # type: ignore[no-any-return]

        monkeypatch.setattr(type(blocks_of(vit())[0][1]), "forward", forward)


def test_a_search_runs_the_blocks_below_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    model = vit()
    blocks_of(model)[0][1].counts = True  # type: ignore[assignment]  # its copies do, too
    mine = tune.Finetuning(model, pictures(), size=ROWS, scheme="lora", last_blocks=1, optimizer=sampled)
    once = counted.rows
    assert once >= ROWS  # and synthetic rows, on which is tried whether rows mix
    ledger = Ledger("sqlite://")
    drawn = {"seed": 0, "draw_seed": 0}  # a search may miss: with fresh noise one in some hundred does
    found = tune.linear_scaling(mine, BOX, Budget(8.0, 1e-5), ledger=ledger, subject="people", **drawn)
    assert counted.rows - once < 500  # not one of its people's rows: synthetic ones, for the check
    assert len(found.trials) == 6
    assert all(trial.score is not None for trial in found.trials)
    assert ledger.spent("people").epsilon <= 8.0
    inputs, labels = pictures()
    with torch.inference_mode():
        assert (found.model(inputs).argmax(1) == labels).double().mean() > 0.8  # type: ignore[misc]


@pytest.mark.parametrize("measure", ["loss", "accuracy"])
def test_a_score_is_that_of_the_whole_model(measure: Any) -> None:
    cached, whole = trainable(measure=measure), trainable(measure=measure, last_blocks=None)
    model = vit()
    torch.testing.assert_close(cached.score(model), whole.score(model), atol=1e-5, rtol=1e-5)


def test_units_of_several_rows() -> None:
    owners = torch.arange(ROWS) // 4
    mine = trainable(size=ROWS // 4, unit="patient", unit_ids=owners)
    whole = trainable(size=ROWS // 4, unit="patient", unit_ids=owners, last_blocks=None)
    assert str(mine.unit) == "patient"
    assert len(mine.score(vit())) == ROWS // 4
    torch.testing.assert_close(mine.score(vit()), whole.score(vit()), atol=1e-5, rtol=1e-5)


def test_trials_in_other_processes(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    options: dict[str, Any] = {"trials": 2, "ledger": ledger, "subject": "people", "runner": tune.Processes(2)}
    found = tune.random_search(trainable(), BOX, Budget(8.0, 1e-5), **options)
    assert [trial.failed for trial in found.trials] == [False, False]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="leave last_blocks= out to split them"):
        trainable().split(0.5)
    with pytest.raises(ValueError, match="below the number of blocks, 3"):
        trainable(last_blocks=3)
    for wrong in (1.5, "1", True, 0):
        with pytest.raises(ValueError, match="last_blocks is whole, at least 1"):
            trainable(last_blocks=wrong)
    with pytest.raises(ValueError, match="caches activations by itself"):
        tune.Finetuning(vit(), finetune.cache_blocks(vit(), pictures(), last_blocks=1), size=ROWS, last_blocks=1)
    with pytest.raises(ValueError, match="init is 'pretrained' or 'scratch'"):
        trainable(init="scrach")
    with pytest.raises(ValueError, match="cached of the pretrained model"):
        trainable(init="scratch")


def test_a_score_leaves_the_model_as_it_was() -> None:
    model = vit().train()
    model.head.requires_grad_(False)
    parameters = [p.requires_grad for p in model.parameters()]
    expected = trainable().score(model)
    assert [p.requires_grad for p in model.parameters()] == parameters
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(trainable().score(vit().requires_grad_(False)), expected)


def test_activations_in_a_file_are_refused_to_processes_and_serve_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tacit.finetune._features.LARGE", 1000)  # in place of a gigabyte
    ledger, mine = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"), trainable()
    search = partial(tune.random_search, mine, BOX, Budget(8.0, 1e-5), trials=2, ledger=ledger, subject="people")
    with pytest.raises(ValueError, match="larger than a gigabyte"):
        search(runner=tune.Processes(2))
    assert ledger.get_subject("people") is None
    assert not any(trial.failed for trial in search().trials)


class Unsendable(nn.Linear):
    """A model with something that no other process can have."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.own = lambda: None


def odd(point: Hyperparameters, mu: float, receipt: Receipt) -> nn.Module:
    works(point, mu, receipt)
    return Unsendable()


def test_a_model_that_no_process_can_hand_back_is_refused_before_a_charge(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    options: dict[str, Any] = {"score": half, "size": 1000, "ledger": ledger, "subject": "people"}
    with pytest.raises(ValueError, match="way back from another process failed in a dry run"):
        tune.random_search(odd, BOX, Budget(8.0, 1e-5), trials=2, runner=tune.Processes(2), **options)
    assert not ledger.entries()
