"""The adapter: predict, then learn from the same images, in whatever form of whatever method."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from tacit._context import PrivacyContext, takes_context
from tacit._deprecation import renamed_argument
from tacit._saving import save_result
from tacit.adapt._memory import Memory
from tacit.adapt._methods import Method
from tacit.adapt._noise import NoisyStream, open_account
from tacit.adapt._participation import Participation, numbered
from tacit.adapt._privacy_config import DP, Clip, Privacy
from tacit.adapt._steps import Clipped, Curator, Gradient, Plain, Shared, Step
from tacit.gradients import refuse_live_statistics
from tacit.models import WeightFormat, normalisers, select
from tacit.privacy import Guarantee, Ledger, Neighbours, Unit
from tacit.privacy.events import check_count

_OPTIMIZER: Literal["sgd", "adam"] = "sgd"


class Options(TypedDict, total=False):
    """What every method's adapter takes beside model, method and privacy."""

    batch_size: int  # the denominator of every update; a batch may have fewer rows, never more
    lr: float
    momentum: float
    optimizer: Literal["sgd", "adam"]
    optimiser: Literal["sgd", "adam"]  # the earlier name of optimizer; warns
    scheme: str  # which parameters, by the type of their layer; see tacit.models.select
    classes: Tensor | None  # a mask over the classes that may occur; predictions stay over all
    ledger: Ledger | None
    subject: str | None
    unit: Unit | str
    seed: int | None  # reproducible noise: not private
    lease: int  # steps that are recorded as used at a time
    microbatch: int | None
    curator: Curator | None  # told about each step's sum, private facts included
    context: PrivacyContext | None  # ledger, subject, unit, seed and curator in one; neighbours are those of DP(...)


class Adapter:
    """A model that adapts to the unlabelled stream of images that it is shown.

    `adapter(images)` returns the logits of the parameters from *before* this batch and then updates them.

    Formal guarantee of the private form (`privacy=DP(...)`): unit, a row, or all rows with the same of the `unit_ids`;
    neighbours, two streams of the same length and batch sizes that differ in one unit's rows (replaced by those of a
    unit whose id nobody else has, or blanked under zero-out). Each step releases one sum of clipped gradients with
    Gaussian noise; a unit takes part in at most `contributions` steps, so the sequence of all parameters is one
    Gaussian release of what is charged before the first step (see `privacy.correlated` for correlated noise), however
    long the stream is. Filters that read the past, SAR's second gradient and its reset are not there; what follows the
    noise reads only released values. What a person is told about their own image depends on their own image: the
    guarantee covers everyone else's.

    Args:
        model: The source model; it is adapted in place.
        method: What is minimised: `tent()`, `eata()`, ...
        privacy: None, `Clip` or `DP`.
        batch_size: The denominator of every update. A batch may have fewer rows, never more.
        lr: The learning rate.
        momentum: Of "sgd".
        optimizer: "sgd" or "adam".
        scheme: Which parameters are adapted; see `models.select`.
        classes: A mask over the classes that may occur; predictions stay over all.
        ledger: Where the stream is charged.
        subject: The stream's name in the ledger.
        unit: The kind of unit. A row is a "sample"; anything else ("patient") needs `unit_ids` with every batch, and is
            refused without.
        seed: Reproducible noise: not private.
        lease: Steps that are recorded as used at a time.
        microbatch: The most rows in memory at a time.
        curator: Receives each step's sum, private facts included.
        context: A `tacit.PrivacyContext` instead of the arguments that it has: ledger, subject, unit, …

    Raises:
        ValueError: An invalid option; before anything is charged.
        BudgetExceeded: The subject cannot afford the stream; nothing was charged.
    """

    @takes_context
    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        privacy: Privacy = None,
        batch_size: int = 64,
        lr: float = 0.005,
        momentum: float = 0.9,
        optimizer: Literal["sgd", "adam"] = _OPTIMIZER,
        scheme: str = "norms",
        classes: Tensor | None = None,
        ledger: Ledger | None = None,
        subject: str | None = None,
        unit: Unit | str = Unit.SAMPLE,
        seed: int | None = None,
        lease: int = 256,
        microbatch: int | None = None,
        curator: Curator | None = None,
        optimiser: Literal["sgd", "adam"] | None = None,
        context: PrivacyContext | None = None,
    ) -> None:
        del context  # its arguments are here; see takes_context
        optimizer = renamed_argument(
            "optimiser", optimiser, "optimizer", optimizer, where="Adapter", default=_OPTIMIZER
        )
        for value in (batch_size, lease, 1 if microbatch is None else microbatch):
            check_count(value, "batch_size, lease and microbatch")
        if not (0 < lr < math.inf and 0 <= momentum < 1):
            raise ValueError(f"lr must be positive and momentum in [0, 1), not {lr!r} and {momentum!r}.")
        if optimizer not in ("sgd", "adam"):
            raise ValueError(f"The optimiser is sgd or adam, not {optimizer!r}.")
        if privacy is not None and not isinstance(privacy, Clip | DP):
            raise TypeError(f"privacy is None, Clip(...) or DP(...), not {privacy!r}.")
        self._layers = list(model.named_modules())
        refuse_live_statistics(self._layers)
        names = _adapted(model, scheme, method.share)
        self.model, self.method, self.privacy, self.batch_size = model, method, privacy, batch_size
        self.generator = torch.Generator().manual_seed(0 if seed is None else seed)
        self._first_patches = self.generator.get_state()
        self.stream: NoisyStream | None = None
        if isinstance(privacy, DP) and privacy.private:
            privacy.refuse_unbounded(tuple(names))
            account = open_account(privacy, ledger, subject, unit=unit, lease=lease, seed=seed)
            self.stream = NoisyStream(privacy, account, batch_size)
        model.eval()  # nothing was changed before this line, and nothing fails after it
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        self.parameters = {name: p for name, p in model.named_parameters() if name in names}
        self.origin = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.memory = Memory()
        self.participation = Participation(
            *((privacy.contributions, privacy.separation) if isinstance(privacy, DP) else (1 << 62, 1))
        )
        self.unit = Unit(unit)
        self.has_unit_ids = False  # whether every batch came with unit_ids=
        self.steps = 0  # batches seen, or given up after a kill: the number of the next one
        self.optimize = {"kind": optimizer, "lr": lr, "momentum": momentum}
        self.optimizer = self._new_optimizer()
        self._kind: tuple[torch.Size, torch.dtype, torch.device] | None = None  # of a row, from the first batch on
        self.classes = classes
        self._step = self._make_step(microbatch, curator)

    def __call__(
        self, images: Tensor, *, unit_ids: Tensor | Sequence[int] | Sequence[str] | None = None, units: Any = None
    ) -> Tensor:
        """Predict each image with the parameters as they are, then update them by the batch.

        Args:
            images: Float images, rows first; at most `batch_size`.
            unit_ids: One integer or string per row: whose it is. The rows of a unit in a batch count as one, and a unit
                beyond its `contributions` (or too soon) gets predictions and contributes nothing. So do rows with
                values that are not finite; for their prediction such values count as zero.

        Returns:
            Logits, one line per image.

        Raises:
            ValueError: Invalid images or ids; the batch has contributed nothing.
        """
        unit_ids = renamed_argument("units", units, "unit_ids", unit_ids, where="Adapter")
        labels = self._check(images, unit_ids)
        with torch.inference_mode(False):
            images = images.clone() if images.is_inference() else images.detach()
            if len(images) == 0:
                return self._step.predict(images.new_zeros(1, *images.shape[1:]))[:0]
            if self._kind is None:
                self._prepare(torch.zeros_like(images[:1]))
            finite = torch.isfinite(images.flatten(1)).all(1)
            shown = images if bool(finite.all()) else torch.nan_to_num(images, nan=0.0, posinf=0.0, neginf=0.0)
            logits, gradient = self._learn(shown, finite.cpu(), labels)
            if gradient is not None:
                self._update(gradient)
            if self._should_recover():
                self._restore()
            return logits

    def start(self, images: Tensor) -> None:
        """Check the model on a blank row like these and charge for the stream, before its first batch is there.

        A checkpoint that is saved after this and before the first batch leaves nothing to lose to a kill.
        """
        self._check(images, [0] * len(images))
        if self._kind is None:
            self._prepare(torch.zeros_like(images[:1]))

    def reset(self) -> None:
        """Back to the source model, with nothing remembered and a new noise block. Who took part is not forgotten."""
        self._restore()
        self.generator.set_state(self._first_patches)
        if self.stream is not None:
            self.stream.reset()

    @property
    def guarantee(self) -> Guarantee | None:
        """What was spent on the stream so far; None in the forms that promise nothing."""
        return None if self.stream is None else self.stream.guarantee

    @property
    def assumptions(self) -> list[str]:
        """What the guarantee rests on, for the card."""
        if not isinstance(self.privacy, DP) or self.stream is None:
            return []
        times = "one row" if self.privacy.contributions == 1 else f"rows in at most {self.privacy.contributions} steps"
        said = ["arrival times, batch sizes and the length of the stream are public"]
        if not self.has_unit_ids:
            said.append(f"assumes {times} per person: not every batch came with unit_ids, so it was not enforced")
        elif self.privacy.neighbours is Neighbours.REPLACE_ONE:
            said.append(f"a {self.unit} that takes another's place brings an id that nobody else has")
        if not self.stream.account.ledger.durable:
            said.append("the ledger is in memory (not durable): it stops no second run on the same people")
        if self.stream.seeded:
            said.append("seeded: not private")
        return said

    @property
    def ledger(self) -> Ledger | None:
        """The ledger that pays for the stream; None in the forms that promise nothing."""
        return None if self.stream is None else self.stream.account.ledger

    def save_model(self, folder: str | Path, *, format: WeightFormat = "plain", title: str | None = None) -> Path:
        """Write the model as it is now so that timm or transformers load it without tacit, its promise beside it.

        To go on with the stream later, save a checkpoint (`adapt.save_adapter`): this is for those who use the model.

        Args:
            folder: Made if there is none. It gets the weights (see `models.save_weights`), `privacy-card.md` and
                `guarantee.json` with the ledger's head.
            format: `"plain"`, or `"state_dict"` for a model with adapters.
            title: What stands above the card.

        Returns:
            The folder.
        """
        receipt = None if self.stream is None or self.stream.receipt is None else self.stream.receipt.id
        return save_result(folder, self.model, self, stage="adapt", format=format, title=title, receipt=receipt)

    def _repr_html_(self) -> str:
        said = html.escape(repr(self).removeprefix("Adapter(").removesuffix(")"))
        return f"<p>{said}, {self.steps:,} steps</p>" + ("" if self.guarantee is None else self.guarantee._repr_html_())

    def _learn(self, images: Tensor, finite: Tensor, units: Tensor | None) -> tuple[Tensor, Gradient | None]:
        """One step. If it fails before its release it has not happened: the same batch may come again."""
        if self.stream is not None:
            self.stream.lease()
        self.has_unit_ids = units is not None and (self.has_unit_ids or self.steps == 0)
        taking = finite if units is None else finite & self.participation.admit(units, self.steps)
        rows = self._step.rows(images, units)
        try:
            found = self._step(rows, None if bool(taking.all()) else taking)
        except BaseException:
            if self.stream is not None:
                self.steps = max(self.steps, self.stream.steps)
            raise
        self.steps += 1
        return found

    def _update(self, gradient: Gradient) -> None:
        anchor, strength = self.method.anchor, self.method.fisher_alpha
        for name, parameter in self.parameters.items():
            value = gradient[name]
            if anchor is not None:  # after the noise: it reads no private data
                value = value + strength * anchor.gradient(name, parameter.detach())
            parameter.grad = value.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _should_recover(self) -> bool:
        """SAR's reset; `ema_entropy` is only ever filled in the forms that are not private."""
        threshold, ema_entropy = self.method.recovery, self.memory.ema_entropy
        if threshold is None or ema_entropy is None:
            return False
        count = self._class_count if self.classes is None else int(self.classes.sum())
        return ema_entropy < threshold * math.log(count)

    def _restore(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.origin[name])
        self.optimizer = self._new_optimizer()
        self.memory.forget()

    def _check(self, images: Tensor, unit_ids: Any) -> Tensor | None:
        """Everything that can be wrong with a batch, before anything is charged or changed."""
        if not isinstance(images, Tensor) or not images.is_floating_point() or images.dim() < 2:
            found = f"{images.dtype} of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images)
            raise ValueError(f"A batch is a float tensor, one row per image (images in [0, 1]); got {found}.")
        refuse_live_statistics(self._layers)
        if len(images) > self.batch_size:
            raise ValueError(f"{len(images)} rows in a batch, and batch_size={self.batch_size}: split the batch.")
        kind = (images.shape[1:], images.dtype, images.device)
        if self._kind is not None and kind != self._kind:
            told, known = (f"{tuple(shape)}, {dtype} on {device}" for shape, dtype, device in (kind, self._kind))
            raise ValueError(f"Images of shape {told}, in a stream of {known}: keep to one kind.")
        if unit_ids is not None:
            return numbered(unit_ids, len(images))
        if self.stream is not None and self.unit != Unit.SAMPLE:
            raise ValueError(
                f"This stream promises something to a {self.unit}, and nothing says whose each row is: give unit_ids= "
                "with every batch, one integer or string per row."
            )
        return None

    def _prepare(self, images: Tensor) -> None:
        """Once, on a blank row like those of the first batch: does the model take it, and can the form be kept?"""
        try:
            logits = self._step.predict(images)
        except (RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"The model does not take images of shape {tuple(images.shape[1:])}: {reason}.") from None
        self._class_count = logits.shape[1]
        classes = self.classes
        if classes is not None and (
            classes.shape != (self._class_count,) or classes.dtype != torch.bool or int(classes.sum()) < 2
        ):
            raise ValueError(
                f"classes is a bool per class of the model: {self._class_count} of them, two or more true."
            )
        self._step.check(images)
        if self.stream is not None:
            self.stream.charge(self.method.name)
        self._kind = (images.shape[1:], images.dtype, images.device)

    def _make_step(self, microbatch: int | None, curator: Curator | None) -> Step:
        shared = Shared(
            model=self.model,
            method=self.method,
            parameters=self.parameters,
            memory=self.memory,
            generator=self.generator,
            classes=self.classes,
        )
        if self.privacy is None:
            return Plain(shared)
        return Clipped(
            shared,
            form=self.privacy,
            batch_size=self.batch_size,
            stream=self.stream,
            microbatch=microbatch,
            curator=curator,
        )

    def _new_optimizer(self) -> torch.optim.Optimizer:
        values, lr = list(self.parameters.values()), float(self.optimize["lr"])
        if self.optimize["kind"] == "adam":
            return torch.optim.Adam(values, lr=lr)
        return torch.optim.SGD(values, lr=lr, momentum=float(self.optimize["momentum"]))

    def __repr__(self) -> str:
        promise = "not private" if self.stream is None else f"epsilon {self.privacy.epsilon:g}"  # type: ignore[union-attr]
        numbers = sum(p.numel() for p in self.parameters.values())
        return f"Adapter({self.method.name}, {promise}, {numbers:,} parameters, batch size {self.batch_size})"


def _adapted(model: nn.Module, scheme: str, share: float) -> list[str]:
    """The parameters of the scheme; with a share, only those of the first normalisation layers. Changes nothing."""
    trainable = [(p, p.requires_grad) for p in model.parameters()]
    try:
        names = select(model, scheme)
    finally:
        for parameter, before in trainable:
            parameter.requires_grad_(before)
    layers = [name for name, _ in normalisers(model)]
    late = layers[max(1, math.floor(share * len(layers))) :] if share < 1 else []
    return [name for name in names if not any(name.startswith(f"{layer}.") for layer in late)]
