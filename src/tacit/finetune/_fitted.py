"""What `fit` returns: a fine-tuned model with its guarantee."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from tacit._saving import save_result
from tacit.finetune._features import Probe
from tacit.finetune._loop import Score
from tacit.finetune._loss_curve import LossChange
from tacit.models import WeightFormat
from tacit.privacy import Guarantee, Ledger


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A fine-tuned model and what may be published about it: every value here is public or was released.

    Args:
        model: The model that was given to `fit`, trained.
        guarantee: Of the run.
        scheme: Which parameters were trained.
        trained: How many numbers these are.
        noise_multiplier: The noise's standard deviation relative to the clip.
        steps: Optimizer steps made.
        history: All evaluations.
        receipt: The receipt's id.
        assumptions: What the guarantee rests on, for the card.
        ledger: The ledger that was charged; None if the caller charged the run.
        loss_curve: How the mean training loss changed, as the released gradients tell (`track_loss=`): free.
    """

    model: nn.Module = field(repr=False)
    guarantee: Guarantee
    scheme: str
    trained: int  # numbers
    noise_multiplier: float
    steps: int
    history: list[Score] = field(repr=False)
    receipt: str
    assumptions: list[str] = field(repr=False)
    ledger: Ledger | None = field(default=None, repr=False, compare=False)  # None: somebody else charged the run
    loss_curve: list[LossChange] = field(default_factory=list, repr=False)

    def save(
        self,
        folder: str | Path,
        *,
        format: WeightFormat = "plain",
        tokenizer: Any = None,
        title: str | None = None,
    ) -> Path:
        """Write the model so that timm, transformers or peft load it without tacit, and its promise beside it.

        Args:
            folder: Made if there is none. It gets the weights (see `models.save_weights`), `privacy-card.md` and
                `guarantee.json` with the ledger's head.
            format: `"plain"` (LoRA merged), `"peft"` (LoRA as an adapter of peft) or `"state_dict"` (as it is).
            tokenizer: Saved too, if given.
            title: What stands above the card.

        Returns:
            The folder.

        Raises:
            ValueError: The model has no plain form (adapters, features of all blocks, or rows of one norm, as
                `scheme="linear"` without an optimizer has them); the sentence says the way out.
        """
        if isinstance(self.model, Probe) and format != "state_dict":
            raise ValueError(
                "A head on the features of all blocks is no layer of the plain model: fine-tune with features='last', "
                "or save with format='state_dict' and load it into finetune.Probe."
            )
        return save_result(
            folder,
            self.model,
            self,
            stage="finetune",
            format=format,
            tokenizer=tokenizer,
            title=title,
            receipt=self.receipt,
        )

    def _repr_html_(self) -> str:
        facts = f"{self.scheme}: {self.trained:,} parameters trained in {self.steps:,} steps"
        scores = "".join(f", {html.escape(name)} {value:.4g}" for name, value in self.scores.items())
        return f"<p>{html.escape(facts)}{scores}</p>{self.guarantee._repr_html_()}"

    @property
    def scores(self) -> dict[str, float]:
        """The last evaluation."""
        return self.history[-1].scores if self.history else {}
