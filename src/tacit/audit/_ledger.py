"""The charges of a ledger, each kind attacked with the noise, the rate and the relation that it was charged with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import attr
from dp_accounting import dp_event

from tacit.audit import _releases as releases
from tacit.audit._findings import Claim, Finding
from tacit.audit._mechanism import Release, mechanism
from tacit.privacy import Ledger, Neighbours, events

_WORK = 60_000_000  # numbers drawn for one finding, at most
_SLOW = {
    dp_event.LaplaceDpEvent: 100_000,
    events.NoisyMaxDpEvent: 20_000,
    events.SharedNoiseDpEvent: 10_000,
    dp_event.SampledWithoutReplacementDpEvent: 10_000,
}  # drawn one by one


_ENDLESS = 1 << 30  # more steps than any run makes: the stream has no length of its own
_WORDS = {
    "noise_multiplier": "noise",
    "sampling_probability": "rate",
    "source_dataset_size": "units",
    "sample_size": "drawn",
}


@dataclass(frozen=True, kw_only=True)
class Charged:
    """One kind of release that a ledger paid for."""

    event: events.DpEvent
    neighbours: Neighbours
    stage: str

    @property
    def name(self) -> str:
        facts = {f.name: getattr(self.event, f.name) for f in attr.fields(type(self.event))}
        if isinstance(self.event, dp_event.PoissonSampledDpEvent):
            noise = events.gaussian_noise(self.event.event) or math.nan
            facts = {"sampling_probability": self.event.sampling_probability, "noise_multiplier": noise}
        if isinstance(self.event, dp_event.SampledWithoutReplacementDpEvent):
            facts |= {"noise_multiplier": events.gaussian_noise(self.event.event) or math.nan}
        length = ""
        if isinstance(self.event, events.StreamDpEvent):
            endless = self.event.steps * self.event.blocks >= _ENDLESS
            left_out = {"steps", "blocks"} if endless else set()
            once = {key for key, value in facts.items() if value == 1} - {"noise_multiplier"}
            facts = {key: value for key, value in facts.items() if key not in left_out | once}
            length = ", any length" if endless else ""
        numbers = {_WORDS.get(key, key): value for key, value in facts.items() if isinstance(value, int | float)}
        text = ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()) + length
        kind = type(self.event).__name__.removesuffix("DpEvent")
        strategy = f" {self.event.strategy}" if isinstance(self.event, events.StreamDpEvent) else ""
        return f"{self.stage}: {kind}{strategy} ({text}), {self.neighbours}"


def charged(ledger: Ledger) -> list[Charged]:
    """Every different single release that was charged, in the order of its first charge."""
    relations = {subject.name: subject.terms.neighbours for subject in ledger.subjects()}
    found: dict[str, Charged] = {}
    for entry in ledger.entries():
        if entry.kind == "charge":
            for leaf, _ in events.leaves(events.from_json(entry.body["event"])):
                one = Charged(event=leaf, neighbours=relations[entry.subject], stage=entry.body["stage"])
                found.setdefault(json.dumps([events.to_json(leaf), one.stage, one.neighbours]), one)
    return list(found.values())


def ledger(book: Ledger, *, trials: int = 200_000, **options: Any) -> Iterator[Finding | str]:
    """Attack the mechanisms of every kind of charge in a ledger; a sentence for those that it cannot attack.

    No data is asked: the mechanisms run again, on synthetic neighbouring inputs, with what was charged.
    """
    for each in charged(book):
        release, event = _release(each)
        if release is None or event is None:
            yield f"{each.name}: not attacked here (no noise, or a search: audit it with audit.run)."
            continue
        number = min(trials, _SLOW.get(type(event), trials))
        if isinstance(event, events.BallsInBinsDpEvent):
            number = max(1_000, min(number, _WORK // event.steps))
        if isinstance(event, events.StreamDpEvent):
            number = max(1_000, min(number, _WORK // (event.steps * event.blocks)))
        claim = Claim.of(event, neighbours=each.neighbours, delta=1e-2)
        yield mechanism(release, claim, name=each.name, trials=number, strict=False, **options)


def _release(each: Charged) -> tuple[Release | None, events.DpEvent | None]:
    event, relation = each.event, each.neighbours
    noise = getattr(event, "noise_multiplier", 0.0)
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        inner = events.gaussian_noise(event.event)
        if not inner:
            return None, None
        simple = events.poisson(event.sampling_probability, events.gaussian(inner))
        return releases.poisson(event.sampling_probability, inner, neighbours=relation), simple
    if isinstance(event, dp_event.SampledWithoutReplacementDpEvent):
        inner, (sample, size) = events.gaussian_noise(event.event), (event.sample_size, event.source_dataset_size)
        if not inner:
            return None, None
        simple = events.without_replacement(sample, size, events.gaussian(inner))
        return releases.without_replacement(sample, size, inner, neighbours=relation), simple
    if not noise:
        return None, None
    if isinstance(event, events.BallsInBinsDpEvent):
        return releases.balls_in_bins(event, neighbours=relation), event
    if isinstance(event, events.CyclicPoissonDpEvent):
        short = attr.evolve(event, steps=min(event.steps, 2 * event.separation))
        return releases.cyclic_poisson(short, neighbours=relation), short
    if isinstance(event, events.StreamDpEvent):
        short = _shortened(event)
        return releases.stream(short, neighbours=relation), short
    if isinstance(event, events.SharedNoiseDpEvent):
        return releases.shares(event.kind, noise, event.honest), event
    makers = {
        dp_event.GaussianDpEvent: releases.gaussian,
        dp_event.LaplaceDpEvent: releases.laplace,
        events.NoisyMaxDpEvent: releases.noisy_max,
    }
    make: Any = makers.get(type(event))
    return (None, None) if make is None else (make(noise, neighbours=relation), event)


def _shortened(event: events.StreamDpEvent) -> events.StreamDpEvent:
    """As few steps and blocks as let a unit take part as often as it may: the rest of a stream costs nothing."""
    needed = (event.contributions - 1) * event.separation + 1
    steps = min(event.steps, needed) if event.strategy.startswith("independent") else event.steps
    return attr.evolve(event, steps=max(steps, 2), blocks=min(event.blocks, event.contributions))
