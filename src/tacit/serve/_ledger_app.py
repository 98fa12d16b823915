"""The ledger as a service: REST over one book, with tokens, limits, health, metrics and a page to read.

Formal guarantee: the service adds nothing to what a database ledger decides (``tacit.privacy.Ledger``): every verb is
one transaction of the book, answered after it is on disk. It never sees a key of noise or a private value; what it
logs and counts are routes, status codes and times.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tacit import __version__
from tacit.privacy import (
    BudgetExceeded,
    Charge,
    DatabaseBook,
    LedgerDamaged,
    LedgerError,
    OtherTerms,
    ReceiptError,
    wire,
)
from tacit.serve import _schemas as schemas
from tacit.serve._ledger_page import router as pages
from tacit.serve._limits import RateLimit, in_turn, new_turns
from tacit.serve._observed import Metrics, Observed, health_routes
from tacit.serve._scope import Forbidden, ScopedBook
from tacit.serve._tokens import Role, Token, Tokens

_PAGE = 1000  # entries in one answer
_LARGEST = 4_000_000  # bytes of a request
_LATER = {"refusal": "ledger", "detail": "The service could not do this now; ask again."}
_REFUSED = {code: {"model": schemas.RefusalAnswer} for code in (400, 401, 403, 404, 409, 413, 422, 429, 500, 503)}
_bearer = HTTPBearer(auto_error=False, description="A token of `tacit ledger token create`.")
router = APIRouter(prefix="/v1", responses=_REFUSED)  # type: ignore[arg-type]


def ledger_app(url: str, *, rate: float = 50.0, burst: int = 200) -> FastAPI:
    """The service of a ledger, as an ASGI application.

    Args:
        url: The ledger's database: a file, ``sqlite:///FILE`` or ``postgresql://USER@HOST/NAME``.
        rate: Requests a second that one token may make, in the long run.
        burst: Requests that it may make at once.

    Returns:
        The application, for uvicorn or any other ASGI server.

    Raises:
        LedgerError: The database cannot be opened.
    """
    book = DatabaseBook(url if "://" in url else f"sqlite:///{url}", create=True)
    app = FastAPI(
        title="tacit ledger",
        version=__version__,
        description="Privacy budgets that cannot be overspent: charges, receipts and their hash chain.",
        redoc_url=None,
        docs_url=None,
    )
    app.state.book, app.state.tokens = book, Tokens(book.engine)
    app.state.limit, app.state.strangers = RateLimit(rate, burst), RateLimit(5.0, 20)
    app.state.turns = new_turns()
    app.add_middleware(Observed, largest=_LARGEST, failure=_answer(503, _LATER))
    app.include_router(router)
    app.state.metrics = Metrics()
    app.include_router(health_routes(book.head, app.state.metrics))
    app.include_router(pages)
    for kind in (LedgerError, ReceiptError, ValueError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refused)
    return app


def token_of(request: Request, secret: str | None) -> Token:
    """The valid token of a request, within its rate; 401 and 429 otherwise."""
    state = request.app.state
    known = state.tokens.find(secret) if secret else None
    # who shows no valid token is slowed down by address: guessing is hopeless anyway, but it costs a query
    address = request.client.host if request.client else "?"
    wait = state.limit.wait(known.id) if known else state.strangers.wait(address)
    if wait:
        raise HTTPException(429, "Too many requests.", headers={"Retry-After": f"{wait:.3f}"})
    if known is None:
        raise HTTPException(401, "A valid token is needed.", headers={"WWW-Authenticate": "Bearer"})
    request.state.token = known.id
    return known  # type: ignore[no-any-return]


def _scoped(request: Request, shown: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> ScopedBook:
    state = request.app.state
    return ScopedBook(state.book, token_of(request, shown.credentials if shown else None), state.tokens)


def _admin(request: Request, shown: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Tokens:
    if not token_of(request, shown.credentials if shown else None).may(Role.ADMIN):
        raise Forbidden("Only an admin's token may do this.")
    return request.app.state.tokens  # type: ignore[no-any-return]


Scoped = Annotated[ScopedBook, Depends(_scoped)]
Admin = Annotated[Tokens, Depends(_admin)]


@router.get("/subjects", response_model=schemas.SubjectsAnswer)
def subjects(book: Scoped, name: Annotated[schemas.Name | None, Query()] = None) -> Any:
    """Every subject that the token may see, or the one of a name."""
    found = book.subjects() if name is None else [each for each in [book.find(name)] if each is not None]
    return {"subjects": [wire.subject_to_json(each) for each in found]}


@router.post("/subjects", response_model=schemas.SubjectAnswer)
def declare(book: Scoped, asked: schemas.NewSubject) -> Any:
    """Declare a subject; again with the same terms is a no-op. For admins."""
    return wire.subject_to_json(book.declare(wire.subject_declared(asked.name, asked.terms)))


@router.get("/standing", response_model=schemas.SubjectAnswer)
def standing(book: Scoped, subject: Annotated[schemas.Name, Query()]) -> Any:
    """A subject at today's prices."""
    return wire.subject_to_json(book.standing(subject))


@router.post("/charges", response_model=schemas.ChargedAnswer)
def charge(book: Scoped, asked: schemas.NewCharge) -> Any:
    """Reserve an event if it fits the budget (409 otherwise, with what still fits)."""
    facts = asked.model_dump(exclude={"subject"})
    try:
        return wire.charged_to_json(book.charge(asked.subject, Charge(**facts)))
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError("This is no event as tacit writes it.") from None


@router.get("/receipts/{receipt}", response_model=schemas.ChargedAnswer)
def charged(book: Scoped, receipt: schemas.Receipt) -> Any:
    """What a receipt paid for."""
    return wire.charged_to_json(book.charged(receipt))


@router.post("/receipts/{receipt}/settlement", response_model=schemas.Settled)
def settle(book: Scoped, receipt: schemas.Receipt, asked: schemas.Settlement) -> Any:
    """Close a receipt and return what was not used."""
    try:
        book.settle(receipt, asked.holder, asked.used, asked.kept)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError("This is no event as tacit writes it.") from None
    return {}


@router.get("/receipts/{receipt}/holder", response_model=schemas.HolderAnswer)
def holder(book: Scoped, receipt: schemas.Receipt) -> Any:
    """Who holds a receipt and how far its releases are given away."""
    made, last = book.made_before(receipt), book.held(receipt)
    return {"kind": None if last is None else last[0], "body": {} if last is None else last[1], "made_before": made}


@router.post("/receipts/{receipt}/holder", response_model=schemas.HandOverAnswer)
def hand_over(book: Scoped, receipt: schemas.Receipt, asked: schemas.HandOver) -> Any:
    """Make a process the holder of a receipt, to resume what it pays for."""
    upto, exact = book.hand_over(receipt, asked.holder, asked.how, asked.proof, asked.used)
    return {"upto": upto, "exact": exact}


@router.post("/receipts/{receipt}/leases", response_model=schemas.LeaseAnswer)
def give(book: Scoped, receipt: schemas.Receipt, asked: schemas.Lease) -> Any:
    """The holder leases releases, or saves where it stands."""
    return {
        "upto": book.give(
            receipt, asked.holder, asked.kind, asked.upto, {str(name): fact for name, fact in asked.facts.items()}
        )
    }


@router.get("/entries", response_model=schemas.EntriesAnswer)
def entries(
    book: Scoped,
    subject: Annotated[schemas.Name | None, Query()] = None,
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
) -> Any:
    """The ledger's rows behind an entry, oldest first."""
    found = book.entries(subject, after, _PAGE + 1)
    return {"entries": [wire.entry_to_json(each) for each in found[:_PAGE]], "more": len(found) > _PAGE}


@router.get("/head", response_model=schemas.HeadAnswer)
def head(book: Scoped) -> Any:
    """The end of the chain."""
    return {"head": book.head(), "only": book.only}


@router.get("/verification", response_model=schemas.VerificationAnswer, dependencies=[Depends(in_turn)])
def verification(book: Scoped, head: Annotated[str | None, Query(max_length=100)] = None) -> Any:
    """Check every entry and total; 500 with the first thing that does not hold."""
    count, low = book.verify(head)
    return {"entries": count, "priced_too_low": [wire.underpriced_to_json(each) for each in low]}


@router.get("/tokens", response_model=schemas.TokensAnswer)
def tokens(known: Admin) -> Any:
    """Every token, without its secret. For admins."""
    return {"tokens": [each.to_json() for each in known.all()]}


@router.post("/tokens", response_model=schemas.TokenAnswer)
def new_token(known: Admin, asked: schemas.NewToken) -> Any:
    """Make a token; it is shown here and never again. For admins."""
    secret, made = known.create(Role.named(asked.role), subject=asked.subject, days=asked.days, note=asked.note)
    return made.to_json() | {"token": secret}


@router.delete("/tokens/{token_id}", response_model=schemas.Revoked)
def revoke(known: Admin, token_id: str) -> Any:
    """End a token at once. For admins."""
    return {"revoked": known.revoke(token_id)}


def _refused(_: Request, error: Exception) -> Response:
    """One sentence and the status that fits it."""
    if isinstance(error, RequestValidationError):
        parts = [f"{'.'.join(str(p) for p in each['loc'][1:])}: {each['msg']}" for each in error.errors()]
        return _answer(422, {"refusal": "invalid", "detail": "; ".join(parts)})
    if isinstance(error, HTTPException):
        return _answer(error.status_code, {"refusal": "ledger", "detail": str(error.detail)}, error.headers)
    if isinstance(error.__cause__, SQLAlchemyError):  # its text has the database's address and may quote the query
        return _answer(503, _LATER)
    status = 400
    for kind, code in (
        (Forbidden, 403),
        (BudgetExceeded, 409),
        (OtherTerms, 409),
        (ReceiptError, 409),
        (LedgerDamaged, 500),
        (LedgerError, 404),
    ):
        if isinstance(error, kind):
            status = code
            break
    return _answer(status, wire.refusal_to_json(error))


def _answer(status: int, facts: dict[str, Any], headers: Any = None) -> Response:
    return JSONResponse({"remaining": None} | facts, status_code=status, headers=dict(headers or {}))
