"""Results of a suite on the terminal, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paired import GIB, Result, Row, Verdict

COLUMNS = ("arm", "time ratio (95%)", "pairs", "median time", "peak memory", "memory ratio")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS; the note stands where the ratio would be."""
    memory = "" if row.memory is None else f"{row.memory / GIB * 1024:.0f} MB"
    memory_ratio = "" if row.memory_ratio is None else f"{row.memory_ratio:.2f}"
    if row.ratio is None:
        return row.arm, row.note, "", "", memory, memory_ratio
    ratio = f"{row.ratio.median:.3f} [{row.ratio.low:.3f}, {row.ratio.high:.3f}]"
    return row.arm, ratio, str(row.pairs), f"{row.median_seconds * 1000:.1f} ms", memory, memory_ratio


def sentence(verdict: Verdict) -> str:
    word = {True: "met", False: "missed", None: "not measured"}[verdict.met]
    return f"{verdict.bar}: {word} ({verdict.found})"


def show(result: Result, console: Console) -> None:
    table = Table(*COLUMNS, title=f"{result.title} — ratio to: {result.reference}", title_justify="left")
    for row in result.rows:
        table.add_row(*cells(row))
    console.print(table)
    for verdict in result.verdicts:
        colour = {True: "green", False: "red", None: "yellow"}[verdict.met]
        console.print(f"  [{colour}]{sentence(verdict).replace('[', chr(92) + '[')}[/]")


def markdown(results: Sequence[Result], machine: Mapping[str, str]) -> str:
    """The section of docs/benchmarks.md for these results."""
    parts = ["Measured on: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + "."]
    for result in results:
        lines = [
            f"### {result.title}",
            "",
            f"Ratio to: {result.reference}. Null: {result.null_deviation:.3f} from 1.",
            "",
        ]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in result.rows]
        lines += ["", *(f"- {sentence(verdict)}" for verdict in result.verdicts)]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts) + "\n"


def save(path: Path, results: Sequence[Result], machine: Mapping[str, str]) -> None:
    content = {"machine": dict(machine), "results": [result.to_json() for result in results]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(path: Path) -> tuple[list[Result], dict[str, str]]:
    content = json.loads(path.read_text())
    return [Result.from_json(result) for result in content["results"]], content["machine"]
