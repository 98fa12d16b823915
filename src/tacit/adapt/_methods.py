"""The five methods, put together from a few parts: an uncertainty, weights, filters, an anchor and a perturbation.

A method says what is minimised and for whom. How the step is taken (plain, clipped, private) is the adapter's business
and the same for all. Thresholds are shares of ln K.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tacit.adapt._fisher import Fisher
from tacit.adapt._uncertainty import Uncertainty, entropy
from tacit.adapt._views import View


class Filter(ABC):
    """Which rows of a batch take part in the update."""

    per_sample: bool = True  # False: it reads what other people's rows left behind, and no private form may use it

    @abstractmethod
    def keep(self, view: View, unsure: Tensor) -> Tensor:
        """One bool per row, from its own values (and, unless `per_sample`, from the past)."""


@dataclass(frozen=True)
class EntropyFilter(Filter):
    """Rows less uncertain than `margin` ln K (EATA's filter 1, SAR's, DeYO's first).

    Args:
        margin: The threshold, as a share of ln K.
    """

    margin: float = 0.4

    def keep(self, view: View, unsure: Tensor) -> Tensor:
        return unsure < self.margin * view.scale


@dataclass(frozen=True)
class RedundancyFilter(Filter):
    """Rows whose prediction is unlike the moving average of past ones (EATA's filter 2).

    Args:
        similarity: Rows below this cosine similarity are kept. None: 0.05 for the 1,000 classes of ImageNet, as
            published, and in proportion to 1 / sqrt(K), which is how alike a one-hot prediction is to an even mix of K
            classes: 0.5 for ten, where nothing would pass 0.05.
    """

    similarity: float | None = None
    per_sample = False

    def threshold(self, classes: int) -> float:
        """The similarity for so many classes."""
        return 0.05 * math.sqrt(1000 / classes) if self.similarity is None else self.similarity

    def keep(self, view: View, unsure: Tensor) -> Tensor:
        if view.mean_probs is None:
            return torch.ones_like(unsure, dtype=torch.bool)
        alike = functional.cosine_similarity(view.mean_probs[None], view.logits.detach().softmax(1), dim=1)
        return alike.abs() < self.threshold(view.logits.shape[1])


@dataclass(frozen=True)
class PLPDFilter(Filter):
    """Rows whose prediction suffers when the image's patches are shuffled (DeYO's second).

    Args:
        threshold: The least PLPD that is kept.
    """

    threshold: float = 0.2

    def keep(self, view: View, unsure: Tensor) -> Tensor:
        del unsure
        return view.plpd() > self.threshold


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is minimised: weight(row) * uncertainty(row) over the rows that pass the filters. Plain, it is Tent.

    Args:
        name: What reports call it.
        uncertainty: From logits to one number per row.
        filters: Which rows take part.
        certainty_weight: The margin of the weight exp(margin ln K - H) (EATA, DeYO).
        structure_weight: Add exp(PLPD) to the weight (DeYO).
        patches: Per side, where shuffled images are needed.
        anchor: From public data, hence free: pulls towards the source model.
        fisher_alpha: The weight of that pull.
        sharpness: The radius of SAR's perturbation.
        filter_again: SAR's: filter once more after the perturbation.
        recovery: SAR's: reset to the source when the mean uncertainty falls below this share of ln K.
        share: Of the depth: normalisation layers beyond it are left alone.
        literal: Weights have a gradient, as the papers write it; in the authors' code they are constants.
    """

    name: str = "Tent"
    uncertainty: Uncertainty = entropy
    filters: tuple[Filter, ...] = ()
    certainty_weight: float | None = None  # exp(margin ln K - H): EATA, DeYO
    structure_weight: bool = False  # + exp(PLPD): DeYO
    patches: int | None = None  # per side, where shuffled images are needed
    anchor: Fisher | None = None  # from public data, hence free: pulls towards the source model
    fisher_alpha: float = 0.0
    sharpness: float | None = None  # radius of SAR's perturbation
    filter_again: bool = False  # SAR's: once more after the perturbation
    recovery: float | None = None  # SAR's: back to the source when the mean uncertainty falls below this share of ln K
    share: float = 1.0  # of the depth: normalisation layers beyond it are left alone
    literal: bool = False  # weights with their gradient, as the papers write them

    def weighted(self, view: View) -> Tensor:
        """The loss of each row, weights inside; without their gradient, as in the methods' own code, unless literal."""
        unsure = self.uncertainty(view.logits)
        if self.certainty_weight is None:
            return unsure
        weight = torch.exp(self.certainty_weight * view.scale - (unsure if self.literal else unsure.detach()))
        if self.structure_weight:
            weight = weight + torch.exp(view.plpd(graph=self.literal))
        return weight * unsure

    def keep(self, view: View, filters: tuple[Filter, ...] | None = None) -> Tensor:
        """Which rows pass all filters (by default the method's own)."""
        unsure = self.uncertainty(view.logits.detach())
        passed = torch.ones_like(unsure, dtype=torch.bool)
        for each in self.filters if filters is None else filters:
            passed &= each.keep(view, unsure)
        return passed

    @property
    def second_filters(self) -> tuple[Filter, ...]:
        """What is asked once more after the perturbation: how certain a row is (SAR)."""
        if not self.filter_again:
            return ()
        return tuple(each for each in self.filters if isinstance(each, EntropyFilter)) or (EntropyFilter(),)

    @property
    def private_filters(self) -> tuple[Filter, ...]:
        """Those that look at a row alone (the paper's "v2")."""
        return tuple(each for each in self.filters if each.per_sample)
