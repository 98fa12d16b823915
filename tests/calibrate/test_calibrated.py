"""The module that comes out: temperature, and histogram binning that keeps the class."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tacit.calibrate import Calibrated, Result

TEMPERED = Result(method="acc-t", temperature=2.0, interval=(1.5, 2.5), queries=6, epsilon=1.0, sources=9)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(2, 12), st.integers(0, 10**6), st.lists(st.floats(0, 1), min_size=1, max_size=15), st.floats(0.1, 40)
)
def test_binning_keeps_the_class_and_meets_the_confidence(
    classes: int, seed: int, table: list[float], spread: float
) -> None:
    logits = torch.randn(40, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    before = torch.softmax(logits, 1)
    after = torch.softmax(Result(method="histogram", confidences=tuple(table)).apply(logits), 1)
    assert torch.equal(before.argmax(1), after.argmax(1))
    assert torch.allclose(after.sum(1), torch.ones(40, dtype=torch.float64))
    top = before.max(1).values
    for row in range(40):
        place = next(i for i in range(len(table)) if top[row] <= (i + 1) / len(table) or i == len(table) - 1)
        assert float(after[row].max()) == pytest.approx(max(table[place], 1 / classes), abs=1e-4)


def test_the_rest_of_the_mass_keeps_its_proportions() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    after = torch.softmax(Result(method="histogram", confidences=(0.55,)).apply(probs.log()), 1)
    assert after[0].tolist() == pytest.approx([0.55, 0.3, 0.15])
    capped = torch.softmax(Result(method="histogram", confidences=(0.4,)).apply(probs.log()), 1)
    assert capped[0].tolist() == pytest.approx([0.4, 0.4, 0.2], abs=1e-5)  # 0.4 and 0.2 would be the proportions
    assert int(capped.argmax()) == 0


def test_certain_and_tied_predictions_keep_their_class() -> None:
    rows = torch.tensor([[1000.0, 0.0, 0.0], [5.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    for confidence in (0.0, 0.2, 0.34, 0.9, 1.0):
        after = Result(method="histogram", confidences=(confidence,)).apply(rows)
        assert torch.equal(after.argmax(1), rows.argmax(1))
        assert torch.isfinite(after).all()


def test_the_module_divides_by_the_temperature() -> None:
    model = nn.Linear(4, 3)
    honest = TEMPERED.wrap(model)
    inputs = torch.randn(5, 4)
    assert isinstance(honest, Calibrated)
    assert torch.allclose(honest(inputs), model(inputs) / 2)
    assert torch.allclose(honest.probs(inputs), torch.softmax(model(inputs) / 2, 1))
    assert float(honest.state_dict()["temperature"]) == 2.0
    assert "temperature 2.000 (between 1.500 and 2.500)" in repr(honest)
    honest(inputs).sum().backward()  # it stays differentiable
    binned = Result(method="histogram", confidences=(0.6, 0.6)).wrap(model.half())
    assert binned(inputs.half()).dtype == torch.float16


def test_results_travel_as_plain_data() -> None:
    for result in (TEMPERED, Result(method="histogram", confidences=(0.1, 0.9), epsilon=float("inf"), private=False)):
        assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert "not private" in str(Result(method="one-source", private=False))
    assert str(Result(method="acc-t", seeded=True, private=False)).startswith("seeded: not private.")
