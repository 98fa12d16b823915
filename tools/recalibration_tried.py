"""What was tried on corruptions that are not reported on: sources to leave out, and how to split a small budget.

`python -m tools.recalibration_tried trimmed FOLDER` and `… split FOLDER` print the numbers behind two paragraphs of
the page. Outputs are computed once and kept in the folder. Seeds are fixed; everything is public and simulated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from studies.recalibration.data import Shifted, shifted
from studies.recalibration.lies import Lie
from tacit.calibrate import Ask, GapCells, GapSlope, Outcome, Setting, SignedGap, Simulation, reference
from tacit.calibrate import _aggregate as aggregate
from tacit.calibrate import _curve as curve
from tacit.calibrate._search import drive, fit_gap
from tacit.privacy import Budget

Outputs = tuple[str, Tensor, Tensor]
SOURCES, SAMPLES = 50, 30
FIRST = math.exp(14 / 64)  # the temperature at which a single question is asked


def trimmed(folder: Path, trials: int = 100) -> Iterator[str]:
    """The share of honest sources that is left out, against lies that hide in the noise."""
    found = list(_shifted(folder, 4))
    found += [(f"synthetic, {100 * gap:g} points off", *reference(gap, 10_000)) for gap in (0.05, 0.1)]
    for name, logits, labels in found:
        for sources, samples, epsilon in ((50, 30, 0.5), (100, 10, 1.0)):
            simulation = Simulation(logits=logits, labels=labels, sources=sources, samples=samples, trials=trials)
            for share in (None, 0.05, 0.1):
                aggregate._FEW, aggregate._TRIMMED = (10**9, 0.05) if share is None else (10, share)
                aggregate._kept.cache_clear()
                errors = []
                for lie in (None, "hidden-5", "colluding-5"):
                    tamper = None if lie is None else Lie.of(lie).told(samples)
                    trial = simulation.run(SignedGap(), budget=Budget(epsilon, 0.0), tamper=tamper)
                    harmed = float((trial.ece_after - trial.ece_before > 0.01).double().mean())
                    errors.append(f"{float(trial.ece_after.mean()):.4f} ({harmed:.2f})")
                yield f"{name}, {sources} x {samples}, epsilon {epsilon:g}, {share or 'nobody'}: {', '.join(errors)}"


def split(folder: Path, trials: int = 40, epsilon: float = 0.2) -> Iterator[str]:
    """A share of the budget for the temperature and the rest for the gaps of five bins, with one noise for all."""
    found = [
        *_shifted(folder, 4),
        *((f"{name}, severity 5", *rest) for name, *rest in _shifted(folder, 5, clean=False)),
    ]
    for name, logits, labels in found:
        simulation = Simulation(logits=logits, labels=labels, sources=SOURCES, samples=SAMPLES, trials=trials)
        for honest in (SOURCES // 2, SOURCES):
            setting = Setting(
                sources=SOURCES,
                samples=SOURCES * SAMPLES,
                budget=Budget(epsilon, 0.0),
                noise="laplace",
                aggregate="secure",
                honest=honest,
            )
            local = simulation.run_in(replace(setting, aggregate="robust"), SignedGap()).ece_after
            errors = [float(local.mean()), float(simulation.run_in(setting, SignedGap()).ece_after.mean())]
            errors += [float(_curved(simulation, setting, share).mean()) for share in (0.5, 0.3, 0.15, 0.0)]
            yield f"{name}, {honest} honest: {' '.join(f'{error:.4f}' for error in errors)}"


def _curved(simulation: Simulation, setting: Setting, share: float) -> Tensor:
    """The errors of a gap curve whose first question has this share of the budget; without one, T is ``FIRST``."""
    rng, trials, samples = np.random.default_rng(1), simulation.trials, float(simulation.samples)
    noises, epsilon = setting.noises, setting.budget.epsilon

    def noisy(asked: Ask, scale: float) -> Tensor:
        exact = simulation._sums(asked, None)
        drawn = rng.gamma(noises, size=tuple(exact.shape)) - rng.gamma(noises, size=tuple(exact.shape))
        return exact + torch.from_numpy(drawn * scale)

    temperature, constant = torch.full((trials,), FIRST, dtype=torch.float64), 0.15
    if share > 0:
        scale = 1 / (share * epsilon)
        gap, slope = (math.hypot(math.sqrt(2 * noises) * scale, math.sqrt(samples * v)) for v in GapSlope().spread)
        search = fit_gap(low=0.5, high=3.0, steps=1, samples=samples, stds=(gap, slope), trials=trials, z=1.96)
        temperature, constant = drive(search, lambda asked: [noisy(asked, scale)]).temperature, gap / samples
    scale = 1 / ((1 - share) * epsilon)
    totals = noisy(Ask(statistic=GapCells(), temperatures=temperature), scale)
    found = curve.corrections(totals, samples=samples, noise=math.sqrt(2 * noises) * scale, constant=constant)
    return simulation._ece(Outcome(temperature=temperature, corrections=found))


def _shifted(folder: Path, severity: int, *, clean: bool = True) -> Iterator[Outputs]:
    config = Shifted(shifts="extra", severity=severity, clean=clean)
    for one in shifted(config, folder / "outputs", lambda *_: None):
        yield one.name, torch.as_tensor(one.logits), torch.as_tensor(one.labels)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("trimmed", "split"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    for line in {"trimmed": trimmed, "split": split}[options.what](options.folder):
        print(line, flush=True)


if __name__ == "__main__":
    main()
