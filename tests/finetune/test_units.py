"""What one unit can do to a sum, whatever its rows; and that nothing else depends on how many units there are."""

import math
from typing import Any

import pytest
import torch
from by_hand import SEED, clipped_sum, drawn, gap, net, one_row_units, people, weights
from torch import Tensor

from tacit.data._records import Rows
from tacit.finetune import DPGD, DPSGD, Fitted, fit
from tacit.finetune import _loop as loop
from tacit.models import ViT

CLIP = 0.3
Sums = list[dict[str, Tensor]]


def run(data: Any, *, model: Any = None, sums: Sums | None = None, **more: Any) -> Fitted:
    options: dict[str, Any] = {
        "optimizer": DPGD(steps=1, clip=CLIP),
        "epsilon": 5.0,
        "delta": 1e-5,
        "size": 10,
        "scheme": "full",
        "head": "keep",
        "seed": SEED,
    }
    if sums is not None:
        options["curator"] = lambda event: sums.append({n: v.clone() for n, v in event.clipped_sum.sum.items()})
    return fit(model or net(), data, **(options | more))


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a))


class Clips:
    """Records with `each` rows per unit, chosen by chance, as clips of a video are."""

    scored_by, unit = "unit", "video"

    def __init__(self, values: Tensor, labels: Tensor, each: int) -> None:
        self.values, self.given, self.each = values, labels, each

    uniforms = property(lambda self: self.each)
    most_rows = property(lambda self: self.each)

    def __len__(self) -> int:
        return len(self.values)

    def labels(self) -> Tensor:
        return self.given

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        there = self.values.shape[1]
        drawn_uniforms = torch.full((len(units), self.each), 0.5) if uniforms is None else uniforms
        chosen = (drawn_uniforms * there).ceil().long() - 1
        owner = torch.arange(len(units)).repeat_interleave(self.each)
        inputs = self.values[units[owner], chosen.flatten()]
        return Rows(inputs, self.given[units[owner]], owner)

    def fingerprint(self) -> str:
        return str(float(self.values.sum()))


def test_a_patient_with_many_rows_adds_one_clipped_mean() -> None:
    """The sum against brute force; then all rows of the largest patient are replaced by huge ones, or taken out."""
    inputs, labels = people(20)
    owners = torch.tensor([7] * 9 + [1] * 4 + [5, 5, 5, 2, 2, 9, 8])
    sums: Sums = []
    run((inputs, labels, owners), unit="patient", sums=sums)
    units = [(inputs[owners == who], labels[owners == who]) for who in owners.unique()]
    assert gap(sums[0], clipped_sum(net(), units, CLIP)) < 1e-12
    wild = torch.where((owners == 7)[:, None], 1e3 * inputs.flip(0), inputs)
    run((wild, (labels + (owners == 7)) % 3, owners), unit="patient", sums=sums)
    rest = owners != 7
    run((inputs[rest], labels[rest], owners[rest]), unit="patient", sums=sums)
    assert CLIP < distance(sums[0], sums[1]) <= 2 * CLIP
    assert distance(sums[0], sums[2]) <= CLIP
    assert distance(sums[1], sums[2]) == pytest.approx(CLIP, rel=2e-5)


@pytest.mark.parametrize("each", [1, 4])
def test_a_video_with_many_clips_is_one_unit(each: int) -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(6, 8, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (6,), generator=generator)
    sums: Sums = []
    run(Clips(values, labels, each), unit="video", sums=sums)
    changed = values.clone()
    changed[2] = -50 * values[2].flip(0)
    run(Clips(changed, labels, each), unit="video", sums=sums)
    assert 0 < distance(sums[0], sums[1]) <= 2 * CLIP


def test_clips_cost_nothing() -> None:
    """The same noise, the same charge, whatever number of rows a unit is shown as."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(6, 8, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (6,), generator=generator)
    optimizer = DPSGD(batch_size=3, steps=4)
    found = [run(Clips(values, labels, each), unit="video", optimizer=optimizer) for each in (1, 8)]
    assert found[0].noise_multiplier == found[1].noise_multiplier
    assert found[0].guarantee == found[1].guarantee


def test_views_of_an_image_are_rows_of_one_unit() -> None:
    generator = torch.Generator().manual_seed(4)
    images = torch.rand(5, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 3, (5,), generator=generator)

    def model() -> ViT:
        torch.manual_seed(1)
        return ViT(size=8, patch=4, channels=1, width=8, depth=1, heads=2, classes=3)

    sums: Sums = []
    both = (images, torch.cat([images[:2], 9 * images[2:3].flip(2), images[3:]]))
    found = [run((shown, labels), augment=6, model=model(), sums=sums, size=5) for shown in both]
    assert 0 < distance(sums[0], sums[1]) <= 2 * CLIP * (1 + 1e-6)
    alone = run((images, labels), model=model(), sums=sums, size=5)
    assert distance(sums[0], sums[2]) > 1e-4
    assert alone.noise_multiplier == found[0].noise_multiplier


@pytest.mark.parametrize("optimizer", [DPGD(steps=2, clip=CLIP), DPSGD(batch_size=5, steps=2, clip=CLIP)])
def test_divisor_and_noise_do_not_depend_on_how_many_there_are(optimizer: Any) -> None:
    """Twelve people and thirteen under the same public size: the models differ by the clipped gradients alone."""
    rate = optimizer.sampler.rate(10)
    fitted, ends = [], []
    for count in (12, 13):
        inputs, labels = people(13)
        sums: Sums = []
        fitted.append(run((inputs[:count], labels[:count]), optimizer=optimizer, sums=sums))
        ends.append(sums)
    assert fitted[0].noise_multiplier == fitted[1].noise_multiplier
    assert drawn(0, 13, rate)[: len(drawn(0, 12, rate))] == drawn(0, 12, rate)
    difference = {n: ends[1][0][n] - ends[0][0][n] for n in ends[0][0]}
    newcomer = [one_row_units(*people(13))[12]] if 12 in drawn(0, 13, rate) else []
    assert gap(difference, clipped_sum(net(), newcomer, CLIP)) < 1e-12


def test_an_unfinite_unit_adds_nothing_and_only_the_curator_hears_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, labels = people(20)
    bad = inputs.clone()
    bad[3, 1], bad[8] = float("nan"), float("inf")
    sums: Sums = []
    seen: list[int] = []

    def curator(event: Any) -> None:
        total = event.clipped_sum
        sums.append({n: v.clone() for n, v in total.sum.items()})
        seen.append(total.private.nonfinite)

    run((bad, labels), curator=curator)
    rest = [i for i in range(20) if i not in (3, 8)]
    assert gap(sums[0], clipped_sum(net(), [one_row_units(inputs, labels)[i] for i in rest], CLIP)) < 1e-12
    assert seen == [2]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("portion", [1, 3, 100])
@pytest.mark.parametrize("microbatch", [None, 2])
def test_portions_give_the_same_sum(portion: int, microbatch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded in portions, computed in micro-batches; a unit is never divided between two portions."""
    inputs, labels = people(20)
    owners = torch.arange(20) // 3
    monkeypatch.setattr(loop, "rows_that_fit", lambda _: portion)
    sums: Sums = []
    run((inputs, labels, owners), unit="patient", sums=sums, microbatch=microbatch)
    units = [(inputs[owners == who], labels[owners == who]) for who in owners.unique()]
    assert gap(sums[0], clipped_sum(net(), units, CLIP)) < 1e-12


def test_rows_that_cannot_be_read_or_computed_add_nothing() -> None:
    """After the charge no row decides an error: the others are there, bit for bit as if it had never been."""

    class Files:
        targets = people(20)[1]

        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> Any:
            if i in (4, 11):
                raise OSError("a file with a name")
            return people(20)[0][i], self.targets[i]

    sums: Sums = []
    run(Files(), sums=sums)
    units = [unit for i, unit in enumerate(one_row_units(*people(20))) if i not in (4, 11)]
    assert gap(sums[0], clipped_sum(net(), units, CLIP)) < 1e-12


def test_a_model_that_chokes_on_values_loses_that_unit_alone() -> None:
    """A word that the table does not have: an index error in the middle of the model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    words, labels = torch.tensor([[0, 1], [2, 9], [3, 4]]), torch.tensor([0, 1, 2])
    sums: Sums = []
    for data in ((words, labels), (words[[0, 2]], labels[[0, 2]])):
        torch.manual_seed(0)
        fresh = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        fresh.load_state_dict(model.state_dict())
        run(data, model=fresh, sums=sums, size=3)
    assert distance(sums[0], sums[1]) < 1e-6
    assert distance(sums[0], {n: 0 * v for n, v in sums[0].items()}) > 0.1


def test_the_whole_run_is_the_same_on_one_row_per_owner() -> None:
    inputs, labels = people(12)
    alone = run((inputs, labels))
    owned = run((inputs, labels, torch.arange(12) * 5 - 20), unit="user")
    assert gap(weights(alone.model), weights(owned.model)) < 1e-12
