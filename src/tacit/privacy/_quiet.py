"""dp-accounting's remarks stay off the screen: what they say of a bound is in the guarantee and its notes.

Only its own: a program's use of absl logging stays as it is.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import PurePath


def quiet_dp_accounting() -> None:
    """Drop what dp-accounting logs below the level of an error."""
    logger: logging.Logger = importlib.import_module("absl.logging").get_absl_logger()  # not before absl makes it
    if _below_error not in logger.filters:
        logger.addFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "dp_accounting" not in PurePath(record.pathname).parts
