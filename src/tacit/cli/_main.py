"""`tacit`: one command per thing that people do. Bad input is one sentence on stderr and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from tacit import __version__
from tacit.cli import _audit as audit
from tacit.cli import _calibrate as calibrate
from tacit.cli import _card as card
from tacit.cli import _check as check
from tacit.cli import _demo as demo
from tacit.cli import _init as init
from tacit.cli import _ledger as ledger
from tacit.cli import _noise as noise
from tacit.cli import _run as run_recipe
from tacit.cli import _serve as serve

# typer brings its own click, or uses the installed one: either way, what its usage errors have in common
UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    help="Differential privacy for adapting PyTorch models: fine-tune, tune, adapt at test time, recalibrate, under "
    "one audited budget.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("init")(init.init)
app.command("run")(run_recipe.run)
app.command("card")(card.card)
app.command("noise")(noise.noise)
app.command("check")(check.check)
app.command("audit")(audit.audit)
app.command("serve")(serve.serve)
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(ledger.app, name="ledger")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tacit {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    _: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit."),
) -> None:
    """Differential privacy for adapting PyTorch models."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> None:
    """The entry point: exit 0, 1 if a check found something wrong, 2 for bad input."""
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except UsageProblem as error:
        code = _say(error.format_message(), 2)  # type: ignore[attr-defined]
    except typer.Abort:
        code = _say("Stopped.", 130)
    except Exception as error:
        code = _explain(error)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> int:
    """What the user did wrong, or what a check found; anything else is a defect and keeps its traceback."""
    from tacit.privacy import LedgerDamaged, LedgerError

    if isinstance(error, LedgerDamaged):
        return _say(str(error), 1)
    if isinstance(error, LedgerError | ValueError | OSError):
        return _say(str(error), 2)
    raise error


def _say(message: str, code: int) -> int:
    typer.echo(" ".join(message.split()), err=True)
    return code
