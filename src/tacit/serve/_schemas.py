"""What crosses the ledger's service, as its OpenAPI schema has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=200, description="The subject's name in the ledger.")]
Receipt = Annotated[str, Field(pattern="^[0-9a-f]{32}$", description="A receipt; chosen by whoever charges.")]
Holder = Annotated[str, Field(pattern="^[0-9a-f]{16}$", description="The name of the process that holds a receipt.")]
Count = Annotated[int, Field(ge=0, le=2**53)]


class Strict(BaseModel):
    """An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class NewSubject(Strict):
    """A subject to declare."""

    name: Name
    terms: str = Field(max_length=1_000_000, description="Its terms, as the JSON text that the chain hashes.")


class NewCharge(Strict):
    """A charge. The same receipt again is the same charge: it is made once."""

    subject: Name
    receipt: Receipt
    event: dict[str, Any] = Field(description="What will be released.")
    stage: str = Field(max_length=200)
    note: str = Field("", max_length=2000)
    bound: float | None = Field(None, gt=0)
    seeded: bool = False


class Settlement(Strict):
    """What was released on a receipt: the rest is returned."""

    holder: Holder | None = None
    used: Count
    kept: dict[str, Any] = Field(description="The event that the used releases amount to.")


class Lease(Strict):
    """The holder states that releases up to a number are given away."""

    holder: Holder
    kind: Literal["lease", "saved", "kept"]
    upto: Count | None = None
    facts: dict[Literal["token", "key"], Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(default_factory=dict)


class HandOver(Strict):
    """Another process is to hold a receipt."""

    holder: Holder
    how: Literal["stream", "replay", "adopt"]
    proof: str = Field("", pattern="^([0-9a-f]{64})?$")
    used: Count = 0


class NewToken(Strict):
    """A token to make."""

    role: Literal["read", "charge", "admin"]
    subject: Name | None = None
    days: float = Field(90.0, gt=0, le=3660)
    note: str = Field("", max_length=200)


class SubjectAnswer(BaseModel):
    """A subject as it stands."""

    name: str
    terms: str
    state: str
    spent: str | None
    repriced: int


class SubjectsAnswer(BaseModel):
    """Subjects, by name."""

    subjects: list[SubjectAnswer]


class ChargedAnswer(BaseModel):
    """A charge as the chain has it."""

    subject: SubjectAnswer
    body: str
    head: str


class HolderAnswer(BaseModel):
    """The last word on who holds a receipt."""

    kind: str | None
    body: dict[str, Any]
    made_before: int


class LeaseAnswer(BaseModel):
    """Up to which release a receipt is given away."""

    upto: int


class HandOverAnswer(LeaseAnswer):
    """The same, and whether a stream goes on exactly where it was saved."""

    exact: bool


class EntryAnswer(BaseModel):
    """One row of the ledger."""

    seq: int
    kind: str
    subject: str
    receipt: str | None
    body: str
    hash: str


class EntriesAnswer(BaseModel):
    """Some rows, oldest first, and whether there are more."""

    entries: list[EntryAnswer]
    more: bool


class HeadAnswer(BaseModel):
    """The end of the chain, and the one subject that the token is for (none: all)."""

    head: str
    only: str | None


class VerificationAnswer(BaseModel):
    """Every entry and total holds."""

    entries: int
    priced_too_low: list[dict[str, Any]]


class TokenAnswer(BaseModel):
    """What is known of a token; the token itself only when it was just made."""

    id: str
    role: str
    subject: str | None
    expires: str
    valid: bool
    note: str
    token: str | None = None


class TokensAnswer(BaseModel):
    """All tokens."""

    tokens: list[TokenAnswer]


class Settled(BaseModel):
    """The receipt is closed."""

    settled: bool = True


class Revoked(BaseModel):
    """Whether there was such a token."""

    revoked: bool


class Health(BaseModel):
    """The service answers."""

    status: str = "ok"


class RefusalAnswer(BaseModel):
    """Why not, in one sentence, and what still fits if the budget is the reason."""

    refusal: str
    detail: str
    remaining: dict[str, Any] | None = None
