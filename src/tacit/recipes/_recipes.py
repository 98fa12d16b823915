"""Recipes: settings of a run as TOML, read into frozen dataclasses.

A recipe names its kind; everything else in it is a field of that kind's dataclass:

    kind = "adapt"
    methods = ["tent", "sar"]

    [privacy]
    epsilon = 10.0

A nested dataclass is a table and a tuple of them an array of tables. Nothing is guessed: a key that the dataclass does
not have, a value of another type and a value that the dataclass refuses are errors that name the file and the key.
TOML has no null, so "none" (in quotes) stands for None wherever a field takes None and no text.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol, Union

from tacit._deprecation import earlier_names, warn_renamed


class RecipeError(ValueError):
    """A recipe that cannot be run as it is; the message says where and why."""


class Progress(Protocol):
    """What a long run calls to show where it is: what it does now, how far, and (spent, budget) in epsilon."""

    def __call__(self, what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None: ...


def read(path: Path | str, kinds: Mapping[str, type]) -> tuple[str, Any]:
    """The kind of a recipe and its configuration, an instance of ``kinds[kind]``."""
    path = Path(path)
    table = _parse(path)
    kind = _kind(path, table, kinds)
    try:
        return kind, _build(kinds[kind], table, "")
    except _Problem as problem:
        raise RecipeError(f"{path}: {problem}") from None


def read_as(path: Path | str, cls: type) -> Any:
    """A TOML file as an instance of one dataclass; an error names the file and the line."""
    path = Path(path)
    table = _parse(path)
    try:
        return _build(cls, table, "")
    except _Problem as problem:
        line = _line_of(path.read_text("utf-8"), problem.where)
        raise RecipeError(f"{path}{f', line {line}' if line else ''}: {problem}") from None


def kind_of(path: Path | str, kinds: Collection[str]) -> str:
    """The kind of a recipe, one of ``kinds``; nothing else of it is read."""
    return _kind(Path(path), _parse(Path(path)), kinds)


def fingerprint(config: Any) -> str:
    """A short name for a configuration: equal ones have equal names, on every machine and in every later version.

    The dataclass's name and all its fields count, except those declared with ``field(compare=False)``.
    """
    text = json.dumps(_plain(config, everything=False), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def plain(config: Any) -> Any:
    """A configuration as plain data for a report, its fields in their order."""
    return _plain(config, everything=True)


# -- reading ----------------------------------------------------------------------------------------------------------


class _Problem(Exception):
    """What is wrong, and at which key; ``read`` adds the file."""

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text)
        self.where = where


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe at {path}.") from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder: give the TOML file in it.") from None
    except OSError as error:
        raise RecipeError(f"The recipe {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not a TOML file: it is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {str(error).rstrip('.')}.") from None


def _kind(path: Path, table: dict[str, Any], kinds: Collection[str]) -> str:
    if "kind" not in table:
        raise RecipeError(f"{path}: a recipe says what it is: add kind = {_either(kinds)} at the top.")
    kind = table.pop("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise RecipeError(f"{path}: there is no kind {kind!r}{nearest(str(kind), kinds, 'kinds')}")
    return kind


def _build(cls: type, table: dict[str, Any], where: str) -> Any:
    """An instance of a dataclass from a table; ``where`` is the table's place in the file."""
    known: dict[str, Field[Any]] = {f.name: f for f in fields(cls) if f.init}
    table = _renamed(cls, table, where)
    for key in table:
        if key not in known:
            raise _Problem(f"there is no key {key!r}{_in(where)}{nearest(key, known, 'keys')}", _join(where, key))
    hints = typing.get_type_hints(cls)
    given = {key: _value(hints[key], value, _join(where, key)) for key, value in table.items()}
    for key, one in known.items():
        if key not in given and one.default is MISSING and one.default_factory is MISSING:
            raise _Problem(f"the key {key!r} is missing{_in(where)}: it is {_words(hints[key])}.", where)
    try:
        return cls(**given)
    except ValueError as error:
        blamed = _blame(cls, given, known)
        place = _join(where, blamed) if blamed else where or "the recipe as a whole"
        raise _Problem(f"{place} is invalid: {error}", _join(where, blamed) if blamed else where) from None


def _renamed(cls: type, table: dict[str, Any], where: str) -> dict[str, Any]:
    """The table with keys under their names of today; an earlier one warns."""
    found = dict(table)
    for old, new in earlier_names(cls).items():
        if old in found:
            if new in found:
                raise _Problem(f"{old} is the earlier name of {new}{_in(where)}: leave it out.", _join(where, old))
            warn_renamed(f"The key {old}{_in(where)}", new, stacklevel=2)
            found[new] = found.pop(old)
    return found


def _blame(cls: type, given: dict[str, Any], known: Mapping[str, Field[Any]]) -> str | None:
    """The one key that the dataclass cannot take, if there is just one: without it, it would have been content."""

    def content(keys: Iterable[str]) -> bool:
        try:
            cls(**{key: given[key] for key in keys})
        except ValueError:
            return False
        return True

    required = {key for key in given if known[key].default is MISSING and known[key].default_factory is MISSING}
    found = [key for key in given if key not in required and content(given.keys() - {key})]
    if not found and len(required) == 1 and not content(required):
        found = list(required)
    return found[0] if len(found) == 1 else None


def _value(kind: Any, value: Any, where: str) -> Any:
    """A value of the file as the type of its field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(kind, arguments, value, where)
    if origin is Literal:
        same = [choice for choice in arguments if choice == value and type(choice) is type(value)]
        if not same:
            choices = [str(choice) for choice in arguments]
            raise _Problem(
                f"{where} = {_shown(value)} is none of its values{nearest(str(value), choices, 'values')}", where
            )
        return same[0]
    if origin in (tuple, list):
        return _sequence(kind, origin, arguments, value, where)
    if origin is dict or kind is dict:
        if not isinstance(value, dict):
            raise _wrong(kind, value, where)
        inner = arguments[1] if arguments else Any
        return {key: _value(inner, item, _join(where, key)) for key, item in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            raise _wrong(kind, value, where)
        return _build(kind, value, where)
    return _scalar(kind, value, where)


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [str(member.value) for member in kind]
        found = next((member for member in kind if member.value == value), None)
        if found is None:
            raise _Problem(
                f"{where} = {_shown(value)} is none of its values{nearest(str(value), choices, 'values')}", where
            )
        return found
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number:
        if math.isnan(value):
            raise _Problem(f"{where} = nan is no number.", where)
        return float(value)
    if kind is int and number and isinstance(value, int):
        return value
    if (kind is bool and isinstance(value, bool)) or (kind is str and isinstance(value, str)):
        return value
    if isinstance(kind, type) and issubclass(kind, PurePath | str) and kind is not str and isinstance(value, str):
        try:
            return kind(value)
        except ValueError as error:
            raise _Problem(f"{where} is invalid: {error}", where) from None
    raise _wrong(kind, value, where)


def _sequence(kind: Any, origin: Any, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise _wrong(kind, value, where)
    open_ended = origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis)
    kinds = [arguments[0]] * len(value) if open_ended else list(arguments)
    if len(kinds) != len(value):
        raise _Problem(f"{where} has {len(value)} entries and needs {len(kinds)}.", where)
    items = enumerate(zip(kinds, value, strict=True), 1)
    return origin(_value(one, item, f"{where} #{number}") for number, (one, item) in items)


def _one_of(kind: Any, options: tuple[Any, ...], value: Any, where: str) -> Any:
    """The first option that takes the value; a table goes to the dataclass that knows most of its keys."""
    if isinstance(value, dict):
        tables = [option for option in options if isinstance(option, type) and is_dataclass(option)]
        named = {name: option for option in tables for name in _names(option)}
        if named and "kind" in value:  # the table says which it is
            if value["kind"] not in named:
                kind = str(value["kind"])
                raise _Problem(f"{where}: there is no kind {kind!r}{nearest(kind, named, 'kinds')}", f"{where}.kind")
            return _build(named[value["kind"]], value, where)
        if named:
            raise _Problem(f"{where} says what it is: add kind = {_either(named)}.", where)
        if tables:
            best = max(tables, key=lambda cls: len({f.name for f in fields(cls)} & set(value)))
            return _build(best, value, where)
    takes_none = types.NoneType in options
    if takes_none and value == "none" and str not in options:
        return None
    rest = [option for option in options if option is not types.NoneType]
    if len(rest) == 1:
        return _value(rest[0], value, where)
    for option in rest:
        try:
            return _value(option, value, where)
        except _Problem:
            continue
    raise _wrong(kind, value, where)


def _names(cls: type) -> tuple[str, ...]:
    """The kinds that a dataclass is for: the values of its field `kind`, where it has such a field."""
    kind = typing.get_type_hints(cls).get("kind")
    return tuple(map(str, typing.get_args(kind))) if typing.get_origin(kind) is Literal else ()


def _line_of(text: str, where: str) -> int | None:
    """The line of a key, or of its table, in a TOML file; None where it is unknown."""
    best: tuple[int, int] | None = None  # how much of the place was found, and in which line
    table, numbers = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]", line):
            table = re.sub(r"\s*\.\s*", ".", found[2]).replace('"', "")
            if found[1] == "[[":
                numbers[table] = numbers.get(table, 0) + 1
                table = f"{table} #{numbers[table]}"
            place = table
        elif found := re.match(r'\s*"?([\w.-]+)"?\s*=', line):
            place = _join(table, found[1])
        else:
            continue
        inside = where == place or where.startswith((f"{place}.", f"{place} #"))
        if inside and (best is None or len(place) > best[0]):
            best = len(place), number
    return None if best is None else best[1]


# -- words ------------------------------------------------------------------------------------------------------------


def _wrong(kind: Any, value: Any, where: str) -> _Problem:
    return _Problem(f"{where} must be {_words(kind)}; got {_shown(value)}.", where)


def _words(kind: Any) -> str:
    """A type as a person would say it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join('"none"' if option is types.NoneType else _words(option) for option in arguments)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin in (tuple, list):
        inner = arguments[0]
        return "an array of tables" if is_dataclass(inner) else f"a list, each {_words(inner)}"
    if origin is dict or kind is dict or is_dataclass(kind):
        return "a table"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}.get(kind, "text")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else str(value)


def nearest(word: str, known: Iterable[str], what: str) -> str:
    """The end of a sentence about an unknown word: the nearest known one, or all of them."""
    names = list(known)
    by_lower = {name.lower().replace("-", "_"): name for name in names}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), by_lower, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {by_lower[close[0]]!r}?"
    return f"; the {what} are {', '.join(names)}." if names else f"; there are no {what}."


def _either(names: Iterable[str]) -> str:
    return " or ".join(json.dumps(name) for name in names) or '"…"'


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _in(where: str) -> str:
    return f" in {where}" if where else ""


# -- writing ----------------------------------------------------------------------------------------------------------


def _plain(value: Any, *, everything: bool) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        kept = [f for f in fields(value) if everything or f.compare]
        table = {f.name: _plain(getattr(value, f.name), everything=everything) for f in kept}
        return table if everything else [type(value).__name__, table]
    if isinstance(value, Enum):
        return _plain(value.value, everything=everything)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, everything=everything) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, everything=everything) for item in value]
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return int(value) if value.is_integer() and not everything else value  # 1 and 1.0 are equal
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"A configuration holds plain values; this is a {type(value).__name__}.")
