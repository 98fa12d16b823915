"""The releases that tacit accounts for, as dp-accounting's event trees."""

from tacit.privacy.events._constructors import (
    balls_in_bins,
    compose,
    cyclic_poisson,
    gaussian,
    joint,
    joint_noise,
    laplace,
    noisy_max,
    passes,
    poisson,
    repeat,
    repeat_and_select,
    schedule,
    shared_noise,
    stream,
    without_replacement,
)
from tacit.privacy.events._json import from_json, to_json
from tacit.privacy.events._properties import calls as calls
from tacit.privacy.events._properties import gaussian_noise, is_sampled, releases, same
from tacit.privacy.events._strategy_names import SIZED, STRATEGIES, strategy_name, strategy_parts
from tacit.privacy.events._tree import check, check_count, leaves
from tacit.privacy.events._types import (
    BallsInBinsDpEvent,
    CyclicPoissonDpEvent,
    DpEvent,
    NoisyMaxDpEvent,
    PassesDpEvent,
    SharedNoiseDpEvent,
    StreamDpEvent,
)

__all__ = [
    "SIZED",
    "STRATEGIES",
    "BallsInBinsDpEvent",
    "CyclicPoissonDpEvent",
    "DpEvent",
    "NoisyMaxDpEvent",
    "PassesDpEvent",
    "SharedNoiseDpEvent",
    "StreamDpEvent",
    "balls_in_bins",
    "check",
    "check_count",
    "compose",
    "cyclic_poisson",
    "from_json",
    "gaussian",
    "gaussian_noise",
    "is_sampled",
    "joint",
    "joint_noise",
    "laplace",
    "leaves",
    "noisy_max",
    "passes",
    "poisson",
    "releases",
    "repeat",
    "repeat_and_select",
    "same",
    "schedule",
    "shared_noise",
    "strategy_name",
    "strategy_parts",
    "stream",
    "to_json",
    "without_replacement",
]
