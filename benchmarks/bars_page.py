"""The section of docs/benchmarks.md that `bars.py` writes: tables, and for each miss what was counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paired import Interval, Result, Row

BEGIN, END = "<!-- bars: begin -->", "<!-- bars: end -->"
PEERS = ("opacus hooks", "opacus ghost", "torch.func")
SMALL = "norms-1"  # hardly anything to compute: its excess is the price of calls
# Whose speed of Gram norms and sums a row has, see `bars.speeds`.
SPEEDS = {"vit-64": "50 positions", "vit-256": "50 positions", "bert": "128 positions", "units": "50 positions"}
# What the counts cannot show, by row. Edit and render again: rows that are kept are not run again.
FULL = "Units are added up in float64, and factors are kept until the norms are known"
NORMS = "Beside the layers' own operations a step checks the model for changes, records, clips and adds up"
REASONS = {
    "vit-64": FULL,
    "vit-256": FULL,
    "bert": FULL + "; the word table's sum is float64: 94 MB that are zeroed in each step",
    "convnext": "Small layers, whose gradients per unit are built; depthwise convolutions are counted by torch alone",
    "norms-64": NORMS,
    "norms-8": NORMS,
    "norms-1": NORMS,
    "norms-ti-8": NORMS,
    "probe": "Rows are read and converted once more, for their norms and for the sum, beside two products",
    "linear-epoch": (
        "Float64 products, drawing units and noise by AES, and rounding sum and noise to the grid, beside a plain step "
        "of two small products"
    ),
    "lora-epoch": "Two small factors in each of twelve layers: calls, not products",
    "selective-epoch": NORMS,
    "units": (
        "The reference is tacit's own step with rows as units; a unit of eight clips has 400 positions, so its "
        "gradient is built once, for its norm and for the sum"
    ),
}


# Where memory goes beyond the plain step's: of a warm step, and of the check at the first one.
MEMORY = {
    "vit-64": (
        "a warm step has 350 MB where the plain one has 339 (one thread), 11 more, which 2.7 million sums in float64 "
        "take; the rest is the first step's check, whose passes leave holes in the heap for each other"
    ),
    "bert": (
        "of 306 MB more, the sums of 22.6 million weights in float64 take 90, and so do the parameters that the check "
        "puts back and the gradient of plain autograd that it compares with"
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
    if misses := _misses(rows, results, kept):
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


def _prices(rows: Mapping[str, Any], results: Mapping[str, Result]) -> tuple[float, float] | None:
    """Microseconds of a call of torch and of one of Python, where there is hardly anything to compute.

    The first is the plain step's time for each of its calls; the second what then remains of the private step's excess,
    for each further call that Python makes.
    """
    if SMALL not in rows or (times := _milliseconds(rows[SMALL], results[SMALL])) is None:
        return None
    plain, private = rows[SMALL]["counts"]
    of_torch = 1000 * times[0] / plain["calls"]
    rest = 1000 * (times[1] - times[0]) - (private["calls"] - plain["calls"]) * of_torch
    return of_torch, max(rest / max(private.get("python", 0) - plain.get("python", 0), 1), 0.0)


def _misses(rows: Mapping[str, Any], results: Mapping[str, Result], kept: Mapping[str, Any]) -> str:
    """For each time that is missed: what multiplications and calls account for."""
    prices = _prices(rows, results)
    lines = []
    for name, result in results.items():
        missed = [v.bar for v in result.verdicts if v.met is False]
        times = _milliseconds(rows[name], result)
        if not missed or times is None:
            continue
        if not any(bar.startswith("time") for bar in missed):
            lines.append(f"- {result.title}: {_other(name, missed, rows[name], result)}")
            continue
        excess = times[1] / times[0] - 1
        text = f"- {result.title}: {100 * excess:.1f}% over the plain step of {times[0]:.1f} ms. "
        points, said = _multiplied(rows[name], kept.get("speeds", {}).get(SPEEDS.get(name, "")))
        text += said
        if prices is not None:
            more, words = _called(rows[name], times[0], prices)
            points, text = points + more, text + words
        plain, private = rows[name]["counts"]
        moved = (private["bytes"] - plain["bytes"]) / 2**20
        text += f". Together {100 * points:+.1f} points of {100 * excess:.1f}; read and written are {moved:+,.0f} MB"
        if name in REASONS:
            text += f". {REASONS[name]}"
        if times[1] < times[0] * _limit(result):
            text += ". The median is below the bar: it is the interval of so few pairs that is above"
        if others := [bar for bar in missed if not bar.startswith("time")]:
            text += ". " + _other(name, others, rows[name], result).removesuffix(".")
        lines.append(text + ".")
    if prices is not None and lines:
        lines.append(
            f"\nA call of torch is counted with {prices[0]:.0f} microseconds, which is the plain step with one row for "
            f"each of its calls, and one that Python makes with {prices[1]:.2f}, which is what then remains of the "
            f"private step with one row. Both are upper bounds where threads compute meanwhile, so that the sum may "
            f"exceed what was measured."
        )
    return "\n".join(lines)


def _limit(result: Result) -> float:
    """The bar of time."""
    return min((float(v.bar.split()[2].rstrip("x")) for v in result.verdicts if v.bar.startswith("time")), default=0.0)


def _multiplied(row: Mapping[str, Any], speed: Sequence[float] | None) -> tuple[float, str]:
    """What multiplications account for, as a share of the plain step, and how that is said."""
    plain, private = row["counts"]
    whole = max(plain["multiplications"], 1)
    products = private["multiplications"] / whole - 1
    grams, sums = (private.get(kind, 0) / whole for kind in ("grams", "sums"))
    if not speed or not grams:
        return products, f"Multiplications account for {100 * products:+.1f} points"
    points = products - 2 * grams + grams / speed[0] + sums * (1 / speed[1] - 1)
    return points, (
        f"Multiplications are {100 * products:+.1f}%; of them Gram norms ({100 * grams:.1f}% of the plain step's, each "
        f"pair of positions once) run at {speed[0]:.2f} of the speed of torch's product and sums of units "
        f"({100 * sums:.1f}%) at {speed[1]:.2f}, which makes {100 * points:+.1f} points"
    )


def _called(row: Mapping[str, Any], milliseconds: float, prices: tuple[float, float]) -> tuple[float, str]:
    """The same for calls."""
    plain, private = row["counts"]
    more = [private.get(kind, 0) - plain.get(kind, 0) for kind in ("calls", "python")]
    points = [count * price / 1000 / milliseconds for count, price in zip(more, prices, strict=True)]
    return sum(points), (
        f"; {more[0]:+,} calls of torch {100 * points[0]:+.1f}, {more[1]:+,} by Python {100 * points[1]:+.1f}"
    )


def _other(name: str, missed: list[str], row: Mapping[str, Any], result: Result) -> str:
    """About bars on memory, and on peers."""
    parts = []
    if any(bar.startswith("memory") for bar in missed):
        plain, private = result.row(row["arms"][0]), _private(row, result)
        peaks = [f"{(each.memory or 0) / 2**20:,.0f}" for each in (plain, private) if each]
        reason = MEMORY.get(
            name, "the private step keeps both factors of every layer, and its first step checks the model"
        )
        parts.append(f"Memory, {' and '.join(peaks)} MB: {reason}")
    for bar in (bar for bar in missed if bar.startswith(("ahead", "at least"))):
        peer = result.row(bar.rpartition(" of ")[2])
        where = (
            f"the peer itself is at {_interval(peer.ratio)} of the plain step" if peer and peer.ratio else "see below"
        )
        parts.append(f"Not told apart from the peer, or behind it ({bar}): {where}")
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
