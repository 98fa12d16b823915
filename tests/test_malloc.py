"""Memory that is freed stays with the process, unless somebody has decided otherwise."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Pages that a block of 64 MB needs when it is asked for again, after the others.
AGAIN = """
import resource, torch
from torch import nn
{before}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    blocks = [torch.ones(1 << 24) for _ in range(3)]
    del blocks
start = faults()
blocks = [torch.ones(1 << 24) for _ in range(3)]
print(faults() - start)
"""
ENGINE = "from tacit.gradients import Engine; Engine(nn.Linear(2, 2), lambda model, rows: model(rows).sum(1), clip=1.0)"
PAGES = 3 * (64 << 20) // 4096

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def faults_of(before: str, **environment: str) -> int:
    """In a process of its own, for the choice is for good."""
    given = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **environment}
    command = [sys.executable, "-c", AGAIN.format(before=before)]
    return int(subprocess.run(command, env=given, check=True, capture_output=True, text=True).stdout)


@glibc
def test_an_engine_keeps_what_was_freed() -> None:
    assert faults_of(ENGINE) < PAGES / 50


@glibc
@pytest.mark.parametrize("name", ["TACIT_MALLOC", "MALLOC_TRIM_THRESHOLD_"])
def test_the_environment_decides(name: str) -> None:
    huge = 512  # where the system serves such blocks by pages of 2 MB
    assert faults_of(ENGINE, **{name: "0" if name == "TACIT_MALLOC" else "131072"}) >= PAGES / huge
