"""Texts: tokenised once, padded as asked for, by whom they were written; and the reader of SST-2."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from words import tokenizer

from tacit import data
from tacit.data._records import Records

TEXTS = ["good film", "a very very dull plot", "bad", "the plot so good so very good"]


def test_rows_are_padded_to_a_bucket_and_masked() -> None:
    texts = data.Texts(tokenizer(), TEXTS, [1, 0, 0, 1], bucket=4, max_length=10)
    assert isinstance(texts, Records)
    assert (len(texts), texts.most_rows, texts.uniforms) == (4, 1, 0)
    short = texts.rows(torch.tensor([2, 0]), None)
    assert short.inputs["input_ids"].tolist() == [[2, 5, 3, 0], [2, 4, 6, 3]]
    assert short.inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert short.inputs["token_type_ids"].tolist() == [[0] * 4] * 2
    assert short.labels.tolist() == [0, 1]
    assert short.owner.tolist() == [0, 1]
    assert texts.rows(torch.tensor([1]), None).inputs["input_ids"].shape == (1, 8)
    assert texts.rows(torch.tensor([2, 3]), None).inputs["input_ids"].shape == (2, 10)  # 12, but never above the limit
    assert texts.sizes is not None
    assert texts.sizes.tolist() == [4, 8, 4, 10]


def test_long_texts_are_cut_and_empty_ones_are_one_token() -> None:
    texts = data.Texts(tokenizer(marks=False), ["", TEXTS[3]], [0, 1], max_length=3)
    rows = texts.rows(torch.arange(2), None)
    assert rows.inputs["input_ids"].tolist() == [[0, 0, 0], [11, 7, 12]]
    assert rows.inputs["attention_mask"].sum(1).tolist() == [1, 3]


def test_pairs_have_token_types() -> None:
    pairs = [("good film", "bad"), ("dull", "a film")]
    rows = data.Texts(tokenizer(), pairs, [0, 1], bucket=8).rows(torch.arange(2), None)
    assert rows.inputs["input_ids"][0].tolist() == [2, 4, 6, 3, 5, 3, 0, 0]
    assert rows.inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0]]
    assert data.Texts(tokenizer(), pairs, [0, 1]).synthetic().inputs["token_type_ids"].any()


def test_next_tokens_are_the_texts_themselves() -> None:
    texts = data.Texts(tokenizer(marks=False), TEXTS, bucket=4)
    rows = texts.rows(torch.tensor([1, 2]), None)
    assert rows.labels.tolist() == [[10, 8, 8, 13, 7, -100, -100, -100], [5] + [-100] * 7]
    assert texts.labels().shape == (4, 8)
    assert (texts.labels() != -100).sum().item() == 2 + 5 + 1 + 7


def test_messages_of_people() -> None:
    texts = data.Texts(tokenizer(), TEXTS, [1, 0, 0, 1], owners=[7, 3, 7, 3], rows_each=1, bucket=4)
    assert (len(texts), texts.most_rows, texts.uniforms) == (2, 1, 1)
    assert texts.grouped
    assert texts.sizes is not None
    assert texts.sizes.tolist() == [12, 4]
    assert texts.rows(torch.arange(2), None).owner.tolist() == [0, 0, 1, 1]  # an evaluation sees everything
    assert texts.rows(torch.arange(2), torch.tensor([[1.0], [0.1]])).labels.tolist() == [0, 0]


def test_the_fingerprint_sees_every_change() -> None:
    def made(words: list[str], labels: list[int] | None, **options: Any) -> str:
        return data.Texts(tokenizer(), words, labels, **options).fingerprint()

    first = made(TEXTS, [1, 0, 0, 1])
    assert made(TEXTS, [1, 0, 0, 1]) == first
    others = [
        made([*TEXTS[:3], "the plot so good so very bad"], [1, 0, 0, 1]),
        made(TEXTS, [1, 0, 0, 0]),
        made(TEXTS, [1, 0, 0, 1], owners=[0, 0, 1, 1]),
        made(TEXTS, [1, 0, 0, 1], max_length=5),
    ]
    assert len({first, *others}) == 5


def test_synthetic_texts_are_valid_and_of_the_greatest_length() -> None:
    texts = data.Texts(tokenizer(), TEXTS, [2, 0, 0, 1], max_length=40)
    rows = texts.synthetic()
    assert {value.shape for value in rows.inputs.values()} == {(4, 40)}
    assert 0 <= int(rows.inputs["input_ids"].min()) <= int(rows.inputs["input_ids"].max()) < len(tokenizer())
    assert sorted(rows.labels.tolist()) == [0, 0, 1, 2]
    assert not rows.inputs["token_type_ids"].any()


@pytest.mark.parametrize(
    ("texts", "labels", "said"),
    [
        ([], [], "no texts"),
        ([1, 2], [0, 0], "strings"),
        (["good", ("a", "b")], [0, 0], "strings"),
        (["good", "bad"], [0], "numbers of rows and of labels differ"),
    ],
)
def test_what_is_no_text_is_refused(texts: Any, labels: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        data.Texts(tokenizer(), texts, labels)
    with pytest.raises(ValueError, match="at least 1"):
        data.Texts(tokenizer(), TEXTS, [1, 0, 0, 1], max_length=0)


def test_sst2(tmp_path: Path) -> None:
    packed, plain = tmp_path / "train.tsv.gz", tmp_path / "train.tsv"
    content = 'sentence\tlabel\na "good film \t1\nbad\t0\n'
    packed.write_bytes(gzip.compress(content.encode()))
    plain.write_text(content)
    assert data.sst2(packed) == data.sst2(plain) == (['a "good film ', "bad"], [1, 0])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"text\tlabel\na\t1\n", "sentence and label"),
        (b"sentence\tlabel\n", "no sentence"),
        (b"sentence\tlabel\ngood\t1\nbad\n", "line 3"),
        (b"sentence\tlabel\ngood\tyes\n", "line 2"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"", "sentence and label"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "x.tsv"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        data.sst2(file)
    with pytest.raises(ValueError, match="no file"):
        data.sst2(tmp_path / "none.tsv")
