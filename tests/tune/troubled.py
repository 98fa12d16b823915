"""Trainables and models that fail on their way to other processes or back, in a module that these can load."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import struct
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from made_up import DRY, works
from torch import Tensor, nn

from tacit.privacy import Neighbours, Receipt, events
from tacit.privacy.events import DpEvent
from tacit.tune import Hyperparameters

SECRET = "patient 17 has a fever"


def elsewhere() -> bool:
    """Whether this is a process of a trial."""
    return multiprocessing.parent_process() is not None


class Panic(BaseException):
    """As compiled extensions raise it: no `Exception`."""


def _half(pipe: Connection[Any, Any], found: memoryview) -> None:
    """In place of sending a result: the process dies in the middle of it."""
    os.write(pipe.fileno(), struct.pack("!i", len(found)) + bytes(found[:10]))
    os.kill(os.getpid(), signal.SIGKILL)


def _fails() -> None:
    raise ValueError(SECRET)


def _works() -> None:
    pass


class Model(nn.Linear):
    """One that cannot be pickled, or not be read, from `trouble` on."""

    def __init__(self, trouble: str) -> None:
        super().__init__(2, 2)
        self.trouble = trouble

    def __getstate__(self) -> dict[str, Any]:
        if self.trouble == "cannot be pickled":
            raise ValueError(SECRET)
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["trouble"] == "cannot be read":
            raise ValueError(SECRET)
        super().__setstate__(state)  # type: ignore[no-untyped-call]


@dataclass
class Troubled:
    """Works here and in the dry run; in another process it fails, with private words."""

    trouble: str
    rehearsed: bool = False  # whether its models fail in the dry run already
    size: int = 10_000
    sent: int = 0
    file: str = ""

    def __call__(self, hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> nn.Module:
        works(hyperparameters, mu, receipt)
        if self.trouble == "waits" and hyperparameters.lr > 0.1 and elsewhere():
            signal.pause()
        if self.trouble == "talks" and elsewhere():
            print(SECRET)
            warnings.warn(SECRET, stacklevel=1)
            logging.getLogger(__name__).error(SECRET)
            thread = threading.Thread(target=_fails)
            thread.start()
            thread.join()
        if self.trouble == "has a thread that goes on" and elsewhere():
            threading.Thread(target=threading.Event().wait).start()
        if self.trouble == "has a child" and elsewhere():
            child = multiprocessing.get_context("fork").Process(target=_works)
            child.start()
            child.join()
        if self.trouble == "dies as it answers and leaves a child" and elsewhere():
            if (left := os.fork()) == 0:
                time.sleep(60)
                os.unlink(self.file)
                os._exit(0)
            with open(self.file, "w") as file:
                file.write(str(left))
            Connection._send_bytes = _half  # type: ignore[attr-defined]
        if self.trouble == "holds a lock" and elsewhere():
            with open(self.file, "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(str(os.getpid()))
                file.flush()
                signal.pause()
        if self.trouble == "exits" and elsewhere():
            raise SystemExit(SECRET)
        if self.trouble == "interrupts" and elsewhere():
            raise KeyboardInterrupt(SECRET)
        return Model(self.trouble if self.rehearsed or receipt.stage != DRY else "")

    def event(self, hyperparameters: Hyperparameters, mu: float, neighbours: Neighbours) -> DpEvent:
        if self.trouble == "has no price" and elsewhere():
            raise ValueError(SECRET)
        return events.gaussian(neighbours.factor * hyperparameters.steps**0.5 / mu, steps=hyperparameters.steps)

    def __getstate__(self) -> dict[str, Any]:
        self.sent += 1
        if self.trouble == "is not sent again" and self.sent > 2:  # both checks
            raise ValueError(SECRET)
        if self.trouble == "panics when it is sent again" and self.sent > 2:
            raise Panic(SECRET)
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["trouble"] == "does not arrive" and elsewhere():
            raise ValueError(SECRET)
        self.__dict__ = state

    def score(self, model: nn.Module) -> Tensor:
        del model
        return torch.full((self.size,), 0.5)
