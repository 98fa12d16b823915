"""Rows read ahead of time by worker processes: the same releases, the same rules for rows that fail, clear endings."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SEED
from PIL import Image
from torch import Tensor, nn

from tacit import CuratorEvent, ErrorEvent, StepEvent
from tacit._refusals import Refusal
from tacit.data import ImageFiles, ImageShape
from tacit.finetune import DPFTRL, DPGD, DPSGD, DPZO, AdpAlloc, AdpClip, Evaluation, fit
from tacit.finetune._shared_rows import Inbox, Outbox
from tacit.finetune._workers import LOST, ahead
from tacit.privacy import Ledger

COUNT = 40


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Items:
    """A data set of files, as it were: it counts who reads, and does odd things with some rows."""

    def __init__(self, *, noisy: bool = False, raises: Path | None = None, dies: Path | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.values, self.targets = torch.randn(COUNT, 6, generator=generator), torch.arange(COUNT) % 3
        self.noisy, self.raises, self.dies, self.owner = noisy, raises, dies, os.getpid()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        elsewhere = os.getpid() != self.owner
        if i == 17 and self.raises is not None and self.raises.exists():
            raise OSError("patient 4711, scan corrupt")
        if i >= 10 and elsewhere and self.dies is not None and self.dies.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        row = self.values[i]
        if self.noisy:  # a transform of somebody else's, with every generator that there is
            row = row + torch.randn(6) + float(np.random.normal()) + random.random()
        return row, self.targets[i]


class Noted:
    """A curator: it hears of problems, and makes one of its own after a step."""

    def __init__(self, after: int | None = None, touch: Path | None = None) -> None:
        self.details: list[str] = []
        self._after, self._touch = after, touch

    def __call__(self, event: CuratorEvent) -> None:
        if isinstance(event, ErrorEvent):
            self.details.append(event.details)
        elif isinstance(event, StepEvent) and event.step == self._after and self._touch is not None:
            self._touch.touch()


def weights(data: Any, optimizer: Any, **more: Any) -> list[Tensor]:
    options: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "size": COUNT, "scheme": "full", "classes": 3}
    fitted = fit(net(), data, optimizer=optimizer, seed=SEED, **(options | more))
    return [p.detach().clone() for p in fitted.model.parameters()]


OPTIMIZERS = {
    "DPSGD": DPSGD(batch_size=10, steps=5),
    "DPGD": DPGD(steps=3),
    "AdpAlloc": AdpAlloc(batch_size=10, steps=6),
    "AdpClip": AdpClip(batch_size=10, steps=4),
    "DPZO": DPZO(batch_size=10, steps=3),
    "DPFTRL": DPFTRL(batches=4, passes=2, strategy="buffered"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_workers_release_the_same_weights(name: str) -> None:
    options = {"neighbours": "zero-out"} if name == "DPFTRL" else {}
    plain, helped = (weights(Items(), OPTIMIZERS[name], workers=workers, **options) for workers in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(plain, helped, strict=True))


@pytest.mark.parametrize("more", [{"rows_each": 1}, {"microbatch": 4}, {}], ids=str)
def test_random_transforms_and_drawn_rows_are_the_same_in_a_worker(more: dict[str, Any]) -> None:
    options = {"unit": "patient", "unit_ids": [f"p{i // 2}" for i in range(COUNT)], "size": COUNT // 2, **more}
    plain, helped, other = (
        weights(Items(noisy=noisy), OPTIMIZERS["DPSGD"], workers=workers, **options)
        for noisy, workers in ((True, 0), (True, 2), (False, 0))
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, helped, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_many_portions_of_one_step_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit.finetune._predictions._BYTES", 6 * 4 * 3)  # three rows at a time
    plain, helped = (weights(Items(noisy=True), OPTIMIZERS["DPSGD"], workers=workers) for workers in (0, 3))
    assert all(torch.equal(a, b) for a, b in zip(plain, helped, strict=True))


def test_features_and_evaluations_are_read_by_workers_too() -> None:
    class Elsewhere(Items):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            here = os.getpid() == self.owner
            if here and i >= 5:  # five units are looked at here, before anything else
                raise OSError("read in the run's own process")
            return super().__getitem__(i)

    told = Noted()
    held = Evaluation(data=Items(), public=True)
    plain = weights(Items(), OPTIMIZERS["DPGD"], scheme="linear", evaluate=held)
    held = Evaluation(data=Elsewhere(), public=True)
    options: dict[str, Any] = {"scheme": "linear", "evaluate": held, "curator": told, "workers": 2}
    helped = weights(Elsewhere(), OPTIMIZERS["DPGD"], **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, helped, strict=True))
    assert not told.details
    options |= {"scheme": "full"}
    weights(Elsewhere(), OPTIMIZERS["DPGD"], **options)
    assert not told.details


def test_a_row_that_fails_in_a_worker_adds_nothing_in_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.touch()

    plain, helped = Noted(), Noted()
    first = weights(Items(raises=broken), OPTIMIZERS["DPGD"], curator=plain)
    second = weights(Items(raises=broken), OPTIMIZERS["DPGD"], curator=helped, workers=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(plain.details) == len(helped.details) == 3  # one a step
    assert all(text.startswith("unit 17:") and "patient 4711" in text for text in helped.details)
    said = capfd.readouterr()
    assert "4711" not in said.out + said.err


def test_a_row_that_fails_in_a_worker_stops_a_run_that_may_be_replayed(tmp_path: Path, ledger: Ledger) -> None:
    """With checkpoint=: no second sum under the same noise. When it can be read again, the run goes on as it was."""
    optimizer, broken = DPGD(steps=9), tmp_path / "broken"

    options: dict[str, Any] = {"ledger": ledger, "subject": "clinic", "checkpoint": tmp_path / "run", "every": 1}
    with pytest.raises(OSError, match="Some rows cannot be read now"):
        weights(Items(raises=broken), optimizer, workers=2, curator=Noted(1, broken), **options)
    spent = ledger.spent("clinic")
    broken.unlink()
    resumed = weights(Items(raises=broken), optimizer, workers=1, **options)
    assert ledger.spent("clinic") == spent
    with Ledger(f"sqlite:///{tmp_path / 'other.db'}") as other:
        whole = weights(Items(), optimizer, **(options | {"ledger": other, "checkpoint": tmp_path / "other"}))
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))


def test_a_killed_worker_is_a_clear_error_and_the_run_goes_on_later(tmp_path: Path, ledger: Ledger) -> None:
    deadly = tmp_path / "deadly"
    options: dict[str, Any] = {"ledger": ledger, "subject": "clinic", "checkpoint": tmp_path / "run", "every": 1}

    with pytest.raises(OSError, match="A worker process that reads rows has ended"):
        weights(Items(dies=deadly), DPGD(steps=8), workers=2, curator=Noted(1, deadly), **options)
    deadly.unlink()
    resumed = weights(Items(dies=deadly), DPGD(steps=8), workers=2, **options)
    with Ledger(f"sqlite:///{tmp_path / 'other.db'}") as other:
        whole = weights(Items(), DPGD(steps=8), **(options | {"ledger": other, "checkpoint": tmp_path / "other"}))
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))


def test_features_of_a_row_that_cannot_be_read_stop_a_run_that_may_be_replayed(tmp_path: Path, ledger: Ledger) -> None:
    """Features are computed anew after a kill: NaN now and numbers then would be two sums under one noise."""
    broken = tmp_path / "broken"
    broken.touch()
    options: dict[str, Any] = {"scheme": "linear", "ledger": ledger, "subject": "clinic"}
    with pytest.raises(Refusal, match=r"Some rows cannot be read.*Nothing was charged"):
        weights(Items(raises=broken), DPGD(steps=2), checkpoint=tmp_path / "run", **options)
    assert ledger.get_subject("clinic") is None
    weights(Items(raises=broken), DPGD(steps=2), **options)  # nothing is replayed: its unit adds zero


def test_data_that_cannot_be_read_elsewhere_are_refused_before_the_charge(ledger: Ledger) -> None:
    class Here(Items):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            if os.getpid() != self.owner:
                raise OSError("patient 4711: this file is open in another process")
            return super().__getitem__(i)

    with pytest.raises(Refusal, match="cannot be read in worker processes: give workers=0"):
        weights(Here(), DPGD(steps=2), workers=1, ledger=ledger, subject="clinic")
    assert ledger.get_subject("clinic") is None
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="workers"):
            weights(Items(), DPGD(steps=2), workers=wrong, ledger=ledger, subject="clinic")


def test_a_pool_ends_with_whoever_asked() -> None:
    """Processes are gone after the block, also where it was left early; one that never answers is not waited for."""
    with ahead(_pid, range(100), 2) as found:
        pids = {next(found)[1] for _ in range(4)}
    assert len(pids) == 2
    assert os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with ahead(_sleep, [60.0], 1):
        pass
    with ahead(_end, range(3), 1) as found, pytest.raises(OSError, match=LOST[:40]):
        next(found)


def _pid(_: int) -> int:
    return os.getpid()


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _end(_: int) -> None:
    raise SystemExit("patient 4711")


def test_jpeg_files_in_workers(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 30, 3), dtype=np.uint8)
    for i, each in enumerate(pixels):
        Image.fromarray(each).save(tmp_path / f"{i}.jpg")
    files = [tmp_path / f"{i}.jpg" for i in range(12)]
    shape = ImageShape(height=8, width=8, mean=(0.5,), std=(0.5,))
    found = []
    for workers in (0, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Tanh(), nn.Linear(4, 2))
        data = ImageFiles(files, [i % 2 for i in range(12)], shape=shape)
        options: dict[str, Any] = {"optimizer": DPSGD(batch_size=4, steps=4), "scheme": "full", "workers": workers}
        fitted = fit(model, data, epsilon=2.0, delta=1e-5, size=12, classes=2, seed=SEED, **options)
        found.append(torch.cat([p.detach().flatten() for p in fitted.model.parameters()]))
    assert torch.equal(*found)


def result(size: int) -> dict[str, Any]:
    whole = torch.randn(size, 4, dtype=torch.float64)
    return {
        "turned": whole.t(),
        "one of many": torch.ones(1).expand(size, 7),
        "flags": whole > 0,
        "bfloat16": whole.to(torch.bfloat16),
        "complex": whole.to(torch.complex64),
        "empty": torch.empty(0, 3),
        "single": torch.tensor(size),
        "sparse": torch.eye(3).to_sparse(),
        "words": ["a", None, size],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    words, *tensors = [(one[name], other[name]) for name in reversed(one)]
    assert all(a.dtype == b.dtype for a, b in tensors)
    return words[0] == words[1] and all(torch.equal(a.to_dense(), b.to_dense()) for a, b in tensors)


def test_results_keep_every_kind_of_tensor() -> None:
    outbox, inbox = Outbox(), Inbox()
    for size in (3, 1, 50, 50, 2, 4000):
        sent = result(size)
        assert same(sent, inbox.unpack(outbox.pack(sent, inbox.free())))


def test_blocks_are_used_again_when_nothing_is_left_of_their_tensors() -> None:
    """A view, or a view of a view, is enough to keep a block as it was."""
    outbox, inbox = Outbox(), Inbox()
    sent = [result(size) for size in (20, 30, 10, 40)]
    kept = [inbox.unpack(outbox.pack(one, inbox.free())) for one in sent]
    assert all(same(one, other) for one, other in zip(sent, kept, strict=True))
    part = kept[1]["turned"][1:].t()[2:5]
    was = part.clone()
    kept[1:3] = []
    numbers = [inbox.free(), inbox.free()]
    assert numbers == [2, 4]  # the third is free; the second is not, so the other is new
    for number in numbers:
        outbox_result = outbox.pack(result(30), number)
        inbox.unpack(outbox_result)
    assert torch.equal(part, was)
    assert same(sent[0], kept[0])
    assert same(sent[3], kept[1])
    del part
    assert inbox.free() == 1


class Warning4711(Items):
    """A decoder that warns of one row, with a number of it; in a worker it prints as well, as decoders in C do."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i == 17:
            warnings.warn("image of 4711 pixels", stacklevel=1)
            if os.getpid() != self.owner:
                os.write(2, b"image of 4711 pixels\n")
        return super().__getitem__(i)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_warning_about_a_row_reaches_the_curator_alone(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[CuratorEvent] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        fit(
            net(),
            Warning4711(),
            optimizer=DPGD(steps=2, lr=0.1),
            epsilon=8.0,
            delta=1e-3,
            size=COUNT,
            ledger=Ledger("sqlite://"),
            subject="people",
            workers=workers,
            curator=heard.append,
        )
    printed = capfd.readouterr()
    assert "4711" not in printed.out + printed.err + "".join(str(each.message) for each in shown)
    told = [event.details for event in heard if isinstance(event, ErrorEvent)]
    assert any("image of 4711 pixels" in details for details in told)
