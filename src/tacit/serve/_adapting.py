"""A model that adapts as it serves: it predicts first, and learns from the same rows later.

Formal guarantee: what leaves is the released parameters of an `adapt.Adapter` and, to whoever sent a row, its own
prediction under them; so the adapter's promise is the service's. Which rows make a batch follows from arrival, sizes
and the clock alone, never from values: rows wait in the order of their arrival, and a batch is the next `batch_size`
of them, or those that there are when the first has waited `wait` seconds. A row that is not well-formed (its shape or
type) is refused before it takes a place. Streams that are neighbours have well-formed rows at the same times.

After every `every` steps the state is saved (`adapt.save_adapter`): after a kill the service goes on exactly there if
no step had begun since, and otherwise with fresh noise behind what was leased. Rows that were waiting are not
used for adaptation, and no row is used twice.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from tacit import _checkpoints as checkpoints
from tacit._refusals import ENDING, recorded_warnings
from tacit.adapt import Adapter, resume_adapter, save_adapter
from tacit.privacy import BudgetExceeded, LedgerError, ReceiptError, Unit
from tacit.serve._observed import log, place_of

_CHECKPOINT, _MARK = "adapter.safetensors", "served"


class QueueFull(Exception):
    """Too many rows wait for adaptation: ask again later."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How requests become batches; all of it public.

    Args:
        wait: Seconds that a row waits at most for its batch to fill.
        queue: Rows that may wait; beyond that requests are refused.
        horizon: Steps after which the model stops adapting; None: never.
        every: Steps between two saves.
        keep: Released versions that are kept to roll back to.
        shadow: Adapt without serving what was adapted.
    """

    wait: float = 5.0
    queue: int = 4096
    horizon: int | None = None
    every: int = 1
    keep: int = 100
    shadow: bool = False

    def __post_init__(self) -> None:
        whole = (self.queue, self.every, self.keep, 1 if self.horizon is None else self.horizon)
        if not self.wait > 0 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in whole):
            raise ValueError("wait is above 0 seconds; queue, horizon, every and keep are whole numbers of at least 1.")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a service says of itself; all of it public.

    Args:
        unit: Whom it protects.
        stopped: Why it adapts no more; None: it adapts.
        steps: Steps that were released.
        served: The version that is served.
        versions: Those that are kept.
        waiting: Rows that wait for adaptation.
        epsilon: What was spent; infinite where nothing is promised.
        guarantee: The promise in words.
    """

    unit: str
    stopped: str | None
    steps: int
    served: int
    versions: list[int]
    waiting: int
    epsilon: float
    guarantee: str | None


@dataclass
class _Waiting:
    """Rows in the order of their arrival, whose they are, and since when they wait."""

    rows: list[Tensor] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    since: list[float] = field(default_factory=list)

    def add(self, rows: Tensor, ids: Sequence[str] | None) -> None:
        self.rows += list(rows)
        self.ids += list(ids or ())
        self.since += [time.monotonic()] * len(rows)


class AdaptingModel:
    """A model, its adapter, and the thread that learns.

    Args:
        make: Makes a fresh adapter of the source model, with the same options each time.
        example: One row of the kind that it takes.
        folder: Where its state and its versions are kept.
        rules: How requests become batches.
        private: The folder of the adapter's private file; by default beside the ledger's file.

    Raises:
        ValueError: The folder belongs to another adapter.
    """

    def __init__(
        self,
        make: Callable[[], Adapter],
        example: Tensor,
        folder: str | Path,
        *,
        rules: Rules | None = None,
        private: str | Path | None = None,
    ) -> None:
        self.rules = rules or Rules()
        self.folder, self._private = Path(folder), private
        (self.folder / "versions").mkdir(parents=True, exist_ok=True)
        self.example = example
        self.adapter = make()
        self.stopped: str | None = None  # why it adapts no more
        self.exact: bool | None = None  # whether a resumed run went on exactly
        self._served: nn.Module = copy.deepcopy(self.adapter.model).eval().requires_grad_(False)
        self._lock, self._parameters = threading.Lock(), threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._stepping = threading.Lock()  # a step, or a roll-back
        self._waiting, self._coming, self._ending, self._busy = _Waiting(), 0, False, False
        self._begin()
        self._thread = threading.Thread(target=self._learn, name="tacit-learner", daemon=True)
        self._thread.start()

    # -- serving -------------------------------------------------------------------------------------------------------

    def predict(self, rows: Tensor, unit_ids: Sequence[str] | None = None) -> tuple[Tensor, int]:
        """Logits of the released parameters, and their version; the rows then wait for adaptation.

        Raises:
            ValueError: Rows of another shape or type, without their unit ids, or more than ever may wait.
            QueueFull: Too many rows wait; nothing was predicted.
        """
        self._check(rows, unit_ids)
        learning = self.stopped is None
        with self._lock:
            if learning:
                self._refuse_beyond(len(rows))
            self._coming += len(rows)
        try:
            rows = rows.to(self.example.dtype)
            with torch.inference_mode(), self._parameters:
                logits, version = predicted(self._served, rows, self.example), self.served
        finally:
            with self._arrived:
                self._coming -= len(rows)
                if learning:
                    self._waiting.add(rows, unit_ids)
                    self._arrived.notify()
        return logits, version

    def offer(self, rows: Tensor, unit_ids: Sequence[str] | None = None) -> None:
        """Rows that were predicted elsewhere, for adaptation.

        Raises:
            ValueError: Rows of another shape or type, without their unit ids, or more than ever may wait.
            QueueFull: Too many rows wait.
        """
        self._check(rows, unit_ids)
        if self.stopped is not None:
            return
        with self._arrived:
            self._refuse_beyond(len(rows))
            self._waiting.add(rows.to(self.example.dtype), unit_ids)
            self._arrived.notify()

    def released(self) -> tuple[int, dict[str, Tensor]]:
        """The version that is served, and its parameters."""
        with self._parameters:
            mine = dict(self._served.named_parameters())
            return self.served, {name: mine[name].detach().clone() for name in self.adapter.parameters}

    def facts(self) -> Facts:
        """What it says of itself."""
        promise = self.adapter.guarantee
        return Facts(
            unit=str(self.adapter.unit),
            stopped=self.stopped,
            steps=self.adapter.steps,
            served=self.served,
            versions=self.versions,
            waiting=self.waiting,
            epsilon=float("inf") if promise is None else promise.epsilon,
            guarantee=None if promise is None else str(promise),
        )

    @property
    def waiting(self) -> int:
        """Rows that wait for adaptation."""
        with self._lock:
            return len(self._waiting.rows)

    @property
    def served(self) -> int:
        """The version that is served."""
        return 0 if self.rules.shadow else self.version

    @property
    def versions(self) -> list[int]:
        """The released versions that are kept; 0 is the source model."""
        kept = (file.stem for file in (self.folder / "versions").glob("*.safetensors"))
        return sorted(int(stem) for stem in kept if stem.isdigit())  # others are being written

    def roll_back(self, version: int) -> None:
        """Serve a kept version, and go on learning from there; released values alone, so it costs nothing.

        Raises:
            ValueError: It is not kept.
        """
        file = self._file(version)
        if not file.exists():
            raise ValueError(f"Version {version} is not kept: there are {', '.join(map(str, self.versions))}.")
        values = load_file(file)
        with self._stepping:
            self.adapter.continue_from(values)
            self._serve(version, values)
            self._save()

    def drain(self, seconds: float = 60.0) -> bool:
        """Wait until every full batch was used and its step saved; whether that happened in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                full = len(self._waiting.rows) >= self.adapter.batch_size and self.stopped is None
                if not full and not self._busy:
                    return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        """Stop learning after the step that is being made, and save."""
        with self._arrived:
            self._ending = True
            self._arrived.notify()
        self._thread.join()

    # -- learning ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Resume what the folder holds, or charge for a new stream and save it before the first row."""
        self.version, file = 0, self.folder / _CHECKPOINT
        if file.exists():
            self.exact = resume_adapter(self.adapter, file, private=self._private)
            self._go_on_from_served()
            self._save()
            self._stop_at_horizon()
            return
        checkpoints.write(self._file(0), save(_values(self.adapter)))
        try:
            self.adapter.start(self.example.unsqueeze(0))
        except BudgetExceeded as error:
            self.stopped = str(error)
            return
        self._save()

    def _learn(self) -> None:
        while (batch := self._next()) is not None:
            rows, ids = batch
            try:
                with self._stepping:
                    self._step(rows, ids)
            except (BudgetExceeded, ReceiptError, LedgerError) as error:
                self.stopped = str(error)  # it serves on with what was released
            except ENDING:
                raise
            except BaseException as error:
                self.stopped = "A step failed; see the service's own log."  # the text may hold private values
                log.error(json.dumps({"stopped": place_of(error)}))
            finally:
                with self._lock:
                    self._busy = False

    def _next(self) -> tuple[Tensor, list[str] | None] | None:
        """The next batch, by the public rule; None when the service ends."""
        size = self.adapter.batch_size
        with self._arrived:
            while True:
                if self._ending:
                    return None
                now, held = time.monotonic(), self._waiting
                oldest = held.since[0] if held.since else None
                if self.stopped is None and oldest is not None:
                    if len(held.rows) >= size or now - oldest >= self.rules.wait:
                        break
                    self._arrived.wait(self.rules.wait - (now - oldest))
                else:
                    self._arrived.wait()
            rows, ids = held.rows[:size], held.ids[:size]
            self._waiting = _Waiting(held.rows[size:], held.ids[size:], held.since[size:])
            self._busy = True
        return torch.stack(rows), ids or None

    def _go_on_from_served(self) -> None:
        """What was served last is newer than the checkpoint after a kill between the two, or a few steps later."""
        mark = self.folder / _MARK
        last = int(mark.read_text()) if mark.exists() else max(self.versions, default=0)
        values, mine = load_file(self._file(last)), _values(self.adapter)
        if any(not torch.equal(value, mine[name]) for name, value in values.items()):
            self.adapter.continue_from(values)
        self._serve(last, values)

    def _step(self, rows: Tensor, ids: list[str] | None) -> None:
        adapter, rules = self.adapter, self.rules
        adapter(rows, unit_ids=ids)
        values = _values(adapter)
        checkpoints.write(self._file(adapter.steps), save(values))
        self._serve(adapter.steps, values)
        for old in self.versions[1 : -rules.keep]:  # the source model stays
            self._file(old).unlink(missing_ok=True)
        if adapter.steps % rules.every == 0:
            self._save()
        self._stop_at_horizon()

    def _stop_at_horizon(self) -> None:
        horizon = self.rules.horizon
        if horizon is not None and self.adapter.steps >= horizon:
            self.stopped = f"The stream's {horizon:,} steps are used: the model is served as it is."

    def _serve(self, version: int, values: dict[str, Tensor]) -> None:
        """Parameters and the number that answers give them change together, and outlive a kill."""
        checkpoints.write(self.folder / _MARK, str(version).encode())
        with self._parameters:
            if not self.rules.shadow:
                put_values(self._served, values)
            self.version = version

    def _save(self) -> None:
        if self.adapter.stream is not None or self.adapter.steps:
            save_adapter(self.adapter, self.folder / _CHECKPOINT, private=self._private)

    def _file(self, version: int) -> Path:
        return self.folder / "versions" / f"{version:08d}.safetensors"

    def _check(self, rows: Tensor, unit_ids: Sequence[str] | None) -> None:
        check_rows(rows, unit_ids, self.example, str(self.adapter.unit))

    def _refuse_beyond(self, rows: int) -> None:
        if rows > self.rules.queue:
            raise ValueError(f"A request has at most {self.rules.queue:,} rows, as many as may wait.")
        if len(self._waiting.rows) + self._coming + rows > self.rules.queue:
            raise QueueFull


def check_rows(rows: Tensor, unit_ids: Sequence[str] | None, example: Tensor, unit: str) -> None:
    """Refuse rows of another shape than the example's, and rows without a unit id where the service needs one."""
    if not len(rows):
        raise ValueError("A request has at least one row.")
    if rows.shape[1:] != example.shape:
        raise ValueError(f"A row has the shape {tuple(example.shape)}, not {tuple(rows.shape[1:])}.")
    if unit == Unit.SAMPLE and unit_ids is not None:
        raise ValueError("This service protects each row by itself: leave unit ids out, or start it with a unit.")
    if unit != Unit.SAMPLE and (unit_ids is None or len(unit_ids) != len(rows)):
        raise ValueError(f"This service protects each {unit}: say whose each row is.")


def predicted(model: nn.Module, rows: Tensor, example: Tensor) -> Tensor:
    """Logits of rows. Where the model fails on a row, that row's are NaN: values decide no status of an answer.

    The error stays if the model fails on the example, too, which is public: then it is the model, not the row. What the
    model warns of is printed nowhere.
    """
    with recorded_warnings():
        return _predicted(model, rows, example)


def _predicted(model: nn.Module, rows: Tensor, example: Tensor) -> Tensor:
    try:
        return model(rows)  # type: ignore[no-any-return]
    except ENDING:
        raise
    except BaseException:
        pass
    like: Tensor = model(example[None])
    found = []
    for row in rows:
        try:
            found.append(model(row[None]))
        except ENDING:
            raise
        except BaseException:
            found.append(torch.full_like(like, torch.nan))
    return torch.cat(found)


def _values(adapter: Adapter) -> dict[str, Tensor]:
    return {name: master.detach().clone().contiguous() for name, master in adapter.masters.values.items()}


def put_values(model: nn.Module, values: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
