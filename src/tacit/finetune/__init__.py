"""Private fine-tuning on labelled data: what is trained, how it steps, the loop."""

from tacit._deprecation import renamed_attributes
from tacit.finetune._account import plan
from tacit.finetune._default import rate_and_steps as rate_and_steps
from tacit.finetune._dry_run import check_labels as check_labels
from tacit.finetune._dry_run import dry_run as dry_run
from tacit.finetune._evaluation import Evaluation
from tacit.finetune._evaluation import check_rows_alone as check_rows_alone
from tacit.finetune._evaluation import right_by_unit as right_by_unit
from tacit.finetune._features import Backbone, Probe, extract
from tacit.finetune._features import is_linear as is_linear
from tacit.finetune._fit import fit
from tacit.finetune._fitted import Fitted
from tacit.finetune._language import NextToken
from tacit.finetune._linear_probe import blank_row as blank_row
from tacit.finetune._linear_probe import public_centre
from tacit.finetune._loader import batching as batching
from tacit.finetune._loop import Score
from tacit.finetune._loss_curve import LossChange, TrackLoss
from tacit.finetune._make_private import make_private
from tacit.finetune._make_private import steps_per_epoch as steps_per_epoch
from tacit.finetune._measures import auroc
from tacit.finetune._noise_schedules import Banded, ConstantNoise, Correlated, Decaying
from tacit.finetune._optimizers import DPFTRL, DPGD, DPSGD, DPZO, GEP, AdpAlloc, AdpClip, BandMF, HyFreeDP, Optimizer
from tacit.finetune._own_loop import PoissonLoader, PrivateBatch, PrivateLoop
from tacit.finetune._reading import in_place as in_place
from tacit.finetune._reading import likeness as likeness
from tacit.finetune._sampling import BallsInBins, CyclicPoisson, Everyone, FixedSize, Passes, Poisson
from tacit.finetune._sources import agree as agree
from tacit.finetune._sources import as_records as as_records
from tacit.finetune._sources import prepared as prepared
from tacit.finetune._sources import read_records as read_records
from tacit.finetune._standardise import RowNorm, Standardise
from tacit.finetune._standardise import RowNormalizer as RowNormalizer
from tacit.finetune._tasks import Classes, Labels, Task
from tacit.finetune._updates import Update
from tacit.finetune._upper_blocks import CachedBlocks, cache_blocks
from tacit.finetune._upper_blocks import upper_part as upper_part

__all__ = [
    "DPFTRL",
    "DPGD",
    "DPSGD",
    "DPZO",
    "GEP",
    "AdpAlloc",
    "AdpClip",
    "Backbone",
    "BallsInBins",
    "BandMF",
    "Banded",
    "CachedBlocks",
    "Classes",
    "ConstantNoise",
    "Correlated",
    "CyclicPoisson",
    "Decaying",
    "Evaluation",
    "Everyone",
    "Fitted",
    "FixedSize",
    "HyFreeDP",
    "Labels",
    "LossChange",
    "NextToken",
    "Optimizer",
    "Passes",
    "Poisson",
    "PoissonLoader",
    "PrivateBatch",
    "PrivateLoop",
    "Probe",
    "RowNorm",
    "Score",
    "Standardise",
    "Task",
    "TrackLoss",
    "Update",
    "auroc",
    "cache_blocks",
    "extract",
    "fit",
    "make_private",
    "plan",
    "public_centre",
]

__getattr__ = renamed_attributes(__name__, {"Steady": "ConstantNoise", "Optimiser": "Optimizer"})
