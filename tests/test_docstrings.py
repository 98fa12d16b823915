"""Public names are documented: their docstrings list every argument, and their examples run.

A public name is one in the `__all__` of a package. Its docstring is Google style, as the reference page renders it:
a line, then `Args`, `Returns`, `Raises` and `Examples`, whose `>>>` blocks are run here.
"""

import dataclasses
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, is_typeddict

import pytest
import torch

PACKAGES = [
    "tacit.privacy",
    "tacit.privacy.accounting",
    "tacit.privacy.correlated",
    "tacit.privacy.events",
    "tacit.privacy.mechanisms",
    "tacit.privacy.sampling",
    "tacit.gradients",
    "tacit.data",
    "tacit.models",
    "tacit.pretrain",
    "tacit.tune",
    "tacit.finetune",
    "tacit.adapt",
    "tacit.calibrate",
    "tacit",
]
EARLIER = {"units", "optimiser"}  # earlier names of arguments, which warn: they need no description
# Not described argument by argument yet. The list only shrinks.
UNDESCRIBED: frozenset[str] = frozenset()
ARGUMENT = re.compile(r"^ {4}(\*{0,2}\w+):", re.M)
ARGS = re.compile(r"^Args:\n((?: {4}.*\n|\n)+)", re.M)


def public() -> dict[str, Any]:
    """Every public class and function, by the first name under which it is offered, and the methods of classes."""
    found: dict[str, Any] = {}
    seen = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = inspect.unwrap(getattr(module, name))
            if not (inspect.isclass(value) or inspect.isfunction(value)) or id(value) in seen:
                continue
            if not value.__module__.startswith("tacit."):
                continue
            seen.add(id(value))
            found[f"{package}.{name}"] = value
            if inspect.isclass(value) and not is_typeddict(value):
                for method, function in methods(value):
                    found[f"{package}.{name}.{method}"] = function
    return found


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods of a class that say something themselves."""
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function) and function.__doc__ and (not name.startswith("_") or name == "__call__"):
            yield name, inspect.unwrap(function)


def arguments(value: Any) -> set[str]:
    """What a caller may give."""
    if inspect.isclass(value):
        if is_typeddict(value) or getattr(value, "_is_protocol", False):
            return set()
        if dataclasses.is_dataclass(value):
            return {field.name for field in dataclasses.fields(value) if field.init and not field.name.startswith("_")}
        if "__init__" not in vars(value):
            return set()
        value = value.__init__
    return {
        {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "") + name
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in {"self", "cls"} | EARLIER and not name.startswith("_")
    }


def described(value: Any) -> set[str]:
    """The arguments that the docstring lists."""
    text = inspect.cleandoc(value.__doc__ or "")
    if inspect.isclass(value) and "__init__" in vars(value):
        text += "\n\n" + inspect.cleandoc(value.__init__.__doc__ or "")
    return {name for section in ARGS.findall(text + "\n") for name in ARGUMENT.findall(section)}


PUBLIC = public()
METHODS = {name for name in PUBLIC if name.rpartition(".")[0] in PUBLIC}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_argument_of_a_public_name_is_described(name: str) -> None:
    value = PUBLIC[name]
    assert value.__doc__, f"{name} has no docstring"
    taken, listed = arguments(value), described(value)
    if name in UNDESCRIBED:
        assert taken - listed, f"{name} is complete: take it off the list UNDESCRIBED"
        return
    assert listed <= taken | EARLIER, f"{name} does not take {sorted(listed - taken)}"
    if name in METHODS and not listed:
        return  # a method may say it in its sentence; if it lists arguments, then all
    assert taken <= listed, f"{name} takes {sorted(taken - listed)}: describe it in the Args of its docstring"


EXAMPLES = sorted(name for name, value in PUBLIC.items() if ">>>" in (value.__doc__ or ""))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = inspect.cleandoc(PUBLIC[name].__doc__ or "")
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(
        example, out=report.append
    )
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_the_names_that_most_people_use_have_an_example() -> None:
    used = {
        "privacy": ["Budget", "Guarantee", "Ledger", "guarantee", "noise_multiplier", "grid_sum"],
        "privacy.mechanisms": ["gaussian", "laplace"],
        "privacy.events": ["poisson"],
        "gradients": ["clipped_sum", "Engine"],
    }
    assert {f"tacit.{package}.{name}" for package, names in used.items() for name in names} <= set(EXAMPLES)


# Words that nobody searches for, and what the field calls it (docs/glossary.md).
DIALECT = {
    "drawn by chance": "Poisson-subsampled",
    "batches by chance": "Poisson-subsampled batches",
    "cannot be so": "is invalid",
    "taken up": "resumed",
    "take up a": "resume a",
    "the laboratory": "studies",
    "made-up": "synthetic",
    "are dealt": "are partitioned, are assigned",
    "would tell on": "would reveal",
    "Say size=": "Give size=",
    "an optimiser": "an optimizer",
    "the optimiser": "the optimizer",
    "nobody hears": "only curator= receives it",
    "curator.error": "curator=",
}
ROOT = Path(__file__).parent.parent
TEXTS = [*sorted((ROOT / "src" / "tacit").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


@pytest.mark.parametrize("file", TEXTS, ids=[str(file.relative_to(ROOT)) for file in TEXTS])
def test_the_words_of_the_field_are_used(file: Path) -> None:
    text = " ".join(file.read_text("utf-8").split())
    for private, known in DIALECT.items():
        assert private not in text, f"{file.name} says {private!r}: the field says {known!r}"
