"""One odd row keeps its place and contributes zero: it changes nobody else's arithmetic, and nobody hears of it."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import SEED, net
from torch import Tensor, nn

from tacit import ErrorEvent
from tacit._refusals import Refusal
from tacit.data._records import Rows
from tacit.finetune import DPGD, DPZO, GEP, AdpClip, Backbone, Optimizer, fit
from tacit.finetune._dry_run import rehearse
from tacit.finetune._evaluation import right_by_unit
from tacit.finetune._features import extract
from tacit.finetune._predictions import portions, units_at_once
from tacit.finetune._reading import Portion, Reader, Where, in_place, kind_of, likeness
from tacit.finetune._sources import as_records
from tacit.finetune._tasks import Classes
from tacit.privacy import Unit

CLIP, PLACE, COUNT = 0.5, 17, 60


class Files:
    """A data set of rows of which some are odd."""

    def __init__(self, rows: Tensor, labels: Tensor, odd: dict[int, Callable[[Tensor], Any]] | None = None) -> None:
        self.values, self.targets, self.odd = rows, labels, odd or {}

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        row = self.values[i]
        return self.odd[i](row) if i in self.odd else row, self.targets[i]


def _raises(_: Tensor) -> Any:
    raise OSError("patient 4711, scan corrupt")


class Panic(BaseException):
    """As libraries in Rust raise it (pyo3): no `Exception`."""


def _panics(_: Tensor) -> Any:
    raise Panic("patient 4711, called `Option::unwrap()` on a `None` value")


def _asks_for_all_memory(_: Tensor) -> Any:
    raise MemoryError("Unable to allocate 4711 TiB for an array with shape (4711, 1000000)")  # a broken header


ODD: dict[str, Callable[[Tensor], Any]] = {
    "raises": _raises,
    "asks for all memory": _asks_for_all_memory,
    "panics": _panics,
    "another shape": lambda row: row[:-1],
    "another dimension": lambda row: row[None],
    "another type": lambda row: row.to(torch.complex64),
    "more precise": lambda row: row.to(torch.float64) * math.pi,
    "a word": lambda _: "fever",
    "nothing": lambda _: None,
    "a pair": lambda row: (row, row),
    "not a number": lambda row: row * math.nan,
    "infinite": lambda row: row * math.inf,
    "makes the model raise": lambda row: row.clone().fill_(-7.0),
    "makes the model ask for all memory": lambda row: row.clone().fill_(-8.0),
    "makes the model panic": lambda row: row.clone().fill_(-10.0),
}


class Picky(nn.Module):
    """Raises on values that it does not like, and warns of some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == -7).all(1).any()):
            raise ArithmeticError("patient 4711, too low")
        if bool((x == -8).all(1).any()):
            raise MemoryError("Unable to allocate 4711 TiB")  # room for as much as a row says
        if bool((x == -10).all(1).any()):
            raise Panic("patient 4711, out of range")
        if bool((x == -9).all(1).any()):
            warnings.warn("patient 4711, very low", stacklevel=2)
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


def people(count: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.arange(count) % 3


def summed(data: Any, optimizer: Optimizer, **more: Any) -> dict[str, Tensor]:
    """The sum of the first step, before its noise."""
    found: list[dict[str, Tensor]] = []
    options: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "size": len(data), "scheme": "full", "classes": 3}
    options |= {
        "curator": lambda event: found.append({n: v.clone() for n, v in event.clipped_sum.sum.items()}),
        "seed": SEED,
    }
    fit(Picky(), data, optimizer=optimizer, **(options | more))
    return found[0]


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((a[n].double() - b[n].double()).square().sum()) for n in a))


def optimizers() -> dict[str, tuple[Optimizer, float]]:
    """Everybody takes part at a rate of 1; and how far one unit may move the sum."""
    inputs, labels = people(40)
    public = GEP(public=(inputs + 1, labels), batch_size=COUNT, steps=1, dimensions=4, clip_embedding=CLIP, lr=0.1)
    return {
        "DPGD": (DPGD(steps=1, clip=CLIP), CLIP),
        "AdpClip": (AdpClip(batch_size=COUNT, steps=1, clip=CLIP), math.hypot(CLIP, 0.5)),
        "GEP": (public, math.hypot(CLIP, 0.2)),
        "DPZO": (DPZO(batch_size=COUNT, steps=1, clip=CLIP), CLIP),
    }


@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("odd", ODD)
def test_an_odd_row_adds_nothing_and_moves_nobody(odd: str, name: str) -> None:
    """Against the same people with that row a valid one: what is left is the one row's own term, within its bound."""
    optimizer, bound = optimizers()[name]
    inputs, labels = people()
    found = summed(Files(inputs, labels, {PLACE: ODD[odd]}), optimizer)
    whole = summed(Files(inputs, labels), optimizer)
    muted = summed(Files(inputs, labels, {PLACE: _raises}), optimizer)
    assert 0 < distance(found, whole) <= bound * (1 + 1e-9)
    assert distance(found, muted) == 0.0


WIDENED: dict[str, Callable[[Tensor], Any]] = {
    "half precision": lambda row: row.half(),
    "whole numbers": lambda row: row.round().long(),
}


@pytest.mark.parametrize("kind", WIDENED)
def test_rows_that_would_be_widened_are_muted_in_all_company(kind: str) -> None:
    """Torch's collate makes them the type of the others: they counted until one unit failed, and then all at once not.

    Four such rows and one that fails: the sum moved by 2.0 C and 2.2 C.
    """
    inputs, labels = people()
    others = dict.fromkeys((20, 30, 40, 50), WIDENED[kind])
    whole = summed(Files(inputs, labels, others), DPGD(steps=1, clip=CLIP))
    without = summed(Files(inputs, labels, others | {PLACE: _raises}), DPGD(steps=1, clip=CLIP))
    muted = summed(Files(inputs, labels, dict.fromkeys(others, _raises)), DPGD(steps=1, clip=CLIP))
    assert 0 < distance(whole, without) <= CLIP * (1 + 1e-9)
    assert distance(whole, muted) == 0.0


@pytest.mark.parametrize("odd", ["raises", "another shape", "makes the model raise"])
def test_six_thousand_equal_rows(odd: str) -> None:
    """The figure of the attack: unit by unit in float32 the sum moved by 1.0139 C. In place it moves by C at most."""
    inputs, labels = people(1)[0].expand(6000, 6).contiguous(), torch.zeros(6000, dtype=torch.long)
    optimizer = DPGD(steps=1, clip=1e-3)
    found = summed(Files(inputs, labels, {PLACE: ODD[odd]}), optimizer)
    whole = summed(Files(inputs, labels), optimizer)
    assert 0.99e-3 < distance(found, whole) <= 1e-3 * (1 + 1e-9)


def test_an_odd_row_decides_no_shape() -> None:
    """Even where it is the first one that is looked at."""
    inputs, labels = people(8)
    for place in range(8):
        for odd in ("raises", "another shape", "more precise"):
            like = likeness(as_records(Files(inputs, labels, {place: ODD[odd]})), training=True)
            assert kind_of(like) == kind_of(Rows(inputs[:1], labels[:1], labels[:1]))
            assert not like.inputs.any()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
def test_units_that_do_not_agree_are_refused_before_the_charge(count: int) -> None:
    """No two neighbours are both accepted with different answers: tried for every pattern of two shapes.

    (A single unit has nobody to agree with: where there is one, its shape is public.)
    """
    inputs, labels = people(count)
    answers: dict[tuple[bool, ...], Any] = {}
    for pattern in range(2 ** min(count, 6)):
        which = tuple(bool(pattern >> i & 1) for i in range(count))
        odd = {i: ODD["another shape"] for i in range(count) if which[i]}
        try:
            answers[which] = kind_of(likeness(as_records(Files(inputs, labels, odd)), training=False))
        except Refusal:
            answers[which] = None
    for which, answer in answers.items():
        for i in range(count):
            other = answers.get((*which[:i], not which[i], *which[i + 1 :]), answer)
            assert None in (answer, other) or answer == other
    assert any(answer is not None for answer in answers.values())


def test_the_curator_hears_of_every_unit_that_fails() -> None:
    inputs, labels = people()

    seen: list[Any] = []
    data = Files(inputs, labels, {30: _raises, 31: ODD["another shape"]})
    how: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "size": 60, "scheme": "full", "classes": 3}
    fit(Picky(), data, optimizer=DPGD(steps=2), curator=seen.append, **how)
    heard = [event for event in seen if isinstance(event, ErrorEvent)]
    said = [problem.details.splitlines()[0] for problem in heard]
    assert [line.split(":")[0] for line in said] == ["unit 30", "unit 31"] * 2
    assert "patient 4711" in heard[0].details
    assert "4711" not in repr(heard)


def test_a_large_draw_has_more_portions_not_larger_ones() -> None:
    """A Poisson draw that is far above its mean asks for no more memory: portions are cut by public numbers."""
    records = as_records(people(1000))
    most = units_at_once(50.0)
    assert most == 94  # 50 + 6 sqrt(50), rounded up, and one
    for drawn in (10, 94, 95, 1000):
        cut = [len(part) for part in portions(records, torch.arange(drawn), 10**6, most)]
        assert sum(cut) == drawn
        assert max(cut) <= most
        assert len(cut) == math.ceil(drawn / most)


def test_shares_for_ranks_are_of_sixteen_and_more_wherever_there_is_a_way() -> None:
    """Kernels compute rows alike in passes of sixteen and more: a unit that comes may not make all passes smaller."""
    records = as_records(people(4))
    for most, shares in itertools.product((1, 5, 16, 17, 24, 31, 32, 40, 100, 10**6), (1, 8)):
        for drawn in [*range(1, 700), 1499]:
            cut = [len(part) for part in portions(records, torch.arange(drawn), 10**6, most, shares=shares)]
            assert sum(cut) == drawn
            assert max(cut) <= most
            assert min(cut) > 0
            fewest = math.ceil(drawn / most)
            if most >= 16:
                possible = fewest == 1 or drawn >= 16 * fewest  # with more portions they would be smaller still
                assert sum(size < 16 for size in cut) <= (0 if possible and drawn >= 16 else 1)
            else:
                assert sum(size < most for size in cut) <= 1
            if drawn >= 16 * shares and drawn <= shares * most:
                assert len(cut) == shares
                assert max(cut) - min(cut) <= 1
    assert [len(p) for p in portions(records, torch.arange(1499), 16, shares=8)] == [16] * 93 + [11]
    assert [len(p) for p in portions(records, torch.arange(70), 24, shares=8)] == [18, 18, 17, 17]


def test_memory_is_tried_with_the_largest_portion_before_the_charge() -> None:
    """As many blank rows as a portion may ever have (where memory is a hard wall: not on a CPU)."""
    asked: list[tuple[int, bool]] = []

    class Asked:
        def sum(self, rows: Rows, mute: Tensor | None = None) -> None:
            assert mute is None
            asked.append((len(torch.unique(rows.owner)), bool(rows.inputs.any())))

    rehearse(Asked(), likeness(as_records(people()), training=True), 70, net())  # type: ignore[arg-type]
    assert asked == [(70, False)]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_the_machines_memory_is_no_units_failure(error: Exception) -> None:
    def compute(rows: Rows, mute: Tensor | None) -> None:
        del rows, mute
        raise error

    inputs, labels = people(3)
    with pytest.raises(type(error)):
        in_place(compute, Rows(inputs, labels, torch.arange(3)), None)


def test_rows_that_fail_together_and_not_alone_stop_the_run_with_a_fixed_sentence() -> None:
    def compute(rows: Rows, mute: Tensor | None) -> int:
        del mute
        if len(rows.labels) > 1 and rows.inputs.any():
            raise ArithmeticError("patient 4711")
        return 1

    inputs, labels = people(3)
    with pytest.raises(RuntimeError, match="does not keep rows apart") as error:
        in_place(compute, Rows(inputs, labels, torch.arange(3)), None)
    assert error.value.__context__ is None
    assert error.value.__cause__ is None


@pytest.mark.parametrize("scheme", ["full", "linear"])
def test_a_warning_of_the_model_about_a_row_is_shown_to_nobody(
    scheme: str, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs, labels = people()
    inputs[PLACE] = -9.0
    told: list[Any] = []
    more = {"size": COUNT, "scheme": scheme, "seed": SEED, "curator": told.append}
    fit(Picky(), (inputs, labels), optimizer=DPGD(steps=1, clip=CLIP), epsilon=2.0, delta=1e-5, **more)
    assert not [each for each in recwarn if "4711" in str(each.message)]
    assert "4711" not in "".join(capfd.readouterr())
    assert scheme == "full" or any("4711" in each.details for each in told if isinstance(each, ErrorEvent))


def test_a_defect_of_the_code_is_raised_as_it_is() -> None:
    def compute(rows: Rows, mute: Tensor | None) -> None:
        del rows, mute
        raise NameError("speling")

    with pytest.raises(NameError, match="speling"):
        in_place(compute, Rows(*people(3), torch.arange(3)), None)


def test_a_unit_of_several_rows_keeps_one_blank_row() -> None:
    inputs, labels = people(15)
    owners = torch.arange(15) // 3
    records = as_records((Files(inputs, labels, {4: _raises}), None, owners), Unit.PATIENT)
    reader = Reader(records, likeness(records, training=True), Where(torch.device("cpu")))
    rows, mute = reader(Portion(torch.tensor([2, 1, 0]), torch.empty(3, 0)))
    assert rows.owner.tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert mute is not None
    assert mute.tolist() == [False] * 3 + [True] + [False] * 3
    assert torch.equal(rows.inputs[:3], inputs[6:9])
    assert not rows.inputs[3].any()


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_row_is_scored_as_wrong_and_changes_no_other_score(odd: str) -> None:
    inputs, labels = people()
    model = Picky().eval()
    whole = right_by_unit(model, as_records((inputs, labels)), Classes(3), confidence=True)
    found = right_by_unit(model, as_records(Files(inputs, labels, {PLACE: ODD[odd]})), Classes(3), confidence=True)
    others = torch.arange(COUNT) != PLACE
    assert torch.equal(found[others], whole[others])
    assert found[PLACE] == 0


@pytest.mark.parametrize("odd", sorted(set(ODD) - {"infinite"}))  # of which the features are numbers
def test_an_odd_row_has_no_features_and_changes_nobody_elses(odd: str) -> None:
    inputs, labels = people()
    backbone = Backbone(Picky().eval())
    whole = extract(backbone, as_records((inputs, labels)))  # type: ignore[arg-type]
    found = extract(backbone, as_records(Files(inputs, labels, {PLACE: ODD[odd]})))  # type: ignore[arg-type]
    others = torch.arange(COUNT) != PLACE
    assert torch.equal(found[others], whole[others])
    assert not torch.isfinite(found[PLACE]).any()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_is_no_rows_failure(error: type[BaseException]) -> None:
    def stopped(_: Rows, __: Tensor | None) -> Tensor:
        raise error

    with pytest.raises(error):
        in_place(stopped, Rows(torch.zeros(2, 1), torch.zeros(2), torch.arange(2)), None)
