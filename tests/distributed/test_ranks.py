"""Several ranks make the run of one: the same released weights, one charge, and nothing released without it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tacit.distributed import team
from tacit.distributed._team import grid_of
from tacit.privacy import Ledger
from tests.distributed.ranks import adapted, fit, own_loop, probe

SCRIPT = Path(__file__).with_name("ranks.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
# A new store at every restart: else gloo may find the address of a dead process in the old one, and wait. Its port is
# chosen before it is opened, so on a busy machine another process may have it by then: that is tried again.
RESTARTED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launch(
    folder: Path,
    ranks: int,
    *,
    dies: str = "never",
    restarts: int = 0,
    script: Path = SCRIPT,
    arguments: Sequence[str] | None = None,
) -> bool:
    """torchrun on loopback; whether all ranks ended well, after so many restarts by its agent at most."""
    folder.mkdir(exist_ok=True)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command.append(f"--max-restarts={restarts}")
    path = os.pathsep.join([str(root), *sys.path])
    for _ in range(3):
        done = subprocess.run(
            [*command, str(script), str(folder), *(["4", dies] if arguments is None else arguments)],
            env=os.environ | ENVIRONMENT | (RESTARTED if restarts else {}) | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=900,
        )
        if "EADDRINUSE" not in done.stderr:
            break
    print(done.stderr[-6000:])  # shown if the test fails
    assert done.returncode == 0 or "ChildFailedError" in done.stderr
    return done.returncode == 0


def weights(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"rank{rank}.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def charges(folder: Path, name: str = "ledger") -> list[tuple[str, Any]]:
    entries = Ledger(f"sqlite:///{folder}/{name}.db").entries()
    return [(e.kind, e.body.get("cost", e.body.get("used"))) for e in entries if e.kind in ("charge", "settle")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that was not killed."""
    folder = tmp_path_factory.mktemp("two")
    assert launch(folder, 2)
    return folder


def test_one_two_and_four_ranks_release_the_same_bits(two: Path, tmp_path: Path) -> None:
    for ranks in (1, 4):
        assert launch(tmp_path / str(ranks), ranks)
    first = weights(tmp_path / "1", 0)
    for ranks, folder in ((2, two), (4, tmp_path / "4")):
        for rank in range(ranks):
            assert same(first, weights(folder, rank)), f"rank {rank} of {ranks}"
        for name, entries in (("ledger", 2), ("own", 2), ("stream", 1), ("probe", 4), ("paid", 1)):
            assert charges(folder, name) == charges(tmp_path / "1", name)
            assert len(charges(folder, name)) == entries
        facts = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        assert all(each == facts[0] for each in facts)
        assert [step for step, _ in facts[0]["history"]] == [2, 4]
        assert facts[0]["history"] == json.loads((tmp_path / "1" / "rank0.json").read_text())["history"]


def killed(folder: Path, two: Path, dies: str) -> None:
    """A rank dies in the third step; torchrun's agent ends the others and starts all again, and the run resumes."""
    assert launch(folder, 2, dies=dies, restarts=1)
    killed_run(folder, two)


def killed_run(folder: Path, two: Path) -> None:
    """What a run left in which a rank had died, beside one in which none had."""
    assert (folder / "died").exists()
    assert same({n: value for n, value in weights(two, 0).items() if n.startswith("fit.")}, weights(folder, 0))
    assert same(weights(folder, 0), weights(folder, 1))
    assert charges(two) == charges(folder)
    Ledger(f"sqlite:///{folder}/ledger.db").verify()


def test_a_killed_leader_changes_nothing(two: Path, tmp_path: Path) -> None:
    killed(tmp_path, two, "leader")


@pytest.mark.slow
def test_a_killed_follower_changes_nothing(two: Path, tmp_path: Path) -> None:
    killed(tmp_path, two, "follower")


def test_it_is_the_run_of_one_process(two: Path, tmp_path: Path) -> None:
    """The same charges, and weights that differ by rounding and, in training mode, by what dropout draws."""
    fitted, private, (stepped, logits) = fit(tmp_path, 4), own_loop(tmp_path), adapted(tmp_path)
    probed, found = probe(tmp_path), weights(two, 0)
    for name, parameter in probed.model.named_parameters():
        assert torch.allclose(parameter, found[f"probe.{name}"], rtol=1e-4, atol=1e-5)
    for name in ("ledger", "own", "stream", "probe"):
        assert charges(tmp_path, name) == charges(two, name)
    for name, parameter in fitted.model.named_parameters():
        assert torch.allclose(parameter, found[f"fit.{name}"], atol=0.2)
    for name, parameter in private.model.named_parameters():
        assert torch.allclose(parameter, found[f"own.{name}"], atol=0.2)
    for name, parameter in stepped.model.named_parameters():
        assert torch.allclose(parameter, found[f"stream.{name}"], rtol=1e-5, atol=1e-6)
    for step, values in enumerate(logits):
        assert torch.allclose(values, found[f"logits.{step}"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_without_restarts_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    assert not launch(tmp_path, 2, dies="leader")
    assert (tmp_path / "died").exists()
    assert not (tmp_path / "rank0.safetensors").exists()
    assert [kind for kind, _ in charges(tmp_path)] == ["charge"]  # what was released is charged, and not settled


@pytest.mark.slow
def test_a_refusal_of_the_first_rank_ends_all_of_them(two: Path) -> None:
    """The ledger cannot pay again: no rank waits for the others, and no rank is charged."""
    before = charges(two)
    assert not launch(two, 2)
    assert charges(two) == before


def test_sums_are_integers_whatever_the_order() -> None:
    """The grid's rounding, against a plain sum: within what the docstring says."""
    torch.manual_seed(0)
    parts = [torch.randn(50, dtype=torch.float64) * 10.0**k for k in range(-6, 1)]
    grid = grid_of(0.7)
    assert grid == 2.0**-44
    forth = sum((part / grid).round().long() for part in parts)
    back = sum((part / grid).round().long() for part in reversed(parts))
    assert isinstance(forth, torch.Tensor)
    assert torch.equal(forth, torch.as_tensor(back))
    error = (forth.double() * grid - torch.stack(parts).sum(0)).norm()
    assert error <= len(parts) * 50**0.5 * grid


def test_ranks_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ValueError, match="init_process_group"):
        team()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert team() is None


def test_ranks_with_rows_in_another_order_are_refused(tmp_path: Path) -> None:
    """Files that a machine lists in its own order: unit 3 here is unit 7 there, and one unit is in a step twice."""
    assert not launch(tmp_path / "other", 2, arguments=["1", "shuffles"])
    assert not (tmp_path / "other" / "own.db").exists() or not charges(tmp_path / "other", "own")
