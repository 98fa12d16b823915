"""dp-accounting's remarks stay off the screen, and everybody else's stay."""

import subprocess
import sys

REMARK = """
from dp_accounting.rdp import rdp_privacy_accountant
rdp_privacy_accountant.compute_epsilon([2.0], [-1e-9], 1e-5)
"""


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_remarks_of_dp_accounting_are_not_shown() -> None:
    assert "Negative Renyi divergence" in said(REMARK), (
        "dp-accounting itself still says it, so this test tests something"
    )
    assert said("import tacit.privacy\n" + REMARK) == ""


def test_other_uses_of_absl_are_left_alone() -> None:
    assert "mine" in said("import tacit.privacy\nfrom absl import logging\nlogging.warning('mine')")
