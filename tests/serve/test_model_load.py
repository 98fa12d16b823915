"""A bounded load on an adapting service: every request is answered, in the end, and every row is accounted for."""

import asyncio
import os
import time
from pathlib import Path

import httpx
import pytest

from tacit.privacy import Ledger
from tests.serve.conftest import free_port
from tests.serve.test_model_kills import start
from tests.serve.test_model_service import question, rows

METRICS = ("tacit_steps", "tacit_waiting_rows", "tacit_adapting")


async def ask(client: httpx.AsyncClient, number: int) -> tuple[int, int, float]:
    """One request, asked again while the service says that it is full: (its number, refusals, seconds)."""
    sent = question(rows(1, number), unit_id=str(number)) | {"id": str(number)}
    refused, begun = 0, time.monotonic()
    while True:
        answer = await client.post("/v2/models/model/infer", json=sent)
        if answer.status_code == 429:
            refused += 1
            await asyncio.sleep(min(0.05 * refused, 1.0))
            continue
        assert answer.status_code == 200, answer.text
        said = answer.json()
        assert len(said["outputs"][0]["data"]) == 10
        return int(said["id"]), refused, time.monotonic() - begun


async def load(url: str, requests: int, clients: int) -> list[tuple[int, int, float]]:
    limits, gate = httpx.Limits(max_connections=clients), asyncio.Semaphore(clients)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:

        async def one(number: int) -> tuple[int, int, float]:
            async with gate:
                return await ask(client, number)

        return await asyncio.gather(*(one(number) for number in range(requests)))


def under_load(folder: Path, requests: int, clients: int) -> None:
    port = free_port()
    process = start(folder, port, "--queue", "16")
    try:
        begun = time.monotonic()
        found = asyncio.run(load(f"http://127.0.0.1:{port}", requests, clients))
        seconds = time.monotonic() - begun
        assert sorted(number for number, _, _ in found) == list(range(requests)), "a request was lost"
        for _ in range(600):  # until what waits was used
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60.0)
            assert answer.status_code == 200, answer.text
            metrics = dict(line.split() for line in answer.text.splitlines() if line.startswith(METRICS))
            waiting, steps = float(metrics["tacit_waiting_rows"]), float(metrics["tacit_steps"])
            if waiting == 0 and steps >= requests / 4:  # the last batch waits no longer before its step is done
                break
            time.sleep(0.05)
        assert float(metrics["tacit_adapting"]) == 1
        # batches of four, or fewer after the wait: every row was in one
        assert requests / 4 <= float(metrics["tacit_steps"]) <= requests
        slowest = sorted(each for _, _, each in found)[int(0.99 * (requests - 1))]
        refused = sum(times for _, times, _ in found)
        print(f"{requests / seconds:.0f} requests/s, 99% within {slowest:.2f} s, {refused} refused for now")
    finally:
        process.kill()
    ledger = Ledger(str(folder / "ledger.db"))
    ledger.verify()
    assert [entry.kind for entry in ledger.entries()].count("charge") == 1


@pytest.mark.slow
def test_a_small_load_loses_nothing(tmp_path: Path) -> None:
    under_load(tmp_path, requests=40, clients=8)


@pytest.mark.slow
def test_a_load_loses_nothing(tmp_path: Path) -> None:
    under_load(tmp_path, requests=int(os.environ.get("TACIT_LOAD", "3000")), clients=32)
