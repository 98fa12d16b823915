"""`finetune.fit` as something to tune: what a trial trains, what it releases, and how its model is scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tacit._deprecation import renamed_argument
from tacit.data import Records, TensorRecords, unit_ids_of
from tacit.finetune import (
    DPGD,
    Backbone,
    CachedBlocks,
    Classes,
    Optimizer,
    RowNorm,
    RowNormalizer,
    Standardise,
    Task,
    agree,
    blank_row,
    cache_blocks,
    check_labels,
    check_rows_alone,
    dry_run,
    extract,
    fit,
    is_linear,
    likeness,
    plan,
    prepared,
    read_records,
    right_by_unit,
    upper_part,
)
from tacit.models import head_of
from tacit.privacy import Budget, Ledger, Neighbours, Receipt, Unit, epsilon_of
from tacit.privacy.events import DpEvent, check_count, gaussian_noise
from tacit.tune._default import suggest
from tacit.tune._random_split import Part, coins, part_of
from tacit.tune._search import unit_of
from tacit.tune._space import Hyperparameters, Space

_OPTIONS = {"rows_each", "augment", "init", "microbatch", "seed"}  # of `fit`, that a trial may have


def dpgd(hyperparameters: Hyperparameters) -> Optimizer:
    """Full-batch private gradient descent: momentum, unit clip, a free last step.

    Args:
        hyperparameters: lr, steps and, where it is searched, clip.

    Returns:
        The optimizer.
    """
    clip = 1.0 if hyperparameters.clip is None else hyperparameters.clip
    return DPGD(lr=hyperparameters.lr, steps=hyperparameters.steps, clip=clip)


class Finetuning:
    """A trainable for every search of `tune`: trains a copy of `model` with `finetune.fit`.

    With scheme "linear" the backbone runs over the data once, here, however many trials there are, and each row's
    features are scaled to norm 1 (see `standardise`); with `last_blocks` so do the blocks below. Invalid combinations
    are refused here, before any charge.

    Formal guarantee: a run on a receipt of `event`. Of steps over everybody that is worth exactly mu; of subsampled
    batches it is (epsilon, delta)-private where a Gaussian release of mu is, by PLD, and the search composes all
    runs by PLD as well. A unit's score is the mean over its rows of a number between 0 and 1, each computed from
    its row alone (checked on synthetic rows).

    Args:
        model: The model.
        data: As in `finetune.fit`.
        size: The public number of units.
        classes: The number of classes.
        task: Loss, measures and outputs other than classes.
        delta: Where a Poisson-subsampled run is matched to a Gaussian release of mu.
        optimizer: Makes the optimizer from hyperparameters (a function of a module if trials run in other processes).
        scheme: As in `finetune.fit`.
        unit: The kind of unit; must agree with the data.
        unit_ids: One integer or string per row.
        head: As in `finetune.fit`.
        bias: As in `finetune.fit`.
        measure: What a trial is scored by. "loss": 1 less the loss, which is clipped at twice that of a blind guess;
            unlike "accuracy" it sees the scale of a head, and tells a start that has hardly moved from one that has
            learnt.
        last_blocks: As in `finetune.fit`: train this many blocks from the end, on activations that are computed once.
        standardise: What is done to cached features. "auto", a rule that looks at nothing: `RowNorm()`, which is free,
            wherever there are cached features, and nothing elsewhere. A `RowNorm` whose centre is public, or None.
        **options: Further arguments of `fit`: rows_each, augment, init, microbatch, seed.

    Raises:
        ValueError: An invalid combination.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        size: int,
        classes: int | None = None,
        task: Task | None = None,
        delta: float = 1e-5,
        optimizer: Callable[[Hyperparameters], Optimizer] = dpgd,
        scheme: str = "linear",
        unit: Unit | str | None = None,
        unit_ids: Any = None,
        units: Unit | str | None = None,
        head: Literal["new", "keep"] = "new",
        bias: bool = True,
        measure: Literal["loss", "accuracy"] = "loss",
        last_blocks: int | None = None,
        standardise: RowNorm | Literal["auto"] | None = "auto",
        optimiser: Callable[[Hyperparameters], Optimizer] | None = None,
        **options: Any,
    ) -> None:
        optimizer = renamed_argument(
            "optimiser", optimiser, "optimizer", optimizer, where="tune.Finetuning", default=dpgd
        )
        if not callable(optimizer) or isinstance(optimizer, Optimizer):
            raise TypeError(
                "tune.Finetuning needs optimizer=, a function of hyperparameters that makes an optimizer, such as "
                "lambda p: finetune.DPSGD(batch_size=…, steps=p.steps, lr=p.lr)."
            )
        if measure not in ("loss", "accuracy"):
            raise ValueError(f"A trial is scored by its loss or its accuracy; got {measure!r}.")
        self.measure = measure
        unit = renamed_argument("units", units, "unit", unit, where="tune.Finetuning")
        self.size, named = size, None if unit is None else Unit(unit)
        self.optimizer, self.delta = optimizer, delta
        self._task: Task = task or Classes(classes if classes is not None else head_of(model)[1].out_features)
        if measure == "loss" and not hasattr(self._task, "confidence"):
            raise ValueError(
                "This task does not say how sure a model is: give it `confidence`, or give measure='accuracy'."
            )
        self._model = model
        if unknown := set(options) - _OPTIONS:
            known = ", ".join(sorted(_OPTIONS))
            raise ValueError(f"A trial cannot be given {min(unknown)!r}; what there is beside the rest: {known}.")
        if (init := options.get("init", "pretrained")) not in ("pretrained", "scratch"):
            raise ValueError(f"init is 'pretrained' or 'scratch'; got {init!r}.")
        if last_blocks is not None and init != "pretrained":
            raise ValueError("Activations are cached of the pretrained model: leave init= or last_blocks= out.")
        shown = {name: options.pop(name, None) for name in ("rows_each", "augment")}  # of the records, not of a run
        self._records = read_records(data, named, unit_ids=unit_ids, model=model, **shown)
        self.unit = agree(self._records, named)
        check_labels(self._task, self._records)
        check_rows_alone(self._task, self._records.labels(), confidence=measure == "loss")
        self._how: dict[str, Any] = options | {"scheme": scheme, "head": head, "bias": bias}
        check_count(size, "size")
        if isinstance(self._records, CachedBlocks):
            raise ValueError("tune.Finetuning caches activations by itself: give it the data, with last_blocks=.")
        like = dry_run(self._with_head(), self._records)
        self._last_blocks = last_blocks
        if last_blocks is not None:
            self._how["last_blocks"] = last_blocks
            self._records = cache_blocks(self._with_head(), self._records, last_blocks=last_blocks)
            like = likeness(self._records, training=False)
        self._rows: tuple[RowNormalizer, ...] = ()
        self._features: Records | None = self._cached()
        self._scale_rows(standardise)
        scored = self._features
        self._like = like if scored is None else likeness(scored, training=False)  # of what is scored: no unit decides

    @property
    def guess(self) -> float | None:
        """What a model that knows nothing scores: a half, by a loss that is clipped at twice that of a blind guess."""
        return 0.5 if self.measure == "loss" else None

    def sampled(self, hyperparameters: Hyperparameters) -> bool:
        """Whether batches are Poisson-subsampled, so that no single mu describes what a run releases."""
        return self.optimizer(hyperparameters).sampler.rate(self.size) < 1

    def event(self, hyperparameters: Hyperparameters, mu: float, neighbours: Neighbours) -> DpEvent:
        """What a run of `mu` releases: its optimizer's steps, with the noise that makes them so much."""
        optimizer, delta = self.optimizer(hyperparameters), self.delta
        optimizer.check(neighbours, resumable=False, named=unit_ids_of(self._records) is not None)
        optimizer.check_size(self.size, len(self._records))
        one = gaussian_noise(optimizer.event(1.0, self.size))
        if one is not None:
            return optimizer.event(neighbours.factor / (mu * one), self.size)
        return plan(optimizer, epsilon=epsilon_of(mu, delta), delta=delta, size=self.size, neighbours=neighbours)

    def default(self, mu: float) -> Hyperparameters | None:
        """What `suggest` says for a run of `mu`; None where it says nothing: other schemes, optimizers or features."""
        table = self._features
        if not (self.optimizer is dpgd and isinstance(table, TensorRecords) and len(self._rows) == 1):
            return None
        if self._rows[0].norm != 1 or not 0 < mu < math.inf:
            return None
        budget = Budget(epsilon_of(mu, self.delta), self.delta)
        return suggest(budget, size=self.size, features=table.inputs.shape[1], classes=self._task.outputs)

    def check_space(self, space: Space) -> None:
        """Refuse a box with hyperparameters that the optimizer does not use: searching them would find nothing.

        Args:
            space: What is to be searched.

        Raises:
            ValueError: The optimizer is the same at both ends of a range, or makes other steps than the box says.
        """
        for point in (space.decompose(end) for end in space.ends):
            if (steps := self.optimizer(point).steps) != point.steps:
                raise ValueError(
                    f"The optimizer of this trainable makes {steps} steps where the search would have {point.steps}: "
                    "give it p.steps (lambda p: finetune.DPSGD(steps=p.steps, …)), or give the space its own, "
                    f"steps=({steps}, {steps})."
                )
        low, high = (Hyperparameters(**{n: ends[i] for n, ends in space.ranges.items()}) for i in (0, 1))  # type: ignore[arg-type]
        for name in sorted({"batch_size", "clip"} & set(space.ranges)):
            least, most = space.ranges[name]
            if least < most and self.optimizer(replace(high, **{name: getattr(low, name)})) == self.optimizer(high):
                everybody = (
                    " It has everybody in every step." if name == "batch_size" and not self.sampled(high) else ""
                )
                raise ValueError(
                    f"The optimizer of this trainable does not use {name}, so that a search over it would be of noise."
                    f"{everybody} Leave {name}= out of the space, or give an optimizer= that uses it."
                )

    def event_with(self, hyperparameters: Hyperparameters, noise: float) -> DpEvent:
        """What a run with this noise multiplier releases."""
        optimizer = self.optimizer(hyperparameters)
        optimizer.check_size(self.size, len(self._records))
        return optimizer.event(noise, self.size)

    def __call__(self, hyperparameters: Hyperparameters, mu: float, receipt: Receipt) -> nn.Module:
        """A trained copy of the model."""
        del mu  # the receipt says it
        unit_of(self, receipt.unit)
        table = self._features
        fitted = fit(
            deepcopy(self._model) if table is None else self._probe(),
            self._records if table is None else table,
            optimizer=self.optimizer(hyperparameters),
            delta=self.delta,
            receipt=receipt,
            size=self.size,
            task=self._task,
            **self._how,
        ).model
        if table is None:
            return fitted
        whole = self._with_head()
        head = head_of(whole)[1]
        head.load_state_dict(head_of(fitted)[1].state_dict())
        for rows in self._rows:
            whole = deepcopy(rows).before_head(whole, head)
        return whole

    def score(self, model: nn.Module) -> Tensor:
        """How right a trained model is about each unit. Private: it leaves with noise or not at all."""
        if self._features is not None:
            return self._right(nn.Sequential(nn.Identity(), head_of(model)[1]), self._features)
        if not isinstance(self._records, CachedBlocks):
            return self._right(model, self._records)
        with upper_part(model, self._records, self._records.last_blocks) as body:
            return self._right(body, self._records)

    def split(self, rate: float, *, seed: int | None = None) -> tuple[Finetuning, Finetuning]:
        """Two trainables of different people: every unit is in the first with probability `rate`, by a coin of its own.

        Their sizes are public: `rate` times the declared one, rounded, and the rest. See `subset_search`.
        """
        if not 0 < rate < 1:
            raise ValueError(f"The rate of a split is between 0 and 1; got {rate:g}.")
        if self._last_blocks is not None:
            raise ValueError("Activations are cached for all units together: leave last_blocks= out to split them.")
        first, size = coins(len(self._records), rate, seed), round(rate * self.size)
        return self._part(first, size), self._part(~first, self.size - size)

    def centred(self, by: Standardise, *, ledger: Ledger, subject: str, seed: int | None = None) -> Finetuning:
        """The same with the features' mean, released here and charged once, taken off before rows are scaled.

        Formal guarantee: one Gaussian release of `by.noise` to which a unit adds the mean of its rows' features, scaled
        as they are now and shortened to `by.bound`; see `Standardise`.

        Args:
            by: Noise and bound of the release; rows have norm 1 unless `standardise` says otherwise.
            ledger: Where the release is charged.
            subject: The data set's name in the ledger; it must be there, with the budget of all that is to come.
            seed: Reproducible noise: "seeded: not private".

        Returns:
            A trainable over the centred features.

        Raises:
            ValueError: There are no cached features, or they have a centre already.
            BudgetExceeded: The subject cannot afford it; nothing was charged.
        """
        table = self._features
        if not isinstance(table, TensorRecords) or len(self._rows) != 1:
            raise ValueError("A centre is released once, of cached features whose rows have one norm.")
        centre = by.release_mean(table, self.size, ledger, subject, seed)
        second, other = RowNorm(norm=self._rows[0].norm).normalizer(centre), copy(self)
        other._rows, other._features = (*self._rows, second), table.with_inputs(second.apply_to(table.inputs))
        return other

    def _scale_rows(self, how: RowNorm | Literal["auto"] | None) -> None:
        table = self._features
        if how == "auto":
            how = None if table is None else RowNorm()
        if how is None:
            return
        if not isinstance(how, RowNorm) or how.paid is not None:
            raise ValueError(
                "standardise is 'auto', None or a RowNorm whose centre is public; `centred` pays for a centre, once."
            )
        if not isinstance(table, TensorRecords):
            raise ValueError("Rows are scaled where features are cached: scheme='linear' on rows that have vectors.")
        rows = how.normalizer()
        self._rows, self._features = (rows,), table.with_inputs(rows.apply_to(table.inputs))

    def _part(self, mine: Tensor, size: int) -> Finetuning:
        units, table, other = torch.nonzero(mine).flatten(), self._features, copy(self)
        other.size, other._records = size, Part(self._records, units)
        other._features = None if table is None else part_of(table, units)
        return other

    def _cached(self) -> TensorRecords | None:
        """What the head sees of each row, where the head alone is trained and nothing comes after it."""
        records = self._records
        if self._how["scheme"] != "linear" or not isinstance(records, TensorRecords) or records.augmented:
            return None
        model = self._with_head()
        if not is_linear(model, blank_row(model, records)):
            return None
        return records.with_inputs(extract(Backbone(model), records))

    def _right(self, model: nn.Module, records: Records) -> Tensor:
        return right_by_unit(model, records, self._task, confidence=self.measure == "loss", like=self._like)

    def _with_head(self) -> nn.Module:
        how = {name: self._how[name] for name in ("scheme", "head", "bias")}
        return prepared(deepcopy(self._model), self._task.outputs, init="pretrained", seed=0, **how).eval()

    def _probe(self) -> nn.Module:
        head = head_of(self._with_head())[1]
        return nn.Sequential(nn.Identity(), head)
