"""The correlated noise of a stream: what its event names, or the coefficients that it began with elsewhere."""

from __future__ import annotations

from tacit.privacy._receipts import ReceiptError
from tacit.privacy.correlated import Strategy, by_name
from tacit.privacy.events import StreamDpEvent, strategy_parts


def strategy_of(event: StreamDpEvent) -> Strategy:
    """The correlated-noise strategy that an event names (see ``correlated.by_name``).

    Args:
        event: The stream.

    Returns:
        The strategy over one block of the stream.
    """
    return by_name(event.strategy, event.steps, contributions=event.contributions, separation=event.separation)


def check_strategy(strategy: Strategy, event: StreamDpEvent) -> Strategy:
    """Refuse coefficients that are not of an event's kind and horizon.

    Optimised ones differ from their third digit on between processors and versions of scipy. That breaks no promise,
    for the noise is scaled by the sensitivity of those that are used; but a sequence only goes on with its own.

    Args:
        strategy: The coefficients that a stream began with.
        event: The stream.

    Returns:
        The strategy.

    Raises:
        ReceiptError: They are of another stream.
    """
    if (strategy.name, strategy.horizon) != (strategy_parts(event.strategy)[0], event.steps):
        raise ReceiptError(
            f"These coefficients are of a block of {strategy.horizon:,} steps of {strategy.name} noise, and the "
            f"receipt paid for {event.steps:,} steps of {event.strategy}."
        )
    return strategy
