"""A loop of one's own that is killed and run again: the same weights bit for bit, one charge, and its key is gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, net, people, same_bits
from test_resume import die, fatal, killed, kinds, secrets
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tacit
from tacit.finetune._loop import Run
from tacit.finetune._saving import Store
from tacit.privacy import Ledger

STEPS, EVERY, COUNT = 6, 2, 24


def loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def other_loss(model: nn.Module, batch: Any) -> Tensor:
    return 2 * functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Jittered(Dataset[Any]):
    """Rows with a random transform."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        inputs, labels = people(COUNT)
        return inputs[i] + 0.1 * torch.randn(4).double(), labels[i]


def program(folder: Path, *, at: Callable[[int], object] = lambda _: None, **more: Any) -> nn.Module:
    """What somebody runs, and runs again: epochs, a scheduler and an average of weights."""
    folder.mkdir(exist_ok=True)
    model = more.pop("model", None) or net()
    data = more.pop("data", None) or TensorDataset(*people(COUNT))
    optimizer = torch.optim.Adam(model.parameters(), lr=more.pop("lr", 0.05))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7))
    options: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "epochs": 2, "clip": 0.5, "size": COUNT, "seed": SEED}
    options |= {"checkpoint": folder / "run.st", "every": EVERY, "subject": "clinic"}
    options |= {"stateful": {"scheduler": scheduler, "average": average}}
    with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        private = tacit.make_private(
            model,
            optimizer,
            DataLoader(data, batch_size=8, num_workers=more.pop("workers", 0)),
            more.pop("loss", loss),
            ledger=ledger,
            **(options | more),
        )
        for _ in range(2):
            for batch in private.loader:
                private.step(batch)
                at(private.done)
                scheduler.step()
                average.update_parameters(model)
    return nn.ModuleList([model, average.module])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return program(tmp_path_factory.mktemp("whole"))


MOMENTS: dict[str, Callable[[], object]] = {
    "after the key file": lambda: fatal(Store, "begin"),
    "after the first checkpoint": lambda: fatal(Store, "save"),
    "in the third step": lambda: fatal(Run, "_ask", 3),
    "after a later checkpoint": lambda: fatal(Store, "save", 3),
    "after the last step": lambda: fatal(Run, "step", STEPS),
    "at the end": lambda: fatal(Run, "end"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_changes_nothing(moment: str, whole: nn.Module, tmp_path: Path) -> None:
    def doomed() -> None:
        MOMENTS[moment]()
        program(tmp_path)

    killed(doomed)
    assert same_bits(program(tmp_path), whole)
    assert kinds(tmp_path).count("charge") == 1
    assert not secrets(tmp_path)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_kill_between_a_step_and_the_lines_behind_it(step: int, whole: nn.Module, tmp_path: Path) -> None:
    killed(lambda: program(tmp_path, at=lambda done: die() if done == step else None))
    assert same_bits(program(tmp_path), whole)


def test_a_finished_run_is_handed_out_again(whole: nn.Module, tmp_path: Path) -> None:
    program(tmp_path)
    assert same_bits(program(tmp_path), whole)
    assert kinds(tmp_path).count("charge") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_random_transforms_come_again(workers: int, tmp_path: Path) -> None:
    """Also by other processes: a unit's transforms go by the key, not by who reads it."""
    once = program(tmp_path / "whole", data=Jittered())
    killed(lambda: program(tmp_path, data=Jittered(), at=lambda done: die() if done == 3 else None))
    assert same_bits(program(tmp_path, data=Jittered(), workers=workers), once)


CHANGES: dict[str, dict[str, Any]] = {
    "rows": {"data": TensorDataset(people(COUNT)[0] + 1, people(COUNT)[1])},
    "loss": {"loss": other_loss},
    "learning rate": {"lr": 0.06},
    "clip": {"clip": 0.6},
    "microbatch": {"microbatch": 3},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_refused(what: str, tmp_path: Path, whole: nn.Module) -> None:
    killed(lambda: program(tmp_path, at=lambda done: die() if done == 3 else None))
    with pytest.raises(ValueError, match=r"another run|not what it was"):
        program(tmp_path, **CHANGES[what])
    assert same_bits(program(tmp_path), whole)


def tempered(by: float) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: functional.cross_entropy(by * model(batch[0]), batch[1], reduction="none")


UNSEEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "label smoothing": (
        {"loss": nn.CrossEntropyLoss()},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
    ),
    "what a loss closes over": ({"loss": tempered(1.0)}, {"loss": tempered(1.1)}),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_what_no_fingerprint_sees_is_refused_by_the_sums(what: str, tmp_path: Path) -> None:
    """Two releases with one noise: their difference was 0.14 beside noise of 0.8, with no noise of its own."""
    before, after = UNSEEN[what]
    once = program(tmp_path / "whole", **before)
    killed(lambda: program(tmp_path, **before, at=lambda done: die() if done == 3 else None))
    with pytest.raises(RuntimeError, match="of other sums"):
        program(tmp_path, **after)
    assert same_bits(program(tmp_path, **before), once)
    assert not list(tmp_path.glob("tacit-*"))


def test_a_loop_that_has_changed_is_refused_by_the_sums(tmp_path: Path) -> None:
    killed(lambda: program(tmp_path, every=10, at=lambda done: die() if done == 5 else None))
    (sums,) = tmp_path.glob("tacit-*.sums")
    assert sums.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line)[0] for line in sums.read_text().splitlines() if line] == [0, 1, 2, 3, 4]
    model = net()

    def nudge(done: int) -> None:
        steps.append(done)
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)

    steps: list[int] = []
    with pytest.raises(RuntimeError, match="of other sums"):
        program(tmp_path, every=10, model=model, at=nudge)
    assert steps == [1]  # the first step is the one that was made, and the second would be another


def test_a_line_that_a_kill_has_cut_is_not_read(tmp_path: Path, whole: nn.Module) -> None:
    killed(lambda: program(tmp_path, at=lambda done: die() if done == 3 else None))
    (sums,) = tmp_path.glob("tacit-*.sums")
    sums.write_text(sums.read_text() + "[3, [0.1")
    killed(lambda: program(tmp_path, at=lambda done: die() if done == 5 else None))
    assert same_bits(program(tmp_path), whole)


def test_a_scheduler_has_to_be_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stateful="):
        program(tmp_path, stateful={})
