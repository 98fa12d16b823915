"""Stages whose sums are recorded where they meet a mechanism, and released again."""

import json
import math
from pathlib import Path

import pytest
import torch

from tacit.audit import Claim, Effort, PromiseBroken, everything, mechanism, recording, releases, releases_of
from tacit.audit import _everything as written
from tacit.audit._registry import Audit
from tacit.privacy import Budget, Ledger, events, grid_sum, mechanisms
from tacit.tune import noisy_selection


def counted(ledger: Ledger, rows: list[float], noise: float = 0.5) -> float:
    receipt = ledger.charge("people", events.gaussian(noise), stage="test")
    return float(mechanisms.gaussian_query(grid_sum(torch.tensor(rows), low=0.0, high=1.0), receipt)[0])


def stage(rows: dict[bool, list[float]]) -> object:
    def work(present: bool) -> None:
        with Ledger("sqlite://") as ledger:
            ledger.subject("people", Budget(math.inf, 1e-5))
            counted(ledger, rows[present])

    return work


def test_a_stage_is_attacked_with_the_sums_that_it_makes() -> None:
    """One unit adds all that it may: mu = 1 / 0.5. One that adds half of it shows half of that."""
    release, claim = releases_of(stage({False: [0.0], True: [0.0, 1.0]}))  # type: ignore[arg-type]
    assert claim.mu == pytest.approx(2.0)
    found = mechanism(release, claim, trials=20_000)
    assert found.tightness > 0.85
    release, claim = releases_of(stage({False: [], True: [0.5]}))  # type: ignore[arg-type]
    assert 0.4 < mechanism(release, claim, trials=20_000).tightness <= 0.5


def test_a_stage_that_lets_a_unit_add_too_much_is_caught() -> None:
    """Rows beyond one per unit: a unit of three adds 3, and was charged as 1."""
    release, claim = releases_of(stage({False: [], True: [1.0, 1.0, 1.0]}))  # type: ignore[arg-type]
    with pytest.raises(PromiseBroken):
        mechanism(release, claim, trials=5_000)


def test_a_stage_whose_releases_depend_on_the_unit_is_caught_at_once() -> None:
    def work(present: bool) -> None:
        with Ledger("sqlite://") as ledger:
            ledger.subject("people", Budget(math.inf, 1e-5))
            for _ in range(1 + present):
                counted(ledger, [1.0])

    with pytest.raises(PromiseBroken, match="other releases with the unit than without"):
        releases_of(work)


def test_all_releases_of_a_stage_count_together() -> None:
    """Scores of two candidates: mu of both, as the budget says; each alone would be 1 / sqrt(2) of it."""
    budget = Budget(8.0, 1e-5)

    def work(present: bool) -> None:
        with Ledger("sqlite://") as ledger:
            rows = torch.ones(1 + present)
            noisy_selection([0, 1], lambda _: rows, budget, size=2, ledger=ledger, subject="a")

    release, claim = releases_of(work)
    assert claim.mu == pytest.approx(budget.mu, rel=1e-6)
    assert mechanism(release, claim, trials=20_000).tightness > 0.8


def test_blocks_with_noise_of_their_own() -> None:
    def work(present: bool) -> None:
        with Ledger("sqlite://") as ledger:
            ledger.subject("people", Budget(math.inf, 1e-5))
            values = {"a": torch.full((2,), present / 2**0.5), "b": torch.full((), present * 2.0)}
            total = releases.Sum(values, {"a": 1.0, "b": 2.0}, {"a": ("a",), "b": ("b",)})
            receipt = ledger.charge("people", events.joint([1.0, 2.0]), stage="test")
            mechanisms.gaussian(total, receipt, noise={"a": 1.0, "b": 2.0})

    release, claim = releases_of(work)
    assert claim.mu == pytest.approx(math.hypot(1, 1 / 2))
    assert release(True, 50).shape == (50, 3)
    assert mechanism(release, claim, trials=50_000).tightness > 0.85


def test_calls_go_through_unchanged_and_nothing_stays_behind() -> None:
    before = mechanisms.gaussian_query
    with Ledger("sqlite://") as ledger, recording() as found:
        ledger.subject("people", Budget(math.inf, 1e-5))
        counted(ledger, [1.0, 1.0], noise=2.0)
    assert mechanisms.gaussian_query is before
    assert [(each.mechanism, each.total.total[0] * each.total.grid) for each in found] == [("gaussian_query", 2.0)]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="released nothing"):
        releases_of(lambda _: None)


def test_findings_are_kept_until_all_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def attack(name: str, fails: list[bool]) -> Audit:
        def work(effort: Effort) -> object:
            calls.append(name)
            if fails and fails.pop():
                raise KeyboardInterrupt
            yield mechanism(lambda p, n: [float(p)] * n, Claim(mu=math.inf), name=name, trials=effort.trials(200))

        return Audit(name, ("somewhere.something",), work)  # type: ignore[arg-type]

    once = [True]
    monkeypatch.setattr(written, "REGISTRY", {"a": attack("a", []), "b": attack("b", once)})
    file = tmp_path / "kept" / "audit.json"
    with pytest.raises(KeyboardInterrupt):
        list(everything(Effort(1.0), keep=file))
    again = list(everything(Effort(1.0), keep=file))
    assert [each.name for each in again] == ["a", "b"]
    assert calls == ["a", "b", "b"]
    assert json.loads(file.read_text())["audits"]["a"][0]["trials"] == again[0].trials
    list(everything(Effort(2.0), keep=file))  # another effort: anew
    assert calls[3:] == ["a", "b"]
    file.write_text("not JSON")
    list(everything(Effort(2.0), keep=file))
    assert calls[5:] == ["a", "b"]
