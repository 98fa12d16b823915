"""Many clients, and a service that is killed: nothing is overspent, and no answered charge is lost."""

import math
import multiprocessing
import random
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest

from tacit.privacy import Budget, BudgetExceeded, Ledger, _remote, events, mu_of
from tacit.serve import Role, tokens_of
from tests.serve.conftest import Killable

EPSILON, DELTA = 1.0, 1e-6


def spend(url: str, token: str, charges: int, noise: float, done: "Queue[list[str]]") -> None:
    _remote.PATIENCE = 3600.0  # on a busy machine twenty restarts take long
    ledger, receipts = Ledger(url, token=token), []
    for number in range(charges):
        try:
            receipt = ledger.charge("clinic", events.repeat(events.gaussian(noise), 2), stage="x", note=str(number))
        except BudgetExceeded:
            break
        receipts.append(receipt.id)
        if number % 3 == 0:
            ledger.settle(receipt, 1)
    done.put(receipts)


def killed(folder: Path, clients: int, charges: int, kills: int) -> None:
    service = Killable(folder / "ledger.db")
    here = Ledger(str(service.database))
    here.subject("clinic", Budget(EPSILON, DELTA))
    # room for 0.6 of what they ask for, if nothing were returned: they meet the cap, too
    noise = math.sqrt(2 * 0.6 * clients * charges) / mu_of(EPSILON, DELTA)
    token, _ = tokens_of(str(service.database)).create(Role.CHARGE, subject="clinic")
    service.start()
    context: Any = multiprocessing.get_context("spawn")
    done = context.Queue()
    url = f"http://127.0.0.1:{service.port}"
    workers = [context.Process(target=spend, args=(url, token, charges, noise, done)) for _ in range(clients)]
    for worker in workers:
        worker.start()
    chance, killed = random.Random(4), 0
    while killed < kills:  # in the middle of work: some charges after it began to answer, and a moment later
        upto = len(here.entries()) + chance.randrange(1, 6)
        while len(here.entries()) < upto and any(worker.is_alive() for worker in workers):
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 0.1))
        service.kill()
        killed += any(worker.is_alive() for worker in workers)
        service.start()
        assert killed == kills or any(worker.is_alive() for worker in workers), "the clients were done too soon"
    answered = [receipt for _ in workers for receipt in done.get(timeout=3600)]
    for worker in workers:
        worker.join()
    service.kill()
    charged = [entry.receipt for entry in here.entries() if entry.kind == "charge"]
    assert len(set(answered)) == len(answered)
    assert set(answered) <= set(charged), "an answered charge was lost"
    assert len(set(charged)) == len(charged), "a charge was made twice"
    here.verify()  # replays every cost against the cap
    assert here.spent("clinic").epsilon <= EPSILON + 1e-9


def test_a_killed_service_loses_and_overspends_nothing(tmp_path: Path) -> None:
    killed(tmp_path, clients=3, charges=15, kills=2)


@pytest.mark.slow
def test_twenty_kills_under_eight_clients(tmp_path: Path) -> None:
    killed(tmp_path, clients=8, charges=60, kills=20)
