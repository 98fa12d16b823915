"""Matrix products that round a row in the same way wherever it stands in a batch.

By default MKL adds up a row in an order that depends on its address. Where the rows of a small layer are no multiple of
16 bytes long, whoever comes or goes moves all others to other addresses and changes their last bits; behind a ReLU at
zero, or where two classes tie, these decide about a whole contribution. MKL's switch for reproducible results prevents
it, at no cost that was measured, if it is set before the first product: `import tacit` sets it, unless the environment
has one.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

from tacit._guard_rails import GuardRailWarning

_SHAPES = ((10, 4), (65, 10), (6, 24))  # features and outputs, of which MKL rounds the first two going forward
_ROWS = 32


@cache
def rounds_alike() -> bool:
    """Whether products have the same bits for a row in the next place, in shapes where MKL's own choice has not."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for features, outputs in _SHAPES:
            drawn = torch.randn(outputs + _ROWS + 1, features, generator=generator, dtype=torch.float32)
            weight, rows = drawn[:outputs].clone(), drawn[outputs:].clone()
            for factor, given in ((weight.T, rows), (weight, rows @ weight.T)):
                if not torch.equal((given @ factor)[1:], given[1:].clone() @ factor):
                    return False
    return True


@cache
def warn_unless_alike() -> None:
    """Say once that who comes or goes changes everybody's last bits here."""
    if not rounds_alike():
        warnings.warn(
            "Matrix products round a row by its place in the batch here, so one person more or less can change what "
            "others contribute, behind a ReLU by more than rounding. Import tacit before torch multiplies for the "
            "first time, and leave MKL_CBWR alone.",
            GuardRailWarning,
            stacklevel=2,
        )
