"""The picture of a collapse: accuracy shift after shift, published Tent beside the same with clipped gradients.

    python -m studies.dp_tta.collapse RUN PICTURE [BATCH]

reads the cells of `dp-tta-collapse.toml` that RUN has and draws one batch size: means over seeds, and the range
between the lowest and the highest seed. A cell that was not run is left out.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

from studies import runner
from studies.dp_tta.arms import Arm
from studies.dp_tta.report import SHORT
from studies.dp_tta.study import Result, read
from tacit.report import plots


def picture(result: Result, batch_size: int) -> Figure:
    """Accuracy along the stream of the source model, published Tent and clipped Tent."""
    lines = {}
    names = list(next(iter(result.outcomes.values())).accuracy)
    for arm in result.arms:
        along = _along(result, arm)
        if along and (arm.method == "source" or arm.batch_size == batch_size):
            by_shift = list(zip(*along, strict=True))
            lines[f"{arm.name} ({len(along)} seeds)" if len(along) > 1 else arm.name] = plots.Curve(
                range(1, len(by_shift) + 1),
                [statistics.fmean(found) for found in by_shift],
                [min(found) for found in by_shift],
                [max(found) for found in by_shift],
            )
    figure = plots.curve(lines, x_label=f"shift (batch size {batch_size})", y_label="accuracy in percent")
    figure.axes[0].set_xticks(range(1, len(names) + 1), [SHORT.get(name, name) for name in names], rotation=45)
    return figure


def _along(result: Result, arm: Arm) -> list[list[float]]:
    return [list(found.accuracy.values()) for cell, found in result.outcomes.items() if cell.arm == arm]


if __name__ == "__main__":
    recipe = Path(__file__).with_name("dp-tta-collapse.toml")
    found = read(runner.read(recipe)[1], Path(sys.argv[1]))
    picture(found, int(sys.argv[3]) if len(sys.argv) > 3 else 16).savefig(sys.argv[2], dpi=160)
