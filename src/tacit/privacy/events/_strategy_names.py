"""How an event names the correlation of its noise: "KIND[:SIZE][@MOMENTUM]". The coefficients: `privacy.correlated`."""

from __future__ import annotations

import re

STRATEGIES = ("independent", "full", "banded", "buffered", "toeplitz")
SIZED, OPTIMISED = ("banded", "buffered", "toeplitz"), ("buffered", "toeplitz")
_NAME = re.compile(r"([a-z]+)(?::([0-9]*))?(?:@(0(?:\.[0-9]+)?))?", re.ASCII)


def strategy_parts(name: str) -> tuple[str, int | None, float | None]:
    """Kind, size and momentum of a strategy's name; None for what it does not say.

    Args:
        name: Such as "buffered", "banded:16" or "toeplitz:8@0.9".

    Returns:
        The three parts.

    Raises:
        ValueError: There is no noise of this name.

    Examples:
        >>> from tacit.privacy import events
        >>> events.strategy_parts("toeplitz:8@0.9")
        ('toeplitz', 8, 0.9)
    """
    found = _NAME.fullmatch(str(name))
    kind, size, momentum = found.groups() if found else ("", None, None)
    wrong = kind not in STRATEGIES or (size and kind not in SIZED) or (momentum and kind not in OPTIMISED)
    if wrong or (size and not int(size)):
        raise ValueError(
            f"There is no noise called {name!r}; choose one of {', '.join(STRATEGIES)}, or banded:BANDS, "
            "toeplitz:BANDS and buffered:BUFFERS with their size; the last two also with the momentum that they are "
            "for: toeplitz:BANDS@MOMENTUM, buffered@MOMENTUM."
        )
    return kind, int(size) if size else None, float(momentum) if momentum else None


def strategy_name(kind: str, size: int | None = None, *, momentum: float = 0.0) -> str:
    """The name of a strategy that is optimised for a momentum, to four digits; the inverse of `strategy_parts`.

    Args:
        kind: "toeplitz" or "buffered"; others have no momentum.
        size: The number of bands or buffers.
        momentum: Of the gradient descent that the noise is for.

    Returns:
        The name.

    Examples:
        >>> from tacit.privacy import events
        >>> events.strategy_name("buffered", momentum=0.9)
        'buffered@0.9'
    """
    sized = kind if size is None else f"{kind}:{size}"
    most = min(round(momentum, 4), 0.9999)
    return f"{sized}@{most:.4f}".rstrip("0") if kind in OPTIMISED and most > 0 else sized
