"""The section of docs/benchmarks.md that `bars.py` writes: tables, and for each miss what was counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paired import Interval, Result, Row

BEGIN, END = "<!-- bars: begin -->", "<!-- bars: end -->"
PEERS = ("opacus hooks", "opacus ghost", "torch.func")
SMALL = "norms-1"  # hardly anything to compute: its excess is the price of calls
# What the counts cannot show, by row. Edit and render again: rows that are kept are not run again.
FULL = (
    "every unit's products are converted to float64 and added, and Gram matrices of few positions, of which each pair "
    "is formed once, run at about half the speed of large matrix products"
)
NORMS = "beside the layers' own operations a step checks the model for changes, records, clips and adds up"
REASONS = {
    "vit-64": FULL,
    "vit-256": FULL,
    "bert": FULL + "; the word table's sum is float64: 94 MB that are zeroed in each step",
    "convnext": "small layers, whose gradients per unit are built; depthwise convolutions are counted by torch alone",
    "norms-64": NORMS,
    "norms-8": NORMS,
    "norms-1": NORMS,
    "norms-ti-8": NORMS,
    "probe": "rows are read and converted once more, for their norms and for the sum, beside two products",
    "linear-epoch": (
        "float64 products, drawing units and noise by AES, and rounding sum and noise to the grid, beside a plain step "
        "of two small products"
    ),
    "lora-epoch": "two small factors in each of twelve layers: calls, not products",
    "selective-epoch": NORMS,
    "units": (
        "the reference is tacit's own step with rows as units; a unit of eight clips has 400 positions, so its "
        "gradient is built for the norm and its products are formed again for the sum"
    ),
}


def page(before: str, written: str) -> str:
    """The page with the section between its marks replaced."""
    if BEGIN not in before or END not in before:
        raise ValueError(f"The page has no marks {BEGIN} and {END}.")
    head, rest = before.split(BEGIN, 1)
    return f"{head}{BEGIN}\n\n{written.strip()}\n\n{END}{rest.split(END, 1)[1]}"


def section(rows: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """All of it; `rows` as bars.py keeps them."""
    results = {name: Result.from_json(row["result"]) for name, row in rows.items()}
    parts = ["Measured on: " + ", ".join(f"{key} {value}" for key, value in kept["machine"].items()) + "."]
    head = ["work", "bar", "time ratio (95%)", "null", "pairs", "memory ratio", "multiplications", "bytes", "calls"]
    head.append("verdict")
    lines = [_line(head), "|---" * len(head) + "|"]
    for name, result in results.items():
        lines.append(_line(_cells(rows[name], result)))
    parts.append("\n".join(lines))
    parts.append(_verdicts(results))
    if misses := _misses(rows, results):
        parts.append("**Why bars are missed, by what was counted.**\n\n" + misses)
    parts.append(_peers(results))
    if "growth" in kept:
        parts.append(_growth(kept["growth"]))
    return "\n\n".join(part for part in parts if part)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _private(row: Mapping[str, Any], result: Result) -> Row | None:
    return result.row(row["arms"][1])


def _interval(found: Interval | None) -> str:
    return f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]" if found else "not timed"


def _cells(row: Mapping[str, Any], result: Result) -> list[str]:
    found, null = _private(row, result), result.row("null")
    bars = "; ".join(v.bar.replace("x the reference", "") for v in result.verdicts if "ahead" not in v.bar)
    plain, private = row["counts"]
    products = private["multiplications"] / max(plain["multiplications"], 1)
    return [
        result.title,
        bars,
        _interval(found.ratio if found else None) if found and found.ratio else (found.note if found else ""),
        f"{null.ratio.median:.3f}" if null and null.ratio else "",
        str(found.pairs) if found else "",
        f"{found.memory_ratio:.2f}" if found and found.memory_ratio is not None else "",
        f"{products:.3f}",
        f"{private['bytes'] / max(plain['bytes'], 1):.2f}",
        f"{plain['calls']:,} -> {private['calls']:,}",
        _verdict(result),
    ]


def _verdict(result: Result) -> str:
    missed = [v.bar.split(" <=")[0] for v in result.verdicts if v.met is False]
    if missed:
        return "missed: " + ", ".join(missed)
    return "met" if result.verdicts and all(v.met for v in result.verdicts) else "not measured"


def _verdicts(results: Mapping[str, Result]) -> str:
    every = [(result, verdict) for result in results.values() for verdict in result.verdicts]
    met = sum(verdict.met is True for _, verdict in every)
    lines = [f"{met} of {len(every)} bars are met (a time is compared by the upper end of its interval)."]
    missed = [f"- {r.title}: {v.bar}: {v.found}" for r, v in every if v.met is False]
    unknown = [f"- {r.title}: {v.bar}: {v.found}" for r, v in every if v.met is None]
    if missed:
        lines += ["", "Missed:", "", *missed]
    if unknown:
        lines += ["", "Not measured:", "", *unknown]
    return "\n".join(lines)


def _milliseconds(row: Mapping[str, Any], result: Result) -> tuple[float, float] | None:
    plain, private = result.row(row["arms"][0]), _private(row, result)
    if plain is None or private is None or private.ratio is None:
        return None
    reference = 1000 * plain.median_seconds
    return reference, reference * private.ratio.median


def _per_call(rows: Mapping[str, Any], results: Mapping[str, Result]) -> float | None:
    """Microseconds that a further call costs where there is hardly anything to compute."""
    if SMALL not in rows or (times := _milliseconds(rows[SMALL], results[SMALL])) is None:
        return None
    plain, private = rows[SMALL]["counts"]
    more = private["calls"] - plain["calls"]
    return 1000 * (times[1] - times[0]) / more if more > 0 else None


def _misses(rows: Mapping[str, Any], results: Mapping[str, Result]) -> str:
    """For each time that is missed: how much of the excess multiplications and calls account for."""
    price = _per_call(rows, results)
    lines = []
    for name, result in results.items():
        missed = [v.bar for v in result.verdicts if v.met is False]
        times = _milliseconds(rows[name], result)
        if not missed or times is None:
            continue
        if not any(bar.startswith("time") for bar in missed):
            lines.append(f"- {result.title}: {_other(missed, rows[name], result)}")
            continue
        plain, private = rows[name]["counts"]
        excess = times[1] / times[0] - 1
        products = private["multiplications"] / max(plain["multiplications"], 1) - 1
        more = private["calls"] - plain["calls"]
        text = (
            f"- {result.title}: {100 * excess:.1f}% over the plain step of {times[0]:.1f} ms. Multiplications account "
            f"for {100 * products:+.1f} points"
        )
        rest = excess - products
        if price is not None and name != SMALL:
            calls = max(min(more * price / 1000 / times[0], rest), 0.0)
            rest -= calls
            text += f", {more:,} more calls at up to {price:.1f} microseconds for {100 * calls:+.1f}"
        elif name == SMALL and price is not None:
            text += f"; there are {more:,} more calls, at {price:.1f} microseconds each if they are all of the rest"
            rest = 0.0
        moved = (private["bytes"] - plain["bytes"]) / 2**20
        if name != SMALL:
            text += f"; {100 * rest:+.1f} points are left, with {moved:+,.0f} MB more read and written"
        if name in REASONS:
            text += f". What is behind that: {REASONS[name]}"
        if others := [bar for bar in missed if not bar.startswith("time")]:
            text += ". " + _other(others, rows[name], result).removesuffix(".")
        lines.append(text + ".")
    if price is not None and lines:
        lines.append(
            f"\nThe price of a call, {price:.1f} microseconds, is the whole excess of a step with one row over its "
            f"further calls, so it includes Python and recording; elsewhere calls get the excess at most."
        )
    return "\n".join(lines)


def _other(missed: list[str], row: Mapping[str, Any], result: Result) -> str:
    """About bars on memory, and on peers."""
    parts = []
    if any(bar.startswith("memory") for bar in missed):
        plain, private = result.row(row["arms"][0]), _private(row, result)
        peaks = [f"{(each.memory or 0) / 2**20:,.0f}" for each in (plain, private) if each]
        parts.append(
            f"Memory, {' and '.join(peaks)} MB: the private step keeps both factors of every layer until the norms are "
            f"known and sums in float64, and its first step checks the model, with a copy of the parameters"
        )
    if peers := [bar for bar in missed if bar.startswith(("ahead", "at least"))]:
        parts.append(f"Not told apart from the peer, or behind it ({'; '.join(peers)}): see the peers below")
    return ". ".join(parts) + "."


def _peers(results: Mapping[str, Result]) -> str:
    lines = [_line(["work", "tacit", *PEERS]), "|---" * (2 + len(PEERS)) + "|"]
    for result in results.values():
        found = [result.row(arm) for arm in ("tacit", *PEERS)]
        if not any(found[1:]):
            continue
        cells = [
            "" if each is None else f"{_interval(each.ratio)}, {each.pairs} pairs" if each.ratio else each.note
            for each in found
        ]
        lines.append(_line([result.title, *cells]))
    return (
        ""
        if len(lines) == 2
        else "**Peers in the same run** (time ratios to the same plain step):\n\n" + "\n".join(lines)
    )


def _growth(found: Mapping[str, Mapping[str, float]]) -> str:
    keys = ("time, no privacy", "time, tacit", "memory, no privacy", "memory, tacit")
    lines = [_line(["grows", *keys]), "|---" * (1 + len(keys)) + "|"]
    for name, slopes in found.items():
        lines.append(_line([name, *(f"{slopes[key]:.2f}" if key in slopes else "" for key in keys)]))
    return (
        "**Growth** (log-log slopes of a full fine-tuning step of a small ViT, `benchmarks/growth.py`; at these small "
        "sizes fixed costs keep slopes below those of large ones):\n\n" + "\n".join(lines)
    )
