"""Private training over ranks: the throughput of two ranks of one thread each beside one rank of one thread.

One rank, two ranks and two runs of one rank each wait side by side on loopback (gloo), and in each round every one of
them makes one step of DP-SGD on the same small ViT, in an order shuffled anew, while the others stand still: a slow
minute of the machine slows both sides of a ratio (see `paired`). An adapter is timed as well. The two runs, which share
nothing, show what the machine allows: its cores may share caches, memory and their clock. It needs two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from models import ViT
from paired import paired_ratio
from tacit import Ledger, adapt, make_private

BATCH = 128
WARM = 2  # rounds that do not count: the model is checked in the first
WAYS = {"one": (1, 1), "two": (2, 1), "apart": (1, 2)}  # ranks of a run, runs at a time


def training(count: int) -> tuple[Callable[[Any], object], Iterator[Any]]:
    """A private training step and its batches."""
    torch.manual_seed(0)
    model = ViT()
    rows = TensorDataset(torch.randn(2_000, 3, 28, 28), torch.arange(2_000) % 10)
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(rows, batch_size=BATCH),
        nn.CrossEntropyLoss(),
        epsilon=3.0,
        delta=1e-6,
        steps=count,
        clip=1.0,
        ledger=Ledger("sqlite://"),
        seed=0,
    )
    return private.step, iter(private)


def adapting(count: int) -> tuple[Callable[[Any], object], Iterator[Any]]:
    """A step of a private adapter and its batches."""
    torch.manual_seed(0)
    privacy = adapt.DP(epsilon=3.0, delta=1e-6, clip=1.0)
    adapter = adapt.Tent(ViT(), privacy=privacy, batch_size=BATCH, lr=0.01, ledger=Ledger("sqlite://"), seed=0)
    return adapter, (torch.randn(BATCH, 3, 28, 28) for _ in range(count))


WORKS = {"training": training, "adapting": adapting}


def rank(work: str, count: int) -> None:
    """What is started for each rank, with the variables that torchrun sets: a step for every line that it reads."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    step, batches = WORKS[work](count)
    for _ in range(count):
        batch = next(batches)
        sys.stdin.readline()
        distributed.barrier()
        start = time.perf_counter()
        step(batch)
        distributed.barrier()
        print(time.perf_counter() - start, flush=True)
    distributed.destroy_process_group()


class Run:
    """The ranks of one run, which wait for a word before every step.

    Args:
        work: What they do.
        ranks: How many there are.
        count: Steps in all.
    """

    def __init__(self, work: str, ranks: int, count: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        settings = os.environ | group | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--rank", work, "--rounds", str(count)]
        self.processes = [
            subprocess.Popen(
                command, env=settings | {"RANK": str(each)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for each in range(ranks)
        ]

    def start(self) -> None:
        """Begin a step."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def wait(self) -> float:
        """Seconds of the step that was begun."""
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            raise SystemExit("A rank failed.")
        return float(lines[0])


def measure(work: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by way, round by round; of several runs at once, a run's share of it."""
    runs = {way: [Run(work, ranks, rounds + WARM) for _ in range(at_once)] for way, (ranks, at_once) in WAYS.items()}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + WARM):
        for way in random.sample(list(WAYS), len(WAYS)):
            for run in runs[way]:
                run.start()
            found[way].append(1 / sum(1 / run.wait() for run in runs[way]))
    if any(process.wait() for each in runs.values() for run in each for process in run.processes):
        raise SystemExit("A rank failed.")
    return {way: seconds[WARM:] for way, seconds in found.items()}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="distributed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="steps of each way")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--rank", choices=WORKS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        rank(options.rank, options.rounds)
        return
    table = Table("work", "one rank, examples/s", "two ranks, examples/s", "two ranks", "two runs apart")
    results = {}
    for work in WORKS:
        found = measure(work, options.rounds)
        ratios = {way: paired_ratio(found["one"], found[way]) for way in ("two", "apart")}
        shown = [f"{BATCH / sorted(found[way])[options.rounds // 2]:.1f}" for way in ("one", "two")]
        table.add_row(work, *shown, *map(str, ratios.values()))
        results[work] = found
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
