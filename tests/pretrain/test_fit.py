"""Public training: what it refuses, that it learns, goes on where it stopped, and what augmentation does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit.models import ConvNet
from tacit.pretrain import Augment, Perturbation, Recipe, Training, fit


def stripes(count: int = 128) -> tuple[Tensor, Tensor]:
    """Images with a bright top or a bright bottom half: a flip left to right does not change the class."""
    labels = torch.arange(count) % 2
    images = 0.2 * torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images[labels == 0, :, :4] += 0.7
    images[labels == 1, :, 4:] += 0.7
    return images, labels


def small() -> ConvNet:
    torch.manual_seed(0)
    return ConvNet(channels=1, classes=2, widths=(8,), depths=(1,))


SHORT = Recipe(epochs=6, batch_size=32, lr=0.02, augment=Augment(rotate=0, scale=0, shift=0, erase=0.2))


def test_it_learns_and_is_reproducible() -> None:
    images, labels = stripes()
    first, second = (fit(small(), (images, labels), public=True, **SHORT.options()) for _ in range(2))
    assert not first.training
    with torch.no_grad():
        assert (first(images).argmax(1) == labels).float().mean() > 0.95
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_private_data_is_refused() -> None:
    with pytest.raises(ValueError, match="public=True"):
        fit(small(), stripes(), **SHORT.options())


def test_too_few_images_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fill one batch"):
        fit(small(), stripes(16), public=True, **SHORT.options())


def test_progress_is_told_every_step() -> None:
    told: list[tuple[int, int]] = []

    def progress(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
        assert what.startswith("pretraining, standard: loss ")
        assert spent is None
        told.append((done, total))

    fit(small(), stripes(64), public=True, epochs=2, batch_size=32, progress=progress)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_without_bounds_augmentation_changes_nothing() -> None:
    images, _ = stripes(8)
    same = Augment(flip=False, rotate=0, scale=0, shift=0, erase=0)(images, torch.Generator().manual_seed(1))
    torch.testing.assert_close(same, images, atol=1e-5, rtol=0)


def test_flips_mirror_about_half_of_the_images() -> None:
    images = torch.rand(400, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    out = Augment(rotate=0, scale=0, shift=0, erase=0)(images, torch.Generator().manual_seed(1))
    mirrored = (out - images.flip(3)).abs().amax((1, 2, 3)) < 1e-4
    same = (out - images).abs().amax((1, 2, 3)) < 1e-4
    assert bool((mirrored | same).all())
    assert 130 < int(mirrored.sum()) < 270  # 200 expected, standard deviation 10: false alarm below 1e-11


def test_an_erased_box_is_one_tone_and_no_larger_than_allowed() -> None:
    images = torch.rand(50, 1, 20, 20, generator=torch.Generator().manual_seed(0))
    out = Augment(flip=False, rotate=0, scale=0, shift=0, erase=0.4)(images, torch.Generator().manual_seed(1))
    changed = (out - images).abs() > 1e-4
    for picture, where in zip(out, changed, strict=True):
        rows, columns = where[0].any(1), where[0].any(0)
        assert int(rows.sum()) <= 8 + 1
        assert int(columns.sum()) <= 8 + 1
        if where.any():
            assert float(picture[where].max() - picture[where].min()) < 1e-5


def test_rows_of_a_batch_never_meet() -> None:
    model = small().eval()
    images, _ = stripes(4)
    alone = model(images[:1])
    torch.testing.assert_close(model(images)[:1], alone)


def test_weight_decay_spares_scales_and_biases() -> None:
    from tacit.pretrain._fit import _groups

    decayed, spared = _groups(small(), 0.05)
    assert decayed["weight_decay"] == 0.05
    assert spared["weight_decay"] == 0.0
    parameters: list[nn.Parameter] = [*decayed["params"], *spared["params"]]  # type: ignore[misc]
    assert len(parameters) == len(list(small().parameters()))


def mlp(*, awkward: bool = False) -> nn.Sequential:
    """A small net; an awkward one has dropout and running statistics."""
    torch.manual_seed(3)
    extra = (nn.Dropout(0.2), nn.BatchNorm1d(8)) if awkward else ()
    return nn.Sequential(nn.Linear(4, 8), *extra, nn.Tanh(), nn.Linear(8, 3)).double()


def points(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator).double(), torch.randint(3, (count,), generator=generator)


def alike(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return all(torch.equal(a[name], b[name]) for name in a)


ROBUST: dict[str, Any] = {"public": True, "radius": 0.5, "perturb_batch": 40, "batch_size": 10, "steps": 14, "lr": 0.05}


@pytest.mark.parametrize("method", ["sam", "amp", "dpadapter"])
def test_a_radius_of_zero_is_standard_training_bit_for_bit(method: Any) -> None:
    """Dropout and augmentation included: perturbations have random numbers of their own."""
    data = stripes(64)
    options = ROBUST | {"augment": Augment(), "rule": "adamw", "decay": "cosine"}

    def trained(**more: Any) -> nn.Module:
        model = small()
        model.body.append(nn.Dropout(0.3))
        return fit(model, data, **(options | more))

    standard = trained(method="standard")
    assert alike(standard, trained(method=method, radius=0.0))
    assert not alike(standard, trained(method=method))


def test_steps_are_those_of_a_loop_by_hand() -> None:
    """DPAdapter with everything at once: order, draws, decay of the learning rate, momentum, weight decay, warm-up."""
    inputs, labels = points()
    found = fit(mlp(), (inputs, labels), method="dpadapter", warmup=0.25, weight_decay=0.01, seed=4, **ROBUST)
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    draws, others = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4 + 2**32)
    momentum = {p: torch.zeros_like(p) for p in model.parameters()}
    for step in range(14):
        if step % 6 == 0:
            order = torch.randperm(60, generator=draws)
        mine = order[10 * (step % 6) :][:10]
        before = {p: p.detach().clone() for p in model.parameters()}
        if step >= 4:  # a quarter of 14, rounded up
            large = torch.randperm(60, generator=others)[:40]
            gradients = by_autograd(model, inputs[large], labels[large])
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.data += g * min(1.0, 0.5 / norm)
        gradients = by_autograd(model, inputs[mine], labels[mine])
        lr = 0.05 if step < 7 else 0.005 if step < 10.5 else 0.0005
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.data.copy_(before[p])
            whole = g + (0.01 * p.data if any(p is m for m in matrices) else 0)
            momentum[p] = 0.9 * momentum[p] + whole
            p.data -= lr * momentum[p]
    for a, b in zip(found.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def by_autograd(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    chances = model(inputs).log_softmax(1)[torch.arange(len(labels)), labels]
    return torch.autograd.grad(-chances.mean(), list(model.parameters()))


def test_dpadapter_on_all_rows_with_all_rows_is_amp() -> None:
    options = ROBUST | {"batch_size": 60, "perturb_batch": 60}
    amp, adapter = (fit(mlp(), points(), method=m, **options) for m in ("amp", "dpadapter"))  # type: ignore[arg-type]
    for a, b in zip(amp.parameters(), adapter.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)  # the rows are added up in another order


def test_accumulating_the_large_batch_changes_nothing() -> None:
    whole, parts = (fit(mlp(), points(), method="dpadapter", microbatch=rows, **ROBUST) for rows in (40, 7))
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class StoppedError(Exception):
    """Somebody pulled the plug."""


@pytest.mark.parametrize(
    "options",
    [
        {"method": "dpadapter", "reuse": 3, "warmup": 0.2},
        {"method": "sam", "rule": "adamw", "decay": "onecycle", "clip": 1.0},
        {"method": "standard"},
    ],
    ids=["dpadapter, reused", "sam, adamw", "standard"],
)
@pytest.mark.parametrize("at", [1, 6, 11])
def test_a_killed_run_ends_as_it_would_have(options: dict[str, Any], at: int, tmp_path: Path) -> None:
    options = ROBUST | options
    whole = fit(mlp(awkward=True), points(), **options)

    def stop(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
        del what, total, spent
        if done == at:
            raise StoppedError

    kept = {"checkpoint": tmp_path / "run", "every": 1 if at != 11 else 4}  # at 11 three steps are lost
    with pytest.raises(StoppedError):
        fit(mlp(awkward=True), points(), progress=stop, **kept, **options)
    torch.manual_seed(77)
    torch.rand(3)  # whatever else the process does
    again = fit(mlp(awkward=True), points(), **kept, **options)
    assert alike(whole, again)
    assert alike(whole, fit(mlp(awkward=True), points(), **kept, **options))  # finished: nothing is done


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    kept = {"checkpoint": tmp_path / "run"}
    fit(mlp(), points(), method="dpadapter", **kept, **ROBUST)
    inputs, labels = points()
    for changed in ({"data": (inputs + 1, labels)}, {"lr": 0.1}, {"radius": 0.1}, {"seed": 1}):
        options = {"data": (inputs, labels), "method": "dpadapter", **ROBUST, **changed}
        with pytest.raises(ValueError, match="another run"):
            fit(mlp(), options.pop("data"), **kept, **options)
    (tmp_path / "run").write_bytes(b"no")
    with pytest.raises(ValueError, match="no checkpoint of a pretraining"):
        fit(mlp(), points(), method="dpadapter", **kept, **ROBUST)


def test_onecycle_is_torchs() -> None:
    plan = Training(decay="onecycle", lr=0.3, rule="adamw")
    for steps in (2, 3, 7, 40):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=steps)
        for step in range(steps):
            group = optimizer.param_groups[0]
            assert plan.pace(step, steps) == (group["lr"], group["betas"][0])
            optimizer.step()
            if step + 1 < steps:
                schedule.step()


def test_learning_rates_fall_as_said() -> None:
    assert [Training().pace(step, 8)[0] for step in range(8)] == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 2)
    cosine = Training(decay="cosine", lr=2.0)
    assert [cosine.pace(step, 4)[0] for step in (0, 2)] == pytest.approx([2.0, 1.0])
    assert Training(decay="constant").pace(99, 100) == (0.1, 0.9)


def test_what_a_run_costs_is_counted() -> None:
    """Against counting the rows that reach the model."""
    for options in (
        {"method": "standard"},
        {"method": "sam", "warmup": 0.5},
        {"method": "dpadapter", "reuse": 4},
        {"method": "dpadapter", "warmup": 0.3},
    ):
        model, seen = mlp(), []
        model.register_forward_pre_hook(lambda m, x, seen=seen: seen.append(len(x[0])) if m.training else None)
        fit(model, points(), **(ROBUST | options))  # type: ignore[arg-type]
        assert sum(seen) == Perturbation(**options, perturb_batch=40).passes(10, 14)  # type: ignore[arg-type]


class Pairs(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.rows = list(zip(inputs, labels.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.rows[place]


def test_a_data_set_is_as_good_as_tensors() -> None:
    tensors, items = (fit(mlp(), d, method="dpadapter", **ROBUST) for d in (points(), Pairs(*points())))
    assert alike(tensors, items)


def test_frozen_weights_stay() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    fit(model, points(), method="dpadapter", **ROBUST)
    assert torch.equal(model[0].weight, before)


def test_bad_input_is_refused_with_a_sentence() -> None:
    inputs, labels = points()
    hole = inputs.clone()
    hole[3, 1] = math.nan
    for data, words in (
        ((inputs, labels + 1), "Labels go from 1 to 3, and the model has 3 outputs"),
        ((inputs, labels - 1), "Labels go from -1"),
        ((inputs, labels.double()), "one whole number per row"),
        ((inputs, labels[:5]), "each row needs one"),
        ((inputs[:0], labels[:0]), "no rows"),
        ((hole, labels), "not finite"),
        ((inputs[:, :2], labels), "does not take these rows"),
        (inputs, "two tensors"),
    ):
        with pytest.raises(ValueError, match=words):
            fit(mlp(), data, **ROBUST)
    with pytest.raises(ValueError, match="only 60 rows to draw it from"):
        fit(mlp(), points(), public=True, method="dpadapter", perturb_batch=61, batch_size=10, steps=1)
    with pytest.raises(ValueError, match=r"lower lr or radius|not finite"):
        fit(mlp(), points(), **(ROBUST | {"lr": 1e300}))
    for wrong in (
        {"steps": 0},
        {"rule": "adam"},
        {"decay": "linear"},
        {"lr": 0.0},
        {"clip": 0.0},
        {"warmup": 1.0},
        {"every": 0},
        {"microbatch": 0},
    ):
        with pytest.raises(ValueError, match=r"at least|choose|above"):
            fit(mlp(), points(), **(ROBUST | wrong))
