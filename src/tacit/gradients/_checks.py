"""What an engine checks before its sums: on synthetic rows, whose integers are public ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tacit._refusals import ENDING
from tacit.gradients import _validation as learning
from tacit.gradients._batches import count_rows, leaves, row_shapes, rows_of
from tacit.gradients._fallback import raising_rows
from tacit.gradients._isolation import Loss, RowsMixed, undisturbed, with_outputs
from tacit.gradients._numbers import plain_numbers
from tacit.gradients._parameter_swap import ParameterSwap
from tacit.gradients._recorder import Plan, Recorder
from tacit.gradients._rounding import warn_unless_alike
from tacit.gradients._synthetic import Domains, fits, integers_of, several, varies, with_integers
from tacit.gradients._units import Units

KEPT = 512 * 2**20  # bytes of activations and output gradients that one pass keeps on a CPU


class Checks(ABC):
    """The plan of an engine: how each parameter's gradients are found, and what has been checked of that."""

    def __init__(self, model: nn.Module, per_sample_loss: Loss, microbatch: int | None) -> None:
        self.model = model
        self.per_sample_loss = per_sample_loss
        self.microbatch = microbatch
        self._slots = ParameterSwap(model)
        self._plan = learning.blank_plan(model)
        self._plans: dict[Any, Plan] = {}
        self._domains: Domains | None = None  # the integers that checks draw from; None: no rows were seen yet
        self._narrow: set[Any] = set()  # where other integers than the given ones were tried, and are of no use
        warn_unless_alike()

    @abstractmethod
    def _watch(self, batch: Any, units: Units) -> tuple[Recorder, Tensor]:
        """One forward and one backward under watch."""

    def _loss(self, batch: Any) -> Tensor:
        with torch.enable_grad():
            return with_outputs(self.per_sample_loss(self.model, batch))[0]

    def _check(self, batch: Any, domains: Domains, rows: int | None = None) -> None:
        """`validate` for rows of this shape, with integers from these domains."""
        circumstances, like = self._circumstances(batch, domains), partial(with_integers, batch, domains)
        if circumstances not in self._plans:
            self._plans[circumstances] = learning.blank_plan(self.model, self._plan)
        self._plan = plan = self._plans[circumstances]
        known = (plan, self.model, self.per_sample_loss, self._slots)
        if plan.learning:
            learning.validate(*known, like(), self._watch)
        numbers = hash(plain_numbers(self.model, self.per_sample_loss))
        if numbers not in plan.numbers:
            plan.numbers.add(numbers)
            if len(plan.numbers).bit_count() == 1:  # a counter changes at every step: look again ever more rarely
                plan.checked.clear()
                plan.largest = 0.0
        shapes = row_shapes(batch)
        if shapes not in plan.checked and not plan.by_row:
            few = min(learning.FEWEST, max(3, count_rows(batch)))
            learning.check_again(*known, like(), few, self._watch)
            plan.checked[shapes] = few
        together = min(max(rows or 0, count_rows(batch)), self._rows_at_once(batch, rows))
        size = together * sum(t[0:1].numel() for t in leaves(batch))
        if self._fast(batch) and together > plan.checked[shapes] and size > plan.largest:
            learning.check_again(*known, like(), together, self._watch)
            plan.checked[shapes], plan.largest = together, size

    def _fast(self, batch: Any) -> bool:
        """Whether rows of this shape go together."""
        return not self._plan.by_row and self._plan.folds.get(row_shapes(batch)) is not None

    def _rows_at_once(self, batch: Any, rows: int | None = None) -> int:
        """As the user says; else on a CPU so many that what is kept stays near the caches, which is faster as well."""
        if self.microbatch is not None:
            return self.microbatch
        rows = max(rows or 0, count_rows(batch))
        kept = self._plan.kept.get(row_shapes(batch), 0)
        if kept == 0 or next(iter(self._slots.parameters.values())).device.type != "cpu":
            return rows
        return math.ceil(rows / max(math.ceil(rows * kept / KEPT), 1))

    def _circumstances(self, batch: Any, domains: Domains) -> tuple[Any, ...]:
        """What a plan holds for: modes of modules, autocast, and of which integers there are several. All is public."""
        kind = next(iter(self._slots.parameters.values())).device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return self._slots.modes(self.model), cast, several(domains), len(list(leaves(batch)))

    def _validate_private(self, batch: Any, grouped: Units) -> None:
        """Check what is new about a private batch, of which the integers decide nothing but that a run stops.

        Shapes, modes of modules, autocast and numbers may change the path; what is drawn for that comes from public
        integers. If the path is not right for integers that vary where the public ones do not, it stays: units for
        which it raises are set aside one by one in the pass. If it is wrong without raising, or rows are mixed, the run
        stops, with a fixed sentence. No warning is given. If rows go together for no integers that are public, they
        go one by one. If no integers are known, those of this batch stand for all later ones.
        """
        domains = self._domains
        if domains is None or not fits(domains, batch):
            self._plan.quiet = self._plan.quiet or domains is not None
            self._domains = self._validate_without_odd(batch, grouped)
            return
        self._plan.quiet = True
        self._check(batch, domains)
        if self._fast(batch):
            self._check_integers(batch, domains)

    def _check_integers(self, batch: Any, domains: Domains) -> None:
        """Once for integers that vary where those of the checks did not; see `_validate_private`."""
        known = several(domains)
        if all(known):
            return
        vary = tuple(varies(t) for t in leaves(batch))
        news = row_shapes(batch), vary
        if news in self._plan.looked or not any(here and not seen for here, seen in zip(vary, known, strict=True)):
            return
        self._plan.looked.add(news)
        if learning.misleads(self._plan, self.model, self.per_sample_loss, self._slots, batch, self._watch):
            raise RowsMixed(
                "For integers that occur now the model or the loss computes in another way, which the fast path would "
                "get wrong. Check the engine with all of them beforehand: `engine.validate(batch)` on public rows."
            )

    def _validate_without_odd(self, batch: Any, grouped: Units) -> Domains:
        """Check by the integers of this batch, but one that the model cannot take (an unknown word) concerns its unit.

        Synthetic integers are drawn from those that occur, so one odd row could make every check raise, and with it a
        step that was charged. Units that raise alone are left out of the check; in the sum they contribute zero.
        """
        try:
            self._check(batch, found := integers_of(batch))
            return found
        except ENDING:
            raise
        except BaseException:
            with undisturbed(self.model):
                raising = raising_rows(self._loss, batch, grouped)
            if not bool(raising.any()) or bool(raising.all()):
                raise
            places = torch.arange(len(raising), device=raising.device)
            kept = torch.where(raising, places[~raising][0], places)
        kept_rows = rows_of(batch, kept, grouped.rows)
        self._check(kept_rows, found := integers_of(kept_rows))
        return found
