"""Ledgers in reports: the sums are those of the ledger, warnings are loud, and a book outlives its ledger."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tacit.privacy import Budget, Ledger, epsilon_of, events
from tacit.report import _describe_events as words
from tacit.report import plain
from tacit.report._ledger import NOT_DURABLE, SEEDED, Book, alike, heads, overall, overview


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    book = Ledger(tmp_path / "book.db")
    book.subject("stream", budget=Budget(10.0, 1e-6), unit="patient", neighbours="replace-one")
    book.subject("clinic", budget=Budget(2.0, 0.0), unit="video", disjoint_from=["stream"])
    book.charge("stream", events.stream(4.0, 200), stage="adapt", note="DP-Tent")
    for _ in range(3):
        book.charge("stream", events.gaussian(40.0), stage="calibrate")
    book.settle(book.charge("stream", events.gaussian(50.0, steps=10), stage="finetune"), 4)
    book.charge("clinic", events.laplace(4.0), stage="tune")
    return book


def test_a_ledger_as_a_table(ledger: Ledger) -> None:
    """Under replace-one noise z is mu = 2/z; equal charges are one row; what was returned is not spent."""
    book = Book.of(ledger, "the ledger")
    table = book.table()
    assert [row[0] for row in table.rows] == ["clinic", "stream", "stream", "stream"]
    assert table.rows[1][:4] == ("stream", "patient", "replace-one", "adapt")
    costs = [(2 / 4) ** 2, 3 * (2 / 40) ** 2, 4 * (2 / 50) ** 2]
    spent = [row[5] for row in table.rows[1:]]
    totals = [row[6] for row in table.rows[1:]]
    assert spent == pytest.approx([epsilon_of(math.sqrt(cost), 1e-6) for cost in costs])
    assert totals == pytest.approx([epsilon_of(math.sqrt(sum(costs[: n + 1])), 1e-6) for n in range(3)])
    assert totals[-1] == ledger.spent("stream").epsilon
    assert "3 charges, each Gaussian noise, 40 × the bound" in str(table.rows[2][4])
    assert "4 releases used, the rest returned" in str(table.rows[3][4])
    assert "clinic: 0.25 of 2 at δ = 0, mode pure" in table.note


def test_the_headline_is_the_total(ledger: Ledger) -> None:
    book = Book.of(ledger)
    assert book.headline() == str(ledger.total(promised=True))  # a part of a charge was returned: the cap
    assert (book.warnings, book.private, book.head) == ((), True, ledger.head)
    assert book.promised == ledger.total(promised=True).epsilon
    assert book.promise.startswith("ε = ")
    assert overall([book]) == book.headline()


def test_what_must_not_be_overlooked() -> None:
    ledger = Ledger("sqlite://")
    assert Book.of(ledger).headline() == f"[{NOT_DURABLE}] Nothing was charged to this ledger."
    ledger.subject("x", budget=Budget(1.0, 1e-6))
    ledger.charge("x", events.gaussian(40.0), stage="adapt", seed=1)
    book = Book.of(ledger)
    assert book.warnings == (SEEDED, NOT_DURABLE)
    assert SEEDED in book.headline()
    assert NOT_DURABLE in book.headline()
    assert f"[{SEEDED}]" in str(book.table().rows[0][4])


def test_no_noise_is_not_private() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("x", budget=Budget(math.inf, 1e-6))
    ledger.charge("x", events.gaussian(0.0), stage="adapt")
    book = Book.of(ledger)
    assert (book.epsilon, book.private) == (math.inf, False)
    assert "not private" in book.headline()
    assert book.table().texts[0][4:] == ["a sum without noise", "∞", "∞"]
    assert book.promise.startswith("ε = ∞")


def test_a_plan_is_priced_as_a_whole() -> None:
    ledger = Ledger("sqlite://")
    step = events.poisson(0.01, events.gaussian(1.0), 100)
    ledger.subject("x", budget=Budget(3.0, 1e-5), plan=[step, events.gaussian(10.0)])
    ledger.charge("x", step, stage="finetune")
    ledger.charge("x", events.gaussian(10.0), stage="calibrate")
    rows = Book.of(ledger).table().rows
    assert [row[5] for row in rows] == [None, None]
    assert [row[6] for row in rows] == [None, ledger.spent("x").epsilon]


def test_a_book_outlives_its_ledger(ledger: Ledger) -> None:
    ledger.subject("open", budget=Budget(math.inf, 1e-6))
    ledger.charge("open", events.gaussian(0.0), stage="adapt")
    book = Book.of(ledger)
    assert Book.from_facts(json.loads(json.dumps(plain(book.facts())))) == book
    assert Book.of(book) is book


def test_books_that_are_alike(ledger: Ledger) -> None:
    one = Book.of(ledger, "one")
    other = Book.of(Ledger("sqlite://"), "other")
    assert alike([one, other]) == [one, other]
    assert [book.name for book in alike([one, replace(one, name="two", head="9:ab"), other])] == [
        "one and 1 alike",
        "other",
    ]
    assert heads([one, other]) == [f"one: {ledger.head}"]
    assert heads([other]) == [f"other: {other.head}"]


def test_several_ledgers(ledger: Ledger) -> None:
    """Nobody said that they share nobody: the sum is what holds for a person in all of them."""
    one, other = Book.of(ledger, "one"), Book.of(Ledger("sqlite://"), "two")
    text = overall([one, one, other])
    assert "3 ledgers" in text
    assert f"epsilon {2 * one.epsilon:g}" in text
    table = overview([one, other])
    assert [row[0] for row in table.rows] == ["one", "two"]
    assert table.texts[0][1:4] == ["patient, video", "add-remove, replace-one", "gaussian, pure"]
    assert table.texts[1][-1] == "not durable"
    assert "makes no privacy guarantee" in overall([])


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (events.gaussian(2.0), "Gaussian noise, 2 × the bound"),
        (events.gaussian(2.0, steps=1000), "1,000 times Gaussian noise, 2 × the bound"),
        (events.laplace(0.5), "Laplace noise, 0.5 × the bound"),
        (events.noisy_max(5.0), "a private choice of the best, noise 5 × the bound"),
        (
            events.poisson(0.01, events.gaussian(1.0), 10),
            "10 times Gaussian noise, 1 × the bound, each unit drawn with probability 0.01",
        ),
        (
            events.stream(1.0822, 11730),
            "a stream of 11,730 steps, one release in all: independent noise, 1.082 × the bound",
        ),
        (
            events.stream(2.0, 100, strategy="banded:8", contributions=3, blocks=2),
            "a stream of 2 blocks of 100 steps, one release in all: banded 8 noise, 2 × the bound, "
            "each unit in at most 3 of them",
        ),
        (
            events.passes(1.73435, 40, strategy="full", contributions=4, separation=10),
            "40 steps, one release in all: full noise, 1.734 × the bound, "
            "each unit in at most 4 of them, at least 10 apart, as its id decides",
        ),
        (
            events.passes(2.0, 10, strategy="toeplitz:8"),
            "10 steps, one release in all: toeplitz 8 noise, 2 × the bound, "
            "each unit in one of them, as its id decides",
        ),
        (
            events.schedule([1.0, 2.0, 3.0, 4.0, 5.0]),
            "Gaussian noise, 1 × the bound; Gaussian noise, 2 × the bound; Gaussian noise, 3 × the bound; and 2 more",
        ),
    ],
)
def test_events_in_words(event: events.DpEvent, text: str) -> None:
    assert words.event(events.to_json(event)) == text


def test_an_event_without_words_keeps_its_name() -> None:
    assert words.event({"type": "ZCDpEvent", "rho": 0.5, "xi": 0.0}) == "ZC rho 0.5, xi 0"


@pytest.mark.parametrize(
    ("event", "used", "text"),
    [
        (events.gaussian(50.0, steps=10), 10, "all 10 releases used"),
        (events.gaussian(50.0, steps=10), 4, "4 releases used, the rest returned"),
        (events.stream(50.0, 10), 4, "4 releases used, nothing returned"),  # costs the same from its first step on
        (events.gaussian(50.0), 1, "1 release used"),
    ],
)
def test_what_came_of_a_charge_in_words(event: events.DpEvent, used: int, text: str) -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("clinic", budget=Budget(1.0, 1e-6), neighbours="zero-out")
    ledger.settle(ledger.charge("clinic", event, stage="finetune"), used)
    charged, settled = (entry.body for entry in ledger.entries("clinic") if entry.kind != "subject")
    assert words.settlement(settled, charged) == text
