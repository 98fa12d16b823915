"""What several ranks of one run have to agree on before it is charged, and who charges it: the leader alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tacit import _checkpoints as checkpoints
from tacit.distributed import Team
from tacit.finetune._account import Account, Promise, no_account, open_account
from tacit.finetune._optimizers import Optimizer
from tacit.finetune._queries import GradientQuery
from tacit.gradients import ClippedSum
from tacit.privacy import Ledger
from tacit.privacy.events import DpEvent


def check_ranks(ranks: Team, body: nn.Module, query: GradientQuery, settings: str) -> None:
    """Refuse, before anything is charged, what several ranks cannot share, and ranks that are not alike."""
    if not isinstance(query.zero_sum(), ClippedSum):
        raise ValueError("This optimiser asks for more than clipped sums of gradients: run it in one process.")
    start = {name: p.detach() for name, p in body.named_parameters()} | dict(body.named_buffers())
    ranks.check_same(checkpoints.digest(start, f"{settings} {checkpoints.precision()}"))


def account_for(
    ranks: Team | None,
    optimizer: Optimizer,
    promise: Promise,
    ledger: Ledger | None,
    subject: str | None,
    *,
    others: Sequence[DpEvent] = (),
    seed: int | None = None,
) -> Account:
    """Who pays: of several ranks only the leader opens the ledger, and if it is refused, all are."""

    if ranks is None:
        return open_account(optimizer, promise, ledger, subject, others=others, seed=seed)
    found = ranks.alone(lambda: open_account(optimizer, promise, ledger, subject, others=others, seed=seed))
    return found or no_account(optimizer, promise)
