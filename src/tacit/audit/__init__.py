"""Attacks on every promise: lower bounds on epsilon and mu beside what is claimed."""

from tacit.audit import _canaries as canaries
from tacit.audit import _checks as checks
from tacit.audit import _releases as releases
from tacit.audit import _stages as stages
from tacit.audit import _suite as _suite
from tacit.audit._attack import Membership, attack, invert
from tacit.audit._everything import everything
from tacit.audit._exposure import Exposure, exposure
from tacit.audit._findings import CONFIDENCE, Claim, Finding, PromiseBroken, markdown, sentence
from tacit.audit._ledger import ledger
from tacit.audit._mechanism import mechanism
from tacit.audit._recorded import Recorded, recording, releases_of
from tacit.audit._registry import FULL, QUICK, REGISTRY, Audit, Effort, audits, covered
from tacit.audit._run import as_mu, run
from tacit.audit._scores import CanaryScoreAuditor
from tacit.audit._twins import TWINS, Twin

__all__ = [
    "CONFIDENCE",
    "FULL",
    "QUICK",
    "REGISTRY",
    "TWINS",
    "Audit",
    "CanaryScoreAuditor",
    "Claim",
    "Effort",
    "Exposure",
    "Finding",
    "Membership",
    "PromiseBroken",
    "Recorded",
    "Twin",
    "as_mu",
    "attack",
    "audits",
    "canaries",
    "checks",
    "covered",
    "everything",
    "exposure",
    "invert",
    "ledger",
    "markdown",
    "mechanism",
    "recording",
    "releases",
    "releases_of",
    "run",
    "sentence",
    "stages",
]
