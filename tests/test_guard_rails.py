"""Mistakes that cost a budget and raise nothing elsewhere: a sentence each, before anything is charged."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tacit import Budget, GuardRailWarning, Ledger, adapt, calibrate, finetune, tune
from tacit._guard_rails import UNITS, check_unit_name, warn_near_chance, warn_of_delta, warn_of_pixels
from tacit._refusals import Refusal
from tacit.data import TensorRecords
from tacit.finetune import DPGD, DPSGD, Evaluation


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened


def fitted(ledger: Ledger, **more: Any) -> finetune.Fitted:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 4, generator=generator), torch.arange(40) % 2
    options: dict[str, Any] = {"data": data, "optimizer": DPSGD(batch_size=10, steps=2), "size": 40, "scheme": "full"}
    options |= {"epsilon": 2.0, "delta": 1e-3, "ledger": ledger, "subject": "clinic"}
    torch.manual_seed(0)
    return finetune.fit(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), **(options | more))


def test_a_misspelt_unit_is_refused_before_the_charge(ledger: Ledger) -> None:
    ids = [f"p{i // 2}" for i in range(40)]
    with pytest.raises(Refusal, match=r"unit='pateint': did you mean 'patient'\? Nothing was charged"):
        fitted(ledger, unit="pateint", unit_ids=ids, size=20)
    with pytest.raises(Refusal, match="did you mean 'patient'"):
        TensorRecords(torch.zeros(2, 3), torch.zeros(2).long(), ["a", "b"], unit="patients")
    with pytest.raises(Refusal, match="did you mean 'video'"):
        ledger.subject("films", Budget(1.0, 1e-5), unit="vidoe", neighbours="add-remove")
    with pytest.raises(Refusal, match="did you mean 'person'"):
        calibrate.Source(
            "a", logits=torch.zeros(4, 2), labels=[0] * 4, budget=Budget(1.0, 0.0), unit="persn", unit_ids=[1] * 4
        )
    assert ledger.subjects() == []


@pytest.mark.parametrize("unit", [*UNITS, "patent", "street", "hospital stay", "Patient", "ward", "cell line", "trip"])
def test_other_nouns_are_units_as_well(unit: str) -> None:
    check_unit_name(unit)


def test_a_subject_that_has_a_misspelt_unit_already_is_served(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an earlier version: its charges are made, and it can be declared again."""
    with monkeypatch.context() as earlier:
        earlier.setattr("tacit.privacy._ledger.check_unit_name", lambda _: None)
        ledger.subject("clinic", Budget(1.0, 1e-5), unit="pateint", neighbours="add-remove")
    ledger.subject("clinic", Budget(1.0, 1e-5), unit="pateint", neighbours="add-remove")
    ledger.open_subject("clinic", Budget(1.0, 1e-5), unit="pateint", neighbours="add-remove")


def test_a_delta_of_one_over_the_number_of_units_is_named(ledger: Ledger) -> None:
    """1/40 = 0.025; a tenth of it and below, as a power of ten, is 0.001."""
    with pytest.warns(GuardRailWarning, match=r"delta = 0.025 is not below 1/40, .* such as 0.001\."):
        fitted(ledger, delta=0.025)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardRailWarning)
        fitted(ledger, delta=0.0249, subject="other")
        warn_of_delta(0.0, 40, "sample")
        warn_of_delta(0.5, None, "sample")
    with pytest.warns(GuardRailWarning, match="not below 1/50"):
        calibrate.Source(
            "a", logits=torch.zeros(50, 2), labels=[0] * 50, budget=Budget(1.0, 0.1), neighbours="replace-one"
        )
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    privacy = adapt.DP(1.0, 0.1, clip=1.0, noise="correlated", horizon=10)
    with pytest.warns(GuardRailWarning, match="not below 1/80"):
        adapt.Tent(model, privacy=privacy, batch_size=8, ledger=ledger, subject="stream", unit="sample")
    trainable = tune.Finetuning(nn.Linear(3, 2), (torch.randn(50, 3), torch.arange(50) % 2), size=50)
    space, budget = tune.Space(lr=(0.1, 0.2), steps=(1, 2)), Budget(5.0, 0.1)
    with pytest.warns(GuardRailWarning, match="not below 1/50"):
        tune.grid_search(trainable, space, budget, points=1, ledger=ledger, subject="search")


def test_a_batch_larger_than_the_data_is_refused(ledger: Ledger) -> None:
    with pytest.raises(Refusal, match=r"batch_size=64 is larger than size=40, .* Nothing was charged"):
        fitted(ledger, optimizer=DPSGD(batch_size=64, steps=2))
    assert ledger.subjects() == []
    fitted(ledger, optimizer=DPSGD(batch_size=40, steps=1))


def test_pixels_from_0_to_255_as_floats_are_named(ledger: Ledger) -> None:
    pixels = torch.randint(256, (40, 1, 2, 2), generator=torch.Generator().manual_seed(0)).float()
    labels = torch.arange(40) % 2

    def run(images: torch.Tensor, subject: str) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        options: dict[str, Any] = {"size": 40, "scheme": "full", "epsilon": 2.0, "delta": 1e-3}
        finetune.fit(model, (images, labels), optimizer=DPGD(steps=1), ledger=ledger, subject=subject, **options)

    with pytest.warns(GuardRailWarning, match="whole numbers from 0 to 255, as floats"):
        run(pixels, "pixels")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardRailWarning)
        run(pixels / 255, "shares")
        run((pixels > 127).float(), "black and white")
        one_else = pixels.clone()
        one_else[3] += 0.5  # one of the units that are looked at takes the sentence away, and adds none
        run(one_else, "one else")
        warn_of_pixels([torch.zeros(3), torch.zeros(3)])


def test_a_model_that_is_no_better_than_a_guess_is_named(ledger: Ledger) -> None:
    """Half of 100 labels are 0: 50% + 2 standard deviations of 5% is chance."""
    labels = torch.arange(100) % 2
    for accuracy in (10.0, 50.0, 60.0):
        with pytest.warns(GuardRailWarning, match="always naming the commonest class is about 50%"):
            warn_near_chance(accuracy, labels, "before training")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardRailWarning)
        warn_near_chance(60.1, labels, "before training")
        warn_near_chance(0.0, labels[:10], "before training")  # too few to tell
        warn_near_chance(0.0, torch.zeros(100, 3), "before training")  # several labels a row
    generator = torch.Generator().manual_seed(1)
    held = Evaluation(data=(torch.randn(100, 4, generator=generator), labels), public=True)
    with pytest.warns(GuardRailWarning, match="Before training the model is right about"):
        fitted(ledger, evaluate=held, head="keep")


def test_a_function_or_a_class_instead_of_an_optimizer(ledger: Ledger) -> None:
    for wrong, match in (
        (DPSGD, r"optimizer=finetune.DPSGD is not called: write finetune.DPSGD\(…\)"),
        (torch.optim.SGD, "not SGD; tacit.make_private takes one of torch's"),
        (torch.optim.Adam([nn.Parameter(torch.zeros(1))]), "not Adam; tacit.make_private"),
        ("sgd", "not str"),
        (None, "finetune.fit needs optimizer="),
    ):
        with pytest.raises(TypeError, match=match):
            fitted(ledger, optimizer=wrong)
    data = torch.zeros(4, 3), torch.arange(4) % 2
    with pytest.raises(TypeError, match="a function of hyperparameters"):
        tune.Finetuning(nn.Linear(3, 2), data, size=4, optimizer=DPGD(steps=2))  # type: ignore[arg-type]
    assert ledger.subjects() == []
