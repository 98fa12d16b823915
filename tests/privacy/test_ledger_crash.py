"""The ledger among many processes: racing, forked, killed at random moments, and out of room."""

import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tacit.privacy import Budget, BudgetExceeded, Ledger, LedgerError, events, leases, mu_of
from tacit.privacy import _storage as storage
from tacit.privacy._filters import from_units

BUDGET = Budget(1.0, 1e-6)
PROCESSES = 8


class Child:
    """A forked process that does ``work``; what it tells through the pipe can be read when it has ended."""

    def __init__(self, work: Callable[[Callable[[str], None]], None]) -> None:
        self.out, into = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                work(lambda line: os.write(into, f"{line}\n".encode()) and None)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(into)
        self.told = b""

    def wait_for(self, lines: int) -> None:
        """Until it has told so many lines, or has ended."""
        while self.told.count(b"\n") < lines and (more := os.read(self.out, 1 << 16)):
            self.told += more

    def wait(self) -> tuple[int, list[str]]:
        """The exit status and the complete lines."""
        with os.fdopen(self.out, "rb") as lines:
            self.told += lines.read()
        return os.waitpid(self.pid, 0)[1], self.told.decode().split("\n")[:-1]


def together(work: Callable[[int, Callable[[str], None]], None]) -> list[list[str]]:
    """Eight processes that begin at one moment; all must end well."""
    gate, go = os.pipe()

    def start(index: int) -> Child:
        def wait_and_work(tell: Callable[[str], None]) -> None:
            os.close(go)
            os.read(gate, 1)  # ends when the parent closes its side
            work(index, tell)

        return Child(wait_and_work)

    children = [start(index) for index in range(PROCESSES)]
    os.close(go)
    ended = [child.wait() for child in children]
    os.close(gate)
    assert [status for status, _ in ended] == [0] * PROCESSES
    return [told for _, told in ended]


@pytest.mark.parametrize("inherited", [True, False], ids=["inherited", "opened"])
def test_eight_processes_spend_exactly_what_fits(ledger_url: str, inherited: bool) -> None:
    capacity = 43
    part = events.gaussian(capacity**0.5 / mu_of(1.0, 1e-6))
    with Ledger(ledger_url) as parent:
        parent.subject("s", budget=BUDGET)
        parent.charge("s", part, stage="parent")

        def work(_: int, tell: Callable[[str], None]) -> None:
            ledger = parent if inherited else Ledger(ledger_url, create=False)
            while True:
                try:
                    tell(ledger.charge("s", part, stage="child").id)
                except BudgetExceeded:
                    return

        receipts = [line for told in together(work) for line in told]
        assert len(receipts) == len(set(receipts)) == capacity - 1
        assert parent.verify() == 1 + capacity
        assert {entry.receipt for entry in parent.entries() if entry.kind == "charge"} > set(receipts)
        assert parent.spent("s").epsilon == pytest.approx(1.0, rel=1e-9)


def test_eight_processes_settle_without_losing_anything(ledger_url: str) -> None:
    with Ledger(ledger_url) as parent:
        parent.subject("s", budget=BUDGET)

        def work(index: int, _: Callable[[str], None]) -> None:
            for _ in range(3):
                parent.settle(parent.charge("s", events.gaussian(60.0, 5), stage="x"), index % 4)

        together(work)
        assert parent.verify() == 1 + 2 * 3 * PROCESSES
        steps = 3 * sum(index % 4 for index in range(PROCESSES))
        assert parent.spent("s").mu == pytest.approx(steps**0.5 / 60, rel=1e-12)


def test_eight_processes_open_and_declare_at_once(ledger_url: str) -> None:
    def work(index: int, _: Callable[[str], None]) -> None:
        with Ledger(ledger_url) as ledger:
            ledger.subject("s", budget=BUDGET)
            ledger.charge("s", events.gaussian(100.0 + index), stage="x")

    together(work)
    with Ledger(ledger_url, create=False) as ledger:
        assert ledger.verify() == 1 + PROCESSES


def test_a_child_keeps_its_charges_when_the_parent_closes(ledger_url: str) -> None:
    """SQLite deletes its log with the last connection it knows of: a fork must not hide the child's."""
    parent = Ledger(ledger_url)
    parent.subject("s", budget=BUDGET)
    parent.charge("s", events.gaussian(100.0), stage="parent")
    closed, say_closed = os.pipe()
    charged, say_charged = os.pipe()

    def work(tell: Callable[[str], None]) -> None:
        tell(parent.charge("s", events.gaussian(100.0), stage="child").id)
        os.write(say_charged, b"1")
        os.read(closed, 1)
        for _ in range(2):
            tell(parent.charge("s", events.gaussian(100.0), stage="child").id)

    child = Child(work)
    os.read(charged, 1)
    parent.close()
    os.write(say_closed, b"1")
    status, receipts = child.wait()
    assert (status, len(receipts)) == (0, 3)
    with Ledger(ledger_url, create=False) as ledger:
        assert {ledger.receipt(receipt).stage for receipt in receipts} == {"child"}
        assert ledger.verify() == 5


def test_a_ledger_in_memory_stays_in_its_process() -> None:
    with Ledger("sqlite://") as ledger:
        ledger.subject("s", budget=BUDGET)

        def work(tell: Callable[[str], None]) -> None:
            with pytest.raises(LedgerError, match="stays in the process that made it"):
                ledger.charge("s", events.gaussian(100.0), stage="x")
            tell("refused")

        assert Child(work).wait() == (0, ["refused"])
        assert ledger.verify() == 1


NOISE, STEPS = 1e5, 3


def charge_forever(ledger: Ledger, tell: Callable[[str], None]) -> None:
    """Charge, tell; and now and then say so and settle for one step."""
    for turn in range(10_000):
        receipt = ledger.charge("s", events.gaussian(NOISE, STEPS), stage="x")
        tell(f"charged {receipt.id}")
        if turn % 3 == 2:
            tell(f"settling {receipt.id}")
            ledger.settle(receipt, 1)


@pytest.mark.parametrize(
    ("backend", "kills"), [("sqlite", 100), ("postgres", 24), pytest.param("postgres", 200, marks=pytest.mark.slow)]
)
def test_nothing_is_lost_when_workers_are_killed(backend: str, kills: int, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(f"{backend}_url")
    warm = Ledger(url)
    warm.subject("s", budget=BUDGET)
    warm.charge("s", events.gaussian(NOISE, STEPS), stage="warm")
    moments, told, working = random.Random(2), [], list[Child]()
    at_least = 0  # charges that were waited for
    for _ in range(kills):
        working.append(Child(lambda tell: charge_forever(warm, tell)))
        if len(working) == 4:  # so that others take over the locks of the dead
            lines = moments.choice([0, 1, 2, 3])  # each of the first three is a charge
            told += kill(working.pop(0), lines, moments.uniform(0.0, 0.03))
            at_least += lines
    for child in working:
        told += kill(child, 0, 0.0)
    charged = {line.split()[1] for line in told if line.startswith("charged")}
    settling = {line.split()[1] for line in told if line.startswith("settling")}
    with Ledger(url, create=False) as ledger:
        entries = ledger.entries()
        assert ledger.verify() == len(entries)
        recorded = {entry.receipt for entry in entries if entry.kind == "charge"}
        assert charged <= recorded
        assert len(recorded) <= len(charged) + kills + 1  # at most the last charge of each went untold
        spent = from_units(ledger.subjects()[0].spent)
        assert spent >= ((len(charged) - len(settling)) * STEPS + len(settling)) / NOISE**2 * (1 - 1e-12)
        ledger.charge("s", events.gaussian(NOISE), stage="afterwards")
    assert len(charged) >= at_least > kills  # they did work
    print(f"{kills} kills on {backend}: {len(charged)} receipts told, {len(recorded)} recorded, none lost")


def kill(child: Child, lines: int, later: float) -> list[str]:
    """Kill a worker once it has told so many lines, and a little later, wherever it is then."""
    child.wait_for(lines)
    time.sleep(later)
    os.kill(child.pid, signal.SIGKILL)
    status, told = child.wait()
    assert os.WTERMSIG(status) == signal.SIGKILL
    return told


def test_the_main_file_alone_holds_every_charge_after_a_kill(sqlite_url: str, tmp_path: Path) -> None:
    """Killed after each of three charges, a lease and a settlement: a copy of the main file alone knows them all."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    with Ledger(sqlite_url) as ledger:
        ledger.subject("s", budget=BUDGET)
    told: list[str] = []
    for turn in range(3):

        def work(tell: Callable[[str], None]) -> None:
            own = Ledger(sqlite_url, create=False)
            own.settle(own.charge("s", events.gaussian(30.0, 4), stage="x"), 1)
            receipt = own.charge("s", events.gaussian(30.0, 4), stage="x")
            leases.extend(own, receipt, 2)
            tell(f"{receipt.id} {own.head} {own.spent('s').mu!r}")
            os.kill(os.getpid(), signal.SIGKILL)

        status, lines = Child(work).wait()
        assert os.WTERMSIG(status) == signal.SIGKILL
        told += lines
        alone = tmp_path / f"copy-{turn}.db"
        shutil.copy(path, alone)  # and nothing beside it
        receipt, head, mu = lines[0].split()
        with Ledger(alone, create=False) as copy:
            assert copy.verify(head) == 1 + 4 * (turn + 1)
            assert copy.spent("s").mu == float(mu) == pytest.approx((5 * (turn + 1)) ** 0.5 / 30, rel=1e-12)
            assert copy.receipt(receipt).releases == 4
    for beside in tmp_path.glob(f"{path.name}-*"):  # whatever lies beside it can be deleted, too
        beside.unlink()
    with Ledger(sqlite_url, create=False) as ledger:
        assert ledger.spent("s").mu == pytest.approx(15**0.5 / 30, rel=1e-12)
        assert [ledger.verify(line.split()[1]) for line in told] == [13] * 3


def test_a_ledger_with_a_write_ahead_log_is_merged_when_it_is_opened(sqlite_url: str, tmp_path: Path) -> None:
    """As older versions left it behind a kill: the last charge in the log alone."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    with Ledger(sqlite_url) as ledger:
        ledger.subject("s", budget=BUDGET)

    def work(_: Callable[[str], None]) -> None:
        old = sa.create_engine(sqlite_url)
        with old.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        own = Ledger(sqlite_url, create=False)
        own._engine = old
        own.charge("s", events.gaussian(30.0), stage="x")
        os.kill(os.getpid(), signal.SIGKILL)

    monkey = storage._in_one_file
    storage._in_one_file = lambda _: True
    try:
        status, _ = Child(work).wait()
    finally:
        storage._in_one_file = monkey
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert Path(f"{path}-wal").stat().st_size > 0
    with Ledger(sqlite_url, create=False) as ledger:
        shutil.copy(path, tmp_path / "copy.db")
        assert ledger.spent("s").mu == pytest.approx(1 / 30, rel=1e-12)
        assert not Path(f"{path}-wal").exists()
    with Ledger(tmp_path / "copy.db", create=False) as copy:
        assert copy.spent("s").mu == pytest.approx(1 / 30, rel=1e-12)
        assert copy.verify() == 2


def test_a_log_that_others_have_open_is_not_left_behind(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without merging it, nothing is charged; the sentence says what to do."""
    Ledger(sqlite_url).close()
    monkeypatch.setattr(storage, "_PATIENCE", 0.05)
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("PRAGMA journal_mode=WAL")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="another process has it open"):
        Ledger(sqlite_url, create=False)
    other.execute("ROLLBACK")
    other.close()
    assert Ledger(sqlite_url, create=False).verify() == 0


def test_a_failure_half_way_charges_nothing(ledger: Ledger) -> None:
    """The entry is written before the running total; a database that refuses the second takes back the first."""
    ledger.subject("s", budget=BUDGET)
    ledger.charge("s", events.gaussian(50.0), stage="x")
    receipt = ledger.charge("s", events.gaussian(50.0, 4), stage="x")
    before = (ledger.head, ledger.spent("s"))
    with refusing(ledger):
        with pytest.raises(LedgerError, match=r"nothing was charged: .*no room"):
            ledger.charge("s", events.gaussian(50.0), stage="x")
        with pytest.raises(LedgerError, match="no room"):
            ledger.settle(receipt, 1)
        assert not receipt.live  # whether the refund arrived cannot always be known: no release after it
    assert (ledger.head, ledger.spent("s")) == before
    assert ledger.verify() == 3
    ledger.charge("s", events.gaussian(50.0), stage="x")
    assert ledger.verify() == 4


@contextmanager
def refusing(ledger: Ledger) -> Iterator[None]:
    """While a trigger lets no total be updated."""
    sqlite = ledger.url.startswith("sqlite")
    if sqlite:
        run(
            ledger.url,
            "CREATE TRIGGER crowded BEFORE UPDATE ON tacit_subjects BEGIN SELECT RAISE(ABORT, 'no room'); END",
        )
    else:
        run(
            ledger.url,
            "CREATE FUNCTION refuse() RETURNS trigger AS $$ BEGIN RAISE 'no room'; END $$ LANGUAGE plpgsql",
            "CREATE TRIGGER crowded BEFORE UPDATE ON tacit_subjects FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
    yield
    run(ledger.url, "DROP TRIGGER crowded" + ("" if sqlite else " ON tacit_subjects"))


def run(url: str, *statements: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def test_a_full_disk_charges_nothing_and_is_survived(sqlite_url: str) -> None:
    """The file may not grow: SQLite answers as on a full disk. With room again, the ledger goes on."""
    with Ledger(sqlite_url) as ledger:
        ledger.subject("s", budget=BUDGET)

        def limit(pages: int) -> None:
            with ledger._book._engine.connect() as connection:
                connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

        limit(1)  # which SQLite raises to the present size
        done = fill(ledger)
        assert ledger.verify() == 1 + done
        assert ledger.spent("s").mu == pytest.approx(done**0.5 / 1000, rel=1e-12, abs=1e-12)
        limit(2**30)
        ledger.charge("s", events.gaussian(1000.0), stage="x", note="n" * 5000)
        assert ledger.verify() == 2 + done


def test_a_file_that_cannot_grow_charges_nothing_and_is_survived(sqlite_url: str) -> None:
    """As above, with the operating system refusing the write, in a process of its own."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))

    def work(tell: Callable[[str], None]) -> None:
        with Ledger(sqlite_url) as ledger:
            ledger.subject("s", budget=BUDGET)
            size = path.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, resource.RLIM_INFINITY))
            done = fill(ledger)
            spent: dict[str, Any] = {"done": done, "mu": ledger.spent("s").mu, "verified": ledger.verify()}
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            ledger.charge("s", events.gaussian(1000.0), stage="x")
            tell(json.dumps(spent))

    status, told = Child(work).wait()
    assert status == 0
    seen = json.loads(told[0])
    assert seen["verified"] == 1 + seen["done"]
    assert seen["mu"] == pytest.approx(seen["done"] ** 0.5 / 1000, rel=1e-12, abs=1e-12)
    with Ledger(sqlite_url, create=False) as ledger:
        assert ledger.verify() == 2 + seen["done"]


def fill(ledger: Ledger) -> int:
    """Charge with long notes until there is no room; how often that went well."""
    for done in range(100):
        try:
            ledger.charge("s", events.gaussian(1000.0), stage="x", note="n" * 5000)
        except BudgetExceeded:
            raise
        except LedgerError:
            return done
    raise AssertionError("The disk never filled up.")
