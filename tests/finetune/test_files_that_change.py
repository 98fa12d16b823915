"""Files that vanish, change or come back: a run that may be replayed stops, and never puts one noise on two sums."""

import errno
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tacit import StepEvent
from tacit.data import Broken, ImageFiles, ImageShape, Records, VideoClips, chexpert
from tacit.finetune import DPSGD, Fitted, Labels, fit
from tacit.privacy import Ledger

FILES = 6


@pytest.fixture
def films(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"{number}.mp4" for number in range(FILES)]
    for number, file in enumerate(files):
        with av.open(str(file), "w") as container:
            stream = container.add_stream("mpeg4", rate=25)
            stream.width = stream.height = 16
            stream.pix_fmt = "yuv420p"
            for frame in range(8):
                pixels = np.full((16, 16), 20 * number + frame, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="gray")))
            container.mux(stream.encode())
    return files


def clips(films: list[Path]) -> VideoClips:
    return VideoClips(films, [number % 2 for number in range(FILES)], clips=2, frames=2, memory=0, colour=False)


def run(folder: Path, data: Records, **more: Any) -> Fitted:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2 * 256, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    return run_on(folder, model, data, **({"head": "keep"} | more))


def run_on(folder: Path, model: nn.Module, data: Records, **more: Any) -> Fitted:
    with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        return fit(
            model,
            data,
            scheme="full",
            optimizer=DPSGD(batch_size=FILES, steps=4, clip=1.0, lr=0.1),
            epsilon=5.0,
            delta=1e-3,
            size=FILES,
            ledger=ledger,
            subject="films",
            **({"checkpoint": folder / "run.safetensors", "every": 2, "seed": 0} | more),
        )


class Killed(BaseException):
    """Not an error: nothing may catch it."""


def killed_in(step: int) -> Any:
    def curator(event: Any) -> None:
        if isinstance(event, StepEvent) and event.step == step:
            raise Killed

    return curator


def test_a_run_on_files_that_stay_is_resumed(tmp_path: Path, films: list[Path]) -> None:
    with pytest.raises(Killed):
        run(tmp_path, clips(films), curator=killed_in(3))
    assert run(tmp_path, clips(films)).steps == 4


@pytest.mark.parametrize("same_records", [True, False], ids=["same records", "opened again"])
@pytest.mark.parametrize("change", ["gone", "replaced", "unreadable"])
def test_a_replay_with_a_changed_file_is_refused(
    tmp_path: Path, films: list[Path], change: str, same_records: bool
) -> None:
    """Of the sums of one step with and without the video, the difference would be its clipped gradient, noiseless."""
    data = clips(films)
    with pytest.raises(Killed):
        run(tmp_path, data, curator=killed_in(3))
    if change == "gone":
        films[2].unlink()
    elif change == "replaced":
        shutil.copy(films[1], films[2])
        films[1].write_bytes(films[1].read_bytes() + b"\0")  # no twins
    else:
        films[2].write_bytes(b"")
    with pytest.raises((ValueError, OSError), match=r"The data is not what it was|cannot be read"):
        run(tmp_path, data if same_records else clips(films))


def test_a_file_that_was_unreadable_and_came_back_is_refused(tmp_path: Path, films: list[Path]) -> None:
    content = films[2].read_bytes()
    films[2].write_bytes(content[:40])
    data = clips(films)
    assert len(data) == FILES - 1
    with pytest.raises(Killed):
        run(tmp_path, data, curator=killed_in(3))
    films[2].write_bytes(content)
    with pytest.raises(ValueError, match="The data is not what it was"):
        run(tmp_path, clips(films))


def test_a_file_that_vanishes_in_a_resumable_run_stops_it(tmp_path: Path, films: list[Path]) -> None:
    """And when it is back as it was, the run goes on; all units were drawn in each step (the rate is 1)."""
    away = tmp_path / "away"
    state = films[2].stat()

    def curator(event: Any) -> None:
        if isinstance(event, StepEvent) and event.step == 1 and films[2].exists():
            films[2].rename(away)

    with pytest.raises(OSError, match=r"Some rows cannot be read now. Nothing of this step was released"):
        run(tmp_path, clips(films), curator=curator)
    away.rename(films[2])
    assert films[2].stat().st_mtime_ns == state.st_mtime_ns
    assert run(tmp_path, clips(films)).steps == 4


def test_a_file_that_vanishes_where_nothing_is_replayed_adds_zero(tmp_path: Path, films: list[Path]) -> None:
    """The sum is that of the other five, by single-unit autograd; a film of eight frames has one clip of eight."""
    data = VideoClips(films, [number % 2 for number in range(FILES)], clips=1, frames=8, stride=1, memory=0)
    rows = data.rows(torch.arange(FILES), None)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8 * 3 * 256, 2))

    def expected(units: list[int]) -> torch.Tensor:
        total = torch.zeros(2, 8 * 3 * 256)
        for unit in units:
            loss = nn.functional.cross_entropy(model(rows.inputs[unit, None]), rows.labels[unit, None])
            weight, bias = torch.autograd.grad(loss, list(model.parameters()))
            total += weight * min(1.0, 1.0 / float(torch.cat([weight.flatten(), bias]).norm()))
        return total

    def curator(event: Any) -> None:
        if not isinstance(event, StepEvent):
            return
        there = [unit for unit in range(FILES) if event.step == 0 or unit != 2]
        right.append(torch.allclose(event.clipped_sum.sum["1.weight"].float(), expected(there), atol=1e-4))
        films[2].unlink(missing_ok=True)

    right: list[bool] = []
    run_on(tmp_path, model, data, curator=curator, checkpoint=None, head="keep")
    assert right
    assert all(right)


def test_a_fault_of_the_machine_is_no_fault_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files: as broken bytes the image would add zero now, and its gradient when the step is replayed."""
    file = tmp_path / "scan.png"
    Image.new("L", (8, 8)).save(file)
    images = ImageFiles([file], [0], shape=ImageShape(height=8, width=8, channels=1), memory=0)

    def busy(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Image, "open", busy)
        with pytest.raises(OSError, match="Too many") as raised:
            images[0]
    assert not isinstance(raised.value, Broken)
    file.write_bytes(b"no image")
    with pytest.raises(Broken):
        ImageFiles([file], [0], shape=ImageShape(height=8, width=8, channels=1), memory=0)[0]


def test_x_rays_that_change_are_refused_as_well(tmp_path: Path) -> None:
    lines = ["Path,Frontal/Lateral,Edema"]
    for number in range(FILES):
        file = tmp_path / "train" / f"patient{number:05}" / "study1" / "view1_frontal.jpg"
        file.parent.mkdir(parents=True)
        Image.new("L", (16, 32), 20 * number).save(file)
        lines.append(f"{file.relative_to(tmp_path)},Frontal,{number % 2}.0")
    (tmp_path / "train.csv").write_text("\n".join(lines))

    def data() -> Records:
        return chexpert(tmp_path / "train.csv", tmp_path, diseases=("Edema",), size=16, memory=0)

    options: dict[str, Any] = {"task": Labels(1), "head": "new"}

    def begin(**more: Any) -> Fitted:
        model = nn.Sequential(nn.Flatten(), nn.Linear(256, 1))
        return run_on(tmp_path, model, data(), **(options | more))

    with pytest.raises(Killed):
        begin(curator=killed_in(3))
    file.write_bytes(b"no image any more")
    with pytest.raises(ValueError, match="The data is not what it was"):
        begin()
