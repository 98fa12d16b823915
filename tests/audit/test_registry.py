"""Every release of the package names its audit."""

import ast
import inspect
from pathlib import Path

import tacit
from tacit import finetune
from tacit.audit import REGISTRY, TWINS, covered
from tacit.audit._steps import optimizers
from tacit.privacy import mechanisms

SOURCE = Path(tacit.__file__).parent
RELEASING = {
    name
    for name, found in vars(mechanisms).items()
    if not name.startswith("_")
    and getattr(found, "__module__", "").startswith("tacit.privacy.mechanisms")
    and "receipt" in inspect.signature(found).parameters
} - {"prepare"}  # draws the noise of the next release, and hands out nothing


def test_the_mechanisms_that_release_are_known() -> None:
    assert {
        "gaussian",
        "GaussianShards",
        "GaussianStream",
        "gaussian_query",
        "laplace",
        "noisy_max",
        "share",
    } == RELEASING


def test_noise_that_is_drawn_early_is_handed_to_nobody() -> None:
    assert inspect.signature(mechanisms.prepare).return_annotation == "None"


def test_every_mechanism_names_its_audit() -> None:
    assert {f"privacy.mechanisms.{name}" for name in RELEASING} <= covered()


class Sites(ast.NodeVisitor):
    """The functions of a file that get hold of a mechanism, or of the trials of a search."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.found: set[str] = set()
        self.direct: set[str] = set()  # names imported from mechanisms

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if "mechanisms" in (node.module or "").split("."):
            self.direct |= {alias.asname or alias.name for alias in node.names} & RELEASING

    def _scoped(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.scope.append(node.name)
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.FunctionDef) and child in (node.returns, node.args):
                continue  # annotations release nothing
            self.visit(child)
        self.scope.pop()

    visit_FunctionDef = visit_ClassDef = _scoped  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        whose = node.value.id if isinstance(node.value, ast.Name) else ""
        if (whose, node.attr) == ("selection", "SelectionTrials") or (whose == "mechanisms" and node.attr in RELEASING):
            self.found.add(".".join(self.scope))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.direct:
            self.found.add(".".join(self.scope))


def releasing_functions() -> set[str]:
    found = set()
    for file in sorted(SOURCE.rglob("*.py")):
        room = file.relative_to(SOURCE).parts[0]
        if room in {"privacy", "audit"}:
            continue
        sites = Sites()
        sites.visit(ast.parse(file.read_text()))
        found |= {f"{room.removesuffix('.py')}.{site}" for site in sites.found}
    return found


def test_every_stage_that_releases_names_its_audit() -> None:
    found = releasing_functions()
    assert len(found) >= 8, "the scan has lost its way"
    missing = found - covered()
    assert not missing, f"register an audit (tacit.audit.audits) for: {', '.join(sorted(missing))}"


def test_every_optimizer_is_attacked() -> None:
    """Optimizers share the function that releases; their queries, and how they split the noise, are their own."""
    made = {name for name in finetune.__all__ if _makes_an_optimizer(getattr(finetune, name))}
    assert {"DPSGD", "HyFreeDP"} <= made, "the scan has lost its way"
    elsewhere = {
        "DPGD": "fine-tuning run",
        "DPFTRL": "fine-tuning run",
        "BandMF": "stream",  # with cyclic Poisson sampling; its query is that of DPSGD
        "AdpAlloc": "training steps",  # its query is that of DPSGD; its schedule: test_mechanism.py
    }
    assert made == optimizers().keys() | elsewhere.keys()
    assert set(elsewhere.values()) <= REGISTRY.keys()


def _makes_an_optimizer(thing: object) -> bool:
    return inspect.isfunction(thing) and inspect.signature(thing).return_annotation in ("Optimizer", finetune.Optimizer)


def test_the_page_lists_every_mistake_that_must_be_found() -> None:
    page = (SOURCE.parents[1] / "docs" / "audit.md").read_text("utf-8")
    for make in TWINS:
        assert f"\n| {make().name} | " in page


def test_audits_name_nothing_that_is_not_there() -> None:
    mechanisms_ = {f"privacy.mechanisms.{name}" for name in RELEASING}
    assert covered() <= releasing_functions() | mechanisms_
    assert all(audit.covers for audit in REGISTRY.values())
