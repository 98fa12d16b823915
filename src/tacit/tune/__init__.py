"""Private hyperparameters: searches that pay for themselves."""

from tacit._deprecation import renamed_attributes
from tacit.tune._baselines import grid_search, random_search
from tacit.tune._default import suggest
from tacit.tune._default_search import default_search
from tacit.tune._dp_adam_wosm import adam_without_second_moment, dpgd_wosm
from tacit.tune._dp_hypo import dp_hypo, plan_dp_hypo
from tacit.tune._finetuning import Finetuning, dpgd
from tacit.tune._line import Line, fit_line
from tacit.tune._linear import Scaled, linear_scaling, train
from tacit.tune._optuna_trials import optuna_search
from tacit.tune._plan import BudgetTooSmall, Plan, plan
from tacit.tune._ray_runner import RayRunner
from tacit.tune._repeat import repeat_and_select
from tacit.tune._repeat_plan import Repeats, plan_repeats
from tacit.tune._runners import Processes, SerialRunner
from tacit.tune._search import RunFailed, Tuned
from tacit.tune._selection import Selected, noisy_selection
from tacit.tune._space import Hyperparameters, Space
from tacit.tune._subset import subset_search
from tacit.tune._trainable import Trainable
from tacit.tune._trials import Trial, by_unit

__all__ = [
    "BudgetTooSmall",
    "Finetuning",
    "Hyperparameters",
    "Line",
    "Plan",
    "Processes",
    "RayRunner",
    "Repeats",
    "RunFailed",
    "Scaled",
    "Selected",
    "SerialRunner",
    "Space",
    "Trainable",
    "Trial",
    "Tuned",
    "adam_without_second_moment",
    "by_unit",
    "default_search",
    "dp_hypo",
    "dpgd",
    "dpgd_wosm",
    "fit_line",
    "grid_search",
    "linear_scaling",
    "noisy_selection",
    "optuna_search",
    "plan",
    "plan_dp_hypo",
    "plan_repeats",
    "random_search",
    "repeat_and_select",
    "subset_search",
    "suggest",
    "train",
]

__getattr__ = renamed_attributes(__name__, {"Here": "SerialRunner"})
