"""Old names keep working, warn once, and lead to what is there today."""

import importlib
import importlib.util
import inspect
import pickle
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import pytest
import torch

from tacit import _deprecation, finetune, recipes
from tacit._deprecation import (
    REMOVED_IN,
    MovedModules,
    renamed_argument,
    renamed_attributes,
    renamed_fields,
    warn_renamed,
)
from tacit._moved import _RENAMED, MOVED

RENAMED = {
    "tacit.adapt": {"Certain": "EntropyFilter", "Unusual": "RedundancyFilter", "Structured": "PLPDFilter"},
    "tacit.finetune": {"Steady": "ConstantNoise", "Optimiser": "Optimizer"},
    "tacit.models": {"Adapter": "BottleneckAdapter"},
    "tacit.tune": {"Here": "SerialRunner"},
    "tacit.privacy.selection": {"Trial": "SelectionTrial", "Trials": "SelectionTrials"},
    "tacit.privacy.accounting": {"Terms": "Decomposition"},
    "tacit.report.plots": {"Line": "Curve"},
}


def test_a_renamed_thing_warns_once_per_process() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_renamed("old", "new")
        warn_renamed("other", "new")
    assert [str(each.message) for each in said] == [
        f"old is now new; the old name ends with tacit {REMOVED_IN}.",
        f"other is now new; the old name ends with tacit {REMOVED_IN}.",
    ]
    assert all(each.category is DeprecationWarning for each in said)


def asked(new: Any = None, old: Any = None, default: Any = None) -> Any:
    return renamed_argument("old", old, "new", new, where="asked", default=default)


def test_an_argument_under_its_new_name_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(new=3) == 3
        assert asked() is None
        assert asked(new="d", default="d") == "d"


def test_an_argument_under_its_old_name_warns_where_it_was_given() -> None:
    with pytest.warns(DeprecationWarning, match=r"asked\(old=…\) is now new=…") as said:
        assert asked(old=4) == 4
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(old=5, new="d", default="d") == 5  # the second time; a default is not something given


@pytest.mark.parametrize("given", [{"new": 1}, {"new": 0}, {"new": "x", "default": "d"}])
def test_both_names_at_once_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"asked got old= and new=, which are the same: leave old= out\."):
        asked(old=2, **given)


@renamed_fields(batch="batch_size")
@dataclass(frozen=True, kw_only=True)
class Settings:
    lr: float
    batch_size: int = 3


def test_a_renamed_field_is_given_and_read_by_its_old_name_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"Settings\(batch=…\) is now batch_size=…") as said:
        made = Settings(lr=0.5, batch=7)  # type: ignore[call-arg]
    assert said[0].filename == __file__
    assert made == Settings(lr=0.5, batch_size=7)
    with pytest.warns(DeprecationWarning, match=r"Settings\.batch is now Settings\.batch_size"):
        assert made.batch == 7  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"got batch= and batch_size=, which are the same"):
        Settings(lr=0.5, batch=7, batch_size=7)  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replace(made, lr=1.0) == Settings(lr=1.0, batch_size=7)
        assert pickle.loads(pickle.dumps(made)) == made
        assert repr(made) == "Settings(lr=0.5, batch_size=7)"


def test_a_recipe_with_the_old_name_of_a_key_is_read_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text("lr = 0.5\nbatch = 7\n")
    with pytest.warns(DeprecationWarning, match=r"The key batch is now batch_size; .* tacit 0\.4"):
        assert recipes.read_as(tmp_path / "old.toml", Settings) == Settings(lr=0.5, batch_size=7)
    (tmp_path / "both.toml").write_text("lr = 0.5\nbatch = 7\nbatch_size = 7\n")
    with pytest.raises(recipes.RecipeError, match=r"line 2: batch is the earlier name of batch_size: leave it out"):
        recipes.read_as(tmp_path / "both.toml", Settings)


@pytest.mark.parametrize(
    ("door", "old", "new"), [(door, old, new) for door, names in RENAMED.items() for old, new in names.items()]
)
def test_old_names_of_a_door_lead_to_the_new_ones(door: str, old: str, new: str) -> None:
    package = importlib.import_module(door)
    with pytest.warns(DeprecationWarning, match=f"{door}.{old} is now {door}.{new}"):
        assert getattr(package, old) is getattr(package, new)
    assert new in package.__all__
    assert old not in package.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_names_that_were_never_there_are_missing_as_usual() -> None:
    lookup = renamed_attributes("tacit.tune", {"Here": "SerialRunner"})
    with pytest.raises(AttributeError, match=r"module 'tacit.tune' has no attribute 'There'"):
        lookup("There")


def test_modules_that_moved_have_no_stale_target_and_no_live_source() -> None:
    assert MOVED
    for old, new in MOVED.items():
        assert old != new
        assert new not in MOVED, f"{old} leads to {new}, which has moved again"
        assert importlib.util.find_spec(new) is not None, f"{old} leads to {new}, which is not there"


@pytest.mark.parametrize("old", sorted(MOVED))
@pytest.mark.filterwarnings("ignore:.*the old name ends:DeprecationWarning")
def test_an_old_module_path_is_the_same_module(old: str) -> None:
    found, own = importlib.import_module(old), importlib.import_module(MOVED[old])
    assert found is own
    assert own.__name__ == MOVED[old]
    assert own.__spec__ is not None
    assert own.__spec__.name == MOVED[old]  # else the module could not be reloaded or pickled from


def test_the_finder_is_there_once_and_knows_nothing_else() -> None:
    import sys

    MovedModules(MOVED).install()
    assert sum(isinstance(finder, MovedModules) for finder in sys.meta_path) == 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tacit.privacy.never")


@pytest.mark.filterwarnings("ignore:.*the old name ends:DeprecationWarning")
def test_a_pickle_with_old_names_is_read() -> None:
    from tacit.models import BottleneckAdapter

    layer = BottleneckAdapter(4)
    written = pickle.dumps(layer, protocol=0)
    older = written.replace(b"ctacit.models._adapters\nBottleneckAdapter\n", b"ctacit.models.adapters\nAdapter\n")
    assert older != written
    found = pickle.loads(older)
    assert type(found) is BottleneckAdapter
    assert torch.equal(found.down.weight, layer.down.weight)


def test_the_helper_starts_anew_in_each_test() -> None:
    assert _deprecation._warned == set()


def test_the_changelog_has_every_old_name() -> None:
    text = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    table = text[text.index("### Migration") :]
    for door, names in RENAMED.items():
        for old, new in names.items():
            short = door.removeprefix("tacit.")
            assert f"| `{short}.{old}` | `{short}.{new}` |" in table
    for old, new in _RENAMED.items():
        assert f"| `tacit.{old}` | `tacit.{new}`" in table


ROOT = Path(__file__).parent.parent
# What the table calls by a short name.
PLACES = {
    "Engine": "tacit.gradients.Engine",
    "Method": "tacit.adapt.Method",
    "Records": "tacit.data.Records",
    "Task": "tacit.finetune.Classes",
    "Texts": "tacit.data.Texts",
    "Tuned": "tacit.tune.Tuned",
    "VideoClips": "tacit.data.VideoClips",
    "View": "tacit.adapt._views.View",
    "adapter": "tacit.adapt.Adapter",
    "clipped_sum": "tacit.gradients.clipped_sum",
}


def migration() -> dict[str, list[tuple[str, str]]]:
    """The rows of the migration table by the heading above them."""
    text = (ROOT / "CHANGELOG.md").read_text()
    lines = text[text.index("### Migration") :].split("\n\n### ")[0].splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (line for line in lines if line.startswith("| ")):
        old, new = (cell.strip() for cell in line.strip("|").split("|"))
        if old.startswith("**"):
            found[old.strip("*")] = []
        elif found:
            found[list(found)[-1]].append((old, new))
    return found


def resolved(name: str) -> Any:
    """What a name of the table stands for, or an error."""
    first, *rest = name.split(".")
    parts = PLACES.get(first, f"tacit.{first}").split(".") + rest
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part) and re.search(rf"\b(self\.)?{part}\b(:.*)? = ", inspect.getsource(found)):
                return part  # a field, or what a constructor sets
            found = getattr(found, part)
        return found
    raise LookupError(name)


def taken(function: Any) -> set[str]:
    """The names of its arguments, those of `**options: Unpack[Options]` included."""
    found = set(inspect.signature(function).parameters)
    for hint in get_type_hints(function).values() if inspect.isfunction(function) else ():
        found |= set(getattr(*get_args(hint), "__annotations__")) if get_origin(hint) is Unpack else set()
    return found


def test_every_new_name_of_the_migration_table_is_there() -> None:
    rows = migration()
    names = [new for _, new in rows["names that warn"]]
    for old, new in rows["names without an alias"]:
        stem = re.findall(r"`(\w[\w.]*)\.\w+", old)
        for name in re.findall(r"`(\.?[\w.]+)(?:\(\))?`", new):
            names.append(f"{stem[0]}{name}" if name.startswith(".") else name if "." in name else f"{stem[-1]}.{name}")
    assert len(names) > 20
    for name in names:
        resolved(name.strip("`"))  # raises if it is missing


def test_every_new_argument_of_the_migration_table_is_taken() -> None:
    checked = 0
    for old, new in migration()["arguments that warn"]:
        (argument,) = set(re.findall(r"^`(\w+)=`$", new)) or {""}
        for name in re.findall(r"`(\w[\w.]*)\(\w+=\)`", old) if argument else ():
            assert argument in taken(resolved(name)), f"{name}({argument}=)"
            checked += 1
    assert checked > 10


def test_a_warning_names_the_line_of_who_used_the_old_argument() -> None:
    with pytest.warns(DeprecationWarning, match=r"finetune.DPSGD\(batch=…\) is now batch_size=…") as said:
        finetune.DPSGD(batch=5, steps=2)
    assert [each.filename for each in said] == [__file__]
