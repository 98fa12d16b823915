"""From a recipe to its report.

A kind of recipe is three names: the dataclass that its file fills, the function that does the work and the one that
turns what came out into a report. They are loaded when a recipe asks for them and not before.

    run(config, *, out: Path, progress: Progress) -> result
    render(result) -> Findings
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.findings import Findings, carry_out
from studies.part import Only, part
from tacit import recipes
from tacit.recipes import Progress

HOME = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Where a kind of recipe lives, each as ``package.module:name``."""

    config: str
    run: str
    render: str

    @classmethod
    def at(cls, study: str, report: str, config: str = "Study") -> Kind:
        return cls(config=f"{study}:{config}", run=f"{study}:run", render=f"{report}:render")


KINDS: dict[str, Kind] = {
    "adapt": Kind.at("studies.dp_tta.study", "studies.dp_tta.report"),
    "finetune": Kind.at("studies.finetune.study", "studies.finetune.report"),
    "pretrain": Kind.at("studies.dpadapter.study", "studies.dpadapter.report"),
    "recalibration": Kind.at("studies.recalibration.study", "studies.recalibration.report"),
    "source-model": Kind.at("studies.dp_tta.source_model", "studies.dp_tta.source_model", config="SourceModel"),
    "tune": Kind.at("studies.linear_scaling.study", "studies.linear_scaling.report"),
}


def listed() -> list[Path]:
    """Every recipe of the laboratory, as `find` takes it."""
    return sorted(path.relative_to(HOME) for path in HOME.glob("*/*.toml"))


def find(recipe: Path) -> Path:
    """A recipe as it was written on the command line: a file of its own, or PAPER/NAME.toml of the laboratory."""
    inside = HOME / recipe
    return inside if not recipe.exists() and inside.is_file() else recipe


def read(recipe: Path, only: Only | None = None) -> tuple[str, Any]:
    """The kind of a recipe and its configuration, or the part of it that ``only`` names."""
    kind, config = recipes.read(find(recipe), _Configs())
    return kind, part(config, only) if only else config


def run(recipe: Path, out: Path, only: Only | None = None) -> tuple[Findings, dict[str, Any]]:
    """Run a recipe, or the part that ``only`` names, and write its report, privacy card and facts to ``out``."""
    kind, config = read(recipe, only)

    def work(progress: Progress) -> Findings:
        result = load(KINDS[kind].run)(config, out=out, progress=progress)
        findings: Findings = load(KINDS[kind].render)(result)
        return findings

    about = {"kind": kind, "recipe": recipes.plain(config), "fingerprint": recipes.fingerprint(config)}
    return carry_out(out, work, about)


class _Configs(Mapping[str, type]):
    """The dataclass of each kind, loaded when it is looked up."""

    def __getitem__(self, kind: str) -> type:
        found: type = load(KINDS[kind].config)
        return found

    def __contains__(self, kind: object) -> bool:
        return kind in KINDS

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


def load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
