"""The picture on the architecture page is drawn from the source, and the page names modules that exist."""

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("package_graph", ROOT / "tools" / "package_graph.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


graph: Any = load()


def test_the_picture_shows_the_imports_of_the_source() -> None:
    assert graph.shown() == graph.edges(), "imports between packages have changed: run `make diagram`"


def test_the_edges_are_those_that_a_plain_search_finds() -> None:
    """A second, cruder way to the same edges: lines that import, by a pattern."""
    known = set(graph.packages())
    line = re.compile(
        r"^\s*(?:from tacit\.(\w+)[\w.]* import|import tacit\.(\w+)|from tacit import \(?([\w, ]+))", re.M
    )
    found = set()
    for package in known:
        for file in (graph.SOURCE / package).rglob("*.py"):
            for a, b, several in line.findall(file.read_text("utf-8")):
                names = {a or b} if a or b else {part.split(" as ")[0].strip() for part in several.split(",")}
                found |= {(package, name) for name in names & known if name != package}
    assert found <= graph.edges()
    assert len(graph.edges() - found) <= 3, "imports over several lines"


def test_what_is_not_drawn_follows_from_what_is() -> None:
    edges, drawn = graph.edges(), graph.drawn(graph.edges())
    assert drawn < edges
    reachable = {name: graph._reachable(drawn, name) for name in graph.packages()}
    assert all(b in reachable[a] for a, b in edges)


def test_a_package_stands_above_what_it_imports() -> None:
    edges = graph.edges()
    level = graph.levels(edges)
    assert all(level[a] > level[b] for a, b in edges), "packages import each other in a circle"


@pytest.mark.parametrize("package", ["finetune", "adapt", "pipeline", "privacy"])
def test_modules_that_the_page_names_exist(package: str) -> None:
    named = re.findall(rf"`(?:{package}/)(_\w+)\.py`", PAGE)
    if package in {"finetune", "privacy"}:
        heading = {"finetune": "## From `finetune.fit`", "privacy": "## Inside `privacy`"}[package]
        section = PAGE.split(heading)[1].split("\n## ")[0]
        named += re.findall(r"`(_\w+)[.`]", section)
    assert len(set(named)) >= 3
    for name in set(named):
        assert (graph.SOURCE / package / f"{name}.py").exists(), f"docs/architecture.md names {package}/{name}.py"


WALKS = {"From `finetune.fit`": "tacit.finetune", "From `tacit demo`": "tacit"}


def named(heading: str) -> list[str]:
    """What the second column of a walk's table names in backticks."""
    section = PAGE[PAGE.index(f"## {heading}") :].split("\n## ")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("heading", WALKS)
def test_the_walks_name_functions_that_exist(heading: str) -> None:
    steps = [name for name in named(heading) if not name.endswith((".py", ".toml", "/"))]
    assert steps
    for step in steps:
        places = [WALKS[heading], "tacit", "tacit.privacy"]
        assert any(exists(f"{place}.{step.replace('/', '.')}") for place in places), f"there is no {step}"


def exists(address: str) -> bool:
    parts = address.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found is not None
    return False
