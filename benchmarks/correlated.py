"""Correlated noise: time and memory per step for a million parameters and a stream of 100,000 steps.

Every row is one step of noise, drawn, mixed and added to a float32 gradient. The ratio is to the same step without
mixing, timed in turns with it; times are the fastest of several, for other work on the machine only ever adds. The
drawing here is torch's plain generator: the keyed generator that private noise comes from is slower, so the ratios in
use are smaller than these.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tacit.privacy.correlated import Mixer, banded, buffered, independent, running_sum_rms, square_root

FULL_HISTORIES = (16, 32, 64)  # steps of history: what a small machine can hold of the full form


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="correlated", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--horizon", type=int, default=100_000, help="steps of the stream, at least 100")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps per row; the fastest is shown")
    parser.add_argument("--threads", type=int, default=1, help="of torch; one is steadiest on a shared machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)

    start = time.perf_counter()
    few = buffered(options.horizon)
    optimisation = time.perf_counter() - start
    few_bands, more_bands = banded(options.horizon, 8), banded(options.horizon, 32)
    rows = []
    for strategy in (independent(options.horizon), few, buffered(options.horizon, 8), few_bands, more_bands):
        rows.append(measure(strategy.mixer(), strategy.buffers, options.parameters, options.repeats))

    full, history = square_root(options.horizon).mixer(), 0
    for until in FULL_HISTORIES:  # one mixer that grows, timed on its way
        repeats = min(options.repeats, 7)
        row = measure(full, until - history, options.parameters, repeats)
        rows.append(row | {"noise": f"full at step {until}", "history": until})
        history = until + repeats
    results = {
        "parameters": options.parameters,
        "horizon": options.horizon,
        "threads": options.threads,
        "optimisation_seconds": optimisation,
        "rows": rows,
        "full_at_horizon": extrapolate(rows[-1], rows[0], options.horizon, options.parameters),
    }
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(mixer: Mixer, advance: int, parameters: int, repeats: int) -> dict[str, Any]:
    """The fastest of some steps after `advance` more steps, and what the mixer holds at the end of them."""
    for _ in range(advance):
        mixer.step({"parameters": torch.randn(parameters, dtype=torch.float64)})
    gradient = torch.zeros(parameters)
    plain, mixed = [], []
    for _ in range(repeats):
        plain.append(timed(lambda: add_plain(gradient)))
        mixed.append(timed(lambda: add_mixed(gradient, mixer)))
    state = mixer.state()
    held = sum(buffer.numel() * buffer.element_size() for buffer in (*state["past"], *state["sums"]))
    return {
        "noise": mixer.strategy.name,
        "buffers": mixer.strategy.buffers,
        "milliseconds": 1e3 * min(mixed),
        "plain_milliseconds": 1e3 * min(plain),
        "ratio": min(mixed) / min(plain),
        "megabytes_held": held / 1e6,
        "megabytes_at_horizon": mixer.strategy.buffers * parameters * 8 / 1e6,
        "running_sum_noise": running_sum_rms(mixer.strategy),
    }


def add_plain(gradient: torch.Tensor) -> None:
    gradient.add_(torch.randn(gradient.shape, dtype=torch.float64))


def add_mixed(gradient: torch.Tensor, mixer: Mixer) -> None:
    gradient.add_(mixer.step({"parameters": torch.randn(gradient.shape, dtype=torch.float64)})["parameters"])


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def extrapolate(full: dict[str, Any], base: dict[str, Any], horizon: int, parameters: int) -> dict[str, float]:
    """The full form's last step, computed from what each step of history was seen to add: it cannot be held."""
    each = (full["milliseconds"] - base["milliseconds"]) / full["history"]
    last = base["milliseconds"] + each * (horizon - 1)
    return {
        "seconds_last_step": last / 1e3,
        "ratio_last_step": last / base["plain_milliseconds"],
        "gigabytes": (horizon - 1) * parameters * 8 / 1e9,
    }


def show(results: dict[str, Any]) -> None:
    table = Table(title=f"Correlated noise, {results['parameters']:,} parameters, {results['horizon']:,} steps")
    table.add_column("noise", no_wrap=True)
    for heading in ("buffers", "ms per step", "x plain", "MB held", "MB at the end", "running sum"):
        table.add_column(heading, justify="right")
    for row in results["rows"]:
        table.add_row(
            row["noise"],
            f"{row['buffers']:,}",
            f"{row['milliseconds']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['megabytes_held']:,.0f}",
            f"{row['megabytes_at_horizon']:,.0f}",
            f"{row['running_sum_noise']:.2f}",
        )
    console = Console()
    console.print(table)
    full = results["full_at_horizon"]
    console.print(
        f"Finding the decays of four buffers took {results['optimisation_seconds']:.2f} s, once per horizon. "
        f"The full form cannot be held: its last step needs {full['gigabytes']:,.0f} GB and, computed from the rows "
        f"above, {full['seconds_last_step']:,.0f} s, {full['ratio_last_step']:,.0f} times plain noise."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
