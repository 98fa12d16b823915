"""Public training: no ledger, and therefore only data declared public."""

from tacit.pretrain._augment import Augment
from tacit.pretrain._fit import fit
from tacit.pretrain._plan import Perturbation, Recipe, Training
from tacit.pretrain._robust import Robust
from tacit.pretrain._robustness import Noisy, Rho, Robustness, accuracy, rho, robust_accuracy, robustness, under_noise

__all__ = [
    "Augment",
    "Noisy",
    "Perturbation",
    "Recipe",
    "Rho",
    "Robust",
    "Robustness",
    "Training",
    "accuracy",
    "fit",
    "rho",
    "robust_accuracy",
    "robustness",
    "under_noise",
]
