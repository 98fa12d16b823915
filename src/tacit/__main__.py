"""`python -m tacit` is `tacit`."""

from tacit.cli import run

run()
