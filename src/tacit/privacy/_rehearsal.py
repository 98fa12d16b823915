"""A receipt for a dry run: code that releases is tried out before anything is charged."""

from __future__ import annotations

import uuid

from tacit.privacy._budget import Neighbours, Unit
from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipts import Receipt
from tacit.privacy.events import DpEvent


def rehearsal(event: DpEvent, *, unit: Unit, neighbours: Neighbours) -> Receipt:
    """A receipt that no ledger has: releases on it are made as on a real one, and are noise alone.

    Formal guarantee: every mechanism puts zero in the place of the sum, so that what it returns does not depend on any
    row, and nothing has to be paid. Kinds, numbers and bounds of releases are checked as on a real receipt. What the
    code does with rows beside its releases is not covered, here or there.

    Args:
        event: What the code says that it will release.
        unit: The privacy unit.
        neighbours: The neighbouring relation.

    Returns:
        A live receipt.
    """
    receipt = Receipt(
        id=f"rehearsal-{uuid.uuid4().hex}",
        subject="rehearsal",
        event=event,
        stage="rehearsal",
        note="nothing is charged, and releases are noise alone",
        neighbours=neighbours,
        unit=unit,
        mode="rehearsal",
        head="",
    ).issued(NoiseKey())
    receipt._state.rehearsal = True
    return receipt
