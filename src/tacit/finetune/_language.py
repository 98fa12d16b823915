"""What a language model is to learn: the next token of every text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tacit._refusals import Refusal
from tacit.data import NO_LABEL
from tacit.finetune._tasks import cut


@dataclass(frozen=True)
class NextToken:
    """Every next token of a text, out of a `vocabulary`: cross entropy, perplexity, share of tokens guessed right.

    The loss of a text is the mean over its tokens, so that a long text weighs as much as a short one and neither its
    gradient nor its clipping depends on its length; the perplexity is that of tokens, exp of the mean loss of all of
    them. A text of a single token has nothing to predict and a loss of zero.

    Args:
        vocabulary: The number of tokens.
    """

    vocabulary: int

    @property
    def outputs(self) -> int:
        return self.vocabulary

    @property
    def measure(self) -> str:
        return "accuracy"

    def check(self, labels: Tensor) -> None:
        if labels.is_floating_point() or labels.dtype == torch.bool or labels.dim() != 2:
            raise Refusal(
                "Next tokens are integers, texts x places: give data.Texts without labels; got "
                f"{labels.dtype} in {labels.dim()} dimensions."
            )
        known = labels[labels != NO_LABEL]
        if len(known) and not (int(known.min()) >= 0 and int(known.max()) < self.vocabulary):
            raise Refusal(f"Tokens must be 0 to {self.vocabulary - 1}; some are not: is it the model's tokenizer?")

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        each, known = self._each(outputs, labels)
        return each.sum(1) / known.sum(1).clamp_min(1)

    def summary(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """What is kept of a text in place of its logits: the sum of its losses, its hits, its tokens."""
        each, known = self._each(outputs, labels)
        hits = (outputs.argmax(2).roll(1, 1) == labels) & known.roll(1, 1)
        return torch.stack([each.double().sum(1), hits.double().sum(1), known.double().sum(1)], 1)

    def probs(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(2)

    def right(self, probs: Tensor, labels: Tensor) -> Tensor:
        """The share of each text's tokens that were guessed, of summaries."""
        del labels
        return probs[:, 1] / probs[:, 2].clamp_min(1)

    def confidence(self, probs: Tensor, labels: Tensor) -> Tensor:
        """By the mean loss of each text's tokens, of summaries."""
        del labels
        return cut(probs[:, 0] / probs[:, 2].clamp_min(1), math.log(max(self.vocabulary, 2)))

    def scores(self, probs: Tensor, labels: Tensor) -> dict[str, float]:
        """Perplexity, and the share of tokens that were guessed in percent, of summaries."""
        del labels
        losses, hits, tokens = (float(total) for total in probs.sum(0))
        return {
            "perplexity": float(torch.tensor(losses / max(tokens, 1)).double().exp()),
            "accuracy": 100 * hits / max(tokens, 1),
        }

    def _each(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss at every place, and where there is something to predict."""
        targets = functional.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
        each = functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=NO_LABEL
        )
        return each.view(targets.shape), targets != NO_LABEL
