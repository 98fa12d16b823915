"""A model that adapts as it serves: predictions first, batches by a public rule, and a budget that ends quietly."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tacit import adapt, models
from tacit.adapt import Adapter
from tacit.privacy import Budget, Ledger
from tacit.serve import AdaptingModel, QueueFull, Rules, model_app
from tests.serve.conftest import serving

ROW = torch.zeros(1, 28, 28)
PRIVACY = adapt.DP(epsilon=5.0, delta=1e-6, clip=0.5)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


class Making:
    """Makes adapters as a service does, and closes what was made from them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, list[AdaptingModel]()

    def adapter(self, **options: Any) -> Adapter:
        given = {"privacy": PRIVACY, "batch_size": 4, "lr": 0.05, "seed": 3} | options
        if "ledger" not in given:
            given |= {"ledger": Ledger(f"sqlite:///{self.folder}/ledger.db"), "subject": "stream"}
        return adapt.Tent(models.embedded(), **given)

    def __call__(self, rules: Rules | None = None, **options: Any) -> AdaptingModel:
        rules = rules or Rules(wait=3600.0)
        model = AdaptingModel(lambda: self.adapter(**options), ROW, self.folder / "served", rules=rules)
        self.made.append(model)
        return model


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Making]:
    making = Making(tmp_path)
    yield making
    for model in making.made:
        model.close()


def test_it_predicts_first_and_learns_what_an_adapter_learns(serve: Making, tmp_path: Path) -> None:
    served, source = serve(), models.embedded().eval()
    images = rows(8)
    with torch.no_grad():
        for start in (0, 2):  # the first batch, in two requests
            logits, version = served.predict(images[start : start + 2])
            assert torch.allclose(logits, source(images[start : start + 2]), atol=1e-5)
            assert version == 0
    assert served.drain()
    assert served.version == 1
    twin = serve.adapter(ledger=Ledger(f"sqlite:///{tmp_path}/twin.db"), subject="stream")
    twin(images[:4])
    for name, value in twin.parameters.items():
        assert torch.equal(served.adapter.parameters[name], value)
    with torch.no_grad():
        assert torch.allclose(served.predict(images[4:])[0], twin.model(images[4:]), atol=1e-5)


def test_a_row_does_not_wait_for_ever(serve: Making) -> None:
    served = serve(Rules(wait=0.05))
    served.predict(rows(1))
    while served.version == 0:
        time.sleep(0.01)
    assert served.adapter.steps == 1


def test_values_move_no_other_row(serve: Making) -> None:
    """A row of NaN takes its place in the batch, like any other row."""
    served, images = serve(), rows(4)
    images[1] = float("nan")
    served.predict(images)
    assert served.drain()
    assert served.version == 1


def test_units_are_enforced(serve: Making) -> None:
    served = serve(unit="patient")
    with pytest.raises(ValueError, match="say whose"):
        served.predict(rows(2))
    with pytest.raises(ValueError, match="say whose"):
        served.predict(rows(2), ["a"])
    served.predict(rows(4), ["a", "a", "b", "c"])
    assert served.drain()
    assert served.adapter.has_unit_ids


def test_ids_of_rows_that_are_units_are_refused(serve: Making) -> None:
    with pytest.raises(ValueError, match="leave unit ids out"):
        serve().predict(rows(1), ["a"])


def test_too_many_waiting_rows_are_refused_and_nothing_is_predicted(serve: Making) -> None:
    served = serve(Rules(wait=3600.0, queue=3))
    served.predict(rows(3))
    with pytest.raises(QueueFull):
        served.predict(rows(1))
    assert served.waiting == 3


def test_after_its_horizon_it_serves_on(serve: Making) -> None:
    served = serve(Rules(wait=3600.0, horizon=1))
    served.predict(rows(4))
    assert served.drain()
    assert served.stopped is not None
    assert served.predict(rows(9))[1] == 1
    assert served.waiting == 0


def test_without_budget_it_serves_the_source(serve: Making, tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/poor.db")
    ledger.subject("stream", Budget(0.5, 1e-6), neighbours="replace-one")
    served = serve(ledger=ledger, subject="stream")
    assert "cannot afford" in str(served.stopped)
    assert served.predict(rows(5))[1] == 0
    assert served.waiting == 0


def test_roll_back(serve: Making) -> None:
    served = serve()
    before, _ = served.predict(rows(2))
    served.predict(rows(2))
    assert served.drain()
    served.predict(rows(4))
    assert served.drain()
    assert served.versions == [0, 1, 2]
    served.roll_back(0)
    after, version = served.predict(rows(2))
    assert version == 0
    assert torch.equal(before, after)
    with pytest.raises(ValueError, match="not kept"):
        served.roll_back(7)
    served.predict(rows(2))
    assert served.drain()
    assert served.version == 3


def test_in_shadow_the_source_is_served(serve: Making) -> None:
    served = serve(Rules(wait=3600.0, shadow=True))
    first, _ = served.predict(rows(4))
    assert served.drain()
    again, version = served.predict(rows(4))
    assert version == 0
    assert torch.equal(first, again)
    assert served.versions == [0, 1]


def test_it_resumes_exactly(serve: Making) -> None:
    first = serve()
    first.predict(rows(4))
    assert first.drain()
    first.close()
    second = serve()
    assert second.exact
    assert (second.version, second.adapter.steps) == (1, 1)
    second.predict(rows(4, 1))
    assert second.drain()
    twin = serve.adapter(ledger=Ledger("sqlite://"), subject="stream")
    twin(rows(4))
    twin(rows(4, 1))
    for name, value in twin.parameters.items():
        assert torch.equal(second.adapter.parameters[name], value)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def question(images: torch.Tensor, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "input", "shape": list(images.shape), "datatype": "FP32", "data": images.flatten().tolist()}
    return {"id": "7", "parameters": parameters, "inputs": [tensor]}


def test_the_open_inference_protocol(serve: Making) -> None:
    served, images = serve(), rows(2)
    with serving(model_app(served, name="clothes", admin_token="secret")) as port:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
        assert client.get("/v2").json()["name"] == "tacit"
        assert client.get("/v2/models/clothes/ready").json() == {"name": "clothes", "ready": True}
        metadata = client.get("/v2/models/clothes").json()
        assert metadata["inputs"][0]["shape"] == [-1, 1, 28, 28]
        assert "differential privacy" in metadata["parameters"]["guarantee"]
        answer = client.post("/v2/models/clothes/infer", json=question(images)).json()
        assert (answer["id"], answer["model_version"], answer["outputs"][0]["shape"]) == ("7", "0", [2, 10])
        logits = torch.tensor(answer["outputs"][0]["data"]).reshape(2, 10)
        with torch.no_grad():
            assert torch.allclose(logits, models.embedded().eval()(images), atol=1e-5)
        nested = question(images) | {"inputs": [question(images)["inputs"][0] | {"data": images.tolist()}]}
        assert client.post("/v2/models/clothes/infer", json=nested).status_code == 200
        assert served.drain()
        assert client.get("/v1/versions").json() == {"versions": [0, 1], "served": 1}
        assert client.post("/v1/versions/0/serve").status_code == 401
        admin = {"Authorization": "Bearer secret"}
        assert client.post("/v1/versions/0/serve", headers=admin).json() == {"served": 0}
        metrics = client.get("/metrics").text
        assert "tacit_steps 1.0" in metrics
        assert "tacit_epsilon_spent 5" in metrics or "tacit_epsilon_spent 4.99" in metrics


def test_bad_questions_take_no_place(serve: Making) -> None:
    served = serve(unit="patient")
    with serving(model_app(served)) as port:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
        ask = "/v2/models/model/infer"
        short = question(rows(1), unit_id="a")
        short["inputs"][0]["data"].pop()
        strange = question(rows(1), unit_id="a")
        strange["inputs"][0]["datatype"] = "BYTES"
        for wrong in (question(rows(1)), short, strange, question(torch.zeros(1, 3, 8, 8), unit_id="a")):
            answer = client.post(ask, json=wrong)
            assert (answer.status_code, list(answer.json())) == (400, ["error"])
        assert client.post(ask, json={"inputs": []}).status_code == 422
        assert client.post("/v2/models/other/infer", json=question(rows(1))).status_code == 404
        assert served.waiting == 0
        assert client.post(ask, json=question(rows(1)), headers={"X-Unit-Id": "a"}).status_code == 200
        assert client.post(ask, json=question(rows(2), unit_ids=["b", "c"])).status_code == 200
        assert served.waiting == 3
        huge = question(rows(1), unit_id="d")
        huge["inputs"][0]["data"][0] = 10**400  # a value of a well-formed row: it takes its place, like any other
        assert client.post(ask, json=huge).status_code == 200
        assert served.drain()
        assert served.version == 1


def test_under_load_every_request_is_answered_or_asked_to_wait(serve: Making) -> None:
    served = serve(Rules(wait=3600.0, queue=16))
    codes: list[int] = []
    with serving(model_app(served)) as port:

        def client() -> None:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0) as asking:
                for _ in range(10):
                    codes.append(asking.post("/v2/models/model/infer", json=question(rows(1))).status_code)

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert served.drain()
    assert len(codes) == 40
    assert set(codes) <= {200, 429}
    assert served.adapter.steps == codes.count(200) // 4
