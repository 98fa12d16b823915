"""A release in shards: a model that no process holds alone gets its noise where its parts are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from tacit.privacy import _grids as grids
from tacit.privacy._grids import Grid
from tacit.privacy._queries import BoundedSum
from tacit.privacy._receipts import Receipt, ReceiptError
from tacit.privacy.mechanisms._mechanisms import _bounds, _grids, _joint, _take_gaussian


class GaussianShards:
    """Release a sum with Gaussian noise shard by shard: the same bits as ``gaussian`` of the whole sum.

    The process that holds the receipt makes this and hands every shard's holder the noise of that shard, which it adds
    with ``add_shard``. Noise is private like the sum: whoever has both the noise and the release has the sum.

    Formal guarantee: that of ``gaussian``. One release is consumed here, before any noise is drawn; noise, grid and
    bounds are those of the whole sum, and rounding and adding go coordinate by coordinate, wherever these are.

    Args:
        like: A sum of the same names, shapes and bounds as the one that is released; its values are not read.
        receipt: Pays for the release.
        noise: A multiplier per block, as in ``gaussian``.

    Raises:
        ReceiptError: The receipt does not cover this release, or is one for a rehearsal.
    """

    def __init__(self, like: BoundedSum, receipt: Receipt, *, noise: Mapping[str, float] | None = None) -> None:
        bounds = _bounds(like)
        event, self._release, key = _take_gaussian(receipt, _joint(bounds))
        if receipt._state.rehearsal:  # there every mechanism puts zeros in the sum's place, and this one never sees it
            raise ReceiptError("A release in shards cannot be rehearsed: its noise would be added to the true sum.")
        self.grids: dict[str, Grid] = _grids(like, bounds, event.noise_multiplier, noise)
        self._shapes = {name: value.shape for name, value in like.sum.items()}
        self._once = iter([key])  # handed out to one, also of several threads

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor's standard normals in turn. Private, and drawn once: on a second sum they would give it away."""
        key = next(self._once, None)
        if key is None:
            raise ReceiptError("The noise of this release was drawn already: each release has noise of its own.")
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = key.normals_in_parts(self._release, sizes)
        return ((name, part.view(shape)) for (name, shape), part in zip(self._shapes.items(), parts, strict=True))


def add_shard(value: Tensor, noise: Tensor, grid: Grid) -> Tensor:
    """A shard of the sum and its noise, on the grid of the whole.

    Args:
        value: The shard of the sum, float64.
        noise: Its standard normals, from ``GaussianShards``; overwritten.
        grid: The tensor's grid, from ``GaussianShards``.

    Returns:
        The released shard. Public.
    """
    return grids.add(value, noise, grid)
