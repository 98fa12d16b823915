"""`tacit ledger serve` and `tacit ledger token`: a ledger for a team."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from tacit.cli._output import AsJson, console, print_json

tokens = typer.Typer(help="Tokens of a ledger's service: make, list, revoke.")
Database = Annotated[str, typer.Argument(help="A file, sqlite:///FILE or postgresql://USER@HOST/NAME.")]


def serve(
    url: Database,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port.")] = 8433,
    certificate: Annotated[Path | None, typer.Option(help="A TLS certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    behind_proxy: Annotated[bool, typer.Option(help="A proxy in front of it ends TLS.")] = False,
    rate: Annotated[float, typer.Option(help="Requests a second that one token may make.")] = 50.0,
    burst: Annotated[int, typer.Option(help="Requests that it may make at once.")] = 200,
) -> None:
    """Serve a ledger over HTTP: `Ledger("https://…", token=…)` uses it, a browser shows it."""
    services = service()
    application = services.ledger_app(url, rate=rate, burst=burst)
    scheme = "http" if certificate is None else "https"
    console().print(f"The ledger is at {scheme}://{host}:{port} (its schema: /openapi.json). Stop with Ctrl-C.")
    services.run_service(application, host=host, port=port, certificate=certificate, key=key, behind_proxy=behind_proxy)


@tokens.command()
def create(
    url: Database,
    role: Annotated[str, typer.Option(help="read, charge or admin.")],
    subject: Annotated[str | None, typer.Option(help="The one subject it is for; by default all.")] = None,
    days: Annotated[float, typer.Option(help="How long it lasts.")] = 90.0,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a token for the service of a ledger. It is shown once; the ledger keeps its hash."""
    services = service()
    secret, known = services.tokens_of(url).create(services.Role.named(role), subject=subject, days=days, note=note)
    if as_json:
        print_json(known.to_json() | {"token": secret})
        return
    typer.echo(secret)


@tokens.command("list")
def list_tokens(url: Database, as_json: AsJson = False) -> None:
    """The tokens of a ledger, without the tokens themselves."""
    found = service().tokens_of(url).all()
    if as_json:
        print_json({"tokens": [each.to_json() for each in found]})
        return
    table = Table("token", "role", "subject", "expires", "valid", "note", box=box.SIMPLE_HEAD, pad_edge=False)
    for each in found:
        valid, subject = "yes" if each.valid else "no", escape(each.subject or "all")
        expires = f"{each.expires:%Y-%m-%d}"
        table.add_row(each.id, each.role.name.lower(), subject, expires, valid, escape(each.note))
    console().print(table)


@tokens.command()
def revoke(url: Database, token: Annotated[str, typer.Argument(help="The token's name (see list).")]) -> None:
    """End a token at once."""
    if not service().tokens_of(url).revoke(token):
        raise ValueError(f"This ledger has no token {token}.")
    console().print(f"Token {token} is no longer valid.")


def service() -> Any:
    try:
        from tacit import serve as services
    except ModuleNotFoundError:
        raise ValueError("The service needs an extra: pip install 'tacit[serve]'.") from None
    return services
