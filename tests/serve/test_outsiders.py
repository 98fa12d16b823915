"""Hostile and malformed requests: no 5xx, and no value of a request in logs or metrics."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import torch
from fastapi import FastAPI, Request, Response
from safetensors.torch import load_file
from torch import nn

from tacit.privacy import Budget, Ledger, _remote, events
from tacit.serve import AdaptingModel, Role, Rules, Tokens, ledger_app, model_app
from tacit.serve._observed import Metrics, Observed
from tests.serve.conftest import Service, serving
from tests.serve.test_model_service import ROW, Making, question, rows, serve

__all__ = ["serve"]  # a fixture
ASK = "/v2/models/model/infer"


def changed(**tensor: Any) -> dict[str, Any]:
    asked = question(rows(1), unit_id="a")
    asked["inputs"][0] |= tensor
    return asked


def named(**parameters: Any) -> dict[str, Any]:
    return question(rows(2), **parameters)


MALFORMED = {
    "lists beside numbers": changed(data=[[0.0] * 783, 1.0]),
    "lists of other depths": changed(data=[[[0.0]] * 392, [0.0] * 392]),
    "a list inside numbers": changed(data=[0.0] * 783 + [[0.0]]),
    "an object as a list": changed(data={"0": 1.0}),
    "no rows": changed(shape=[0, 1, 28, 28], data=[]),
    "more numbers than the shape": changed(data=[0.0] * 785),
    "a huge shape": changed(shape=[2**31] * 8),
    "a negative shape": changed(shape=[-1, 1, 28, 28]),
    "another type": changed(datatype="BYTES"),
    "two inputs": question(rows(1), unit_id="a") | {"inputs": question(rows(1))["inputs"] * 2},
    "a binary tensor": changed(data=None, parameters={"binary_data_size": 3136}),
    "more rows than may ever wait": question(rows(17), unit_id="a"),
    "without unit ids": named(),
    "an id that is an object": named(unit_id={"a": 1}),
    "an id that is a truth": named(unit_id=True),
    "an id that is a fraction": named(unit_id=1.5),
    "an empty id": named(unit_id=" "),
    "an endless id": named(unit_id="x" * 201),
    "ids for other rows": named(unit_ids=["a"]),
    "ids with a gap": named(unit_ids=["a", None]),
}


@pytest.mark.parametrize("asked", MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_refused_and_takes_no_place(serve: Making, asked: dict[str, Any]) -> None:
    served = serve(Rules(wait=3600.0, queue=16), unit="patient")
    with serving(model_app(served)) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}{ASK}", json=asked, timeout=60.0)
    assert answer.status_code in (400, 422), answer.text
    assert list(answer.json()) == ["error"]
    assert served.waiting == 0


def test_bodies_that_are_no_json_or_endless(serve: Making) -> None:
    served = serve(unit="patient")
    with serving(model_app(served)) as port:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0)
        for body in (b"", b"\xff\xfe", b"[" * 200_000, b'{"inputs": ' + b"9" * 5000 + b"}", b"NaN"):
            assert client.post(ASK, content=body).status_code in (400, 422)
        assert client.post(ASK, content=b" " * 17_000_000).status_code == 413
        assert client.request("BREW", ASK).status_code in (400, 405)
        assert 'method="BREW"' not in client.get("/metrics").text
    assert served.waiting == 0


def test_the_limit_of_a_request_can_be_set(serve: Making) -> None:
    """By the length that it names, before anything is read, and by what comes if it names none."""
    served = serve(unit="patient")
    fits, too_large = json.dumps(changed()).encode(), json.dumps(changed(data=[0.12345678901234567] * 1568)).encode()
    limit = len(fits) + 500
    assert len(too_large) > limit
    with serving(model_app(served, largest=limit)) as port:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
        assert client.post(ASK, content=fits).status_code == 200
        for body in (too_large, iter([too_large[:100], too_large[100:]])):  # an iterator goes out in chunks
            answer = client.post(ASK, content=body)
            assert answer.status_code == 413
            assert answer.json() == {"error": f"A request has at most {limit:,} bytes: send fewer rows at a time."}
        assert 'route="/v2/models/{asked}/infer",status="413"' in client.get("/metrics").text
    assert served.waiting == 1
    with pytest.raises(ValueError, match="at least 1,000"):
        model_app(served, largest=10)


def test_large_requests_at_a_time_are_bounded_together() -> None:
    """Four clients send nearly all of the largest request and stop: a fifth is refused, a small request is not."""
    app = FastAPI()
    app.state.metrics = Metrics()
    app.add_middleware(Observed, largest=16_000, failure=Response(status_code=500))

    @app.post("/")
    async def length(request: Request) -> int:
        return len(await request.body())

    async def scenario() -> None:
        rest, sent = asyncio.Event(), 0

        async def stops() -> AsyncIterator[bytes]:
            nonlocal sent
            yield b"x" * 15_000
            sent += 1
            await rest.wait()

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            slow = [asyncio.create_task(client.post("/", content=stops())) for _ in range(4)]
            while sent < 4:
                await asyncio.sleep(0.01)
            refused = await client.post("/", content=b"x" * 15_000)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert (await client.post("/", content=b"x" * 900)).json() == 900
            rest.set()
            assert [(await each).json() for each in slow] == [15_000] * 4
            assert (await client.post("/", content=b"x" * 15_000)).json() == 15_000

    asyncio.run(scenario())


def test_numbers_beyond_any_float_are_missing_values(serve: Making) -> None:
    """They take their place, as NaN does: values do not decide who is in a batch."""
    served = serve(unit="patient")
    body = json.dumps(changed(data=[0.5] * 784)).replace("0.5", "1" + "0" * 400, 1)
    with serving(model_app(served)) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}{ASK}", content=body.encode(), timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert served.waiting == 1


def test_one_unit_has_one_name(serve: Making) -> None:
    """However it is written, and a body cannot rename whom the header names."""
    served = serve(unit="patient")
    with serving(model_app(served)) as port:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)

        def ask(header: str | None = None, **parameters: Any) -> int:
            headers = {} if header is None else {"X-Unit-Id": header.encode()}
            return client.post(ASK, json=question(rows(1), **parameters), headers=headers).status_code  # type: ignore[arg-type]

        assert [ask("17"), ask(unit_id=17), ask(unit_ids=[" 17 "])] == [200] * 3
        assert served._waiting.ids == ["17"] * 3
        assert ask("17", unit_id="18") == 400
        assert ask("17", unit_ids=["17"]) == 200
        assert served.drain()
        assert [ask("é"), ask(unit_id="é"), ask(unit_id="e\u0301")] == [200] * 3
        assert served._waiting.ids == ["é"] * 3
        twice = [("X-Unit-Id", "somebody else"), ("X-Unit-Id", "17")]  # the client's own, and the gateway's behind it
        assert client.post(ASK, json=question(rows(1)), headers=twice).status_code == 400
        assert len(served._waiting.ids) == 3


def test_no_spelling_of_an_id_stops_the_stream(serve: Making) -> None:
    """JSON can name half a character (a lone surrogate), which UTF-8 has no bytes for."""
    served = serve(unit="patient")
    with serving(model_app(served)) as port:
        for unit in ("a", "\ud800", "\udfff", "b"):
            body = json.dumps(question(rows(1), unit_id=unit)).encode()
            answer = httpx.post(f"http://127.0.0.1:{port}{ASK}", content=body, timeout=60.0)
            assert answer.status_code == 200
        assert served.drain()
    assert (served.stopped, served.version) == (None, 1)


def test_after_a_restart_no_row_decides_whether_the_stream_goes_on(serve: Making) -> None:
    """Pixels from 0 to 255 are refused before the charge; after it they would be told from other rows by the stop."""
    first = serve()
    first.predict(rows(4))
    assert first.drain()
    first.close()
    second = serve()
    second.predict(torch.randint(0, 256, (4, 1, 28, 28)).float())
    assert second.drain()
    assert (second.stopped, second.version) == (None, 2)


class Talkative(nn.Module):
    """A model whose errors quote what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.head = nn.Flatten(), nn.Linear(784, 3)
        self.norm = nn.LayerNorm(784)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if (images > 4000).any():
            raise ArithmeticError(f"patient {images.max().item():.0f} has a fever")
        return self.head(self.norm(self.flat(images)))  # type: ignore[no-any-return]


def test_errors_keep_rows_to_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    caplog.set_level(logging.DEBUG)
    from tacit import adapt

    def make() -> adapt.Adapter:
        torch.manual_seed(0)
        privacy = adapt.DP(epsilon=5.0, delta=1e-6, clip=0.5)
        ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
        return adapt.Tent(Talkative().eval(), privacy=privacy, batch_size=4, lr=0.1, ledger=ledger, subject="s", seed=1)

    served = AdaptingModel(make, ROW, tmp_path / "served", rules=Rules(wait=3600.0))
    with serving(model_app(served)) as port:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
        answer = client.post(ASK, json=question(torch.cat([rows(1), rows(1) + 4711.0])))
        assert answer.status_code == 200  # statuses are counted: whether a row makes the model fail decides none
        logits = answer.json()["outputs"][0]["data"]
        assert None not in logits[:3]
        assert logits[3:] == [None] * 3
        assert client.post(ASK, json=question(rows(2))).status_code == 200  # the batch is full: one step
        assert served.drain()
        seen = client.get("/metrics").text
    assert 'status="500"' not in seen
    seen += caplog.text + "".join(capfd.readouterr()) + str(served.facts())
    assert "ArithmeticError" not in seen
    for word in ("fever", "4711", "4712"):
        assert word not in seen


class Broken(Talkative):
    """A model that fails on every row from now on."""

    broken = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise ArithmeticError(f"patient {images.max().item():.0f} has a fever")
        return super().forward(images)


def test_a_model_that_fails_on_the_example_too_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    from tacit import adapt

    served = AdaptingModel(lambda: adapt.Tent(Broken().eval(), privacy=None, lr=0.1), ROW, tmp_path / "served")
    Broken.broken = True
    try:
        with serving(model_app(served)) as port:
            answer = httpx.post(f"http://127.0.0.1:{port}{ASK}", json=question(rows(1)), timeout=60.0)
    finally:
        Broken.broken = False
    assert (answer.status_code, answer.json()) == (500, {"error": "The model could not answer this request."})
    assert "ArithmeticError" in caplog.text
    assert "fever" not in caplog.text


@pytest.mark.usefixtures("clinic")
def test_a_database_that_fails_quotes_nothing_in_the_log(
    service: Service, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    caplog.set_level(logging.INFO)
    with service.app.state.book.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE tacit_head"))
    asked = {"subject": "clinic", "receipt": "ab" * 16, "event": events.to_json(events.gaussian(9.0)), "stage": "x"}
    headers = {"Authorization": f"Bearer {service.token()}"}
    answer = httpx.post(
        f"{service.url}/v1/charges", json=asked | {"note": "secret note"}, headers=headers, timeout=300.0
    )
    assert answer.status_code == 503
    seen = answer.text + caplog.text + "".join(capfd.readouterr())
    for word in ("secret note", "clinic", "ab" * 16, "INSERT", "SELECT", "ledger.db"):
        assert word not in seen


def test_charges_do_not_wait_for_readers(service: Service, clinic: Ledger) -> None:
    """Checks of the whole chain are a few at a time; later ones get 429, and charges go on."""
    turns: threading.BoundedSemaphore = service.app.state.turns
    turns.acquire()
    turns.acquire()
    reader = service.token(Role.READ)
    assert service.ask("/v1/verification", reader).status_code == 429
    page = httpx.get(service.url, auth=("x", reader), timeout=300.0)
    assert (page.status_code, page.headers["retry-after"]) == (429, "1")
    clinic.charge("clinic", events.gaussian(20.0), stage="x")
    turns.release()
    assert clinic.verify() == 2
    turns.release()


@pytest.mark.parametrize("when", ["Wed, 21 Oct 2015 07:28:00 GMT", "soon", "nan", "-3", ""])
def test_a_proxy_may_say_anything_about_when_to_come_again(service: Service, clinic: Ledger, when: str) -> None:
    real, busy = (
        httpx.HTTPTransport(),
        [httpx.Response(503, headers={"Retry-After": when}, text="<html>busy</html>")],
    )

    class Proxy(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return busy.pop() if busy else real.handle_request(request)

    clinic._book._client._transport = Proxy()  # type: ignore[attr-defined]
    clinic.charge("clinic", events.gaussian(20.0), stage="x")
    assert not busy
    assert len(Ledger(service.database).entries()) == 2
    assert _remote._seconds("2.5") == 2.5


def test_two_services_on_one_ledger_do_not_overspend(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    apps = [ledger_app(url, rate=1e6, burst=10**6) for _ in range(2)]
    Ledger(url).subject("clinic", Budget(1.0, 1e-6))
    token = Tokens(apps[0].state.book.engine).create(Role.CHARGE, subject="clinic")[0]
    asked = {"subject": "clinic", "event": events.to_json(events.gaussian(12.0)), "stage": "x"}
    codes: list[int] = []

    def spend(port: int, first: int) -> None:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {token}"}, timeout=300.0
        ) as client:
            for number in range(first, first + 20):  # both ask for the same receipts, in other orders
                sent = asked | {"receipt": f"{number % 20:032x}"}
                codes.append(client.post("/v1/charges", json=sent).status_code)

    with serving(apps[0]) as one, serving(apps[1]) as two:
        threads = [threading.Thread(target=spend, args=each) for each in ((one, 0), (two, 7), (one, 13))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ledger = Ledger(url)
    charged = [entry.receipt for entry in ledger.entries() if entry.kind == "charge"]
    assert len(set(charged)) == len(charged)
    assert set(codes) == {200, 409}
    ledger.verify()
    assert ledger.spent("clinic").epsilon <= 1.0


def test_a_second_service_takes_a_stream_over(serve: Making) -> None:
    """Started by mistake on the same folder: it goes on, and the first one releases nothing more."""
    first = serve()
    first.predict(rows(4))
    assert first.drain()
    second = serve()
    assert second.exact
    second.predict(rows(4, 1))
    assert second.drain()
    first.predict(rows(4, 2))
    assert first.drain()
    assert (first.adapter.steps, first.version) == (1, 1)
    assert "Another process" in str(first.stopped)
    assert second.adapter.steps == 2
    ledger = Ledger(f"sqlite:///{serve.folder}/ledger.db")
    assert [entry.kind for entry in ledger.entries()].count("charge") == 1
    ledger.verify()


# -- versions ----------------------------------------------------------------------------------------------------------


def parameters(served: AdaptingModel) -> dict[str, torch.Tensor]:
    mine = dict(served._served.named_parameters())
    return {name: mine[name] for name in served.adapter.parameters}


def is_version(served: AdaptingModel, version: int) -> bool:
    kept = load_file(served.folder / "versions" / f"{version:08d}.safetensors")
    return served.served == version and all(torch.equal(kept[n], value) for n, value in parameters(served).items())


def test_a_roll_back_outlives_a_restart(serve: Making) -> None:
    first = serve()
    for seed in range(2):
        first.predict(rows(4, seed))
        assert first.drain()
    first.roll_back(1)
    first.close()
    second = serve()
    assert is_version(second, 1)
    second.predict(rows(4, 2))
    assert second.drain()
    assert is_version(second, 3)


def test_after_a_restart_parameters_are_those_of_their_version(serve: Making) -> None:
    """Saved every third step only: what was served last comes back, under its own number."""
    first = serve(Rules(wait=3600.0, every=3))
    for seed in range(5):
        first.predict(rows(4, seed))
        assert first.drain()
    first._ending = True  # as after a kill: nothing more is saved
    second = serve(Rules(wait=3600.0, every=3))
    assert not second.exact
    assert is_version(second, 5)
    second.predict(rows(4, 9))
    assert second.drain()
    assert second.served > 5
    assert is_version(second, second.served)


def test_a_restart_after_the_horizon_makes_no_further_step(serve: Making) -> None:
    rules = Rules(wait=3600.0, horizon=1)
    first = serve(rules)
    first.predict(rows(4))
    assert first.drain()
    first.close()
    second = serve(rules)
    assert "1 steps are used" in str(second.stopped)
    second.predict(rows(4, 1))
    assert (second.waiting, second.version) == (0, 1)


def test_a_roll_back_in_shadow_serves_the_source(serve: Making) -> None:
    served = serve(Rules(wait=3600.0, shadow=True))
    first, _ = served.predict(rows(4))
    assert served.drain()
    served.roll_back(1)
    again, version = served.predict(rows(4))
    assert version == 0
    assert torch.equal(first, again)
