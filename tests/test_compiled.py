"""Libraries in the cache folder: compiled once, and never loaded as something else than was compiled."""

import os
import shutil
from pathlib import Path

import pytest

from tacit import _compiled

SOURCE = "int tacit_answer(void) { return %d; }\n"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None or os.name != "posix", reason="no C compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TACIT_KERNELS", raising=False)
    return tmp_path


def made(folder: Path, name: str, answer: int) -> tuple[Path, Path]:
    """A source and its library."""
    source = folder / f"{name}.c"
    source.write_text(SOURCE % answer)
    library = _compiled.compiled(source)
    assert library is not None
    assert library.tacit_answer() == answer
    return source, Path(library._name)


def again(source: Path, found: Path, answer: int) -> None:
    """It is loaded from another path, because a process loads no path twice."""
    path = _compiled._library(source, str(shutil.which("cc")))
    assert path == found
    copy = found.with_name(f"copy-{answer}.so")
    shutil.copy(path, copy)
    assert _compiled.ctypes.CDLL(str(copy)).tacit_answer() == answer


@pytest.mark.parametrize("left", [0, 64, 4000, -100])
def test_a_library_that_was_cut_short_is_compiled_again(folder: Path, left: int) -> None:
    source, library = made(folder, "one", 42)
    content = library.read_bytes()
    library.unlink()  # not in place: this process has it mapped
    library.write_bytes(content[:left])
    again(source, library, 42)


def test_another_library_under_its_name_is_not_loaded(folder: Path) -> None:
    source, library = made(folder, "one", 42)
    _, other = made(folder, "other", 7)
    for suffix in (".so", ".digest"):
        library.with_suffix(suffix).unlink()
        shutil.copy(other.with_suffix(suffix), library.with_suffix(suffix))
    again(source, library, 42)


def test_a_library_without_its_digest_is_compiled_again_and_one_with_it_is_not(folder: Path) -> None:
    source, library = made(folder, "one", 42)
    before = library.stat().st_ino
    assert _compiled._library(source, str(shutil.which("cc"))).stat().st_ino == before
    library.with_suffix(".digest").unlink()
    kept = library.rename(library.with_name("kept"))  # so that its inode is not used again
    shutil.copy(kept, library)
    copied = library.stat().st_ino
    assert _compiled._library(source, str(shutil.which("cc"))).stat().st_ino != copied


@pytest.mark.parametrize("which", ["folder", "library"])
def test_what_others_may_write_to_is_not_loaded(folder: Path, which: str) -> None:
    source, library = made(folder, "one", 42)
    (library.parent if which == "folder" else library).chmod(0o777)
    assert _compiled.compiled(source) is None
