"""Data sets, shifts and streams: public helpers; nothing private is decided here."""

from tacit.data import published, shifts, streams
from tacit.data.fashion_mnist import fashion_mnist
from tacit.data.published import cifar_c, imagenet_c, imagenet_r
from tacit.data.streams import Batch, Stream

__all__ = [
    "Batch",
    "Stream",
    "cifar_c",
    "fashion_mnist",
    "imagenet_c",
    "imagenet_r",
    "published",
    "shifts",
    "streams",
]
