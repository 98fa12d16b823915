"""The adapter: predict, then learn from the same images, in whatever form of whatever method."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tacit import _checkpoints as checkpoints
from tacit._context import PrivacyContext, takes_context
from tacit._curator import Curator
from tacit._deprecation import renamed_argument
from tacit._locks import ForkSafeLock
from tacit._saving import save_result
from tacit.adapt._clipped_step import Clipped
from tacit.adapt._default_rate import rate_for, strain_of_noise
from tacit.adapt._masters import Masters, cast
from tacit.adapt._memory import Memory
from tacit.adapt._methods import Method
from tacit.adapt._monitor import CERTAIN, Monitor, Watch
from tacit.adapt._noise import NoisyStream
from tacit.adapt._normalization import normalization
from tacit.adapt._options import check_counts, check_options
from tacit.adapt._participation import Participation, numbered
from tacit.adapt._privacy_config import DP, Privacy
from tacit.adapt._ranks import admit, check_batch_alike, open_stream
from tacit.adapt._settled import (
    adapted,
    check_batch,
    check_classes,
    finite_rows,
    finite_values,
    kind_of,
    refuse_pixels,
    settle,
    statistics_of,
)
from tacit.adapt._statistics import BatchStatistics, Statistics
from tacit.adapt._steps import Gradient, Plain, Shared, Step
from tacit.adapt._strain import Strain
from tacit.adapt._views import Read, blank_rows
from tacit.data import ImageShape
from tacit.distributed import team
from tacit.gradients import change, count_rows, refuse_live_statistics
from tacit.models import WeightFormat
from tacit.privacy import Guarantee, Ledger, Unit

_OPTIMIZER: Literal["sgd", "adam"] = "sgd"
_PATIENCE = 8  # steps after which a model that has not moved at all is worth a note


class Adapter:
    """A model that adapts to the unlabelled stream of images that it is shown.

    `adapter(images)` returns the logits of the parameters from *before* this batch and then updates them.

    Formal guarantee of the private form (`privacy=DP(...)`): unit, a row, or all rows with the same of the `unit_ids`;
    neighbours, two streams of the same length and batch sizes that differ in one unit's rows (replaced by those of a
    unit whose id nobody else has, or blanked under zero-out). Each step releases one sum of clipped gradients with
    Gaussian noise; a unit takes part in at most `contributions` steps, so the sequence of all parameters is one
    Gaussian release of what is charged before the first step (see `privacy.correlated` for correlated noise), however
    long the stream is. Filters that read the past, SAR's second gradient and its reset are not there; what follows the
    noise reads only released values. The prediction for a person's own image depends on their own image: the
    guarantee covers everyone else's.

    Args:
        model: The source model; it is adapted in place.
        method: What is minimised: `tent()`, `eata()`, ...
        privacy: None, `Clip` or `DP`.
        batch_size: The denominator of every update. A batch may have fewer rows, never more.
        lr: The learning rate. "auto" needs no tuning: with `Clip` and `DP` it comes from the norm of the weights, the
            clip, the batch size, the noise and the horizon, all of them public; without privacy it is 0.005.
        momentum: Of "sgd".
        optimizer: "sgd" or "adam".
        steps: Updates by each batch (published code has one); the logits are those of the last of them. In the private
            form each is a release, and `DP(contributions=...)` must allow for them.
        scheme: Which parameters are adapted; see `models.select`.
        classes: A mask over the classes that may occur; predictions stay over all.
        ledger: Where the stream is charged.
        subject: The stream's name in the ledger.
        unit: The kind of unit. A row is a "sample"; anything else ("patient") needs `unit_ids` with every batch, and is
            refused without.
        seed: Reproducible noise: not private.
        lease: Steps that are recorded as used at a time.
        microbatch: The most rows in memory at a time.
        statistics: Of BatchNorm layers. "source": frozen, as trained (the default with `Clip` and `DP`). "batch": those
            of each batch, as published (the default without privacy; refused with `DP`). "private": moments that are
            released with the gradient, at no further cost, and move the source's from step to step.
        normalize: Images come in [0, 1], and the model wants mean and deviation of its training: an `ImageShape`, or
            "model" for what its configuration in timm or transformers says. By default images go in as they are.
        logits: A function from what the model returns to logits: rows first, classes last, any positions between (then
            the entropy is per position, and a row's loss their mean); or a pair of these and a mask of the positions
            that count. By default the model returns rows x classes, itself or as `.logits`. `adapt.binary` is for
            classifiers with one logit.
        monitor: With `DP` (or `Clip`): release mean entropy and mean prediction in the gradient's own release, of which
            they take 2%; `adapter.watch` has the curves and the alarm. How far the model has moved is watched anyway.
        curator: Called with a `tacit.StepEvent` before each step's noise; with `Clip` and `DP`.
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
        lr: float | Literal["auto"] = 0.005,
        momentum: float = 0.9,
        optimizer: Literal["sgd", "adam"] = _OPTIMIZER,
        steps: int = 1,
        scheme: str = "norms",
        classes: Tensor | None = None,
        ledger: Ledger | None = None,
        subject: str | None = None,
        unit: Unit | str = Unit.SAMPLE,
        seed: int | None = None,
        lease: int = 256,
        microbatch: int | None = None,
        statistics: Statistics | None = None,
        normalize: ImageShape | Literal["model"] | None = None,
        logits: Read | None = None,
        monitor: Monitor | bool = False,
        curator: Curator | None = None,
        optimiser: Literal["sgd", "adam"] | None = None,
        context: PrivacyContext | None = None,
    ) -> None:
        del context  # its arguments are here; see takes_context
        optimizer = renamed_argument(
            "optimiser", optimiser, "optimizer", optimizer, where="Adapter", default=_OPTIMIZER
        )
        check_counts(batch_size, steps, lease, 1 if microbatch is None else microbatch)
        check_options(privacy, lr, momentum, optimizer, steps, watched=bool(monitor), shown=curator is not None)
        self.monitor = Monitor() if monitor is True else monitor or None
        self.watch = Watch()
        kind = statistics_of(model, statistics, privacy)
        self.kind: Statistics = kind
        self._layers = [] if kind == "batch" and privacy is None else list(model.named_modules())
        refuse_live_statistics(self._layers)
        names = adapted(model, scheme, method.share)
        self.model, self.method, self.privacy, self.batch_size = model, method, privacy, batch_size
        self.generator = torch.Generator().manual_seed(0 if seed is None else seed)
        self._first_patches = self.generator.get_state()
        self.team = team()
        self.stream: NoisyStream | None = None
        if isinstance(privacy, DP) and privacy.private:
            privacy.refuse_unbounded(tuple(names))
            self.stream = open_stream(
                self.team, privacy, ledger, subject, unit=unit, lease=lease, seed=seed, batch_size=batch_size
            )
        self.statistics = None if kind == "source" else BatchStatistics(model)
        model.eval()  # nothing was changed before this line, and nothing fails after it
        if kind == "batch" and privacy is None and self.statistics is not None:
            self.statistics.live()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        self.parameters = {name: p for name, p in model.named_parameters() if name in names}
        self.origin = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.masters = Masters(self.parameters)
        self.strain = Strain(self.masters.values, self.origin)
        self.memory = Memory()
        self.participation = Participation(
            *((privacy.contributions, privacy.separation) if isinstance(privacy, DP) else (1 << 62, 1))
        )
        self.unit = Unit(unit)
        self.has_unit_ids = False  # whether every batch came with unit_ids=
        self.steps, self.resumed = 0, False  # batches seen, or given up after a kill: the number of the next one
        self.optimize = {"kind": optimizer, "lr": lr, "momentum": momentum}
        noise = 0.0 if self.stream is None else self.stream.noise_multiplier
        terms: Any = {"batch_size": batch_size, "momentum": momentum, "noise": noise}
        if lr == "auto":
            self.optimize["lr"] = rate_for(privacy, self.origin, optimizer=optimizer, **terms)
        if self.stream is not None and optimizer == "sgd":
            self.watch.forecast(strain_of_noise(privacy, self.origin, lr=float(self.optimize["lr"]), **terms))
        self.optimizer = self._new_optimizer()
        self._kind: Any = None  # of a row, from the first batch on
        self._read, self._turn = logits, ForkSafeLock()
        self.normalize = normalization(normalize, model)
        self._repeats, self.classes = steps, classes
        self._step = self._make_step(microbatch, curator)

    def __call__(
        self, images: Any, *, unit_ids: Tensor | Sequence[int] | Sequence[str] | None = None, units: Any = None
    ) -> Tensor:
        """Predict each image with the parameters as they are, then update them by the batch.

        Args:
            images: Rows first, at most `batch_size`: float images, or whatever the model takes as a tensor, a tuple of
                arguments or a mapping of named ones (token ids and masks).
            unit_ids: One integer or string per row: whose it is. The rows of a unit in a batch count as one, and a unit
                beyond its `contributions` (or too soon) gets predictions and contributes nothing. So do rows with
                values that are not finite; for their prediction such values count as zero.

        Returns:
            Logits, one line per image.

        Raises:
            ValueError: Invalid images or ids; the batch has contributed nothing.
        """
        unit_ids = renamed_argument("units", units, "unit_ids", unit_ids, where="Adapter")
        with self._turn.held(), torch.inference_mode(False):  # two threads in one step would count a unit once
            labels = self._check(images, unit_ids)
            images = change(images, lambda t: t.clone() if t.is_inference() else t.detach())
            if count_rows(images) == 0:
                return self._step.predict(blank_rows(self.model, images, 2))[:0]
            if self._kind is None:
                refuse_pixels(images, charged=self.resumed)
                self._prepare(blank_rows(self.model, images, self._few))
            finite = finite_rows(images)
            shown = images if bool(finite.all()) else change(images, finite_values)
            for _ in range(self._repeats):
                logits = self._adapt(shown, finite, labels)
            return logits

    def _adapt(self, images: Any, finite: Tensor, labels: Tensor | None) -> Tensor:
        """Predict and update once."""
        logits, gradient = self._learn(images, finite, labels)
        if gradient is not None:
            self._update(gradient)
        if self.steps == _PATIENCE:  # once, from released values in the private form: else it is paid for nothing
            self.masters.note_if_stuck(self.origin, self.steps)
        self._look()
        if self._should_recover():
            self._restore()
        return logits

    def predictions(
        self,
        batches: Iterable[Any],
        *,
        inputs: Callable[[Any], Any] | None = None,
        unit_ids: Callable[[Any], Any] | None = None,
    ) -> Iterator[Tensor]:
        """Adapt along a `DataLoader`, or anything else that gives batches, and yield each batch's logits in turn.

        Args:
            batches: Of at most `batch_size` rows each.
            inputs: From a batch to what the model takes, `lambda batch: batch[0]` where labels come along.
            unit_ids: From a batch to whose its rows are.

        Yields:
            The logits of each batch, as a call gives them; the guarantee is `adapter.guarantee` at any time.
        """
        for batch in batches:
            owners = None if unit_ids is None else unit_ids(batch)
            yield self(batch if inputs is None else inputs(batch), unit_ids=owners)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the model's parameters and buffers as they are now. In the private form all of it is released."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def predict(self, images: Any) -> Tensor:
        """The model's logits as it is now; nothing is learnt, charged or counted.

        Args:
            images: A batch of any size, as for a call.

        Returns:
            Logits, rows first.
        """
        check_batch(images)
        with self._turn.held():  # within a step parameters are moved, and layers are watched
            return self._step.predict(change(images, finite_values))

    def start(self, images: Any) -> None:
        """Check the model on a blank row like these and charge for the stream, before its first batch is there.

        A checkpoint that is saved after this and before the first batch leaves nothing to lose to a kill.
        """
        with self._turn.held():
            self._check(images, None if isinstance(images, Tensor) and images.dim() < 1 else [0] * count_rows(images))
            if self._kind is None:
                self._prepare(blank_rows(self.model, images, self._few))

    @property
    def _few(self) -> int:
        """Blank rows to try a model on: statistics of a batch need two."""
        return 2 if self.kind == "batch" else 1

    def reset(self) -> None:
        """Back to the source model, with nothing remembered and a new noise block. Who took part is not forgotten."""
        with self._turn.held():
            self._restore()
            self.generator.set_state(self._first_patches)
            if self.stream is not None:
                self.stream.reset()

    def continue_from(self, values: dict[str, Tensor]) -> None:
        """Go on from other released parameters (an earlier version, say), with nothing remembered.

        It costs nothing: what was released may be used again in any way. The noise goes on as it was.

        Args:
            values: A value for every adapted parameter, by name.
        """
        with self._turn.held():
            self.masters.load(values)
            self.optimizer = self._new_optimizer()
            self.memory.forget()
            self.watch.forget()

    @property
    def guarantee(self) -> Guarantee | None:
        """What was spent on the stream so far; None in the forms that promise nothing."""
        return None if self.stream is None else self.stream.guarantee

    @property
    def shares(self) -> dict[str, float]:
        """Which share of the budget (of mu squared) each part of a release has beside the gradient. Public."""
        return dict(self._step.shares) if isinstance(self._step, Clipped) else {}

    @property
    def assumptions(self) -> list[str]:
        """What the guarantee rests on, for the card."""
        return [] if self.stream is None else self.stream.assumptions(self.unit, enforced=self.has_unit_ids)

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

    def _learn(self, images: Any, finite: Tensor, units: Tensor | None) -> tuple[Tensor, Gradient | None]:
        """One step. If it fails before its release it has not happened: the same batch may come again."""
        if self.team is not None:
            check_batch_alike(self.team, images, units)
        if self.stream is not None:
            self.stream.lease()
        so_far = self.has_unit_ids or self.steps == 0
        taking = finite & admit(self.team, self.participation, units, self.steps, named=so_far)
        self.has_unit_ids = units is not None and so_far
        rows = self._step.rows(images, units)
        try:
            found = self._step(rows, None if bool(taking.all()) else taking, step=self.steps)
        except BaseException:
            if self.stream is not None:
                self.steps = max(self.steps, self.stream.steps)
            raise
        self.steps += 1
        return found

    def _update(self, gradient: Gradient) -> None:
        anchor, strength = self.method.anchor, self.method.fisher_alpha
        masters = self.masters.values
        values = [gradient[name] for name in masters]
        if anchor is not None:  # after the noise: it reads no private data
            pulls = [anchor.gradient(name, master.detach()) for name, master in masters.items()]
            values = [value + strength * pull for value, pull in zip(values, pulls, strict=True)]
        for master, value in zip(masters.values(), cast(values, list(masters.values())), strict=True):
            master.grad = value
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.masters.publish()

    def _look(self) -> None:
        """How far the model is from the source; an alarm if it seems lost. With privacy, from released values."""
        self.watch.strain.append(self.strain())
        found = self.watch.look(self.method.recovery or CERTAIN)
        if found is None or self.watch.alarm is not None:
            return
        action = "warn" if self.monitor is None else self.monitor.on_alarm
        self.watch.raise_alarm(found, self.steps, action)
        if action == "reset":
            self._restore()
        elif action == "shrink":
            near = {n: self.origin[n] + (m.detach() - self.origin[n]) / 2 for n, m in self.masters.values.items()}
            self.masters.load(near)

    def _should_recover(self) -> bool:
        """SAR's reset; in the private form `ema_entropy` is only ever filled with released values (`monitor=`)."""
        threshold, ema_entropy = self.method.recovery, self.memory.ema_entropy
        if threshold is None or ema_entropy is None:
            return False
        count = self._class_count if self.classes is None else int(self.classes.sum())
        return ema_entropy < threshold * math.log(count)

    def _restore(self) -> None:
        if self.statistics is not None:
            self.statistics.reset()
        self.continue_from(self.origin)

    def _check(self, images: Any, unit_ids: Any) -> Tensor | None:
        """Everything that can be wrong with a batch, before anything is charged or changed."""
        check_batch(images)
        refuse_live_statistics(self._layers)
        rows = count_rows(images)
        if rows > self.batch_size:
            raise ValueError(f"{rows} rows in a batch, and batch_size={self.batch_size}: split the batch.")
        kind = kind_of(images)
        if self._kind is not None and kind != self._kind:
            raise ValueError(f"Images of {kind}, in a stream of {self._kind}: keep to one kind.")
        if unit_ids is not None:
            return numbered(unit_ids, rows)
        if self.stream is not None and self.unit != Unit.SAMPLE:
            raise ValueError(
                f"This stream promises something to a {self.unit}, and nothing says whose each row is: give unit_ids= "
                "with every batch, one integer or string per row."
            )
        return None

    def _prepare(self, images: Any) -> None:
        """Once, on a blank row like those of the first batch: does the model take it, and can the form be kept?"""
        try:
            logits = self._step.predict(images)
        except (RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"The model does not take images of {kind_of(images)}: {reason}.") from None
        self._class_count = logits.shape[-1]
        check_classes(self.classes, self._class_count)
        self._step.check(images)
        if self.team is not None:
            settings = (self.method.name, self.privacy, self.batch_size, self.optimize, self.kind, kind_of(images))
            here = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
            self.team.check_same(checkpoints.digest(here, f"{settings!r} {checkpoints.precision()}"))
        if self.stream is not None:
            self.stream.charge(self.method.name)
        self._kind = kind_of(images)

    def _make_step(self, microbatch: int | None, curator: Curator | None) -> Step:
        shared = Shared(
            model=self.model,
            method=self.method,
            parameters=self.parameters,
            masters=self.masters,
            memory=self.memory,
            generator=self.generator,
            classes=self.classes,
            statistics=self.statistics,
            kind=self.kind,
            read=self._read,
            normalize=self.normalize,
        )
        if self.privacy is None:
            return Plain(shared)
        step = Clipped(
            shared,
            form=self.privacy,
            batch_size=self.batch_size,
            stream=self.stream,
            microbatch=microbatch,
            curator=curator,
            monitor=self.monitor,
            watch=self.watch,
            team=self.team,
        )
        if self.kind == "private" and self.statistics is not None:
            left, noise = 1 - sum(step.shares.values()), 0.0 if self.stream is None else self.stream.noise_multiplier
            share = settle(self.statistics, self.privacy, self.optimize, self.batch_size, noise)
            step.shares["batch statistics"] = left * share
        return step

    def _new_optimizer(self) -> torch.optim.Optimizer:
        values, lr = list(self.masters.values.values()), float(self.optimize["lr"])
        if self.optimize["kind"] == "adam":
            return torch.optim.Adam(values, lr=lr)
        return torch.optim.SGD(values, lr=lr, momentum=float(self.optimize["momentum"]), foreach=True)

    def __repr__(self) -> str:
        promise = "not private" if self.stream is None else f"epsilon {self.privacy.epsilon:g}"  # type: ignore[union-attr]
        numbers = sum(p.numel() for p in self.parameters.values())
        said = "" if self.normalize is None else f", {self.normalize}"
        return f"Adapter({self.method.name}, {promise}, {numbers:,} parameters, batch size {self.batch_size}{said})"
