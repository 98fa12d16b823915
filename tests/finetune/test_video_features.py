"""A linear probe on videos: the backbone sees each clip once, and the head learns what it would on the clips."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from by_hand import rows_in_checks
from torch import Tensor, nn

from tacit.data import VideoClips
from tacit.finetune import DPSGD, Evaluation, Fitted, Standardise, fit
from tacit.models import VideoNet
from tacit.privacy import Ledger

LENGTHS = (40, 33, 12, 3, 25, 18)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("films")
    files = [home / f"{length}.mp4" for length in LENGTHS]
    for file, length in zip(files, LENGTHS, strict=True):
        random = np.random.default_rng(length)
        with av.open(str(file), "w") as container:
            stream = container.add_stream("mpeg4", rate=25)
            stream.width = stream.height = 16
            stream.pix_fmt = "yuv420p"
            for _ in range(length):
                pixels = random.integers(0, 255, (16, 16), np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="gray")))
            container.mux(stream.encode())
    return files


class Net(nn.Module):
    """Counts the rows that pass through its backbone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 5), nn.Tanh())
        self.head = nn.Linear(5, 2)
        self.seen = 0

    def forward(self, clips: Tensor) -> Tensor:
        self.seen += len(clips)
        return self.head(self.body(clips))  # type: ignore[no-any-return]


def videos(films: list[Path], **more: Any) -> VideoClips:
    options: dict[str, Any] = {"clips": 4, "frames": 3, "stride": 1, "colour": False}
    return VideoClips(films, [n % 2 for n in range(len(films))], **(options | more))


def probe(model: nn.Module, data: VideoClips, **more: Any) -> Fitted:
    return fit(
        model,
        data,
        scheme="linear",
        optimizer=DPSGD(batch_size=6, steps=20, clip=1.0, lr=0.5),
        epsilon=20.0,
        delta=1e-3,
        size=6,
        seed=0,
        **more,
    )


def different(length: int, places: int, clips: int = 4, frames: int = 3) -> int:
    """How many different first frames the middles of so many parts have, counted on the frames themselves."""
    starts = max(length - frames + 1, 1)
    return len({min(int((i + 0.5) / (clips * places) * starts), starts - 1) for i in range(clips * places)})


def test_the_backbone_runs_once_per_clip(films: list[Path]) -> None:
    """16 clips of a unit are asked for: of four parts with five places each (odd), less where frames do not suffice."""
    model = Net()
    probe(model, videos(films))
    clips = sum(different(length, places=5) for length in LENGTHS)
    tried = model.seen - clips
    assert 0 < tried <= 20 + rows_in_checks(clips)  # synthetic and blank rows, before anything is charged
    more = Net()
    probe(more, videos(films), evaluate=Evaluation(data=videos(films), every=1, public=True))
    evaluated = sum(different(length, places=1) for length in LENGTHS)
    assert evaluated <= more.seen - model.seen <= evaluated + rows_in_checks(evaluated)  # 20 evaluations, one pass


def test_features_give_the_head_that_the_clips_would_give(films: list[Path]) -> None:
    """With one place for each part, training shows the clips of an evaluation: by hand from the sums of the steps."""
    data = videos(films, cached_clips=4)
    rows = data.rows(torch.arange(6), None)
    model = Net()
    features = model.body(rows.inputs).detach()
    checked = []

    def curator(event: Any) -> None:
        weight, bias = model.head.weight.detach(), model.head.bias.detach()
        expected = torch.zeros(2, 5)
        for unit in range(6):
            mine = rows.owner == unit
            wrong = (features[mine] @ weight.T + bias).softmax(1) - nn.functional.one_hot(rows.labels[mine], 2)
            gradient = wrong.T @ features[mine] / 4
            norm = float(torch.cat([gradient.flatten(), wrong.mean(0)]).norm())
            expected += gradient * min(1.0, 1.0 / norm)
        assert torch.allclose(event.clipped_sum.sum["weight"].float(), expected, atol=1e-5)
        checked.append(event.step)

    probe(model, data, curator=curator)
    assert checked == list(range(20))


def test_drawn_places_are_those_of_the_clips(films: list[Path]) -> None:
    """A table row is the clip that `VideoClips` shows where its uniform is in the middle of the place."""
    data = videos(films)
    table = data.as_table(training=True)
    uniforms = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)).clamp_min(1e-6)
    middles = 1 - (((1 - uniforms.double()) * 5).floor() + 0.5) / 5
    units = torch.tensor([3, 0, 5, 1, 2, 4])
    found, expected = table.rows(units, uniforms), data.rows(units, middles)
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.owner, expected.owner)
    assert torch.equal(table.rows(units, None).inputs, data.rows(units, None).inputs)
    assert (table.unit, table.unit_ids, len(table), table.scored_by) == ("video", data.unit_ids, 6, "unit")


def test_features_of_all_layers_and_standardised_ones(films: list[Path]) -> None:
    with Ledger("sqlite://") as ledger:
        fitted = probe(Net(), videos(films), standardise=Standardise(noise=2.0, bound=3.0), ledger=ledger, subject="s")
        assert fitted.guarantee.epsilon <= 20.0
        assert len(ledger.entries("s")) > len(probe(Net(), videos(films)).ledger.entries("finetune"))
    net = VideoNet(classes=2, channels=1, frames=2, size=16, widths=(16,), depths=(2,))
    data = videos(films, frames=2)
    layered = probe(net, data, features="all")
    assert layered.trained == 2 * (3 * 16) + 2  # two blocks and what comes into the head
    assert layered.model(data.rows(torch.tensor([0]), None).inputs).shape == (4, 2)
    with pytest.raises(ValueError, match="not augmented"):
        probe(Net(), videos(films, augment=2), features="last")


def test_the_number_of_clips_is_part_of_the_fingerprint(films: list[Path]) -> None:
    assert videos(films).fingerprint() != videos(films, cached_clips=30).fingerprint()
    assert videos(films).fingerprint() == videos(films).fingerprint()


def test_worker_processes_read_the_same_clips(films: list[Path]) -> None:
    """Whole training and cached features alike: bit for bit what one process gives."""
    for scheme in ("full", "linear"):
        weights = []
        for workers in (0, 2):
            model = Net()
            fit(
                model,
                videos(films),
                scheme=scheme,
                optimizer=DPSGD(batch_size=4, steps=3, clip=1.0, lr=0.5),
                epsilon=20.0,
                delta=1e-3,
                size=6,
                seed=0,
                workers=workers,
            )
            weights.append(torch.cat([p.flatten() for p in model.parameters()]))
        assert torch.equal(*weights)
