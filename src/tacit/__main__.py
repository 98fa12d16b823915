"""`python -m tacit` is `tacit`."""

from tacit.cli.main import run

run()
