"""Draw the packages of tacit and who imports whom, from the source by `ast`, as an SVG: `make diagram`.

A package stands in the row below everything that imports it. Edges that follow from others (a imports b, b imports c,
so a reaches c) are not drawn: they are in the picture's data, which `tests/test_architecture.py` compares with the
source.
"""

from __future__ import annotations

import ast
import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tacit"
PICTURE = ROOT / "docs" / "pictures" / "packages.svg"
WIDTH, BOX, GAP, ROW = 960, (150, 46), 36, 104
STAGES = {"pretrain", "finetune", "tune", "adapt", "calibrate"}
CORE = {"privacy", "gradients"}
SAYS = {
    "privacy": "budgets, ledger, noise",
    "gradients": "clipped sums per unit",
    "data": "records with their unit",
    "models": "nets, schemes, saving",
    "pretrain": "public data",
    "finetune": "private, labelled",
    "tune": "hyperparameters",
    "adapt": "private streams",
    "calibrate": "many sources",
    "report": "tables, page, card",
    "audit": "attacks",
    "pipeline": "stages from TOML",
    "cli": "the commands",
    "integrations": "Trainer, Lightning",
    "distributed": "torchrun, FSDP2",
    "serve": "services",
    "progress": "bars, epsilon so far",
    "recipes": "settings in TOML",
}

Edges = set[tuple[str, str]]


def packages() -> list[str]:
    """The packages that have a door (an `__init__` with code in the folder)."""
    return sorted(folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists())


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "tacit":
        return [f"tacit.{alias.name}" for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def edges() -> Edges:
    """(importing package, imported package), from every import in the source, also those inside functions."""
    known, found = set(packages()), set()
    for package in known:
        for file in (SOURCE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                for name in _imported(node):
                    other = name.split(".")[1] if name.startswith("tacit.") else ""
                    if other in known and other != package:
                        found.add((package, other))
    return found


def levels(graph: Edges) -> dict[str, int]:
    """The row of each package, 0 at the bottom: one above the highest of what it imports (cycles share a row)."""
    reach = {name: _reachable(graph, name) for name in packages()}
    result: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in result:
            below = [other for other in reach[name] if name not in reach[other]]
            result[name] = 1 + max((level(other) for other in below), default=-1)
        return result[name]

    for name in reach:
        level(name)
    return result


def _reachable(graph: Edges, start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        here = todo.pop()
        for a, b in graph:
            if a == here and b not in found:
                found.add(b)
                todo.append(b)
    return found - {start}


def drawn(graph: Edges) -> Edges:
    """The edges that do not follow from others (the transitive reduction)."""
    reach = {name: _reachable(graph, name) for name in packages()}
    through = {
        (a, b) for a, b in graph if any(c != b and b in reach[c] and a not in reach[c] for x, c in graph if x == a)
    }
    return graph - through


def places(graph: Edges, level: dict[str, int], height: float) -> dict[str, tuple[float, float]]:
    """The middle of each box, and under "a b row" the point at which a longer edge passes a row between boxes."""
    lines = {(a, b): [f"{a} {b} {row}" for row in range(level[b] + 1, level[a])] for a, b in drawn(graph)}
    below: dict[str, list[str]] = {}
    for (a, b), between in lines.items():
        for lower, upper in itertools.pairwise([b, *between, a]):
            below.setdefault(upper, []).append(lower)
    found: dict[str, tuple[float, float]] = {}

    def middle(name: str) -> tuple[float, str]:
        under = [found[lower][0] for lower in below.get(name, [])]
        return (sum(under) / len(under) if under else WIDTH / 2), name

    for row in range(max(level.values()) + 1):
        names = [name for name in level if level[name] == row]
        names += [point for between in lines.values() for point in between if point.endswith(f" {row}")]
        widths = [(BOX[0] if name in level else 0) + GAP for name in sorted(names, key=middle)]
        x = (WIDTH - sum(widths)) / 2
        for name, width in zip(sorted(names, key=middle), widths, strict=True):
            found[name] = (x + width / 2, height - ROW * (row + 0.5) - 10)
            x += width
    return found


def path(points: list[tuple[float, float]]) -> str:
    """A smooth line downwards from box to box; between boxes it is vertical."""
    half = BOX[1] / 2
    x, y = points[0][0], points[0][1] + half
    text = f"M{x:.0f} {y:.0f}"
    for i, (x2, middle) in enumerate(points[1:], 1):
        top, bend = middle - half, (middle - half - y) / 2
        text += f"C{x:.0f} {y + bend:.0f} {x2:.0f} {top - bend:.0f} {x2:.0f} {top:.0f}"
        if i < len(points) - 1:
            text += f"V{middle + half:.0f}"
        x, y = x2, middle + half
    return text


def svg() -> str:
    """The picture; its first comment holds all edges as JSON."""
    graph = edges()
    level = levels(graph)
    height = ROW * (max(level.values()) + 1) + 20
    place = places(graph, level, height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif">',
        f"<!-- edges {json.dumps(sorted(graph))} -->",
        "<title>The packages of tacit: an arrow leads from a package to one that it imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#78909c"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for a, b in sorted(drawn(graph)):
        via = [place[f"{a} {b} {row}"] for row in range(level[a] - 1, level[b], -1)]
        lines.append(
            f'<path d="{path([place[a], *via, place[b]])}" fill="none" stroke="#78909c" stroke-width="1.3" '
            'marker-end="url(#tip)"/>'
        )
    for name in sorted(level):
        x, y = place[name]
        fill = "#b2dfdb" if name in CORE else "#cfd8dc" if name in STAGES else "#f5f5f5"
        lines += [
            f'<rect x="{x - BOX[0] / 2:.0f}" y="{y - BOX[1] / 2:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="6" '
            f'fill="{fill}" stroke="#546e7a"/>',
            f'<text x="{x:.0f}" y="{y - 3:.0f}" text-anchor="middle" font-size="15" font-weight="600" '
            f'fill="#263238">{name}</text>',
            f'<text x="{x:.0f}" y="{y + 14:.0f}" text-anchor="middle" font-size="11" '
            f'fill="#455a64">{SAYS.get(name, "")}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def shown() -> Edges:
    """The edges that the committed picture was drawn from."""
    line = next(line for line in PICTURE.read_text("utf-8").splitlines() if line.startswith("<!-- edges "))
    return {(a, b) for a, b in json.loads(line.removeprefix("<!-- edges ").removesuffix(" -->"))}


if __name__ == "__main__":
    PICTURE.write_text(svg(), "utf-8")
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: {len(packages())} packages, {len(edges())} imports\n")
