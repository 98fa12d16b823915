"""`python -m tacit` is `tacit`."""

from tacit.cli._main import run

run()
