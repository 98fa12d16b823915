"""A book as a token may use it: every verb asks for the role that it needs, on the subject that it is about."""

from __future__ import annotations

from typing import Any

from tacit.privacy import Book, Charge, Charged, DatabaseBook, Entry, LedgerDamaged, LedgerError, Subject, Underpriced
from tacit.serve._tokens import Role, Token, Tokens

_DAMAGED = "An entry of the ledger is not what was written: an admin's token is shown which one."


class Forbidden(LedgerError):
    """The token may not do this."""


class ScopedBook(Book):
    """What a token may see and do of a book.

    Formal guarantee: no verb reaches a subject that the token is not for, be it named, meant by a receipt, or listed.
    Only the token that asked for a charge settles it: what one client may still release on, no other gets refunded.
    Nor does another one lease or adopt it before the chain names a holder: until then who charged may release all of it
    without a word, and two would release what one has paid for.
    """

    def __init__(self, book: DatabaseBook, token: Token, tokens: Tokens) -> None:
        self._book, self._token, self._tokens = book, token, tokens
        self.url, self.only = "this service", token.subject

    @property
    def durable(self) -> bool:
        return self._book.durable

    def close(self) -> None:
        """Nothing to close: the book is the service's."""

    def declare(self, subject: Subject) -> Subject:
        self._allow(Role.ADMIN)
        return self._book.declare(subject)

    def find(self, name: str) -> Subject | None:
        return self._book.find(name) if self._sees(name) else None

    def subjects(self) -> list[Subject]:
        self._allow(Role.READ, self.only)
        return [each for each in self._book.subjects() if self._sees(each.name)]

    def standing(self, name: str) -> Subject:
        self._allow(Role.READ, name)
        return self._book.standing(name)

    def charge(self, name: str, asked: Charge) -> Charged:
        self._allow(Role.CHARGE, name)
        if not self._is_charged(asked.receipt):
            self._tokens.claim(asked.receipt, self._token.id)
        return self._book.charge(name, asked)

    def settle(self, receipt: str, holder: str | None, used: int, kept: dict[str, Any]) -> None:
        self._allow(Role.CHARGE, self._subject_of(receipt))
        if not self._tokens.claimed(receipt, self._token.id):
            raise Forbidden(f"Receipt {receipt[:8]} was charged with another token: its charge stays spent.")
        self._book.settle(receipt, holder, used, kept)

    def charged(self, receipt: str) -> Charged:
        self._allow(Role.READ, self._subject_of(receipt))
        return self._book.charged(receipt)

    def made_before(self, receipt: str) -> int:
        self._allow(Role.READ, self._subject_of(receipt))
        return self._book.made_before(receipt)

    def held(self, receipt: str) -> tuple[str, dict[str, Any]] | None:
        self._allow(Role.CHARGE, self._subject_of(receipt))  # a holder's name is what settles
        return self._book.held(receipt)

    def give(self, receipt: str, holder: str, kind: str, upto: int | None, facts: dict[str, Any]) -> int:
        self._allow_holding(receipt)
        return self._book.give(receipt, holder, kind, upto, facts)

    def hand_over(self, receipt: str, holder: str, how: str, proof: str, used: int) -> tuple[int, bool]:
        self._allow_holding(receipt)
        return self._book.hand_over(receipt, holder, how, proof, used)

    def entries(self, subject: str | None, after: int = 0, most: int | None = None) -> list[Entry]:
        subject = self.only if subject is None else subject
        self._allow(Role.READ, subject)
        return self._book.entries(subject, after, most)

    def head(self) -> str:
        return self._book.head()

    def verify(self, head: str | None) -> tuple[int, list[Underpriced]]:
        try:
            count, low = self._book.verify(head)
        except LedgerDamaged:
            if self.only is None:
                raise
            raise LedgerDamaged(_DAMAGED) from None  # the sentence may name another subject
        return count, [each for each in low if self._sees(each.subject)]

    def _sees(self, subject: str) -> bool:
        return self._token.may(Role.READ, subject)

    def _is_charged(self, receipt: str) -> bool:
        try:
            self._book.charged(receipt)
        except LedgerError:
            return False
        return True

    def _subject_of(self, receipt: str) -> str:
        try:
            return self._book.charged(receipt).subject.name
        except LedgerError:
            if self.only is None:
                raise
            raise Forbidden("This token is not for that receipt.") from None  # whether there is one or not

    def _allow_holding(self, receipt: str) -> None:
        self._allow(Role.CHARGE, self._subject_of(receipt))
        if self._book.held(receipt) is None and not self._tokens.claimed(receipt, self._token.id):
            raise Forbidden(f"Receipt {receipt[:8]} was charged with another token, whose releases it pays for.")

    def _allow(self, role: Role, subject: str | None = None) -> None:
        if not self._token.may(role, subject):
            on = f" on {subject}" if subject else ""
            raise Forbidden(f"This token may not {role.name.lower()}{on}.")
