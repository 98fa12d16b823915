"""What is promised and what is spent: budgets, accounting, the ledger and the mechanisms that draw noise."""

from tacit.privacy import _wire, accounting, correlated, events, leases, mechanisms, selection
from tacit.privacy._book import Book as Book
from tacit.privacy._book import Charge as Charge
from tacit.privacy._book import Charged as Charged
from tacit.privacy._book import DatabaseBook as DatabaseBook
from tacit.privacy._budget import Budget, Guarantee, Neighbours, Unit, delta_of, epsilon_of, mu_of
from tacit.privacy._budget import mu_of_pure as mu_of_pure
from tacit.privacy._budget import round_up as round_up
from tacit.privacy._chain import Entry as Entry
from tacit.privacy._chain import LedgerDamaged
from tacit.privacy._filters import Mode
from tacit.privacy._filters import Terms as Terms
from tacit.privacy._filters import from_units as from_units
from tacit.privacy._ledger import Ledger
from tacit.privacy._ledger import ledger_of as ledger_of
from tacit.privacy._noise import NoiseKey as NoiseKey
from tacit.privacy._plain_words import PlainWords, plain_words, right_guesses
from tacit.privacy._queries import BoundedSum, GridSum, grid_sum
from tacit.privacy._quiet import quiet_dp_accounting
from tacit.privacy._receipt_state import released as released
from tacit.privacy._receipts import Receipt, ReceiptError
from tacit.privacy._receipts import check_used as check_used
from tacit.privacy._receipts import claim as claim
from tacit.privacy._rehearsal import rehearsal as rehearsal
from tacit.privacy._repricing import PricedTooLow, Underpriced
from tacit.privacy._storage import LedgerError
from tacit.privacy._storage import connect as connect
from tacit.privacy._subject import OtherTerms
from tacit.privacy._subject import Subject as Subject
from tacit.privacy._subject import canonical as canonical
from tacit.privacy._totals import MEMBERSHIP as MEMBERSHIP
from tacit.privacy._totals import BudgetExceeded, Remaining
from tacit.privacy.accounting import UnsupportedEvent, guarantee, noise_multiplier

__all__ = [
    "BoundedSum",
    "Budget",
    "BudgetExceeded",
    "GridSum",
    "Guarantee",
    "Ledger",
    "LedgerDamaged",
    "LedgerError",
    "Mode",
    "Neighbours",
    "OtherTerms",
    "PlainWords",
    "PricedTooLow",
    "Receipt",
    "ReceiptError",
    "Remaining",
    "Underpriced",
    "Unit",
    "UnsupportedEvent",
    "accounting",
    "correlated",
    "delta_of",
    "epsilon_of",
    "events",
    "grid_sum",
    "guarantee",
    "leases",
    "mechanisms",
    "mu_of",
    "noise_multiplier",
    "plain_words",
    "right_guesses",
    "selection",
]

wire = _wire  # for tacit.serve alone
quiet_dp_accounting()
