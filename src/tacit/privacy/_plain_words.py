"""A guarantee in the words of somebody who has to decide whether it is enough: who, from what, how strongly."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from scipy.special import ndtr

GRADES = ((60.0, "strong"), (75.0, "moderate"), (90.0, "weak"))  # right guesses out of 100 up to which it is called so


@dataclass(frozen=True, kw_only=True)
class PlainWords:
    """Three answers, a sentence or three each.

    Args:
        who: Who is protected.
        what: From what.
        strength: How strongly.
    """

    who: str
    what: str
    strength: str

    def __str__(self) -> str:
        return f"Who is protected: {self.who} From what: {self.what} How strongly: {self.strength}"

    @property
    def lines(self) -> list[tuple[str, str]]:
        return [("Who is protected", self.who), ("From what", self.what), ("How strongly", self.strength)]

    def html(self) -> str:
        """A definition list."""
        rows = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in self.lines)
        return f"<dl>{rows}</dl>"


def right_guesses(epsilon: float, delta: float, mu: float | None = None) -> float:
    """How often, out of 100, somebody who tells two equally likely data sets apart by what was released can be right.

    Formal guarantee: under (epsilon, delta) the total variation distance between the releases of two neighbouring data
    sets is at most (e^epsilon - 1 + 2 delta)/(e^epsilon + 1) (Kairouz, Oh & Viswanath 2015, remark 2.2), and a guess
    between two equally likely ones is right with probability (1 + distance)/2 at best. Under mu it is Phi(mu/2) (Dong,
    Roth & Su 2022). Both are upper bounds; the smaller is returned.

    Args:
        epsilon: The guarantee's epsilon.
        delta: Its delta.
        mu: Its Gaussian parameter, where there is one.

    Returns:
        An upper bound on the attacker's success, in percent; 50 is a coin toss.

    Examples:
        >>> from tacit.privacy import right_guesses
        >>> round(right_guesses(1.0, 0.0), 1)
        73.1
    """
    odds = math.exp(-epsilon) if epsilon < 700 else 0.0
    chance = (1 + delta * odds) / (1 + odds)
    if mu is not None:
        chance = min(chance, float(ndtr(mu / 2)))
    return 100 * min(1.0, chance)


def plain_words(
    *,
    epsilon: float,
    delta: float,
    mu: float | None,
    unit: str,
    relation: str | None,
    private: bool,
    charged: bool = True,
) -> PlainWords:
    """The words for a guarantee; `relation` is that of the neighbours, None if several are mixed.

    Args:
        epsilon: The guarantee's epsilon.
        delta: Its delta.
        mu: Its Gaussian parameter, where there is one.
        unit: What one unit is.
        relation: The neighbouring relation; None if several are mixed.
        private: False for results without noise.
        charged: Whether anything was charged at all.

    Returns:
        Three answers: who is protected, from what, and how strongly.
    """
    if not private:
        reason = "Nothing is promised to anybody."
        return PlainWords(
            who="No one.",
            what=f"{reason} Treat everything that was released as if the data themselves were in it.",
            strength="Not at all: there was no noise, or noise that others can draw again.",
        )
    if not charged:
        return PlainWords(
            who="Everybody whose data this ledger is for.",
            what="Nothing was released on it yet.",
            strength="Completely, so far.",
        )
    if unit == "sample":
        who = "Every single row of the data. Somebody with several rows is protected for each row, not for all of them."
    else:
        who = f"Every {unit} in the data, with all rows of that {unit} together."
    used = relation != "replace-one"
    doubt = f"whether the data of one {unit} were used" if used else f"what the data of one {unit} were"
    what = (
        "Whoever sees what was released (the model, its predictions for others, reports) and wants to find out "
        f"{doubt}, even if they know all other data. What is true of people in general can still be learned."
    )
    two = "were used, or were not" if used else "were one thing, or another"
    shown = math.ceil(right_guesses(epsilon, delta, mu) * 10 - 1e-9) / 10
    grade = next((word for bound, word in GRADES if shown <= bound), "very weak")
    strength = (
        f"Say somebody has narrowed it down to a coin toss: the data of one {unit} {two}. Guessing blindly they are "
        f"right 50 times out of 100. With all that was released they are right at most {shown:g} times out of 100. "
        f"That is {grade} protection."
    )
    return PlainWords(who=who, what=what, strength=strength)
