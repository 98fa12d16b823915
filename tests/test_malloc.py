"""Memory that is freed stays with the process, unless somebody has decided otherwise."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tacit import _malloc

# Pages that twelve blocks of 16 MB need when they are asked for again.
AGAIN = """
import resource, torch
from torch import nn
{before}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    blocks = [torch.ones(1 << 22) for _ in range(12)]
    del blocks
start = faults()
blocks = [torch.ones(1 << 22) for _ in range(12)]
print(faults() - start)
"""
ENGINE = "from tacit.gradients import Engine; Engine(nn.Linear(2, 2), lambda model, rows: model(rows).sum(1), clip=1.0)"
PAGES = 12 * (16 << 20) // 4096

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def faults_of(before: str) -> int:
    """In a process of its own, for the choice is for good."""
    given = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", AGAIN.format(before=before)]
    return int(subprocess.run(command, env=given, check=True, capture_output=True, text=True).stdout)


@glibc
def test_an_engine_keeps_what_was_freed() -> None:
    assert faults_of(ENGINE) < PAGES / 50


@pytest.mark.parametrize("name", ["TACIT_MALLOC", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_environment_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    monkeypatch.setattr("ctypes.CDLL", None)  # nothing is asked, then
    assert not _malloc.keep_freed_memory.__wrapped__()
