"""Rows of one norm: as by hand, free, the same model outside; a centre is public or paid for."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, key, one_row_units, people, train
from safetensors.torch import load_file
from torch import nn

from tacit.finetune import DPGD, Evaluation, RowNorm, RowNormalizer, Standardise, fit, public_centre
from tacit.models import save_weights
from tacit.privacy import Ledger


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def run(how: Any, **more: Any) -> Any:
    options: dict[str, Any] = {
        "optimizer": DPGD(steps=4, clip=0.5),
        "epsilon": math.inf,
        "delta": 1e-5,
        "size": 20,
        "scheme": "linear",
        "seed": SEED,
    }
    return fit(model(), people(), standardise=how, **(options | more))


def by_hand(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    head, optimizer = nn.Linear(6, 3).double(), DPGD(steps=4, clip=0.5)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    units = one_row_units(rows, labels)
    end = train(head, units, optimizer.update, steps=4, clip=0.5, rate=1.0, scale=0.0, divisor=20)
    return rows @ end["weight"].T + end["bias"]


@pytest.mark.parametrize("norm", [1.0, 3.0])
@pytest.mark.parametrize("centred", [False, True])
def test_rows_of_one_norm_are_as_by_hand(norm: float, centred: bool) -> None:
    inputs, labels = people()
    with torch.no_grad():
        features = model()[:2](inputs)
        centre = features[:5].mean(0).float() if centred else None
        moved = features if centre is None else features - centre.double()
        rows = norm * moved / moved.norm(dim=1, keepdim=True)
    fitted = run(RowNorm(norm=norm, centre=centre))
    assert torch.allclose(fitted.model(inputs), by_hand(rows, labels), atol=1e-6)
    assert fitted.ledger is not None
    assert len([entry for entry in fitted.ledger.entries() if entry.kind == "charge"]) == 1


def test_a_paid_centre_is_one_release_more(ledger: Ledger) -> None:
    """The noisy mean by hand; the noise of the steps is what then fits: one Gaussian in all."""
    inputs, _ = people()
    how = RowNorm(centre=Standardise(noise=20.0, bound=2.0))
    fitted = run(how, ledger=ledger, subject="clinic", epsilon=5.0)
    expected = math.sqrt(1 / 20**2 + 4 / fitted.noise_multiplier**2)
    assert fitted.guarantee.mu == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        features = model()[:2](inputs)
        short = features * (2.0 / features.norm(dim=1, keepdim=True)).clamp_max(1.0)
        mean = ((short.sum(0) + 40.0 * key(subject="clinic").normals(0, 6)) / 20).float()
    centre = next(value for name, value in fitted.model.state_dict().items() if name.endswith("centre"))
    assert torch.allclose(centre, mean, atol=1e-3)  # the public grid


def test_held_out_rows_are_scaled_alike_and_a_row_of_zeros_does_no_harm() -> None:
    inputs, labels = people()
    blank = torch.cat([inputs, torch.full((1, 4), math.nan, dtype=torch.float64)]), torch.cat([labels, labels[:1]])
    fitted = fit(
        model(),
        blank,
        standardise=RowNorm(),
        optimizer=DPGD(steps=4, clip=0.5),
        epsilon=math.inf,
        delta=1e-5,
        size=20,
        scheme="linear",
        seed=SEED,
        evaluate=Evaluation(data=(inputs, labels), public=True),
    )
    plain = run(RowNorm())
    assert torch.allclose(fitted.model(inputs), plain.model(inputs))
    right = 100 * float((plain.model(inputs).argmax(1) == labels).double().mean())
    assert fitted.scores["accuracy"] == pytest.approx(right)


def test_a_public_centre_is_the_mean_feature() -> None:
    inputs, _ = people()
    with torch.no_grad():
        expected = model()[:2](inputs).mean(0).float()
    assert torch.allclose(public_centre(model(), people()), expected, atol=1e-6)


def test_what_cannot_be_is_refused_before_a_charge(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="The centre has 5 numbers, and the features 6"):
        run(RowNorm(centre=torch.zeros(5)), ledger=ledger)
    with pytest.raises(ValueError, match="for scheme='linear'"):
        run(RowNorm(), ledger=ledger, scheme="full")
    with pytest.raises(ValueError, match="norm is above 0"):
        RowNorm(norm=0.0)
    with pytest.raises(ValueError, match="one vector"):
        RowNorm(centre=torch.zeros(2, 2))
    assert ledger.entries() == []
    fitted = run(RowNorm())
    for save in (fitted.save, partial(save_weights, fitted.model)):
        for form in ("plain", "peft"):
            with pytest.raises(
                ValueError, match=r"scheme='linear'\) without optimizer=\): save with format='state_dict'"
            ):
                save(tmp_path / "out", format=form)
    assert not (tmp_path / "out").exists()


def test_a_saved_model_is_loaded_as_the_error_says(tmp_path: Path) -> None:
    fitted = run(RowNorm(norm=2.0, centre=torch.ones(6)))
    file = fitted.save(tmp_path / "out", format="state_dict") / "model.safetensors"
    again = RowNormalizer(2.0, torch.zeros(6)).before_head(model())
    again.load_state_dict(load_file(file))
    assert torch.equal(again.eval()(people()[0]), fitted.model.eval()(people()[0]))


def test_what_a_run_prints_tells_centres_apart() -> None:
    first, second = torch.zeros(2000), torch.zeros(2000)
    second[1000] = 1e-6
    assert repr(RowNorm(centre=first)) == repr(RowNorm(centre=first.clone())) != repr(RowNorm(centre=second))
