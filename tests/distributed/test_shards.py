"""A model sharded with FSDP2 over two ranks is the model of one process, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tacit.privacy import Budget, Ledger, Neighbours, ReceiptError, Unit, events, mechanisms, rehearsal
from tests.distributed import shards
from tests.distributed.test_ranks import charges, launch


def test_two_shards_make_the_run_of_one_process(tmp_path: Path) -> None:
    """The one process is a rank of its own as well: a group within a test's process could end that with its threads."""
    for ranks, how in ((1, "whole"), (2, "sharded")):
        assert launch(tmp_path / how, ranks, script=Path(shards.__file__), arguments=[how])
    whole, found = (load_file(tmp_path / how / "weights.safetensors") for how in ("whole", "sharded"))
    assert found.keys() == whole.keys()
    for name, value in found.items():
        assert torch.equal(value, whole[name]), name
    assert charges(tmp_path / "sharded") == charges(tmp_path / "whole")


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


def test_the_noise_of_shards_is_for_one_sum_that_was_charged() -> None:
    from tacit.gradients import Engine

    like = Engine(torch.nn.Linear(5, 4), lambda model, batch: model(batch).mean(1), clip=0.3).zero_sum()
    ledger = Ledger("sqlite://")
    ledger.subject("rows", Budget(9.0, 1e-6))
    made = mechanisms.GaussianShards(like, ledger.charge("rows", events.gaussian(3.0), stage="x"))
    assert [name for name, _ in made] == ["weight", "bias"]
    with pytest.raises(ReceiptError, match="drawn already"):
        iter(made)
    tried = rehearsal(events.gaussian(3.0), unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE)
    with pytest.raises(ReceiptError, match="rehearsed"):
        mechanisms.GaussianShards(like, tried)
