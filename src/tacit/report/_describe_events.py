"""Events of a ledger in words."""

from __future__ import annotations

from typing import Any

from tacit.privacy import events

_MOST_PARTS = 3
_ENDLESS = 1 << 30  # more steps than any run makes: a stream that is charged for them has no length of its own


def event(data: dict[str, Any]) -> str:
    """An event, as ``events.to_json`` wrote it, for a person who reads the report."""
    match data:
        case {"type": "SelfComposedDpEvent", "event": inner, "count": times}:
            return f"{times:,} times {event(inner)}"
        case {"type": "ComposedDpEvent", "events": parts}:
            shown = [event(part) for part in parts[:_MOST_PARTS]]
            more = [f"and {len(parts) - _MOST_PARTS:,} more"] if len(parts) > _MOST_PARTS else []
            return "; ".join(shown + more)
        case {"type": "PoissonSampledDpEvent", "sampling_probability": rate, "event": inner}:
            return f"{event(inner)}, each unit drawn with probability {rate:g}"
        case {"type": "SampledWithoutReplacementDpEvent", "source_dataset_size": n, "sample_size": k, "event": inner}:
            return f"{event(inner)}, of {k:,} units drawn from {n:,}"
        case {"type": "StreamDpEvent", "noise_multiplier": noise, "steps": steps, "strategy": strategy}:
            return _stream(noise, steps, strategy, data.get("contributions", 1), data.get("blocks", 1))
        case {"type": "PassesDpEvent", "noise_multiplier": noise, "steps": steps, "strategy": strategy, **rest}:
            return _passes(noise, steps, strategy, rest.get("contributions", 1), rest.get("separation", 1))
        case {"type": "CyclicPoissonDpEvent", "noise_multiplier": noise, "steps": steps, "separation": bands, **rest}:
            return (
                f"{steps:,} steps with noise over {bands} bands, {noise:.4g} × the bound, each unit of one of {bands} "
                f"groups drawn with probability {rest.get('sample_rate', 1.0):g}"
            )
        case {"type": "BallsInBinsDpEvent", "noise_multiplier": noise, "steps": steps, "bins": bins}:
            how = f"Gaussian noise, {noise:.4g} × the bound" if noise else "no noise"
            return f"{steps:,} steps in turns over {bins:,} bins, each unit thrown into one of them at random: {how}"
        case {"type": "GaussianDpEvent", "noise_multiplier": noise}:
            return f"Gaussian noise, {noise:.4g} × the bound" if noise else "a sum without noise"
        case {"type": "LaplaceDpEvent", "noise_multiplier": noise}:
            return f"Laplace noise, {noise:.4g} × the bound" if noise else "a sum without noise"
        case {"type": "NoisyMaxDpEvent", "noise_multiplier": noise}:
            return f"a private choice of the best, noise {noise:.4g} × the bound"
        case {"type": "SharedNoiseDpEvent", "kind": kind, "noise_multiplier": noise, "honest": honest}:
            return (
                f"a share of {kind.capitalize()} noise, {noise:.4g} × the bound in {honest:,} shares: holds if the "
                f"total alone is seen (secure aggregation) and {honest:,} of those who add to it are honest"
            )
        case {"type": "RepeatAndSelectDpEvent", "event": inner, "mean": mean}:
            return f"the best of about {mean:g} runs, each {event(inner)}"
        case {"type": "NonPrivateDpEvent"}:
            return "a release without noise"
    numbers = ", ".join(f"{key} {value:g}" for key, value in data.items() if isinstance(value, int | float))
    return " ".join(part for part in (str(data.get("type", "?")).removesuffix("DpEvent"), numbers) if part)


def settlement(settled: dict[str, Any], charged: dict[str, Any] | None) -> str:
    """What came of a charge: `settled` is the body of the entry that closed it, `charged` of the one that opened it."""
    used, refund = settled["used"], settled["refund"]
    releases = events.releases(events.from_json(charged["event"])) if charged else None
    made = f"{used:,} release{'' if used == 1 else 's'} used"
    if used == releases:
        return f"all {made}" if used > 1 else made
    if not refund:
        return f"{made}, nothing returned"
    return f"{made}, the rest returned"


def _stream(noise: float, steps: int, strategy: str, contributions: int, blocks: int) -> str:
    if steps * blocks >= _ENDLESS:
        length = "any length" if steps >= 1 << 20 else f"any length, in blocks of {steps:,} steps"
    else:
        length = f"{steps:,} steps" if blocks == 1 else f"{blocks:,} blocks of {steps:,} steps"
    often = "" if contributions == 1 else f", each unit in at most {contributions:,} of them"
    return f"a stream of {length}, one release in all: {_correlated(noise, strategy)}{often}"


def _passes(noise: float, steps: int, strategy: str, contributions: int, separation: int) -> str:
    often = "one of them" if contributions == 1 else f"at most {contributions:,} of them, at least {separation:,} apart"
    return (
        f"{steps:,} steps, one release in all: {_correlated(noise, strategy)}, each unit in {often}, as its id decides"
    )


def _correlated(noise: float, strategy: str) -> str:
    return f"{strategy.replace(':', ' ')} noise, {noise:.4g} × the bound" if noise else "no noise"
