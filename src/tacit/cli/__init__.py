"""The command line: thin; it parses, calls and prints."""

from tacit.cli._main import run

__all__ = ["run"]
