"""What one promise is made of, said once: who pays, to whom, and who may watch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from tacit._curator import Curator, as_curator
from tacit.privacy import Ledger, Neighbours, Unit
from tacit.recipes import Progress

P = ParamSpec("P")
R = TypeVar("R")

IN_CONTEXT: Any = inspect.Parameter.empty  # the default of an argument that has to be given, here or in the context


@dataclass(frozen=True, kw_only=True)
class PrivacyContext:
    """The arguments that `finetune.fit`, every search of `tune` and the adapters of `adapt` share.

    Give it as `context=` instead of the single arguments; what it leaves out may be given beside it. The same thing in
    both places is refused.

    Args:
        ledger: Where releases are charged.
        subject: The name of who pays there.
        unit: What one unit is ("patient"); it must agree with the data.
        neighbours: The neighbouring relation.
        seed: Reproducible noise: not private.
        curator: Called with what only the curator may see (`tacit.Curator`): steps before their noise, trials, errors.
        progress: True for a bar, or a function that is called. Searches that must not tell how long they take, and
            adapters, show none.

    Examples:
        >>> from tacit import Budget, Ledger, PrivacyContext
        >>> ledger = Ledger("sqlite://")
        >>> context = PrivacyContext(ledger=ledger, subject="clinic", unit="patient", neighbours="replace-one")
        >>> sorted(context.given())
        ['ledger', 'neighbours', 'subject', 'unit']
    """

    ledger: Ledger | None = None
    subject: str | None = None
    unit: Unit | str | None = None
    neighbours: Neighbours | str | None = None
    seed: int | None = None
    curator: Curator | None = None
    progress: Progress | bool = False

    def given(self) -> dict[str, Any]:
        """What the context says, by the name of the argument that it stands for."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if _is_given(value)}


def _is_given(value: Any) -> bool:
    return value is not None and value is not False  # 0 is a seed


def takes_context(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function with an argument `context` take the arguments of a `PrivacyContext` from there.

    A `curator` of the earlier forms is made one that takes events.
    An argument whose default is `IN_CONTEXT` has to be given in one of the two places.
    """
    arguments = inspect.signature(function).parameters
    where = f"{function.__module__.split('.')[1]}.{function.__qualname__.removesuffix('.__init__')}"
    shared = (each.name for each in fields(PrivacyContext))
    needed = [name for name in shared if name in arguments and arguments[name].default is IN_CONTEXT]

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        loose: dict[str, Any] = dict(kwargs)
        context = loose.pop("context", None)
        if context is not None:
            if not isinstance(context, PrivacyContext):
                raise TypeError(f"{where}: context is a tacit.PrivacyContext, not {type(context).__name__}.")
            for name, value in context.given().items():
                if name in arguments and _is_given(loose.get(name)):
                    raise TypeError(f"{where} got {name}= and a context that has it: say it once.")
                if name in arguments:
                    loose[name] = value
                elif name != "progress":
                    raise TypeError(f"{where} has no {name}=: leave it out of the context.")
        if missing := [f"{name}=" for name in needed if loose.get(name) is None]:
            raise TypeError(f"{where} needs {' and '.join(missing)}, or a context= that has it.")
        if isinstance(loose.get("ledger"), str):
            raise TypeError(f"{where}: ledger is a tacit.Ledger, not its address: give tacit.Ledger(…).")
        if "curator" in loose:
            loose["curator"] = as_curator(loose["curator"], where)
        return cast(Callable[..., R], function)(*args, **loose)

    return called
