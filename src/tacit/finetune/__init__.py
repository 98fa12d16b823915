"""Private fine-tuning on labelled data: what is trained, how it steps, the loop."""

from tacit.finetune._account import plan
from tacit.finetune._evaluation import Evaluation
from tacit.finetune._features import Backbone, Probe
from tacit.finetune._fit import Fitted, fit
from tacit.finetune._language import NextToken
from tacit.finetune._loop import Score
from tacit.finetune._measures import auroc
from tacit.finetune._noise_schedules import Correlated, Decaying, Steady
from tacit.finetune._optimizers import DPFTRL, DPGD, DPSGD, DPZO, GEP, AdpAlloc, AdpClip, Optimiser
from tacit.finetune._sampling import Everyone, Passes, Poisson
from tacit.finetune._standardise import Standardise
from tacit.finetune._tasks import Classes, Labels, Task
from tacit.finetune._updates import Update

__all__ = [
    "DPFTRL",
    "DPGD",
    "DPSGD",
    "DPZO",
    "GEP",
    "AdpAlloc",
    "AdpClip",
    "Backbone",
    "Classes",
    "Correlated",
    "Decaying",
    "Evaluation",
    "Everyone",
    "Fitted",
    "Labels",
    "NextToken",
    "Optimiser",
    "Passes",
    "Poisson",
    "Probe",
    "Score",
    "Standardise",
    "Steady",
    "Task",
    "Update",
    "auroc",
    "fit",
    "plan",
]
