"""Files that are there as a whole, the old or the new one, whatever happens."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path, *, mode: int = 0o644) -> Iterator[Path]:
    """A file beside ``path`` to write to, of the same suffix; it takes that place when the block ends without an error.

    The content is on the disk before the name changes, and the name before this returns: after a crash either file is
    there, never a part. After an error nothing is left of the new one.

    Args:
        path: The file to write; what it held stays until the end.
        mode: Its permissions, less the process's umask: 0o600 for what only the owner may read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "result.txt") as partial:
        ...         _ = partial.write_text("42")
        ...     (Path(folder) / "result.txt").read_text()
        '42'
    """
    path = Path(path)
    # who takes a file away also takes what a kill has left beside it, by this beginning
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part{path.suffix}")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield partial
        _synchronize(partial, os.O_RDWR)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _synchronize(path.parent, os.O_RDONLY)


def write_atomically(path: str | Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file that is there as a whole or not at all; text is UTF-8.

    Args:
        path: The file to write.
        content: All that it is to hold.
        mode: Its permissions, less the process's umask: 0o600 for what only the owner may read.
    """
    with replacing(path, mode=mode) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def _synchronize(path: Path, flags: int) -> None:
    file = os.open(path, flags)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that synchronises no folders
            raise
    finally:
        os.close(file)
