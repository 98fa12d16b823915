"""What several ranks of one run have to agree on before it is charged, and who charges it: the leader alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tacit import _checkpoints as checkpoints
from tacit._refusals import ENDING
from tacit.data import Records, unit_ids_of
from tacit.distributed import Team
from tacit.finetune._account import Account, Promise, no_account, open_account, paid_account
from tacit.finetune._optimizers import Optimizer
from tacit.finetune._queries import GradientQuery
from tacit.gradients import ClippedSum, leaves
from tacit.privacy import Ledger, Receipt, sampling
from tacit.privacy.events import DpEvent

_LOOKED_AT = 32  # units that are compared row by row


def check_ranks(ranks: Team, body: nn.Module, query: GradientQuery, settings: str, records: Records) -> None:
    """Refuse, before anything is charged, what several ranks cannot share, and ranks that are not alike.

    Formal guarantee: the leader draws numbers of units, and every rank reads some of them. If unit 3 here is unit 7
    there (files listed in another order, another random split), somebody can be in a step twice, which moves its sum by
    two clips. So the data are compared: ids, labels, and the rows of 32 units, which no other order leaves alike.
    """
    if not isinstance(query.zero_sum(), ClippedSum):
        raise ValueError("This optimiser asks for more than clipped sums of gradients: run it in one process.")
    start = {name: p.detach() for name, p in body.named_parameters()} | dict(body.named_buffers())
    ranks.check_same(checkpoints.digest(start, f"{settings} {checkpoints.precision()} {order_of(records)}"))


def order_of(records: Records) -> str:
    """A name for data in their order: all ids and labels, and some units' rows. It goes to the other ranks alone."""
    count, labels = len(records), records.labels()
    found = hashlib.sha256(repr((count, unit_ids_of(records), labels.shape)).encode())
    found.update(_bytes(labels))
    chances = torch.full((1, records.uniforms), 0.5)
    with sampling.reading_randomness("0" * 64):
        for unit in sorted(set(torch.linspace(0, count - 1, min(count, _LOOKED_AT)).long().tolist())):
            try:
                rows = records.rows(torch.tensor([unit]), chances)
                values = b"".join(_bytes(part) for part in (*leaves(rows.inputs), rows.labels))
            except ENDING:
                raise
            except BaseException:  # who cannot be read is dealt with where rows are read
                values = b"unreadable"
            found.update(hashlib.sha256(values).digest())
    return found.hexdigest()


def _bytes(values: Tensor) -> bytes:
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def account_for(
    ranks: Team | None,
    optimizer: Optimizer,
    promise: Promise,
    ledger: Ledger | None,
    subject: str | None,
    *,
    receipt: Receipt | None = None,
    others: Sequence[DpEvent] = (),
    seed: int | None = None,
) -> Account:
    """Who pays: of several ranks only the leader opens the ledger, and if it is refused, all are.

    A receipt that was charged before is the leader's as well: the others have it without its key, as a description.
    """
    if receipt is not None:
        paid = paid_account(optimizer, promise, receipt)
        return paid if ranks is None or ranks.leads else no_account(optimizer, promise)
    if ranks is None:
        return open_account(optimizer, promise, ledger, subject, others=others, seed=seed)
    found = ranks.alone(lambda: open_account(optimizer, promise, ledger, subject, others=others, seed=seed))
    return found or no_account(optimizer, promise)
