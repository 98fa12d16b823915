"""From event trees to guarantees, and from a target back to the noise that meets it."""

from tacit._deprecation import renamed_attributes
from tacit.privacy.accounting._accounting import (
    ACCOUNTANTS,
    ORDERS,
    Accountant,
    Decomposition,
    UnsupportedEvent,
    best_order,
    epsilon_of_renyi,
    guarantee,
    halting,
    noise_multiplier,
    pure_epsilon,
    pure_of,
    renyi,
    renyi_of_epsilon,
    take_apart,
)

__all__ = [
    "ACCOUNTANTS",
    "ORDERS",
    "Accountant",
    "Decomposition",
    "UnsupportedEvent",
    "best_order",
    "epsilon_of_renyi",
    "guarantee",
    "halting",
    "noise_multiplier",
    "pure_epsilon",
    "pure_of",
    "renyi",
    "renyi_of_epsilon",
    "take_apart",
]

__getattr__ = renamed_attributes(__name__, {"Terms": "Decomposition"})
