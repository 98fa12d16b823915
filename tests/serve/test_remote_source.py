"""A source of a recalibration whose ledger is behind a service: charges are there, answers stay here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tacit.calibrate import Calibrator, Gap, Price, Query, Refused, Source, reopen
from tacit.privacy import Budget, BudgetExceeded, Ledger
from tacit.serve import Role
from tests.serve.conftest import Service
from tests.serve.test_ledger_service import Lossy

PURE = Budget(1.0, 0.0)
ASKED = Query(id="q1", statistic=Gap(temperature=1.5), price=Price(noise="laplace", amount=0.4))


def outputs(place: int) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(place)
    return {"logits": 3 * torch.randn(60, 3, generator=drawn), "labels": torch.randint(3, (60,), generator=drawn)}


def source(ledger: Ledger, folder: Path, place: int = 0, **options: Any) -> Source:
    given = {"budget": PURE, "ledger": ledger, "answers": folder / f"answers-{place}.db", "seed": place}
    return Source(f"clinic-{place}", **(outputs(place) | given | options))


@pytest.fixture
def spender(service: Service) -> Ledger:
    """What a source has: a token for its own subject, which an admin has declared."""
    service.ledger().subject("clinic-0", PURE)
    return service.ledger(Role.CHARGE, subject="clinic-0")


def test_a_question_is_charged_once_and_answered_once(service: Service, spender: Ledger, tmp_path: Path) -> None:
    first = source(spender, tmp_path).answer(ASKED)
    again = source(spender, tmp_path).answer(ASKED)  # as another process would
    assert first == again
    here = Ledger(service.database)
    (charge,) = [entry for entry in here.entries() if entry.kind == "charge"]
    assert (charge.receipt, charge.body["note"]) == (first.receipt, "gap, query q1")
    assert here.spent("clinic-0").epsilon == pytest.approx(0.4)
    with pytest.raises(Refused, match="another question"):
        source(spender, tmp_path).answer(Query(id="q1", statistic=Gap(temperature=2.0), price=ASKED.price))
    with pytest.raises(BudgetExceeded):
        source(spender, tmp_path).answer(Query(id="q2", statistic=Gap(), price=Price(noise="laplace", amount=0.7)))
    assert source(spender, tmp_path).terms.left == pytest.approx(0.6)
    here.verify()


def test_a_lost_answer_of_the_service_is_no_second_charge(service: Service, spender: Ledger, tmp_path: Path) -> None:
    spender._book._client._transport = Lossy()  # type: ignore[attr-defined]
    source(spender, tmp_path).answer(ASKED)
    assert [entry.kind for entry in Ledger(service.database).entries()].count("charge") == 1


def test_a_question_that_was_interrupted_is_not_answered_again(spender: Ledger, tmp_path: Path) -> None:
    one = source(spender, tmp_path)
    one._book.begin(one.subject, ASKED)  # and then it was killed
    with pytest.raises(Refused, match="interrupted"):
        source(spender, tmp_path).answer(ASKED)
    reopen(spender, "clinic-0", answers=tmp_path / "answers-0.db")
    source(spender, tmp_path).answer(ASKED)


def test_where_answers_are_kept_has_to_be_said(service: Service, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="answers="):
        source(service.ledger(), tmp_path, answers=None)
    assert Ledger(service.database).entries() == []


def test_a_recalibration_is_that_of_ledgers_in_files(service: Service, tmp_path: Path) -> None:
    """Three sources with tokens of their own: the result, the charges and the noise of three local ledgers."""

    def run(ledgers: list[Ledger], folder: Path) -> Any:
        folder.mkdir()
        found = [source(ledger, folder, place) for place, ledger in enumerate(ledgers)]
        return Calibrator(budget=PURE).run(found, run_id="june")

    admin = service.ledger()
    for place in range(3):
        admin.subject(f"clinic-{place}", PURE)
    tokens = [service.ledger(Role.CHARGE, subject=f"clinic-{place}") for place in range(3)]
    remote = run(tokens, tmp_path / "remote")
    local = run([Ledger(f"sqlite:///{tmp_path}/local-{place}.db") for place in range(3)], tmp_path / "local")
    assert remote == local
    for place in range(3):
        there, here = Ledger(service.database), Ledger(f"sqlite:///{tmp_path}/local-{place}.db")
        assert there.spent(f"clinic-{place}").epsilon == here.spent(f"clinic-{place}").epsilon
    Ledger(service.database).verify()
