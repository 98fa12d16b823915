"""C sources of the package, compiled at first use where there is a C compiler; torch serves elsewhere.

A library is kept in the user's cache folder under a hash of source, compiler and processor, with a digest of its bytes
beside it: one that was cut short would end the process, maybe after a charge. `TACIT_KERNELS=0` in the environment
switches all of them off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
from pathlib import Path

from tacit._files import replacing, write_atomically

_OPTIONS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fno-fast-math")  # whatever `cc` stands for
_SECONDS = 120  # that a compiler may take


def compiled(source: Path, wished: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The library of a source; None without a compiler, or if anything about it fails.

    Args:
        source: In C.
        wished: Options that the source can do without, where the compiler does not have them.
    """
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if os.environ.get("TACIT_KERNELS") == "0" or compiler is None or os.name != "posix":
        return None
    for options in dict.fromkeys([(*_OPTIONS, *wished), _OPTIONS]):
        try:
            return ctypes.CDLL(str(_library(source, compiler, options)))
        except (OSError, RuntimeError, subprocess.SubprocessError):  # no folder to write to, no home, no such option
            continue
    return None


def processor() -> bytes:
    """What `-march=native` depends on: a home folder may serve several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model"))})).encode()


def _library(source: Path, compiler: str, options: tuple[str, ...] = _OPTIONS) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True).stdout
    parts = (source.read_bytes(), " ".join(options).encode(), version, platform.machine().encode(), processor())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tacit"
    library = folder / f"{source.stem}-{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:32]}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _ours(folder):
        raise OSError("Others may write to the cache folder.")
    if not _intact(library):
        with replacing(library, mode=0o700) as partial:
            command = [compiler, *options, "-o", str(partial), str(source), "-lm"]
            subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        write_atomically(library.with_suffix(".digest"), _digest(library), 0o600)
    if not _ours(library):
        raise OSError("Others may write to the compiled library.")
    return library


def _ours(path: Path) -> bool:
    """Whether no other user could have written it."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _intact(library: Path) -> bool:
    """Whether a library is there as it was compiled, under this name."""
    try:
        return library.with_suffix(".digest").read_text() == _digest(library)
    except (OSError, ValueError):
        return False


def _digest(library: Path) -> str:
    return hashlib.sha256(library.stem.encode() + library.read_bytes()).hexdigest()
