"""Clips as a pretrained net takes them: channels, layout, normalization, proportions, views."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from films import write
from torch import Tensor

from tacit.data import ImageShape, VideoClips

FIRST = torch.tensor([0])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One colour, red, in the middle third of 48 x 16 pixels; green on the left and blue on the right."""
    file = tmp_path_factory.mktemp("films") / "wide.mp4"
    pixels = np.zeros((16, 48, 3), np.uint8)
    for third, channel in enumerate((1, 0, 2)):
        pixels[:, 16 * third : 16 * third + 16, channel] = 220
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 48, 16, "yuv444p"
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file


def test_frames_are_rgb_and_keep_their_proportions(wide: Path) -> None:
    data = VideoClips([wide], [0], clips=1, frames=2, stride=1, size=16)
    shown = data.rows(FIRST, None).inputs
    assert shown.shape == (1, 2, 3, 16, 16)
    middle = shown[0, 0, :, :, 3:13].mean((1, 2)) * 255
    assert middle.tolist() == pytest.approx([220, 0, 0], abs=6)  # red alone: the sides were cut off
    squeezed = VideoClips([wide], [0], clips=1, frames=2, stride=1, size=16, crop=None).rows(FIRST, None).inputs[0, 0]
    assert (squeezed[1, :, 1:4].mean() * 255).item() == pytest.approx(220, abs=12)  # green is still on the left


def test_a_crop_below_one_is_resized_first(wide: Path) -> None:
    """Side 16 at crop 0.5: 16 x 48 becomes 32 x 96, of which the middle 16 x 16 lies inside the red third."""
    data = VideoClips([wide], [0], clips=1, frames=1, size=16, crop=0.5)
    shown = data.rows(FIRST, None).inputs[0, 0] * 255
    assert shown[0].min() > 205
    assert shown[1:].max() < 20


def test_layout_mean_and_std(wide: Path) -> None:
    mean, std = (0.5, 0.25, 0.1), (0.5, 0.2, 0.4)
    plain = VideoClips([wide], [0], clips=2, frames=3, stride=1, size=8).rows(FIRST, None).inputs
    how = {"clips": 2, "frames": 3, "stride": 1, "layout": "CT"}
    found = VideoClips([wide], [0], size=8, mean=mean, std=std, **how).rows(FIRST, None).inputs
    assert found.shape == (2, 3, 3, 8, 8)
    for channel in range(3):
        expected = (plain[:, :, channel] - mean[channel]) / std[channel]
        assert torch.allclose(found[:, channel], expected, atol=1e-6)
    with pytest.raises(ValueError, match="layout is 'CHW'"):
        VideoClips([wide], [0], layout="CHW")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mean and std"):
        VideoClips([wide], [0], mean=(0.1, 0.2))


def test_what_a_timm_model_says_of_its_inputs_is_used(wide: Path) -> None:
    told = {
        "input_size": (3, 8, 8),
        "mean": (0.5,) * 3,
        "std": (0.25,) * 3,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
    }
    shape = ImageShape.of(SimpleNamespace(pretrained_cfg=told))
    assert (shape.height, shape.crop, shape.resampling, shape.std) == (8, 0.875, "bicubic", (0.25,) * 3)
    data = VideoClips([wide], [0], clips=1, frames=1, shape=shape)
    by_hand = VideoClips([wide], [0], clips=1, frames=1, size=8, crop=0.875)
    near = (by_hand.rows(FIRST, None).inputs - 0.5) / 0.25
    assert torch.allclose(data.rows(FIRST, None).inputs, near, atol=0.3)  # another filter
    with pytest.raises(ValueError, match="does not say what pictures it takes"):
        ImageShape.of(torch.nn.Linear(2, 2))


def test_timm_models_say_it() -> None:
    timm = pytest.importorskip("timm")
    shape = ImageShape.of(timm.create_model("test_vit"))
    assert (shape.channels, len(shape.mean)) == (3, 3)


@dataclass(frozen=True)
class Darker:
    """A transform of one's own."""

    uniforms: int = 1

    def __call__(self, rows: Tensor, uniforms: Tensor) -> Tensor:
        return rows * uniforms.view(-1, 1, 1, 1, 1)


def test_views_are_rows_of_the_unit_and_go_by_its_numbers(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{length}.mp4", length) for length in (10, 12)]
    how = {"clips": 2, "frames": 3, "stride": 1, "colour": False}
    plain = VideoClips(files, [0, 1], **how)
    data = VideoClips(files, [0, 1], augment=3, views=Darker(), **how)
    assert (data.uniforms, data.most_rows, data.draws, plain.draws) == (2 + 2 * 3, 6, True, False)
    uniforms = torch.rand(2, 8, generator=torch.Generator().manual_seed(0)).clamp_min(1e-3)
    rows, clips = data.rows(torch.tensor([1, 0]), uniforms), plain.rows(torch.tensor([1, 0]), uniforms[:, :2])
    assert rows.owner.tolist() == [0] * 6 + [1] * 6
    assert rows.labels.tolist() == [1] * 6 + [0] * 6
    for unit in range(2):
        for clip in range(2):
            for view in range(3):
                row = rows.inputs[6 * unit + 3 * clip + view]
                factor = uniforms[unit, 2 + 3 * clip + view]
                assert torch.allclose(row, clips.inputs[2 * unit + clip] * factor)
    assert torch.equal(data.rows(torch.tensor([0]), None).inputs, plain.rows(torch.tensor([0]), None).inputs)
    flipped = VideoClips(files, [0, 1], augment=1, **how)  # flips and shifts, the same of all frames of a clip
    assert (flipped.uniforms, flipped.draws) == (2 + 2 * 3, False)
    assert len({one.fingerprint() for one in (plain, data, flipped)}) == 3
