"""How what a book says crosses a network: plain JSON, and each refusal as the exception that it is.

Terms and states travel as the texts that the chain hashes, so that both sides compute the same fingerprints.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from tacit._json import to_number, to_plain
from tacit.privacy._book import Charged
from tacit.privacy._chain import Entry, LedgerDamaged
from tacit.privacy._decompose import UnsupportedEvent
from tacit.privacy._receipts import ReceiptError
from tacit.privacy._repricing import Underpriced
from tacit.privacy._storage import LedgerError
from tacit.privacy._subject import OtherTerms, Subject
from tacit.privacy._totals import BudgetExceeded, Remaining, check_declared
from tacit.privacy.events import from_json

# The most specific first: what is raised on one side is raised on the other.
REFUSALS: dict[str, type[Exception]] = {
    "budget-exceeded": BudgetExceeded,
    "other-terms": OtherTerms,
    "ledger-damaged": LedgerDamaged,
    "receipt": ReceiptError,
    "ledger": LedgerError,
    "unsupported-event": UnsupportedEvent,
    "invalid": ValueError,
}

_LONGEST_PLAN = 1_000_000


def subject_to_json(subject: Subject) -> dict[str, Any]:
    spent = None if subject.spent is None else str(subject.spent)  # beyond the integers of other languages
    return {
        "name": subject.name,
        "terms": subject.terms_json,
        "state": subject.state_json,
        "spent": spent,
        "repriced": subject.repriced,
    }


def subject_from_json(data: dict[str, Any]) -> Subject:
    known = Subject.read(data["name"], data["terms"], data["state"])
    spent = None if data["spent"] is None else int(data["spent"])
    return replace(known, spent=spent, repriced=data["repriced"])


def subject_declared(name: str, terms: str) -> Subject:
    """A new subject whose terms somebody else has written down.

    Raises:
        ValueError: It could not be declared so.
    """
    try:
        subject = Subject.read(name, terms, "{}")
        if sum(times for _, times in subject.plan) > _LONGEST_PLAN:
            raise ValueError(f"A plan has at most {_LONGEST_PLAN:,} entries.")
        plan = [from_json(json.loads(text)) for text, times in subject.plan for _ in range(times)]
        same = Subject.new(name, subject.terms, plan, subject.disjoint_from).terms_json == terms
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        same = False
    if not same:
        raise ValueError("These are no terms of a subject as tacit writes them.")
    check_declared(subject)
    return subject


def charged_to_json(made: Charged) -> dict[str, Any]:
    return {"subject": subject_to_json(made.subject), "body": json.dumps(made.body), "head": made.head}


def charged_from_json(data: dict[str, Any]) -> Charged:
    return Charged(subject=subject_from_json(data["subject"]), body=json.loads(data["body"]), head=data["head"])


def entry_to_json(entry: Entry) -> dict[str, Any]:
    return asdict(entry) | {"body": json.dumps(entry.body)}


def entry_from_json(data: dict[str, Any]) -> Entry:
    return Entry(**data | {"body": json.loads(data["body"])})


def underpriced_to_json(low: Underpriced) -> dict[str, Any]:
    return dict(to_plain(asdict(low)))


def underpriced_from_json(data: dict[str, Any]) -> Underpriced:
    return Underpriced(**{key: to_number(value) for key, value in data.items()})


def refusal_to_json(error: Exception) -> dict[str, Any]:
    """A refusal of the ledger; its sentences name subjects, receipts and costs, which are public."""
    kind = next(name for name, type_ in REFUSALS.items() if isinstance(error, type_))
    left = getattr(error, "remaining", None)
    return {"refusal": kind, "detail": str(error), "remaining": None if left is None else to_plain(asdict(left))}


def refusal_from_json(data: dict[str, Any]) -> Exception:
    kind, detail, left = REFUSALS.get(data["refusal"], LedgerError), str(data["detail"]), data.get("remaining")
    if kind is not BudgetExceeded:
        return kind(detail)
    return BudgetExceeded(detail, left and Remaining(**{key: to_number(value) for key, value in left.items()}))
