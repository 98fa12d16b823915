"""The ledger behind a service: the same ledger, for whoever has the right token."""

import json
import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import sqlalchemy as sa
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tacit import cli, finetune
from tacit.data import TensorRecords
from tacit.privacy import (
    Budget,
    BudgetExceeded,
    Charge,
    Ledger,
    LedgerDamaged,
    LedgerError,
    OtherTerms,
    ReceiptError,
    events,
    grid_sum,
    leases,
    mechanisms,
    replay,
)
from tacit.serve import Role, Tokens, ledger_app, run_service
from tests.serve.conftest import Service, serving

EVENT = events.gaussian(20.0)


def test_it_is_the_same_ledger(service: Service, clinic: Ledger) -> None:
    """What a service says is what the database says: charges, refunds, guarantees, entries, the chain."""
    receipt = clinic.charge("clinic", events.repeat(EVENT, 10), stage="finetune", note="first")
    clinic.settle(receipt, 4)
    here = Ledger(service.database)
    assert clinic.entries() == here.entries()
    assert clinic.spent("clinic") == here.spent("clinic")
    assert clinic.remaining("clinic") == here.remaining("clinic")
    assert clinic.total() == here.total()
    assert clinic.total(promised=True) == here.total(promised=True)
    assert (clinic.head, clinic.verify(receipt.head)) == (here.head, here.verify(receipt.head))
    assert clinic.receipt(receipt.id).event == here.receipt(receipt.id).event
    assert clinic.stopped("clinic")
    assert clinic.get_subject("nowhere") is None
    assert clinic.durable


def test_refusals_are_the_same_exceptions(clinic: Ledger) -> None:
    with pytest.raises(BudgetExceeded, match="cannot afford") as refused:
        clinic.charge("clinic", events.gaussian(0.1), stage="x")
    assert refused.value.remaining == clinic.remaining("clinic")
    with pytest.raises(OtherTerms):
        clinic.subject("clinic", Budget(3.0, 1e-6), unit="patient")
    with pytest.raises(LedgerError, match="no subject"):
        clinic.charge("nowhere", EVENT, stage="x")
    with pytest.raises(ValueError, match="bound"):
        clinic.charge("clinic", EVENT, stage="x", bound=-1.0)
    with pytest.raises(BudgetExceeded, match="plan"):
        clinic.subject("planned", Budget(0.1, 1e-6), plan=[events.gaussian(1.0)])
    receipt = clinic.charge("clinic", EVENT, stage="x")
    replay.keep(clinic, receipt)
    with pytest.raises(ReceiptError, match="not the key"):
        replay.resume(clinic, receipt.id, "00" * 32, 0)
    assert clinic.verify() == 3


def test_a_damaged_ledger_is_refused(service: Service, clinic: Ledger) -> None:
    clinic.charge("clinic", EVENT, stage="x")
    with service.app.state.book.engine.begin() as connection:
        connection.execute(sa.text("UPDATE tacit_subjects SET state = '{}'"))
    with pytest.raises(LedgerDamaged):
        clinic.charge("clinic", EVENT, stage="x")
    page = httpx.get(service.url, auth=("x", service.token(Role.READ)), timeout=300.0)
    assert "was changed" in page.text


def test_a_token_of_one_subject_does_not_read_of_another_in_a_damaged_ledger(service: Service, clinic: Ledger) -> None:
    clinic.subject("elsewhere", Budget(1.0, 1e-6))
    clinic.charge("clinic", EVENT, stage="x")
    with service.app.state.book.engine.begin() as connection:
        connection.execute(sa.text("UPDATE tacit_subjects SET state = '{}' WHERE name = 'clinic'"))
    with pytest.raises(LedgerDamaged, match="clinic"):
        clinic.verify()
    for role in (Role.READ, Role.CHARGE):
        token = service.token(role, subject="elsewhere")
        with pytest.raises(LedgerDamaged, match="an admin's token is shown which one"):
            Ledger(service.url, token=token).verify()
        for path in ("/v1/verification", "/"):
            answer = httpx.get(service.url + path, auth=("x", token), timeout=300.0)
            assert "clinic" not in answer.text


def test_streams_and_training_resume_over_it(service: Service, clinic: Ledger) -> None:
    receipt = clinic.charge("clinic", events.repeat(EVENT, 5), stage="x")
    total = SimpleNamespace(sum={"w": torch.zeros(3)}, bounds={"all": 1.0}, blocks={"all": ("w",)})
    secret = replay.keep(clinic, receipt)
    assert leases.extend(clinic, receipt, 2) == 2
    first = mechanisms.gaussian(total, receipt)["w"]
    again, made = replay.resume(clinic, receipt.id, secret, 0)
    assert made == 2
    leases.extend(clinic, again, 1)
    second = mechanisms.gaussian(total, again)["w"]
    assert torch.equal(first, second)
    with pytest.raises(ReceiptError, match="Another process"):
        leases.extend(service.ledger(), receipt, 1)


def test_fit_charges_a_service(service: Service) -> None:
    data = TensorRecords(torch.randn(64, 8), torch.arange(64) % 2)
    own = service.ledger()
    own.subject("own", Budget(1.0, 1e-6), mode="renyi")
    fitted = finetune.fit(
        torch.nn.Linear(8, 2),
        data,
        scheme="full",
        optimizer=finetune.DPSGD(batch_size=16, steps=3, lr=0.1),
        epsilon=1.0,
        delta=1e-6,
        size=64,
        ledger=service.ledger(Role.CHARGE, subject="own"),
        subject="own",
    )
    assert fitted.guarantee is not None
    assert own.spent("own").epsilon == pytest.approx(fitted.guarantee.epsilon)


# -- who may what ------------------------------------------------------------------------------------------------------


def test_roles_and_subjects(service: Service, clinic: Ledger) -> None:
    clinic.subject("other", Budget(1.0, 1e-6))
    reader, spender = service.ledger(Role.READ, subject="clinic"), service.ledger(Role.CHARGE, subject="clinic")
    receipt = spender.charge("clinic", EVENT, stage="x")
    foreign = clinic.charge("other", EVENT, stage="x")
    assert reader.spent("clinic").epsilon > 0
    assert [each.name for each in reader.subjects()] == ["clinic"]
    assert {each.subject for each in reader.entries()} == {"clinic"}
    assert "over clinic alone" in str(reader.total())
    for attempt in (
        lambda: reader.charge("clinic", EVENT, stage="x"),
        lambda: reader.settle(receipt),
        lambda: spender.charge("other", EVENT, stage="x"),
        lambda: spender.spent("other"),
        lambda: spender.receipt(foreign.id),
        lambda: spender.receipt("0" * 32),
        lambda: spender.entries("other"),
        lambda: spender.subject("new", Budget(1.0, 1e-6)),
    ):
        with pytest.raises(LedgerError, match="token"):
            attempt()
    assert reader.get_subject("other") is None
    assert len(clinic.entries()) == 4


def test_a_charge_is_settled_by_the_token_that_made_it(service: Service, clinic: Ledger) -> None:
    """Every token that reads entries sees receipts: a receipt's name must not be enough to have its charge refunded."""
    mine, other = service.ledger(Role.CHARGE, subject="clinic"), service.ledger(Role.CHARGE, subject="clinic")
    direct = Ledger(service.database)
    for ledger in (mine, direct):  # over the service, and beside it
        receipt = ledger.charge("clinic", events.repeat(EVENT, 10), stage="x")
        spent, body = clinic.spent("clinic"), other._book.charged(receipt.id).body
        facts = {name: body[name] for name in ("event", "stage", "note", "bound", "seeded")}
        for _ in range(2):
            with pytest.raises(LedgerError, match="another token"):
                other._book.settle(receipt.id, None, 0, body["event"])
            other._book.charge(
                "clinic", Charge(receipt=receipt.id, **facts)
            )  # the same charge again: it becomes no one else's
        assert clinic.spent("clinic") == spent
    entries = len(clinic.entries())
    mine.settle(mine.charge("clinic", EVENT, stage="x"), 0)
    assert len(clinic.entries()) == entries + 2


@pytest.mark.usefixtures("clinic")
def test_a_charge_is_released_by_the_token_that_made_it(service: Service) -> None:
    """Another client that adopts a live receipt would release once more what was paid for once."""
    mine, other = service.ledger(Role.CHARGE, subject="clinic"), service.ledger(Role.CHARGE, subject="clinic")
    receipt, total = mine.charge("clinic", EVENT, stage="x"), grid_sum(torch.ones(4), low=0.0, high=1.0)
    with pytest.raises(LedgerError, match="another token"):
        mechanisms.gaussian_query(total, replay.adopt(other, receipt.id))
    with pytest.raises(LedgerError, match="another token"):
        other._book.give(receipt.id, "0" * 16, "lease", 0, {})
    mechanisms.gaussian_query(total, receipt)
    left = mine.charge("clinic", EVENT, stage="x")  # of a process that ended: its own token may go on with it
    assert mechanisms.gaussian_query(total, replay.adopt(mine, left.id)).shape == (1,)
    held = mine.charge("clinic", events.repeat(EVENT, 3), stage="x")
    leases.begin(mine, held)  # nothing is released without a lease any more, and who was replaced gets none
    adopted = replay.adopt(other, held.id)
    with pytest.raises(ReceiptError, match="resumed"):
        leases.extend(mine, held, 1)
    assert leases.extend(other, adopted, 1) == 1


def test_tokens_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(service.app.state.book.engine)
    secret, known = tokens.create(Role.READ)
    assert service.ask("/v1/head", secret).status_code == 200
    tokens.revoke(known.id)
    assert service.ask("/v1/head", secret).status_code == 401
    secret, known = tokens.create(Role.READ, days=1)
    later = datetime.now(UTC) + timedelta(days=2)
    monkeypatch.setattr("tacit.serve._tokens.datetime", type("Later", (datetime,), {"now": lambda _: later}))
    assert tokens.find(secret) is None
    for wrong in ({"role": Role.READ, "days": 0}, {"role": Role.ADMIN, "subject": "clinic"}):
        with pytest.raises(ValueError, match="token"):
            tokens.create(**wrong)


def test_only_hashes_are_kept(service: Service, tmp_path: Path) -> None:
    secret = service.token()
    assert secret.encode() not in (tmp_path / "ledger.db").read_bytes()


def test_without_a_token_there_is_nothing(service: Service) -> None:
    assert service.ask("/v1/head").status_code == 401
    assert httpx.get(service.url, timeout=300.0).status_code == 401
    with pytest.raises(LedgerError, match="needs a token"):
        Ledger(service.url)
    with pytest.raises(LedgerError, match="valid token"):
        Ledger(service.url, token="tacit_wrong")
    with pytest.raises(LedgerError, match="https"):
        Ledger("http://ledger.example", token="tacit_x")
    with pytest.raises(LedgerError, match="behind a service"):
        Ledger("sqlite://", token="tacit_x")


def test_tokens_over_the_service(service: Service) -> None:
    with httpx.Client(
        base_url=service.url, headers={"Authorization": f"Bearer {service.token()}"}, timeout=300.0
    ) as admin:
        made = admin.post("/v1/tokens", json={"role": "read"}).json()
        assert service.ask("/v1/head", made["token"]).status_code == 200
        assert made["id"] in [each["id"] for each in admin.get("/v1/tokens").json()["tokens"]]
        assert admin.delete(f"/v1/tokens/{made['id']}").json() == {"revoked": True}
        assert service.ask("/v1/head", made["token"]).status_code == 401
    assert service.ask("/v1/tokens", service.token(Role.CHARGE)).status_code == 403


# -- networks ----------------------------------------------------------------------------------------------------------


class Lossy(httpx.BaseTransport):
    """Delivers every question, and loses the answer to the first of each kind of them."""

    def __init__(self) -> None:
        self.real, self.lost = httpx.HTTPTransport(), set[str]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.real.handle_request(request)
        if request.method == "POST" and request.url.path not in self.lost:
            self.lost.add(request.url.path)
            answer.read()
            raise httpx.ReadError("lost")
        return answer


def test_a_lost_answer_is_not_a_second_charge(service: Service, clinic: Ledger) -> None:
    book = clinic._book
    book._client._transport = Lossy()  # type: ignore[attr-defined]
    receipt = clinic.charge("clinic", events.repeat(EVENT, 3), stage="x")
    leases.begin(clinic, receipt)
    leases.extend(clinic, receipt, 1)
    clinic.settle(receipt, 1)
    here = Ledger(service.database)
    kinds = [entry.kind for entry in here.entries()]
    assert (kinds.count("charge"), kinds.count("settle")) == (1, 1)
    assert here.spent("clinic").mu == pytest.approx(1 / 20.0)
    here.verify()


def test_one_receipt_is_one_charge(service: Service, clinic: Ledger) -> None:
    asked = {"subject": "clinic", "receipt": "ab" * 16, "event": events.to_json(EVENT), "stage": "x"}
    with httpx.Client(
        base_url=service.url, headers={"Authorization": f"Bearer {service.token()}"}, timeout=300.0
    ) as client:
        first, second = (client.post("/v1/charges", json=asked) for _ in range(2))
        assert first.json()["head"] == second.json()["head"]
        other = client.post("/v1/charges", json=asked | {"stage": "y"})
        assert (other.status_code, other.json()["detail"]) == (404, "Receipt abababab was charged for something else.")
    assert len(clinic.entries()) == 2


def test_too_many_requests_wait(tmp_path: Path) -> None:
    app = ledger_app(f"sqlite:///{tmp_path}/ledger.db", rate=1e-6, burst=3)
    with serving(app) as port:
        service = Service(app, f"http://127.0.0.1:{port}", "")
        token = service.token()
        codes = [service.ask("/v1/head", token).status_code for _ in range(5)]
        assert codes == [200, 200, 200, 429, 429]
        app.state.limit.rate = 0.5
        assert Ledger(service.url, token=token).verify() == 0  # the client waits and asks again


def test_tls(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")]), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "cert.pem", tmp_path / "key.pem"
    pem[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    app = ledger_app(f"sqlite:///{tmp_path}/ledger.db")
    with serving(app, ssl_certfile=pem[0], ssl_keyfile=pem[1]) as port:
        trusted = ssl.create_default_context(cafile=str(pem[0]))
        answer = httpx.get(f"https://localhost:{port}/health/live", verify=trusted, timeout=300.0)
        assert answer.json() == {"status": "ok"}


def test_nothing_is_served_unencrypted_by_accident(tmp_path: Path) -> None:
    app = ledger_app(f"sqlite:///{tmp_path}/ledger.db")
    with pytest.raises(ValueError, match="unencrypted"):
        run_service(app, host="0.0.0.0")
    with pytest.raises(ValueError, match="both"):
        run_service(app, certificate=tmp_path / "ledger.db")


# -- what operators see ------------------------------------------------------------------------------------------------


def test_metrics_and_logs_say_nothing_of_what_was_asked(
    service: Service, clinic: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tacit.serve")
    receipt = clinic.charge("clinic", EVENT, stage="secret-stage", note="secret note")
    metrics = service.ask("/metrics").text
    assert 'tacit_requests_total{method="POST",route="/v1/charges",status="200"} 1.0' in metrics
    seen = metrics + caplog.text
    assert '"route": "/v1/charges"' in seen
    for word in ("clinic", "secret", receipt.id, "tacit_" + "x"):
        assert word not in seen
    assert service.ask("/health/live").status_code == service.ask("/health/ready").status_code == 200


def test_not_ready_without_its_database(service: Service) -> None:
    with service.app.state.book.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE tacit_head"))
    assert service.ask("/health/ready").status_code == 503
    assert service.ask("/health/live").status_code == 200


def test_the_page_needs_no_script(service: Service, clinic: Ledger) -> None:
    for _ in range(3):
        clinic.charge("clinic", EVENT, stage="finetune")
    page = httpx.get(service.url, auth=("any name", service.token(Role.READ, subject="clinic")), timeout=300.0)
    assert page.status_code == 200
    assert "<script" not in page.text
    for words in ("Budgets", "What is left", "Last entries", "All 4 entries and totals hold", "ε = "):
        assert words in page.text
    assert page.headers["cache-control"] == "no-store"
    card = httpx.get(f"{service.url}/card", auth=("any name", service.token(Role.READ)), timeout=300.0)
    assert card.text.startswith("# Privacy card")


def test_large_requests_are_refused(service: Service) -> None:
    headers = {"Authorization": f"Bearer {service.token()}"}
    answer = httpx.post(f"{service.url}/v1/charges", content=b"x" * 5_000_000, headers=headers, timeout=300.0)
    assert answer.status_code == 413


def test_tokens_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tacit(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.run(["ledger", "token", *words])
        assert ended.value.code == 0
        return capsys.readouterr().out

    url = str(tmp_path / "ledger.db")
    secret = tacit("create", url, "--role", "charge", "--subject", "clinic").strip()
    assert secret.startswith("tacit_")
    (known,) = json.loads(tacit("list", url, "--json"))["tokens"]
    assert (known["role"], known["subject"], known["valid"]) == ("charge", "clinic", True)
    assert secret not in tacit("list", url)
    tacit("revoke", url, known["id"])
    assert not json.loads(tacit("list", url, "--json"))["tokens"][0]["valid"]
