"""Bad input is refused in a sentence, before anything is charged or declared; and private facts reach nobody else."""

import json
import math
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, net, people, weights
from torch import nn

from tacit import CuratorEvent, ErrorEvent
from tacit import _checkpoints as checkpoints
from tacit.finetune import DPGD, DPSGD, Evaluation, Labels, fit
from tacit.privacy import Budget, BudgetExceeded, Ledger

INPUTS, LABELS = people()


def call(ledger: Ledger, model: Any = None, data: Any = (INPUTS, LABELS), **more: Any) -> Any:
    options: dict[str, Any] = {
        "optimizer": DPGD(steps=2),
        "epsilon": 1.0,
        "delta": 1e-5,
        "size": 20,
        "scheme": "full",
        "classes": 3,
    }
    return fit(model or net(), data, ledger=ledger, **(options | more))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "label too large": ({"data": (INPUTS, LABELS + 1)}, r"Labels must be 0 to 2, for 3 classes; some are not"),
    "negative label": ({"data": (INPUTS, LABELS - 1)}, r"Labels must be 0 to 2"),
    "float labels": ({"data": (INPUTS, LABELS.double())}, r"Classes are integers, one per row"),
    "two labels per row": ({"data": (INPUTS, LABELS[:, None])}, r"Classes are integers, one per row"),
    "fewer labels": ({"data": (INPUTS, LABELS[1:])}, r"numbers of rows and of labels differ"),
    "nobody": ({"data": (INPUTS[:0], LABELS[:0])}, r"no rows to learn from"),
    "wrong width": ({"data": (INPUTS[:, :3], LABELS)}, r"The model does not take these rows"),
    "wrong type": ({"data": (INPUTS.long(), LABELS)}, r"The model does not take these rows"),
    "no data": ({"data": 3}, r"Data is \(inputs, labels\)"),
    "live batch norm": (
        {
            "model": nn.Sequential(
                nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)
            ).double()
        },
        r"(?i)batch|running|statistics",
    ),
    "units without owners": ({"unit": "patient"}, r"needs to know whose each row is"),
    "owners without units": ({"data": (INPUTS, LABELS, torch.arange(24))}, r"a unit is more than a sample"),
    "half an owner": (
        {"data": (INPUTS, LABELS, torch.arange(24) / 2), "unit": "user"},
        r"one integer or string per row",
    ),
    "too few owners": ({"data": (INPUTS, LABELS, torch.arange(23)), "unit": "user"}, r"one integer or string per row"),
    "no size": ({"size": None}, r"Give size="),
    "size 0": ({"size": 0}, r"size must be whole and at least 1"),
    "microbatch 0": ({"microbatch": 0}, r"microbatch must be whole"),
    "every 0": ({"every": 0}, r"every must be whole"),
    "augmented vectors": ({"augment": 2}, r"Only images can be flipped"),
    "augment 0": ({"augment": 0}, r"augment is a number of rows"),
    "another task": ({"task": Labels(4)}, r"do not agree"),
    "unknown scheme": ({"scheme": "all"}, r"(?i)scheme"),
    "unknown head": ({"head": "old"}, r"head is 'new' or 'keep'"),
    "features of everything": ({"features": "last"}, r"for scheme='linear'"),
}


@pytest.mark.parametrize("what", BAD)
def test_refused_before_anything_is_charged(what: str, ledger: Ledger) -> None:
    options, said = BAD[what]
    with pytest.raises(ValueError, match=said):
        call(ledger, **options)
    assert ledger.entries() == []


def test_labels_of_several_diseases_are_checked(ledger: Ledger) -> None:
    for labels, said in (
        (torch.full((24, 3), 1.5), r"between 0 and 1, or NaN"),
        (torch.zeros(24, 2), r"rows x 3"),
        (torch.zeros(24, 3, dtype=torch.long), r"are floats"),
    ):
        with pytest.raises(ValueError, match=said):
            call(ledger, data=(INPUTS, labels), task=Labels(3))
    assert ledger.entries() == []


def test_a_class_that_nobody_has_is_fine(ledger: Ledger) -> None:
    assert call(ledger, data=(INPUTS, LABELS.clamp_max(1))).steps == 2
    assert call(Ledger("sqlite://"), data=(INPUTS, LABELS), classes=7).model[2].out_features == 7


def test_a_budget_that_is_too_small_changes_nothing(ledger: Ledger) -> None:
    ledger.subject("clinic", Budget(0.5, 1e-5))
    before = ledger.entries()
    model, start = net(), weights(net())
    with pytest.raises(BudgetExceeded, match="Nothing was charged"):
        call(ledger, model, subject="clinic", head="keep")
    assert ledger.entries() == before
    assert all(torch.equal(start[n], p) for n, p in model.named_parameters())


def test_no_error_tells_a_value(ledger: Ledger) -> None:
    """What was refused is said; which row, and what it had, is not."""
    for data in ((INPUTS, LABELS + 4711), (INPUTS[:, :3] + 4711, LABELS), (INPUTS, LABELS, INPUTS[:, 0] + 4711)):
        with pytest.raises(ValueError, match=r"\w") as error:
            call(ledger, data=data, unit="patient" if len(data) == 3 else "sample")
        assert "471" not in str(error.value)
        assert error.value.__cause__ is None


class Corrupt:
    """A data set whose own errors say whose row it is."""

    def __init__(self, where: str, broken: int = 3) -> None:
        self.where, self.broken = where, broken
        if where != "labels":
            self.targets = LABELS

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, place: int) -> Any:
        if place == self.broken or (self.where == "everybody" and place < 5):
            raise OSError(f"patient {4711 + place}, scan corrupt")
        return INPUTS[place], LABELS[place]


class Odd(Labels):
    """A task of one's own, whose check tells values."""

    def check(self, labels: torch.Tensor) -> None:
        raise ValueError(f"{labels.tolist()} of patient 4711")


class Notes:
    def __init__(self) -> None:
        self.heard: list[ErrorEvent] = []

    def __call__(self, event: CuratorEvent) -> None:
        if isinstance(event, ErrorEvent):
            self.heard.append(event)


TELLING: dict[str, dict[str, Any]] = {
    "labels asked one by one": {"data": Corrupt("labels")},
    "nobody can be read": {"data": Corrupt("everybody")},
    "a row that cannot be replayed": {"data": Corrupt("one", 20), "checkpoint": "run"},
    "a task's own check": {"task": Odd(3)},
    "held-out people": {
        "evaluate": Evaluation(data=Corrupt("labels"), subject="held out", epsilon=1.0, size=20),
    },
}


@pytest.mark.parametrize("what", TELLING)
def test_the_text_of_a_foreign_error_reaches_the_curator_alone(what: str, ledger: Ledger, tmp_path: Path) -> None:
    options, notes = dict(TELLING[what]), Notes()
    if "checkpoint" in options:
        options["checkpoint"] = tmp_path / "run"
    for curator in (notes, None):
        with pytest.raises(ValueError, match=r"Nothing was charged") as error:
            call(ledger, **options, curator=curator)
        said = "".join(traceback.format_exception(error.value))
        assert "47" not in str(error.value)
        assert "patient 47" not in said
        assert error.value.__cause__ is None
        assert error.value.__context__ is None
    assert "patient 47" in notes.heard[0].details
    assert [entry.kind for entry in ledger.entries() if entry.kind == "charge"] == []


class Huge(Corrupt):
    """A file whose header asks for more memory than there is, and says so."""

    def __getitem__(self, place: int) -> Any:
        if place == self.broken:
            raise MemoryError("Unable to allocate 4711 TiB for an array with shape (4711, 1000000)")
        return super().__getitem__(place)


def test_nor_does_an_error_about_memory_tell_what_was_asked_for(ledger: Ledger) -> None:
    notes = Notes()
    with pytest.raises(MemoryError) as error:
        call(ledger, data=Huge("labels"), curator=notes)
    assert "4711" not in "".join(traceback.format_exception(error.value))
    assert error.value.__context__ is None
    assert "4711" in notes.heard[0].details
    assert not [entry for entry in ledger.entries() if entry.kind == "charge"]
    assert call(ledger, data=Huge("one", 11)).steps == 2  # after the charge it stops nothing


def test_a_row_that_cannot_be_read_decides_no_error(ledger: Ledger, capfd: pytest.CaptureFixture[str]) -> None:
    """Whichever it is, the first one included; with cached features, too."""
    for scheme in ("full", "linear"):
        for broken in (0, 11):
            assert call(ledger, data=Corrupt("one", broken), subject=f"{scheme} {broken}", scheme=scheme).steps == 2
    assert "".join(capfd.readouterr()) == ""


def test_nothing_private_is_shown_to_anybody_but_the_curator(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same public settings and two sets of people: output, progress, errors, files' names and facts are alike."""
    told: list[list[Any]] = []
    heard: list[list[Any]] = []
    for i, count in enumerate((24, 17)):
        progress: list[Any] = []
        private: list[Any] = []
        inputs, labels = people(count, seed=i)
        inputs[0] = math.nan
        with Ledger(f"sqlite:///{tmp_path}/{i}.db") as ledger, warnings.catch_warnings():
            warnings.simplefilter("error")
            fitted = call(
                ledger,
                data=(inputs, labels),
                optimizer=DPSGD(batch_size=5, steps=3),
                checkpoint=tmp_path / f"{i}.run",
                curator=lambda event, private=private: private.append((event.step, event.clipped_sum.private)),
                progress=lambda *args, progress=progress, **more: progress.append((args, more)),
                seed=SEED,
                epsilon=2.0,
            )
        facts = json.loads(checkpoints.metadata((tmp_path / f"{i}.run").read_bytes())["tacit"])
        facts = {name: facts[name] for name in ("run", "step", "finished", "history")}
        shown = repr(fitted).replace(fitted.receipt, "")
        told.append([capfd.readouterr(), progress, facts, shown, fitted.history, fitted.assumptions])
        heard.append([step for step, _ in private] + [len(each.norms) for _, each in private])
    assert told[0] == told[1]
    assert heard[0] != heard[1]
    assert heard[0][:3] == [0, 1, 2]
    assert [args[1] for args, _ in told[0][1]] == [1, 2, 3]
    spent = [more["spent"][0] for _, more in told[0][1]]
    assert spent == sorted(spent)
    assert spent[-1] <= 2.0
    assert told[0][0] == ("", "")
