"""One function of one event in every stage; the earlier forms are served, with a warning that names their end."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tacit import (
    Budget,
    CuratorEvent,
    ErrorEvent,
    Ledger,
    Receipt,
    StepEvent,
    TrialEvent,
    adapt,
    finetune,
    make_private,
    tune,
)
from tacit._curator import as_curator, report_event
from tacit.calibrate import Source
from tacit.gradients import ClippedSum, clipped_sum
from tacit.privacy import mechanisms

ENDS = r"is now curator\(event\).*ends with tacit 0\.4"


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 3, generator=generator), torch.randint(0, 2, (40,), generator=generator)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


class Picky(nn.Module):
    """Raises on a row of minus sevens."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = net()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == -7).all(1).any()):
            raise ArithmeticError("patient 4711, too low")
        return self.inside(x)  # type: ignore[no-any-return]


class Files:
    """Row 6 cannot be read, and says whose it is."""

    targets = rows()[1]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if place == 6:
            raise OSError("patient 4711, scan corrupt")
        return rows()[0][place], int(rows()[1][place])


def odd_rows() -> tuple[Tensor, Tensor]:
    inputs, labels = rows()
    inputs[6] = -7.0
    return inputs, labels


def fit(curator: Any, data: Any = None) -> list[Tensor]:
    fitted = finetune.fit(
        net(),
        data or rows(),
        optimizer=finetune.DPGD(steps=2),
        epsilon=1.0,
        delta=1e-5,
        classes=2,
        size=40,
        ledger=Ledger("sqlite://"),
        subject="clinic",
        seed=1,
        curator=curator,
    )
    return list(fitted.model.parameters())


def looped(curator: Any) -> list[Tensor]:
    model = net()
    loader = DataLoader(TensorDataset(*rows()), batch_size=20, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "epochs": 1, "clip": 1.0, "seed": 1}
    private = make_private(model, optimizer, loader, nn.CrossEntropyLoss(), curator=curator, **options)
    for batch in private:
        private.step(batch)
    return list(model.parameters())


def adapted(curator: Any) -> list[Tensor]:
    ledger = Ledger("sqlite://")
    adapter = adapt.Tent(net(), privacy=adapt.DP(2.0, clip=1.0), batch_size=40, ledger=ledger, seed=1, curator=curator)
    return [adapter(rows()[0]) for _ in range(2)]


def trainable(point: tune.Hyperparameters, mu: float, receipt: Receipt) -> nn.Module:
    del mu

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    model = net()
    for _ in range(point.steps):
        mechanisms.gaussian(clipped_sum(model, loss, rows(), clip=1.0), receipt)
    return model


def searched(curator: Any) -> tune.Tuned:
    space, one = tune.Space(lr=(0.1, 1.0), steps=(1, 2)), Budget(1.0, 1e-5)

    def score(model: nn.Module) -> Tensor:
        return (model(rows()[0]).argmax(1) == rows()[1]).double()

    options = {"ledger": Ledger("sqlite://"), "subject": "clinic", "score": score, "size": 4000, "trials": 2}
    return tune.random_search(trainable, space, one, curator=curator, **options)


def test_one_function_serves_every_stage() -> None:
    seen: list[CuratorEvent] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(seen.append)
        adapted(seen.append)
        found = searched(seen.append)
    steps = [event for event in seen if isinstance(event, StepEvent)]
    assert [(event.stage, event.step) for event in steps] == [
        ("finetune", 0),
        ("finetune", 1),
        ("adapt", 0),
        ("adapt", 1),
    ]
    for event in steps:
        assert isinstance(event.clipped_sum, ClippedSum)
        assert len(event.clipped_sum.private.norms) == 40
    trials = [event for event in seen if isinstance(event, TrialEvent)]
    assert [event.trial for event in trials] == list(found.trials)
    assert [event.error for event in trials] == ["", ""]
    assert len(seen) == 6


def test_errors_about_rows_reach_the_curator_in_finetune_and_calibrate() -> None:
    for stage in (
        lambda curator: fit(curator, Files()),
        lambda curator: Source.from_model("a", Picky(), [odd_rows()], budget=Budget(1.0, 0.0), curator=curator),
    ):
        seen: list[CuratorEvent] = []
        stage(seen.append)
        errors = [event for event in seen if isinstance(event, ErrorEvent)]
        assert errors
        assert all("patient 4711" in event.details for event in errors)
        assert "4711" not in repr(errors)


def test_a_curator_that_only_knows_steps_lets_no_row_stop_a_run() -> None:
    """It raises AttributeError on an ErrorEvent, which a row decides; the run goes on as without that row."""
    seen: list[int] = []
    fit(lambda event: seen.append(event.step), Files())
    assert seen == [0, 1]
    report_event(lambda event: event.nothing, ErrorEvent("a sentence", "details"))
    with pytest.raises(KeyboardInterrupt):
        report_event(_interrupts, ErrorEvent("a sentence", "details"))


def _interrupts(_: CuratorEvent) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stage", [fit, adapted, looped])
def test_a_curator_that_raises_on_a_step_changes_nothing(stage: Callable[[Any], list[Tensor]]) -> None:
    seen: list[int] = []

    def raises(event: Any) -> None:
        seen.append(event.step)
        raise RuntimeError("boom")

    assert all(torch.equal(a, b) for a, b in zip(stage(raises), stage(None), strict=True))
    assert seen == [0, 1]


@pytest.mark.parametrize("stage", [fit, adapted, looped])
@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_a_curator_that_ends_the_process_does(stage: Callable[[Any], object], ending: type[BaseException]) -> None:
    def raises(_: CuratorEvent) -> None:
        raise ending

    with pytest.raises(ending):
        stage(raises)


def test_two_arguments_are_served_as_before() -> None:
    sums: list[Any] = []
    with pytest.warns(DeprecationWarning, match=rf"finetune\.fit\(curator=…\) with two arguments {ENDS}") as said:
        fit(lambda step, total: sums.append((step, total)))
    assert said[0].filename == __file__
    assert [step for step, _ in sums] == [0, 1]
    assert all(isinstance(total, ClippedSum) for _, total in sums)
    trials: list[Any] = []
    with pytest.warns(DeprecationWarning, match=rf"tune\.random_search\(curator=…\) with two arguments {ENDS}"):
        found = searched(lambda trial, wrong: trials.append((trial, wrong)))
    assert trials == [(trial, "") for trial in found.trials]


@pytest.mark.filterwarnings("ignore:.*the old name ends:DeprecationWarning")
def test_a_total_in_adapt_is_served_as_before() -> None:
    sums: list[Any] = []
    with pytest.warns(DeprecationWarning, match=r"total\.sum is now .*event\.clipped_sum\.sum.*tacit 0\.4"):
        adapted(lambda total: sums.append((total.sum, total.bounds, total.blocks, total.private.norms)))
    assert [len(norms) for *_, norms in sums] == [40, 40]
    with pytest.raises(AttributeError, match="StepEvent has no attribute 'nothing'"):
        _ = StepEvent("adapt", 0, None).nothing  # type: ignore[arg-type, attr-defined]


@pytest.mark.filterwarnings("ignore:.*the old name ends:DeprecationWarning")
def test_a_method_error_is_served_as_before() -> None:
    class Notes:
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.problems: list[str] = []

        def __call__(self, step: int, total: object) -> None:
            del total
            self.steps.append(step)

        def error(self, problem: Any) -> None:
            self.problems.append(problem.details)

    notes = Notes()
    with pytest.warns(DeprecationWarning, match=rf"finetune\.fit\(curator=…\) with a method error {ENDS}"):
        fit(notes, Files())
    assert notes.steps == [0, 1]
    assert ["patient 4711" in problem for problem in notes.problems] == [True, True]

    class Errors:
        error = notes.error

    with pytest.warns(DeprecationWarning, match=r"Source\.from_model\(curator=…\) with a method error") as said:
        Source.from_model("a", Picky(), [odd_rows()], budget=Budget(1.0, 0.0), curator=Errors())
    assert said[0].filename == __file__
    assert len(notes.problems) == 3


def test_the_old_name_of_an_error() -> None:
    from tacit import _refusals

    with pytest.warns(DeprecationWarning, match=r"Problem is now .*ErrorEvent"):
        assert _refusals.Problem is ErrorEvent  # type: ignore[attr-defined]


def one(event: Any, kept: Any = None) -> None:
    del event, kept


def two(step: int, total: Any) -> None:
    del step, total


def any_number(*facts: Any) -> None:
    del facts


class Method:
    def __call__(self, event: Any) -> None: ...

    def two(self, step: int, total: Any) -> None: ...


@pytest.mark.parametrize("curator", [one, [].append, Method(), Method().__call__])
def test_one_argument_is_an_event(curator: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_curator(curator, "fit") is curator


@pytest.mark.parametrize("curator", [any_number, two, Method().two])
def test_two_arguments_are_the_earlier_form(curator: Callable[..., Any]) -> None:
    with pytest.warns(DeprecationWarning, match="two arguments"):
        served = as_curator(curator, "fit")
    assert served is not curator
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_curator(served, "fit") is served  # handed on by one function to another


def test_what_cannot_be_called_is_refused_before_any_charge() -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(TypeError, match=r"finetune\.fit: curator is a function of one event .*, not int"):
        finetune.fit(net(), rows(), epsilon=1.0, delta=1e-5, ledger=ledger, curator=3)  # type: ignore[arg-type]
    assert ledger.entries() == []


def test_print_is_a_curator(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curator = as_curator(print, "fit")
    assert curator is print
    curator(ErrorEvent("A row failed.", "ValueError: row 17"))
    assert capsys.readouterr().out == "A row failed.\nValueError: row 17\n"
    assert "row 17" not in repr(ErrorEvent("A row failed.", "ValueError: row 17"))  # in a log of recipients
