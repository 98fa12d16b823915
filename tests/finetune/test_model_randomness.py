"""What a model draws itself (dropout) follows the receipt's key: secret, and the same when a step is computed again."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import SEED, gap, people, weights
from torch import Tensor, nn

from tacit.calibrate import Source
from tacit.finetune import DPGD, Classes, fit, right_by_unit
from tacit.finetune._sources import as_records
from tacit.privacy import Budget, Ledger


class Always(nn.Module):
    """Dropout that evaluation mode does not switch off, as `F.dropout(x)` without a second thought."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


def run(seed_of_torch: int, seed: int | None, sums: list[Any]) -> nn.Module:
    inputs, labels = people()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(inputs.shape[1], 32), nn.ReLU(), Always(), nn.Linear(32, 3)).to(inputs.dtype)
    torch.manual_seed(seed_of_torch)
    options: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep"}
    keep = lambda event: sums.append({n: v.clone() for n, v in event.clipped_sum.sum.items()})  # noqa: E731
    return fit(model, (inputs, labels), optimizer=DPGD(steps=2, clip=0.4), seed=seed, curator=keep, **options).model


def test_masks_do_not_follow_torchs_seed_and_come_again_with_the_key() -> None:
    """Before, torch's own state decided: a replayed step had other masks under the same noise."""
    first: list[Any] = []
    second: list[Any] = []
    a, b = run(10, SEED, first), run(11, SEED, second)
    assert gap(weights(a), weights(b)) == 0
    assert all(torch.equal(x[n], y[n]) for x, y in zip(first, second, strict=True) for n in x)


def test_masks_are_secret_where_torchs_seed_is_known() -> None:
    first: list[Any] = []
    second: list[Any] = []
    run(10, None, first)
    run(10, None, second)
    assert any(not torch.equal(first[0][n], second[0][n]) for n in first[0])


def _drawing() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), Always(), nn.Linear(32, 3)).double()


def test_scores_do_not_follow_torchs_seed() -> None:
    """Under a known seed everybody behind a missing unit got a neighbour's mask: the sum moved by 6, and 1 was paid."""
    inputs, labels = people(200)
    found = []
    for _ in range(2):
        torch.manual_seed(10)
        found.append(right_by_unit(_drawing(), as_records((inputs, labels)), Classes(3)))
    assert not torch.equal(*found)  # 200 coins of about 1/3: alike with a probability below 1e-40


def test_outputs_of_a_source_do_not_follow_torchs_seed() -> None:
    inputs, labels = people(200)
    found = []
    for _ in range(2):
        torch.manual_seed(10)
        ledger, budget = Ledger("sqlite://"), Budget(1.0, 1e-5)
        source = Source.from_model("a", _drawing(), [(inputs, labels)], budget=budget, ledger=ledger)
        found.append(source._outputs.shifted)
    assert not torch.equal(*found)


def test_features_of_a_model_that_draws_are_not_cached() -> None:
    """They went by position, and those that were computed again after a kill were others under the same noise."""
    inputs, labels = people()
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="draws random numbers in evaluation mode"):
        fit(
            _drawing(),
            (inputs, labels),
            optimizer=DPGD(steps=1),
            epsilon=2.0,
            delta=1e-5,
            size=24,
            scheme="linear",
            ledger=ledger,
        )
    assert not ledger.entries()
