"""Whom a guarantee is for: what the data hold together, whatever a caller calls it; refused before any charge."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import clipped_sum, gap, net, people
from test_units import CLIP, Clips, distance
from torch import Tensor

from tacit import finetune
from tacit.data import VideoClips, clips_as_units
from tacit.data._grouped import Groupable, Grouped
from tacit.data._tensor_records import TensorRecords
from tacit.finetune import DPFTRL, DPGD, Classes, Correlated, Evaluation, Everyone, Optimizer, Passes, Standardise, fit
from tacit.finetune._evaluation import Evaluator, check_rows_alone, right_by_unit
from tacit.finetune._sampling import batch_of
from tacit.finetune._sources import as_records
from tacit.models import VideoNet
from tacit.privacy import Budget, Ledger, Neighbours, Unit

Sums = list[dict[str, Tensor]]
OPTIONS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "scheme": "full", "head": "keep", "size": 10}
STRINGS = [f"patient {i % 7}" for i in range(20)]


def noted(data: Any, ledger: Ledger | None = None, **more: Any) -> tuple[finetune.Fitted, Sums]:
    sums: Sums = []
    options = OPTIONS | {"optimizer": DPGD(steps=1, clip=CLIP), "ledger": ledger} | more
    fitted = fit(
        net(),
        data,
        curator=lambda event: sums.append({n: v.clone() for n, v in event.clipped_sum.sum.items()}),
        **options,
    )
    return fitted, sums


class Shown(Groupable, Clips):
    """Records that somebody wrote, of a few rows per video."""


def shown(each: int = 2) -> Shown:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(6, 8, 4, generator=generator, dtype=torch.float64)
    return Shown(values, torch.randint(0, 3, (6,), generator=generator), each)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> VideoClips:
    from test_videos import write

    home = tmp_path_factory.mktemp("films")
    files = [write(home / f"{number}.mp4", 24 + number) for number in range(4)]
    return VideoClips(files, [0, 1, 0, 1], clips=2, frames=4, stride=1, colour=False)


@pytest.mark.filterwarnings("ignore:.*the old name ends:DeprecationWarning")
@pytest.mark.parametrize("name", ["unit", "units"])
@pytest.mark.parametrize(
    ("view", "claimed", "own"),
    [(clips_as_units, "video", "clip"), (clips_as_units, "sample", "clip"), (lambda v: v, "patient", "video")],
)
def test_nobody_names_a_unit_that_the_videos_do_not_have(
    videos: VideoClips, ledger: Ledger, view: Callable[[VideoClips], Any], claimed: str, own: str, name: str
) -> None:
    said = rf"One unit of these data is a {own}.*group_by\(ids, unit='{claimed}'\)"
    with pytest.raises(ValueError, match=said):
        fit(
            VideoNet(classes=2, channels=1, frames=4, size=16),
            view(videos),
            optimizer=DPGD(steps=1),
            ledger=ledger,
            **({"epsilon": 1.0, "delta": 1e-6, "size": 4, "scheme": "full", name: claimed}),
        )
    assert ledger.entries() == []


def test_the_guarantee_is_for_the_unit_of_the_data(ledger: Ledger) -> None:
    inputs, labels = people(20)
    for place, (data, more, unit) in enumerate(
        (
            ((inputs, labels), {}, "sample"),
            (shown(), {}, "video"),
            (shown(), {"unit": "video"}, "video"),
            (shown().group_by([0, 0, 1, 1, 2, 2], unit="patient"), {}, "patient"),
            ((inputs, labels), {"unit": "patient", "unit_ids": STRINGS}, "patient"),
            ((inputs, labels, STRINGS), {"unit": "patient"}, "patient"),
            ((inputs, labels), {"unit": "patient", "unit_ids": range(20)}, "patient"),  # everybody has one row
            (TensorRecords(inputs, labels).group_by(STRINGS, unit="patient"), {}, "patient"),
        )
    ):
        fitted, _ = noted(data, ledger, subject=str(place), **more)
        assert fitted.guarantee.unit == unit
        assert f"one {unit} per person" in fitted.assumptions[0]


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        (people(20), {"unit": "patient"}, "needs to know whose each row is: give unit_ids"),
        (people(20), {"unit_ids": STRINGS}, "say what with unit="),
        (people(20), {"unit_ids": STRINGS, "unit": "sample"}, "more than a sample"),
        ((*people(20), STRINGS), {"unit_ids": STRINGS, "unit": "patient"}, "Say whose each row is once"),
        (people(20), {"unit_ids": STRINGS[1:], "unit": "patient"}, "one integer or string per row"),
        (people(20), {"unit": "patient", "units": "patient"}, "leave units= out"),
        (TensorRecords(*people(20), STRINGS), {"unit": "patient"}, "One unit of these data is a user"),
        (TensorRecords(*people(20), STRINGS), {"unit": "sample"}, "One unit of these data is a user"),
        (shown(), {"unit_ids": [1] * 6, "unit": "patient"}, r"records.group_by\(ids, unit="),
    ],
)
def test_what_the_data_do_not_have_is_refused(ledger: Ledger, data: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        noted(data, ledger, **more)
    assert ledger.entries() == []


def test_records_that_do_not_say_their_unit_are_refused(ledger: Ledger) -> None:
    class Silent:
        def __getattr__(self, name: str) -> Any:
            if name == "unit":
                raise AttributeError(name)
            return getattr(shown(), name)

        def __len__(self) -> int:
            return 6

    with pytest.raises(ValueError, match="do not say what their units are"):
        noted(Silent(), ledger, unit="patient")
    assert ledger.entries() == []


def test_the_earlier_name_of_the_argument_warns() -> None:
    with pytest.warns(DeprecationWarning, match="units=…. is now unit=…"):
        fitted, _ = noted((*people(20), STRINGS), units="patient")
    assert fitted.guarantee.unit == "patient"
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        noted((*people(20), STRINGS), unit="patient")


def test_grouping_really_groups() -> None:
    """A patient adds the mean over all rows of all their videos, clipped once: by brute force, one unit at a time."""
    records, ids = shown(8), ["x", "y", "x", "x", "z", "y"]
    records.each = 1  # one row each, so that it is known which
    found = {
        "records": noted(records.group_by(ids, unit="patient"))[1][0],
        "table": noted(TensorRecords(records.values[:, 3], records.given).group_by(ids, unit="patient"))[1][0],
        "ids": noted((records.values[:, 3], records.given), unit="patient", unit_ids=ids)[1][0],
    }
    rows = records.values[:, 3]
    units = [[i for i in range(6) if ids[i] == name] for name in "xyz"]
    expected = clipped_sum(net(), [(rows[mine], records.given[mine]) for mine in units], CLIP)
    assert gap(found["table"], expected) < 1e-12
    assert gap(found["ids"], expected) < 1e-12
    chosen: list[Tensor] = []
    real = records.rows
    records.rows = lambda units, uniforms: chosen.append(uniforms) or real(units, uniforms)  # type: ignore
    grouped = noted(records.group_by(ids, unit="patient"))[1][0]
    drawn_uniforms = chosen[-1]
    picked = records.values[
        torch.tensor([i for mine in units for i in mine]), (drawn_uniforms[:, 0] * 8).ceil().long() - 1
    ]
    place, whole = 0, []
    for mine in units:
        whole.append((picked[place : place + len(mine)], records.given[mine]))
        place += len(mine)
    assert gap(grouped, clipped_sum(net(), whole, CLIP)) < 1e-12
    bound = math.sqrt(sum(float(v.square().sum()) for v in found["records"].values()))
    assert bound <= 3 * CLIP


def test_a_patient_with_all_videos_moves_the_sum_by_one_clip() -> None:
    """Five equal videos are taken out: as five units they move the sum by five clips, as one patient by one."""
    row = 50 * torch.tensor([1.0, -2.0, 3.0, 1.0], dtype=torch.float64)
    values, labels = torch.stack([row] * 5 + [-row])[:, None].expand(6, 8, 4), torch.tensor([0] * 5 + [1])
    everybody, rest, ids = Shown(values, labels, 2), Shown(values[5:], labels[5:], 2), ["x"] * 5 + ["y"]
    apart = [noted(records)[1][0] for records in (everybody, rest)]
    together = [noted(r.group_by(ids[-len(r) :], unit="patient"))[1][0] for r in (everybody, rest)]
    assert distance(*apart) == pytest.approx(5 * CLIP, rel=1e-4)
    assert distance(*together) == pytest.approx(CLIP, rel=1e-4)
    assert distance(*together) <= CLIP


def test_grouped_videos_are_scored_one_by_one_and_count_by_their_mean() -> None:
    records = shown()
    model = net()
    each = right_by_unit(model, records, Classes(3))
    ids = [2, 1, 2, 2, 1, 0]
    found = right_by_unit(model, records.group_by(ids, unit="patient"), Classes(3))
    expected = [torch.stack([each[i] for i in range(6) if ids[i] == who]).mean() for who in range(3)]
    assert found.tolist() == pytest.approx([float(value) for value in expected])


def test_a_receipt_of_another_unit_pays_for_nothing(ledger: Ledger) -> None:
    ledger.subject("people", Budget(9.0, 1e-5), unit="patient")
    optimizer = DPGD(steps=1)
    receipt = ledger.charge("people", optimizer.event(2.0, 10), stage="test", note="")
    options: dict[str, Any] = {"optimizer": optimizer, "delta": 1e-5, "receipt": receipt, "size": 10, "scheme": "full"}
    with pytest.raises(ValueError, match="needs to know whose"):
        fit(net(), people(20), **options)
    with pytest.raises(ValueError, match="One unit of these data is a video"):
        fit(net(), shown(), **options)
    with pytest.raises(ValueError, match="This receipt is for a patient, not for a video"):
        fit(net(), shown(), unit="video", **options)
    assert receipt.used == 0


def test_held_out_people_are_units_of_the_same_kind(ledger: Ledger) -> None:
    """An evaluation of other units, or one that a subject of other units would pay for."""
    ledger.subject("clinic", Budget(1.0, 1e-5), unit="patient")
    ledger.subject("bounded", Budget(1.0, 1e-5), neighbours="replace-one")
    before = ledger.entries()
    charged: dict[str, Any] = {"epsilon": 1.0, "size": 8}
    for told, said in (
        (Evaluation(data=shown(), subject="new", **charged), "One unit of these data is a video"),
        (Evaluation(data=people(8), subject="clinic", **charged), "The subject clinic promises something to a patient"),
        (Evaluation(data=people(8), subject="bounded", **charged), "under replace-one, but a "),
    ):
        with pytest.raises(ValueError, match=said):
            noted(people(20), ledger, evaluate=told)
        assert ledger.entries() == before
        evaluator = Evaluator(told, as_records(told.data, public=True), Classes(3))
        with pytest.raises(ValueError, match=said):
            evaluator.charge(ledger, steps=1, unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE, seed=None)
        assert ledger.entries() == before


def test_statistics_of_features_are_charged_to_their_own_unit(ledger: Ledger) -> None:
    ledger.subject("clinic", Budget(9.0, 1e-5), unit="patient")
    before = ledger.entries()
    with pytest.raises(ValueError, match="The subject clinic has the unit patient, and the data sample"):
        Standardise(noise=5.0, bound=1.0).release(TensorRecords(*people(20)), 20, ledger, "clinic", None)
    assert ledger.entries() == before


class Ranked(Classes):
    """Right is who is surer than the median: a score of the company one keeps."""

    def right(self, probs: Tensor, labels: Tensor) -> Tensor:
        mine = probs.gather(1, labels[:, None])[:, 0].double()
        return (mine >= mine.median()).double()


class Smoothed(Classes):
    """Beliefs that are normalised over the rows."""

    def probs(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(0)


@pytest.mark.parametrize("task", [Ranked(3), Smoothed(3)])
def test_a_score_that_looks_at_other_rows_is_refused(ledger: Ledger, task: Classes) -> None:
    told = Evaluation(data=people(8), subject="held out", epsilon=1.0, size=8)
    with pytest.raises(ValueError, match="number i must be computed from row i alone"):
        noted(people(20), ledger, evaluate=told, task=task)
    assert ledger.entries() == []


def test_the_tasks_of_the_package_look_at_one_row_at_a_time() -> None:
    for confidence in (False, True):
        check_rows_alone(Classes(3), torch.zeros(5, dtype=torch.long), confidence=confidence)
        check_rows_alone(finetune.Labels(4), torch.zeros(5, 4), confidence=confidence)
        check_rows_alone(finetune.NextToken(9), torch.zeros(5, 7, dtype=torch.long), confidence=confidence)


@pytest.mark.parametrize("newcomer", [-1, 100, 8])
def test_a_new_owner_moves_nobody_in_fixed_passes(newcomer: int) -> None:
    """With a new smallest id all ranks move by one; only the newcomer's own batch may change, by one clip."""
    optimizer, ids = DPFTRL(batches=3, passes=2, clip=CLIP, lr=1e-300), [3 * i for i in range(12)]
    everybody = [newcomer, *ids]
    assert batch_of(ids, 3).tolist() == batch_of(everybody, 3)[1:].tolist()
    inputs, labels = people(13)
    sums = [
        noted((inputs[rows], labels[rows]), unit="user", unit_ids=named, optimizer=optimizer, neighbours="add-remove")[
            1
        ]
        for rows, named in ((slice(13), everybody), (slice(1, 13), ids))
    ]
    mine = int(batch_of([newcomer], 3)[0])
    for step in range(6):
        moved = distance(sums[0][step], sums[1][step])
        assert moved == 0 if step % 3 != mine else 0 < moved <= CLIP


def test_fixed_passes_under_add_remove_cost_what_one_release_does(ledger: Ledger) -> None:
    """8.4494 / 2 is the noise of one release at epsilon 1, delta 1e-6, factor 1."""
    optimizer = DPFTRL(batches=5, passes=2)
    fitted, _ = noted(people(20), ledger, unit="user", unit_ids=STRINGS, optimizer=optimizer)
    assert fitted.noise_multiplier == pytest.approx(8.4494 / 2, abs=1e-4)
    assert fitted.guarantee.neighbours is Neighbours.ADD_REMOVE
    assert fitted.guarantee.epsilon == pytest.approx(1.0, abs=1e-6)
    assert ledger.verify()


def test_places_are_no_ids(ledger: Ledger) -> None:
    for data in (people(20), TensorRecords(*people(20))):
        with pytest.raises(ValueError, match="give unit_ids=, which keep it, or give neighbours='replace-one'"):
            noted(data, ledger, optimizer=DPFTRL(batches=5))
    assert ledger.entries() == []


def test_everybody_in_every_step_needs_no_place() -> None:
    """Correlated noise over everybody: nobody's steps depend on who else is there."""
    optimizer = Optimizer(name="all", steps=3, sampler=Everyone(), noise=Correlated("full"))
    fitted, _ = noted(people(20), optimizer=optimizer)
    assert fitted.noise_multiplier == pytest.approx(8.4494 / 2, abs=1e-4)


def test_batches_by_hash_are_about_equal_and_of_one_id_alone() -> None:
    """A binomial of 20,000 with rate 1/10: off by 6 standard deviations (255) with probability below 1e-8."""
    found = batch_of(range(20_000), 10)
    assert (found.bincount(minlength=10) - 2000).abs().max() < 255
    assert torch.equal(batch_of(range(20_000)[::-1], 10), found.flip(0))
    assert batch_of(["1"], 1 << 30).tolist() != batch_of([1], 1 << 30).tolist()
    drawn = torch.cat([Passes(10).over(range(50)).draw(None, step, 50) for step in range(10)])  # type: ignore
    assert drawn.sort().values.tolist() == list(range(50))


def test_a_replacement_with_somebodys_id_is_another_relation() -> None:
    """Three clips, not two: it is said on the card, for no sum can prevent it."""
    far = torch.tensor([[1e3, 0, 0, 0], [0, 1e3, 0, 0]]).double()
    inputs, labels = torch.cat([far, -far[:1]]), torch.tensor([0, 1, 2])
    sums = [noted((inputs, labels), unit="user", unit_ids=ids)[1][0] for ids in ([1, 2, 3], [2, 2, 3])]
    assert distance(*sums) <= 3 * CLIP
    fitted, _ = noted((inputs, labels), unit="user", unit_ids=[1, 2, 3], neighbours="replace-one")
    assert "a user that takes another's place brings an id that nobody else has" in fitted.assumptions
    fitted, _ = noted((inputs, labels), neighbours="replace-one")
    assert not any("id that nobody else has" in line for line in fitted.assumptions)


def test_a_wrapper_serves_any_records() -> None:
    """Somebody's own class, which has no group_by of its own."""
    records = Clips(shown().values, shown().given, 2)
    grouped = Grouped(records, ["a", "a", "b", "b", "c", "c"], unit="patient")
    fitted, _ = noted(grouped)
    assert fitted.guarantee.unit == "patient"
