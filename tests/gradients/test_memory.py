"""Memory that a row makes the model ask for, and memory that the machine does not have."""

import gc
import traceback

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import Engine

ROWS = 12


class Panic(BaseException):
    """What libraries in Rust raise (pyo3): no `Exception`."""


class Roomy(nn.Module):
    """Makes as much room as a row says; where `broken`, no rows find any, and the error quotes them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.how, self.broken = how, False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise (MemoryError if self.how == "python" else ValueError)(f"no room for {x.tolist()}")
        if float(x.abs().max()) > 1e6:
            match self.how:
                case "python":
                    raise MemoryError("row 4711")
                case "numpy":
                    np.empty(10**17)
                case "torch":
                    torch.empty(10**17)
                case "device":
                    raise torch.OutOfMemoryError("row 4711")
                case "panic":
                    raise Panic("row 4711")
        return self.layer(x)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(*, bad: int | None = None) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
    if bad is not None:
        x[bad] = 4.711e9
    return x, torch.arange(ROWS) % 2


@pytest.mark.parametrize("how", ["python", "numpy", "torch", "device", "panic"])
@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("ids", [None, torch.arange(ROWS) // 3])
def test_a_row_that_asks_for_all_memory_adds_zero_and_decides_no_error(
    how: str, microbatch: int | None, ids: Tensor | None
) -> None:
    """In an engine of one's own as in the loops of tacit, in its first sum and in later ones."""
    mute = torch.zeros(ROWS, dtype=torch.bool)
    mute[4] = True
    engine = Engine(Roomy(how), loss, clip=1.0, microbatch=microbatch)
    first = engine(rows(bad=4), unit_ids=ids)
    expected = engine(rows(), unit_ids=ids, mute=mute)
    again = engine(rows(bad=4), unit_ids=ids)
    for name, value in expected.sum.items():
        torch.testing.assert_close(first.sum[name], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(again.sum[name], value, rtol=0, atol=1e-6)
    built = torch.cat([part["layer.weight"] for part in engine.each(rows(bad=4), unit_ids=ids)])
    failed = ~torch.isfinite(built.flatten(1)).all(1)
    assert torch.nonzero(failed).flatten().tolist() == [4 if ids is None else 1]


@pytest.mark.parametrize("how", ["python", "an error of the code"])
def test_what_fails_for_every_row_is_an_error_without_a_value(how: str) -> None:
    model = Roomy(how)
    engine = Engine(model, loss, clip=1.0)
    engine.validate(rows())
    model.broken = True
    x, y = rows()
    x[2] = 4711.0
    with pytest.raises(MemoryError if how == "python" else ValueError) as raised:
        engine((x, y))
    assert "4711" not in "".join(traceback.format_exception(raised.value))
    seen: BaseException | None = raised.value
    while seen is not None:
        assert "4711" not in str(seen)
        seen = seen.__cause__ or seen.__context__


class Fussy(nn.Module):
    """Raises for rows that are too large, at the end of its forward or in its backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.where = nn.Linear(3, 4), nn.Linear(4, 2), where

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.relu(self.first(x)))
        large = bool((x.abs() > 1e6).any())
        if large and self.where == "forward":
            raise ValueError("too large")
        if large and found.requires_grad:
            found.register_hook(self._refuse)
        return found

    def _refuse(self, _: Tensor) -> Tensor:
        raise ValueError("too large")


def alive() -> int:
    gc.collect()
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("ids", [None, torch.arange(ROWS) // 4])
@pytest.mark.parametrize("bad", [None, 5])
@pytest.mark.parametrize("call", ["sum", "each", "small passes"])
def test_a_pass_leaves_no_tensors_behind(where: str, ids: Tensor | None, bad: int | None, call: str) -> None:
    """A graph holds what was recorded, which holds the graph: Python's collector does not see that."""
    engine = Engine(Fussy(where), loss, clip=1.0, microbatch=2 if call == "small passes" else None)

    def once() -> None:
        if call == "each":
            for _ in engine.each(rows(bad=bad), unit_ids=ids):
                pass
        else:
            engine(rows(bad=bad), unit_ids=ids)

    engine.validate(rows())
    once()
    before = alive()
    for _ in range(5):
        once()
    assert alive() <= before + 4  # what the last calls left to other tests' loops; a pass leaves some fifty
