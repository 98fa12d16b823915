"""Large sums in memory of earlier ones: only when nobody has these any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import Engine, _large_sums

SHAPE = (1 << 15, 128)  # 32 MB
LIKE = torch.zeros(1)


@pytest.fixture(autouse=True)
def nothing_idle() -> Iterator[None]:
    _large_sums._idle.clear()
    yield
    _large_sums._idle.clear()


def idle() -> int:
    gc.collect()
    return sum(len(some) for some in _large_sums._idle.values())


def test_memory_is_used_again_and_is_zero() -> None:
    first = _large_sums.zeros(SHAPE, LIKE)
    where = first.add_(1).data_ptr()
    del first
    assert idle() == 1
    second = _large_sums.zeros(SHAPE, LIKE)
    assert second.data_ptr() == where
    assert second.shape == SHAPE
    assert second.dtype == torch.float64
    assert not bool(second.any())


@pytest.mark.parametrize(
    "kept", [lambda t: t, lambda t: t[3:], lambda t: t.T, lambda t: t.numpy(), lambda t: t.detach()]
)
def test_memory_that_anybody_has_is_not(kept: object) -> None:
    first = _large_sums.zeros(SHAPE, LIKE)
    view = kept(first.fill_(7.0))  # type: ignore[operator]
    del first
    assert idle() == 0
    _large_sums.zeros(SHAPE, LIKE).fill_(1.0)
    assert float(view[5, 5]) == 7.0


def test_small_sums_are_ordinary_ones() -> None:
    _large_sums.zeros((3, 4), LIKE)
    assert idle() == 0


def test_no_more_is_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_large_sums, "KEPT", 2 * (32 << 20))
    several = [_large_sums.zeros(SHAPE, LIKE) for _ in range(4)]
    del several
    assert idle() == 2


def test_threads_get_memory_of_their_own() -> None:
    def work(number: int) -> bool:
        mine = _large_sums.zeros(SHAPE, LIKE).add_(number)
        return bool((mine == number).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))


def test_the_sum_of_an_earlier_step_stays_as_it_was() -> None:
    """The obvious twin: a table so small that nothing is shared."""

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return torch.as_tensor(model(rows)).sum((1, 2))

    rows = torch.arange(12).reshape(6, 2)
    torch.manual_seed(0)
    large = nn.Embedding(*SHAPE)
    small = nn.Embedding(16, SHAPE[1])
    small.weight.data.copy_(large.weight.data[:16])
    engines = Engine(large, loss, clip=0.5), Engine(small, loss, clip=0.5)
    before = [engine(rows).sum["weight"] for engine in engines]
    copy = before[0].clone()
    after = [engine(rows[:3]).sum["weight"] for engine in engines]
    assert torch.equal(before[0], copy)
    for of_large, of_small in (before, after):
        assert torch.equal(of_large[:16], of_small)
        assert not bool(of_large[16:].any())
