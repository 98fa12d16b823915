"""Models as people have them: loading by name, which parameters are trained, and whether tacit can take them."""

from tacit.models.compatibility import Compatibility, check
from tacit.models.convnet import ConvNet
from tacit.models.embedded import embedded
from tacit.models.loading import Loaded, freeze_statistics, load
from tacit.models.selection import SCHEMES, head_of, normalisers, select

__all__ = [
    "SCHEMES",
    "Compatibility",
    "ConvNet",
    "Loaded",
    "check",
    "embedded",
    "freeze_statistics",
    "head_of",
    "load",
    "normalisers",
    "select",
]
