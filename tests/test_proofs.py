"""The appendix names tests for what it proves: every one of them exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("docs/proofs.md", "docs/guarantees.md")
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    found = NAMED.findall((ROOT / page).read_text())
    missing = [
        f"{file}::{name}"
        for file, name in found
        if not (ROOT / file).is_file() or (name and name not in functions(ROOT / file))
    ]
    assert not missing


def test_every_statement_of_the_appendix_names_a_test() -> None:
    """Each section with a lemma or a theorem has a "Checked by"."""
    text = (ROOT / "docs/proofs.md").read_text()
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    bare = [
        part.splitlines()[0] for part in sections if re.search(r"\*\*(Lemma|Theorem)", part) and not NAMED.search(part)
    ]
    assert len(sections) > 10
    assert not bare


def test_a_bare_name_on_the_guarantees_page_is_a_test_somewhere() -> None:
    known = {name for path in (ROOT / "tests").rglob("test_*.py") for name in functions(path)}
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs/guarantees.md").read_text())
    assert named
    assert not [name for name in named if name not in known]
