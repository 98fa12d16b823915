"""Several labels per image: five attributes of the classes of CIFAR-100, on features of imagenet_features.py.

    python -m studies.prepare.cifar100_attributes SHARED_DATA_FOLDER FEATURES_FOLDER

writes FEATURES_FOLDER/cifar100-attributes.npz: the features of cifar100-features.npz with rows x 5 labels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

GROUPS = {
    "mammals": "beaver otter seal fox porcupine possum raccoon skunk hamster mouse rabbit shrew squirrel kangaroo",
    "large animals": "dolphin whale bear leopard lion tiger wolf camel cattle chimpanzee elephant crocodile dinosaur "
    "shark",
    "small animals": "aquarium_fish flatfish ray trout bee beetle butterfly caterpillar cockroach crab lobster snail "
    "spider worm lizard snake turtle",
    "small plants": "orchid poppy rose sunflower tulip apple mushroom orange pear sweet_pepper",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "things": "bottle bowl can cup plate clock keyboard lamp telephone television bed chair couch table wardrobe",
    "vehicles": "bicycle bus motorcycle pickup_truck train lawn_mower rocket streetcar tank tractor",
    "buildings": "bridge castle house road skyscraper",
    "scenes": "cloud forest mountain plain sea",
}
ATTRIBUTES = {
    "animal": ("mammals", "large animals", "small animals"),
    "plant": ("small plants", "trees"),
    "made by people": ("things", "vehicles", "buildings"),
    "large": ("large animals", "trees", "vehicles", "buildings", "scenes"),
}
WATER = "beaver otter seal dolphin whale aquarium_fish flatfish ray shark trout crab lobster crocodile turtle sea"


def attributes(classes: list[str]) -> np.ndarray:
    """One row per class, one column per attribute; the last is "lives in, or is, water"."""
    sets = [{name for group in groups for name in GROUPS[group].split()} for groups in ATTRIBUTES.values()]
    sets.append(set(WATER.split()))
    if unknown := set().union(*sets) - set(classes):
        raise SystemExit(f"These are no classes of CIFAR-100: {', '.join(sorted(unknown))}.")
    return np.array([[name in each for each in sets] for name in classes], dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("features", type=Path)
    options = parser.parse_args()
    with np.load(options.data / "cifar100_lossless_webp_train20k_test10k.npz") as packed:
        table = attributes([str(name) for name in packed["classes"]])
    with np.load(options.features / "cifar100-features.npz") as found:
        parts = {name: found[name] for name in found.files}
    for part in ("train", "test"):
        parts[f"{part}_labels"] = table[parts[f"{part}_labels"]]
    np.savez(options.features / "cifar100-attributes.npz", **parts)
    print(f"{table.sum(0).astype(int).tolist()} of {len(table)} classes have each attribute")


if __name__ == "__main__":
    main()
