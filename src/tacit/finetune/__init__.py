"""Private fine-tuning on labelled data: what is trained, how it steps, the loop."""

from tacit.finetune.account import plan
from tacit.finetune.evaluation import Evaluation
from tacit.finetune.features import Backbone, Probe
from tacit.finetune.fit import Fitted, fit
from tacit.finetune.language import NextToken
from tacit.finetune.loop import Score
from tacit.finetune.measures import auroc
from tacit.finetune.noises import Correlated, Decaying, Steady
from tacit.finetune.optimisers import DPFTRL, DPGD, DPSGD, DPZO, GEP, AdpAlloc, AdpClip, Optimiser
from tacit.finetune.sampling import Everyone, Passes, Poisson
from tacit.finetune.standardise import Standardise
from tacit.finetune.tasks import Classes, Labels, Task
from tacit.finetune.updates import Update

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
