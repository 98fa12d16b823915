"""Private test-time adaptation: a deployed model learns from an unlabelled, shifting stream."""

from tacit._curator import Curator
from tacit._deprecation import renamed_attributes
from tacit.adapt._adapter import Adapter
from tacit.adapt._constructors import COME, EATA, SAR, DeYO, Tent, come, deyo, eata, sar, tent
from tacit.adapt._evaluate_stream import Scores, follow
from tacit.adapt._fisher import Fisher, fisher
from tacit.adapt._methods import EntropyFilter, Filter, Method, PLPDFilter, RedundancyFilter
from tacit.adapt._monitor import Monitor, Watch
from tacit.adapt._options import Options
from tacit.adapt._privacy_config import DP, Clip, Privacy
from tacit.adapt._saving import close_adapter, resume_adapter, save_adapter
from tacit.adapt._uncertainty import entropy, opinion, opinion_as_printed
from tacit.adapt._views import binary

__all__ = [
    "COME",
    "DP",
    "EATA",
    "SAR",
    "Adapter",
    "Clip",
    "Curator",
    "DeYO",
    "EntropyFilter",
    "Filter",
    "Fisher",
    "Method",
    "Monitor",
    "Options",
    "PLPDFilter",
    "Privacy",
    "RedundancyFilter",
    "Scores",
    "Tent",
    "Watch",
    "binary",
    "close_adapter",
    "come",
    "deyo",
    "eata",
    "entropy",
    "fisher",
    "follow",
    "opinion",
    "opinion_as_printed",
    "resume_adapter",
    "sar",
    "save_adapter",
    "tent",
]

__getattr__ = renamed_attributes(
    __name__, {"Certain": "EntropyFilter", "Unusual": "RedundancyFilter", "Structured": "PLPDFilter"}
)
