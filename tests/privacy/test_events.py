"""Events: what is written can be read for ever, and trees are taken apart as they were put together."""

import json
import math
from typing import Any

import attr
import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy import Neighbours, accounting, events
from tacit.privacy.events import DpEvent, _types

noises = st.floats(0, 1e6)
counts = st.integers(1, 5)
shares = st.floats(0.001, 0.999)

LEAVES = {
    "NoOpDpEvent": st.just(dp_event.NoOpDpEvent()),
    "NonPrivateDpEvent": st.just(dp_event.NonPrivateDpEvent()),
    "GaussianDpEvent": st.builds(dp_event.GaussianDpEvent, noises),
    "LaplaceDpEvent": st.builds(dp_event.LaplaceDpEvent, noises),
    "DiscreteLaplaceDpEvent": st.builds(dp_event.DiscreteLaplaceDpEvent, noises, counts),
    "RandomizedResponseDpEvent": st.builds(dp_event.RandomizedResponseDpEvent, shares, st.integers(2, 9)),
    "ZCDpEvent": st.builds(dp_event.ZCDpEvent, noises, noises),
    "StreamDpEvent": st.builds(
        events.StreamDpEvent, noises, counts, st.sampled_from(["independent", "banded:4"]), counts, counts, counts
    ),
    "PassesDpEvent": st.builds(
        events.PassesDpEvent, noises, counts, st.sampled_from(["independent", "banded:4"]), counts, counts
    ),
    "CyclicPoissonDpEvent": st.builds(
        lambda noise, steps, bands, rate: events.CyclicPoissonDpEvent(
            noise, steps, f"banded:{bands}", 1, bands, 1, rate
        ),
        noises,
        counts,
        counts,
        st.floats(0.01, 1),
    ),
    "BallsInBinsDpEvent": st.builds(events.BallsInBinsDpEvent, noises, counts, counts),
    "NoisyMaxDpEvent": st.builds(events.NoisyMaxDpEvent, noises),
    "SharedNoiseDpEvent": st.builds(
        events.SharedNoiseDpEvent, st.sampled_from(["laplace", "gaussian"]), noises, counts
    ),
}


def flat(event: DpEvent) -> list[DpEvent]:
    """Every single release, one by one: the obvious reading of a tree."""
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return flat(event.event) * event.count
    if isinstance(event, dp_event.ComposedDpEvent):
        return [leaf for part in event.events for leaf in flat(part)]
    return [] if isinstance(event, dp_event.NoOpDpEvent) else [event]


def selectable(event: DpEvent) -> bool:
    parts = flat(event)
    return bool(parts) and not any(
        isinstance(leaf, events.StreamDpEvent | events.BallsInBinsDpEvent | dp_event.RepeatAndSelectDpEvent)
        for leaf in parts
    )


def branches(inner: st.SearchStrategy[DpEvent]) -> dict[str, st.SearchStrategy[DpEvent]]:
    return {
        "SelfComposedDpEvent": st.builds(dp_event.SelfComposedDpEvent, inner, counts),
        "ComposedDpEvent": st.builds(dp_event.ComposedDpEvent, st.lists(inner, max_size=3)),
        "PoissonSampledDpEvent": st.builds(dp_event.PoissonSampledDpEvent, shares, inner.filter(flat)),
        "SampledWithoutReplacementDpEvent": st.builds(
            dp_event.SampledWithoutReplacementDpEvent, st.integers(10, 99), st.integers(1, 9), inner.filter(flat)
        ),
        "RepeatAndSelectDpEvent": st.builds(
            dp_event.RepeatAndSelectDpEvent, inner.filter(selectable), st.floats(1, 99), noises
        ),
    }


leaves = st.one_of(*LEAVES.values())
trees = st.recursive(leaves, lambda inner: st.one_of(*branches(inner).values()), max_leaves=6)
plain = st.recursive(  # only what leaves() looks into
    st.builds(dp_event.GaussianDpEvent, st.floats(0.1, 10)) | st.just(dp_event.NoOpDpEvent()),
    lambda inner: st.one_of(branches(inner)["SelfComposedDpEvent"], branches(inner)["ComposedDpEvent"]),
    max_leaves=5,
)


def spelled_out(event: DpEvent) -> list[DpEvent]:
    return [leaf for leaf, times in events.leaves(event) for _ in range(times)]


# The lasting form


def test_every_known_event_is_tried() -> None:
    assert set(_types.KNOWN) == set(LEAVES) | set(branches(leaves))


@settings(deadline=None)
@given(trees)
def test_a_tree_survives_json(event: DpEvent) -> None:
    text = json.dumps(events.to_json(event))
    again = events.from_json(json.loads(text))
    assert again == event
    assert json.dumps(events.to_json(again)) == text


def test_the_form_is_the_promised_one() -> None:
    event = events.poisson(0.5, events.gaussian(2.0), steps=3)
    assert events.to_json(event) == {
        "type": "SelfComposedDpEvent",
        "event": {
            "type": "PoissonSampledDpEvent",
            "sampling_probability": 0.5,
            "event": {"type": "GaussianDpEvent", "noise_multiplier": 2.0},
        },
        "count": 3,
    }


def test_numpy_numbers_are_written_as_numbers() -> None:
    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(np.float32(0.5)), np.int64(7))
    assert json.dumps(events.to_json(event)) == json.dumps(events.to_json(events.gaussian(0.5, 7)))


def test_unknown_events_are_refused() -> None:
    @attr.s(frozen=True)
    class HomeMadeDpEvent(DpEvent):  # type: ignore[misc]
        pass

    with pytest.raises(ValueError, match="HomeMadeDpEvent cannot be charged"):
        events.to_json(events.compose([HomeMadeDpEvent()]))
    for data in ({"type": "HomeMadeDpEvent"}, {}, {"type": "ComposedDpEvent", "events": [{"type": "?"}]}):
        with pytest.raises(ValueError, match="Unknown event"):
            events.from_json(data)


# Trees


@settings(deadline=None)
@given(plain)
def test_leaves_are_the_single_releases_in_order(event: DpEvent) -> None:
    assert spelled_out(event) == flat(event)


@settings(deadline=None)
@given(plain)
def test_gaussians_of_one_draw_are_one_joint_gaussian(event: DpEvent) -> None:
    precision = math.fsum(leaf.noise_multiplier**-2 for leaf in flat(event))
    noise = events.gaussian_noise(event)
    assert noise == pytest.approx(precision**-0.5 if precision else math.inf)


def test_joint_noise() -> None:
    assert events.joint([3.0, 4.0]).noise_multiplier == pytest.approx(12 / 5)
    assert events.joint_noise([2.0, 0.0]) == 0
    assert events.joint_noise([2.0, math.inf]) == pytest.approx(2.0)
    assert events.joint_noise([]) == events.joint_noise([math.inf]) == math.inf
    assert math.isnan(events.joint_noise([2.0, math.nan]))
    assert events.gaussian_noise(events.compose([events.gaussian(1.0), events.laplace(1.0)])) is None


def test_adpclip_splits_one_gaussian() -> None:
    z, count_noise = 1.0, 10.0  # FACTS: z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), the count bounded by 1/2
    gradient = (z**-2 - (2 * count_noise) ** -2) ** -0.5
    assert events.joint_noise([gradient, 2 * count_noise]) == pytest.approx(z)


def test_builders() -> None:
    assert events.gaussian(2.0) == dp_event.GaussianDpEvent(2.0)
    assert events.laplace(2.0, 3) == dp_event.SelfComposedDpEvent(dp_event.LaplaceDpEvent(2.0), 3)
    assert events.poisson(1.0, events.gaussian(2.0)) == events.gaussian(2.0)
    assert flat(events.schedule([3.0, 2.0])) == [events.gaussian(3.0), events.gaussian(2.0)]
    assert all(leaf.sampling_probability == 0.1 for leaf in flat(events.schedule([3.0, 2.0], 0.1)))
    assert events.is_sampled(events.compose([events.laplace(1.0), events.poisson(0.1, events.gaussian(1.0), 5)]))
    assert not events.is_sampled(events.compose([events.laplace(1.0), events.gaussian(1.0, 4)]))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_rates_are_probabilities(rate: float) -> None:
    with pytest.raises(ValueError, match="sample rate"):
        events.poisson(rate, events.gaussian(1.0))


def test_counts_start_at_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        events.gaussian(1.0, 0)
    with pytest.raises(ValueError, match="at least 1"):
        events.stream(1.0, 10, contributions=0)
    less_than_nothing = events.compose([events.gaussian(1.0), dp_event.SelfComposedDpEvent(events.gaussian(0.1), -1)])
    with pytest.raises(ValueError, match="at least 1"):
        list(events.leaves(less_than_nothing))


@pytest.mark.parametrize("steps", [2.5, True, "3", 0, -1])
def test_a_release_cannot_happen_in_part(steps: object) -> None:
    """Charged for two and a half, a receipt would give three."""
    with pytest.raises(ValueError, match="whole and at least 1"):
        events.gaussian(1.0, steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole and at least 1"):
        list(events.leaves(dp_event.SelfComposedDpEvent(events.gaussian(1.0), steps)))
    with pytest.raises(ValueError, match="whole and at least 1"):
        events.stream(1.0, steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["bandit", "banded:x", "banded:0", "independent:3"])
def test_an_unknown_strategy_is_refused_before_it_is_charged(strategy: str) -> None:
    with pytest.raises(ValueError, match="There is no noise called"):
        events.stream(1.0, 10, strategy=strategy)


OUT_OF_RANGE = [
    dp_event.GaussianDpEvent(-1.0),
    dp_event.GaussianDpEvent(math.nan),
    dp_event.GaussianDpEvent("2"),
    dp_event.GaussianDpEvent(True),
    dp_event.GaussianDpEvent(None),
    dp_event.GaussianDpEvent(1j),
    dp_event.LaplaceDpEvent(-0.1),
    dp_event.LaplaceDpEvent(-math.inf),
    dp_event.DiscreteLaplaceDpEvent(-5.0, 1),
    dp_event.DiscreteLaplaceDpEvent(1.0, -5),
    dp_event.DiscreteLaplaceDpEvent(1.0, 0),
    dp_event.DiscreteLaplaceDpEvent(1.0, 2.7),  # would be priced at 2
    dp_event.DiscreteLaplaceDpEvent(math.inf, 1),
    dp_event.RandomizedResponseDpEvent(1.5, 2),
    dp_event.RandomizedResponseDpEvent(-0.1, 2),
    dp_event.RandomizedResponseDpEvent(0.5, 1),
    dp_event.RandomizedResponseDpEvent(0.5, -2),
    dp_event.ZCDpEvent(-1.0, 0.0),
    dp_event.ZCDpEvent(1.0, -2.0),
    dp_event.ZCDpEvent(math.nan, 0.0),
    dp_event.ZCDpEvent(math.inf, 0.0),
    dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(1.0), -3),
    dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(1.0), 2**60),
    dp_event.SampledWithoutReplacementDpEvent(10, 11, dp_event.GaussianDpEvent(1.0)),
    dp_event.SampledWithoutReplacementDpEvent(-10, -11, dp_event.GaussianDpEvent(1.0)),
    dp_event.SampledWithoutReplacementDpEvent(10, 5, dp_event.GaussianDpEvent(-1.0)),
    dp_event.PoissonSampledDpEvent(1.1, dp_event.GaussianDpEvent(1.0)),
    dp_event.PoissonSampledDpEvent(-0.1, dp_event.GaussianDpEvent(1.0)),
    dp_event.PoissonSampledDpEvent(math.nan, dp_event.GaussianDpEvent(1.0)),
    dp_event.PoissonSampledDpEvent(0.9, dp_event.LaplaceDpEvent(-0.1)),
    dp_event.PoissonSampledDpEvent(0.9, dp_event.NoOpDpEvent()),
    dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1.0), 0.5, 1.0),
    dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1.0), 2.0, -1.0),
    dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(-1.0), 2.0, 1.0),
    events.NoisyMaxDpEvent(-1.0),
    events.BallsInBinsDpEvent(-1.0, 10, 10),
    events.BallsInBinsDpEvent(1.0, 0, 10),
    events.BallsInBinsDpEvent(1.0, 10, 2.5),
    events.StreamDpEvent(-1.0, 10),
    events.StreamDpEvent(1.0, -10),
    events.StreamDpEvent(1.0, 10, "bandit"),
]


@pytest.mark.parametrize("event", OUT_OF_RANGE, ids=repr)
@pytest.mark.parametrize("neighbours", list(Neighbours))
def test_numbers_out_of_range_are_refused_wherever_they_are(event: DpEvent, neighbours: Neighbours) -> None:
    nested = dp_event.SelfComposedDpEvent(dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(9.0), event]), 2)
    for tree in (event, nested):
        with pytest.raises(ValueError, match=r"got|at least|larger|releases nothing|There is no noise"):
            events.to_json(tree)
        with pytest.raises(ValueError, match=r"got|at least|larger|releases nothing|There is no noise"):
            accounting.guarantee(tree, delta=1e-6, neighbours=neighbours)
        with pytest.raises(ValueError, match=r"got|at least|larger|releases nothing|There is no noise"):
            events.from_json(written(tree))


def written(event: Any) -> Any:
    """As somebody else may have written it: nothing is checked or converted."""
    if isinstance(event, DpEvent):
        return {"type": type(event).__name__} | {
            field.name: written(getattr(event, field.name)) for field in attr.fields(type(event))
        }
    return [written(part) for part in event] if isinstance(event, list | tuple) else event


@pytest.mark.parametrize("noise", [-1.0, math.nan, "2", True])
def test_the_builders_refuse_such_noise(noise: Any) -> None:
    for make in (events.gaussian, events.laplace, events.noisy_max, lambda z: events.stream(z, 10)):
        with pytest.raises(ValueError, match="noise multiplier is a number"):
            make(noise)
    with pytest.raises(ValueError, match="noise multiplier is a number"):
        events.poisson(0.9, dp_event.LaplaceDpEvent(-0.1))
    with pytest.raises(ValueError, match="noise multiplier is a number"):
        events.joint([2.0, math.nan])


def test_what_is_read_has_the_fields_of_its_kind() -> None:
    for data in (
        {"type": "GaussianDpEvent"},
        {"type": "GaussianDpEvent", "noise_multiplier": 1.0, "colour": "red"},
        {"type": "ComposedDpEvent", "events": [3]},
        {"type": "PoissonSampledDpEvent", "sampling_probability": 0.5, "event": 1.0},
    ):
        with pytest.raises(ValueError, match=r"lacks a field|other fields|cannot be charged"):
            events.from_json(data)


def test_a_tree_has_a_bottom() -> None:
    event = events.gaussian(1.0)
    for _ in range(60):
        event = dp_event.SelfComposedDpEvent(event, 1)
    with pytest.raises(ValueError, match="nested at most 50 deep"):
        events.to_json(event)
