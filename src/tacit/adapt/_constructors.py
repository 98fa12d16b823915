"""`adapt.Tent(model, privacy=...)` and its kin: an adapter with the method's published constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, Literal, TypedDict, Unpack

from torch import nn

from tacit.adapt._adapter import Adapter
from tacit.adapt._fisher import Fisher
from tacit.adapt._methods import EntropyFilter, Method, PLPDFilter, RedundancyFilter
from tacit.adapt._options import Options
from tacit.adapt._privacy_config import Privacy
from tacit.adapt._uncertainty import opinion, opinion_as_printed

Base = Literal["tent", "eata", "sar", "deyo"]
BASES = ("tent", "eata", "sar", "deyo")


class BaseConstants(TypedDict, total=False):
    """The constants of the methods that COME can be used in."""

    margin: float
    similarity: float | None
    anchor: Fisher | None
    fisher_alpha: float
    radius: float
    recovery: float
    share: float
    weight_margin: float
    threshold: float
    patches: int
    literal: bool


class ComeOptions(Options, BaseConstants, total=False):
    """What `COME` takes: constants of its base, and arguments of `Adapter`."""


def tent() -> Method:
    """Make every prediction more certain (Wang et al., 2021)."""
    return Method(name="Tent")


def eata(
    *,
    margin: float = 0.4,
    similarity: float | None = None,
    anchor: Fisher | None = None,
    fisher_alpha: float = 1.0,
    literal: bool = False,
) -> Method:
    """Trust certain and unusual predictions more, and stay near the source model (Niu et al., 2022).

    Args:
        margin: The entropy threshold, as a share of ln K.
        similarity: The redundancy threshold; by default by the number of classes (see `RedundancyFilter`).
        anchor: Fisher information from public images.
        fisher_alpha: The weight of the pull towards the source model.
        literal: Weights with their gradient, as the paper writes them.

    Returns:
        A method for `Adapter`.
    """
    return Method(
        name="EATA",
        filters=(EntropyFilter(margin), RedundancyFilter(similarity)),
        certainty_weight=margin,
        anchor=anchor,
        fisher_alpha=fisher_alpha,
        literal=literal,
    )


def sar(*, margin: float = 0.4, radius: float = 0.05, recovery: float = 0.029, share: float = 0.75) -> Method:
    """Learn from certain rows, and look for flat minima (Niu et al., 2023).

    `recovery` is a share of ln K like all thresholds: 0.029 is the published 0.2 for 1,000 classes. `share` leaves out
    the last quarter of the depth, as SAR does: the last of four stages (ResNet, ConvNeXt), blocks 9 to 11 of a ViT.

    Args:
        margin: The entropy threshold, as a share of ln K.
        radius: The length of the perturbation.
        recovery: Reset below this share of ln K.
        share: Which part of the depth is adapted.

    Returns:
        A method for `Adapter`.
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
    literal: bool = False,
) -> Method:
    """Trust predictions that need the object's shape: shuffled patches must hurt them (Lee et al., 2024).

    Args:
        margin: The entropy threshold, as a share of ln K.
        weight_margin: Of the entropy weight.
        threshold: The least PLPD.
        patches: Patches per side that are shuffled.
        share: Which part of the depth is adapted.
        literal: Weights with their gradient, as the paper writes them.

    Returns:
        A method for `Adapter`.
    """
    return Method(
        name="DeYO",
        filters=(EntropyFilter(margin), PLPDFilter(threshold)),
        certainty_weight=weight_margin,
        structure_weight=True,
        patches=patches,
        share=share,
        literal=literal,
    )


def come(base: Base = "tent", *, evidence: Literal["opinion", "paper"] = "opinion", **constants: object) -> Method:
    """COME's method: the entropy of an opinion that may withhold judgement, alone or inside another method.

    Args:
        base: The method that it is used in.
        evidence: How logits become an opinion.
        **constants: Of the base method.

    Returns:
        A method for `Adapter`.

    Raises:
        ValueError: An unknown base, or it has no such constant.
    """
    if base not in BASES:
        raise ValueError(f"COME's base is one of {', '.join(BASES)}, not {base!r}.")
    if evidence not in ("opinion", "paper"):
        raise ValueError(f"evidence is 'opinion' or 'paper', not {evidence!r}.")
    make: Callable[..., Method] = {"tent": tent, "eata": eata, "sar": sar, "deyo": deyo}[base]
    known = signature(make).parameters
    if unknown := [name for name in constants if name not in known]:
        raise ValueError(f"{base} has no constant {unknown[0]!r}: it has {', '.join(known) or 'none'}.")
    host = make(**constants)
    name = "COME" if base == "tent" else f"{host.name}-COME"
    return replace(host, name=name, uncertainty=opinion if evidence == "opinion" else opinion_as_printed)


def Tent(model: nn.Module, *, privacy: Privacy = None, **options: Unpack[Options]) -> Adapter:  # noqa: N802
    """Tent: test-time adaptation by entropy minimisation (Wang et al., 2021). See `Adapter` for the guarantee.

    Args:
        model: The source model; it is adapted in place.
        privacy: None (plain), `Clip(C)` (clipping only, not private) or `DP(epsilon, ...)`.
        **options: Arguments of `Adapter`: batch_size, lr, momentum, optimizer, scheme, ledger, subject, unit, ...

    Returns:
        An adapter; call it with a batch of images to get logits.

    Examples:
        >>> import torch
        >>> from tacit import Ledger, adapt, models
        >>> privacy = adapt.DP(epsilon=1.0, delta=1e-6, clip=0.5)
        >>> pays = {"ledger": Ledger("sqlite:///clinic.db"), "subject": "stream"}
        >>> adapter = adapt.Tent(models.embedded(), privacy=privacy, batch_size=8, lr="auto", **pays)
        >>> logits = adapter(torch.rand(8, 1, 28, 28))
        >>> logits.shape, round(adapter.guarantee.epsilon, 3)
        (torch.Size([8, 10]), 1.0)
    """
    return Adapter(model, tent(), privacy=privacy, **options)


def EATA(  # noqa: N802
    model: nn.Module,
    *,
    privacy: Privacy = None,
    margin: float = 0.4,
    similarity: float | None = None,
    anchor: Fisher | None = None,
    fisher_alpha: float = 1.0,
    literal: bool = False,
    **options: Unpack[Options],
) -> Adapter:
    """EATA: weighted and filtered entropy minimisation that stays near the source model (Niu et al., 2022).

    Args:
        model: The source model; it is adapted in place.
        privacy: None, `Clip` or `DP`.
        margin: The entropy threshold, as a share of ln K.
        similarity: The redundancy threshold (cosine similarity); by default 0.05 sqrt(1000 / K).
        anchor: Fisher information from `adapt.fisher` on public images.
        fisher_alpha: The weight of the pull towards the source model.
        literal: Weights with their gradient, as the paper writes them.
        **options: Arguments of `Adapter`.

    Returns:
        An adapter.
    """
    method = eata(margin=margin, similarity=similarity, anchor=anchor, fisher_alpha=fisher_alpha, literal=literal)
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
    """SAR: sharpness-aware and reliable entropy minimisation (Niu et al., 2023).

    In its private form the perturbation follows the last released gradient.

    Args:
        model: The source model; it is adapted in place.
        privacy: None, `Clip` or `DP`.
        margin: The entropy threshold, as a share of ln K.
        radius: The length of the perturbation.
        recovery: Reset to the source model when the mean entropy falls below this share of ln K.
        share: Which part of the depth is adapted: by stages, where a net has four or more, else by blocks.
        **options: Arguments of `Adapter`.

    Returns:
        An adapter.
    """
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
    literal: bool = False,
    **options: Unpack[Options],
) -> Adapter:
    """DeYO: entropy minimisation weighted by how much a prediction depends on the object's shape (Lee et al., 2024).

    The weights are inside the loss that is clipped.

    Args:
        model: The source model; it is adapted in place.
        privacy: None, `Clip` or `DP`.
        margin: The entropy threshold, as a share of ln K.
        weight_margin: Of the entropy weight.
        threshold: The least PLPD (pseudo-label probability difference).
        patches: Patches per side that are shuffled.
        share: Which part of the depth is adapted: by stages, where a net has four or more, else by blocks.
        literal: Weights with their gradient, as the paper writes them.
        **options: Arguments of `Adapter`.

    Returns:
        An adapter.
    """
    method = deyo(
        margin=margin,
        weight_margin=weight_margin,
        threshold=threshold,
        patches=patches,
        share=share,
        literal=literal,
    )
    return Adapter(model, method, privacy=privacy, **options)


def COME(  # noqa: N802
    model: nn.Module,
    *,
    base: Base = "tent",
    evidence: Literal["opinion", "paper"] = "opinion",
    privacy: Privacy = None,
    **options: Unpack[ComeOptions],
) -> Adapter:
    """COME: conservative entropy minimisation (Zhang et al., 2024), alone or inside `base`.

    Args:
        model: The source model; it is adapted in place.
        base: The method that COME's uncertainty is used in.
        evidence: How logits become an opinion; "paper" is equation 8 as printed.
        privacy: None, `Clip` or `DP`.
        **options: Constants of the base (margin, similarity, anchor, radius, threshold, …; by default as published),
            and arguments of `Adapter`.

    Returns:
        An adapter.

    Raises:
        ValueError: The base has no such constant.
    """
    constants = {name: value for name, value in options.items() if name in BaseConstants.__annotations__}
    rest: Any = {name: value for name, value in options.items() if name not in constants}
    return Adapter(model, come(base, evidence=evidence, **constants), privacy=privacy, **rest)
