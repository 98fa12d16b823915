"""The quick version of `make audit`: every registered audit with a fiftieth of its trials. Nothing may be broken.

False alarms: some fifty findings of 1e-9 or 1e-8 each, below 1e-6 in all.
"""

import warnings

import pytest

from tacit.audit import QUICK, REGISTRY


@pytest.mark.parametrize("name", REGISTRY)
def test_nothing_is_found_beyond_what_is_claimed(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(REGISTRY[name].attack(QUICK))
    assert found
    for finding in found:
        assert finding.holds, str(finding)
