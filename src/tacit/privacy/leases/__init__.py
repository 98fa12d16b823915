"""Long streams that outlive a process: releases are leased in blocks, durably, and a stream can be resumed."""

from tacit.privacy._resume import given, held_by, last_word, note, stop_at_start
from tacit.privacy.leases._leases import (
    Secret,
    begin,
    check_holder,
    digest,
    extend,
    resume,
    resume_after_lease,
    save,
    secret_of,
    settled,
)

__all__ = [
    "Secret",
    "begin",
    "check_holder",
    "digest",
    "extend",
    "given",
    "held_by",
    "last_word",
    "note",
    "resume",
    "resume_after_lease",
    "save",
    "secret_of",
    "settled",
    "stop_at_start",
]
