"""Streams: every picture once, in the order that was said, in batches that keep the shifts apart."""

import pytest
import torch
from torch import Tensor

from tacit.data import Stream, fashion_mnist, streams
from tacit.data.shifts import TEST

SHIFTS = ("fog", "clean", "gaussian_noise")


def pictures(count: int = 100) -> tuple[Tensor, Tensor]:
    images, labels = fashion_mnist("test")
    return images[:count], labels[:count]


def made(setting: streams.Setting = "continual", *, per_shift: int = 23, seed: int = 0) -> Stream:
    return streams.corrupted(*pictures(), shifts=SHIFTS, setting=setting, per_shift=per_shift, seed=seed)


@pytest.mark.parametrize("setting", ["episodic", "continual", "mixed"])
def test_every_picture_comes_once_with_its_own_label(setting: streams.Setting) -> None:
    _, labels = pictures()
    batches = list(made(setting).batches(10))
    rows = torch.cat([batch.rows for batch in batches])
    assert len(rows) == len(rows.unique()) == len(made(setting)) == 69
    for batch in batches:
        assert batch.labels.equal(labels[batch.rows])
        assert batch.images.dtype == torch.float32
        assert len(batch) == len(batch.images) == len(batch.shifts) == len(batch.rows)
        assert batch.images.min() >= 0
        assert batch.images.max() <= 1


def test_with_reuse_a_picture_comes_once_under_a_shift_and_may_come_under_several() -> None:
    images, labels = pictures()

    def again(seed: int) -> Stream:
        return streams.corrupted(images, labels, shifts=SHIFTS, per_shift=80, seed=seed, reuse=True)

    stream = again(0)
    assert stream.rows.shape == (3, 80)
    for part in stream.rows:
        assert len(part.unique()) == 80
    assert len(stream.rows.unique()) < 240  # 240 draws from 100 pictures
    assert not stream.rows[0].equal(stream.rows[1])
    assert stream.rows.equal(again(0).rows)
    assert not stream.rows.equal(again(1).rows)
    for batch in stream.batches(16):
        assert batch.labels.equal(labels[batch.rows])
    clean = [batch for batch in stream.batches(16) if set(batch.shifts) == {"clean"}]
    assert torch.cat([batch.images for batch in clean]).equal(images[stream.rows[1]].float() / 255)
    with pytest.raises(ValueError, match="comes once under a shift"):
        streams.corrupted(images, labels, shifts=SHIFTS, per_shift=101, reuse=True)


@pytest.mark.parametrize("setting", ["episodic", "continual"])
def test_shifts_come_one_after_another_and_batches_never_straddle_two(setting: streams.Setting) -> None:
    batches = list(made(setting).batches(10))
    assert [len(batch) for batch in batches] == [10, 10, 3] * 3
    assert [set(batch.shifts) for batch in batches] == [{name} for name in SHIFTS for _ in range(3)]
    assert [batch.first for batch in batches] == [True, False, False] * 3


def test_mixed_has_all_shifts_at_once_and_one_beginning() -> None:
    batches = list(made("mixed").batches(10))
    assert [len(batch) for batch in batches] == [10] * 6 + [9]
    assert [batch.first for batch in batches] == [True] + [False] * 6
    names = [name for batch in batches for name in batch.shifts]
    assert {name: names.count(name) for name in SHIFTS} == dict.fromkeys(SHIFTS, 23)
    assert len(set(names[:23])) == 3


def test_mixed_has_the_same_pictures_under_the_same_shifts_as_continual() -> None:
    def by_row(stream: Stream) -> dict[int, tuple[str, Tensor]]:
        found = {}
        for batch in stream.batches(7):
            found |= dict(zip(batch.rows.tolist(), zip(batch.shifts, batch.images, strict=True), strict=True))
        return found

    mixed, in_order = by_row(made("mixed")), by_row(made("continual"))
    assert mixed.keys() == in_order.keys()
    for row, (name, image) in mixed.items():
        assert name == in_order[row][0]
        assert image.equal(in_order[row][1])


@pytest.mark.parametrize("size", [1, 7, 10, 23, 64, 100])
@pytest.mark.parametrize("setting", ["continual", "mixed"])
def test_steps_are_the_number_of_batches(setting: streams.Setting, size: int) -> None:
    assert made(setting).steps(size) == len(list(made(setting).batches(size)))


def test_clean_rows_are_the_base_pictures_and_others_are_not() -> None:
    base = pictures()[0].float() / 255
    for batch in made().batches(23):
        same = batch.images.equal(base[batch.rows])
        assert same == (batch.shifts[0] == "clean")


def test_a_second_pass_is_the_same_even_after_a_consumer_wrote_into_its_batches() -> None:
    for images in (pictures()[0], pictures()[0].float() / 255):
        stream = streams.corrupted(images, pictures()[1], shifts=SHIFTS, per_shift=9)
        kept = [batch.images.clone() for batch in stream.batches(4)]
        for batch in stream.batches(4):
            batch.images.zero_()
            batch.labels.zero_()
            batch.rows.zero_()
        for batch, image in zip(stream.batches(4), kept, strict=True):
            assert batch.images.equal(image)
            assert len(batch.rows.unique()) == len(batch)


def test_the_seed_deals_and_the_global_generator_does_not() -> None:
    state = torch.get_rng_state()
    first, again, other = (torch.cat([b.rows for b in made(seed=seed).batches(10)]) for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)
    assert torch.get_rng_state().equal(state)


def test_a_shift_that_comes_back_brings_other_noise() -> None:
    flat = torch.full((20, 1, 28, 28), 0.5)
    stream = streams.corrupted(flat, torch.zeros(20), shifts=("gaussian_noise",) * 2, per_shift=10)
    first, second = (batch.images for batch in stream.batches(10))
    assert not first.equal(second)


def test_a_stream_says_its_order() -> None:
    assert str(made()) == "continual, severity 3, 23 pictures each, seed 0: fog -> clean -> gaussian_noise"
    assert str(made("mixed")).endswith("fog + clean + gaussian_noise")
    assert "tensor" not in repr(made())
    images, labels = pictures(30)
    assert streams.corrupted(images, labels, per_shift=2).shifts == TEST


def test_what_is_wrong_is_said_before_a_batch_is_made() -> None:
    images, labels = pictures()
    with pytest.raises(ValueError, match=r"15 shifts of 1000 pictures need 15000 .* there are 100: .* to 6 or less"):
        streams.corrupted(images, labels)
    with pytest.raises(ValueError, match="did you mean 'fog'"):
        streams.corrupted(images, labels, shifts=["clean", "fogg"], per_shift=1)
    with pytest.raises(ValueError, match="from 1 to 5"):
        streams.corrupted(images, labels, severity=0, per_shift=1)
    with pytest.raises(ValueError, match="no setting 'forever': choose one of episodic, continual, mixed"):
        streams.corrupted(images, labels, setting="forever", per_shift=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="100 pictures but 99 labels"):
        streams.corrupted(images, labels[1:], per_shift=1)
    with pytest.raises(ValueError, match="at least one picture"):
        streams.corrupted(images, labels, per_shift=0)
    for empty in ([], "fog"):
        with pytest.raises(ValueError, match="a sequence of names"):
            streams.corrupted(images, labels, shifts=empty, per_shift=1)
    with pytest.raises(ValueError, match="1 or 3 channels"):
        streams.corrupted(images[:, 0], labels, per_shift=1)
    with pytest.raises(ValueError, match="at least one row, not 0"):
        made().batches(0)
