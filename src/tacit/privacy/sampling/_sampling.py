"""Private sampling: who takes part in a release, drawn as the release was charged; and what a model draws itself.

The rate is read off the receipt, so that the sampler and the accountant cannot disagree. Which units are drawn is
secret (that is what amplification rests on): the draw comes from the receipt's key, never from torch or numpy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tacit.privacy import _generators as generators
from tacit.privacy._receipts import Receipt, upcoming

_DRAW, _UNIFORMS = 1, 2  # purposes of uniforms
randomness, fresh_randomness = generators.randomness, generators.fresh_randomness
reading_randomness, restored_generators = generators.reading_randomness, generators.restored_generators


def draw(receipt: Receipt, people: int, *, ahead: int = 0) -> Tensor:
    """The subsample of the units 0 to ``people`` - 1 for the receipt's next release, in ascending order.

    Formal guarantee: a Poisson subsample has each unit with at most the charged probability (a uniform of 53 bits is
    compared with it), independently of all others and of every other release. A sample of fixed size has the charged
    number of units, every set of them with the same probability but for 2^-107 ``people``^2 in total variation (those
    with the smallest of 106-bit uniforms; a tie goes to the unit that comes first), independently of every other
    release. Bins are drawn once, with the key and not with a release: each unit is in one, every bin with probability
    1/bins up to 2^-52, independently of all others, and in the same one in every round. Asking again before the release
    gives the same units. The draw binds the receipt: its next release is the one whose sampling was used, and any other
    kind is refused.

    Args:
        receipt: A live receipt.
        people: How many units there are. Private, but for a sample of fixed size, where it is what was charged.
        ahead: Look at the draw of the release that comes so many after the next one, to read its rows in time; it
            binds nothing, and is drawn again when that release is the next.

    Returns:
        The numbers of the drawn units. Private.

    Raises:
        ReceiptError: The receipt is used up, or paid for a sample of another number of units.
    """
    slot, number, key = upcoming(receipt, draws_from=people, ahead=ahead)
    if slot.rate == 1:
        return torch.arange(people)
    if slot.thrown:
        run, step = divmod(slot.made, slot.thrown.steps)
        thrown = key.derived("bins", slot.place).uniforms(run, people, _DRAW)
        bin_of_unit = (thrown * slot.thrown.bins).ceil_().sub_(1)
        return torch.nonzero(bin_of_unit == step % slot.thrown.bins).flatten()
    if slot.fixed:
        high, low = key.uniforms(number, 2 * people, _DRAW).view(2, people).numpy()
        return torch.from_numpy(np.sort(np.lexsort((low, high))[: slot.fixed[0]]))
    return torch.nonzero(key.uniforms(number, people, _DRAW) <= slot.rate).flatten()


def uniforms(receipt: Receipt, units: int, each: int, *, ahead: int = 0) -> Tensor:
    """``each`` random numbers in (0, 1] for every drawn unit of the next release: which clips, which views.

    They are independent of the draw and of the noise, and alike for everybody: which rows a unit shows is as likely
    whoever else was drawn, so one unit more or less changes a sum by what that unit adds.

    Args:
        receipt: A live receipt.
        units: How many units were drawn.
        each: How many numbers each of them needs.
        ahead: As in ``draw``.

    Returns:
        Units x ``each``. Private.
    """
    _, number, key = upcoming(receipt, ahead=ahead)
    return key.uniforms(number, units * each, _UNIFORMS).view(units, each)


def model_key(receipt: Receipt, portion: int) -> str:
    """A secret for ``reading_randomness``: what a model draws itself while a portion of the next release is computed.

    ``randomness`` draws on from portion to portion; where portions are computed in several processes, each has its own.

    Args:
        receipt: A live receipt.
        portion: Its place among the portions of the release.

    Returns:
        256 bits in hexadecimal. Private.
    """
    _, number, key = upcoming(receipt)
    return key.derived("model", number).derived("portion", portion).secret()


def reading_key(receipt: Receipt, portion: int, *, ahead: int = 0) -> str:
    """A secret for ``reading_randomness``, of one portion of the next release's rows; see there.

    Args:
        receipt: A live receipt.
        portion: Its place among the portions of the release.
        ahead: As in ``draw``.

    Returns:
        256 bits in hexadecimal. Private: to be handed to who reads the rows, and to no file.
    """
    _, number, key = upcoming(receipt, ahead=ahead)
    return key.derived("rows", number).derived("portion", portion).secret()
