"""Replay: the same releases again with the kept key, by one process at a time, and never a refund for what was made."""

import hashlib
from pathlib import Path

import pytest
import torch

from tacit.privacy import Budget, Ledger, LedgerError, Neighbours, events, leases, mechanisms, replay, sampling
from tacit.privacy.queries import BoundedSum
from tacit.privacy.receipts import Receipt, ReceiptError

STEPS = 10


class Sum:
    def __init__(self, value: float) -> None:
        self.sum = {"w": torch.full((4,), value, dtype=torch.float64)}
        self.bounds, self.blocks = {"all": 1.0}, {"all": ("w",)}


def released(receipt: Receipt, value: float = 0.5) -> list[float]:
    total: BoundedSum = Sum(value)  # type: ignore[assignment]
    return list(mechanisms.gaussian(total, receipt)["w"].tolist())


def charged(ledger: Ledger, *, seed: int | None = None) -> Receipt:
    ledger.subject("s", Budget(20.0, 1e-6))
    return ledger.charge("s", events.gaussian(4.0, steps=STEPS), stage="test", seed=seed)


@pytest.mark.parametrize("seed", [None, 3])
def test_releases_come_again_as_they_were(seed: int | None, ledger: Ledger) -> None:
    receipt = charged(ledger, seed=seed)
    secret = replay.keep(ledger, receipt)
    leases.extend(ledger, receipt, 6)
    first = [released(receipt) for _ in range(5)]
    again, made = replay.take_up(Ledger(ledger.url), receipt.id, secret, 2)
    assert (again.used, made, again.seeded) == (2, 6, seed is not None)
    leases.extend(ledger, again, 8)
    assert [released(again) for _ in range(3)] == first[2:]
    assert released(again) not in first
    ledger.verify()


def test_draws_come_again_too(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    event = events.poisson(0.3, events.gaussian(4.0), 5)
    ledger.subject("s", Budget(20.0, 1e-6), plan=[event])
    receipt = ledger.charge("s", event, stage="test")
    secret = replay.keep(ledger, receipt)
    leases.extend(ledger, receipt, 5)
    sampling.draw(receipt, 500)
    released(receipt)
    drawn, chances = sampling.draw(receipt, 500), sampling.chances(receipt, 5, 3)
    again, _ = replay.take_up(ledger, receipt.id, secret, 1)
    assert torch.equal(sampling.draw(again, 500), drawn)
    assert torch.equal(sampling.chances(again, 5, 3), chances)
    leases.extend(ledger, again, 4)
    assert released(again) == released(receipt)  # of the same draw, with the same noise


def test_nothing_is_released_on_a_receipt_that_was_taken_up_before_it_is_leased(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt = charged(ledger)
    again, _ = replay.take_up(ledger, receipt.id, replay.keep(ledger, receipt), 0)
    with pytest.raises(ReceiptError, match="used up"):
        released(again)


def test_the_last_process_holds_it(ledger: Ledger) -> None:
    receipt = charged(ledger)
    secret = replay.keep(ledger, receipt)
    second, _ = replay.take_up(ledger, receipt.id, secret, 0)
    third, _ = replay.take_up(ledger, receipt.id, secret, 0)
    for old in (receipt, second):
        with pytest.raises(ReceiptError, match="Another process"):
            leases.extend(ledger, old, 1)
        with pytest.raises(LedgerError, match="Another process"):
            ledger.settle(old)
    leases.extend(ledger, third, 1)
    ledger.settle(third)
    with pytest.raises(ReceiptError, match="was settled"):
        replay.take_up(ledger, receipt.id, secret, 0)
    assert leases.settled(ledger, receipt.id)
    ledger.verify()


def test_only_the_kept_key_will_do(ledger: Ledger) -> None:
    receipt = charged(ledger)
    with pytest.raises(ReceiptError, match="not the key"):
        replay.take_up(ledger, receipt.id, "00" * 32, 0)  # never kept
    secret = replay.keep(ledger, receipt)
    with pytest.raises(ReceiptError, match="not the key"):
        replay.take_up(ledger, receipt.id, "00" * 32, 0)
    told = str([entry.body for entry in ledger.entries()])
    assert secret not in told
    assert hashlib.sha256(f"tacit key {secret}".encode()).hexdigest() in told


def test_a_key_is_kept_before_the_first_release(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt = charged(ledger)
    released(receipt)
    with pytest.raises(ReceiptError, match="before the first release"):
        replay.keep(ledger, receipt)
    with pytest.raises(ReceiptError, match="no key here"):
        replay.keep(ledger, ledger.receipt(receipt.id))
    stream = events.stream(2.0, 5)
    ledger.subject("t", Budget(20.0, 1e-6), neighbours=Neighbours.REPLACE_ONE)
    with pytest.raises(ReceiptError, match=r"tacit\.privacy\.leases"):
        replay.keep(ledger, ledger.charge("t", stream, stage="test"))


def test_what_was_given_away_never_becomes_less(ledger: Ledger) -> None:
    """Eight leased and seven made; then a process that leases one at a time, twice killed: eight stay spent."""
    receipt = charged(ledger)
    secret = replay.keep(ledger, receipt)
    leases.extend(ledger, receipt, 8)
    for _ in range(7):
        released(receipt)
    for _ in range(2):
        again, made = replay.take_up(ledger, receipt.id, secret, 0)
        assert made == 8
        assert leases.extend(ledger, again, 1) == 1
        released(again)
        with pytest.raises(ReceiptError, match="used up"):
            released(again)
    last, made = replay.take_up(ledger, receipt.id, secret, 1)
    assert made == 8
    assert [entry.body["upto"] for entry in ledger.entries() if entry.kind == "lease"] == [8, 8, 8]
    ledger.settle(last, made)
    assert ledger.spent("s").mu == pytest.approx((8 / 16) ** 0.5)
    ledger.verify()


def test_a_receipt_that_will_be_leased_can_be_taken_up_before_its_first_lease(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'l.db'}")
    receipt = charged(ledger)
    with pytest.raises(ReceiptError, match="never leased"):
        leases.go_on(ledger, receipt.id)
    leases.begin(ledger, receipt)
    with pytest.raises(ReceiptError, match="used up"):
        released(receipt)
    again = leases.go_on(ledger, receipt.id)
    assert again.used == 0
    assert leases.extend(ledger, again, 1) == 1
    released(again)
    with pytest.raises(ReceiptError, match="Another process"):
        leases.extend(ledger, receipt, 1)
    with pytest.raises(ReceiptError, match="in use already"):
        leases.begin(ledger, again)
    ledger.verify()
