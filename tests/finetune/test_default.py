"""A classifier's head without an optimizer: what `fit` then trains with, and where it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit import finetune, tune
from tacit.finetune import DPGD, Labels, RowNorm, Standardise
from tacit.privacy import Budget, BudgetExceeded, Ledger

BUDGET = Budget(2.0, 1e-5)


def rows(count: int = 400) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 8, generator=made)
    return 0.05 * inputs, (inputs @ torch.randn(8, 3, generator=made)).argmax(1)


def trained(ledger: Ledger, **more: Any) -> finetune.Fitted:
    how: dict[str, Any] = {"scheme": "linear", "size": 400, "classes": 3, "ledger": ledger, "subject": "rows"} | more
    return finetune.fit(nn.Linear(8, 3), rows(), epsilon=2.0, delta=1e-5, **how)


def test_it_is_the_run_of_the_suggestion() -> None:
    """With one seed, bit for bit: `suggest`'s rate and steps, `DPGD`, rows of norm 1."""
    said = tune.suggest(BUDGET, size=400, features=8, classes=3)
    by_hand = {"optimizer": DPGD(lr=said.lr, steps=said.steps), "standardise": RowNorm()}
    one, other = trained(Ledger("sqlite://"), seed=5), trained(Ledger("sqlite://"), seed=5, **by_hand)
    assert one.steps == said.steps
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert one.guarantee == other.guarantee


def test_it_learns_short_rows() -> None:
    """Rows of norm 0.14 hardly reach the unit clip; without noise a linear head is right about nearly all of them."""
    inputs, labels = rows(4000)
    fitted = finetune.fit(
        nn.Linear(8, 3),
        (inputs, labels),
        scheme="linear",
        size=4000,
        epsilon=2.0,
        delta=1e-5,
        ledger=Ledger("sqlite://"),
    )
    assert float((fitted.model(inputs).argmax(1) == labels).double().mean()) > 0.85


def test_its_size_is_the_public_one() -> None:
    """Steps come from `size`, or from the number of rows where that is public."""
    few = trained(Ledger("sqlite://"), size=40)
    assert few.steps == tune.suggest(BUDGET, size=40, features=8, classes=3).steps
    known = trained(Ledger("sqlite://"), size=None, neighbours="zero-out")
    assert known.steps == tune.suggest(BUDGET, size=400, features=8, classes=3).steps
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="Give size="):
        trained(ledger, size=None)
    assert ledger.subjects() == []


def test_what_has_no_default_says_so_and_costs_nothing() -> None:
    ledger = Ledger("sqlite://")
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"scheme": "full"}, TypeError, "finetune.fit needs optimizer="),
        ({"standardise": RowNorm(norm=4.0)}, TypeError, "rows of norm 1"),
        ({"standardise": Standardise(noise=50.0, bound=1.0)}, TypeError, "rows of norm 1"),
        ({"task": Labels(3), "classes": None}, TypeError, "needs optimizer="),
        ({"augment": 2}, ValueError, "give optimizer="),
    ]
    for how, kind, match in refused:
        with pytest.raises(kind, match=match):
            trained(ledger, **how)
    with pytest.raises(ValueError, match="A default is for a finite epsilon"):
        finetune.fit(nn.Linear(8, 3), rows(), scheme="linear", size=400, epsilon=float("inf"), delta=1e-5)
    assert ledger.subjects() == []


def test_it_is_charged_and_resumed_like_any_run(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'tacit.db'}")
    fitted = trained(ledger, checkpoint=tmp_path / "run.safetensors")
    again = trained(ledger, checkpoint=tmp_path / "run.safetensors")
    assert again.receipt == fitted.receipt
    assert ledger.spent("rows").epsilon <= 2.0
    with pytest.raises(BudgetExceeded):
        trained(ledger)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("head", r"^Unknown scheme 'head'; did you mean 'linear', the head alone\?$"),
        ("Linear", r"^Unknown scheme 'Linear'; did you mean 'linear'\?$"),
        ("LoRA", r"did you mean 'lora'\?$"),
        ("xyz", r"; the schemes are full, linear, norms, "),
    ],
)
def test_a_misspelt_scheme_is_what_is_refused(scheme: str, said: str) -> None:
    """And not the optimizer, which a correct name would not need."""
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match=said):
        trained(ledger, scheme=scheme)
    assert ledger.subjects() == []
