"""Leases: what a process may release, what another takes up, and that no release is ever given out twice."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from dp_accounting import dp_event
from torch import Tensor

from tacit.privacy import Budget, Ledger, LedgerError, Neighbours, _book, events, leases, mechanisms
from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipts import Receipt, ReceiptError, consume
from tacit.privacy.correlated import Strategy
from tacit.privacy.leases import Secret
from tacit.privacy.mechanisms import GaussianStream

SEED = 7


@dataclasses.dataclass(frozen=True)
class Sum:
    sum: Mapping[str, Tensor]
    bounds: Mapping[str, float]
    blocks: Mapping[str, tuple[str, ...]]


ZERO = Sum({"w": torch.zeros(3, dtype=torch.float64)}, {"all": 1.0}, {"all": ("w",)})


def released(stream: GaussianStream) -> list[float]:
    return list(stream.release(ZERO)["w"].tolist())


def charged(
    ledger: Ledger, *, strategy: str = "independent", steps: int = 100, seed: int | None = SEED
) -> tuple[Receipt, GaussianStream]:
    ledger.subject("s", Budget(50.0, 1e-6), neighbours=Neighbours.REPLACE_ONE)
    event = events.stream(2.0, steps, strategy=strategy, blocks=4)
    receipt = ledger.charge("s", event, stage="test", seed=seed)
    return receipt, GaussianStream(receipt)


def reopened(ledger: Ledger) -> Ledger:
    """The same ledger as another process sees it."""
    return Ledger(ledger.url)


def saved(ledger: Ledger, stream: GaussianStream) -> Secret:
    secret = leases.secret_of(stream)
    leases.save(ledger, stream.receipt, secret)
    return secret


def test_a_lease_is_an_entry_and_a_limit(ledger: Ledger) -> None:
    receipt, stream = charged(ledger)
    assert leases.extend(ledger, receipt, 2) == 2
    released(stream)
    released(stream)
    with pytest.raises(ReceiptError, match=r"lease on receipt .* is used up"):
        released(stream)
    assert receipt.used == 2
    assert leases.extend(ledger, receipt, 3) == 5
    released(stream)
    bodies = [e.body["upto"] for e in ledger.entries() if e.kind == "lease"]
    assert bodies == [2, 5]
    assert ledger.verify() == 4
    assert ledger.verify(receipt.head) == 4


def test_leases_cost_nothing(ledger: Ledger) -> None:
    receipt, _ = charged(ledger)
    before = ledger.spent("s").epsilon
    leases.extend(ledger, receipt, 10)
    assert ledger.spent("s").epsilon == before


def test_a_lease_ends_with_what_was_paid_for(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt, stream = charged(ledger, steps=1)
    assert leases.extend(ledger, receipt, 100) == 4  # four blocks of one step
    for _ in range(4):
        released(stream)
    leases.extend(ledger, receipt, 100)
    with pytest.raises(ReceiptError, match="is left on receipt"):
        released(stream)


@pytest.mark.parametrize("strategy", ["independent", "buffered", "full", "banded:2"])
def test_a_clean_save_goes_on_exactly(strategy: str, tmp_path: Path) -> None:
    """The same numbers as a stream that was never saved, through the mixer's state."""
    results = []
    for save_at in (None, 3):
        ledger = Ledger(f"sqlite:///{tmp_path}/{strategy.replace(':', '')}{save_at}.db")
        receipt, stream = charged(ledger, strategy=strategy, steps=5)
        leases.extend(ledger, receipt, 20)
        found = []
        for step in range(8):
            if step == save_at:
                secret = saved(ledger, stream)
                other = reopened(ledger)
                receipt, stream, exact = leases.resume(other, receipt.id, secret)
                assert exact
                assert receipt.used == 3
                leases.extend(other, receipt, 20)
            found.append(released(stream))
        results.append(found)
        ledger.verify()
    assert results[0] == results[1]
    assert len({x for row in results[0] for x in row}) == 24


def otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another processor: the coefficients come out a little different, by 1e-3 at most."""
    here = mechanisms.strategy_of

    def elsewhere(event: events.StreamDpEvent) -> Strategy:
        made = here(event)
        return dataclasses.replace(made, weights=tuple(0.999 * weight for weight in made.weights))

    monkeypatch.setattr("tacit.privacy.mechanisms._mechanisms.strategy_of", elsewhere)


def test_a_stream_goes_on_with_the_coefficients_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in later blocks, and with the noise that they need; a state is not used up by what cannot go on."""
    results = []
    for moved in (False, True):
        ledger = Ledger(f"sqlite:///{tmp_path}/{moved}.db")
        receipt, stream = charged(ledger, strategy="buffered", steps=5)
        leases.extend(ledger, receipt, 20)
        found = [released(stream) for _ in range(3)]
        secret, sensitivity = saved(ledger, stream), stream.sensitivity
        if moved:
            otherwise(monkeypatch)
            assert GaussianStream(receipt).strategy != stream.strategy
            short = dataclasses.replace(stream.strategy, horizon=4)
            with pytest.raises(ReceiptError, match="a block of 4 steps of buffered noise"):
                leases.resume(reopened(ledger), receipt.id, None, strategy=short)
        other = reopened(ledger)
        receipt, stream, exact = leases.resume(other, receipt.id, secret)
        assert exact
        assert stream.sensitivity == sensitivity
        leases.extend(other, receipt, 20)
        results.append(found + [released(stream) for _ in range(9)])
        began = stream.strategy
        receipt, stream, exact = leases.resume(reopened(ledger), receipt.id, None, strategy=began)
        assert not exact
        assert stream.strategy == began
    assert results[0] == results[1]


def test_a_secret_is_worth_nothing_a_second_time(ledger: Ledger) -> None:
    receipt, stream = charged(ledger)
    leases.extend(ledger, receipt, 10)
    mine = released(stream)
    secret = saved(ledger, stream)
    first = leases.resume(reopened(ledger), receipt.id, secret)
    second = leases.resume(reopened(ledger), receipt.id, secret)
    assert (first[2], second[2]) == (True, False)
    with pytest.raises(ReceiptError, match="Another process"):
        leases.extend(ledger, first[0], 1)
    leases.extend(ledger, second[0], 1)
    theirs = released(second[1])
    again = leases.resume(reopened(ledger), receipt.id, secret)
    assert not again[2]
    assert again[0].used == 2
    leases.extend(ledger, again[0], 1)
    assert not {*mine, *theirs} & set(released(again[1]))
    ledger.verify()


def test_going_on_makes_the_secret_worthless(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt, stream = charged(ledger)
    leases.extend(ledger, receipt, 10)
    secret = saved(ledger, stream)
    with pytest.raises(ReceiptError, match="used up"):
        released(stream)  # the rest of the lease was given back
    leases.extend(ledger, receipt, 10)
    released(stream)
    taken, _, exact = leases.resume(reopened(ledger), receipt.id, secret)
    assert not exact
    assert taken.used == 10


def test_without_a_secret_all_that_was_leased_is_used(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt, stream = charged(ledger, strategy="buffered")
    leases.extend(ledger, receipt, 10)
    mine = [released(stream) for _ in range(3)]
    taken, other, exact = leases.resume(reopened(ledger), receipt.id, None)
    assert not exact
    assert taken.used == 10
    assert other._mixer.state()["step"] == 0
    leases.extend(ledger, taken, 5)
    theirs = [released(other) for _ in range(5)]
    mine += [released(stream) for _ in range(7)]  # the older one uses up its lease, and no more
    with pytest.raises(ReceiptError, match="used up"):
        released(stream)
    with pytest.raises(ReceiptError, match="Another process has resumed"):
        leases.extend(ledger, receipt, 1)
    assert len({x for row in mine + theirs for x in row}) == 45
    ledger.verify()


def test_of_another_receipt_a_secret_is_nothing(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    first, one = charged(ledger)
    second = ledger.charge("s", events.stream(2.0, 100, blocks=4), stage="test", seed=1)
    two = GaussianStream(second)
    for receipt in (first, second):
        leases.extend(ledger, receipt, 5)
    secret, _ = saved(ledger, one), saved(ledger, two)
    assert not leases.resume(reopened(ledger), second.id, secret)[2]
    with pytest.raises(ReceiptError, match="another process or state"):
        leases.save(ledger, second, secret)


def test_an_old_state_is_not_saved(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt, stream = charged(ledger)
    leases.extend(ledger, receipt, 5)
    secret = leases.secret_of(stream)
    released(stream)
    with pytest.raises(ReceiptError, match="older than the stream"):
        leases.save(ledger, receipt, secret)
    released(stream)  # its lease was not given back
    GaussianStream(receipt)
    with pytest.raises(ReceiptError, match="save that one"):
        leases.secret_of(stream)


def test_nothing_is_released_between_the_state_and_its_entry(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of this process must not use a release that the secret gives to the next one."""
    ledger = Ledger(sqlite_url)
    receipt, stream = charged(ledger)
    leases.extend(ledger, receipt, 5)
    outcome: list[str] = []
    append = _book.note

    def slow_append(*given: object) -> None:
        def other() -> None:
            try:
                released(stream)
                outcome.append("released")
            except ReceiptError:
                outcome.append("refused")

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        append(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(_book, "note", slow_append)
    saved(ledger, stream)
    assert outcome == ["refused"]


def test_what_was_never_leased_is_not_taken_up(sqlite_url: str) -> None:
    """Without a lease a process may release all that was paid for: nobody knows how far it came."""
    ledger = Ledger(sqlite_url)
    receipt, stream = charged(ledger)
    released(stream)
    with pytest.raises(ReceiptError, match="never leased"):
        leases.resume(reopened(ledger), receipt.id, None)
    assert [e.kind for e in ledger.entries()] == ["subject", "charge"]


def test_a_settled_stream_is_over(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt, stream = charged(ledger)
    leases.extend(ledger, receipt, 5)
    released(stream)
    secret = leases.secret_of(stream)
    ledger.settle(receipt)
    for attempt in (
        lambda: leases.extend(ledger, receipt, 1),
        lambda: leases.save(ledger, receipt, secret),
        lambda: leases.secret_of(stream),
        lambda: leases.resume(ledger, receipt.id, secret),
        lambda: leases.resume(ledger, receipt.id, None),
        lambda: leases.check_holder(ledger, receipt),
    ):
        with pytest.raises(ReceiptError):
            attempt()
    ledger.verify()


def test_only_streams_are_leased_and_by_whole_releases(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt, _ = charged(ledger)
    for releases in (0, -1, 2.5, True, "2", float("nan")):  # 2.5 would let three be made and say two
        with pytest.raises(ValueError, match="at least one release"):
            leases.extend(ledger, receipt, releases)  # type: ignore[arg-type]
    assert [entry.kind for entry in ledger.entries()] == ["subject", "charge"]
    plain = ledger.charge("s", events.gaussian(5.0), stage="test")
    with pytest.raises(ReceiptError, match="paid for no stream"):
        leases.resume(ledger, plain.id, None)
    with pytest.raises(ReceiptError, match="lease nothing"):
        leases.extend(ledger, ledger.receipt(receipt.id), 1)


def test_a_secret_does_not_show_itself(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt, stream = charged(ledger, strategy="buffered", seed=None)
    leases.extend(ledger, receipt, 5)
    released(stream)
    secret = saved(ledger, stream)
    assert receipt._key is not None
    for text in (repr(secret), str(secret), repr(receipt), str([e.body for e in ledger.entries()])):
        assert secret.key not in text
        assert secret.token not in text
    assert leases.digest(secret) in str([e.body for e in ledger.entries()])
    assert NoiseKey.from_secret(secret.key, seeded=False).secret() == receipt._key.secret()
    with pytest.raises(ValueError, match="256 bits"):
        NoiseKey.from_secret("00" * 31, seeded=False)


def test_a_resumed_key_is_secret_or_seeded_as_its_receipt_was(sqlite_url: str) -> None:
    """After a kill a seeded stream gets another reproducible key; a private one gets a new one from the system."""
    ledger = Ledger(sqlite_url)
    seeded, _ = charged(ledger)
    private = ledger.charge("s", events.stream(2.0, 100, blocks=4), stage="test")
    for receipt in (seeded, private):
        leases.extend(ledger, receipt, 5)
        taken, stream, _ = leases.resume(reopened(ledger), receipt.id, None)
        assert taken._key is not None
        assert receipt._key is not None
        assert taken._key.seeded is taken.seeded is receipt.seeded
        assert taken._key.secret() != receipt._key.secret()
        leases.extend(ledger, taken, 1)
        released(stream)


def child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def test_after_a_kill_nothing_comes_twice(tmp_path: Path) -> None:
    """Killed again and again within its lease; every number that was ever released is another one."""
    url = f"sqlite:///{tmp_path}/l.db"
    ledger = Ledger(url)
    receipt, _ = charged(ledger, strategy="buffered", steps=40)
    leases.extend(ledger, receipt, 4)
    ledger.close()
    log = tmp_path / "log"

    def work() -> None:
        own = Ledger(url)
        taken, stream, _ = leases.resume(own, receipt.id, None)
        for i in range(6):
            if i % 4 == 0:
                leases.extend(own, taken, 4)
            with log.open("a") as out:
                out.write(f"{taken.used} {released(stream)[0]!r}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):
        assert os.WTERMSIG(child(work)) == signal.SIGKILL
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len({number for number, _ in lines}) == len({value for _, value in lines}) == 18
    assert [int(number) for number, _ in lines[::6]] == [4, 12, 20]
    ledger.verify()


def test_in_a_forked_child_a_lease_is_worth_nothing(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    receipt, stream = charged(ledger)
    leases.extend(ledger, receipt, 5)
    secret = leases.secret_of(stream)

    def work() -> None:
        for attempt in (
            lambda: released(stream),
            lambda: leases.extend(ledger, receipt, 1),
            lambda: leases.secret_of(stream),
            lambda: leases.save(ledger, receipt, secret),
        ):
            with pytest.raises(ReceiptError):
                attempt()
        os._exit(0)

    assert child(work) == 0


def test_many_take_it_up_at_once_and_one_holds_it(tmp_path: Path) -> None:
    """Four processes show the same secret: one goes on exactly; whoever leases gets releases of its own."""
    url = f"sqlite:///{tmp_path}/l.db"
    ledger = Ledger(url)
    receipt, stream = charged(ledger)
    leases.extend(ledger, receipt, 4)
    released(stream)
    secret = saved(ledger, stream)
    ledger.close()
    results = tmp_path / "results"
    results.mkdir()

    def work() -> None:
        own = Ledger(url)
        taken, noise, exact = leases.resume(own, receipt.id, secret)
        try:
            leases.extend(own, taken, 2)
            line = f"{exact} {taken.used} {released(noise)[0]!r}"
        except ReceiptError:
            line = f"{exact} refused"
        (results / str(os.getpid())).write_text(line)
        os._exit(0)

    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(1)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    told = [path.read_text().split() for path in results.iterdir()]
    assert len(told) == 4
    assert sum(line[0] == "True" for line in told) == 1
    going = [line for line in told if line[1] != "refused"]
    assert len({line[1] for line in going}) == len({line[2] for line in going}) == len(going) >= 1
    ledger.verify()


def test_who_lost_the_stream_cannot_settle_it(sqlite_url: str) -> None:
    """Else the charge would come back while the new holder goes on releasing."""
    ledger = Ledger(sqlite_url)
    ledger.subject("stream", Budget(1.0, 1e-6), neighbours=Neighbours.ZERO_OUT)
    old = ledger.charge("stream", events.stream(5.0, 10), stage="adapt")
    leases.extend(ledger, old, 4)
    new, _, _ = leases.resume(ledger, old.id, None)
    before = ledger.spent("stream").epsilon
    with pytest.raises(LedgerError, match="Another process"):
        ledger.settle(old, used=0)
    assert ledger.spent("stream").epsilon == before > 0
    ledger.settle(new)  # whose leased releases count as used: nothing comes back
    assert ledger.spent("stream").epsilon == before
    assert ledger.verify() == 5


def test_after_a_take_over_nothing_that_was_leased_comes_back(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url)
    ledger.subject("s", Budget(20.0, 1e-6))
    old = ledger.charge("s", events.gaussian(4.0, steps=10), stage="test")
    leases.begin(ledger, old)
    leases.extend(ledger, old, 4)
    second = leases.resume_after_lease(reopened(ledger), old.id)
    leases.extend(ledger, second, 3)
    third = leases.resume_after_lease(reopened(ledger), old.id)
    assert third.used == 7
    for used in (0, 3, 6):
        with pytest.raises(LedgerError, match="cannot be right"):
            ledger.settle(third, used)
    ledger.settle(third)
    assert ledger.spent("s").mu == pytest.approx((7 / 16) ** 0.5, rel=1e-12)
    with pytest.raises(LedgerError, match="settled already"):
        ledger.settle(second)
    ledger.verify()


def test_on_a_lease_releases_are_made_in_the_order_of_the_event(sqlite_url: str) -> None:
    """A lease is a number: a dear release made in place of a cheap one would come twice, or come back."""
    ledger = Ledger(sqlite_url)
    ledger.subject("s", Budget(20.0, 1e-6))
    event = events.compose([events.gaussian(100.0, 3), events.laplace(2.0)])
    receipt = ledger.charge("s", event, stage="test")
    leases.extend(ledger, receipt, 1)
    with pytest.raises(ReceiptError, match=r"in the order of the event: the next one .* is a GaussianDpEvent"):
        consume(receipt, dp_event.LaplaceDpEvent, 1.0)
    consume(receipt, dp_event.GaussianDpEvent, 1.0)
    again = leases.resume_after_lease(ledger, receipt.id)
    leases.extend(ledger, again, 3)
    for kind in (dp_event.GaussianDpEvent, dp_event.GaussianDpEvent, dp_event.LaplaceDpEvent):
        consume(again, kind, 1.0)
    other = ledger.charge("s", event, stage="test")
    consume(other, dp_event.LaplaceDpEvent, 1.0)  # without a lease any order will do
    with pytest.raises(ReceiptError, match="cannot be leased any more"):
        leases.extend(ledger, other, 1)
