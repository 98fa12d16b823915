"""The service keeps what its OpenAPI schema says, whatever is sent: no answer that is not in it, no 5xx."""

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tacit.privacy import Budget, Ledger
from tacit.serve import Role, Tokens, ledger_app


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("schema")
    made = ledger_app(f"sqlite:///{folder}/ledger.db", rate=1e6, burst=10**6)
    Ledger(f"sqlite:///{folder}/ledger.db").subject("clinic", Budget(2.0, 1e-6))
    return made


@pytest.fixture(scope="module")
def token(app: Any) -> str:
    return Tokens(app.state.book.engine).create(Role.ADMIN)[0]


def test_every_answer_is_in_the_schema(app: Any, token: str) -> None:
    checks = [not_a_server_error, response_schema_conformance, status_code_conformance]
    api = schemathesis.openapi.from_asgi("/openapi.json", app)
    tried = set()
    for found in api.get_all_operations():
        operation = found.ok()

        @hypothesis.settings(
            max_examples=15, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=operation.as_strategy())
        def answers(case: Any) -> None:
            case.call_and_validate(headers={"Authorization": f"Bearer {token}"}, checks=checks)

        answers()
        tried.add(operation.label)
    assert {"POST /v1/charges", "POST /v1/receipts/{receipt}/settlement", "GET /v1/entries"} <= tried
