"""Models as people have them: loading by name, which parameters are trained, and whether tacit can take them."""

from tacit._deprecation import renamed_attributes
from tacit.models._adapters import BottleneckAdapter, adapters_of, insert_adapters
from tacit.models._blocks import blocks_of
from tacit.models._blocks import find_blocks as find_blocks
from tacit.models._compatibility import Compatibility, check
from tacit.models._convert import to_groupnorm
from tacit.models._convnet import ConvNet
from tacit.models._embedded import embedded
from tacit.models._heads import head_of, with_head
from tacit.models._initialise import scratch
from tacit.models._loading import Loaded, freeze_statistics, load
from tacit.models._lora import insert_lora, lora_of, merge_lora
from tacit.models._plain import plain_copy
from tacit.models._plain import uncompiled as uncompiled
from tacit.models._resnet import ResNet
from tacit.models._saved import load_net, save_net
from tacit.models._selection import SCHEMES, normalisers, select, trainable
from tacit.models._selection import check_scheme as check_scheme
from tacit.models._texts import TextClassifier, text, tokenizer_of
from tacit.models._video import VideoNet
from tacit.models._vit import ViT
from tacit.models._weights import RESULT_FILES, WeightFormat, save_weights

__all__ = [
    "RESULT_FILES",
    "SCHEMES",
    "BottleneckAdapter",
    "Compatibility",
    "ConvNet",
    "Loaded",
    "ResNet",
    "TextClassifier",
    "ViT",
    "VideoNet",
    "WeightFormat",
    "adapters_of",
    "blocks_of",
    "check",
    "embedded",
    "freeze_statistics",
    "head_of",
    "insert_adapters",
    "insert_lora",
    "load",
    "load_net",
    "lora_of",
    "merge_lora",
    "normalisers",
    "plain_copy",
    "save_net",
    "save_weights",
    "scratch",
    "select",
    "text",
    "to_groupnorm",
    "tokenizer_of",
    "trainable",
    "with_head",
]

__getattr__ = renamed_attributes(__name__, {"Adapter": "BottleneckAdapter"})
