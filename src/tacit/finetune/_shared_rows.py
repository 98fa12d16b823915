"""Rows on their way from a worker: in shared memory that is used again, for new memory costs more than a copy.

A megabyte of new shared memory is 256 page faults, about a millisecond; for decoded images that is a fifth of the time
in which they are decoded. So a worker writes to blocks that the run has done with; if there is none, it makes one.
"""

from __future__ import annotations

import io
import pickle
import weakref
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # blocks go through shared memory
from torch import Tensor

_LINE = 64  # bytes: where each tensor begins in a block


class Parcel(NamedTuple):
    """A result without its tensors, where these lie, and the block itself when it is new."""

    pickled: bytes
    places: list[tuple[int, torch.dtype, torch.Size]]
    number: int
    block: Tensor | None


class Outbox:
    """A worker's blocks."""

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}

    def pack(self, result: Any, number: int) -> Parcel:
        """Write the tensors of a result to the block of this number."""
        text = io.BytesIO()
        pickler = _Pickler(text, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dump(result)
        places, size = [], 0
        for tensor in pickler.tensors:
            places.append((size, tensor.dtype, tensor.shape))
            size += -(-tensor.nbytes // _LINE) * _LINE
        block = self._blocks.get(number)
        new = block is None or size > len(block)
        if block is None or new:
            block = self._blocks[number] = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, pickler.tensors, strict=True):
            _in_block(block, *place).copy_(tensor)
        return Parcel(text.getvalue(), places, number, block if new else None)


class Inbox:
    """The run's end of an `Outbox`: it says which block may be written to.

    A result's tensors lie in its block, and each block is handed out as an array of its own: while a tensor that was
    made of it is alive, or a view of one, so is the array, and the block is not written to.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}
        self._handed_out: dict[int, weakref.ref[Any] | None] = {}  # None: the worker may write to it now

    def free(self) -> int:
        """The number of a block that no result is in; it counts as taken from here on."""
        handed_out = self._handed_out.items()
        free = (number for number, array in handed_out if array is not None and array() is None)
        number = next(free, len(handed_out))
        self._handed_out[number] = None
        return number

    def unpack(self, parcel: Parcel) -> Any:
        """The result."""
        if parcel.block is not None:
            self._blocks[parcel.number] = parcel.block
        array = self._blocks[parcel.number].numpy()  # a new array at every call
        self._handed_out[parcel.number] = weakref.ref(array)
        block = torch.from_numpy(array)
        return _Unpickler(parcel.pickled, [_in_block(block, *place) for place in parcel.places]).load()


def _in_block(block: Tensor, start: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    size = shape.numel() * dtype.itemsize
    return block[start : start + size].view(dtype).view(shape)


class _Pickler(pickle.Pickler):
    """Leaves plain tensors out, in `tensors`."""

    def __init__(self, file: io.BytesIO, **how: Any) -> None:
        super().__init__(file, **how)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
        if not plain or value.requires_grad or value.is_quantized or not value.numel():
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]
