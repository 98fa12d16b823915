"""Training on batches of a fixed size: as by hand, and what is refused before a charge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, clipped_sum, gap, key, net, one_row_units, people, same_bits, weights

from tacit.finetune import DPGD, DPSGD, FixedSize, Optimizer, fit
from tacit.privacy import Ledger, Neighbours, guarantee

RELATION: dict[str, Any] = {"delta": 1e-5, "neighbours": Neighbours.REPLACE_ONE}


def run(**more: Any) -> Any:
    options: dict[str, Any] = {
        "epsilon": 8.0,
        "delta": 1e-5,
        "neighbours": "replace-one",
        "scheme": "full",
        "seed": SEED,
        "head": "keep",
        "optimizer": DPSGD(batch_size=6, steps=5, clip=0.5, lr=0.1, momentum=0.0, sampling="fixed-size"),
    }
    return fit(net(), people(), **(options | more))


def test_steps_are_as_by_hand() -> None:
    """The six units with the smallest uniforms of the key, in every step; plain descent."""
    fitted = run()
    model, units = net(), one_row_units(*people())
    size = sum(p.numel() for p in model.parameters())
    for step in range(5):
        uniforms = key().uniforms(step, 48, 1).tolist()[:24]
        drawn = sorted(sorted(range(24), key=lambda i: uniforms[i])[:6])
        total = clipped_sum(model, [units[i] for i in drawn], 0.5)
        noise = fitted.noise_multiplier * 0.5 * key().normals(step, size)
        parts = torch.split(noise, [p.numel() for p in model.parameters()])
        with torch.no_grad():
            for (name, parameter), part in zip(model.named_parameters(), parts, strict=True):
                parameter -= 0.1 * (total[name] + part.view_as(parameter)) / 6
    assert gap(weights(fitted.model), weights(model)) < 1e-3  # the public grid
    assert fitted.guarantee.epsilon <= 8.0
    assert fitted.guarantee.neighbours is Neighbours.REPLACE_ONE


def test_it_costs_more_than_poisson_batches_and_less_than_everybody() -> None:
    def epsilon(optimizer: Optimizer) -> float:
        return guarantee(optimizer.event(4.0, 1000), **RELATION).epsilon

    poisson, fixed = (epsilon(DPSGD(batch_size=50, steps=100, sampling=how)) for how in ("poisson", "fixed-size"))
    assert poisson < fixed < epsilon(DPGD(steps=100))
    assert guarantee(DPSGD(batch_size=7, steps=3, sampling="fixed-size").event(2.0, 7), **RELATION) == guarantee(
        DPGD(steps=3).event(2.0, 7), **RELATION
    )


def test_a_run_that_was_stopped_resumes_with_the_same_draws(tmp_path: Path) -> None:
    def begin(name: str, **more: Any) -> Any:
        with Ledger(tmp_path / f"{name}.db") as ledger:
            found = run(ledger=ledger, subject="s", checkpoint=tmp_path / f"{name}.safetensors", every=2, **more)
            assert [entry.kind for entry in ledger.entries()].count("charge") == 1
            return found

    def stop(event: Any) -> None:
        if event.step == 3:
            raise KeyboardInterrupt

    whole = begin("whole")
    with pytest.raises(KeyboardInterrupt):
        begin("stopped", curator=stop)
    assert same_bits(begin("stopped").model, whole.model)


def test_what_has_no_bound_is_refused_and_costs_nothing() -> None:
    ledger = Ledger("sqlite://")
    for more, sentence in (
        ({"neighbours": "add-remove", "size": 24}, "replace-one alone"),
        ({"neighbours": "zero-out"}, "replace-one alone"),
        ({"size": 25}, "true number"),
        ({"optimizer": DPSGD(batch_size=25, steps=2, sampling="fixed-size")}, "larger than size"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run(ledger=ledger, **more)
    assert not ledger.entries()
    with pytest.raises(ValueError, match="sampling='shuffled' is unknown"):
        DPSGD(batch_size=3, steps=2, sampling="shuffled")  # type: ignore[arg-type]
    assert FixedSize(3).rate(12) == 0.25
