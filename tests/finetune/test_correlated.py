"""Fixed passes with correlated noise: who is when, the noise, one charge, what is refused, one run by hand."""

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SEED, clipped_sum, flat, gap, key, net, one_row_units, people, released, shaped, weights

from tacit.finetune import DPFTRL, Correlated, Optimizer, Passes, Poisson, fit, plan
from tacit.privacy import Budget, Ledger, Neighbours, correlated
from tacit.privacy.correlated import Strategy
from tacit.privacy.events import StreamDpEvent
from tacit.privacy.mechanisms import strategy_of

OPTIONS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "scheme": "full", "head": "keep"}


def matrix(strategy: Strategy) -> np.ndarray[Any, np.dtype[np.float64]]:
    n, column = strategy.horizon, strategy.coefficients()
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


@pytest.mark.parametrize(("people_", "batches", "passes"), [(24, 5, 3), (7, 7, 2), (3, 4, 2), (10, 1, 2)])
def test_everybody_is_in_one_batch_of_each_pass_and_never_nearer(people_: int, batches: int, passes: int) -> None:
    sampler = Passes(batches, passes)
    receipt: Any = None  # nothing is drawn
    steps: dict[int, list[int]] = {i: [] for i in range(people_)}
    for step in range(sampler.steps):
        for unit in sampler.draw(receipt, step, people_).tolist():
            steps[unit].append(step)
    for taken in steps.values():
        assert [t // batches for t in taken] == list(range(passes))
        assert {b - a for a, b in pairwise(taken)} <= {batches}
    assert sampler.participations(sampler.steps) == (passes, batches)
    assert sampler.expected(24) == 24 / batches


@pytest.mark.parametrize(("strategy", "passes"), [("buffered", 1), ("buffered@0.9", 3), ("banded:4", 3), ("full", 2)])
def test_the_noise_has_the_covariance_and_the_scale_of_its_strategy(strategy: str, passes: int) -> None:
    optimizer = DPFTRL(batches=4, passes=passes, strategy=strategy)
    event = optimizer.event(1.5, 100)
    assert isinstance(event, StreamDpEvent)
    C = matrix(strategy_of(event))
    n = len(C)
    # what one unit can do: the norm of the sum of its columns, over all places
    sensitivity = max(np.linalg.norm(C[:, place::4].sum(1)) for place in range(4))
    with Ledger("sqlite://") as ledger:
        ledger.subject("s", Budget(9.0, 1e-5), neighbours=Neighbours.REPLACE_ONE)
        receipt = ledger.charge("s", event, stage="test", note="", seed=1)
        release = optimizer.noise.releases(receipt)
        zero = torch.zeros(40_000, dtype=torch.float64)
        total: Any = SimpleNamespace(sum={"w": zero}, bounds={"gradient": 0.5}, blocks={"gradient": ("w",)})
        seen = torch.stack([release(total, None)["w"] for _ in range(n)]).numpy()
    inverse = np.linalg.inv(C)
    wanted = (1.5 * 0.5 * sensitivity) ** 2 * inverse @ inverse.T
    error = np.abs(seen @ seen.T / 40_000 - wanted).max() / wanted.max()
    assert error < 0.05  # seven standard deviations of a variance from 40,000 numbers


@pytest.mark.parametrize(("strategy", "passes"), [("buffered", 1), ("buffered@0.9", 3), ("banded:4", 3), ("full", 2)])
def test_a_replacement_in_another_batch_costs_no_more_than_two_units(strategy: str, passes: int) -> None:
    """Who goes is in one batch, who comes in another: over all pairs of batches, in the charged sensitivity."""
    event = DPFTRL(batches=4, passes=passes, strategy=strategy).event(1.5, 100)
    assert isinstance(event, StreamDpEvent)
    mixing = strategy_of(event)
    C, s = matrix(mixing), mixing.sensitivity(passes, 4)
    columns = [C[:, place::4].sum(1) for place in range(4)]
    assert max(np.linalg.norm(one + other) for one in columns for other in columns) <= 2 * s * (1 + 1e-12)


def test_a_run_is_one_charge_and_one_gaussian(tmp_path: Path) -> None:
    optimizer = DPFTRL(batches=5, passes=2, lr=0.1)
    assert optimizer.steps == 10
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        fitted = fit(net(), people(), optimizer=optimizer, ledger=ledger, neighbours="replace-one", **OPTIONS)
        charges = [entry for entry in ledger.entries() if entry.kind == "charge"]
    assert len(charges) == 1
    event = charges[0].body["event"]
    assert (event["type"], event["contributions"], event["separation"], event["steps"]) == ("PassesDpEvent", 2, 5, 10)
    assert fitted.noise_multiplier == pytest.approx(8.4494, abs=1e-4)  # of one release at epsilon 1, delta 1e-6
    assert fitted.guarantee.epsilon == pytest.approx(1.0, abs=1e-6)
    zero_out = plan(optimizer, epsilon=1.0, delta=1e-6, size=24, neighbours="zero-out")
    assert zero_out.noise_multiplier == pytest.approx(8.4494 / 2, abs=1e-4)


def test_a_run_by_hand() -> None:
    data, batches, clip = people(), 3, 0.5
    model, other, units = net(), net(), one_row_units(*data)
    optimizer = DPFTRL(batches=batches, passes=2, clip=clip, strategy="banded:2", lr=0.3, momentum=0)
    fitted = fit(model, data, optimizer=optimizer, seed=SEED, neighbours="replace-one", **OPTIONS)
    C = np.eye(6) + 0.5 * np.eye(6, k=-1)  # the first two coefficients of the square root
    fresh = np.stack([key().normals(t, 43).numpy() for t in range(6)])
    mixed, multiplier = torch.from_numpy(np.linalg.solve(C, fresh)), fitted.noise_multiplier * math.sqrt(2 * 1.25)
    for t in range(6):
        total = clipped_sum(other, units[t % 3 :: 3], clip)
        noisy = shaped(released(flat(total), mixed[t], multiplier, clip), total)
        for name, p in other.named_parameters():
            p.data -= 0.3 * noisy[name] / 8
    assert gap(weights(model), weights(other)) < 1e-9


def test_what_it_cannot_promise_is_refused_before_the_charge(tmp_path: Path) -> None:
    optimizer = DPFTRL(batches=5)
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        with pytest.raises(ValueError, match="neighbours='replace-one' or 'zero-out'"):
            fit(net(), people(), optimizer=optimizer, ledger=ledger, size=24, **OPTIONS)
        with pytest.raises(ValueError, match="leave checkpoint= out"):
            fit(
                net(),
                people(),
                optimizer=optimizer,
                ledger=ledger,
                neighbours="replace-one",
                checkpoint=tmp_path / "c",
                **OPTIONS,
            )
        assert ledger.entries() == []
    with pytest.raises(ValueError, match="use Passes"):
        Optimizer(name="odd", steps=3, sampler=Poisson(4), noise=Correlated())
    with pytest.raises(ValueError, match="are 6 steps, not 7"):
        Optimizer(name="odd", steps=7, sampler=Passes(3, 2), noise=Correlated())
    with pytest.raises(ValueError, match="no noise called"):
        DPFTRL(batches=4, strategy="pink")
    with pytest.raises(ValueError, match="at least 1"):
        DPFTRL(batches=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("batches", "passes"), [(40, 1), (10, 4), (4, 20)])
def test_the_default_noise_is_the_least_of_what_there_is(batches: int, passes: int, momentum: float) -> None:
    steps = batches * passes
    event = DPFTRL(batches=batches, passes=passes, momentum=momentum).event(1.0, 100)

    def noise(strategy: Strategy) -> float:
        return correlated.running_sum_rms(strategy, passes, batches, momentum=momentum)

    others = [correlated.independent(steps), correlated.buffered(steps), correlated.banded(steps, min(batches, 16))]
    assert noise(strategy_of(event)) <= min(noise(each) for each in others) * (1 + 1e-9)
