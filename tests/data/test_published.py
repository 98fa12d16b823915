"""The published layouts, in small: files are written as published and read back."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tacit.data import cifar_c, imagenet_c, imagenet_r

WNIDS = ["n01443537", "n01440764", "n01484850", "n01491361"]  # not sorted, as a model's own order may be


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Five severities of four images; the value of a pixel tells where it stands."""
    row, y, x, channel = np.indices((20, 32, 32, 3))
    np.save(tmp_path / "fog.npy", (10 * row + y + 2 * x + 5 * channel).astype(np.uint8))
    np.save(tmp_path / "labels.npy", np.tile(np.array([3, 1, 4, 1]), 5))
    return tmp_path


def test_cifar_c_takes_the_rows_of_the_severity(cifar: Path) -> None:
    for severity in range(1, 6):
        images, labels = cifar_c(cifar, "fog", severity)
        assert (images.dtype, tuple(images.shape), labels.dtype) == (torch.uint8, (4, 3, 32, 32), torch.int64)
        assert labels.tolist() == [3, 1, 4, 1]
        row = 4 * (severity - 1) + 2
        assert int(images[2, 1, 7, 30]) == (10 * row + 7 + 60 + 5) % 256
    images.zero_()  # the caller's own: neither the file nor the next reading changes
    assert int(cifar_c(str(cifar), "fog", 5)[0].sum()) > 0


def test_cifar_c_says_what_is_wrong_with_a_folder(cifar: Path) -> None:
    with pytest.raises(ValueError, match="There is no folder"):
        cifar_c(cifar / "nowhere", "fog", 1)
    with pytest.raises(ValueError, match=r"no fogg.npy; did you mean 'fog'\?"):
        cifar_c(cifar, "fogg", 1)
    for severity in (0, 6, True):
        with pytest.raises(ValueError, match="from 1 to 5"):
            cifar_c(cifar, "fog", severity)
    np.save(cifar / "frost.npy", np.zeros((21, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match=r"frost.npy has 21 rows: five severities"):
        cifar_c(cifar, "frost", 1)
    np.save(cifar / "frost.npy", np.zeros((15, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match=r"labels.npy has shape \(20,\), but frost.npy has 15 rows"):
        cifar_c(cifar, "frost", 1)
    np.save(cifar / "frost.npy", np.zeros((20, 3, 32, 32), np.float32))
    with pytest.raises(ValueError, match="not uint8 rows x height x width x 3"):
        cifar_c(cifar, "frost", 1)
    (cifar / "frost.npy").write_bytes((cifar / "fog.npy").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"frost.npy cannot be read"):
        cifar_c(cifar, "frost", 1)
    (cifar / "frost.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"frost.npy cannot be read"):
        cifar_c(cifar, "frost", 1)


def write(file: Path, size: tuple[int, int], colour: tuple[int, int, int]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file, quality=95)


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Two severities of a corruption, three classes, 5 images."""
    for severity in (1, 4):
        home = tmp_path / "fog" / str(severity)
        for wnid, count in zip(sorted(WNIDS[:3]), (2, 1, 2), strict=True):
            for number in range(count):
                write(home / wnid / f"ILSVRC2012_val_{number:08}.JPEG", (224, 224), (50 * severity, number, 0))
    return tmp_path


def test_imagenet_c_reads_a_corruption_at_a_severity(imagenet: Path) -> None:
    data = imagenet_c(imagenet, "fog", 4)
    assert len(data) == 5
    assert data.classes == tuple(sorted(WNIDS[:3]))
    assert data.labels.tolist() == [0, 0, 1, 2, 2]
    image, label = data[4]
    assert (image.dtype, tuple(image.shape), label) == (torch.uint8, (3, 224, 224), 2)
    assert abs(int(image[0].float().mean()) - 200) <= 2
    images, labels = next(iter(DataLoader(data, batch_size=5)))
    assert tuple(images.shape) == (5, 3, 224, 224)
    assert labels.tolist() == [0, 0, 1, 2, 2]


def test_imagenet_c_labels_follow_a_given_list(imagenet: Path, tmp_path: Path) -> None:
    data = imagenet_c(imagenet, "fog", 1, wnids=WNIDS, size=64)
    assert data.labels.tolist() == [1, 1, 0, 2, 2]
    assert data.mask.tolist() == [True, True, True, False]
    assert tuple(data[0][0].shape) == (3, 64, 64)
    listed = tmp_path / "classes.txt"
    listed.write_text("\n".join(f"{wnid} some fish" for wnid in WNIDS) + "\n")
    assert imagenet_c(imagenet, "fog", 1, wnids=listed).labels.equal(data.labels)


def test_imagenet_c_says_what_is_wrong(imagenet: Path) -> None:
    with pytest.raises(ValueError, match=r"no corruption 'fgo'; did you mean 'fog'\?"):
        imagenet_c(imagenet, "fgo", 1)
    with pytest.raises(ValueError, match=r"There is no folder .*fog.2"):
        imagenet_c(imagenet, "fog", 2)
    with pytest.raises(ValueError, match="not in the list of classes: n01484850"):
        imagenet_c(imagenet, "fog", 1, wnids=WNIDS[:2])
    with pytest.raises(ValueError, match="names one WordNet id twice"):
        imagenet_c(imagenet, "fog", 1, wnids=[*WNIDS, WNIDS[0]])
    with pytest.raises(ValueError, match=r"There is no file .* with the list of classes"):
        imagenet_c(imagenet, "fog", 1, wnids=imagenet / "none.txt")
    with pytest.raises(ValueError, match="does not fit into a shorter side of 200"):
        imagenet_c(imagenet, "fog", 1, size=224, resize=200)
    (imagenet / "snow" / "1" / WNIDS[0]).mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no image"):
        imagenet_c(imagenet, "snow", 1)


def test_an_unreadable_image_is_named(imagenet: Path) -> None:
    broken = imagenet / "fog" / "1" / WNIDS[2] / "zz_broken.JPEG"
    broken.write_bytes(b"no picture")
    whole = next((imagenet / "fog" / "1" / WNIDS[2]).glob("ILSVRC*")).read_bytes()
    broken.with_name("zz_cut.JPEG").write_bytes(whole[: len(whole) // 2])
    data = imagenet_c(imagenet, "fog", 1)
    for place, name in ((-2, "zz_broken.JPEG"), (-1, "zz_cut.JPEG")):
        with pytest.raises(ValueError, match=rf"{name} cannot be read"):
            data[place]
    assert len(data[0][0]) == 3


def test_imagenet_r_has_labels_among_all_classes_and_a_mask(tmp_path: Path) -> None:
    everything = [f"n{number:08}" for number in range(1000)]
    chosen = everything[3::5]  # 200 of the 1,000
    for place, wnid in enumerate(chosen):
        write(tmp_path / wnid / "art_0.jpg", (20, 10), (place, 0, 255))
    (tmp_path / "README.txt").write_text("as published, a file lies beside the folders")
    data = imagenet_r(tmp_path, wnids=everything, size=7)
    assert len(data) == 200
    assert data.labels.tolist() == list(range(3, 1000, 5))
    assert (data.mask.dtype, len(data.mask), int(data.mask.sum())) == (torch.bool, 1000, 200)
    assert data.mask.nonzero().flatten().equal(data.labels)
    assert tuple(data[0][0].shape) == (3, 7, 7)
    assert data.resize == 8


def test_a_wide_picture_is_cut_around_its_middle(tmp_path: Path) -> None:
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = 255
    (tmp_path / "n1").mkdir()
    Image.fromarray(wide).save(tmp_path / "n1" / "a.png")
    image, _ = imagenet_r(tmp_path, wnids=["n1"], size=16, resize=16)[0]
    assert (image == 255).all()
    grey = Image.fromarray(wide[..., 0])
    grey.save(tmp_path / "n1" / "a.png")
    image, _ = imagenet_r(tmp_path, wnids=["n1"], size=8, resize=16)[0]
    assert tuple(image.shape) == (3, 8, 8)
    assert (image == 255).all()
