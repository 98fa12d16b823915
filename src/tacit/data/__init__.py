"""Data sets, shifts and streams: public helpers; nothing private is decided here."""

from tacit.data import _published as published
from tacit.data import shifts, streams
from tacit.data._chexpert import chexpert
from tacit.data._clip_units import clips_as_units
from tacit.data._columns import from_datasets, from_pandas
from tacit.data._columns import is_dataset as is_dataset
from tacit.data._columns import is_frame as is_frame
from tacit.data._csv_files import read_columns, read_labels
from tacit.data._fashion_mnist import Split, fashion_mnist
from tacit.data._file_state import Broken as Broken
from tacit.data._grouped import Groupable as Groupable
from tacit.data._grouped import Grouped
from tacit.data._grouped import members as members
from tacit.data._grouped import without_replacement as without_replacement
from tacit.data._image_files import ImageFiles, ImageShape
from tacit.data._loaders import as_items as as_items
from tacit.data._loaders import samples_of as samples_of
from tacit.data._published import cifar_c, imagenet_c, imagenet_r
from tacit.data._records import Records
from tacit.data._records import Rows as Rows
from tacit.data._records import synthetic_rows as synthetic_rows
from tacit.data._records import unit_ids_of as unit_ids_of
from tacit.data._stacking import check_alike as check_alike
from tacit.data._stacking import stacked as stacked
from tacit.data._tensor_records import TensorRecords
from tacit.data._texts import NO_LABEL as NO_LABEL
from tacit.data._texts import Texts, sst2
from tacit.data._videos import VideoClips
from tacit.data.streams import Batch, Stream

__all__ = [
    "Batch",
    "Grouped",
    "ImageFiles",
    "ImageShape",
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
    "from_datasets",
    "from_pandas",
    "imagenet_c",
    "imagenet_r",
    "published",
    "read_columns",
    "read_labels",
    "shifts",
    "sst2",
    "streams",
]
