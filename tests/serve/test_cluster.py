"""One replica learns, several predict: with Ray itself, in an environment of its own."""

import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tacit import Ledger, adapt
from tacit.models import embedded
from tacit.serve import Rules, cluster_application
from tests.patient_ray import be_patient

ROWS = 4


def test_without_ray_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'tacit\[cluster,serve\]'"):
        cluster_application(embedded, lambda model: adapt.Tent(model), torch.zeros(1, 28, 28), tmp_path)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two replicas that predict, on loopback."""
    ray = be_patient(monkeypatch)
    from ray import serve

    url = f"sqlite:///{tmp_path}/ledger.db"

    def adapter(model: torch.nn.Module) -> adapt.Adapter:
        privacy = adapt.DP(epsilon=5.0, delta=1e-6, clip=0.5)
        return adapt.Tent(model, privacy=privacy, batch_size=ROWS, lr=0.05, ledger=Ledger(url), subject="ward")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(
        cluster_application(
            embedded,
            adapter,
            torch.zeros(1, 28, 28),
            tmp_path / "state",
            replicas=2,
            rules=Rules(wait=0.2, every=1),
            refresh=0.1,
            cpus=0.5,
        )
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def ask(service: str, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    images = torch.rand(ROWS, 1, 28, 28, generator=torch.Generator().manual_seed(seed))
    data = images.flatten().tolist()
    given = {"inputs": [{"name": "input", "shape": list(images.shape), "datatype": "FP32", "data": data}]}
    answer = httpx.post(f"{service}/v2/models/model/infer", json=given, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return images, dict(answer.json())


def until(service: str, version: int) -> int:
    """Ask until some answer has at least this version; how many requests that took."""
    for number in range(400):
        if int(ask(service, number)[1]["model_version"]) >= version:
            return number + 1
        time.sleep(0.05)
    raise AssertionError(f"no answer has version {version}")


@pytest.mark.cluster
def test_one_replica_learns_and_two_predict_what_it_released(service: str, tmp_path: Path) -> None:
    import ray

    asked = until(service, 3)
    for seed in range(8):  # of both replicas: predictions are those of the version that they name
        images, said = ask(service, 1000 + seed)
        model = embedded().eval()
        values = load_file(tmp_path / "state" / "versions" / f"{int(said['model_version']):08d}.safetensors")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
            expected = model(images).flatten()
        assert torch.allclose(torch.tensor(said["outputs"][0]["data"]), expected, atol=1e-4)
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    assert [entry.kind for entry in ledger.entries() if entry.kind in ("charge", "settle")] == ["charge"]
    steps = int(httpx.get(f"{service}/v2/models/model", timeout=300.0).json()["versions"][-1])
    assert steps <= asked + 8, "a step for every request at most"

    (learner,) = [each["name"] for each in ray.util.list_named_actors(True) if "#Learner#" in each["name"]]
    ray.kill(ray.get_actor(learner, namespace="serve"), no_restart=True)
    for seed in range(5):
        assert int(ask(service, 2000 + seed)[1]["model_version"]) >= 3, "predictions go on with what was released"
    until(service, steps + 3)
    assert [entry.kind for entry in ledger.entries() if entry.kind in ("charge", "settle")] == ["charge"]
    assert math.isclose(ledger.spent("ward").epsilon, 5.0, rel_tol=1e-3)
    ledger.verify()
