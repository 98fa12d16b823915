"""The shipped pictures are the published ones, and a caller's copy is its own."""

import hashlib
from importlib.resources import files

import pytest
import torch

from tacit.data import fashion_mnist

# SHA-256 of the values in the published IDX files, behind their headers; of the training files the first 23,000 rows.
PUBLISHED = {
    "train": (
        "5c256cfc9ab733e8277a1d9549436f7a4e6c6d0c32562341f4f9bbf439c80e96",
        "f739f94578469f49525504ed5c117bea7ce71b08eb710d4d0c7acec177b10584",
    ),
    "test": (
        "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    ),
}
COUNTS = {"train": [2248, 2317, 2290, 2316, 2271, 2320, 2374, 2322, 2234, 2308], "test": [1000] * 10}


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_values_are_the_published_ones(split: str) -> None:
    images, labels = fashion_mnist(split)
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert tuple(images.shape) == (len(labels), 1, 28, 28)
    assert images.is_contiguous()
    digests = (images.numpy().tobytes(), labels.to(torch.uint8).numpy().tobytes())
    assert tuple(hashlib.sha256(part).hexdigest() for part in digests) == PUBLISHED[split]
    assert labels.bincount().tolist() == COUNTS[split]


def test_seen_and_unseen_divide_the_whole() -> None:
    train, test, seen, unseen = (fashion_mnist(split) for split in ("train", "test", "seen", "unseen"))
    assert [len(part[1]) for part in (train, test, seen, unseen)] == [23_000, 10_000, 18_000, 15_000]
    for place in (0, 1):
        assert seen[place].equal(train[place][:18_000])
        assert unseen[place].equal(torch.cat([train[place][18_000:], test[place]]))


def test_what_a_caller_does_to_a_copy_stays_there() -> None:
    images, labels = fashion_mnist("test")
    before = int(images[0].sum()), int(labels[0])
    images.zero_()
    labels.fill_(-1)
    again, label = fashion_mnist("test")
    assert (int(again[0].sum()), int(label[0])) == before
    assert before[0] > 0


def test_an_unknown_split_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no split 'valid': choose one of train, test, seen, unseen"):
        fashion_mnist("valid")  # type: ignore[arg-type]


def test_the_licence_stands_beside_the_file() -> None:
    text = files("tacit.data").joinpath("files/LICENSE-fashion-mnist.txt").read_text("utf-8")
    assert "Copyright (c) 2017 Zalando SE" in text
    assert "The above copyright notice and this permission notice shall be included" in text
