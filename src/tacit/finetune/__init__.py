"""Private fine-tuning on labelled data: what is trained, how it steps, the loop."""

from tacit.finetune.account import plan
from tacit.finetune.evaluation import Evaluation
from tacit.finetune.features import Backbone, Probe
from tacit.finetune.fit import Fitted, fit
from tacit.finetune.loop import Score
from tacit.finetune.measures import auroc
from tacit.finetune.optimisers import DPGD, DPSGD, Optimiser
from tacit.finetune.standardise import Standardise
from tacit.finetune.tasks import Classes, Labels, Task
from tacit.finetune.updates import Update

__all__ = [
    "DPGD",
    "DPSGD",
    "Backbone",
    "Classes",
    "Evaluation",
    "Fitted",
    "Labels",
    "Optimiser",
    "Probe",
    "Score",
    "Standardise",
    "Task",
    "Update",
    "auroc",
    "fit",
    "plan",
]
