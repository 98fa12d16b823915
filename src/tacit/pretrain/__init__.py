"""Public training: no ledger, and therefore only data declared public."""

from tacit.pretrain.augment import Augment
from tacit.pretrain.fit import Recipe, fit

__all__ = ["Augment", "Recipe", "fit"]
