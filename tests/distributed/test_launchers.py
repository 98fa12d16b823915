"""Accelerate, the Trainer of transformers and Fabric under torchrun: no extra code, and the run of one rank."""

import json
from pathlib import Path

import pytest

from tests.distributed.test_ranks import charges, launch, same, weights

SCRIPT = Path(__file__).with_name("launchers.py")


@pytest.mark.slow
def test_other_libraries_launch_several_ranks(tmp_path: Path) -> None:
    for ranks in (1, 2):
        assert launch(tmp_path / str(ranks), ranks, script=SCRIPT, arguments=[])
    assert json.loads((tmp_path / "2" / "rank1.json").read_text()) == {"ranks": 2}
    first = weights(tmp_path / "1", 0)
    for rank in range(2):
        assert same(first, weights(tmp_path / "2", rank))
    for name in ("accelerate", "trainer", "fabric"):
        assert charges(tmp_path / "2", name) == charges(tmp_path / "1", name)
        assert [kind for kind, _ in charges(tmp_path / "2", name)] == ["charge", "settle"]
