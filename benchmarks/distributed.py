"""Private training over ranks: the throughput of two ranks of one thread each beside one rank of one thread.

Launches of one and of two ranks take turns on loopback (gloo); each makes a few steps of DP-SGD on the same small ViT
and the same Poisson draws, and the median step counts. An adapter is timed as well.
It needs two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from models import ViT
from tacit import Ledger, adapt, make_private

BATCH = 128


def steps(count: int) -> list[float]:
    """Seconds of each private training step on this rank."""
    torch.manual_seed(0)
    model = ViT()
    rows = TensorDataset(torch.randn(2_000, 3, 28, 28), torch.arange(2_000) % 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(
        model,
        optimizer,
        DataLoader(rows, batch_size=BATCH),
        nn.CrossEntropyLoss(),
        epsilon=3.0,
        delta=1e-6,
        steps=count,
        clip=1.0,
        ledger=Ledger("sqlite://"),
        seed=0,
    )
    return _timed(private.step, iter(private), count)


def stream(count: int) -> list[float]:
    """Seconds of each step of a private adapter."""
    torch.manual_seed(0)
    privacy = adapt.DP(epsilon=3.0, delta=1e-6, clip=1.0)
    adapter = adapt.Tent(ViT(), privacy=privacy, batch_size=BATCH, lr=0.01, ledger=Ledger("sqlite://"), seed=0)
    return _timed(adapter, (torch.randn(BATCH, 3, 28, 28) for _ in range(count)), count)


def _timed(step, given, count: int) -> list[float]:  # type: ignore[no-untyped-def]
    found = []
    for _ in range(count):
        batch = next(given)
        distributed.barrier()
        start = time.perf_counter()
        step(batch)
        distributed.barrier()
        found.append(time.perf_counter() - start)
    return found


def rank(file: str, count: int) -> None:
    """What is started for each rank, with the variables that torchrun sets."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {"training": steps(count), "adapting": stream(count)}
    if distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    distributed.destroy_process_group()


def launch(ranks: int, count: int) -> dict[str, float]:
    """The median seconds of a step, without the first, which is checked and learnt on."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        free.close()
        settings = os.environ | group | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--rank", file.name, "--steps", str(count)]
        started = [subprocess.Popen(command, env=settings | {"RANK": str(each)}) for each in range(ranks)]
        if any(process.wait() for process in started):
            raise SystemExit("A rank failed.")
        return {name: statistics.median(each[1:]) for name, each in json.loads(Path(file.name).read_text()).items()}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="distributed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps of a launch")
    parser.add_argument("--repeats", type=int, default=3, help="launches of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--rank", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        rank(options.rank, options.steps)
        return
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(options.repeats):
        for ranks, seen in found.items():
            seen.append(launch(ranks, options.steps))
    table = Table("work", "one rank, examples/s", "two ranks, examples/s", "ratio", title="ranks of one thread each")
    results = {}
    for name in found[1][0]:
        one, two = (BATCH / statistics.median(each[name] for each in found[ranks]) for ranks in (1, 2))
        ratios = [a[name] / b[name] for a, b in zip(found[1], found[2], strict=True)]
        results[name] = {"one": one, "two": two, "ratios": ratios}
        table.add_row(name, f"{one:.1f}", f"{two:.1f}", f"{statistics.median(ratios):.2f} ({min(ratios):.2f} at least)")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
