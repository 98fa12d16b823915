"""The rules of the house: who may import whom, and how long a file may be."""

import ast
import importlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tacit"
STAGES = {"pretrain", "finetune", "tune", "adapt", "calibrate"}
# What each package may import; one that is not named may import everything but cli and report.
MAY_IMPORT = {
    "privacy": set[str](),
    "gradients": set[str](),
    "data": set[str](),
    "models": {"gradients", "data"},
    **dict.fromkeys(STAGES, STAGES | {"privacy", "gradients", "data", "models"}),
    "pretrain": {"gradients", "data", "models"},
    "distributed": set[str](),
    "finetune": {"privacy", "gradients", "data", "models", "distributed"},
    **dict.fromkeys(("adapt", "tune"), STAGES | {"privacy", "gradients", "data", "models", "distributed"}),
    "audit": STAGES | {"privacy", "gradients", "data", "models"},
}

# May import cli and report; `_saving` stands between the stages and `report`: a result is saved with its card.
SHOWN = {"cli", "report", "pipeline", "serve", "__main__", "__init__", "_saving"}


def imports(file: Path) -> set[str]:
    """The packages of tacit that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute here"
            names = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("tacit.")}
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(SOURCE)) for file in FILES])
def test_imports_go_one_way(file: Path) -> None:
    package = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    allowed = MAY_IMPORT.get(package)
    for other in imports(file) - {package}:
        if not (SOURCE / other).exists():
            continue  # a name of the package itself, such as __version__
        if other in {"recipes", "progress"}:
            continue  # how runs are described and shown: no private values
        assert other not in {"cli", "report"} or package in SHOWN, f"{package} imports {other}"
        assert allowed is None or other in allowed, f"{package} imports {other}"


STUDIES = SOURCE.parent.parent / "studies"


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(SOURCE)) for file in FILES])
def test_the_package_does_not_import_studies(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.split(".")[0] == "studies"], f"{file} imports studies"


STUDY_FILES = sorted(STUDIES.rglob("*.py"))
MODULES = {"tacit", "tacit.recipes", "tacit.progress"}  # doors that are no packages
FIGURES = {"tacit.report": {"theme", "plots"}}  # loaded only when asked for: matplotlib is slow


@pytest.mark.parametrize("file", STUDY_FILES, ids=[str(file.relative_to(STUDIES)) for file in STUDY_FILES])
def test_studies_use_public_names_only(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("tacit")], "from tacit… import …"
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "tacit":
            continue
        door = node.module or ""
        assert "._" not in door, f"{door} is inside a package: use what the package offers"
        if door == "tacit":
            continue
        offered = importlib.import_module(door).__all__
        assert {alias.name for alias in node.names} <= {*offered, *FIGURES.get(door, ())}, f"{door} has no such name"


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(SOURCE)) for file in FILES])
def test_modules_are_private_and_packages_have_doors(file: Path) -> None:
    assert file.name.startswith("_"), "a module is private (_name.py); a public namespace is a folder with an __init__"
    if file.name == "__init__.py" and file.parent.name != "layers":
        names = [
            target.id
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        assert "__all__" in names, "the door of a package says what it offers"


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(SOURCE)) for file in FILES])
def test_packages_import_each_other_through_their_doors(file: Path) -> None:
    package = file.relative_to(SOURCE).parts[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            addresses = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            addresses = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # for importlib and the like
            addresses = re.findall(r"^tacit(?:\.\w+)+$", node.value) if file.name != "_moved.py" else []
        else:
            continue
        for address in (address for address in addresses if address.startswith("tacit.")):
            _, other, *inside = address.split(".")
            if other == package or other.startswith("_") or not (SOURCE / other).is_dir():
                continue
            assert not [part for part in inside if part.startswith("_")], f"{address} is behind the door of {other}"


def test_no_function_shadows_its_module() -> None:
    for door in (file for file in FILES if file.name == "__init__.py" and file.parent != SOURCE):
        offered = importlib.import_module(".".join(("tacit", *door.parent.relative_to(SOURCE).parts)))
        for module in (file.stem for file in door.parent.glob("*.py") if file.name != "__init__.py"):
            assert isinstance(getattr(offered, module, offered), type(offered)), f"{door.parent.name}.{module}"


def test_nothing_draws_randomness_behind_the_mechanisms_back() -> None:
    """Inside privacy, no generator of torch, numpy or Python: private noise comes from the keyed stream.

    `generators` gives them a secret state for what a model draws itself, and draws nothing.
    """
    for file in (SOURCE / "privacy").rglob("*.py"):
        if file.name == "_generators.py":
            continue
        text = file.read_text()
        for word in ("torch.rand", "torch.normal", "np.random", "import random", "torch.Generator", "normal_("):
            assert word not in text, f"{file.name} uses {word}"


def docstring_lines(tree: ast.Module) -> int:
    """How many lines of a file are docstrings: what a public name says of itself does not make a file long."""
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)]
    texts = [node.body[0] for node in documented if node.body and ast.get_docstring(node) is not None]
    return sum((text.end_lineno or text.lineno) - text.lineno + 1 for text in texts)


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(SOURCE)) for file in FILES])
def test_files_stay_short(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) - docstring_lines(ast.parse(text)) <= 370, "two ideas in one: split it"
