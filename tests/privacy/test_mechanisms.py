"""Receipts and mechanisms: nothing leaves that was not paid for, and the noise is what was paid for.

Statistical tests run on fresh secret keys; each has a false-alarm probability below 1e-6.
"""

import copy
import dataclasses
import math
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy import stats
from torch import Tensor

from tacit.privacy import events, sampling
from tacit.privacy._budget import Budget, Neighbours, Unit, epsilon_of
from tacit.privacy._ledger import Ledger
from tacit.privacy._noise import NoiseKey
from tacit.privacy._queries import GridSum, grid_sum
from tacit.privacy._receipts import Receipt, ReceiptError
from tacit.privacy.accounting import guarantee
from tacit.privacy.correlated import by_name
from tacit.privacy.mechanisms import GaussianStream, _mechanisms, gaussian, gaussian_query, laplace, noisy_max, prepare

ALARM = 1e-7
ADD_REMOVE, REPLACE_ONE, ZERO_OUT = Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE, Neighbours.ZERO_OUT


@dataclasses.dataclass(frozen=True)
class Sum:
    """A bounded sum as ``gradients`` makes them."""

    sum: Mapping[str, Tensor]
    bounds: Mapping[str, float]
    blocks: Mapping[str, tuple[str, ...]]


def zeros(size: int = 4, bound: float = 1.0, dtype: torch.dtype = torch.float64) -> Sum:
    return Sum({"w": torch.zeros(size, dtype=dtype)}, {"all": bound}, {"all": ("w",)})


def two_blocks(size: int) -> Sum:
    tensors = {"a": torch.zeros(size, dtype=torch.float64), "b": torch.zeros(2, size // 2, dtype=torch.float64)}
    return Sum(tensors, {"first": 3.0, "second": 4.0}, {"first": ("a",), "second": ("b",)})


def paid(event: events.DpEvent, neighbours: Neighbours = ADD_REMOVE, seed: object = None, **more: Any) -> Receipt:
    """A live receipt, as ``Ledger.charge`` hands it out."""
    facts = {"id": "0123456789abcdef", "subject": "s", "stage": "test", "note": "", "mode": "gaussian", "head": "1:x"}
    receipt = Receipt(**facts, event=event, neighbours=neighbours, unit=Unit.SAMPLE, seeded=seed is not None, **more)
    return receipt.issued(NoiseKey(seed))


def near(found: Tensor, noise: Tensor) -> None:
    """Equal up to the grid, 2^-20 of the noise, and the millionths of noise that pay for it."""
    torch.testing.assert_close(found, noise, rtol=1e-5, atol=1e-5)


def has_std(values: Tensor, std: float) -> bool:
    """Whether independent normals around 0 have this standard deviation (two-sided chi-square test)."""
    x = values.double().numpy().ravel() / std
    return min(stats.chi2.cdf(x @ x, len(x)), stats.chi2.sf(x @ x, len(x))) > ALARM / 2


def in_a_child(attempt: Callable[[], object]) -> bool:
    """Whether a forked process gets something out of ``attempt``."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            attempt()
            os.write(writer, b"released")
        except ReceiptError:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    answer = os.read(reader, 10)
    os.close(reader)
    os.close(writer)
    return answer != b"refused"


# What a receipt does not cover is refused

QUERY = grid_sum(torch.tensor([1.0, 0.0]), low=0, high=1)
CALLS: dict[str, tuple[events.DpEvent, Callable[[Any], object]]] = {
    "gaussian": (events.gaussian(1.0), lambda r: gaussian(zeros(), r)),
    "gaussian_query": (events.gaussian(1.0), lambda r: gaussian_query(QUERY, r)),
    "laplace": (events.laplace(1.0), lambda r: laplace(QUERY, r)),
    "noisy_max": (events.noisy_max(1.0), lambda r: noisy_max(QUERY, r)),
    "stream": (events.stream(1.0, 1), lambda r: GaussianStream(r).release(zeros())),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_no_receipt_no_release(name: str) -> None:
    for nothing in (None, "receipt", object()):
        with pytest.raises(ReceiptError):
            CALLS[name][1](nothing)


@every_call
def test_one_release_is_one_release(name: str) -> None:
    event, call = CALLS[name]
    receipt = paid(event)
    assert (receipt.releases, receipt.used, receipt.live) == (1, 0, True)
    call(receipt)
    assert receipt.used == 1
    for again in (receipt, copy.copy(receipt), copy.deepcopy(receipt), dataclasses.replace(receipt, note="x")):
        with pytest.raises(ReceiptError):
            call(again)
    assert receipt.used == 1


@every_call
def test_only_the_kind_that_was_paid_for(name: str) -> None:
    for other, (event, _) in CALLS.items():
        if type(event) is not type(CALLS[name][0]):
            receipt = paid(event)
            with pytest.raises(ReceiptError):
                CALLS[name][1](receipt)
            assert receipt.used == 0, other


@every_call
def test_copies_in_other_hands_release_nothing(name: str) -> None:
    event, call = CALLS[name]
    receipt = paid(event)
    for dead in (pickle.loads(pickle.dumps(receipt)), dataclasses.replace(receipt)):
        assert not dead.live
        with pytest.raises(ReceiptError, match="releases nothing here"):
            call(dead)
    assert not in_a_child(lambda: call(receipt))
    assert receipt.live
    call(receipt)


@every_call
def test_a_closed_receipt_releases_nothing(name: str) -> None:
    event, call = CALLS[name]
    receipt = paid(event)
    receipt.close()
    with pytest.raises(ReceiptError, match="releases nothing here"):
        call(receipt)


@every_call
def test_contributions_beyond_the_receipts_bound_are_refused(name: str) -> None:
    event, call = CALLS[name]
    call(paid(event, bound=1.0))
    with pytest.raises(ReceiptError, match=r"up to 0\.99; this sum is bounded by 1"):
        call(paid(event, bound=0.99))


def test_a_pickled_receipt_carries_no_key() -> None:
    receipt = paid(events.gaussian(1.0))
    assert receipt._key is not None
    assert receipt._key._key not in pickle.dumps(receipt)
    assert receipt._key._key.hex() not in repr(receipt)


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (torch.zeros(3), "no bounded sum"),
        (Sum({"w": torch.zeros(3)}, {}, {}), "no bounds"),
        (Sum({"w": torch.zeros(3), "v": torch.zeros(1)}, {"all": 1.0}, {"all": ("w",)}), "exactly once"),
        (Sum({"w": torch.zeros(3)}, {"all": 1.0}, {"all": ("w", "v")}), "exactly once"),
        (Sum({"w": torch.zeros(3)}, {"all": 1.0, "b": 1.0}, {"all": ("w",), "b": ("w",)}), "exactly once"),
        (Sum({"w": torch.zeros(3)}, {"all": 1.0}, {}), "exactly once"),
        (Sum({"w": torch.zeros(3)}, {"all": math.inf}, {"all": ("w",)}), "finite bound"),
        (Sum({"w": torch.zeros(3)}, {"all": math.nan}, {"all": ("w",)}), "finite bound"),
        (Sum({"w": torch.zeros(3)}, {"all": 0.0}, {"all": ("w",)}), "finite bound"),
    ],
)
def test_sums_without_proper_bounds_are_refused(total: Any, message: str) -> None:
    for call, event in ((gaussian, events.gaussian(1.0)), (None, events.stream(1.0, 1))):
        receipt = paid(event)
        with pytest.raises(ReceiptError, match=message):
            call(total, receipt) if call else GaussianStream(receipt).release(total)
        assert receipt.used == 0


@pytest.mark.parametrize("call", [gaussian_query, laplace, noisy_max])
def test_queries_without_bounds_are_refused(call: Callable[..., object]) -> None:
    with pytest.raises(ReceiptError, match="grid_sum"):
        call(torch.zeros(3), paid(events.gaussian(1.0)))


@pytest.mark.parametrize(
    "noise",
    [
        {"first": 2.0, "second": 2.0},  # together 1.41 where 2 was paid
        {"first": 2.0},
        {"first": 3.0, "second": 3.0, "third": 3.0},
        {"first": 0.0, "second": 9.0},
        {"first": math.nan, "second": 1e-3},
        {"first": math.nan, "second": math.nan},
    ],
)
def test_block_noise_below_what_was_paid_is_refused(noise: dict[str, float]) -> None:
    with pytest.raises(ReceiptError):
        gaussian(two_blocks(8), paid(events.gaussian(2.0)), noise=noise)
    with pytest.raises(ReceiptError):
        GaussianStream(paid(events.stream(2.0, 3))).release(two_blocks(8), noise=noise)


def test_streams_and_single_releases_do_not_mix() -> None:
    with pytest.raises(ReceiptError, match="GaussianStream"):
        gaussian(zeros(), paid(events.stream(1.0, 5)))
    with pytest.raises(ReceiptError, match="stream event"):
        GaussianStream(paid(events.gaussian(1.0)))


def test_what_was_released_is_what_stays_charged_whatever_the_order() -> None:
    receipt = paid(events.compose([events.gaussian(100.0, 3), events.laplace(0.5, 2)]))
    laplace(QUERY, receipt)
    kept = [(type(leaf), times) for leaf, times in events.leaves(receipt.close())]
    assert kept == [(dp_event.LaplaceDpEvent, 1)]


def test_threads_never_share_a_release() -> None:
    receipt, seen = paid(events.gaussian(1.0, 400)), []

    def work() -> None:
        for _ in range(50):
            seen.append(tuple(gaussian(zeros(2), receipt)["w"].tolist()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == len(seen) == receipt.used == 400
    with pytest.raises(ReceiptError):
        gaussian(zeros(), receipt)


@pytest.mark.parametrize("strategy", [None, "banded:3"])
@pytest.mark.parametrize("numbers", [4, 5])  # as many as the sum has, and another number
def test_noise_that_was_drawn_early_is_the_same_noise(strategy: str | None, numbers: int) -> None:
    event = events.gaussian(1.0, 3) if strategy is None else events.stream(1.0, 3, strategy=strategy)

    def released(early: bool) -> list[list[float]]:
        receipt = paid(event, seed=5)
        stream = None if strategy is None else GaussianStream(receipt)
        found = []
        for step in range(3):
            if early and step != 1:
                prepare(receipt, numbers)
            out = gaussian(zeros(), receipt) if stream is None else stream.release(zeros())
            found.append(out["w"].tolist())
        assert receipt.used == 3
        prepare(receipt, numbers)  # after the last release, and on a closed receipt: nothing
        receipt.close()
        prepare(receipt, numbers)
        return found

    assert released(early=True) == released(early=False)


def test_noise_that_was_drawn_early_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    receipt, drawn = paid(events.gaussian(1.0, 2)), []
    pieces = NoiseKey._pieces
    monkeypatch.setattr(NoiseKey, "_pieces", lambda self, *what: drawn.append(what) or pieces(self, *what))
    prepare(receipt, 4)
    assert (drawn, receipt.used) == ([(0, 4)], 0)
    first = gaussian(zeros(), receipt)["w"]
    assert drawn == [(0, 4)]
    second = gaussian(zeros(), receipt)["w"]
    assert drawn == [(0, 4), (1, 4)]
    assert not torch.equal(first, second)


def test_a_failure_after_taking_uses_the_release_up(monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = paid(events.gaussian(1.0, 2), seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(NoiseKey, "normals", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gaussian(zeros(), receipt)
    second = gaussian(zeros(), receipt)["w"]
    near(second, NoiseKey(1).normals(1, 4))  # number 0 is never drawn again


def test_from_the_ledger_to_the_release_and_back(tmp_path: Any) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.subject("clinic", budget=Budget(1.0, 1e-6), neighbours="replace-one")
    receipt = ledger.charge("clinic", events.gaussian(50.0, 3), stage="test")
    gaussian_query(QUERY, receipt)
    with pytest.raises(ReceiptError):
        gaussian_query(QUERY, ledger.receipt(receipt.id))
    ledger.settle(receipt, 1)
    with pytest.raises(ReceiptError):
        gaussian_query(QUERY, receipt)
    assert ledger.spent("clinic").mu == pytest.approx(2 / 50)
    ledger.close()


# The noise is what was paid for


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gaussian_noise_follows_bound_and_multiplier(dtype: torch.dtype) -> None:
    total = Sum({"w": torch.full((100, 400), 7.0, dtype=dtype)}, {"all": 2.5}, {"all": ("w",)})
    out = gaussian(total, paid(events.gaussian(1.5)))["w"]
    assert out.dtype == dtype
    assert out.shape == (100, 400)
    assert out.device == total.sum["w"].device
    assert torch.equal(total.sum["w"], torch.full((100, 400), 7.0, dtype=dtype))  # the sum itself is left alone
    noise = (
        out.double() - 7.0
    )  # bfloat16's rounding adds less than 1e-4 of the variance, a hundredth of the test's width
    assert has_std(noise, 2.5 * 1.5)
    assert abs(noise.mean()) < 6 * 3.75 / 200 + 2.0**-8


def test_blocks_share_their_joint_bound() -> None:
    out = gaussian(two_blocks(40_000), paid(events.gaussian(2.0)))
    assert has_std(out["a"], 10.0)  # sqrt(3^2 + 4^2) * 2
    assert has_std(out["b"], 10.0)
    assert abs(np.corrcoef(out["a"].numpy(), out["b"].numpy().ravel())[0, 1]) < 6 / 200


def test_each_block_may_have_its_own_noise() -> None:
    noise = {"first": 2.5, "second": (2**-2 - 2.5**-2) ** -0.5}
    out = gaussian(two_blocks(40_000), paid(events.gaussian(2.0)), noise=noise)
    assert has_std(out["a"], 2.5 * 3)
    assert has_std(out["b"], noise["second"] * 4)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_bounds_and_multipliers_in_few_bits_are_not_rounded_again(kind: Any) -> None:
    """In 16 bits their product would be rounded, to less noise than was paid for, or beyond 65504."""
    total, plain = (Sum(zeros().sum, {"all": bound}, {"all": ("w",)}) for bound in (kind(0.3), float(kind(0.3))))
    found = _mechanisms._grids(total, total.bounds, 1.1, {"all": kind(1.1001)})["w"]
    assert found == _mechanisms._grids(plain, plain.bounds, 1.1, {"all": float(kind(1.1001))})["w"]
    assert type(found.std) is float


def test_a_schedule_takes_its_noises_in_order() -> None:
    receipt = paid(events.schedule([8.0, 4.0, 4.0, 1.0], sample_rate=0.1))
    for noise in (8.0, 4.0, 4.0, 1.0):
        sampling.draw(receipt, 0)
        assert has_std(gaussian(zeros(20_000), receipt)["w"], noise)
    assert receipt.used == receipt.releases == 4


def test_gaussians_of_one_draw_are_released_as_one_joint_gaussian() -> None:
    event = events.poisson(0.1, events.compose([events.gaussian(3.0), events.gaussian(4.0)]), steps=2)
    receipt = paid(event)
    assert receipt.releases == 2
    sampling.draw(receipt, 0)
    assert has_std(gaussian(zeros(20_000), receipt)["w"], 2.4)
    sampling.draw(receipt, 0)
    out = gaussian(two_blocks(20_000), receipt, noise={"first": 3.0, "second": 4.0})
    assert has_std(out["a"], 9.0)
    assert has_std(out["b"], 16.0)


def wide(norm: str, size: int, value: int = 0, grid: float = 2.0**-20) -> GridSum:
    """``size`` independent copies of one value, each unit's contribution to all of them together at most 1."""
    return GridSum(total=(value,) * size, grid=grid, low=-1.0, high=1.0, **{norm: 1.0})


@pytest.mark.parametrize("grid", [2.0**-20, 2.0**-2])
def test_query_noise(grid: float) -> None:
    out = gaussian_query(wide("l2", 10_000, grid=grid), paid(events.gaussian(1.5)))
    assert out.dtype == torch.float64
    assert has_std(out, math.hypot(1.5, 3 * grid))
    out = laplace(wide("l1", 10_000), paid(events.laplace(1.5)))
    assert stats.kstest(out.numpy(), "laplace", args=(0, 1.5)).pvalue > ALARM
    steps = (out / 2.0**-20).tolist()
    assert all(step == round(step) for step in steps)


@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_query_noise_follows_the_relations_bound(neighbours: Neighbours) -> None:
    query = GridSum(total=(0,) * 10_000, grid=2.0**-16, low=0.0, high=10.0, l2=10.0)
    one = dataclasses.replace(query, total=(0,))
    bound = one.bound("l2", neighbours)
    assert bound == (5.0 if neighbours is REPLACE_ONE else 10.0)
    out = torch.cat([gaussian_query(one, paid(events.gaussian(2.0), neighbours)) for _ in range(1000)])
    assert has_std(out, 2.0 * bound)


def test_under_sampling_contributions_are_measured_from_zero() -> None:
    """Where a unit may not be drawn at all, half the width of [0, 10] is not how far it moves the sum."""
    query = GridSum(total=(0,), grid=2.0**-16, low=0.0, high=10.0)
    receipt = paid(events.poisson(0.1, events.gaussian(2.0), 1000), REPLACE_ONE)
    found = []
    for _ in range(1000):
        sampling.draw(receipt, 0)
        found.append(gaussian_query(query, receipt))
    assert has_std(torch.cat(found), 20.0)


def test_totals_beyond_any_integer_are_no_error() -> None:
    for value in (2**31, 2**40 + 1, 2**53 + 1, 2**62, 2**70, -(2**70)):
        near = max(-(2**62), min(2**62, value)) * 2.0**-20
        assert gaussian_query(wide("l2", 3, value), paid(events.gaussian(1.0))).tolist() == pytest.approx(
            [near] * 3, rel=1e-9, abs=50
        )
        assert laplace(wide("l1", 3, value), paid(events.laplace(1.0))).tolist() == pytest.approx(
            [near] * 3, rel=1e-9, abs=50
        )
    assert has_std(gaussian_query(wide("l2", 2000), paid(events.gaussian(1e6))), 1e6)  # noise beyond 32 bits


def test_no_noise_means_none() -> None:
    assert gaussian_query(wide("l2", 3, 5), paid(events.gaussian(0.0))).tolist() == [5 * 2.0**-20] * 3
    assert laplace(wide("l1", 3, 5), paid(events.laplace(0.0))).tolist() == [5 * 2.0**-20] * 3
    assert gaussian(zeros(), paid(events.gaussian(0.0)))["w"].tolist() == [0.0] * 4


def test_noisy_max_finds_a_clear_winner() -> None:
    scores = grid_sum(torch.tensor([[0.1, 0.9, 0.2]]).repeat(10_000, 1), low=0, high=1)
    assert all(noisy_max(scores, paid(events.noisy_max(4.0))) == 1 for _ in range(50))
    assert noisy_max(scores, paid(events.noisy_max(4.0), seed=1)) == 1


def test_noisy_max_has_the_distribution_that_the_proof_speaks_of() -> None:
    """(0, 0) against (1, -1), each score moved by its bound: P(second) falls by e^epsilon exactly, epsilon = 2/2."""
    runs = 3000
    counts = []
    for total in ((0, 0), (2**20, -(2**20))):
        scores = GridSum(total=total, grid=2.0**-20, low=-1.0, high=1.0)
        receipt = paid(events.repeat(events.noisy_max(2.0), runs))
        counts.append(sum(noisy_max(scores, receipt) for _ in range(runs)))
    assert stats.binomtest(counts[0], runs, 0.5).pvalue > ALARM
    assert stats.binomtest(counts[1], runs, 0.5 * math.exp(-1)).pvalue > ALARM
    assert epsilon_lower(counts[0], counts[1], runs, 0.0) <= guarantee(events.noisy_max(2.0), delta=0.0).epsilon


# Streams

STRATEGIES = ["independent", "full", "banded:3", "buffered:2"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("contributions", "separation", "blocks"), [(1, 1, 1), (3, 2, 1), (2, 1, 2)])
def test_a_stream_is_its_strategy_scaled_by_its_sensitivity(
    strategy: str, contributions: int, separation: int, blocks: int
) -> None:
    """Against dense matrices: released noise = scale * C^-1 z with fresh z, block by block."""
    steps, size = 6, 5
    event = events.stream(
        1.5, steps, strategy=strategy, contributions=contributions, separation=separation, blocks=blocks
    )
    stream = GaussianStream(paid(event, ZERO_OUT, seed=3))
    name, _, number = strategy.partition(":")
    option = {"banded": "bands", "buffered": "buffers"}.get(name)
    plan = by_name(name, steps, **({option: int(number)} if option else {}))
    c = plan.coefficients()
    matrix = np.array([[c[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
    scale = 1.5 * plan.sensitivity(contributions, separation, blocks)
    for block in range(blocks):
        clips = np.linspace(1.0, 2.0, steps)  # a clip that changes from step to step scales that step
        out = np.stack([stream.release(zeros(size, clip))["w"].numpy() / clip for clip in clips])
        z = np.stack([NoiseKey(3).normals(block * steps + t, size).numpy() for t in range(steps)])
        np.testing.assert_allclose(matrix @ out, scale * z, rtol=1e-4, atol=1e-4)
    with pytest.raises(ReceiptError, match="release"):
        stream.release(zeros(size))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_noise_of_a_stream_on_a_secret_key(strategy: str) -> None:
    event = events.stream(2.0, 8, strategy=strategy)
    stream = GaussianStream(paid(event, REPLACE_ONE))
    out = np.stack([stream.release(zeros(5000, 3.0))["w"].numpy() for _ in range(8)])
    c = stream.strategy.coefficients()
    matrix = np.array([[c[i - j] if i >= j else 0.0 for j in range(8)] for i in range(8)])
    assert has_std(torch.tensor(matrix @ out), 2.0 * 3.0 * float(np.linalg.norm(c)))


def test_a_reset_starts_a_new_block_with_fresh_noise() -> None:
    stream = GaussianStream(paid(events.stream(1.0, 4, strategy="full"), ZERO_OUT, seed=3))
    first = [stream.release(zeros())["w"] for _ in range(2)]
    stream.reset()
    second = [stream.release(zeros())["w"] for _ in range(2)]
    s = stream.sensitivity
    near(first[0], s * NoiseKey(3).normals(0, 4))
    near(second[0], s * NoiseKey(3).normals(2, 4))  # nothing taken back, nothing used twice
    near(second[1], s * (NoiseKey(3).normals(3, 4) - 0.5 * NoiseKey(3).normals(2, 4)))
    with pytest.raises(ReceiptError):
        stream.release(zeros())


@pytest.mark.parametrize(("contributions", "fresh"), [(1, 4), (2, 3)])
def test_after_a_reset_a_block_is_as_long_as_its_sensitivity_allows(contributions: int, fresh: int) -> None:
    """Nobody comes twice: a full block follows. Else a block ends with its group of steps, as it was charged."""
    event = events.stream(1.0, 3, strategy="full", blocks=2, contributions=contributions)
    stream = GaussianStream(paid(event, ZERO_OUT, seed=3))
    stream.release(zeros())
    stream.reset()
    out = [stream.release(zeros())["w"] for _ in range(5)]
    near(out[fresh - 1], stream.sensitivity * NoiseKey(3).normals(fresh, 4))


def test_a_receipt_has_one_stream() -> None:
    receipt = paid(events.stream(1.0, 9, strategy="full", contributions=2, separation=2), ZERO_OUT)
    old = GaussianStream(receipt)
    old.release(zeros())
    new = GaussianStream(receipt)
    new.release(zeros())
    with pytest.raises(ReceiptError, match="Another noise stream"):
        old.release(zeros())
    with pytest.raises(ReceiptError, match="Another noise stream"):
        copy.copy(new).release(zeros())
    for attempt in (copy.deepcopy, pickle.dumps):  # its state is noise
        with pytest.raises(TypeError):
            attempt(new)
    assert receipt.used == 2


def test_an_interrupted_step_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = GaussianStream(paid(events.stream(1.0, 5, strategy="full"), ZERO_OUT, seed=3))
    stream.release(zeros())
    with monkeypatch.context() as patch:
        patch.setattr("tacit.privacy.correlated._correlated.Mixer.mix", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stream.release(zeros())
    near(stream.release(zeros())["w"], stream.sensitivity * NoiseKey(3).normals(2, 4))


def test_a_stream_with_block_noise_scales_each_block() -> None:
    stream = GaussianStream(paid(events.stream(2.0, 1), ZERO_OUT))
    noise = {"first": 2.5, "second": (2**-2 - 2.5**-2) ** -0.5}
    out = stream.release(two_blocks(20_000), noise=noise)
    assert has_std(out["a"], 7.5)
    assert has_std(out["b"], 4 * noise["second"])


# Seeded mode, and the global generators


@every_call
def test_seeded_releases_reproduce_and_say_so(name: str) -> None:
    event, call = CALLS[name]
    results = [call(paid(event, seed=11)) for _ in range(2)]
    flat = [r["w"].tolist() if isinstance(r, dict) else r.tolist() if isinstance(r, Tensor) else r for r in results]
    assert flat[0] == flat[1]
    receipt = paid(event, seed=11)
    assert not receipt.private
    assert "seeded: not private" in str(receipt)
    assert paid(event).private


def test_seeded_queries_have_the_same_distribution() -> None:
    out = laplace(wide("l1", 20_000), paid(events.laplace(1.5), seed="s"))
    assert stats.kstest(out.numpy(), "laplace", args=(0, 1.5)).pvalue > ALARM
    assert has_std(gaussian_query(wide("l2", 20_000), paid(events.gaussian(1.5), seed="s")), 1.5)


@every_call
def test_global_generators_neither_matter_nor_move(name: str) -> None:
    event, call = CALLS[name]
    receipt = paid(events.repeat(event, 2) if name != "stream" else events.stream(1.0, 2))
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        np.random.seed(5)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        results.append(call(receipt))
        assert torch.equal(before[0], torch.get_rng_state())
        assert np.array_equal(before[1], np.random.get_state()[1])
    if name != "noisy_max":  # which may well choose the same index twice
        assert str(results[0]) != str(results[1])


# An audit: does the epsilon hold for the worst neighbours?


def epsilon_lower(more: int, fewer: int, runs: int, delta: float) -> float:
    """A lower bound on epsilon from counts of one event under two neighbours (Clopper-Pearson, 1 - 1e-7 each)."""
    low = stats.beta.ppf(ALARM, more, runs - more + 1)
    high = stats.beta.isf(ALARM, fewer + 1, runs - fewer)
    return math.log(max(low - delta, 1e-12) / high)


def audited(call: Callable[..., Tensor], event: events.DpEvent, norm: str, threshold: float, delta: float) -> float:
    """One unit at its bound against nobody: how much more often is the release above the threshold?"""
    runs = 20_000
    with_it, without = (int((call(wide(norm, runs, total), paid(event)) > threshold).sum()) for total in (2**20, 0))
    return epsilon_lower(with_it, without, runs, delta)


def test_the_audit_finds_laplace_within_its_epsilon_and_half_its_noise_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    event, honest = events.laplace(1.0), _mechanisms.dp.m.then_laplace
    promised = guarantee(event, delta=0.0).epsilon
    assert promised == pytest.approx(1.0)
    assert 0.7 < audited(laplace, event, "l1", 1.0, 0.0) <= promised
    monkeypatch.setattr(_mechanisms.dp.m, "then_laplace", lambda scale: honest(scale=scale / 2))
    assert audited(laplace, event, "l1", 1.0, 0.0) > promised


def test_the_audit_finds_gaussians_within_their_epsilon_and_half_the_noise_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event, honest, delta = events.gaussian(1.0), _mechanisms.dp.m.then_gaussian, 0.05
    promised = guarantee(event, delta=delta).epsilon
    assert promised == pytest.approx(epsilon_of(1.0, delta))
    # exactly at this threshold: 1.23; its lower confidence limit is near 1.07, with a standard deviation of 0.03
    assert 0.5 * promised < audited(gaussian_query, event, "l2", 1.3, delta) <= promised
    monkeypatch.setattr(_mechanisms.dp.m, "then_gaussian", lambda scale: honest(scale=scale / 2))
    assert audited(gaussian_query, event, "l2", 1.3, delta) > promised
