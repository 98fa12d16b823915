"""Cached features give what the whole model gives, run the backbone once, and may be standardised privately."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, gap, key, one_row_units, people, rows_in_checks, train, weights
from torch import Tensor, nn

from tacit.data._tensor_records import TensorRecords
from tacit.finetune import DPGD, DPSGD, Backbone, Evaluation, Probe, Standardise, fit
from tacit.finetune import _features as features
from tacit.finetune import _linear_probe as probing
from tacit.finetune._features import cached, extract
from tacit.models import ViT
from tacit.privacy import Budget, Ledger


class Counting(nn.Module):
    """A backbone that counts the rows that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 6).double()
        self.rows = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.rows += len(inputs)
        return torch.tanh(self.layer(inputs))


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(Counting(), nn.Linear(6, 3).double())


def run(made: nn.Module, data: Any, **more: Any) -> Any:
    options: dict[str, Any] = {
        "optimizer": DPSGD(batch_size=8, steps=6, clip=0.5),
        "epsilon": 5.0,
        "delta": 1e-5,
        "size": 20,
        "scheme": "linear",
        "seed": SEED,
    }
    return fit(made, data, **(options | more))


def test_a_cached_probe_is_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = run(model(), people())
    monkeypatch.setattr(probing, "is_linear", lambda *_: False)
    slow = run(model(), people())
    assert gap(weights(quick.model), weights(slow.model)) < 1e-10
    assert quick.model[0].rows < slow.model[0].rows
    inputs, _ = people()
    assert torch.allclose(quick.model(inputs), slow.model(inputs), atol=1e-10)


@pytest.mark.parametrize("layers", [None, "last"])
def test_the_backbone_sees_each_row_once(layers: Any) -> None:
    """Twenty-four people, seven held out, two blank rows (is the model linear, does it work), and those of checks."""
    made = model()
    run(made, people(), features=layers, evaluate=Evaluation(data=people(7), public=True, every=1))
    assert made[0].rows <= 24 + 7 + 2 + rows_in_checks(24) + rows_in_checks(7)


@pytest.mark.parametrize("after", [nn.Tanh(), nn.Softmax(1), nn.LayerNorm(3, dtype=torch.float64)])
def test_what_comes_after_the_head_is_trained_through(after: nn.Module) -> None:
    """The new head is zero, and so is tanh of it: that must not hide that there is more than a head."""
    fitted = run(nn.Sequential(*model(), after), people())
    with pytest.raises(ValueError, match="more than a head"):
        run(nn.Sequential(*model(), after), people(), features="last")
    assert fitted.model[0].rows > 24 + 2


def test_whether_rows_are_finite_does_not_decide_how_it_is_computed() -> None:
    inputs, labels = people()
    inputs[0] = math.nan
    made = model()
    run(made, (inputs, labels), features="last")
    assert made[0].rows <= 24 + 2 + rows_in_checks(24)


def test_large_features_lie_in_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs, labels = people()
    backbone = Backbone(model())
    plain = extract(backbone, TensorRecords(inputs, labels))
    assert torch.allclose(plain, model()[0](inputs))
    monkeypatch.setattr(features, "LARGE", 100)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with cached(backbone, TensorRecords(inputs, labels)) as table:
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert list(folder.iterdir()) == []
        assert torch.equal(table.inputs, plain)
        assert len(table) == 24
    assert list(tmp_path.iterdir()) == []
    assert gap(weights(run(model(), people()).model), weights(_in_memory().model)) == 0


def test_where_a_file_in_use_keeps_its_name_it_is_private_until_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def in_use(path: Path) -> None:
        raise PermissionError(str(path))

    inputs, labels = people()
    backbone = Backbone(model())
    plain = extract(backbone, TensorRecords(inputs, labels))
    monkeypatch.setattr(features, "LARGE", 100)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "unlink", in_use)
    with cached(backbone, TensorRecords(inputs, labels)) as table:
        (file,) = tmp_path.rglob("features")
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert file.stat().st_size == 24 * 6 * 8
        assert torch.equal(table.inputs, plain)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import time
import torch
from pathlib import Path
from tacit.data import TensorRecords
from tacit.finetune import Backbone, _features, cache_blocks
from tacit.models import ViT

_features.LARGE = 1000
model = ViT(channels=1, classes=3, size=8, patch=4, width=8, depth=3, heads=2).eval()
rows = torch.randn(48, 1, 8, 8), torch.zeros(48, dtype=torch.long)
blocks = cache_blocks(model, rows, last_blocks=1)
with _features.cached(Backbone(model), TensorRecords(*rows)) as features:
    assert features.inputs.isfinite().all() and blocks.rows(torch.arange(48), None).inputs.isfinite().all()
    maps = Path("/proc/self/maps")
    print(maps.read_text().count("(deleted)") if maps.exists() else 2, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="a file in use keeps its name")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_no_activations_behind(how: signal.Signals, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED], env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert int(child.stdout.readline()) >= 2  # files that are mapped and have no name: features and activations
        child.send_signal(how)
        assert child.wait() == -how
    finally:
        child.kill()
        child.communicate()
    left = list(tmp_path.rglob("*"))
    assert {path.name.rsplit("-", 1)[0] for path in left} <= {"tacit-blocks", "tacit-features"}
    assert not [path for path in left if not path.is_dir()]


def _in_memory() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "LARGE", 2**30)
        return run(model(), people())


def vit() -> ViT:
    torch.manual_seed(1)
    return ViT(size=8, patch=4, channels=1, width=8, depth=3, heads=2, classes=3)


def test_features_of_all_blocks(ledger: Ledger) -> None:
    """Mean output of each block, and what comes into the head; the model that comes back takes images."""
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.rand(12, 1, 8, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)
    plain = vit()
    seen: list[Tensor] = []
    for block in plain.body:
        block.register_forward_hook(lambda _, __, out: seen.append(out.mean(1)))
    plain.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        plain(images)
    expected = torch.cat(seen, 1)
    fitted = run(vit(), (images, labels), features="all", ledger=ledger)
    assert isinstance(fitted.model, Probe)
    assert expected.shape == (12, 32)
    with torch.no_grad():
        assert torch.allclose(fitted.model.backbone(images), expected, atol=1e-6)
        assert torch.allclose(fitted.model(images), fitted.model.head(expected), atol=1e-5)
    assert fitted.trained == 32 * 3 + 3
    assert all(not p.requires_grad for p in fitted.model.backbone.parameters())


def test_blocks_of_convolutions_are_pooled_over_places() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)
            self.norm = nn.GroupNorm(1, 2)

        def forward(self, images: Tensor) -> Tensor:
            return images + self.norm(self.conv(images))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Stage(), Stage()])
            self.fc = nn.Linear(2, 3)

        def forward(self, images: Tensor) -> Tensor:
            for block in self.blocks:
                images = block(images)
            return self.fc(images.mean((2, 3)))

    made, images = Net(), torch.rand(5, 2, 6, 6)
    first = made.blocks[0](images)
    second = made.blocks[1](first)
    expected = torch.cat([first.mean((2, 3)), second.mean((2, 3)), second.mean((2, 3))], 1)
    assert torch.allclose(Backbone(made, "all")(images), expected, atol=1e-6)


def test_standardising_is_charged(ledger: Ledger) -> None:
    """Two releases before the steps, and the noise of the steps is what then fits: one Gaussian in all."""
    how = Standardise(noise=20.0, bound=2.0)
    fitted = run(model(), people(), standardise=how, ledger=ledger, subject="clinic", optimizer=DPGD(steps=4))
    charges = [entry for entry in ledger.entries() if entry.kind == "charge"]
    assert [charge.body["event"]["count"] for charge in charges] == [2, 4]
    assert charges[0].body["event"]["event"]["noise_multiplier"] == 20.0
    expected = math.sqrt(2 / 20**2 + 4 / fitted.noise_multiplier**2)
    assert fitted.guarantee.mu == pytest.approx(expected, rel=1e-6)
    assert fitted.guarantee.epsilon <= 5.0 * (1 + 1e-9)


def test_standardising_is_folded_into_the_head(ledger: Ledger) -> None:
    """By hand: the noisy mean and scale, a head trained on (f - m) / s; the folded one says the same of f."""
    inputs, labels = people()
    how, optimizer = Standardise(noise=20.0, bound=2.0), DPGD(steps=4, clip=0.5)
    more: dict[str, Any] = {"ledger": ledger, "subject": "clinic", "optimizer": optimizer, "epsilon": math.inf}
    fitted = run(model(), people(), standardise=how, **more)
    with torch.no_grad():
        found = model()[0](inputs)
        short = found * (2.0 / found.norm(dim=1, keepdim=True)).clamp_max(1.0)
        mean = (short.sum(0) + 40.0 * key(subject="clinic").normals(0, 6)) / 20
        far = (found - mean).norm(dim=1).clamp_max(2.0).sum() + 40.0 * key(subject="clinic").normals(1, 1)[0]
        standard = (found - mean) / max(float(far) / 20, 2e-3)
    head = nn.Linear(6, 3).double()
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    end = train(
        head, one_row_units(standard, labels), optimizer.update, steps=4, clip=0.5, rate=1.0, scale=0.0, divisor=20
    )
    expected = standard @ end["weight"].T + end["bias"]
    assert torch.allclose(fitted.model(inputs), expected, atol=1e-5)
    assert float(expected.detach().abs().max()) > 0.01


@pytest.mark.parametrize("bad", [1e6, math.nan, math.inf])
def test_one_unit_moves_the_statistics_by_at_most_their_bound(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[Tensor] = []

    def noting(total: Any, _: Any) -> dict[str, Tensor]:
        assert total.bounds == {"sum": 2.0}
        sums.append(total.sum["sum"])
        return {"sum": torch.zeros_like(total.sum["sum"])}

    monkeypatch.setattr("tacit.finetune._standardise.mechanisms.gaussian", noting)
    inputs, labels = people(12)
    owners = torch.arange(12) // 4
    wild = torch.where((owners == 1)[:, None], torch.full_like(inputs, bad), inputs)
    how, ledger = Standardise(noise=20.0, bound=2.0), Ledger("sqlite://")
    ledger.subject("s", Budget(50.0, 1e-5), unit="user")
    rest = owners != 1
    for x, y, o in ((inputs, labels, owners), (wild, labels, owners), (inputs[rest], labels[rest], owners[rest])):
        how.release(TensorRecords(x, y, o), 3, ledger, "s", None)
    means, distances = sums[::2], sums[1::2]
    for values in (means, distances):
        assert float((values[0] - values[2]).norm()) <= 2.0
        assert float((values[1] - values[2]).norm()) <= 2.0
        assert float((values[0] - values[1]).norm()) <= 4.0


def test_standardising_cannot_be_taken_up_and_says_so(ledger: Ledger, tmp_path: Path) -> None:
    how = Standardise(noise=20.0, bound=2.0)
    with pytest.raises(ValueError, match="cannot be resumed"):
        run(model(), people(), standardise=how, ledger=ledger, checkpoint=tmp_path / "x")
    with pytest.raises(ValueError, match="for scheme='linear'"):
        run(model(), people(), standardise=how, ledger=ledger, scheme="full")
    assert ledger.entries() == []


def test_a_head_alone_is_trained_as_it_is() -> None:
    inputs, labels = people()
    fitted = run(nn.Sequential(nn.Linear(4, 3)).double(), (inputs, labels))
    assert fitted.trained == 15
