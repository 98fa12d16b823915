"""Recipes: what is read, what is refused and with which sentence, and names that stay the same."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest

from tacit.recipes import RecipeError, fingerprint, plain, read


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Privacy:
    epsilon: float
    delta: float = 1e-6
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"Epsilon must be above 0; got {self.epsilon:g}.")
        if not 0 <= self.delta < 1:
            raise ValueError(f"It must be at least 0 and below 1; got {self.delta:g}.")
        if not self.clip > 0:
            raise ValueError(f"A clip is above 0; got {self.clip:g}.")


@dataclass(frozen=True, kw_only=True)
class Clip:
    threshold: float


@dataclass(frozen=True, kw_only=True)
class Arm:
    method: Literal["tent", "eata", "sar"]
    lr: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Life:
    name: str
    batch_size: int = 64
    lr: float = 0.5
    durable: bool = True
    seed: int | None = 7
    colour: Colour = Colour.RED
    where: Path | None = None
    severities: tuple[int, ...] = (5,)
    span: tuple[float, float] = (0.0, 1.0)
    shifts: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    privacy: Privacy | None = None
    bound: Privacy | Clip | None = None
    level: Literal["auto"] | float = "auto"
    arms: tuple[Arm, ...] = ()
    workers: int = field(default=1, compare=False)
    derived: int = field(default=0, init=False)


KINDS = {"life": Life, "clip": Clip}


def life(tmp_path: Path, text: str) -> Any:
    file = tmp_path / "recipe.toml"
    file.write_text('kind = "life"\n' + text, encoding="utf-8")
    kind, config = read(file, KINDS)
    assert kind == "life"
    return config


def test_everything_there_is(tmp_path: Path) -> None:
    found = life(
        tmp_path,
        """
        name = "é"
        batch_size = 16
        lr = 1
        durable = false
        seed = "none"
        colour = "blue"
        where = "data/x.npz"
        severities = [1, 5]
        span = [0, 0.5]
        shifts = ["fog", "snow"]
        weights = { fog = 1, snow = 0.25 }
        bound = { threshold = 2 }
        level = 3
        [privacy]
        epsilon = inf
        [[arms]]
        method = "tent"
        [[arms]]
        method = "sar"
        lr = 1e-2
        """,
    )
    assert found == Life(
        name="é",
        batch_size=16,
        lr=1.0,
        durable=False,
        seed=None,
        colour=Colour.BLUE,
        where=Path("data/x.npz"),
        severities=(1, 5),
        span=(0.0, 0.5),
        shifts=["fog", "snow"],
        weights={"fog": 1.0, "snow": 0.25},
        privacy=Privacy(epsilon=math.inf),
        bound=Clip(threshold=2.0),
        level=3.0,
        arms=(Arm(method="tent"), Arm(method="sar", lr=0.01)),
    )
    assert isinstance(found.lr, float)
    assert isinstance(found.weights["fog"], float)


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    assert life(tmp_path, 'name = "x"') == Life(name="x")
    assert life(tmp_path, 'name = "x"\nprivacy = "none"').privacy is None


BAD = [
    ('name = "x"\nbatch_sise = 3', "there is no key 'batch_sise'; did you mean 'batch_size'?"),
    ('name = "x"\nBatch-Size = 3', "there is no key 'Batch-Size'; did you mean 'batch_size'?"),
    ('name = "x"\nderived = 3', "there is no key 'derived'"),
    ('name = "x"\n[privacy]\nepsilonn = 1', "there is no key 'epsilonn' in privacy; did you mean 'epsilon'?"),
    ('name = "x"\n[privacy]\nqqqq = 1', "the keys are epsilon, delta, clip."),
    ('name = "x"\n[[arms]]\nmethod = "tent"\n[[arms]]\nrate = 1', "there is no key 'rate' in arms #2"),
    ('name = "x"\n[[arms]]\nmethod = "tant"', "arms #1.method = \"tant\" is none of its values; did you mean 'tent'?"),
    ("batch_size = 3", "the key 'name' is missing: it is text in quotes."),
    ('name = "x"\n[[arms]]\nlr = 1', "the key 'method' is missing in arms #1: it is one of tent, eata, sar."),
    ("name = 3", "name must be text in quotes; got 3."),
    ('name = "x"\nbatch_size = 1.0', "batch_size must be a whole number; got 1.0."),
    ('name = "x"\nbatch_size = true', "batch_size must be a whole number; got true."),
    ('name = "x"\nlr = true', "lr must be a number; got true."),
    ('name = "x"\nlr = "inf"', 'lr must be a number; got "inf".'),
    ('name = "x"\nlr = nan', "lr = nan is no number."),
    ('name = "x"\ndurable = 1', "durable must be true or false; got 1."),
    ('name = "x"\nseed = "x"', 'seed must be a whole number; got "x".'),
    ('name = "x"\ncolour = "bleu"', "did you mean 'blue'?"),
    ('name = "x"\nseverities = 5', "severities must be a list, each a whole number; got 5."),
    ('name = "x"\nseverities = [1, "2"]', 'severities #2 must be a whole number; got "2".'),
    ('name = "x"\nspan = [1.0]', "span has 1 entries and needs 2."),
    ('name = "x"\nweights = { fog = "much" }', 'weights.fog must be a number; got "much".'),
    ('name = "x"\nweights = 1', "weights must be a table; got 1."),
    ('name = "x"\nlevel = "high"', 'level must be one of auto or a number; got "high".'),
    ('name = "x"\nprivacy = 1', "privacy must be a table; got 1."),
    ('name = "x"\narms = { method = "tent" }', "arms must be an array of tables; got a table."),
    ('name = "x"\n[privacy]\nepsilon = -1', "privacy.epsilon is invalid: Epsilon must be above 0; got -1."),
    ('name = "x"\n[privacy]\nepsilon = -1\nclip = 2', "privacy.epsilon is invalid: Epsilon must be above 0"),
    ('name = "x"\n[privacy]\nepsilon = 1\nclip = -1\ndelta = 2', "privacy is invalid: It must be at least 0"),
    ('name = "x"\n[privacy]\nepsilon = 1\nclip = 2\ndelta = 1', "privacy.delta is invalid: It must be at least 0"),
    ('name = "x"\n[bound]\nthreshold = "x"', "bound.threshold must be a number"),
]


@pytest.mark.parametrize(("text", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_what_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as error:
        life(tmp_path, text)
    assert sentence in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'recipe.toml'}: ")


def test_the_kind(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    for text, sentence in [
        ('name = "x"', 'add kind = "life" or "clip" at the top'),
        ('kind = "live"', "there is no kind 'live'; did you mean 'life'?"),
        ('kind = "zzz"', "there is no kind 'zzz'; the kinds are life, clip."),
        ("kind = 3", "there is no kind 3"),
    ]:
        file.write_text(text)
        with pytest.raises(RecipeError, match=r"recipe\.toml") as error:
            read(file, KINDS)
        assert sentence in str(error.value)
    with pytest.raises(RecipeError, match="there are no kinds"):
        read(file, {})


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    with pytest.raises(RecipeError, match=r"There is no recipe at .*recipe\.toml\."):
        read(file, KINDS)
    with pytest.raises(RecipeError, match="is a folder"):
        read(tmp_path, KINDS)
    file.write_text('kind = "life"\nname = = 3\n')
    with pytest.raises(RecipeError, match=r"is not valid TOML: .*line 2"):
        read(file, KINDS)
    file.write_text('kind = "life"\nname = "a"\nname = "b"\n')
    with pytest.raises(RecipeError, match=r"is not valid TOML: .*line 3"):
        read(file, KINDS)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="not UTF-8"):
        read(file, KINDS)


def test_only_the_kind_that_is_asked_for_is_looked_up(tmp_path: Path) -> None:
    """So that a mapping may load what it holds when it is wanted."""

    class Lazy(dict[str, type]):
        def __getitem__(self, key: str) -> type:
            assert key == "clip"
            return Clip

    file = tmp_path / "recipe.toml"
    file.write_text('kind = "clip"\nthreshold = 1')
    assert read(file, Lazy(life=Life, clip=Clip)) == ("clip", Clip(threshold=1.0))


def test_a_fingerprint_is_the_same_for_ever() -> None:
    """By hand: sha256 of ["Clip",{"threshold":2}], the first 32 digits."""
    assert fingerprint(Clip(threshold=2.0)) == "23b0c174d4aa13f6080f9a3c890d445b"


def test_equal_configurations_have_equal_fingerprints() -> None:
    one = Life(name="x", lr=1, weights={"a": 1, "b": 2.5}, privacy=Privacy(epsilon=math.inf))
    other = Life(name="x", lr=1.0, weights={"b": 2.5, "a": 1.0}, privacy=Privacy(epsilon=math.inf), workers=8)
    assert fingerprint(one) == fingerprint(other)
    changed = [
        Life(name="x"),
        Life(name="y"),
        Life(name="x", seed=8),
        Life(name="x", seed=None),
        Life(name="x", durable=False),
        Life(name="x", colour=Colour.BLUE),
        Life(name="x", severities=(1, 5)),
        Life(name="x", severities=(15,)),
        Life(name="x", privacy=Privacy(epsilon=1.0)),
        Life(name="x", privacy=Privacy(epsilon=math.nextafter(1.0, 2.0))),
        Life(name="x", bound=Clip(threshold=1.0)),
        Life(name="x", arms=(Arm(method="tent"),)),
        Life(name="x", where=Path("a/b")),
    ]
    assert len({fingerprint(config) for config in changed}) == len(changed)


def test_a_fingerprint_wants_plain_values() -> None:
    with pytest.raises(TypeError, match="this is a object"):
        fingerprint(Clip(threshold=object()))  # type: ignore[arg-type]


def test_plain() -> None:
    found = plain(Life(name="x", privacy=Privacy(epsilon=math.inf), arms=(Arm(method="tent"),), workers=3))
    assert (found["privacy"]["epsilon"], found["arms"], found["workers"]) == (
        "inf",
        [{"method": "tent", "lr": 1e-3}],
        3,
    )
    assert (found["lr"], found["colour"], found["seed"]) == (0.5, "red", 7)
