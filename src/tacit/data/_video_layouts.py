"""How published video sets lie on a disk: UCF-101, HMDB-51, and a folder per class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

SUFFIXES = frozenset(
    [
        ".3gp",
        ".asf",
        ".avi",
        ".divx",
        ".flv",
        ".gif",
        ".m2ts",
        ".m4v",
        ".mkv",
        ".mov",
        ".mp4",
        ".mpeg",
        ".mpg",
        ".mts",
        ".ogv",
        ".ts",
        ".vob",
        ".webm",
        ".wmv",
    ]
)
PARTS = {"train": "1", "test": "2"}  # of HMDB-51's split files; 0 is in neither


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Files with the number of their class, and the group that each belongs to, where there are groups."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    unknown: tuple[Path, ...] = ()  # what lies there and is no video, by its name


def folder(root: str | Path) -> Listing:
    """`root/CLASS/FILE`; classes in the order of their names."""
    home = _folder(root)
    classes = _folders(home)
    there = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((home / name).iterdir())
        if not file.name.startswith(".")
    ]
    found = [(file, label) for file, label in there if file.suffix.lower() in SUFFIXES]
    if not found:
        raise ValueError(f"{home} holds no video: a folder per class with video files in it is expected.")
    return Listing(
        files=tuple(file for file, _ in found),
        labels=tuple(label for _, label in found),
        classes=classes,
        unknown=tuple(file for file, _ in there if file.suffix.lower() not in SUFFIXES),
    )


def ucf101(root: str | Path, split_file: str | Path, class_index: str | Path | None, unit: str) -> Listing:
    """The files that a split file of UCF-101 names. Classes: those of `classInd.txt`, or else the folders of `root`."""
    if unit not in ("group", "video"):
        raise ValueError(f"The unit of UCF-101 is 'group' or 'video', not {unit!r}.")
    home, lines = _folder(root), _lines(split_file)
    beside = Path(split_file).parent / "classInd.txt"
    index = class_index if class_index is not None else beside if beside.is_file() else None
    classes = tuple(_class_index(index)) if index is not None else _folders(home)
    files, labels, groups = [], [], []
    for number, line in enumerate(lines, 1):
        name, *given = line.rsplit(maxsplit=1) if re.search(r"\s\d+$", line) else [line]
        where = f"{split_file}, line {number}"
        kind = name.split("/")[0] if "/" in name else ""
        if kind not in classes:
            raise ValueError(f"{where}: there is no class {kind!r}{_near(kind, classes)}")
        label = classes.index(kind)
        if given and index is not None and int(given[0]) != label + 1:
            raise ValueError(f"{where}: {kind} is class {given[0]} here, but {label + 1} in {index}.")
        match = re.search(r"_g(\d+)_c\d+$", Path(name).stem)
        if unit == "group" and not match:
            raise ValueError(f"{where}: {name} does not end in _gNN_cNN, so its group is not known; use unit='video'.")
        files.append(home / name)
        labels.append(label)
        groups.append(f"{kind}/g{match.group(1)}" if match else name)
    _check_files(files, str(split_file))
    grouping = tuple(groups) if unit == "group" else None
    return Listing(files=tuple(files), labels=tuple(labels), classes=classes, groups=grouping)


def hmdb51(root: str | Path, split_folder: str | Path, split: int, part: str) -> Listing:
    """The files of `root/CLASS` that the files `CLASS_test_splitN.txt` give to a part of the split."""
    if part not in PARTS:
        raise ValueError(f"HMDB-51 has no part {part!r}: choose 'train' or 'test'.")
    home, ending = _folder(root), f"_test_split{split}.txt"
    lists = sorted(_folder(split_folder).glob(f"*{ending}"))
    if not lists:
        raise ValueError(f"{split_folder} has no file CLASS{ending}: HMDB-51 has the splits 1, 2 and 3.")
    classes = tuple(sorted(file.name.removesuffix(ending) for file in lists))
    files, labels = [], []
    for label, kind in enumerate(classes):
        if not (home / kind).is_dir():
            raise ValueError(f"{home} has no folder of the class {kind!r}{_near(kind, _folders(home))}")
        file = Path(split_folder) / f"{kind}{ending}"
        for number, line in enumerate(_lines(file), 1):
            name, _, mark = line.rpartition(" ")
            if mark not in ("0", "1", "2") or not name:
                raise ValueError(f"{file}, line {number}: {line!r} is no file name followed by 0, 1 or 2.")
            if mark == PARTS[part]:
                files.append(home / kind / name.strip())
                labels.append(label)
    if not files:
        raise ValueError(f"Split {split} of {split_folder} gives no file to {part}.")
    _check_files(files, str(split_folder))
    return Listing(files=tuple(files), labels=tuple(labels), classes=classes)


def _class_index(file: str | Path) -> list[str]:
    """`1 ApplyEyeMakeup`, one class per line, numbered from 1."""
    names = []
    for place, line in enumerate(_lines(file), 1):
        words = line.split()
        if len(words) != 2 or words[0] != str(place):
            raise ValueError(f"{file}, line {place}: {line!r} is not {place} followed by the name of a class.")
        names.append(words[1])
    return names


def _check_files(files: Sequence[Path], named_by: str) -> None:
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"{len(missing)} of {len(files)} files of {named_by} are missing, the first is {missing[0]}.")


def _lines(file: str | Path) -> list[str]:
    if not Path(file).is_file():
        raise ValueError(f"There is no file {file}.")
    lines = [line.strip() for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file} is empty.")
    return lines


def _folder(path: str | Path) -> Path:
    if not Path(path).is_dir():
        raise ValueError(f"There is no folder {path}.")
    return Path(path)


def _folders(home: Path) -> tuple[str, ...]:
    return tuple(sorted(inner.name for inner in home.iterdir() if inner.is_dir() and not inner.name.startswith(".")))


def _near(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f" among {', '.join(known[:5]) or 'no folders'}."
