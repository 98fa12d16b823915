"""Arms of a comparison, as a recipe writes them: a method, its form and its constants. Lists make a grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import log
from typing import Literal

from torch import nn

from studies.grids import combinations
from tacit.adapt import (
    DP,
    Adapter,
    Clip,
    Curator,
    EntropyFilter,
    Fisher,
    Method,
    Privacy,
    RedundancyFilter,
    come,
    deyo,
    eata,
    sar,
    tent,
)
from tacit.gradients import AdaptiveQuantile, BatchClip, FilterByLoss, FilterByNorm, Policy
from tacit.privacy import Ledger

METHODS = ("source", "tent", "eata", "sar", "deyo", "come", "eata-come", "sar-come", "deyo-come")
BLOCK = 256  # steps of a block of correlated noise where the length of the stream is not known
Form = Literal["original", "clip", "dp", "dp-v2"]
Clipping = Literal["sample", "batch", "norm-filter", "loss-filter", "both-filters", "either-filter", "quantile"]
Noise = Literal["independent", "correlated", "blocks"]  # blocks: correlated, for a stream whose length is not known
Part = Literal["filter-1", "filter-2", "filter-3", "sharpness", "anchor"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to adapt. `source` ignores everything else."""

    method: str = "tent"
    form: Form = "original"
    epsilon: float | None = None
    delta: float = 1e-6
    noise: Noise = "independent"
    batch_size: int = 64
    lr: float | Literal["auto"] = 0.005  # auto: the default that needs no tuning
    clip: float | None = None
    momentum: float = 0.9
    optimizer: Literal["sgd", "adam"] = "sgd"
    clipping: Clipping = "sample"
    loss_threshold: float | None = None  # of ln K, for the filters by loss
    ascent: bool = False  # SAR, clip-only: is the ascent gradient clipped too?
    parts: tuple[Part, ...] = ()  # added to Tent, for ablations
    fisher_alpha: float = 1.0
    similarity: float = 0.05  # EATA's filter 2: a one-hot prediction is 1 / sqrt(K) alike to an even mix of classes
    radius: float = 0.05

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is one of {', '.join(METHODS)}, not {self.method!r}")
        if self.private and self.epsilon is None:
            raise ValueError("a private form needs its epsilon")
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, not {self.epsilon:g}")
        if self.form != "original" and self.clip is None and self.clipping != "loss-filter":
            raise ValueError(f"the form {self.form} needs a clip")
        if self.parts and self.method != "tent":
            raise ValueError("parts are added to tent alone")

    @property
    def private(self) -> bool:
        return self.form in ("dp", "dp-v2") and self.method != "source"

    @property
    def anchored(self) -> bool:
        """Whether it is held near the source model, by the Fisher information of public images."""
        return self.method.startswith("eata") or "anchor" in self.parts

    @property
    def name(self) -> str:
        """What a table calls it."""
        if self.method == "source":
            return "source"
        name = method_of(self.method).name + "".join(f" + {part}" for part in self.parts)
        if self.optimizer == "adam":
            name += " + Adam"
        if self.form == "original":
            return name
        if self.form == "clip":
            ascent = " (ascent too)" if self.ascent else ""
            return f"{name} + {'clip' if self.clipping == 'sample' else self.clipping}{ascent}"
        version = "-v2" if self.form == "dp-v2" else ""
        noise = "" if self.noise == "independent" else f", {self.noise}"
        return f"DP-{name}{version} (eps {self.epsilon:g}{noise})"

    def adapter(
        self,
        model: nn.Module,
        *,
        anchor: Fisher | None,
        classes: int,
        horizon: int,
        ledger: Ledger | None = None,
        seed: int | None = None,
        curator: Curator | None = None,
    ) -> Adapter:
        """The adapter that the arm describes. `horizon` is the number of steps of the stream, or of an episode."""
        return Adapter(
            model,
            self._method(anchor),
            privacy=self._privacy(classes, horizon),
            batch_size=self.batch_size,
            lr=self.lr,
            momentum=self.momentum,
            optimizer=self.optimizer,
            ledger=ledger,
            subject="stream" if ledger is not None else None,
            seed=seed,
            curator=curator,
        )

    def _method(self, anchor: Fisher | None) -> Method:
        method = method_of(self.method)
        if self.anchored:
            method = replace(method, anchor=anchor, fisher_alpha=self.fisher_alpha)
        if method.sharpness is not None or "sharpness" in self.parts:
            method = replace(method, sharpness=self.radius)
        added = [
            f for part, f in (("filter-1", EntropyFilter()), ("filter-2", RedundancyFilter())) if part in self.parts
        ]
        filters = [
            RedundancyFilter(self.similarity) if isinstance(f, RedundancyFilter) else f
            for f in (*method.filters, *added)
        ]
        return replace(
            method,
            filters=tuple(filters),
            filter_again=method.filter_again or "filter-3" in self.parts,
        )

    def _privacy(self, classes: int, horizon: int) -> Privacy:
        if self.form == "original":
            return None
        policy = self._policy(classes)
        if self.form == "clip":
            return Clip(policy, ascent=self.ascent)
        return DP(
            self.epsilon or 0.0,
            self.delta,
            clip=policy,
            noise="independent" if self.noise == "independent" else "correlated",
            horizon={"independent": None, "correlated": horizon, "blocks": BLOCK}[self.noise],
            filters="per-sample" if self.form == "dp-v2" else "none",
        )

    def _policy(self, classes: int) -> float | Policy:
        bound = self.clip or 1.0
        by_loss = FilterByLoss((self.loss_threshold or 0.4) * log(classes))
        policies: dict[Clipping, float | Policy] = {
            "sample": bound,
            "batch": BatchClip(bound),
            "norm-filter": FilterByNorm(bound),
            "loss-filter": by_loss,
            "both-filters": FilterByNorm(bound) & by_loss,
            "either-filter": FilterByNorm(bound) | by_loss,
            "quantile": AdaptiveQuantile(bound),
        }
        return policies[self.clipping]


def method_of(method: str) -> Method:
    """A method by the name that recipes use."""
    base, _, inside = method.partition("-")
    if base == "come" or inside:
        return come(base if inside else "tent")  # type: ignore[arg-type]
    return {"tent": tent, "eata": eata, "sar": sar, "deyo": deyo}[base]()


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Arms as a recipe writes them: every field of an arm, each a value or a list of values; all combinations run."""

    method: tuple[str, ...] = ("tent",)
    form: tuple[Form, ...] = ("original",)
    epsilon: tuple[float, ...] = ()
    delta: float = 1e-6
    noise: tuple[Noise, ...] = ("independent",)
    batch_size: tuple[int, ...] = (64,)
    lr: tuple[float | Literal["auto"], ...] = (0.005,)
    clip: tuple[float, ...] = ()
    momentum: float = 0.9
    optimizer: Literal["sgd", "adam"] = "sgd"
    clipping: tuple[Clipping, ...] = ("sample",)
    loss_threshold: tuple[float, ...] = ()
    ascent: tuple[bool, ...] = (False,)
    parts: tuple[Part, ...] = ()
    fisher_alpha: tuple[float, ...] = (1.0,)
    similarity: tuple[float, ...] = (0.05,)
    radius: float = 0.05

    def __post_init__(self) -> None:
        for _ in self.arms():
            pass

    def arms(self) -> Iterator[Arm]:
        """Every combination, the last list running fastest."""
        lists = {each.name: getattr(self, each.name) for each in fields(self)}
        lists = {name: (None,) if value == () else value for name, value in lists.items()}
        for values in combinations(lists | {"parts": (self.parts,)}):
            yield Arm(**values)
