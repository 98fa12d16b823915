"""Columns of a CSV file: file names, texts, labels, and whose each row is. No message reveals a value of any row."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from tacit._refusals import Refusal


def read_columns(path: str | Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Some columns of a CSV file with a header, by name.

    Args:
        path: A UTF-8 file; its first line names the columns.
        names: The columns that are wanted.

    Returns:
        One list of texts per column, all as long as the file has rows.

    Raises:
        Refusal: There is no such file or column, or some line has another number of fields than the header.
    """
    path, wanted = Path(path), list(dict.fromkeys(names))
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except FileNotFoundError:
        raise Refusal(f"There is no file {path}.") from None
    except (OSError, UnicodeDecodeError, csv.Error):
        raise Refusal(f"{path} cannot be read as a CSV file in UTF-8.") from None
    header = [name.strip() for name in lines[0]] if lines else []
    if not lines:
        raise Refusal(f"{path} is empty: its first line names the columns.")
    if not set(wanted) & set(header) and not any(get_close_matches(name, header, n=1) for name in wanted):
        # perhaps there is no header: then its first line is a row, and is not to be shown
        raise Refusal(
            f"{path} has none of the columns {', '.join(wanted)}: its first line must name the columns, with commas "
            "between them."
        )
    for name in wanted:
        check_column(name, header, path)
    rows = lines[1:]
    if not rows:
        raise Refusal(f"{path} has a header and no rows.")
    if any(len(row) != len(header) for row in rows):  # which one would reveal a row
        raise Refusal(f"{path}: some lines have another number of fields than the header.")
    return {name: [row[header.index(name)] for row in rows] for name in wanted}


def check_column(name: str, header: Sequence[str], where: object) -> None:
    """Refuse a column that is not there, and say which is nearest."""
    if name not in header:
        near = get_close_matches(name, header, n=1)
        has = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(header) or 'none'}."
        raise Refusal(f"{where} has no column {name!r}; {has}")


def read_labels(values: Sequence[str], classes: int | Sequence[str], where: str | Path) -> list[int]:
    """Labels as class numbers: integers from 0, or the place of each name in `classes`.

    Args:
        values: One per row.
        classes: Their number, or their names.
        where: The file, for the message.

    Returns:
        One class number per row.

    Raises:
        Refusal: A label is not one of the classes; which one is not revealed.
    """
    if not isinstance(classes, int):
        places = {name: place for place, name in enumerate(classes)}
        if any(value not in places for value in values):
            raise Refusal(f"{where}: some labels are none of the classes {', '.join(classes)}.")
        return [places[value] for value in values]
    try:
        found = [int(value) for value in values]
    except ValueError:
        found = [-1]
    if min(found) < 0 or max(found) >= classes:
        raise Refusal(
            f"{where}: some labels are no whole numbers from 0 to {classes - 1}. Give classes the right number, or the "
            "list of the names that the labels have."
        )
    return found
