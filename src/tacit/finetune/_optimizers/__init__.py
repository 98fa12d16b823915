"""Private optimizers, each put together from four parts: a sampler, a query, a noise schedule and an update rule.

A new optimizer is a new part, never a new loop.
"""

from tacit.finetune._optimizers._adaptive import AdpAlloc, AdpClip, HyFreeDP
from tacit.finetune._optimizers._correlated import DPFTRL, BandMF
from tacit.finetune._optimizers._dp_sgd import DPGD, DPSGD
from tacit.finetune._optimizers._gradient_embedding import GEP
from tacit.finetune._optimizers._optimizer import Optimizer
from tacit.finetune._optimizers._optimizer import called as called
from tacit.finetune._optimizers._zeroth_order import DPZO

__all__ = ["DPFTRL", "DPGD", "DPSGD", "DPZO", "GEP", "AdpAlloc", "AdpClip", "BandMF", "HyFreeDP", "Optimizer"]
