"""The one atomic writer: the old file or the new one, never a part, and nothing left beside it."""

import os
import stat
from pathlib import Path

import pytest

from tacit import _files
from tacit._files import replacing, write_atomically


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old ä")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_bytes() == "old ä".encode()
        assert partial.suffix == path.suffix
        assert partial.name.startswith(f".{path.name}.")  # by which what a kill leaves is found
        assert partial.parent == path.parent
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def broken(partial: Path) -> None:
        partial.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        broken(partial)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    replace, synchronize = os.replace, _files._synchronize
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b)))
    monkeypatch.setattr(
        _files, "_synchronize", lambda path, flags: (done.append(path.name[-5:]), synchronize(path, flags))
    )
    write_atomically(tmp_path / "a.json", "x")
    assert done == [".json", "replace", tmp_path.name[-5:]]


def test_a_private_file_is_private_from_the_first_byte(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with replacing(tmp_path / "secret", mode=0o600) as partial:
            assert stat.S_IMODE(partial.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
