"""A model sharded with FSDP2 over two ranks is the model of one process, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from tacit.privacy import Budget, Ledger, events, mechanisms
from tests.distributed import shards
from tests.distributed.test_ranks import charges, launch


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A group of one process."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield tmp_path
    distributed.destroy_process_group()


def test_two_shards_make_the_run_of_one_process(alone: Path) -> None:
    whole = shards.run(alone, sharded=False)
    folder = alone / "two"
    assert launch(folder, 2, script=Path(shards.__file__), arguments=["sharded"])
    found = load_file(folder / "weights.safetensors")
    expected = dict(whole.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert charges(folder) == charges(alone)


@pytest.mark.parametrize("sizes", [[5], [300_000, 1, 0, 262_145], [7, 262_144, 262_144, 3]])
def test_normals_in_parts_are_those_of_the_whole(sizes: list[int]) -> None:
    """Across the limits of what is drawn at a time (2^18), and for odd numbers."""
    from tacit.privacy._noise import NoiseKey

    key = NoiseKey(seed=4)
    parts = list(key.normals_in_parts(3, sizes))
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), key.normals(3, sum(sizes)))


def test_a_release_in_shards_has_the_bits_of_the_whole() -> None:
    from tacit.gradients import Engine

    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)  # noqa: E731
    torch.manual_seed(0)
    total = Engine(torch.nn.Linear(5, 4), loss, clip=0.3)((torch.randn(9, 5), torch.randn(9, 4)))
    found = []
    for ledger in (Ledger("sqlite://"), Ledger("sqlite://")):
        ledger.subject("rows", Budget(9.0, 1e-6))
        found.append(ledger.charge("rows", events.gaussian(3.0), stage="x", seed=8))
    whole = mechanisms.gaussian(total, found[0])
    made = mechanisms.GaussianShards(total, found[1])
    assert found[1].used == 1, "consumed before any noise is drawn"
    for name, noise in made:
        parts = zip(total.sum[name].split(3), noise.split(3), strict=True)
        released = torch.cat([mechanisms.add_shard(value, drawn, made.grids[name]) for value, drawn in parts])
        assert torch.equal(released, whole[name])
