"""A clip that falls by a public schedule: one run by hand, what it costs, an interrupted run."""

from pathlib import Path

import pytest
import torch
from by_hand import SEED, clipped_sum, drawn, flat, gap, key, net, one_row_units, people, released, same_bits, shaped
from by_hand import weights as weights_of
from interrupted import whole_and_interrupted

from tacit.finetune import DPGD, DPSGD, Decaying, fit
from tacit.gradients import Automatic

OPTIONS = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep", "seed": SEED}
SCHEDULE = Decaying(shape="exponential", end=0.125, period=1)


def test_a_run_by_hand() -> None:
    """Clips of 0.8, 0.4, 0.2 and 0.1, and noise in proportion to them."""
    model, data = net(), people()
    optimizer = DPSGD(batch_size=8, steps=4, clip=0.8, clip_schedule=SCHEDULE, lr=0.3, momentum=0)
    fitted = fit(model, data, optimizer=optimizer, **OPTIONS)  # type: ignore[arg-type]
    other, units = net(), one_row_units(*data)
    for step, clip in enumerate((0.8, 0.4, 0.2, 0.1)):
        total = clipped_sum(other, [units[i] for i in drawn(step, len(units), 8 / 20)], clip)
        noisy = shaped(released(flat(total), key().normals(step, 43), fitted.noise_multiplier, clip), total)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter -= 0.3 * noisy[name] / 8
    assert gap(weights_of(model), weights_of(other)) < 1e-9


@pytest.mark.parametrize("make", [DPGD, lambda **options: DPSGD(batch_size=5, **options)])
def test_it_costs_what_a_constant_clip_costs(make: type) -> None:
    plain, scheduled = make(steps=4), make(steps=4, clip_schedule=SCHEDULE)
    assert scheduled.event(1.5, 20) == plain.event(1.5, 20)


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    optimizer = DPSGD(batch_size=8, steps=4, clip_schedule=SCHEDULE, lr=0.3)
    whole, parts = whole_and_interrupted(tmp_path, optimizer, at=3)
    assert same_bits(whole, parts)
    assert not same_bits(whole, net())


def test_what_has_a_rule_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="a clip that is a number"):
        DPSGD(batch_size=8, steps=4, clip=Automatic(), clip_schedule=SCHEDULE)
    with pytest.raises(ValueError, match="one known variance"):
        DPSGD(batch_size=8, steps=4, clip_schedule=SCHEDULE, rule="adambc")


@pytest.mark.parametrize(
    ("clip", "schedule", "sentence"),
    [
        (1.0, [1.0, 0.5, 0.2, 0.1], "a schedule such as"),
        (1.0, "exponential", "a schedule such as"),
        (1.0, Decaying(k=400.0, period=1), "falls to 0"),
        (1.0, Decaying(shape="time", k=1e300, period=1), "falls to 3.33333e-301"),
        (1e-29, Decaying(end=0.01, period=1), "falls to 1e-31"),
        ("1", SCHEDULE, "clip must be a number"),
    ],
)
def test_a_schedule_that_comes_to_nothing_is_refused_before_a_charge(
    clip: object, schedule: object, sentence: str
) -> None:
    """It was found in the step in which no clip was left, and the budget was spent."""
    with pytest.raises((TypeError, ValueError), match=sentence):
        DPSGD(batch_size=8, steps=4, clip=clip, clip_schedule=schedule)  # type: ignore[arg-type]
