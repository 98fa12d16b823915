"""Training on bins: as by hand, and what is refused before a charge."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, clipped_sum, gap, key, net, one_row_units, people, same_bits, weights

from tacit.finetune import DPGD, DPSGD, BallsInBins, Decaying, Evaluation, Optimizer, fit
from tacit.privacy import Ledger, Neighbours, events, guarantee

ROWS, BINS = 24, 4


def dpsgd(steps: int = 9, **more: Any) -> Optimizer:
    options: dict[str, Any] = {"batch_size": 6, "clip": 0.5, "lr": 0.1, "momentum": 0.0, "sampling": "balls-in-bins"}
    return DPSGD(steps=steps, **(options | more))


def run(data: Any = None, **more: Any) -> Any:
    options: dict[str, Any] = {
        "epsilon": 8.0,
        "delta": 1e-5,
        "size": ROWS,
        "scheme": "full",
        "seed": SEED,
        "head": "keep",
        "optimizer": dpsgd(),
    }
    return fit(net(), people() if data is None else data, **(options | more))


def bins_by_hand(run: int = 0, place: int = 0, people: int = ROWS) -> list[int]:
    uniforms = key().derived("bins", place).uniforms(run, people, 1).tolist()
    return [math.ceil(BINS * each) - 1 for each in uniforms]


def descent(fitted: Any, places: list[list[int]], without: int | None = None) -> Any:
    """Plain descent by hand: step t with the units whose place in line t is t mod BINS."""
    model, units = net(), one_row_units(*people())
    size = sum(p.numel() for p in model.parameters())
    for step, place in enumerate(places):
        drawn = [unit for unit in range(ROWS) if place[unit] == step % BINS and unit != without]
        total = clipped_sum(model, [units[i] for i in drawn], 0.5)
        noise = fitted.noise_multiplier * 0.5 * key().normals(step, size)
        parts = torch.split(noise, [p.numel() for p in model.parameters()])
        with torch.no_grad():
            for (name, parameter), part in zip(model.named_parameters(), parts, strict=True):
                parameter -= 0.1 * (total[name] + part.view_as(parameter)) / 6
    return model


def test_steps_are_as_by_hand() -> None:
    """Two epochs of four bins and one step more."""
    fitted = run()
    assert gap(weights(fitted.model), weights(descent(fitted, [bins_by_hand()] * 9))) < 1e-3  # the public grid
    assert 7.9 < fitted.guarantee.epsilon <= 8.0
    assert fitted.guarantee.neighbours is Neighbours.ADD_REMOVE


def test_steps_of_bins_that_are_filled_anew_are_as_by_hand() -> None:
    fitted = run(optimizer=dpsgd(sampling="random-allocation"))
    places = [bins_by_hand(0)] * 4 + [bins_by_hand(1)] * 4 + [bins_by_hand(0, place=1)]
    by_hand = descent(fitted, places)
    assert gap(weights(fitted.model), weights(by_hand)) < 1e-3
    assert 7.9 < fitted.guarantee.epsilon <= 8.0


def test_the_event_is_that_of_the_declared_size() -> None:
    """Bins and divisor come from the declared size, never from the number of rows."""
    once, anew = BallsInBins(6), BallsInBins(6, anew=True)
    assert (once.bins(24), once.bins(25), once.rate(24), once.expected(25)) == (4, 5, 0.25, 5.0)
    release = events.gaussian(2.0)
    epoch, rest = (events.balls_in_bins(2.0, bins=4, steps=steps) for steps in (4, 1))
    assert once.event(24, release, 9) == events.balls_in_bins(2.0, bins=4, steps=9)
    assert anew.event(24, release, 9) == events.compose([events.repeat(epoch, 2), rest])
    assert anew.event(24, release, 8) == events.repeat(epoch, 2)
    assert anew.event(24, release, 1) == once.event(24, release) == rest
    assert once.event(6, release, 3) == events.gaussian(2.0, 3)
    ledger = Ledger("sqlite://")
    fitted = run(ledger=ledger, subject="s", size=40)
    (entry,) = (entry for entry in ledger.entries() if entry.kind == "charge")
    assert events.from_json(entry.body["event"]) == events.balls_in_bins(fitted.noise_multiplier, bins=7, steps=9)


def test_anew_costs_less_than_poisson_batches_and_once_less_than_everybody() -> None:
    def epsilon(optimizer: Optimizer) -> float:
        return guarantee(optimizer.event(2.0, 1000), delta=1e-5).epsilon

    anew, poisson, once = (
        epsilon(DPSGD(batch_size=50, steps=100, sampling=how))  # type: ignore[arg-type]
        for how in ("random-allocation", "poisson", "balls-in-bins")
    )
    assert anew < poisson < once < epsilon(DPGD(steps=5))


@pytest.mark.parametrize("sampling", ["balls-in-bins", "random-allocation"])
def test_a_run_that_was_stopped_resumes_with_the_same_bins(tmp_path: Path, sampling: str) -> None:
    def begin(name: str, **more: Any) -> Any:
        with Ledger(tmp_path / f"{name}.db") as ledger:
            options: dict[str, Any] = {"optimizer": dpsgd(sampling=sampling), "ledger": ledger, "subject": "s"}
            found = run(**options, checkpoint=tmp_path / f"{name}.safetensors", every=2, **more)
            assert [entry.kind for entry in ledger.entries()].count("charge") == 1
            return found

    def stop(event: Any) -> None:
        if event.step == 5:
            raise KeyboardInterrupt

    whole = begin("whole")
    with pytest.raises(KeyboardInterrupt):
        begin("stopped", curator=stop)
    assert same_bits(begin("stopped").model, whole.model)


def test_micro_batches_and_empty_bins() -> None:
    assert gap(weights(run(microbatch=2).model), weights(run().model)) < 1e-3
    sparse = dpsgd(batch_size=1, steps=30)  # of 24 units in 24 bins some bin is empty
    assert min(bins_count := [bins_24().count(place) for place in range(24)]) == 0, bins_count
    assert math.isfinite(run(optimizer=sparse).guarantee.epsilon)


def bins_24() -> list[int]:
    return [math.ceil(24 * each) - 1 for each in key().derived("bins", 0).uniforms(0, 24, 1).tolist()]


def test_rows_of_a_unit_go_together() -> None:
    """Eight units of three rows: a unit is in the bin of its number, with its rows' mean gradient."""
    rows, labels = people()
    seen: list[Any] = []
    options: dict[str, Any] = {"unit_ids": [row // 3 for row in range(ROWS)], "unit": "user", "size": 8}
    options["optimizer"] = dpsgd(steps=1, batch_size=2)
    fitted = run(**options, curator=lambda event: seen.append(event.clipped_sum))
    drawn = [unit for unit, thrown in enumerate(bins_by_hand(people=8)) if thrown == 0]
    units = [(rows[3 * unit : 3 * unit + 3], labels[3 * unit : 3 * unit + 3]) for unit in drawn]
    assert units
    assert gap(seen[0].sum, clipped_sum(net(), units, 0.5)) < 1e-9
    assert str(fitted.guarantee.unit) == "user"


def test_an_odd_row_contributes_zero() -> None:
    rows, labels = people()
    rows[5] = math.nan
    fitted = run((rows, labels))
    assert gap(weights(fitted.model), weights(descent(fitted, [bins_by_hand()] * 9, without=5))) < 1e-3


@pytest.mark.filterwarnings("ignore:Before training the model")
def test_what_has_no_bound_is_refused_and_costs_nothing() -> None:
    ledger = Ledger("sqlite://")
    for more, sentence in (
        ({"neighbours": "replace-one"}, "no bound under replace-one"),
        ({"optimizer": dpsgd(batch_size=25)}, "larger than size"),
        ({"evaluate": Evaluation(data=people(), public=True, every=2, patience=1)}, "by PLD only"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run(ledger=ledger, **more)
    assert not ledger.entries()
    with pytest.raises(ValueError, match="the same noise in every step"):
        Optimizer(name="x", steps=3, sampler=BallsInBins(3), noise=Decaying())
    assert run(neighbours="zero-out").guarantee.neighbours is Neighbours.ZERO_OUT
