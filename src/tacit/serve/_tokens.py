"""Who may ask the ledger's service for what: tokens with a role, of which the database keeps the hashes.

A token is 256 random bits, so that its plain SHA-256 can be kept: there is nothing to guess. It is shown once, when it
is made. A role includes the ones before it: ``read`` looks, ``charge`` also spends on its subject, ``admin`` also
declares subjects and makes tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from tacit.privacy import DatabaseBook

metadata = sa.MetaData()
table = sa.Table(
    "tacit_tokens",
    metadata,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("role", sa.String(10), nullable=False),
    sa.Column("subject", sa.String(200)),  # none: every subject
    sa.Column("expires", sa.String(40), nullable=False),
    sa.Column("revoked", sa.Boolean, nullable=False),
    sa.Column("note", sa.String(200), nullable=False),
)
charged_by = sa.Table(
    "tacit_charged_by",
    metadata,
    sa.Column("receipt", sa.String(64), primary_key=True),
    sa.Column("token", sa.String(16), nullable=False),
)
PREFIX = "tacit_"


class Role(IntEnum):
    """What a token may do; a higher one may do all that a lower one may."""

    READ = 1
    CHARGE = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> Role:
        try:
            return cls[name.upper()]
        except KeyError:
            raise ValueError(f"A role is read, charge or admin, not {name!r}.") from None


@dataclass(frozen=True, kw_only=True)
class Token:
    """What is known of a token, without the token itself.

    Args:
        id: Its name, by which it is revoked.
        role: What it may do.
        subject: The one subject that it is for; None: all.
        expires: When it ends.
        revoked: Whether it was ended before.
        note: What it is for.
    """

    id: str
    role: Role
    subject: str | None
    expires: datetime
    revoked: bool = False
    note: str = ""

    @property
    def valid(self) -> bool:
        return not self.revoked and datetime.now(UTC) < self.expires

    def to_json(self) -> dict[str, Any]:
        """What is known of it, as plain data."""
        return {
            "id": self.id,
            "role": self.role.name.lower(),
            "subject": self.subject,
            "expires": self.expires.isoformat(),
            "valid": self.valid,
            "note": self.note,
        }

    def may(self, role: Role, subject: str | None = None) -> bool:
        """Whether it may act in this role (on one subject, or with None on all of them)."""
        return self.role >= role and self.subject in (None, subject)


class Tokens:
    """The tokens of a ledger, in its own database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        metadata.create_all(engine)

    def create(
        self, role: Role, *, subject: str | None = None, days: float = 90.0, note: str = ""
    ) -> tuple[str, Token]:
        """A new token, which is shown here and never again, and what is kept of it."""
        if not 0 < days <= 3660:
            raise ValueError(f"A token lasts more than 0 and at most 3660 days; got {days:g}.")
        if role is Role.ADMIN and subject is not None:
            raise ValueError("An admin's token is for the whole ledger: leave the subject out.")
        secret = PREFIX + secrets.token_urlsafe(32)
        known = Token(
            id=secrets.token_hex(4),
            role=role,
            subject=subject,
            expires=datetime.now(UTC) + timedelta(days=days),
            note=note[:200],
        )
        with self._engine.begin() as connection:
            connection.execute(
                sa.insert(table).values(
                    id=known.id,
                    hash=_hash(secret),
                    role=role.name.lower(),
                    subject=subject,
                    expires=known.expires.isoformat(),
                    revoked=False,
                    note=known.note,
                )
            )
        return secret, known

    def find(self, secret: str) -> Token | None:
        """The valid token that this is."""
        with self._engine.begin() as connection:
            row = connection.execute(sa.select(table).where(table.c.hash == _hash(secret))).one_or_none()
        known = None if row is None else _token(row)
        return known if known is not None and known.valid else None

    def all(self) -> list[Token]:
        with self._engine.begin() as connection:
            return [_token(row) for row in connection.execute(sa.select(table).order_by(table.c.expires))]

    def revoke(self, token_id: str) -> bool:
        """End a token; whether there was one of this name."""
        with self._engine.begin() as connection:
            done = connection.execute(sa.update(table).where(table.c.id == token_id).values(revoked=True))
        return done.rowcount > 0

    def claim(self, receipt: str, token_id: str) -> None:
        """Note which token asked for a charge first; before the charge, so that there is none without it."""
        with contextlib.suppress(sa.exc.IntegrityError), self._engine.begin() as connection:
            connection.execute(sa.insert(charged_by).values(receipt=receipt, token=token_id))

    def claimed(self, receipt: str, token_id: str) -> bool:
        """Whether this token asked for that charge."""
        with self._engine.begin() as connection:
            made = connection.execute(sa.select(charged_by.c.token).where(charged_by.c.receipt == receipt)).scalar()
        return made == token_id


def _token(row: sa.Row[tuple[object, ...]]) -> Token:
    return Token(
        id=row.id,
        role=Role.named(row.role),
        subject=row.subject,
        expires=datetime.fromisoformat(row.expires),
        revoked=bool(row.revoked),
        note=row.note,
    )


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def tokens_of(url: str) -> Tokens:
    """The tokens of the ledger in this database."""
    return Tokens(DatabaseBook(url if "://" in url else f"sqlite:///{url}", create=True).engine)
