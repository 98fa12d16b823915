"""A source: a hospital, say, that holds private outputs and labels, its own ledger and its own budget.

It has to trust no other party. It answers a query with noise that it derives itself, refuses what it cannot afford, and
gives the same question the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tacit._curator import Curator, as_curator
from tacit._deprecation import renamed_argument
from tacit._guard_rails import warn_of_delta
from tacit._json import to_number, to_plain
from tacit._refusals import attempt
from tacit._unit_ids import distinct
from tacit.calibrate._answers import Refused, book_of
from tacit.calibrate._outputs import Outputs
from tacit.calibrate._queries import NOISES, Answer, Price, Query
from tacit.calibrate._search import Ask
from tacit.calibrate._statistics import Noise
from tacit.calibrate._wire import checked, make
from tacit.data import Rows
from tacit.finetune import in_place
from tacit.gradients import in_own_places
from tacit.privacy import (
    Budget,
    Guarantee,
    Ledger,
    LedgerError,
    Neighbours,
    Receipt,
    Unit,
    mechanisms,
    mu_of_pure,
    sampling,
)

Trust = Literal["local", "secure-aggregation"]
TRUSTS: tuple[Trust, ...] = ("local", "secure-aggregation")
_UNREADABLE = (
    "The classifier cannot be run on these batches. Nothing was charged. Details may reveal rows: see curator=."
)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is public about a source before it is asked anything.

    Args:
        source: Its name.
        unit: The privacy unit.
        neighbours: The neighbouring relation.
        noise: "laplace" or "gaussian".
        epsilon: Of its budget.
        delta: Of its budget.
        mode: How its ledger composes.
        left: What the ledger has left: epsilon in the pure mode, mu in the gaussian one.
        classes: The number of classes.
        size: The published number of units, or None.
        durable: Whether its ledger survives the process.
        grouped: Whether the rows of a unit were grouped; if not, one row per unit is assumed.
        trust: "local", or "secure-aggregation": it adds a share of one noise to a total that alone is seen.
        colluding: With secure aggregation: the share of the sources that may collude against it.
    """

    source: str
    unit: str
    neighbours: Neighbours
    noise: Noise
    epsilon: float
    delta: float
    mode: str  # how its ledger composes
    left: float  # what the ledger has left: epsilon in the pure mode, mu in the gaussian one
    classes: int
    size: int | None = None
    durable: bool = True
    grouped: bool = False  # whether the rows of a unit were put together; if not, one row per unit is assumed
    trust: Trust = "local"
    colluding: float = 0.0

    def __post_init__(self) -> None:
        whole = [self.classes] + ([] if self.size is None else [self.size])
        if not all(isinstance(n, int) and n >= 0 for n in whole) or self.noise not in NOISES:
            raise ValueError("The terms of a source state whole numbers of classes and units, and a kind of noise.")
        if not all(isinstance(n, int | float) and n >= 0 for n in (self.epsilon, self.delta, self.left)):
            raise ValueError("The terms of a source state its budget, and what is left of it, as numbers.")
        if self.trust not in TRUSTS or not isinstance(self.colluding, int | float) or not 0 <= self.colluding < 1:
            raise ValueError("The terms of a source state whom it trusts, and a share of colluding sources below 1.")

    def affords(self, price: Price, times: int) -> bool:
        """Whether so many answers at this price would be charged; in modes that cannot be foreseen, yes."""
        if self.mode == "pure":
            return times * price.amount <= self.left * (1 + 1e-9)
        if self.mode == "gaussian":
            mu = price.amount if price.noise == "gaussian" else mu_of_pure(price.amount)
            return times * mu**2 <= self.left**2 * (1 + 1e-9)
        return True

    def to_json(self) -> dict[str, Any]:
        numbers = {name: to_plain(getattr(self, name)) for name in ("epsilon", "left")}
        return asdict(self) | {"neighbours": self.neighbours.value} | numbers

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Terms:
        known = checked(cls, data)
        numbers = {name: to_number(known.get(name)) for name in ("epsilon", "left")}
        return make(cls, {**known, **numbers, "neighbours": Neighbours(str(known.get("neighbours")))})


class Source:
    """Private outputs and labels behind a ledger; `answer` is the only way out.

    Args:
        name: The source's name. Public.
        logits: Logits, rows x classes; or give `probs`.
        probs: Probabilities, rows x classes.
        labels: The true class of each row.
        budget: What may be spent on these data in all.
        ledger: Where answers are charged; without one the source keeps one in memory, which does not survive the
            process.
        answers: A file of this machine, or a database, in which given answers are kept; by default the ledger's. Needed
            if the ledger is behind a service.
        subject: The data set's name in the ledger.
        unit: The kind of unit ("patient"); without `unit_ids` a row is a "sample", and anything else is refused.
        unit_ids: One integer or string per row; all rows with the same id are one unit, which counts by the mean of its
            rows.
        neighbours: The neighbouring relation.
        noise: "laplace" or "gaussian"; by default Laplace for a pure budget.
        size: What the source publishes as its number of units: nothing by default, since under add-remove that number
            is private; under replace-one it is public by definition and stated by default.
        seed: Reproducible noise: "seeded: not private".
        trust: "local": every answer has all the noise that its promise needs, and no other party has to be trusted.
            "secure-aggregation": the source adds a share of one noise, and its promise holds as long as the total alone
            is seen and at most `colluding` of the sources reveal theirs.
        colluding: With secure aggregation: the share of the sources in a total that may collude against this one.

    Raises:
        ValueError: Invalid outputs or labels.

    Examples:
        >>> import torch
        >>> from tacit.calibrate import Gap, Price, Query, Source
        >>> from tacit.privacy import Budget
        >>> clinic = Source("clinic-a", logits=torch.randn(50, 3), labels=torch.arange(50) % 3, budget=Budget(1.0, 0.0))
        >>> query = Query(id="q1", statistic=Gap(temperature=1.5), price=Price(noise="laplace", amount=0.2))
        >>> answer = clinic.answer(query)
        >>> answer.source, round(clinic.spent.epsilon, 6)
        ('clinic-a', 0.2)
    """

    def __init__(
        self,
        name: str,
        *,
        logits: Any = None,
        probs: Any = None,
        labels: Any,
        budget: Budget,
        ledger: Ledger | None = None,
        answers: str | Path | None = None,
        subject: str | None = None,
        unit: Unit | str | None = None,
        unit_ids: Any = None,
        neighbours: Neighbours | str = Neighbours.ADD_REMOVE,
        noise: Noise | None = None,
        units: Any = None,
        size: int | None = None,
        seed: int | None = None,
        trust: Trust = "local",
        colluding: float = 0.5,
    ) -> None:
        unit_ids = renamed_argument("units", units, "unit_ids", unit_ids, where="calibrate.Source")
        self.name, self.budget = name, budget
        self.unit, self.neighbours = _unit(unit, grouped=unit_ids is not None), Neighbours(neighbours)
        self.noise: Noise = noise or ("laplace" if budget.pure else "gaussian")
        if self.noise not in NOISES:
            raise ValueError(f"The noise is one of {', '.join(NOISES)}; got {noise!r}.")
        if self.noise == "gaussian" and budget.pure:
            raise ValueError("Gaussian noise needs a budget with delta above 0; pure epsilon takes Laplace noise.")
        self._outputs = Outputs.of(logits=logits, probs=probs, labels=labels)
        self._units = None if unit_ids is None else distinct(unit_ids, len(self._outputs))[1]
        if size is not None and (not isinstance(size, int) or size < 0):
            raise ValueError(f"The published size is a whole number; got {size!r}.")
        if size is None and self.neighbours is Neighbours.REPLACE_ONE:
            size = len(self._outputs) if self._units is None else len(torch.unique(self._units))
        self.size, self.seed = size, seed
        warn_of_delta(budget.delta, size, str(self.unit))
        if trust not in TRUSTS or not 0 <= colluding < 1:
            raise ValueError(f"A source trusts {' or '.join(TRUSTS)}, and fewer than all others to collude.")
        self.trust: Trust = trust
        self.colluding = colluding if trust != "local" else 0.0
        self.ledger = ledger if ledger is not None else Ledger("sqlite://")
        self.subject = subject or name
        self._book = book_of(self.ledger, answers)
        self._mode = self._declare()

    @classmethod
    def from_model(
        cls, name: str, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], **options: Any
    ) -> Source:
        """A source from a classifier and the batches of (inputs, labels) that it is run on, once, here.

        A row on which the classifier raises has logits that are not finite, and contributes zero to everything; it
        keeps its place in its batch, and no other row's logits depend on it. A `curator=` is called with
        a `tacit.ErrorEvent` for it.
        """
        curator = as_curator(options.pop("curator", None), "Source.from_model")
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                pairs = attempt(_pairs, model, batches, curator, sentence=_UNREADABLE, curator=curator)
        finally:
            model.train(was_training)
        if not pairs:
            raise ValueError("There are no batches: an empty source is made from logits of shape (0, classes).")
        logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return cls(name, logits=logits, labels=labels, **options)

    def _declare(self) -> str:
        """The subject's mode; a subject that another stage declared is shared if its promise is the same."""
        known = self.ledger.open_subject(self.subject, self.budget, unit=self.unit, neighbours=self.neighbours)
        if known.terms.budget != self.budget:
            raise LedgerError(f"The subject {self.subject} has other terms, {known.terms.budget}: choose a new name.")
        return str(known.terms.mode)

    @property
    def terms(self) -> Terms:
        """What may be known before asking: it depends on declarations and charges, not on the data."""
        left = self.ledger.remaining(self.subject)
        return Terms(
            source=self.name,
            unit=str(self.unit),
            neighbours=self.neighbours,
            noise=self.noise,
            epsilon=self.budget.epsilon,
            delta=self.budget.delta,
            mode=self._mode,
            left=left.epsilon if left.mu is None else left.mu,
            classes=self._outputs.classes,
            size=self.size,
            durable=self.ledger.durable,
            grouped=self._units is not None,
            trust=self.trust,
            colluding=self.colluding,
        )

    @property
    def spent(self) -> Guarantee:
        return self.ledger.spent(self.subject)

    def answer(self, query: Query) -> Answer:
        """The statistic with noise. Charged before it is computed, kept before it leaves, the same when asked again.

        Raises ``Refused`` or ``BudgetExceeded`` (nothing charged).

        Formal guarantee: for the source's unit and relation (where a unit that takes another's place brings an id that
        no other unit has), the answer is a Laplace or Gaussian release at the
        query's price: the sum moves by at most the sensitivity that the statistic's type gives (``statistics``), the
        noise is that times 1 / price, and the price is on the ledger before any noise is drawn. All answers together
        stay within the budget, however the questions depended on earlier answers (the ledger's filter). Whether a
        question is refused depends on what was asked and charged before, never on the data.
        """
        if not isinstance(query, Query):
            raise Refused(f"A source answers a Query; got {type(query).__name__}.")
        if self.trust != "local" or query.shares is not None:
            raise Refused(f"{self.name} gives answers or shares, and was asked for the other. Nothing was charged.")
        known = self._begin(query)
        if known is not None:
            return known
        statistic, receipt = query.statistic, self._charge(query)
        total = statistic.sum(self._outputs, self._units)
        release = mechanisms.laplace if self.noise == "laplace" else mechanisms.gaussian_query
        answer = Answer(
            query=query.id,
            source=self.name,
            values=tuple(release(total, receipt).tolist()),
            scale=query.price.scale(statistic, self.neighbours),
            receipt=receipt.id,
            head=receipt.head,
            seeded=receipt.seeded,
        )
        self._book.finish(self.subject, query, answer)
        return answer

    def share(self, query: Query) -> tuple[int, ...]:
        """The statistic with a share of one noise, modulo 2^bits: for a secure aggregation, and never twice.

        Raises ``Refused`` or ``BudgetExceeded`` (nothing charged).

        Formal guarantee: what ``mechanisms.share`` promises, under the assumption that the query states and the source
        accepts: at least ``shares.needed`` sources are in the total, at most a part ``colluding`` of them reveal their
        shares, and only the total is seen. A share is given once: two totals of different sources in which it is the
        same would reveal it. It is charged before anything is drawn.
        """
        shares = query.shares if isinstance(query, Query) else None
        if self.trust == "local" or shares is None:
            raise Refused(f"{self.name} gives answers or shares, and was asked for the other. Nothing was charged.")
        if shares.honest > shares.needed - math.floor(self.colluding * shares.needed + 1e-9):
            raise Refused(
                f"{self.name} reckons with {self.colluding:.0%} of the sources colluding, and the question counts on "
                f"{shares.honest} honest ones of {shares.needed}. Nothing was charged."
            )
        if self._begin(query) is not None:
            raise Refused(f"Query {query.id} had its share already: a share is given once. Ask under a new id.")
        receipt = self._charge(query)
        total = query.statistic.sum(self._outputs, self._units, shares.steps)
        found = mechanisms.share(total, receipt)
        given = Answer(
            query=query.id, source=self.name, values=(), scale=0.0, receipt=receipt.id, head=receipt.head,
            seeded=receipt.seeded,
        )  # fmt: skip
        self._book.finish(self.subject, query, given)  # that it was given, not what
        return tuple(value % (1 << shares.bits) for value in found)

    def _begin(self, query: Query) -> Answer | None:
        if query.price.noise != self.noise:
            raise Refused(f"{self.name} answers with {self.noise} noise, not {query.price.noise}. Nothing was charged.")
        return self._book.begin(self.subject, query)

    def _charge(self, query: Query) -> Receipt:
        try:
            return self.ledger.charge(
                self.subject,
                query.price.event(self.neighbours, query.shares),
                stage="calibrate",
                note=f"{query.statistic.kind}, query {query.id}",
                seed=self.seed,
            )
        except (LedgerError, ValueError):  # both say that nothing was charged
            self._book.abandon(self.subject, query)
            raise

    def exactly(self, asked: Ask) -> Tensor:
        """The statistic without noise, for the curator's own use: what is made of it is not private if shared."""
        total = asked.statistic.at(float(asked.temperatures[0])).sum(self._outputs, self._units)
        return torch.tensor([total.total], dtype=torch.float64) * total.grid

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {self.budget}, {self.noise}, unit {self.unit}, {self.neighbours.value})"


def _unit(unit: Unit | str | None, *, grouped: bool) -> Unit:
    """What a unit is, as far as the rows say whose they are."""
    named = Unit.SAMPLE if unit is None else Unit(unit)
    if named != Unit.SAMPLE and not grouped:
        raise ValueError(
            f"unit={str(named)!r} needs to know whose each row is: give unit_ids, one integer or string per row (all "
            "of them different, if each has one row)."
        )
    if named == Unit.SAMPLE and grouped:
        raise ValueError("Rows have owners, so a unit is more than a sample: say what with unit=, such as 'patient'.")
    return named


def _pairs(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], curator: Curator | None
) -> list[tuple[Tensor, Tensor]]:
    def logits(rows: Rows, mute: Tensor | None) -> Tensor:
        found: Tensor = in_own_places(model, rows.inputs, len(rows.labels)).detach().cpu()
        return found if mute is None else found.masked_fill(mute.cpu()[:, None], math.nan)

    found = []
    with sampling.fresh_randomness():  # what a model draws itself goes by position, and must stay unknown
        for inputs, labels in batches:
            rows = Rows(inputs, labels, torch.arange(len(labels), device=inputs.device))
            found.append((in_place(logits, rows, None, curator), labels.cpu()))
    return found
