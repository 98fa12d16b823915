"""Synthetic data and a tiny model of one's own, in the folder of a recipe."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

MODEL = """
import torch
from torch import nn


def tiny():
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.GroupNorm(1, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
    )
"""

IMAGES = """
[model]
name = "tiny_model:tiny"

[data]
kind = "images"
folder = "images"
table = "labels.csv"
unit_ids = "patient"
size = 8

[budget]
epsilon = 8.0
delta = 1e-5
unit = "patient"
"""

FINETUNE = """
[finetune]
scheme = "selective"
steps = 4
every = 2
"""

ADAPT = """
[adapt]
method = "tent"
batch_size = 8
every = 2

[adapt.data]
kind = "images"
folder = "images"
table = "stream.csv"
unit_ids = "patient"
size = 8
"""

CALIBRATE = """
[calibrate]
sources = ["clinic-a", "clinic-b"]
cautious = false

[calibrate.data]
kind = "images"
folder = "images"
table = "calibration.csv"
unit_ids = "patient"
source = "clinic"
size = 8
"""


def make_images(home: Path, table: str = "labels.csv", rows: int = 40, *, seed: int = 0, source: bool = False) -> None:
    """Two images of each patient, of two classes that differ in brightness."""
    rng = np.random.default_rng(seed)
    (home / "images").mkdir(exist_ok=True)
    with (home / table).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label", "patient", *(["clinic"] if source else [])])
        for row in range(rows):
            name, label = f"{Path(table).stem}-{row}.png", row // 2 % 2
            pixels = rng.integers(0, 100, (10, 12, 3)) + 120 * label
            Image.fromarray(pixels.astype(np.uint8)).save(home / "images" / name)
            clinic = [f"clinic-{'ab'[row // 2 % 4 // 2]}"] if source else []
            writer.writerow([name, label, f"p{row // 2}", *clinic])
