"""Does the monitor speak before a vision transformer is lost, and does the default rate leave it alone?

    python -m studies.dp_tta.alarm OUT [STEPS]

adapts the model of `dp-tta-imagenet.toml` (images and weights are read from the current folder, as there) under
gaussian noise with batches of 16 at epsilon 1 and correlated noise: at the careless rate 0.02, then with `lr="auto"`.
Writes OUT/alarm.json after every step: rate, forecast, strain and accuracy so far, and the step of the first alarm.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

from studies import runner
from tacit import adapt
from tacit.data import streams

RECIPE = Path(__file__).with_name("dp-tta-imagenet.toml")
BATCH, HORIZON, CARELESS = 16, 100, 0.02


def followed(rate: float | Literal["auto"], steps: int, seed: int = 0) -> Any:
    """The first steps of a stream of 100, one dictionary after each."""
    study = runner.read(RECIPE)[1]
    images, labels = study.data.rows()
    stream = streams.corrupted(
        images,
        labels,
        shifts=("gaussian_noise",),
        severity=study.data.severity,
        per_shift=steps * BATCH,
        seed=seed,
        strengths=study.data.strengths,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapter = adapt.Tent(
            study.model.load(),
            privacy=adapt.DP(1.0, 1e-6, clip=1.0, noise="correlated", horizon=HORIZON),
            batch_size=BATCH,
            lr=rate,
            monitor=True,
            seed=seed,
        )
    facts: dict[str, Any] = {
        "rate": adapter.optimize["lr"],
        "forecast": any("carry the model away" in str(each.message) for each in said),
        "alarm": None,
    }
    right = rows = 0
    for step, batch in zip(range(1, steps + 1), stream.batches(BATCH), strict=False):
        right += int((adapter(batch.images).argmax(1) == batch.labels).sum())
        rows += len(batch)
        if adapter.watch.alarm and facts["alarm"] is None:
            facts["alarm"] = {"step": step, "because": adapter.watch.alarm}
        yield facts | {"steps": step, "strain": adapter.watch.strain, "accuracy": 100 * right / rows}


def main(out: Path, steps: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name, rate in (("careless", CARELESS), ("auto", "auto")):
        for found[name] in followed(rate, steps):  # type: ignore[arg-type]
            (out / "alarm.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20)
