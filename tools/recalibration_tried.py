"""What was tried on corruptions that are not reported on, and what is left without any noise on those that are.

`python -m tools.recalibration_tried trimmed FOLDER` (sources to leave out), `… split FOLDER` (how to split a small
budget), `… once FOLDER` (all of it for one question), `… floors FOLDER` (a small budget beside the same samples
without noise) and `… readings FOLDER` (one noise against several forms of local noise, by column and over all data
sets) print the numbers behind paragraphs of the page; the folder of the last two is that of
`studies.recalibration.page`. Outputs are computed once and kept in the folder. Seeds are fixed; everything is public
and simulated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from studies import runner
from studies.recalibration.data import CLEAN, DataSet, Shifted, from_file, shifted
from studies.recalibration.lies import Lie
from tacit.calibrate import Ask, GapCells, GapCurve, GapSlope, Outcome, Platt, Setting, SignedGap, Simulation, reference
from tacit.calibrate import _aggregate as aggregate
from tacit.calibrate import _curve as curve
from tacit.calibrate import _search as search
from tacit.calibrate._outputs import bin_of
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
                    tamper = None if lie is None else Lie.of(lie).tamper(samples)
                    trial = simulation.run(SignedGap(), budget=Budget(epsilon, 0.0), tamper=tamper)
                    harmed = float((trial.ece_after - trial.ece_before > 0.01).double().mean())
                    errors.append(f"{float(trial.ece_after.mean()):.4f} ({harmed:.2f})")
                where = f"{name}, {sources} x {samples}, epsilon {epsilon:g}"
                yield f"{where}, {0 if share is None else share:g} left out: {', '.join(errors)}"


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


def once(folder: Path, trials: int = 40, epsilon: float = 0.2) -> Iterator[str]:
    """The whole budget for one question (``GapCurve(steps=1)``, ``Platt``) beside the signed gap: errors, harmed."""
    found = [
        *((f"{name}, severity 3", *rest) for name, *rest in _shifted(folder, 3)),
        *((f"{name}, severity 4", *rest) for name, *rest in _shifted(folder, 4, clean=False)),
        *((f"{name}, severity 5", *rest) for name, *rest in _shifted(folder, 5, clean=False)),
    ]
    local = Setting(sources=SOURCES, samples=SOURCES * SAMPLES, budget=Budget(epsilon, 0.0), noise="laplace")
    secure = replace(local, aggregate="secure", honest=SOURCES // 2)
    for name, logits, labels in found:
        simulation = Simulation(logits=logits, labels=labels, sources=SOURCES, samples=SAMPLES, trials=trials)
        said = []
        for setting, method in (
            (local, SignedGap()),
            (secure, SignedGap()),
            (secure, GapCurve(steps=1)),
            (secure, Platt()),
        ):
            trial = simulation.run_in(setting, method)
            harmed = float((trial.ece_after - trial.ece_before > 0.01).double().mean())
            said.append(f"{float(trial.ece_after.mean()):.4f} ({harmed:.2f})")
        yield f"{name}: {', '.join(said)}"


def floors(folder: Path, trials: int = 20) -> Iterator[str]:
    """Epsilon 0.2 with 50 sources of 30, beside what the same 1,500 samples give without any noise."""
    names = (
        "local noise",
        "one noise, half collude",
        "one noise, none colludes",
        "one question, half collude",
        "one question, none colludes",
        "half for a curve, half collude",
        "half for a curve, none colludes",
        "no noise: a temperature",
        "a gap curve",
        "an isotonic map",
        "a perfect map",
    )
    for title, recipe in (("severity 3", "trust"), ("severity 5", "trust-severity-5"), ("", "trust-cifar")):
        columns: dict[str, list[list[float]]] = {}
        for one in _reported(folder, recipe):
            simulation = Simulation(**one.arrays, sources=SOURCES, samples=SAMPLES, trials=trials)
            column = one.name if one.name == CLEAN or not title else title
            columns.setdefault(column, []).append([float(errors.mean()) for errors in _compared(simulation)])
        for column, rows in columns.items():
            means = [sum(values) / len(rows) for values in zip(*rows, strict=True)]
            yield f"{column}: " + ", ".join(f"{name} {mean:.4f}" for name, mean in zip(names, means, strict=True))


def readings(folder: Path, trials: int = 100) -> Iterator[str]:
    """Local noise in the forms that it had, and one noise, 50 sources of 30: by column and over all data sets.

    A column is the mean over its data sets; over all 33 of them the median and the mean; then the share harmed.
    """
    noiseless = Budget(math.inf, 0.0)
    for epsilon in (0.2, 0.5):
        local = Setting(sources=SOURCES, samples=SOURCES * SAMPLES, budget=Budget(epsilon, 0.0), noise="laplace")
        plain, secure = replace(local, aggregate="sum"), replace(local, aggregate="secure", honest=SOURCES // 2)
        arms: dict[str, tuple[Setting, SignedGap, float]] = {
            "local noise": (local, SignedGap(), search._SURE),
            "local noise, plain sum": (plain, SignedGap(), search._SURE),
            "local noise, plain sum, no gate": (plain, SignedGap(), 0.0),
            "one noise": (secure, SignedGap(), search._SURE),
            "one noise, GapCurve": (secure, GapCurve(), search._SURE),
            "one noise, GapCurve in one question": (secure, GapCurve(steps=1), search._SURE),
            "one noise, Platt": (secure, Platt(), search._SURE),
            "no noise": (replace(plain, budget=noiseless), SignedGap(), search._SURE),
            "no noise, GapCurve": (replace(plain, budget=noiseless), GapCurve(), search._SURE),
        }
        errors: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
        harmed: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
        for title, recipe in (("severity 3", "trust"), ("severity 5", "trust-severity-5"), ("", "trust-cifar")):
            for one in _reported(folder, recipe):
                simulation = Simulation(**one.arrays, sources=SOURCES, samples=SAMPLES, trials=trials)
                column = one.name if one.name == CLEAN or not title else title
                for name, (setting, method, sure) in arms.items():
                    before, search._SURE = search._SURE, sure
                    trial = simulation.run_in(setting, method)
                    search._SURE = before
                    errors[name].setdefault(column, []).append(float(trial.ece_after.mean()))
                    worse = (trial.ece_after - trial.ece_before > 0.01).double().mean()
                    harmed[name].setdefault(column, []).append(float(worse))
        for name, found in errors.items():
            parts = [f"{column} {np.mean(values):.4f}" for column, values in found.items()]
            together = np.concatenate([*found.values()])
            parts += [f"all, median {np.median(together):.4f}", f"mean {np.mean(together):.4f}"]
            parts += [f"{column} harmed {np.mean(values):.3f}" for column, values in harmed[name].items()]
            yield f"epsilon {epsilon:g}, {name}: {', '.join(parts)}"


def _reported(folder: Path, recipe: str) -> list[DataSet]:
    config = runner.read(Path("recalibration") / f"{recipe}.toml")[1]
    known = (
        [] if config.shifted is None else shifted(config.shifted, folder / recipe / "outputs", lambda *_, **__: None)
    )
    return known + [from_file(one) for one in config.files]


def _compared(simulation: Simulation) -> Iterator[Tensor]:
    """Errors per trial; the last two are of an isotonic fit and of labels that are drawn from such a fit."""
    setting = Setting(sources=SOURCES, samples=SOURCES * SAMPLES, budget=Budget(0.2, 0.0), noise="laplace")
    yield simulation.run_in(setting, SignedGap()).ece_after
    secure = [replace(setting, aggregate="secure", honest=honest) for honest in (SOURCES // 2, SOURCES)]
    for method in (SignedGap(), GapCurve(steps=1)):
        for one in secure:
            yield simulation.run_in(one, method).ece_after
    for one in secure:
        yield _curved(simulation, one, 0.5)
    for method in (SignedGap(), GapCurve()):
        yield simulation.run_in(replace(setting, aggregate="sum", budget=Budget(math.inf, 0.0)), method).ece_after
    confidence, correct = simulation.outputs.confidence(1.0).numpy(), simulation.outputs.correct.numpy()
    rng, fitted, perfect = np.random.default_rng(2), [], []
    for rows in simulation.assigned.numpy():
        rest = np.setdiff1d(np.arange(len(correct)), rows)
        fitted.append(_error(_isotonic(confidence[rows], correct[rows], confidence[rest]), correct[rest]))
        true = _isotonic(confidence[rest], correct[rest], confidence[rest])
        perfect.append(_error(true, rng.uniform(size=len(true)) < true))
    yield torch.tensor(fitted)
    yield torch.tensor(perfect)


def _isotonic(confidence: Any, correct: Any, at: Any) -> Any:
    """The nondecreasing function of the confidence that fits best in squares, linear between the samples."""
    order = np.argsort(confidence, kind="stable")
    return np.interp(at, confidence[order], isotonic_regression(correct[order]).x)


def _error(claimed: Any, correct: Any) -> float:
    bins = bin_of(torch.from_numpy(claimed), 15).numpy()
    return float(np.abs(np.bincount(bins, correct - claimed, 15)).sum() / len(correct))


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
        asking = fit_gap(low=0.5, high=3.0, steps=1, samples=samples, stds=(gap, slope), trials=trials, z=1.96)
        temperature, constant = drive(asking, lambda asked: [noisy(asked, scale)]).temperature, gap / samples
    scale = 1 / ((1 - share) * epsilon)
    totals = noisy(Ask(statistic=GapCells(), temperatures=temperature), scale)
    found = curve.corrections(totals, samples=samples, noise=math.sqrt(2 * noises) * scale, constant=constant)
    return simulation._ece(Outcome(temperature=temperature, corrections=found))


def _shifted(folder: Path, severity: int, *, clean: bool = True) -> Iterator[Outputs]:
    config = Shifted(shifts="extra", severity=severity, clean=clean)
    for one in shifted(config, folder / "outputs", lambda *_, **__: None):
        yield one.name, torch.as_tensor(one.logits), torch.as_tensor(one.labels)


TRIED: dict[str, Callable[[Path], Iterator[str]]] = {
    "trimmed": trimmed,
    "split": split,
    "once": once,
    "floors": floors,
    "readings": readings,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=tuple(TRIED))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    for line in TRIED[options.what](options.folder):
        print(line, flush=True)


if __name__ == "__main__":
    main()
