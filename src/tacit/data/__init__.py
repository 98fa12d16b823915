"""Data sets, shifts and streams: public helpers; nothing private is decided here."""

from tacit.data import published, shifts, streams
from tacit.data.arrays import read_images
from tacit.data.chexpert import chexpert
from tacit.data.fashion_mnist import Split, fashion_mnist
from tacit.data.grouped import Grouped
from tacit.data.published import cifar_c, imagenet_c, imagenet_r
from tacit.data.records import Records
from tacit.data.streams import Batch, Stream
from tacit.data.tabled import Table as TensorRecords
from tacit.data.texts import Texts, sst2
from tacit.data.videos import VideoClips, clips_as_units

__all__ = [
    "Batch",
    "Grouped",
    "Records",
    "Split",
    "Stream",
    "TensorRecords",
    "Texts",
    "VideoClips",
    "chexpert",
    "cifar_c",
    "clips_as_units",
    "fashion_mnist",
    "imagenet_c",
    "imagenet_r",
    "published",
    "read_images",
    "shifts",
    "sst2",
    "streams",
]
