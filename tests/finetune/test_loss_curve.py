"""The training loss from released gradients: exact where it can be, right on average, and a reason to stop."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, net, people, same_bits
from test_resume import at_step, killed
from torch import Tensor, nn

from tacit.data import TensorRecords
from tacit.finetune import (
    DPFTRL,
    DPGD,
    DPSGD,
    DPZO,
    GEP,
    AdpAlloc,
    AdpClip,
    BandMF,
    Decaying,
    Evaluation,
    Fitted,
    HyFreeDP,
    Optimizer,
    TrackLoss,
    fit,
)
from tacit.finetune._evaluation import Evaluator
from tacit.finetune._loop import Run
from tacit.finetune._loss_curve import LossChange, LossTracker
from tacit.finetune._reading import varies
from tacit.finetune._updates import Updater
from tacit.gradients import Automatic
from tacit.privacy import Budget, Ledger

UNITS, NUMBERS = 40, 12
FIVE_SIGMA = 5.0  # a false alarm in less than one of a million


class Parabolas:
    """Units whose loss is w' A w / 2 - b . w, so that gradients are A w - b, and steps that are taken on it."""

    def __init__(self, *, curved: bool = True) -> None:
        made = torch.Generator().manual_seed(1)
        root = torch.randn(NUMBERS, NUMBERS, dtype=torch.float64, generator=made) / NUMBERS**0.5
        self.a = root @ root.T if curved else torch.zeros(NUMBERS, NUMBERS, dtype=torch.float64)
        self.b = torch.randn(UNITS, NUMBERS, dtype=torch.float64, generator=made)
        self.path: list[Tensor] = []  # the weights of the last walk

    def loss(self, w: Tensor) -> float:
        return float(w @ self.a @ w / 2 - self.b.mean(0) @ w)

    def walk(self, optimizer: Optimizer, scale: float, seed: int = 0) -> tuple[list[LossChange], list[float]]:
        """The estimates, and how the loss has really changed at each of them."""
        drawn = torch.Generator().manual_seed(seed)
        weights = nn.Parameter(torch.zeros(NUMBERS, dtype=torch.float64))
        updater = Updater(optimizer.update, {"w": weights}, optimizer.steps)
        tracker = LossTracker(TrackLoss(), {"w": weights}, optimizer, size=UNITS, rows_drawn=False)
        rate, expected, bound, true = optimizer.sampler.rate(UNITS), optimizer.sampler.expected(UNITS), 1.5, []
        self.path = []
        for step in range(optimizer.steps):
            w = weights.detach().clone()
            true.append(self.loss(w))
            self.path.append(w)
            taken = torch.rand(UNITS, generator=drawn) < rate
            total = (self.a @ w - self.b)[taken].sum(0)
            noise = optimizer.noise.multiplier(scale, step, optimizer.steps) * bound
            gradient = {"w": (total + noise * torch.randn(NUMBERS, dtype=torch.float64, generator=drawn)) / expected}
            tracker.note(gradient, bound=bound, scale=scale)
            updater.step(gradient, step)
        return tracker.curve, true


FULL = {
    "momentum": DPGD(steps=12, lr=0.1),
    "no momentum": DPGD(steps=12, lr=0.1, momentum=0.0),
    "a schedule": DPGD(steps=12, lr=0.2, schedule="cosine", warmup=3),
    "weight decay": DPGD(steps=12, lr=0.1, weight_decay=0.1),
    "averaged weights": DPGD(steps=12, lr=0.1, average="ema"),
}


@pytest.mark.parametrize("optimizer", FULL.values(), ids=FULL)
def test_without_noise_it_is_the_change_of_a_quadratic_loss(optimizer: Optimizer) -> None:
    curve, true = Parabolas().walk(optimizer, 0.0)
    assert [at.change for at in curve] == pytest.approx([value - true[0] for value in true], abs=1e-12)
    assert [at.step for at in curve] == list(range(12))
    assert all(at.noise == 0 for at in curve)
    assert curve[-1].change < -0.1


@pytest.mark.parametrize("optimizer", FULL.values(), ids=FULL)
def test_with_noise_it_is_right_on_average_and_says_how_far_off_it_may_be(optimizer: Optimizer) -> None:
    """Everybody in every step: the error of 400 walks has mean zero and at most the stated deviation."""
    problem, off, stated = Parabolas(), [], []
    for seed in range(400):
        curve, true = problem.walk(optimizer, 8.0, seed)
        off.append(curve[-1].change - (true[-1] - true[0]))
        stated.append(curve[-1].noise)
    error = statistics.stdev(off)
    assert abs(statistics.fmean(off)) < FIVE_SIGMA * error / 400**0.5
    root_mean_square = statistics.fmean(value**2 for value in stated) ** 0.5
    assert 0.5 < error / root_mean_square < 1 + FIVE_SIGMA / 800**0.5  # a bound, not a loose one


def test_where_noise_falls_it_knows_the_noise_of_each_step() -> None:
    optimizer = AdpAlloc(batch_size=UNITS, steps=12, lr=0.1, noise="exponential", end=0.2)
    problem, off, stated = Parabolas(), [], []
    for seed in range(400):
        curve, true = problem.walk(optimizer, 8.0, seed)
        off.append(curve[-1].change - (true[-1] - true[0]))
        stated.append(curve[-1].noise)
    assert statistics.stdev(off) < (1 + FIVE_SIGMA / 800**0.5) * statistics.fmean(v**2 for v in stated) ** 0.5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_batches_that_are_drawn_do_not_flatter_it(momentum: float) -> None:
    """A straight loss: right on average, although the square of a batch's own gradient is in each step."""
    optimizer, problem = DPSGD(batch_size=8, steps=12, lr=0.1, momentum=momentum), Parabolas(curved=False)
    off = []
    for seed in range(600):
        curve, true = problem.walk(optimizer, 1.0, seed)
        off.append(curve[-1].change - (true[-1] - true[0]))
    assert abs(statistics.fmean(off)) < FIVE_SIGMA * statistics.stdev(off) / 600**0.5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_drawn_batches_a_curved_loss_is_not_below_the_truth(momentum: float) -> None:
    optimizer, problem = DPSGD(batch_size=8, steps=12, lr=0.1, momentum=momentum), Parabolas()
    off = []
    for seed in range(600):
        curve, true = problem.walk(optimizer, 1.0, seed)
        off.append(curve[-1].change - (true[-1] - true[0]))
    assert statistics.fmean(off) > -FIVE_SIGMA * statistics.stdev(off) / 600**0.5


@pytest.mark.parametrize("optimizer", FULL.values(), ids=FULL)
def test_the_upper_estimate_is_the_sum_of_steps_along_the_gradients_after_them(optimizer: Optimizer) -> None:
    """Exact without noise, and above the change of a convex loss; with noise right on average, as far as it says."""
    problem, off, stated = Parabolas(), [], []

    def upper() -> float:
        pairs = zip(problem.path, problem.path[1:], strict=False)
        return sum(float((problem.a @ after - problem.b.mean(0)) @ (after - before)) for before, after in pairs)

    curve, true = problem.walk(optimizer, 0.0)
    assert curve[-1].most == pytest.approx(upper(), abs=1e-12)
    assert all(at.most >= value - true[0] - 1e-12 for at, value in zip(curve, true, strict=True))
    for seed in range(400):
        curve, _ = problem.walk(optimizer, 8.0, seed)
        off.append(curve[-1].most - upper())
        stated.append(curve[-1].most_noise)
    error = statistics.stdev(off)
    assert abs(statistics.fmean(off)) < FIVE_SIGMA * error / 400**0.5
    root_mean_square = statistics.fmean(value**2 for value in stated) ** 0.5
    assert abs(error / root_mean_square - 1) < FIVE_SIGMA / 800**0.5


# -- in fit -----------------------------------------------------------------------------------------------------------


def clusters(each: int = 1000) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(2)
    labels = torch.arange(3 * each) % 3
    return torch.randn(3 * each, 6, generator=made) / 3 + torch.eye(3, 6)[labels], labels


def run(optimizer: Optimizer, **more: Any) -> Fitted:
    options: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "size": 3000, "scheme": "full", "seed": SEED}
    model = nn.Sequential(nn.Identity(), nn.Linear(6, 3))
    options |= {"ledger": Ledger("sqlite://"), "subject": "clinic", "track_loss": True}
    return fit(model, clusters(), optimizer=optimizer, **(options | more))


@pytest.mark.parametrize(
    "optimizer",
    [
        DPGD(steps=30, lr=0.5, clip=2.0, free_step=False),
        DPGD(steps=30, lr=0.5, clip=4.0, clip_schedule=Decaying(shape="exponential", end=0.5), free_step=False),
    ],
    ids=["constant", "a clip that falls"],
)
def test_a_run_tells_its_own_training_loss(optimizer: Optimizer) -> None:
    """No gradient here is as long as the clip, so the loss is the plain one: ln 3 before the first step."""
    fitted = run(optimizer)
    inputs, labels = clusters()
    with torch.inference_mode():
        after = float(nn.functional.cross_entropy(fitted.model(inputs), labels))
    last = fitted.loss_curve[-1]
    assert len(fitted.loss_curve) == 30
    assert last.change < -0.3
    assert abs(last.change - (after - math.log(3))) < FIVE_SIGMA * last.noise + 0.02  # the last step comes after it
    assert 0 < last.noise < 0.2


def test_it_costs_nothing_and_changes_nothing() -> None:
    optimizer = DPSGD(batch_size=100, steps=10, lr=0.5)
    with_it, without = run(optimizer), run(optimizer, track_loss=False)
    assert same_bits(with_it.model, without.model)
    assert with_it.guarantee == without.guarantee
    assert with_it.noise_multiplier == without.noise_multiplier
    assert (len(with_it.loss_curve), without.loss_curve) == (10, [])


def rising(ledger: Ledger, **more: Any) -> Fitted:
    """Labels that say nothing, and a learning rate at which noise drives the weights away."""
    made = torch.Generator().manual_seed(3)
    inputs = nn.functional.normalize(torch.randn(2000, 200, generator=made))
    options: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "size": 2000, "scheme": "full", "seed": SEED}
    options |= {"ledger": ledger, "subject": "clinic", "track_loss": TrackLoss(patience=5)}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(200, 10))
    return fit(model, (inputs, torch.arange(2000) % 10), optimizer=DPGD(steps=60, lr=50.0), **options, **more)


def test_a_loss_that_rises_ends_the_run_and_the_rest_is_returned() -> None:
    ledger = Ledger("sqlite://")
    fitted = rising(ledger)
    assert 5 <= fitted.steps < 60
    assert len(fitted.loss_curve) == fitted.steps
    (settled,) = [entry.body for entry in ledger.entries("clinic") if entry.kind == "settle"]
    assert settled["used"] == fitted.steps
    assert ledger.spent("clinic").epsilon < 2.0
    assert fitted.guarantee.epsilon == pytest.approx(2.0, rel=1e-3)  # where it stopped was chosen by releases: the cap
    assert "the cap" in str(fitted.guarantee)
    ledger.verify()


HELD_OUT = (
    nn.functional.normalize(torch.randn(300, 200, generator=torch.Generator().manual_seed(4))),
    (torch.arange(300) % 10),
)
EVALUATIONS = {
    "public": Evaluation(data=HELD_OUT, public=True),
    "charged": Evaluation(data=HELD_OUT, subject="held out", epsilon=4.0, size=300),
    "public, every 2 steps": Evaluation(data=HELD_OUT, public=True, every=2),
    "charged, every 3 steps": Evaluation(data=HELD_OUT, subject="held out", epsilon=4.0, size=300, every=3),
}


@pytest.mark.filterwarnings("ignore::tacit.GuardRailWarning")  # no better than a guess
@pytest.mark.parametrize("which", EVALUATIONS)
def test_a_run_that_its_loss_ends_is_evaluated_there_once(which: str) -> None:
    evaluate, ledger = EVALUATIONS[which], Ledger("sqlite://")
    fitted = rising(ledger, evaluate=evaluate)
    stop, every = fitted.steps, evaluate.every or 60
    assert stop < 60
    assert [score.step for score in fitted.history] == [*range(every, stop, every), stop]
    assert "accuracy" in fitted.scores
    settled = [entry.body["used"] for entry in ledger.entries("held out") if entry.kind == "settle"]
    assert settled == ([] if evaluate.public else [len(fitted.history)])
    if which == "public":
        right = (fitted.model(HELD_OUT[0]).argmax(1) == HELD_OUT[1]).double().mean()
        assert fitted.scores["accuracy"] == pytest.approx(100 * float(right))


@pytest.mark.filterwarnings("ignore::tacit.GuardRailWarning")
@pytest.mark.parametrize("which", ["public", "charged"])
def test_the_evaluation_at_a_stop_is_made_once_though_the_run_is_resumed(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[nn.Module] = []
    plain, ends = Evaluator.__call__, Run.end
    monkeypatch.setattr(Evaluator, "__call__", lambda self, model: (made.append(model), plain(self, model))[1])

    def interrupted(_: Run) -> int:
        raise KeyboardInterrupt

    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        monkeypatch.setattr(Run, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rising(ledger, evaluate=EVALUATIONS[which], checkpoint=tmp_path / "run")
        monkeypatch.setattr(Run, "end", ends)
        for _ in range(2):  # resumed, and found finished
            fitted = rising(ledger, evaluate=EVALUATIONS[which], checkpoint=tmp_path / "run")
            assert [score.step for score in fitted.history] == [fitted.steps]
            assert "accuracy" in fitted.scores
    assert len(made) == 1


def test_a_loss_that_falls_does_not_end_the_run() -> None:
    fitted = run(DPGD(steps=30, lr=0.5), track_loss=TrackLoss(patience=3, start=math.log(3)))
    assert fitted.steps == 30


def logistic(**more: Any) -> tuple[Fitted, float]:
    """Two classes, 2,000 rows of norm 1, a head of zeros without privacy: what came of it, and its loss less ln 2."""
    made = torch.Generator().manual_seed(0)
    inputs = nn.functional.normalize(torch.randn(2000, 32, generator=made))
    labels = (inputs @ torch.randn(32, generator=made) > 0).long()
    options: dict[str, Any] = {"epsilon": math.inf, "delta": 1e-5, "size": 2000, "scheme": "linear", "seed": SEED}
    options |= {"ledger": Ledger("sqlite://"), "subject": "clinic", "track_loss": True}
    fitted = fit(nn.Linear(32, 2), (inputs, labels), **(options | more))
    with torch.inference_mode():
        return fitted, float(nn.functional.cross_entropy(fitted.model(inputs), labels)) - math.log(2)


@pytest.mark.parametrize("lr", [0.3, 3.0, 30.0, 100.0])
def test_the_upper_estimate_holds_where_steps_are_too_long(lr: float) -> None:
    fitted, true = logistic(optimizer=DPGD(lr=lr, steps=60, momentum=0.0))
    last = fitted.loss_curve[-1]
    assert last.most >= true - 0.01  # the last step comes after it
    assert (last.most < 0) is (lr < 10)
    assert (last.change < -math.log(2)) is (lr > 10)  # a loss below zero: there is none


@pytest.mark.parametrize(("lr", "stops"), [(0.3, False), (3.0, False), (30.0, True), (100.0, True)])
def test_an_estimate_below_a_loss_of_zero_ends_the_run(lr: float, stops: bool) -> None:
    how = TrackLoss(patience=3, start=math.log(2))
    fitted, _ = logistic(optimizer=DPGD(lr=lr, steps=60, momentum=0.0), track_loss=how)
    assert (fitted.steps < 10) is stops
    assert (fitted.steps == 60) is not stops


def test_a_checkpoint_of_before_has_no_upper_estimate() -> None:
    optimizer, weights = DPGD(steps=5), {"w": nn.Parameter(torch.zeros(1))}
    tracker = LossTracker(TrackLoss(), weights, optimizer, size=10, rows_drawn=False)
    tracker.note({"w": torch.ones(1)}, bound=1.0, scale=1.0)
    tensors, facts = tracker.state()
    facts["curve"] = [values[:2] for values in facts["curve"]]
    again = LossTracker(TrackLoss(), weights, optimizer, size=10, rows_drawn=False)
    again.load(tensors, facts, done=1)
    again.note({"w": torch.ones(1)}, bound=1.0, scale=1.0)
    assert [at.most for at in again.curve] == [math.inf, math.inf]


def test_a_rise_that_noise_explains_is_none() -> None:
    curve = [LossChange(step=0, change=0.0, noise=0.0), LossChange(step=1, change=0.5, noise=0.2)]
    assert curve[1].rise_since(curve[0]) == pytest.approx(2.5)
    optimizer, weights = DPGD(steps=5), {"w": nn.Parameter(torch.zeros(1))}
    for deviations, rises in ((2.0, True), (3.0, False)):
        how = TrackLoss(patience=1, deviations=deviations)
        tracker = LossTracker(how, weights, optimizer, size=10, rows_drawn=False)
        tracker.curve = curve
        assert tracker.rises is rises


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_run_that_has_only_stopped_learning_goes_on(momentum: float) -> None:
    """A flat loss: over 100 steps, each of which is a test, the noise alone ends hardly a run."""
    flat, optimizer = Parabolas(curved=False), DPGD(steps=100, lr=0.1, momentum=momentum, free_step=False)
    flat.b.zero_()
    stopped = 0
    for seed in range(60):
        curve, _ = flat.walk(optimizer, 8.0, seed)
        tracker = LossTracker(TrackLoss(patience=5), {}, optimizer, size=UNITS, rows_drawn=False)
        for last in range(1, len(curve) + 1):
            tracker.curve = curve[:last]
            stopped += tracker.rises
            if tracker.rises:
                break
    assert stopped <= 3  # none or one was seen; 5 and more of 100 before the number of tests counted


def test_weights_that_are_not_finite_end_the_run() -> None:
    fitted = run(DPGD(steps=60, lr=50.0, weight_decay=5.0), track_loss=TrackLoss(patience=30))
    assert fitted.steps < 60
    tracker = LossTracker(TrackLoss(), {"w": nn.Parameter(torch.zeros(2))}, DPGD(steps=3), size=10, rows_drawn=False)
    for number in (0.0, 1e200, 1e300):
        tracker.note({"w": torch.full((2,), number, dtype=torch.float64)}, bound=1e200, scale=1e200)


def test_what_it_is_computed_by_does_not_depend_on_the_largest_unit() -> None:
    """One row more of one patient, at most two of whose rows are shown: other sums, the same formula."""
    made = torch.Generator().manual_seed(4)
    inputs, labels = torch.randn(21, 6, generator=made), torch.arange(21) % 3
    stated = []
    for rows in (20, 21):  # patients of two rows; the last has one more
        owners = [min(row // 2, 9) for row in range(rows)]
        options: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "size": 10, "scheme": "full", "seed": SEED}
        options |= {"unit": "patient", "unit_ids": owners, "rows_each": 2, "track_loss": True}
        model = nn.Sequential(nn.Identity(), nn.Linear(6, 3))
        fitted = fit(model, (inputs[:rows], labels[:rows]), optimizer=DPGD(steps=2, lr=0.0001), **options)
        stated.append(fitted.loss_curve[1].noise)
    assert stated[0] == pytest.approx(stated[1], rel=0.2)  # by the other formula it is half or twice as large
    data = TensorRecords(inputs, labels)
    for rows in (20, 21):
        grouped = TensorRecords(inputs[:rows], labels[:rows]).group_by(list(range(rows)), unit="visit")
        ids = [min(row // 2, 9) for row in range(rows)]
        assert not varies(grouped.group_by(ids, unit="patient"))
        assert varies(grouped.group_by(ids, unit="patient", at_most=2))
    assert not varies(data)
    assert varies(TensorRecords(inputs, labels, augment=2))
    assert varies(TensorRecords(inputs, labels, owners=[0] * 21, rows_each=1, unit="patient"))


def test_a_run_without_it_is_resumed_with_it(tmp_path: Path) -> None:
    """It changes no release, so it is no other run: estimates begin where it was killed."""

    def begin(**more: Any) -> Fitted:
        options: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep"}
        options |= {"seed": SEED, "checkpoint": tmp_path / "run.safetensors", "every": 2, "subject": "clinic"}
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            return fit(
                net(), people(), optimizer=DPSGD(batch_size=8, steps=7, lr=0.05), ledger=ledger, **options | more
            )

    killed(lambda: begin(curator=at_step(5)))
    killed(lambda: begin(track_loss=True, curator=at_step(6)))
    again = begin(track_loss=True)
    steps = [at.step for at in again.loss_curve]
    assert steps == list(range(steps[0], 7))
    assert 3 <= steps[0] <= 5
    assert again.loss_curve[0].change == 0


def test_a_run_that_was_killed_has_the_curve_of_one_that_was_not(tmp_path: Path) -> None:
    def begin(folder: Path, **more: Any) -> Fitted:
        folder.mkdir(exist_ok=True)
        options: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full", "head": "keep"}
        options |= {"seed": SEED, "checkpoint": folder / "run.safetensors", "every": 2, "subject": "clinic"}
        with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
            optimizer = DPSGD(batch_size=8, steps=7, lr=0.05)
            return fit(net(), people(), optimizer=optimizer, ledger=ledger, track_loss=True, **(options | more))

    whole = begin(tmp_path / "whole")
    killed(lambda: begin(tmp_path / "parts", curator=at_step(5)))
    again = begin(tmp_path / "parts")
    assert again.loss_curve == whole.loss_curve
    assert same_bits(again.model, whole.model)
    assert len(begin(tmp_path / "parts").loss_curve) == 7  # a finished run has it, too


OTHERS = {
    "adam": DPSGD(batch_size=10, steps=3, rule="adam"),
    "normalised": DPGD(steps=3, clip=Automatic(1.0)),
    "a clip that follows": AdpClip(batch_size=10, steps=3),
    "HyFreeDP": HyFreeDP(batch_size=10, steps=3),
    "a subspace": GEP(batch_size=10, steps=3, public=(torch.randn(8, 6), torch.arange(8) % 3), dimensions=2),
    "zeroth order": DPZO(batch_size=10, steps=3),
    "correlated": DPFTRL(batches=3),
    "banded": BandMF(batch_size=10, steps=4, bands=2),
    "bins": DPSGD(batch_size=10, steps=3, sampling="balls-in-bins"),
}


@pytest.mark.parametrize("optimizer", OTHERS.values(), ids=OTHERS)
def test_what_it_cannot_be_estimated_from_is_refused_before_the_charge(optimizer: Optimizer) -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="Leave track_loss= out"):
        run(optimizer, ledger=ledger, neighbours="zero-out")
    assert not ledger.entries()


def test_mistakes() -> None:
    with pytest.raises(TypeError, match=r"track_loss is True or a finetune\.TrackLoss, not int"):
        run(DPGD(steps=3), track_loss=5)
    with pytest.raises(ValueError, match="patience"):
        TrackLoss(patience=0)
    with pytest.raises(ValueError, match="deviations is above 0"):
        TrackLoss(deviations=-1.0)
    with pytest.raises(ValueError, match="ln K for a head of zeros"):
        TrackLoss(patience=2, start=0.0)
    with pytest.raises(ValueError, match="give patience=, too"):
        TrackLoss(start=math.log(3))
    ledger, optimizer = Ledger("sqlite://"), DPGD(steps=4)
    ledger.subject("clinic", Budget(8.0, 1e-5), plan=[optimizer.event(3.0, 3000)])
    with pytest.raises(ValueError, match="a plan refunds nothing"):
        run(optimizer, ledger=ledger, track_loss=TrackLoss(patience=2))
    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="where everybody takes part"):
        run(DPSGD(batch_size=300, steps=4), ledger=ledger, track_loss=TrackLoss(patience=2))
    with pytest.raises(ValueError, match="Weights of 16 bits"):
        fit(
            nn.Sequential(nn.Identity(), nn.Linear(6, 3)).bfloat16(),
            (clusters()[0].bfloat16(), clusters()[1]),
            optimizer=DPGD(steps=3),
            epsilon=1.0,
            delta=1e-5,
            size=3000,
            scheme="full",
            track_loss=True,
            ledger=ledger,
            subject="clinic",
        )
    for lr in (1e39, 1e160):
        with pytest.raises(ValueError, match="more than the weights' type can hold"):
            run(DPGD(steps=3, lr=lr), ledger=ledger)
    assert not ledger.entries()
