"""Operations of a clipped sum, counted: what the time could be if every operation took equally long.

    python benchmarks/counted.py [--work NAME ...] [--markdown FILE]

Matrix products, convolutions and attention, as `torch.utils.flop_counter` counts them, in one step each; what reads and
writes without multiplying (adding a row's gradient to the sum, copies, norms) does not count. Nothing is timed, so this
may run beside anything.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from torch.utils.flop_counter import FlopCounterMode

from arms import build
from gradients import works
from paired import Step


def operations(step: Step) -> int:
    """Of one step: the least of four, for the first one checks the model, and some check a unit."""
    counts = []
    for _ in range(4):
        with FlopCounterMode(display=False) as counter:
            step()
        counts.append(counter.get_total_flops())
    return min(counts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=list(works()), metavar="NAME", help=", ".join(works()))
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options, _ = parser.parse_known_args(argv)
    warnings.simplefilter("ignore")
    lines = ["| work | no privacy | tacit | limit |", "|---|---|---|---|"]
    for name in options.work or works():
        work = works()[name]
        plain, private = (operations(build(work, arm)) for arm in (work.reference, "tacit"))
        lines.append(f"| {name} | {plain / 1e9:.2f} | {private / 1e9:.2f} | {private / plain:.3f} |")
        print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
