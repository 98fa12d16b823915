"""Rows for which the served model raises or warns: NaN for their sender, and nothing in the service's own output."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from tacit.serve._adapting import predicted


class Panic(BaseException):
    """What libraries in Rust raise (pyo3): no `Exception`."""


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 7).any()):
            raise Panic("row 4711")
        if bool((x == 8).any()):
            warnings.warn("row 4711", stacklevel=2)
        return x[:, :1] * 2


@pytest.mark.filterwarnings("always")
def test_a_row_that_panics_or_warns_decides_and_prints_nothing(recwarn: pytest.WarningsRecorder) -> None:
    rows = torch.tensor([[1.0, 0.0], [7.0, 0.0], [8.0, 0.0]])
    found = predicted(Picky(), rows, torch.zeros(2))
    assert found[[0, 2], 0].tolist() == [2.0, 16.0]
    assert bool(found[1].isnan().all())
    assert not recwarn.list
