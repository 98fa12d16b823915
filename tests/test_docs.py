"""What the pages show is what happens: their Python runs, their commands run, and the printed output is compared.

The blocks of one page run in order, in one namespace and one temporary folder. A ```python block that is directly
followed by a ```text block must print it. In a ```console block, every line that starts with `$ tacit` is run and what
follows it must be its output. Both are compared up to white space, and … stands for anything (a time, a hash).
"""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tacit.cli._main import run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    body: str
    line: int
    follows_directly: bool  # nothing but white space since the block before


def blocks(text: str) -> Iterator[Block]:
    end = 0
    for found in BLOCK.finditer(text):
        indent = len(found["indent"])
        body = "".join(line[indent:] if line.strip() else line for line in found["body"].splitlines(keepends=True))
        line, between = text.count("\n", 0, found.start()) + 2, text[end : found.start()]
        yield Block(found["language"], body, line, not between.strip())
        end = found.end()


def commands(body: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown for it."""
    for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def matches(shown: str, printed: str) -> bool:
    pattern = ".*?".join(re.escape(" ".join(part.split())) for part in shown.split("…"))
    return re.fullmatch(pattern, " ".join(printed.split()), re.S) is not None


def run_python(block: Block, page: str, namespace: dict[str, Any]) -> str:
    source = "\n" * (block.line - 1) + block.body  # so that a traceback points into the page
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, page, "exec"), namespace)
    return out.getvalue()


def run_command(command: str) -> str:
    name, *arguments = shlex.split(command)
    assert name == "tacit", f"only tacit runs here, not {name}: use a ```sh block for {command!r}"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out), pytest.raises(SystemExit):
        run(arguments)
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_examples_do_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)  # the examples are small: on a busy machine several threads wait for each other
    namespace: dict[str, Any] = {"__name__": "__page__"}
    printed: str | None = None  # by the Python block just before
    for block in blocks(page.read_text("utf-8")):
        where = f"{page.name}:{block.line}"
        if block.language == "text" and printed is not None and block.follows_directly:
            assert matches(block.body, printed), f"{where}: this was printed instead\n{printed}"
        printed = None
        if block.language == "python":
            printed = run_python(block, str(page), namespace)
        elif block.language == "console":
            for command, shown in commands(block.body):
                output = run_command(command)
                assert matches(shown, output), f"{where}: {command} printed instead\n{output}"


def test_tests_that_the_pages_name_exist() -> None:
    """The guarantees name the test that checks each of them."""
    tests = [file.read_text("utf-8") for file in (ROOT / "tests").rglob("*.py")]
    known = {name for text in tests for name in re.findall(r"def (test_\w+)", text)}
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text("utf-8"))}
    assert len(named) > 20
    assert named <= known, f"no such test: {', '.join(sorted(named - known))}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)):
        file = target.partition("#")[0]
        if file and "://" not in target:
            assert (page.parent / file).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a  b\nc", "a b c\n", True),
        ("head: …", "head: 3:fa9", True),
        ("a … d", "a b c d", True),
        ("a (b) …", "a b c", False),
        ("ab", "a c", False),
    ],
)
def test_the_comparison_itself(shown: str, printed: str, same: bool) -> None:
    assert matches(shown, printed) is same


def test_blocks_are_found_also_inside_a_list() -> None:
    text = "- item\n\n    ```python\n    if True:\n        print(1)\n    ```\n\n    ```text\n    1\n    ```\n"
    code, output = blocks(text)
    assert (code.body, code.line) == ("if True:\n    print(1)\n", 4)
    assert (output.body, output.follows_directly) == ("1\n", True)
