"""Replay: the same releases again with the kept key, by one process at a time, and never a refund for what was made."""

import ast
import hashlib
import os
from pathlib import Path

import pytest
import torch

from tacit.privacy import (
    Budget,
    Ledger,
    LedgerError,
    Neighbours,
    events,
    grid_sum,
    leases,
    mechanisms,
    replay,
    sampling,
)
from tacit.privacy._queries import BoundedSum
from tacit.privacy._receipts import Receipt, ReceiptError

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
    again, made = replay.resume(Ledger(ledger.url), receipt.id, secret, 2)
    assert (again.used, made, again.seeded) == (2, 6, seed is not None)
    leases.extend(ledger, again, 8)
    assert [released(again) for _ in range(3)] == first[2:]
    assert released(again) not in first
    ledger.verify()


def test_queries_whose_noise_no_key_draws_are_refused(ledger: Ledger) -> None:
    """Made again they would be further releases, on one charge; seeded ones come again as they were."""
    query = grid_sum(torch.ones(100), low=0.0, high=1.0)
    ledger.subject("s", Budget(20.0, 1e-6))
    for event, release in (
        (events.gaussian(4.0), mechanisms.gaussian_query),
        (events.laplace(4.0), mechanisms.laplace),
        (events.noisy_max(4.0), mechanisms.noisy_max),
    ):
        receipt = ledger.charge("s", event, stage="test")
        secret = replay.keep(ledger, receipt)
        leases.extend(ledger, receipt, 1)
        again, _ = replay.resume(ledger, receipt.id, secret, 0)
        leases.extend(ledger, again, 1)
        for each in (receipt, again):
            with pytest.raises(ReceiptError, match="key of receipt"):
                release(query, each)
            assert each.used == 0
    found, receipt = [], ledger.charge("s", events.gaussian(4.0), stage="test", seed=1)
    secret = replay.keep(ledger, receipt)
    for _ in range(2):
        leases.extend(ledger, receipt, 1)
        found.append(mechanisms.gaussian_query(query, receipt).tolist())
        receipt, _ = replay.resume(ledger, receipt.id, secret, 0)
    assert found[0] == found[1]


def test_a_search_is_not_replayed(ledger: Ledger) -> None:
    """Receipts of its trials knew nothing of the replay: two sums with one noise, and two noises for one query."""
    ledger.subject("search", Budget(8.0, 1e-5), mode="renyi")
    event = events.repeat_and_select(events.compose([events.gaussian(4.0), events.gaussian(6.0)]), mean=3, shape=1)
    receipt = ledger.charge("search", event, stage="tune")
    with pytest.raises(ReceiptError, match="a search, which is not replayed"):
        replay.keep(ledger, receipt)
    assert receipt.live
    with pytest.raises(ReceiptError, match="a search, which is not replayed"):
        replay.resume(ledger, receipt.id, "0" * 64, 0)


def test_draws_come_again_too(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    event = events.poisson(0.3, events.gaussian(4.0), 5)
    ledger.subject("s", Budget(20.0, 1e-6), plan=[event])
    receipt = ledger.charge("s", event, stage="test")
    secret = replay.keep(ledger, receipt)
    leases.extend(ledger, receipt, 5)
    sampling.draw(receipt, 500)
    released(receipt)
    drawn, uniforms = sampling.draw(receipt, 500), sampling.uniforms(receipt, 5, 3)
    first = released(receipt)
    again, _ = replay.resume(ledger, receipt.id, secret, 1)
    assert torch.equal(sampling.draw(again, 500), drawn)
    assert torch.equal(sampling.uniforms(again, 5, 3), uniforms)
    leases.extend(ledger, again, 4)
    assert released(again) == first  # of the same draw, with the same noise


def test_nothing_is_released_on_a_receipt_that_was_taken_up_before_it_is_leased(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt = charged(ledger)
    again, _ = replay.resume(ledger, receipt.id, replay.keep(ledger, receipt), 0)
    with pytest.raises(ReceiptError, match="used up"):
        released(again)


def test_the_last_process_holds_it(ledger: Ledger) -> None:
    receipt = charged(ledger)
    secret = replay.keep(ledger, receipt)
    second, _ = replay.resume(ledger, receipt.id, secret, 0)
    third, _ = replay.resume(ledger, receipt.id, secret, 0)
    for old in (receipt, second):
        with pytest.raises(ReceiptError, match="Another process"):
            leases.extend(ledger, old, 1)
        with pytest.raises(LedgerError, match="Another process"):
            ledger.settle(old)
    leases.extend(ledger, third, 1)
    ledger.settle(third)
    with pytest.raises(ReceiptError, match="was settled"):
        replay.resume(ledger, receipt.id, secret, 0)
    assert leases.settled(ledger, receipt.id)
    ledger.verify()


def test_only_the_kept_key_will_do(ledger: Ledger) -> None:
    receipt = charged(ledger)
    with pytest.raises(ReceiptError, match="not the key"):
        replay.resume(ledger, receipt.id, "00" * 32, 0)  # never kept
    secret = replay.keep(ledger, receipt)
    with pytest.raises(ReceiptError, match="not the key"):
        replay.resume(ledger, receipt.id, "00" * 32, 0)
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
        again, made = replay.resume(ledger, receipt.id, secret, 0)
        assert made == 8
        assert leases.extend(ledger, again, 1) == 1
        released(again)
        with pytest.raises(ReceiptError, match="used up"):
            released(again)
    last, made = replay.resume(ledger, receipt.id, secret, 1)
    assert made == 8
    assert [entry.body["upto"] for entry in ledger.entries() if entry.kind == "lease"] == [8, 8, 8]
    ledger.settle(last, made)
    assert ledger.spent("s").mu == pytest.approx((8 / 16) ** 0.5)
    ledger.verify()


@pytest.mark.parametrize("used", [None, 0, 2, 5, 8])
def test_settling_after_a_replay_returns_nothing_that_may_have_been_released(ledger: Ledger, used: int | None) -> None:
    """Seven of ten were made on a lease of eight; whatever the new holder says, eight stay spent."""
    receipt = charged(ledger)
    secret = replay.keep(ledger, receipt)
    leases.extend(ledger, receipt, 8)
    for _ in range(7):
        released(receipt)
    again, made = replay.resume(Ledger(ledger.url), receipt.id, secret, 0)
    assert made == 8
    ledger.settle(again, used)
    assert ledger.spent("s").mu == pytest.approx((8 / 16) ** 0.5, rel=1e-12)
    assert ledger.entries()[-1].body["used"] == 8
    ledger.verify()


def test_a_second_replay_and_what_it_leases_stay_spent(ledger: Ledger) -> None:
    """Ten leased by nobody: three by the first, six by the second, which dies; the third settles at once."""
    receipt = charged(ledger)
    secret = replay.keep(ledger, receipt)
    leases.extend(ledger, receipt, 3)
    second, _ = replay.resume(ledger, receipt.id, secret, 0)
    leases.extend(ledger, second, 6)
    third, made = replay.resume(ledger, receipt.id, secret, 0)
    assert made == 6
    leases.begin(ledger, third)  # which takes nothing back
    assert replay.keep(ledger, third) == secret
    fourth, made = replay.resume(ledger, receipt.id, secret, 0)
    assert made == 6
    ledger.settle(fourth)
    assert ledger.spent("s").mu == pytest.approx((6 / 16) ** 0.5, rel=1e-12)
    ledger.verify()


def test_what_the_holder_itself_leased_and_did_not_make_comes_back(ledger: Ledger) -> None:
    receipt = charged(ledger)
    replay.keep(ledger, receipt)
    leases.extend(ledger, receipt, 8)
    released(receipt)
    ledger.settle(receipt)
    assert ledger.spent("s").mu == pytest.approx(1 / 4, rel=1e-12)
    ledger.verify()


def test_a_kept_key_stops_what_is_not_leased(ledger: Ledger) -> None:
    """Else releases were made that the chain knows nothing of, and a replay would return them."""
    receipt = charged(ledger)
    replay.keep(ledger, receipt)
    with pytest.raises(ReceiptError, match="used up"):
        released(receipt)
    leased = ledger.charge("s", events.gaussian(4.0, steps=STEPS), stage="test")
    leases.extend(ledger, leased, 5)
    replay.keep(ledger, leased)
    with pytest.raises(ReceiptError, match="used up"):
        released(leased)


@pytest.mark.parametrize("used", [-1, 11, 2.5, True, "2", float("nan")])
def test_a_wrong_number_takes_nothing_up(ledger: Ledger, used: object) -> None:
    receipt = charged(ledger)
    secret = replay.keep(ledger, receipt)
    entries = len(ledger.entries())
    with pytest.raises(ReceiptError, match="cannot be right"):
        replay.resume(ledger, receipt.id, secret, used)  # type: ignore[arg-type]
    assert len(ledger.entries()) == entries
    leases.extend(ledger, receipt, 1)  # it holds it still
    released(receipt)


def test_who_was_overtaken_in_this_process_stops_at_once(ledger: Ledger) -> None:
    """Two receipts with one key in one notebook: the older releases nothing more, whatever was leased to it."""
    receipt = charged(ledger)
    secret = replay.keep(ledger, receipt)
    leases.extend(ledger, receipt, 8)
    first = [released(receipt) for _ in range(2)]
    again, _ = replay.resume(ledger, receipt.id, secret, 0)
    with pytest.raises(ReceiptError, match="Another process or run has resumed"):
        released(receipt, value=-0.5)
    leases.extend(ledger, again, 8)
    assert [released(again) for _ in range(2)] == first


def test_who_was_overtaken_and_still_runs_releases_the_same_and_no_more_than_its_lease(tmp_path: Path) -> None:
    """The old process uses up its lease after it was overtaken: the new one's values, and they stay spent."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'l.db'}")
    ledger.subject("s", Budget(20.0, 1e-6))
    to_old, from_new = os.pipe()
    to_new, from_old = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            own = Ledger(ledger.url)
            receipt = own.charge("s", events.gaussian(4.0, steps=STEPS), stage="test")
            secret = replay.keep(own, receipt)
            leases.extend(own, receipt, 6)
            mine = [released(receipt) for _ in range(3)]
            os.write(from_old, f"{receipt.id} {secret}\n".encode())
            os.read(to_old, 1)  # overtaken
            mine += [released(receipt) for _ in range(3)]
            for attempt in (
                lambda: released(receipt),
                lambda: leases.extend(own, receipt, 1),
                lambda: leases.check_holder(own, receipt),
                lambda: own.settle(receipt),
            ):
                with pytest.raises((ReceiptError, LedgerError), match=r"used up|Another process"):
                    attempt()
            (tmp_path / "old").write_text(repr(mine))
            code = 0
        finally:
            os._exit(code)
    receipt_id, secret = os.read(to_new, 1000).decode().split()
    again, made = replay.resume(ledger, receipt_id, secret, 2)
    assert made == 6
    os.write(from_new, b"1")
    assert os.waitpid(pid, 0)[1] == 0
    leases.extend(ledger, again, 2)
    mine = [released(again) for _ in range(2)]
    old = ast.literal_eval((tmp_path / "old").read_text())
    assert len(old) == 6
    assert mine == old[2:4]
    ledger.settle(again)
    assert ledger.spent("s").mu == pytest.approx((6 / 16) ** 0.5, rel=1e-12)
    ledger.verify()


def test_a_receipt_that_will_be_leased_can_be_taken_up_before_its_first_lease(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'l.db'}")
    receipt = charged(ledger)
    with pytest.raises(ReceiptError, match="never leased"):
        leases.resume_after_lease(ledger, receipt.id)
    leases.begin(ledger, receipt)
    with pytest.raises(ReceiptError, match="used up"):
        released(receipt)
    again = leases.resume_after_lease(ledger, receipt.id)
    assert again.used == 0
    assert leases.extend(ledger, again, 1) == 1
    released(again)
    with pytest.raises(ReceiptError, match="Another process"):
        leases.extend(ledger, receipt, 1)
    with pytest.raises(ReceiptError, match="in use already"):
        leases.begin(ledger, again)
    ledger.verify()
