"""Labelled rows by the unit that they belong to: the form in which private training asks for data.

Records say what their units are (`unit`): a guarantee is for that, and no argument can rename it. A unit is shown as
one or more rows: an image, K views of an image, k clips of a video, the visits of a patient. Which ones is decided by
random numbers that the caller draws ("uniforms"), never by a generator in here: training draws them from a secret key,
so that a step can be replayed and so that no unit's rows depend on other units.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from tacit._deprecation import warn_renamed


class Rows(NamedTuple):
    """Rows of some units: `owner` says for each row the place of its unit among those that were asked for."""

    inputs: Any
    labels: Tensor
    owner: Tensor


@runtime_checkable
class Records(Protocol):
    """Units with labelled rows. `units` is always a one-dimensional integer tensor of unit numbers, 0 to len - 1.

    Records whose rows differ in size, as texts do, may also have `sizes`, a number per unit: units of one size are then
    taken together; such records have `blank(size)` as well, one row that says nothing (by default of the largest size).
    Records of which blank rows would say little may have `synthetic()`: rows to try a model on. Records whose units
    have names of their own have `unit_ids` (an integer or string each). Records made of others say by `scored(units)`
    what is right or wrong about a unit: some units of the others. Records whose rows draw nothing from the global
    generators of torch, numpy and Python, as transforms of other libraries do, may declare `draws = False`, and those
    that show a unit as the same rows in every step `varies = False`. Rows may be asked for in several processes at a
    time, each with a copy of the records. Those of this package have `group_by(ids, unit=...)`, the only way to units
    of another kind; `data.Grouped` does it for any records.
    """

    @property
    def unit(self) -> str:
        """What one unit is: "sample", "video", "patient". All rows that belong to one such thing are in one unit."""

    @property
    def uniforms(self) -> int:
        """How many random numbers in (0, 1] it takes to show one unit once."""

    @property
    def most_rows(self) -> int:
        """The most rows that one unit is ever shown as."""

    @property
    def scored_by(self) -> Literal["row", "unit"]:
        """Whether a prediction is right or wrong for each row, or for the unit over the mean of its rows."""

    def __len__(self) -> int:
        """The number of units."""

    def labels(self) -> Tensor:
        """Every label there is, to be checked before anything is charged."""

    def rows(self, units: Tensor, uniforms: Tensor | None) -> Rows:
        """The rows of these units, in their order.

        `uniforms` has one line per unit (training); None asks for the fixed rows of an evaluation: everything there is,
        unchanged, or clips at even distances.
        """

    def fingerprint(self) -> str:
        """Changes with any value, label or grouping; reveals nothing to anyone without the data."""


def unit_ids_of(records: Records) -> list[int] | list[str] | None:
    """The names of the units, where they have names of their own."""
    found: list[int] | list[str] | None = getattr(records, "unit_ids", None)
    return found


def synthetic_rows(records: Records) -> Rows | None:
    """Rows to try a model on, if the records make some: `synthetic()`, or `made_up()` of records written before 0.3."""
    make = getattr(records, "synthetic", None)
    if make is None and (make := getattr(records, "made_up", None)) is not None:
        warn_renamed(f"{type(records).__name__}.made_up", "synthetic", stacklevel=2)
    found: Rows | None = None if make is None else make()
    return found
