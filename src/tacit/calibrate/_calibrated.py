"""What comes out: plain numbers, and a module around the classifier that applies them."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit._json import to_number, to_plain
from tacit._saving import save_result
from tacit.calibrate._curve import corrected
from tacit.calibrate._merging import with_temperature
from tacit.calibrate._outputs import FLOOR, bin_of
from tacit.calibrate._platt import platt
from tacit.calibrate._wire import checked, make
from tacit.models import WeightFormat
from tacit.privacy import Guarantee, Neighbours, Unit

CALIBRATION = "calibration.json"  # beside weights that it is not merged into
_STRICTLY = 1 - 1e-6  # the other classes stay below the predicted one, ties included


@dataclass(frozen=True, kw_only=True)
class Result:
    """A recalibration as plain numbers. All of it was released on receipts, or ``private`` is False.

    Args:
        method: The method's name.
        temperature: Logits are divided by it.
        confidences: Histogram binning: the confidence of each equal-width bin.
        corrections: What is added to the confidence at the temperature, at the middle of each equal-width bin.
        platt: The intercept and the slope that the logit of the confidence at the temperature gets.
        queries: Asked of, and paid by, each source.
        epsilon: What each source spent on it.
        delta: What each source spent on it.
        noise: "laplace" or "gaussian".
        neighbours: The neighbouring relation.
        unit: The privacy unit.
        sources: How many answered.
        interval: Of the temperature.
        ece_interval: Of the calibration error that is left, if it was asked for.
        private: Whether all of it was released on receipts.
        seeded: The noise was reproducible: not private.
        notes: What was decided, in sentences.
        trust: "local", or "secure-aggregation".
        honest: With secure aggregation: so many sources had to keep their shares of the noise to themselves.
        colluding: With secure aggregation: so many of the other sources may collude against any one of them.
    """

    method: str
    temperature: float = 1.0
    confidences: tuple[float, ...] | None = None  # histogram binning: the confidence of each equal-width bin
    queries: int = 0  # asked of, and paid by, each source
    epsilon: float = 0.0  # what each source spent on it
    delta: float = 0.0
    noise: str = "laplace"
    neighbours: str = "add-remove"
    unit: str = "sample"
    sources: int = 0
    interval: tuple[float, float] | None = None  # of the temperature
    ece_interval: tuple[float, float] | None = None  # of the calibration error that is left, if it was asked for
    private: bool = True
    seeded: bool = False
    notes: tuple[str, ...] = ()
    trust: str = "local"
    honest: int = 0
    colluding: int = 0
    corrections: tuple[float, ...] | None = None
    platt: tuple[float, float] | None = None

    def wrap(self, model: nn.Module) -> Calibrated:
        """The classifier with calibrated outputs."""
        return Calibrated(model, self)

    def apply(self, logits: Tensor) -> Tensor:
        """Calibrated logits: their softmax is the calibrated probability; the predicted class stays."""
        table = _table(self)
        if table is None:
            return logits / self.temperature
        return _mapped(logits.detach().cpu().double(), self, table).to(logits)

    @property
    def only_temperature(self) -> bool:
        """Whether a temperature is all that it changes, so that it can be merged into a model's weights."""
        return self.confidences is None and self.corrections is None and self.platt is None

    @property
    def guarantee(self) -> Guarantee:
        """What each source promised to those in its data."""
        return Guarantee(
            epsilon=self.epsilon if self.private or self.seeded else math.inf,
            delta=self.delta,
            neighbours=Neighbours(self.neighbours),
            unit=Unit(self.unit),
            accountant=f"{self.noise} noise, {self.queries} queries to each source{self._assumed}",
            seeded=self.seeded,
        )

    @property
    def _assumed(self) -> str:
        if self.trust == "local" or not self.queries:
            return ""
        return (
            f", which adds a share of one noise (secure aggregation); assumes that the aggregator follows the protocol "
            f"and sees the totals only, and that at least {self.honest} of the sources in a total keep their shares "
            "to themselves"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What each source's promise rests on, in sentences."""
        said = (
            f"each of the {self.sources} sources spent this from a ledger of its own: {self.queries} queries",
            "a person who is in several sources is charged at each of them",
        )
        if self.trust == "local" or not self.queries:
            return said
        return (
            *said,
            "secure aggregation: the aggregator follows the protocol, and only totals over the sources are seen",
            f"each source's promise holds if up to {self.colluding} of the other sources collude with the aggregator: "
            f"{self.honest} shares of noise, its own among them, are all that was charged for. If more collude, it is "
            "weaker than stated",
        )

    def to_json(self) -> dict[str, Any]:
        return {key: to_plain(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        known = {key: tuple(value) if isinstance(value, list) else value for key, value in checked(cls, data).items()}
        return make(cls, known | {"epsilon": to_number(known.get("epsilon", 0.0))})

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>{self.guarantee._repr_html_()}"

    def __str__(self) -> str:
        what = f"temperature {self.temperature:.3f}" if self.confidences is None else f"{len(self.confidences)} bins"
        what += "" if self.corrections is None else " and a correction of the confidence"
        if self.platt is not None:
            what = f"the logit of the confidence times {self.platt[1]:.3f}, plus {self.platt[0]:.3f}"
        if self.interval is not None:
            what += f" (between {self.interval[0]:.3f} and {self.interval[1]:.3f})"
        price = f"{self.queries} queries to each of {self.sources} sources for epsilon {self.epsilon:g}"
        price += f", delta {self.delta:g}" if self.delta else ""
        status = "seeded: not private. " if self.seeded else "" if self.private else "not private if shared. "
        return f"{status}{self.method}: {what}; {price}." + "".join(f" {note}" for note in self.notes)


class Calibrated(nn.Module):
    """A classifier whose logits are calibrated: ``softmax(calibrated(x))`` are honest confidences.

    Args:
        model: Returns logits.
        result: The recalibration.
    """

    table: Tensor | None  # the confidence of each bin, what is added to it, or intercept and slope
    temperature: Tensor

    def __init__(self, model: nn.Module, result: Result) -> None:
        super().__init__()
        self.model, self.result = model, result
        self.register_buffer("temperature", torch.tensor(result.temperature))
        self.register_buffer("table", _table(result))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out = self.model(*args, **kwargs)
        logits: Tensor = getattr(out, "logits", out)  # those of transformers are wrapped
        if self.table is None:
            return logits / self.temperature.to(logits.dtype)
        return _mapped(logits.double(), self.result, self.table.to(logits.device)).to(logits.dtype)

    def probs(self, *args: Any, **kwargs: Any) -> Tensor:
        """Calibrated probabilities."""
        return torch.softmax(self(*args, **kwargs), dim=-1)

    def save(
        self,
        folder: str | Path,
        *,
        merge: bool = True,
        inputs: Any = None,
        format: WeightFormat = "plain",
        title: str | None = None,
    ) -> Path:
        """Write the calibrated model so that timm or transformers load it without tacit, its promise beside it.

        Args:
            folder: Made if there is none. It gets the weights (see `models.save_weights`), `privacy-card.md` and
                `guarantee.json`.
            merge: The temperature goes into the weights of the head. If not, the weights are written as they are, and
                `calibration.json` beside them: `Result.from_json(json.load(...)).wrap(model)` applies it.
            inputs: A batch on which the merged model is compared, public or synthetic; for models of timm and
                transformers one is drawn.
            format: Of the weights, see `models.save_weights`.
            title: What stands above the card.

        Returns:
            The folder.

        Raises:
            ValueError: Bins cannot be merged, nor a temperature into a model whose logits are not its head's output.
        """
        if merge and not self.result.only_temperature:
            raise ValueError(
                f"What {self.result.method} found cannot go into a model's weights: save with merge=False."
            )
        model = with_temperature(self.model, float(self.temperature), inputs) if merge else self.model
        written = json.dumps(self.result.to_json(), indent=2) + "\n"
        files = {} if merge else {CALIBRATION: written}
        return save_result(folder, model, self.result, stage="calibrate", format=format, title=title, files=files)

    def extra_repr(self) -> str:
        return str(self.result)


def _table(result: Result) -> Tensor | None:
    values = result.platt or result.corrections or result.confidences
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def _mapped(logits: Tensor, result: Result, table: Tensor) -> Tensor:
    """Logits with the confidences of a histogram's bins, of a temperature and its correction, or of Platt scaling."""
    if result.corrections is None and result.platt is None:
        return binned(logits, table)
    scaled = logits / result.temperature
    top = torch.softmax(scaled, dim=-1).amax(dim=-1, keepdim=True)
    if result.platt is not None:
        return with_confidence(scaled, platt(top, table[0], table[1], logits.shape[-1]))
    return with_confidence(scaled, corrected(top, table, logits.shape[-1]))


def binned(logits: Tensor, table: Tensor) -> Tensor:
    """Logits whose largest probability is the table's entry for its bin, and whose predicted class is as before."""
    top = torch.softmax(logits, dim=-1).amax(dim=-1, keepdim=True)
    return with_confidence(logits, table[bin_of(top.cpu(), len(table)).to(table.device)])


def with_confidence(logits: Tensor, confidence: Tensor) -> Tensor:
    """Logits whose largest probability is the confidence given, and whose predicted class is as before.

    The other classes share the rest of the mass in their old proportions, but none gets more than the predicted class:
    what it would get beyond that goes to the others. So any confidence above 1 / classes can be met; one below is
    raised to it.
    """
    probs = torch.softmax(logits, dim=-1)
    classes = probs.shape[-1]
    top = probs.max(dim=-1, keepdim=True)
    confidence = confidence.clamp_min((1 + 1e-5) / classes)
    others = probs.clamp_min(FLOOR).scatter(-1, top.indices, 0.0)
    rest, cap = 1 - confidence, confidence * _STRICTLY
    order = others.sort(dim=-1, descending=True)
    taken = torch.arange(classes, dtype=probs.dtype, device=probs.device)  # so many are at the cap
    tail = order.values.flip(-1).cumsum(dim=-1).flip(-1)  # smallest first: nothing cancels
    factor = ((rest - taken * cap) / tail.clamp_min(FLOOR * FLOOR)).clamp_min(0.0)
    fits = (factor * order.values <= cap) & (rest - taken * cap >= 0)
    first = fits.double().argmax(dim=-1, keepdim=True)
    shared = torch.minimum(others * factor.gather(-1, first), cap)
    capped = order.indices.argsort(dim=-1) < first
    new = torch.where(capped, cap.expand_as(shared), shared).scatter(-1, top.indices, confidence)
    return new.clamp_min(FLOOR * FLOOR).log()
