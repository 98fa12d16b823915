"""Private training over ranks: the throughput of two ranks of one thread each beside one rank of one thread.

Launches of one and of two ranks take turns on loopback (gloo); each makes a few steps of DP-SGD on the same small ViT
and the same Poisson draws, and the median step counts. An adapter is timed as well. Two runs of one rank each at the
same time, which share nothing, show what the machine allows: its cores may share caches, memory and their clock.
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


def start(ranks: int, count: int, file: str) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    settings = os.environ | group | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "--rank", file, "--steps", str(count)]
    return [subprocess.Popen(command, env=settings | {"RANK": str(each)}) for each in range(ranks)]


def launch(ranks: int, count: int, runs: int = 1) -> dict[str, float]:
    """The median seconds of a step, without the first, in which the model is checked; of several runs at once, a run's
    share of it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{run}.json" for run in range(runs)]
        if any(process.wait() for process in [each for file in files for each in start(ranks, count, file)]):
            raise SystemExit("A rank failed.")
        found = [json.loads(Path(file).read_text()) for file in files]
    medians = [{name: statistics.median(seconds[1:]) for name, seconds in each.items()} for each in found]
    return {name: 1 / sum(1 / each[name] for each in medians) for name in medians[0]}


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
    ways = {"one": (1, 1), "two": (2, 1), "apart": (1, 2)}  # ranks, runs at a time
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way, (ranks, runs) in ways.items():
            found[way].append(launch(ranks, options.steps, runs))
    table = Table("work", "one rank, examples/s", "two ranks, examples/s", "ratio", "two runs apart")
    results = {}
    for name in found["one"][0]:
        one, two = (BATCH / statistics.median(each[name] for each in found[way]) for way in ("one", "two"))
        ratios, limits = (
            [a[name] / b[name] for a, b in zip(found["one"], found[way], strict=True)] for way in ("two", "apart")
        )
        results[name] = {"one": one, "two": two, "ratios": ratios, "apart": limits}
        shown = [f"{statistics.median(each):.2f} ({min(each):.2f} at least)" for each in (ratios, limits)]
        table.add_row(name, f"{one:.1f}", f"{two:.1f}", *shown)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
