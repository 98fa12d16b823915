"""How names change: the old one keeps working for two minor versions and warns once, then it goes.

A renamed argument, function or class is a ``DeprecationWarning`` that names the new one and the version in which the
old one ends. A module that moved is found under its old name by ``MovedModules``, with the same warning.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any, TypeVar, overload

T = TypeVar("T")
REMOVED_IN = "0.4"  # two minor versions after the one that renamed; raised with every batch of renames
_warned: set[str] = set()


def warn_renamed(old: str, new: str, *, removed_in: str = REMOVED_IN, stacklevel: int = 3) -> None:
    """Warn once per process that ``old`` is now ``new``."""
    if old not in _warned:
        _warned.add(old)
        message = f"{old} is now {new}; the old name ends with tacit {removed_in}."
        warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


@overload
def renamed_argument(
    old_name: str, old: T | None, new_name: str, new: T | None, *, where: str, stacklevel: int = ...
) -> T | None: ...
@overload
def renamed_argument(
    old_name: str, old: T | None, new_name: str, new: T, *, where: str, default: T, stacklevel: int = ...
) -> T: ...
def renamed_argument(
    old_name: str,
    old: T | None,
    new_name: str,
    new: T | None,
    *,
    where: str,
    default: T | None = None,
    stacklevel: int = 2,
) -> T | None:
    """The value of an argument that may have come under its old name; both at once are refused.

    Args:
        old_name: the old name of the argument.
        old: what was given under it; None stands for nothing.
        new_name: its name now.
        new: what was given under that.
        where: the function, for the message.
        default: the default of the argument under its new name.
        stacklevel: whose line the warning names: 2 is the caller of the function that calls this.

    Raises:
        TypeError: if both were given.
    """
    if old is None:
        return new
    if new is not default:
        raise TypeError(f"{where} got {old_name}= and {new_name}=, which are the same: leave {old_name}= out.")
    warn_renamed(f"{where}({old_name}=…)", f"{new_name}=…", stacklevel=stacklevel + 2)
    return old


def renamed_fields(**renamed: str) -> Callable[[type[T]], type[T]]:
    """Let a dataclass be made, and read, by the earlier names of its fields: ``@renamed_fields(batch="batch_size")``.

    Recipes (``tacit.recipes``) know them by ``earlier_names``.
    """

    def serve(cls: type[T]) -> type[T]:
        made = cls.__init__

        @wraps(made)
        def init(self: Any, *args: Any, **given: Any) -> None:
            for old, new in renamed.items():
                if old in given:
                    if new in given:
                        message = f"got {old}= and {new}=, which are the same: leave {old}= out."
                        raise TypeError(f"{cls.__name__} {message}")
                    warn_renamed(f"{cls.__name__}({old}=…)", f"{new}=…")
                    given[new] = given.pop(old)
            made(self, *args, **given)

        cls.__init__ = init  # type: ignore[method-assign]
        cls.__earlier_names__ = renamed  # type: ignore[attr-defined]
        for old, new in renamed.items():
            setattr(cls, old, property(partial(_read_as, cls.__name__, old, new)))
        return cls

    return serve


def _read_as(name: str, old: str, new: str, made: Any) -> Any:
    warn_renamed(f"{name}.{old}", f"{name}.{new}")
    return getattr(made, new)


def earlier_names(cls: type) -> Mapping[str, str]:
    """The earlier names of a dataclass's fields: old -> new."""
    found: Mapping[str, str] = getattr(cls, "__earlier_names__", {})
    return found


def renamed_attributes(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package whose public names changed: old name -> new name."""

    def lookup(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(importlib.import_module(module), names[name])

    return lookup


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under the names that they had: ``old`` -> ``new``, both absolute."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self.moved = dict(moved)
        self._own: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def install(self) -> None:
        if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
            sys.meta_path.append(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in self.moved else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = self.moved[spec.name]
        warn_renamed(f"The module {spec.name}", f"private ({new}): import from {new.rpartition('.')[0]}", stacklevel=7)
        module = importlib.import_module(new)
        self._own[new] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to execute, that was done under its own name; give it back its own specification."""
        module.__spec__ = self._own[module.__name__]
