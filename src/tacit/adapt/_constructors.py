"""`adapt.Tent(model, privacy=...)` and its kin: an adapter with the method's published constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Unpack

from torch import nn

from tacit.adapt._adapter import Adapter, Options
from tacit.adapt._fisher import Fisher
from tacit.adapt._methods import EntropyFilter, Method, PLPDFilter, RedundancyFilter
from tacit.adapt._privacy_config import Privacy
from tacit.adapt._uncertainty import opinion, opinion_as_printed

Base = Literal["tent", "eata", "sar", "deyo"]
BASES = ("tent", "eata", "sar", "deyo")


def tent() -> Method:
    """Make every prediction more certain (Wang et al., 2021)."""
    return Method(name="Tent")


def eata(
    *, margin: float = 0.4, similarity: float = 0.05, anchor: Fisher | None = None, fisher_alpha: float = 1.0
) -> Method:
    """Trust certain and unusual predictions more, and stay near the source model (Niu et al., 2022)."""
    return Method(
        name="EATA",
        filters=(EntropyFilter(margin), RedundancyFilter(similarity)),
        certainty_weight=margin,
        anchor=anchor,
        fisher_alpha=fisher_alpha,
    )


def sar(*, margin: float = 0.4, radius: float = 0.05, recovery: float = 0.029, share: float = 0.75) -> Method:
    """Learn from certain rows, and look for flat minima (Niu et al., 2023).

    `recovery` is a share of ln K like all thresholds: 0.029 is the published 0.2 for 1,000 classes. `share` leaves out
    the last quarter of the normalisation layers, as SAR does in a ViT (blocks 0 to 8 of 12).
    """
    return Method(
        name="SAR",
        filters=(EntropyFilter(margin),),
        sharpness=radius,
        filter_again=True,
        recovery=recovery,
        share=share,
    )


def deyo(
    *,
    margin: float = 0.5,
    weight_margin: float = 0.4,
    threshold: float = 0.2,
    patches: int = 4,
    share: float = 0.75,
) -> Method:
    """Trust predictions that need the object's shape: shuffled patches must hurt them (Lee et al., 2024)."""
    return Method(
        name="DeYO",
        filters=(EntropyFilter(margin), PLPDFilter(threshold)),
        certainty_weight=weight_margin,
        structure_weight=True,
        patches=patches,
        share=share,
    )


def come(base: Base = "tent", *, evidence: Literal["opinion", "paper"] = "opinion", **constants: object) -> Method:
    """Minimise the entropy of an opinion that may withhold judgement, alone or inside another method."""
    if base not in BASES:
        raise ValueError(f"COME's base is one of {', '.join(BASES)}, not {base!r}.")
    if evidence not in ("opinion", "paper"):
        raise ValueError(f"evidence is 'opinion' or 'paper', not {evidence!r}.")
    host = {"tent": tent, "eata": eata, "sar": sar, "deyo": deyo}[base](**constants)
    name = "COME" if base == "tent" else f"{host.name}-COME"
    return replace(host, name=name, uncertainty=opinion if evidence == "opinion" else opinion_as_printed)


def Tent(model: nn.Module, *, privacy: Privacy = None, **options: Unpack[Options]) -> Adapter:  # noqa: N802
    """An adapter that runs Tent; see `Adapter` for the options and the guarantee."""
    return Adapter(model, tent(), privacy=privacy, **options)


def EATA(  # noqa: N802
    model: nn.Module,
    *,
    privacy: Privacy = None,
    margin: float = 0.4,
    similarity: float = 0.05,
    anchor: Fisher | None = None,
    fisher_alpha: float = 1.0,
    **options: Unpack[Options],
) -> Adapter:
    """An adapter that runs EATA; `anchor` comes from `adapt.fisher` on public images."""
    method = eata(margin=margin, similarity=similarity, anchor=anchor, fisher_alpha=fisher_alpha)
    return Adapter(model, method, privacy=privacy, **options)


def SAR(  # noqa: N802
    model: nn.Module,
    *,
    privacy: Privacy = None,
    margin: float = 0.4,
    radius: float = 0.05,
    recovery: float = 0.029,
    share: float = 0.75,
    **options: Unpack[Options],
) -> Adapter:
    """An adapter that runs SAR; in its private form it climbs along the last released gradient."""
    method = sar(margin=margin, radius=radius, recovery=recovery, share=share)
    return Adapter(model, method, privacy=privacy, **options)


def DeYO(  # noqa: N802
    model: nn.Module,
    *,
    privacy: Privacy = None,
    margin: float = 0.5,
    weight_margin: float = 0.4,
    threshold: float = 0.2,
    patches: int = 4,
    share: float = 0.75,
    **options: Unpack[Options],
) -> Adapter:
    """An adapter that runs DeYO; its weights are inside the loss that is clipped."""
    method = deyo(margin=margin, weight_margin=weight_margin, threshold=threshold, patches=patches, share=share)
    return Adapter(model, method, privacy=privacy, **options)


def COME(  # noqa: N802
    model: nn.Module,
    *,
    base: Base = "tent",
    evidence: Literal["opinion", "paper"] = "opinion",
    privacy: Privacy = None,
    anchor: Fisher | None = None,
    **options: Unpack[Options],
) -> Adapter:
    """An adapter that runs COME, alone or inside `base`, with the base's published constants."""
    constants: dict[str, object] = {"anchor": anchor} if base == "eata" else {}
    return Adapter(model, come(base, evidence=evidence, **constants), privacy=privacy, **options)
