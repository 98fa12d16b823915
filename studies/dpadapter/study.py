"""A study of robust pretraining: public training in several ways, how each withstands noise, private fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from studies import store
from studies.dpadapter.arms import Finetuning, Pretraining, Upstream
from studies.dpadapter.cells import After, Before, Finetuned, Net, Noise, Pretrained, called, compute, pretrained
from studies.dpadapter.data import Data
from tacit.pretrain import Training
from tacit.recipes import Progress


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared, on which data. Nothing of it is private: it is a simulation on data declared public."""

    title: str
    public: bool
    data: Data
    net: Net = field(default_factory=Net)
    noise: Noise = field(default_factory=Noise)
    train: Training = field(default_factory=Training)
    pretrain: tuple[Pretraining, ...]
    finetune: tuple[Finetuning, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    tuned_with: int = 1  # learning rates are tried on the nets of so many seeds, the first
    delta: float = 1e-5
    seeded_noise: bool = False
    workers: int = field(default=2, compare=False)

    def __post_init__(self) -> None:
        if not self.public:
            raise ValueError("a study prints exact scores of its data: declare public = true or do not run it")
        names = [group.name for group in self.pretrain]
        if len(set(names)) != len(names):
            raise ValueError("each [[pretrain]] has a name of its own")
        named = {name for group in self.finetune for name in group.of}
        named |= {group.equal_compute for group in self.pretrain if group.equal_compute}
        unknown = sorted(named - set(names))
        if unknown:
            raise ValueError(f"there is no [[pretrain]] called {unknown[0]!r}; there are {', '.join(names)}")
        if any(len(group.lr) > 1 for group in self.finetune) and not (self.data.tuning and self.data.held_out):
            raise ValueError("to choose among learning rates, data.tuning and data.held_out must be above 0")
        if self.tuned_with < 1:
            raise ValueError(f"tuned_with is at least 1; got {self.tuned_with}")
        self._refuse_two_ways()

    def upstreams(self) -> dict[str, list[Upstream]]:
        """Every way to pretrain, by the name of its group."""
        found = {group.name: list(group.upstreams(self.train)) for group in self.pretrain}
        for group in self.pretrain:
            if group.equal_compute:
                most = max(one.passes(self.data.public) for one in found[group.equal_compute])
                found[group.name] = [
                    replace(one, train=replace(one.train, steps=most // one.train.batch_size))
                    for one in found[group.name]
                ]
        return found

    def _refuse_two_ways(self) -> None:
        """A net, an optimizer and an epsilon name one cell of a table, so they are set up once."""
        ways: dict[tuple[Upstream, str, float], object] = {}
        upstreams = self.upstreams()
        for group in self.finetune:
            for upstream in (one for name in group.of for one in upstreams[name]):
                for said in group.downstreams():
                    kind, epsilon, how = said[0].optimizer, said[0].epsilon, (said, group.tune_at)
                    if ways.setdefault((upstream, kind, epsilon), how) != how:
                        raise ValueError(f"the same net is fine-tuned by {kind} at epsilon {epsilon:g} in two ways")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything that was run; `after` holds the chosen learning rates only."""

    study: Study
    before: dict[Before, Pretrained]
    after: dict[After, Finetuned]

    def of(self, upstream: Upstream) -> list[Pretrained]:
        """Over the seeds."""
        return [found for cell, found in self.before.items() if cell.upstream == upstream]

    def tuned(self, upstream: Upstream, optimizer: str, epsilon: float) -> list[Finetuned]:
        """Over the seeds."""
        return [
            found
            for cell, found in self.after.items()
            if cell.before.upstream == upstream
            and (cell.downstream.optimizer, cell.downstream.epsilon) == (optimizer, epsilon)
        ]

    def ways(self) -> list[tuple[str, float]]:
        """The optimizers and epsilons that were run, in their order."""
        return list(dict.fromkeys((c.downstream.optimizer, c.downstream.epsilon) for c in self.after))


def run(study: Study, *, out: Path, progress: Progress) -> Result:
    """Pretrain, choose learning rates, fine-tune; what is there already is read."""
    common: dict[str, Any] = {"folder": out / "cells", "workers": study.workers, "progress": progress, "name": called}
    first = [cell for ways in _before(study, out).values() for cell in ways]
    before = {c: pretrained(o) for c, o in store.outcomes(first, compute, **common).items()}
    trials = [cell for choice in _choices(study, out) for cells in choice.trials for cell in cells]
    tried = {c: Finetuned(**o) for c, o in store.outcomes(trials, compute, **common).items()}
    final = [cell for choice in _choices(study, out) for cell in choice.best(tried)]
    after = {c: Finetuned(**o) for c, o in store.outcomes(final, compute, **common).items()}
    return Result(study=study, before=before, after=after)


def read(study: Study, out: Path) -> Result:
    """What an earlier run left; a way whose learning rates were not all tried is left out."""
    first = [cell for ways in _before(study, out).values() for cell in ways]
    before = {c: pretrained(o) for c, o in store.known(first, out / "cells").items()}
    after: dict[After, Finetuned] = {}
    for choice in _choices(study, out):
        trials = [cell for cells in choice.trials for cell in cells]
        tried = {c: Finetuned(**o) for c, o in store.known(trials, out / "cells").items()}
        if len(tried) == len(trials):
            found = store.known(choice.best(tried), out / "cells")
            after |= {c: Finetuned(**o) for c, o in found.items()}
    return Result(study=study, before=before, after=after)


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The runs of one way to pretrain and fine-tune: one line per candidate, and the trials of each."""

    candidates: list[list[After]]
    trials: list[list[After]]  # none: there is one candidate

    def best(self, tried: dict[After, Finetuned]) -> list[After]:
        """The runs of the candidate whose trials were best in the mean; of equals, the first."""
        if not self.trials:
            return self.candidates[0]
        scores = [fmean(tried[trial].accuracy for trial in trials) for trials in self.trials]
        return self.candidates[scores.index(max(scores))]


def _before(study: Study, out: Path) -> dict[str, list[Before]]:
    same: dict[str, Any] = {"data": study.data, "net": study.net, "noise": study.noise, "folder": out / "weights"}
    return {
        name: [Before(upstream=way, seed=seed, **same) for way in ways for seed in study.seeds]
        for name, ways in study.upstreams().items()
    }


def _choices(study: Study, out: Path) -> Iterator[_Choice]:
    before = _before(study, out)
    same: dict[str, Any] = {"delta": study.delta, "seeded_noise": study.seeded_noise}
    for group in study.finetune:
        for upstream in dict.fromkeys(cell.upstream for name in group.of for cell in before[name]):
            cells = list(dict.fromkeys(c for name in group.of for c in before[name] if c.upstream == upstream))
            for ways in group.downstreams():
                at = [replace(way, epsilon=group.tune_at or way.epsilon) for way in ways if len(ways) > 1]
                nets = cells[: study.tuned_with]
                trials = [[After(before=c, downstream=way, split="tuning", **same) for c in nets] for way in at]
                runs = [[After(before=c, downstream=way, split="private", **same) for c in cells] for way in ways]
                yield _Choice(candidates=runs, trials=trials)
