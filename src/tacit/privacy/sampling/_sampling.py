"""Private sampling: who takes part in a release, drawn as the release was charged; and what a model draws itself.

The rate is read off the receipt, so that the sampler and the accountant cannot disagree. Which units are drawn is
secret (that is what amplification rests on): the draw comes from the receipt's key, never from torch or numpy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.privacy import _generators as generators
from tacit.privacy._receipts import Receipt, ReceiptError, upcoming

_DRAW, _UNIFORMS = 1, 2  # purposes of uniforms
randomness, fresh_randomness = generators.randomness, generators.fresh_randomness


def draw(receipt: Receipt, people: int) -> Tensor:
    """The Poisson subsample of the units 0 to ``people`` - 1 for the receipt's next release, in ascending order.

    Formal guarantee: each unit is drawn with at most the charged probability (a uniform of 53 bits is compared with
    it), independently of all others and of every other release; asking again before the release gives the same units.
    The draw binds the receipt: its next release is the one whose rate was used, and any other kind is refused.

    Args:
        receipt: A live receipt whose next release is Poisson-subsampled.
        people: How many units there are. Private.

    Returns:
        The numbers of the drawn units. Private.

    Raises:
        ReceiptError: The next release is not subsampled.
    """
    rate, number, key = upcoming(receipt, bind=True)
    if not 0 < rate <= 1:
        raise ReceiptError("This receipt's sampling is not Poisson sampling: nothing here draws so.")
    if rate == 1:
        return torch.arange(people)
    return torch.nonzero(key.uniforms(number, people, _DRAW) <= rate).flatten()


def uniforms(receipt: Receipt, units: int, each: int) -> Tensor:
    """``each`` random numbers in (0, 1] for every drawn unit of the next release: which clips, which views.

    They are independent of the draw and of the noise, and alike for everybody: which rows a unit shows is as likely
    whoever else was drawn, so one unit more or less changes a sum by what that unit adds.

    Args:
        receipt: A live receipt.
        units: How many units were drawn.
        each: How many numbers each of them needs.

    Returns:
        Units x ``each``. Private.
    """
    _, number, key = upcoming(receipt)
    return key.uniforms(number, units * each, _UNIFORMS).view(units, each)
