"""UCF-101, HMDB-51 and a folder per class, in small."""

from pathlib import Path

import av
import numpy as np
import pytest

from tacit.data import VideoClips


def write(file: Path, seed: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for picture in np.random.default_rng(seed).integers(0, 255, (4, 16, 16), np.uint8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="gray")))
        container.mux(stream.encode())


@pytest.fixture
def ucf(tmp_path: Path) -> Path:
    """Two classes; the first has two groups of two clips each, the second one group."""
    names = [f"Archery/v_Archery_g0{group}_c0{clip}.avi" for group in (1, 2) for clip in (1, 2)]
    names += ["Biking/v_Biking_g01_c01.avi"]
    for seed, name in enumerate(names):
        write(tmp_path / "videos" / name, seed)
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "trainlist01.txt").write_text("".join(f"{name} {2 if 'Biking' in name else 1}\n" for name in names))
    (lists / "testlist01.txt").write_text("\r\n".join(names[3:]) + "\r\n")
    return tmp_path


def test_ucf101_takes_groups_as_units(ucf: Path) -> None:
    train = VideoClips.ucf101(ucf / "videos", ucf / "lists" / "trainlist01.txt", frames=2, clips=3)
    assert train.classes == ("Archery", "Biking")
    assert train.labels().tolist() == [0, 0, 1]  # g01 of Archery and g01 of Biking are not the same group
    assert (train.clips, train.frames) == (3, 2)
    videos = VideoClips.ucf101(ucf / "videos", ucf / "lists" / "trainlist01.txt", unit="video")
    assert videos.labels().tolist() == [0, 0, 0, 0, 1]
    test = VideoClips.ucf101(ucf / "videos", ucf / "lists" / "testlist01.txt")
    assert test.labels().tolist() == [0, 1]


def test_ucf101_numbers_classes_as_its_index_does(ucf: Path) -> None:
    index = ucf / "lists" / "classInd.txt"
    index.write_text("1 Biking\n2 Archery\n")
    assert VideoClips.ucf101(ucf / "videos", ucf / "lists" / "testlist01.txt").labels().tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"trainlist01.txt, line 1: Archery is class 1 here, but 2 in"):
        VideoClips.ucf101(ucf / "videos", ucf / "lists" / "trainlist01.txt", index)
    index.write_text("1 Biking\n3 Archery\n")
    with pytest.raises(ValueError, match=r"classInd.txt, line 2"):
        VideoClips.ucf101(ucf / "videos", ucf / "lists" / "testlist01.txt")


def test_ucf101_says_what_is_wrong(ucf: Path) -> None:
    videos, split = ucf / "videos", ucf / "lists" / "testlist01.txt"
    with pytest.raises(ValueError, match="There is no folder"):
        VideoClips.ucf101(ucf / "nowhere", split)
    with pytest.raises(ValueError, match="There is no file"):
        VideoClips.ucf101(videos, ucf / "lists" / "testlist04.txt")
    with pytest.raises(ValueError, match="'group' or 'video'"):
        VideoClips.ucf101(videos, split, unit="person")  # type: ignore[arg-type]
    for text, match in (
        ("Archry/v_Archery_g01_c01.avi", r"line 1: there is no class 'Archry'; did you mean 'Archery'\?"),
        ("Archery/v_Archery_g09_c01.avi", r"1 of 1 files of .* are missing, the first is .*g09_c01.avi"),
        ("Archery/other.avi", "its group is not known; use unit='video'"),
        ("\n", "is empty"),
    ):
        split.write_text(text)
        with pytest.raises(ValueError, match=match):
            VideoClips.ucf101(videos, split)


@pytest.fixture
def hmdb(tmp_path: Path) -> Path:
    for seed, name in enumerate(("cartwheel/a.avi", "cartwheel/b #1.avi", "brush_hair/c.avi", "brush_hair/d.avi")):
        write(tmp_path / "videos" / name, seed)
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "cartwheel_test_split1.txt").write_text("a.avi 1 \nb #1.avi 2 \n")
    (lists / "brush_hair_test_split1.txt").write_text("c.avi 1 \nd.avi 0 \n")
    (lists / "cartwheel_test_split2.txt").write_text("a.avi 0 \n")
    return tmp_path


def test_hmdb51_reads_a_part_of_a_split(hmdb: Path) -> None:
    train = VideoClips.hmdb51(hmdb / "videos", hmdb / "lists", frames=2)
    assert train.classes == ("brush_hair", "cartwheel")
    assert train.labels().tolist() == [0, 1]
    test = VideoClips.hmdb51(hmdb / "videos", hmdb / "lists", part="test")
    assert test.labels().tolist() == [1]
    with pytest.raises(ValueError, match=r"has no file CLASS_test_split3.txt"):
        VideoClips.hmdb51(hmdb / "videos", hmdb / "lists", split=3)
    with pytest.raises(ValueError, match="gives no file to train"):
        VideoClips.hmdb51(hmdb / "videos", hmdb / "lists", split=2)
    with pytest.raises(ValueError, match="no part 'val'"):
        VideoClips.hmdb51(hmdb / "videos", hmdb / "lists", part="val")  # type: ignore[arg-type]
    (hmdb / "lists" / "cartwheels_test_split1.txt").write_text("a.avi 1\n")
    with pytest.raises(ValueError, match=r"no folder of the class 'cartwheels'; did you mean 'cartwheel'\?"):
        VideoClips.hmdb51(hmdb / "videos", hmdb / "lists")
    (hmdb / "lists" / "brush_hair_test_split1.txt").write_text("c.avi 5\n")
    with pytest.raises(ValueError, match="followed by 0, 1 or 2"):
        VideoClips.hmdb51(hmdb / "videos", hmdb / "lists")


def test_a_folder_per_class(hmdb: Path) -> None:
    (hmdb / "videos" / "cartwheel" / "notes.txt").write_text("no video")
    data = VideoClips.folder(hmdb / "videos", groups=[0, 0, 1, 2])
    assert data.labels().tolist() == [0, 1, 1]
    assert data.classes == ("brush_hair", "cartwheel")
    with pytest.raises(ValueError, match="holds no video"):
        VideoClips.folder(hmdb / "lists")
