"""An adapter along a stream: what it got right, shift by shift, with labels that the adapter never sees."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tacit.adapt._adapter import Adapter
from tacit.adapt._views import logits_of
from tacit.data import Stream


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Accuracy in percent, on data declared public.

    Args:
        accuracy: By shift, in the stream's order.
        seconds: Time taken.
        steps: Batches seen.
        hits: By shift, whether each row was predicted right, in the order of the stream: two runs on one stream can be
            compared row by row.
    """

    accuracy: dict[str, float]  # by shift, in the stream's order
    seconds: float
    steps: int
    hits: dict[str, tuple[bool, ...]]

    @property
    def mean(self) -> float:
        return sum(self.accuracy.values()) / len(self.accuracy)


def follow(
    predictor: Adapter | nn.Module,
    stream: Stream,
    *,
    batch_size: int,
    public: bool = False,
    on_rows: Callable[[int], None] | None = None,
) -> Scores:
    """Evaluate an adapter (or a plain model, which stays as it is) on a stream.

    Scores are exact, so the labels must be declared public. An episodic stream resets the adapter at each new shift.

    Args:
        predictor: The adapter or model.
        stream: The stream.
        batch_size: Rows per batch.
        public: Must be True: the caller declares the labels public.
        on_rows: Called with the number of rows seen so far.

    Returns:
        The accuracy under each shift.

    Raises:
        ValueError: The labels are not declared public.
    """
    if not public:
        raise ValueError("Scores are computed without noise: give public=True if this data is public.")
    right: dict[str, list[bool]] = {name: [] for name in stream.shifts}
    start = time.perf_counter()
    for step, batch in enumerate(stream.batches(batch_size)):
        if isinstance(predictor, Adapter):
            if stream.setting == "episodic" and batch.first and step:
                predictor.reset()
            logits = predictor(batch.images)
        else:
            with torch.no_grad():
                logits = logits_of(predictor, batch.images)
        for name, hit in zip(batch.shifts, (logits.argmax(1) == batch.labels).tolist(), strict=True):
            right[name].append(hit)
        if on_rows is not None:
            on_rows(len(batch))
    return Scores(
        accuracy={name: 100 * sum(found) / len(found) for name, found in right.items()},
        seconds=time.perf_counter() - start,
        steps=stream.steps(batch_size),
        hits={name: tuple(found) for name, found in right.items()},
    )
