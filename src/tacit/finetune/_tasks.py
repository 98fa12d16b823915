"""What a model is to learn: one class per row, or several labels per row. Loss, score and checks, all per row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit._refusals import Refusal
from tacit.finetune._measures import auroc, score_histogram, scores_of_histogram

_IGNORED = -100  # torch's `ignore_index`
SILENT_LOSSES: WeakSet[Any] = WeakSet()  # those of `loss_of` that draw nothing: the package's own tasks


@runtime_checkable
class Task(Protocol):
    """A loss per row, a score, and what labels must look like.

    A task whose score is no mean over rows may have `histogram(probs, labels)`, a vector of L2 norm at most 1 per row,
    and `scores_of(total)`, the scores from its noisy sum: a charged evaluation then releases that sum.
    """

    @property
    def outputs(self) -> int:
        """How many numbers the model's head gives."""

    @property
    def measure(self) -> str:
        """The name of the score that counts."""

    def check(self, labels: Tensor) -> None:
        """Refuse invalid labels; runs before anything is charged."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """One loss per row."""

    def probs(self, outputs: Tensor) -> Tensor:
        """Probabilities, which are averaged over the rows of a unit that is scored as one."""

    def right(self, probs: Tensor, labels: Tensor) -> Tensor:
        """How right each row is, in [0, 1]: what a charged evaluation releases the mean of."""

    def confidence(self, probs: Tensor, labels: Tensor) -> Tensor:
        """How sure of the right answer each row is, in [0, 1]: 1 less the loss, which is cut (see `cut`)."""

    def scores(self, probs: Tensor, labels: Tensor) -> dict[str, float]:
        """Every measure, in percent, of data that may be looked at."""


@dataclass(frozen=True)
class Classes:
    """One of `outputs` classes: cross entropy, top-1 accuracy.

    Args:
        outputs: The number of classes.
    """

    outputs: int

    @property
    def measure(self) -> str:
        return "accuracy"

    def check(self, labels: Tensor) -> None:
        if labels.is_floating_point() or labels.dtype == torch.bool or labels.dim() != 1:
            raise Refusal(f"Classes are integers, one per row; got {labels.dtype} in {labels.dim()} dimensions.")
        if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < self.outputs):
            raise Refusal(
                f"Labels must be 0 to {self.outputs - 1}, for {self.outputs} classes; some are not. Give classes= the "
                "number of classes that there are, or number them from 0."
            )

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels, reduction="none")

    def output_gradients(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The losses of `loss`, their gradients by the outputs, softmax less one at the label, and who fails.

        As in torch a label of -100 has neither loss nor gradient; one that is no class fails, and has none here.
        """
        logs, good = functional.log_softmax(outputs, 1), None
        low, high = torch.aminmax(labels) if len(labels) else (labels.new_zeros(()), labels.new_zeros(()))
        if int(low) < 0 or int(high) >= outputs.shape[1]:
            good = (labels >= 0) & (labels < outputs.shape[1])
        places = (labels if good is None else labels.masked_fill(~good, 0))[:, None]
        losses = logs.gather(1, places)[:, 0].neg_()
        gradients = logs.exp_()
        gradients.scatter_add_(1, places, gradients.new_full((1, 1), -1.0).expand_as(places))
        if good is None:
            return losses, gradients, None
        failing = ~(good | (labels == _IGNORED))
        return losses.masked_fill(~good, 0), gradients.masked_fill(~good[:, None], 0), failing

    def probs(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def right(self, probs: Tensor, labels: Tensor) -> Tensor:
        return (probs.argmax(1) == labels).double()

    def confidence(self, probs: Tensor, labels: Tensor) -> Tensor:
        return cut(-probs.gather(1, labels[:, None])[:, 0].double().log(), math.log(max(self.outputs, 2)))

    def scores(self, probs: Tensor, labels: Tensor) -> dict[str, float]:
        return {"accuracy": 100 * float(self.right(probs, labels).mean())}


@dataclass(frozen=True)
class Labels:
    """`outputs` labels of which any may hold: binary cross entropy, mean AUROC. NaN: not known, and not counted.

    Args:
        outputs: The number of labels.
    """

    outputs: int

    @property
    def measure(self) -> str:
        return "auroc"

    def check(self, labels: Tensor) -> None:
        if not labels.is_floating_point() or labels.dim() != 2 or labels.shape[1] != self.outputs:
            raise Refusal(
                f"Several labels are floats, rows x {self.outputs}; got {labels.dtype} in {labels.dim()} dimensions."
            )
        known = labels[~labels.isnan()]
        if len(known) and not (float(known.min()) >= 0 and float(known.max()) <= 1):
            raise Refusal("A label is between 0 and 1, or NaN where it is not known; some are neither.")

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        known = ~labels.isnan()
        each = functional.binary_cross_entropy_with_logits(outputs, labels.nan_to_num(), reduction="none")
        return (each * known).sum(1) / self.outputs

    def probs(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def right(self, probs: Tensor, labels: Tensor) -> Tensor:
        known = ~labels.isnan()
        hits = ((probs > 0.5) == (labels > 0.5)) & known
        return hits.double().sum(1) / known.sum(1).clamp_min(1)

    def confidence(self, probs: Tensor, labels: Tensor) -> Tensor:
        known, truth = ~labels.isnan(), labels.nan_to_num().double()
        said = torch.where(probs.isnan(), 1 - truth, probs.double())  # no number is wrong, not an error
        each = functional.binary_cross_entropy(said, truth, reduction="none") * known
        return cut(each.sum(1) / known.sum(1).clamp_min(1), math.log(2))

    def scores(self, probs: Tensor, labels: Tensor) -> dict[str, float]:
        each = [auroc(probs[known, i], labels[known, i]) for i, known in enumerate((~labels.isnan()).T)]
        there = [value for value in each if value is not None]
        mean = sum(there) / len(there) if there else float("nan")
        return {"auroc": 100 * mean, "accuracy": 100 * float(self.right(probs, labels).mean())}

    def histogram(self, probs: Tensor, labels: Tensor) -> Tensor:
        """Where the scores of each row lie, apart for rows that have a label and rows that have not."""
        return score_histogram(probs, labels)

    def scores_of(self, total: Tensor) -> dict[str, float]:
        """AUROC and accuracy, in percent, from a noisy sum of histograms."""
        return scores_of_histogram(total, self.outputs)


def cut(loss: Tensor, blind: float) -> Tensor:
    """1 where a loss is 0, 0 where it is twice that of a blind guess or more, or no number."""
    return 1 - (loss / (2 * blind)).nan_to_num(nan=1.0).clamp(0, 1)


def outputs_of(model: nn.Module, inputs: Any) -> Tensor:
    """What a model says of some rows: its output, or the `logits` of what transformers models return."""
    out = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return getattr(out, "logits", out)  # type: ignore[no-any-return]


def loss_of(task: Task) -> Any:
    """The loss per row of a model's outputs under a task."""

    def loss(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
        inputs, labels = batch
        return task.loss(outputs_of(model, inputs), labels)

    if type(task) in (Classes, Labels):
        SILENT_LOSSES.add(loss)
    if type(task) is Classes:
        loss.output_gradients = task.output_gradients  # type: ignore[attr-defined]
    return loss
