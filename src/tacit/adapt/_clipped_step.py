"""A step of the forms with clipped gradients: one bounded sum, and with a stream its noise."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tacit._curator import Curator, StepEvent, report_event
from tacit.adapt._methods import Filter, RedundancyFilter
from tacit.adapt._monitor import ENTROPY, PREDICTION, Monitor, Watch, watched_rows
from tacit.adapt._noise import NoisyStream
from tacit.adapt._privacy_config import DP, Clip
from tacit.adapt._ranks import sum_over_ranks
from tacit.adapt._side_blocks import bounded_total, joined
from tacit.adapt._statistics import BatchStatistics
from tacit.adapt._steps import Gradient, Shared, Step
from tacit.adapt._views import Rows, Seen
from tacit.data import Rows as Labelled
from tacit.distributed import Team
from tacit.finetune import in_place
from tacit.gradients import AdaptiveQuantile, ClippedSum, Engine, Policy, count_rows, leaves

_STATISTICS = "batch statistics"
_BOUNDS = (1e-12, 1e12)  # an adaptive clip stays a number, even where nothing is left to learn


class Clipped(Step):
    """The sum over units of their clipped gradients, divided by the batch size; with a stream, noise is added to it.

    Formal guarantee (with a stream): the loss of a row, its weight and its filters are computed from that row and from
    released values alone, so one unit moves the sum by at most the clip, and the stream's noise makes the sum private.
    Rows that take no part (not finite, beyond their unit's contributions, or such that model or loss raise) add exactly
    zero in their place: shapes and order of the float64 sum are the same with and without them. The denominator is the
    declared batch size. What comes after (anchor, momentum, perturbation) reads released values.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        form: Clip | DP,
        batch_size: int,
        stream: NoisyStream | None,
        microbatch: int | None,
        curator: Curator | None,
        monitor: Monitor | None = None,
        watch: Watch | None = None,
        team: Team | None = None,
    ) -> None:
        super().__init__(shared)
        self.team = team
        self.monitor, self.watch = monitor, watch
        self.form = form
        self.batch_size = batch_size
        self.stream = stream
        self.curator = curator
        # of the budget, for what rides on the release beside the gradient
        self.shares: dict[str, float] = {} if monitor is None else dict(monitor.shares)
        self._engine = Engine(shared.model, self._loss, clip=form.clip, microbatch=microbatch)

    @property
    def filters(self) -> tuple[Filter, ...]:
        if isinstance(self.form, Clip):
            return self.method.filters
        if self.form.filters != "per-sample":
            return ()
        return self.method.filters if self.memory.mean_probs is not None else self.method.private_filters

    @property
    def clip(self) -> float | Policy:
        """The policy of this step: an adaptive one at the bound that it has moved to."""
        policy = self.form.clip
        if isinstance(policy, AdaptiveQuantile) and self.memory.bound is not None:
            return replace(policy, bound=self.memory.bound)
        return policy

    def check(self, images: Any) -> None:
        """Try model and loss on synthetic rows of this shape: what cannot be private is refused before any charge."""
        super().check(images)
        shuffled = None if self.method.patches is None else self.over_classes(self.predict(images)).softmax(1)
        self._engine.validate(_marked(self._batch(images, shuffled, None), filtered=False))

    def __call__(self, rows: Rows, taking: Tensor | None = None, *, step: int = 0) -> tuple[Tensor, Gradient | None]:
        if self.statistics is not None and self.kind == "batch":
            self.statistics.take_batch(lambda: self.see(self.model, rows.images))
        logits, total = self._pass(rows, None if taking is None else ~taking)
        report_event(self.curator, StepEvent("adapt", step, total))
        return logits, self._mean(total, len(rows))

    def _pass(self, rows: Rows, mute: Tensor | None) -> tuple[Tensor, ClippedSum]:
        """The predictions of some rows and the sum of their clipped gradients. Nothing is released.

        Muted rows keep their place, so nobody else's prediction or gradient depends on who takes part.
        """
        images, units = rows.images, _apart(rows.units, mute)
        mute = None if mute is None else mute.to(rows.device)
        shuffled = self.shuffled(rows)
        ascent, kept, before = self._ascent(images, shuffled, units, mute)
        with self.sam_perturbation(ascent):
            total, logits = self._sum(self._batch(images, shuffled, kept), units, mute)
        if isinstance(self.form, Clip):
            taken = self._taken(logits, shuffled, kept)
            if mute is not None:
                taken = taken & ~mute.repeat_interleave(len(taken) // max(1, len(mute)))
            self.memory.note(self.method, self.view(logits, shuffled), taken)
        return logits if before is None else before, total

    def _ascent(
        self, images: Any, shuffled: Tensor | None, units: Tensor | None, mute: Tensor | None
    ) -> tuple[Gradient | None, Tensor | None, Tensor | None]:
        """Where to climb (SAR), which rows passed the first time, and the predictions if the pass cannot give them."""
        if self.method.sharpness is None:
            return None, None, None
        if isinstance(self.form, DP):  # along the last release: this batch is not asked
            return self.memory.last, None, None if self.memory.last is None else self.predict(images)
        if self.form.ascent:
            total, before = self._sum(self._batch(images, shuffled, None), units, mute)
            return total.sum, Seen(before).rows_kept(self._taken(before, shuffled, None)).float(), before
        with torch.enable_grad():
            seen = self.see(self.model, images)
            logits = seen.logits
            view = self.view(logits, shuffled)
            kept = seen.rows_kept(self.method.keep(view))
            losses = seen.per_row(self.method.weighted(view))[kept if mute is None else kept & ~mute]
        found = torch.autograd.grad(losses.sum(), list(self.parameters.values()))
        return dict(zip(self.parameters, found, strict=True)), kept.float(), logits.detach()

    def _sum(self, batch: dict[str, Any], units: Tensor | None, mute: Tensor | None) -> tuple[ClippedSum, Tensor]:
        """The clipped sum and the logits of the same pass; rows on which it raises are blanked in their place."""
        places = torch.arange(count_rows(batch), device=next(leaves(batch)).device)
        owner = places if units is None else units.to(places.device)
        rows, compute = Labelled(batch, places, owner), partial(self._together, units is None)
        if self.team is None:
            return in_place(compute, rows, mute)
        return sum_over_ranks(
            self.team,
            partial(in_place, compute),
            rows,
            mute,
            self._engine.zero_sum(self.clip),
            batch_size=self.batch_size,
            everyone=self.stream is None,
        )

    def _together(self, alone: bool, rows: Labelled, mute: Tensor | None) -> tuple[ClippedSum, Tensor]:
        batch: dict[str, Any] = rows.inputs
        owner = None if alone else rows.owner
        total = self._engine(_marked(batch, filtered=True), unit_ids=owner, clip=self.clip, mute=mute)
        found = total.private.outputs
        if found is None or not bool(found.known.all()):  # the engine took some rows, or all, one by one
            again = self._observe(batch["images"])
            values = again if found is None else torch.where(_beside(found.known, again), found.values, again)
        else:
            values = found.values
        logits, sides = values, {}
        if self._moments is not None:
            width = values.shape[1] - self._moments.width
            logits = values[:, :width].reshape(len(values), *self._tail)
            sides[_STATISTICS] = (values[:, width:], self._moments.bound)
        if self.monitor is not None:
            for name, (each, bound) in watched_rows(self.over_classes(logits).flatten(0, -2)).items():
                sides[name] = (each.reshape(len(logits), -1, each.shape[1]).mean(1), bound)
        totals = {name: (bounded_total(each, bound, owner, mute), bound) for name, (each, bound) in sides.items()}
        return joined(total, totals), logits

    @property
    def _moments(self) -> BatchStatistics | None:
        """What is released of BatchNorm layers, if it is."""
        return self.statistics if self.kind == "private" else None

    def _observe(self, images: Any) -> Tensor:
        """What `_loss` gives out beside the losses, without them; of rows on which the model raises, that of blanks."""
        places = torch.arange(count_rows(images), device=next(leaves(images)).device)
        with torch.no_grad():
            return in_place(
                lambda rows, _: self._seen(self.model, rows.inputs)[1], Labelled(images, places, places), None
            )

    def _seen(self, model: nn.Module, images: Any) -> tuple[Seen, Tensor]:
        """What the model says, and what of each row is given out: logits, and what is released beside the gradient."""
        if self._moments is None:
            seen = self.see(model, images)
            return seen, seen.logits
        with self._moments.watched() as noted:
            seen = self.see(model, images)
        self._tail = seen.logits.shape[1:]
        flat = seen.logits.detach().flatten(1)
        return seen, torch.cat([flat, noted[0].to(flat.dtype)], 1)

    def _loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of each row, and its logits (with what else is given out beside them).

        Filters apply to rows that are marked, which those are not on which the engine checks the model: a zero loss
        would hide what is wrong.
        """
        seen, outputs = self._seen(model, batch["images"])
        logits, shuffled, kept = seen.logits, batch.get("shuffled"), batch.get("kept")
        losses = self.method.weighted(self.view(logits, shuffled))
        passed = self._passed(logits.detach(), shuffled, kept)
        if passed is not None:
            apply = batch["filtered"].repeat_interleave(len(losses) // max(1, len(batch["filtered"])))
            losses = losses * (passed | ~apply).to(losses.dtype)
        losses = seen.per_row(losses)
        return losses if kept is None else losses * kept, outputs

    def _passed(self, logits: Tensor, shuffled: Tensor | None, kept: Tensor | None) -> Tensor | None:
        """Which rows pass the filters (after a perturbation only the one that is asked again); None: all."""
        filters = self.filters if kept is None else self.method.second_filters
        return self.method.keep(self.view(logits, shuffled), filters) if filters else None

    def _taken(self, logits: Tensor, shuffled: Tensor | None, kept: Tensor | None) -> Tensor:
        """Which rows contributed."""
        everyone = torch.ones(logits.shape[:-1].numel(), dtype=torch.bool, device=logits.device)
        if kept is not None:
            everyone = (kept > 0).repeat_interleave(len(everyone) // max(1, len(kept)))
        passed = self._passed(logits, shuffled, kept)
        return everyone if passed is None else everyone & passed

    def _mean(self, total: ClippedSum, rows: int) -> Gradient:
        policy, deviations = self.clip, dict.fromkeys(self.shares, 0.0)
        if self.stream is None:
            released = dict(total.sum)
        else:
            released = dict(self.stream.release(total, policy, *([self.shares] if self.shares else [])))
            deviations = self.stream.deviations(total.bounds, self.shares)
        if self._moments is not None:
            part, deviation = rows / self.batch_size, deviations.get(_STATISTICS, 0.0)
            self._moments.mix(released.pop(_STATISTICS), part, self.batch_size, deviation)
        if self.monitor is not None and self.watch is not None:
            seen = {name: released.pop(name) for name in (ENTROPY, PREDICTION)}
            self.watch.take(seen, deviations, rows, self.monitor)
            self._remember(self.watch)
        if isinstance(policy, AdaptiveQuantile):
            bound = policy.updated(float(released.pop("count")), units=self.batch_size).bound
            self.memory.bound = min(max(bound, _BOUNDS[0]), _BOUNDS[1])
        mean = dict(zip(released, torch._foreach_div(list(released.values()), self.batch_size), strict=True))
        if self.method.sharpness is not None and isinstance(self.form, DP):
            self.memory.last = mean
        return mean

    def _remember(self, watch: Watch) -> None:
        """What SAR's reset and EATA's second filter go by in the private form: released values, noise included."""
        if not isinstance(self.form, DP):
            return
        if self.method.recovery is not None and watch.prediction is not None:
            unsure = watch.entropy[-1] + 2 * watch.entropy_noise[-1]
            self.memory.ema_entropy = unsure * math.log(len(watch.prediction))
        alike = [each for each in self.method.filters if isinstance(each, RedundancyFilter)]
        if alike and self.form.filters == "per-sample" and watch.prediction is not None:
            usual = watch.usual(min(each.threshold(len(watch.prediction)) for each in alike))
            device = next(iter(self.parameters.values())).device
            self.memory.mean_probs = None if usual is None else usual.float().to(device)

    @staticmethod
    def _batch(images: Any, shuffled: Tensor | None, kept: Tensor | None) -> dict[str, Any]:
        parts = {"images": images, "shuffled": shuffled, "kept": kept}
        return {name: part for name, part in parts.items() if part is not None}


def _marked(batch: dict[str, Any], *, filtered: bool) -> dict[str, Any]:
    """The batch with a mark on every row, whether the method's filters apply to it."""
    device = next(leaves(batch)).device
    return {**batch, "filtered": torch.full((count_rows(batch),), filtered, dtype=torch.bool, device=device)}


def _beside(rows: Tensor, values: Tensor) -> Tensor:
    """One value per row in the shape that broadcasts to all that a row has."""
    return rows.view(-1, *[1] * (values.dim() - 1))


def _apart(units: Tensor | None, mute: Tensor | None) -> Tensor | None:
    """Labels under which the muted rows of a unit are a unit of their own, right behind it.

    So the unit is the mean over its other rows, and the order of everybody stays.
    """
    if units is None or mute is None:
        return units
    rank: Tensor = torch.unique(units, return_inverse=True)[1]
    return 2 * rank + mute.to(rank)
