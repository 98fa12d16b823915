"""Private hyperparameters: searches that pay for themselves."""

from tacit.tune.baselines import grid_search, random_search
from tacit.tune.finetuning import Finetuning, dpgd
from tacit.tune.line import Line, fit_line
from tacit.tune.linear import Scaled, linear_scaling, train
from tacit.tune.optuna_trials import optuna_search
from tacit.tune.plan import BudgetTooSmall, Plan, plan
from tacit.tune.ray_runner import RayRunner
from tacit.tune.repeat import Repeats, plan_repeats, repeat_and_select
from tacit.tune.runners import Here, Processes
from tacit.tune.search import RunFailed, Tuned
from tacit.tune.selection import Selected, noisy_selection
from tacit.tune.space import Hyperparameters, Space
from tacit.tune.subset import subset_search
from tacit.tune.trials import Trainable, Trial, by_unit
from tacit.tune.wosm import adam_without_second_moment, dpgd_wosm

__all__ = [
    "BudgetTooSmall",
    "Finetuning",
    "Here",
    "Hyperparameters",
    "Line",
    "Plan",
    "Processes",
    "RayRunner",
    "Repeats",
    "RunFailed",
    "Scaled",
    "Selected",
    "Space",
    "Trainable",
    "Trial",
    "Tuned",
    "adam_without_second_moment",
    "by_unit",
    "dpgd",
    "dpgd_wosm",
    "fit_line",
    "grid_search",
    "linear_scaling",
    "noisy_selection",
    "optuna_search",
    "plan",
    "plan_repeats",
    "random_search",
    "repeat_and_select",
    "subset_search",
    "train",
]
