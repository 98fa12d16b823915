"""Tables: whose rows are shown, chosen by chances alone, and a fingerprint that misses nothing."""

from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from tacit.data._tensor_records import TensorRecords
from tacit.data._views import FlipAndShift

INPUTS, LABELS = torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
OWNERS = torch.tensor([7, 3, 7, 7, 3, 9])  # units in the order of their numbers: 3, 7, 9


def everything(table: TensorRecords, uniforms: Tensor | None = None) -> Any:
    return table.rows(torch.arange(len(table)), uniforms)


def test_rows_are_their_own_units_unless_somebody_owns_them() -> None:
    alone, owned = TensorRecords(INPUTS, LABELS), TensorRecords(INPUTS, LABELS, OWNERS)
    assert (len(alone), alone.most_rows, alone.uniforms) == (6, 1, 0)
    assert (len(owned), owned.most_rows, owned.uniforms) == (3, 3, 0)
    rows = owned.rows(torch.tensor([2, 0]), None)
    assert torch.equal(rows.inputs, INPUTS[[5, 1, 4]])
    assert torch.equal(rows.labels, LABELS[[5, 1, 4]])
    assert rows.owner.tolist() == [0, 1, 1]
    rows = alone.rows(torch.tensor([4, 1]), torch.empty(2, 0))
    assert torch.equal(rows.inputs, INPUTS[[4, 1]])
    assert rows.owner.tolist() == [0, 1]
    assert len(owned.rows(torch.empty(0, dtype=torch.long), None).labels) == 0


def test_at_most_so_many_rows_of_a_unit_each_as_likely() -> None:
    """Two of five: ten pairs, each a tenth of 4,000 draws (chi-square, false alarm 1e-7)."""
    table = TensorRecords(torch.arange(6.0)[:, None], torch.zeros(6, dtype=torch.long), [0, 0, 0, 0, 0, 1], rows_each=2)
    assert (table.most_rows, table.uniforms) == (2, 2)
    generator = torch.Generator().manual_seed(0)
    counts: dict[tuple[float, ...], int] = {}
    for drawn_uniforms in torch.rand(4000, 1, 2, generator=generator, dtype=torch.float64):
        pair = tuple(table.rows(torch.tensor([0]), 1 - drawn_uniforms).inputs.flatten().tolist())
        counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 10
    assert all(a < b for a, b in counts)
    assert chi2.sf(sum((n - 400) ** 2 / 400 for n in counts.values()), 9) > 1e-7
    single = table.rows(torch.tensor([1]), torch.rand(1, 2))
    assert single.inputs.flatten().tolist() == [5.0]  # fewer than asked for: all there are
    assert len(everything(table).labels) == 6  # an evaluation sees all


def test_the_ends_of_chance_choose_rows_too() -> None:
    table = TensorRecords(INPUTS, LABELS, OWNERS, rows_each=1)
    for chance in (2.0**-53, 1.0):
        rows = everything(table, torch.full((3, 1), chance, dtype=torch.float64))
        assert rows.owner.tolist() == [0, 1, 2]


def test_what_a_unit_shows_depends_on_its_own_chances() -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(9, 1, 5, 5), torch.arange(9)
    owners = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    table = TensorRecords(images, labels, owners, rows_each=2, augment=3)
    assert table.most_rows == 6
    assert table.uniforms == 2 + 6 * 3
    drawn_uniforms = torch.rand(3, table.uniforms)
    all_three = everything(table, drawn_uniforms)
    assert all_three.owner.bincount().tolist() == [6, 6, 6]
    for unit in range(3):
        other = torch.rand(3, table.uniforms)
        other[unit] = drawn_uniforms[unit]
        mine = everything(table, other)
        alone = table.rows(torch.tensor([unit]), drawn_uniforms[unit : unit + 1])
        assert torch.equal(mine.inputs[mine.owner == unit], alone.inputs)
        assert torch.equal(all_three.inputs[all_three.owner == unit], alone.inputs)
        assert torch.equal(all_three.labels[all_three.owner == unit], alone.labels)


def test_views_are_those_of_the_units_own_numbers() -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(4, 1, 6, 6), torch.tensor([3, 1, 4, 1])
    table = TensorRecords(images, labels, augment=2, views=FlipAndShift(shift=1))
    drawn_uniforms = torch.rand(2, table.uniforms)
    rows = table.rows(torch.tensor([2, 0]), drawn_uniforms)
    assert rows.owner.tolist() == [0, 0, 1, 1]
    assert rows.labels.tolist() == [4, 4, 3, 3]
    views = FlipAndShift(shift=1)
    for place, (image, numbers) in enumerate(
        (images[i], drawn_uniforms[unit, 3 * k : 3 * k + 3]) for unit, i in enumerate((2, 0)) for k in range(2)
    ):
        assert torch.equal(rows.inputs[place], views(image[None], numbers[None])[0])
    assert torch.equal(everything(table).inputs, images)  # an evaluation changes nothing


class Items:
    """A data set of (input, label) items."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.given = inputs, labels

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.inputs[i], int(self.given[i])


def test_data_sets_and_mappings_are_tables_too() -> None:
    items = TensorRecords(Items(INPUTS, LABELS))
    assert torch.equal(items.labels(), LABELS)
    assert torch.equal(everything(items).inputs, INPUTS)
    assert items.fingerprint() == TensorRecords(INPUTS, LABELS).fingerprint()
    words = TensorRecords({"ids": INPUTS, "mask": INPUTS > 3}, LABELS)
    assert torch.equal(words.rows(torch.tensor([3]), None).inputs["mask"], INPUTS[3:4] > 3)


def changed(values: Tensor, place: Any, to: float) -> Tensor:
    other = values.clone()
    other[place] = to
    return other


OTHERS: dict[str, TensorRecords] = {
    "a value": TensorRecords(changed(INPUTS, (5, 1), 11.5), LABELS, OWNERS),
    "a label": TensorRecords(INPUTS, changed(LABELS, 0, 1), OWNERS),
    "the order": TensorRecords(INPUTS.flip(0), LABELS.flip(0), OWNERS.flip(0)),
    "an owner": TensorRecords(INPUTS, LABELS, [7, 3, 7, 7, 9, 9]),
    "no owners": TensorRecords(INPUTS, LABELS),
    "each its own": TensorRecords(INPUTS, LABELS, range(6)),
    "a name": TensorRecords({"a": INPUTS}, LABELS, OWNERS),
    "one row less": TensorRecords(INPUTS[:-1], LABELS[:-1], OWNERS[:-1]),
    "rows each": TensorRecords(INPUTS, LABELS, OWNERS, rows_each=2),
    "the type of inputs": TensorRecords(INPUTS.view(torch.int32), LABELS, OWNERS),
    "the shape of inputs": TensorRecords(INPUTS[:, :, None], LABELS, OWNERS),
    "the type of labels": TensorRecords(INPUTS, LABELS.double(), OWNERS),
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_fingerprint_changes_with_everything(what: str) -> None:
    assert OTHERS[what].fingerprint() != TensorRecords(INPUTS, LABELS, OWNERS).fingerprint()


def test_a_row_that_goes_to_the_next_unit_shows_in_the_fingerprint() -> None:
    """The same rows in the same order, and units of the same largest size: only the border moves."""
    first, second = (TensorRecords(INPUTS, LABELS, owners) for owners in ([0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 2, 2]))
    assert first.most_rows == second.most_rows
    assert first.fingerprint() != second.fingerprint()


def test_the_fingerprint_changes_with_the_views_and_with_nothing_else() -> None:
    images = torch.rand(6, 1, 4, 4)
    names = {
        TensorRecords(images, LABELS, augment=augment, views=views).fingerprint()
        for augment, views in (
            (None, None),
            (2, None),
            (3, None),
            (2, FlipAndShift(shift=1)),
            (2, FlipAndShift(flip=False)),
        )
    }
    assert len(names) == 5
    again = TensorRecords(
        INPUTS.clone(), LABELS.clone(), OWNERS.clone() * 10
    )  # other numbers, the same groups in their order
    assert again.fingerprint() == TensorRecords(INPUTS, LABELS, OWNERS).fingerprint()


def test_features_take_the_place_of_inputs() -> None:
    table = TensorRecords(INPUTS, LABELS, OWNERS)
    other = table.with_inputs(INPUTS * 2)
    assert torch.equal(everything(other).inputs, 2 * everything(table).inputs)
    assert torch.equal(everything(other).owner, everything(table).owner)
    with pytest.raises(ValueError, match="one per row"):
        table.with_inputs(INPUTS[:-1])
    with pytest.raises(ValueError, match="not augmented"):
        TensorRecords(torch.rand(6, 1, 4, 4), LABELS, augment=2).with_inputs(INPUTS)


def test_what_is_no_table() -> None:
    for build, said in (
        (lambda: TensorRecords(INPUTS, LABELS[:-1]), "numbers of rows and of labels differ"),
        (lambda: TensorRecords(INPUTS[:0], LABELS[:0]), "no rows"),
        (lambda: TensorRecords(INPUTS, LABELS, ["a", 1] * 3), "one integer or string per row"),
        (lambda: TensorRecords(INPUTS, LABELS, OWNERS.double()), "one integer or string per row"),
        (lambda: TensorRecords(INPUTS, LABELS, OWNERS[:, None]), "one integer or string per row"),
        (lambda: TensorRecords(INPUTS, LABELS, rows_each=0), "rows_each is a number of rows"),
        (lambda: TensorRecords({"a": INPUTS, "b": INPUTS[:-1]}, LABELS), "disagree on the number of rows"),
    ):
        with pytest.raises(ValueError, match=said):
            build()
