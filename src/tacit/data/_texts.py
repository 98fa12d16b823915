"""Texts as records: token sequences of any length, tokenised once and padded as they are asked for."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tacit._refusals import Refusal
from tacit.data._grouped import Ids
from tacit.data._records import Rows
from tacit.data._tensor_records import TensorRecords

NO_LABEL = -100  # of a place where nothing is to be predicted, as everywhere in torch


class Sequences:
    """Token sequences end to end in memory; some of them are read as one padded batch.

    A batch is as long as its longest sequence, rounded up to a multiple of `bucket` (or to `longest`, if that is less),
    so that a model meets few shapes. What a sequence is padded with is masked.
    """

    draws = False

    def __init__(self, tokens: Mapping[str, Sequence[Sequence[int]]], *, pad: int, longest: int, bucket: int) -> None:
        ids = tokens["input_ids"]
        self.lengths = torch.tensor([len(row) for row in ids])
        self.pad, self.longest, self.bucket = pad, longest, bucket
        self._flat = {key: torch.tensor([t for row in rows for t in row]).int() for key, rows in tokens.items()}
        self._starts = torch.cumsum(self.lengths, 0) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sizes(self) -> Tensor:
        """The length that each sequence would be padded to on its own."""
        return (-(-self.lengths // self.bucket) * self.bucket).clamp(max=self.longest)

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """What transformers models take: ids, mask and, for those that know them, token types."""
        size = int(self.sizes[index].max()) if len(index) else self.bucket
        place = torch.arange(size)
        there = place < self.lengths[index, None]
        where = (self._starts[index, None] + place).clamp(max=int(self.lengths.sum()) - 1)
        found = {key: values[where].long().masked_fill(~there, 0) for key, values in self._flat.items()}
        found["input_ids"] = found["input_ids"].masked_fill(~there, self.pad)
        return found | {"attention_mask": there.long()}


class Texts(TensorRecords):
    """Texts (or pairs of texts) with a label each; without `labels`, for next-token prediction.

    Args:
        tokenizer: One of transformers.
        texts: The texts.
        labels: One class per text.
        owners: One integer or string per text: whose it is.
        unit: What an owner is (default: "user").
        max_length: Texts are cut at this number of tokens.
        rows_each: The most texts of one owner shown in one step.
        bucket: Padded lengths are multiples of it.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[str] | Sequence[tuple[str, str]],
        labels: Tensor | Sequence[int] | None = None,
        owners: Ids | None = None,
        *,
        unit: str | None = None,
        max_length: int = 128,
        rows_each: int | None = None,
        bucket: int = 16,
    ) -> None:
        if max_length < 1 or bucket < 1:
            raise Refusal("max_length and bucket are numbers of tokens, at least 1.")
        sequences = Sequences(
            _tokens(tokenizer, texts, max_length),
            pad=tokenizer.pad_token_id or 0,
            longest=max_length,
            bucket=min(bucket, max_length),
        )
        self.predicts_tokens = labels is None
        self.pairs = bool(len(texts)) and not isinstance(texts[0], str)
        self.vocabulary = len(tokenizer)
        kept = torch.zeros(len(sequences), dtype=torch.long) if labels is None else torch.as_tensor(labels)
        super().__init__(sequences, kept, owners, unit=unit, rows_each=rows_each)

    def _own(self, owners: Ids | None, unit: str | None) -> None:
        super()._own(owners, unit)
        each: Tensor = self.inputs.sizes
        self._unit_sizes = each if self._members is None else torch.stack([each[m].max() for m in self._members])

    @property
    def sizes(self) -> Tensor | None:
        """The padded length of every unit's longest text: units of one size are best taken together."""
        return self._unit_sizes if isinstance(self.inputs, Sequences) else None

    @property
    def row_sizes(self) -> Tensor | None:
        """The padded length of every text; None once features have taken the place of texts."""
        return self.inputs.sizes if isinstance(self.inputs, Sequences) else None

    def labels(self) -> Tensor:
        """The labels; where tokens are predicted, all texts' tokens padded to the same length."""
        if self.predicts_tokens and isinstance(self.inputs, Sequences):
            return _next_tokens(self.inputs.read(torch.arange(len(self.inputs))))
        return super().labels()

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        rows = super().rows(units, uniforms)
        return rows._replace(labels=_next_tokens(rows.inputs)) if self.predicts_tokens else rows

    def synthetic(self) -> Rows:
        """Random texts of the greatest length, drawn from the vocabulary: to try a model on."""
        if not isinstance(self.inputs, Sequences):
            first = self.rows(torch.zeros(1, dtype=torch.long), None)
            return Rows(torch.zeros_like(first.inputs), torch.zeros_like(first.labels), first.owner)
        count, length = 4, self.inputs.longest
        place, generator = torch.arange(length), torch.Generator().manual_seed(0)
        there = place < (length - torch.arange(count)[:, None] * max(1, length // 8)).clamp(min=1)
        kinds = {
            "input_ids": torch.randint(self.vocabulary, (count, length), generator=generator),
            "token_type_ids": (there & (place >= length // 2) & self.pairs).long(),
            "attention_mask": there.long(),
        }
        inputs = {key: kinds[key] for key in self.read(torch.zeros(1, dtype=torch.long))}
        if self.predicts_tokens:
            return Rows(inputs, _next_tokens(inputs), torch.arange(count))
        labels = torch.zeros(count, *self._labels.shape[1:], dtype=self._labels.dtype)
        if labels.dim() == 1 and not labels.is_floating_point():
            labels = torch.arange(count).remainder(int(self._labels.max()) + 1).to(labels)
        return Rows(inputs, labels, torch.arange(count))

    def blank(self, size: int | None = None) -> Rows:
        """One text of this padded length (default: the greatest) that says nothing."""
        length = self.inputs.longest if size is None else size
        keys = self.read(torch.zeros(1, dtype=torch.long))
        inputs = {key: torch.full((1, length), int(key == "attention_mask")) for key in keys}
        labels = torch.zeros(1, *self._labels.shape[1:], dtype=self._labels.dtype)
        return Rows(inputs, _next_tokens(inputs) if self.predicts_tokens else labels, torch.zeros(1, dtype=torch.long))

    def read(self, index: Tensor) -> Any:
        return self.inputs.read(index) if isinstance(self.inputs, Sequences) else super().read(index)


def sst2(path: str | Path) -> tuple[list[str], list[int]]:
    """The sentences and labels (0 or 1) of a file of SST-2: a header, then `sentence<TAB>label`; packed or not.

    Args:
        path: The file.

    Returns:
        Sentences and labels.
    """
    try:
        content = Path(path).read_bytes()
        plain = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8")
        lines = list(csv.reader(plain.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    except FileNotFoundError:
        raise Refusal(f"There is no file {path}.") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error):
        raise Refusal(f"{path} cannot be read as text (.tsv) or packed text (.tsv.gz).") from None
    if not lines or lines[0] != ["sentence", "label"]:
        raise Refusal(f"{path} must begin with a line that says sentence and label, with a tab between them.")
    for number, line in enumerate(lines[1:], 2):
        if len(line) != 2 or line[1] not in ("0", "1"):
            raise Refusal(f"{path}, line {number}: a sentence, a tab, and 0 or 1 are expected.")
    if len(lines) == 1:
        raise Refusal(f"{path} has a header and no sentence.")
    return [line[0] for line in lines[1:]], [int(line[1]) for line in lines[1:]]


def _tokens(tokenizer: Any, texts: Sequence[Any], longest: int) -> dict[str, list[list[int]]]:
    pairs = bool(len(texts)) and not isinstance(texts[0], str)
    for text in texts:
        parts = text if pairs and isinstance(text, tuple | list) else (text,)
        if len(parts) != (2 if pairs else 1) or not all(isinstance(part, str) for part in parts):
            raise Refusal("Texts are strings, or all of them pairs of strings.")
    if not len(texts):
        raise Refusal("There are no texts to learn from.")
    first = [text[0] for text in texts] if pairs else list(texts)
    second = [text[1] for text in texts] if pairs else None
    found = tokenizer(first, second, truncation=True, max_length=longest)
    kept = {key: [list(row) for row in found[key]] for key in ("input_ids", "token_type_ids") if key in found}
    empty = tokenizer.pad_token_id or 0
    return {  # an empty text is one token that says nothing
        key: [row or [empty if key == "input_ids" else 0] for row in rows] for key, rows in kept.items()
    }


def _next_tokens(inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, NO_LABEL)
