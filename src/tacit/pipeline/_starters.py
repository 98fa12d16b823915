"""Starter recipes for `tacit init`: comments say what each line is for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Kind = Literal["images", "video", "text", "outputs"]

_BUDGET = """
[budget]
epsilon = 8.0               # the privacy loss of one {unit}, over all stages: smaller protects more
delta = 1e-5                # well below one over the number of {unit}s
unit = "{unit}"{pad}# who is protected: all rows of one {unit} count as one
neighbours = "zero-out"     # compared with: the same data without this {unit}'s values; or "replace-one"
# size = 1000               # the public number of {unit}s (a round figure); dpsgd and "add-remove" need it
ledger = "ledger.db"        # every charge is written here first. Keep it: it is what stops overspending
"""

_FINETUNE = """
[finetune]
scheme = "{scheme}"{pad}# what is trained: linear (the head alone), selective, bias, adapter, lora, full
optimizer = "dpgd"          # all units in every step; "dpsgd" draws batches (then give batch_size and budget.size)
steps = 30
lr = {lr}
clip = 1.0                  # the longest gradient that one {unit} may contribute

# [finetune.evaluate]       # a public test set, scored exactly (with evaluate_public = true in [finetune])
"""

_MORE = """
# More stages, each with its own `share` of the budget or an equal part of what is left; see docs/pipeline.md:
# [tune]                    # search lr and steps privately: lr = [0.05, 5.0], steps = [10, 60]
"""

_STARTERS: dict[str, str] = {
    "images": """# Images of people, private fine-tuning. `tacit run {name} --plan` says what it will charge;
# `tacit run {name}` runs it, and goes on after a kill. Paths are relative to this file.

[model]
name = "timm:vit_tiny_patch16_224"  # timm:NAME, transformers:FOLDER, module:function, or a path
# weights = "weights.safetensors"   # weights of your own, instead of the published ones

[data]
kind = "images"
folder = "images"           # where the files are
table = "labels.csv"        # one line per image; the next three are its columns
file = "file"
label = "label"
unit_ids = "patient"
classes = 2                 # labels are 0 and 1; or their names: ["healthy", "ill"]
"""
    + _BUDGET.format(unit="patient", pad="            ")
    + _FINETUNE.format(scheme="linear", lr="0.5", unit="patient", pad="           ")
    + _MORE
    + """#
# [adapt]                   # learn on from an unlabelled stream
# method = "tent"
# [adapt.data]
# kind = "images"
# folder = "stream"
# table = "stream.csv"      # in the order of arrival
# unit_ids = "patient"
#
# [calibrate]               # honest confidences, from several clinics
# sources = ["clinic-a", "clinic-b"]
# [calibrate.data]
# kind = "images"
# folder = "images"
# table = "calibration.csv"
# unit_ids = "patient"
# source = "clinic"         # the column that says which clinic
""",
    "video": """# Videos, private fine-tuning. `tacit run {name} --plan` says what it will charge;
# `tacit run {name}` runs it, and goes on after a kill. Paths are relative to this file.

[model]
name = "small:video"        # or module:function, a model that takes frames x channels x height x width

[data]
kind = "video"
folder = "videos"           # CLASS/FILE; or layout = "ucf101" / "hmdb51" with split = ..., or "table" with table = ...
layout = "folder"
classes = 2
clips = 4                   # clips of one video in a step: they are averaged, and cost what one costs
frames = 8
size = 32
"""
    + _BUDGET.format(unit="video", pad="              ")
    + _FINETUNE.format(scheme="selective", lr="0.5", unit="video", pad="        "),
    "text": """# Texts of people, private fine-tuning with LoRA. `tacit run {name} --plan` says what it will charge;
# `tacit run {name}` runs it, and goes on after a kill. Paths are relative to this file.

[model]
name = "transformers:distilbert-base-uncased"  # a folder, or a name in the local cache: nothing is downloaded

[data]
kind = "text"
table = "texts.csv"         # one line per text; the next three are its columns
text = "text"
label = "label"
unit_ids = "user"
classes = 2                 # labels are 0 and 1; or their names: ["negative", "positive"]
max_length = 128
"""
    + _BUDGET.format(unit="user", pad="               ")
    + _FINETUNE.format(scheme="lora", lr="0.5", unit="user", pad="             ")
    + _MORE
    + """#
# [adapt]                   # learn on from an unlabelled stream
# method = "tent"
# [adapt.data]
# kind = "text"
# table = "stream.csv"      # in the order of arrival
# unit_ids = "user"
# classes = 2
# max_length = 128
""",
    "outputs": """# Outputs of a classifier, recalibrated from several private sources.
# `tacit run {name} --plan` says what it will charge; `tacit run {name}` runs it, and goes on after a kill.
# Paths are relative to this file.
"""
    + _BUDGET.format(unit="patient", pad="            ")
    + """
[calibrate]
sources = ["clinic-a", "clinic-b"]  # one file each: outputs/clinic-a.npz, ...
# sizes = [500, 800]        # their public numbers of patients, if they may be known

[calibrate.data]
kind = "outputs"
folder = "outputs"
form = "logits"             # or "probs"
unit_ids = "patient"        # the array (or column) that says whose each row is
""",
}

KINDS: tuple[str, ...] = tuple(_STARTERS)


def starter(kind: str, name: str = "pipeline.toml") -> str:
    """The text of a starter recipe for a kind of data."""
    if kind not in _STARTERS:
        raise ValueError(f"There is no starter recipe {kind!r}: choose one of {', '.join(KINDS)}.")
    return _STARTERS[kind].replace("{name}", name)


def write_starter(kind: str, path: str | Path) -> Path:
    """Write a starter recipe where no file is.

    Raises:
        OSError: There is a file already, or none can be written there.
    """
    path = Path(path)
    text = starter(kind, path.name)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise OSError(f"There is a file {path} already: it is left as it is. Give another name.") from None
    except OSError as error:
        raise OSError(f"The recipe cannot be written to {path}: {error.strerror}.") from None
    return path
