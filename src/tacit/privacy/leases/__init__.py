"""Long streams that outlive a process: releases are leased in blocks, durably, and a stream can be resumed."""

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
    "resume",
    "resume_after_lease",
    "save",
    "secret_of",
    "settled",
]
