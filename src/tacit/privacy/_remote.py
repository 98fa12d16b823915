"""A ledger behind a service (``tacit ledger serve``): the same ``Ledger``, whose book is elsewhere.

Formal guarantee: the service decides, in its own transaction, whether a charge fits, and answers once it is on disk;
a receipt is live only after that answer. A request whose response was lost is sent again under the same receipt or
holder, and done once. If no answer comes at all, the charge may stand, and no receipt exists for it: spent, never
overspent. No key of noise, no private value and no data cross the network.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from tacit.privacy import _wire as wire
from tacit.privacy._book import Charge, Charged
from tacit.privacy._chain import Entry
from tacit.privacy._repricing import Underpriced
from tacit.privacy._storage import LedgerError
from tacit.privacy._subject import Subject

PATIENCE = 120.0  # seconds for which a request is repeated
_AGAIN = {429, 502, 503, 504}


class RemoteBook:
    """The book of a ledger that a service keeps.

    Args:
        url: The service's address, https://….
        token: A token of the service; see ``tacit ledger token``.
        patience: Seconds for which a request without a response is repeated; None: two minutes.
    """

    def __init__(self, url: str, token: str | None, *, patience: float | None = None) -> None:
        try:
            import httpx
        except ModuleNotFoundError:
            raise LedgerError("A ledger behind a service needs httpx: pip install 'tacit[serve]'.") from None
        if not token:
            raise LedgerError("A ledger behind a service needs a token: Ledger(url, token=…).")
        host = httpx.URL(url).host
        if url.startswith("http://") and host not in ("localhost", "127.0.0.1", "::1"):
            raise LedgerError("A token crosses a network only encrypted: use https://.")
        self.url, self.patience = url.rstrip("/"), PATIENCE if patience is None else patience
        self._lost = httpx.TransportError
        self._client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=30.0, follow_redirects=False
        )
        self.only: str | None = self._request("GET", "/v1/head")["only"]  # a wrong address or token is found here

    durable = True

    def close(self) -> None:
        self._client.close()

    def declare(self, subject: Subject) -> Subject:
        payload = {"name": subject.name, "terms": subject.terms_json}
        return wire.subject_from_json(self._request("POST", "/v1/subjects", json=payload))

    def find(self, name: str) -> Subject | None:
        found = self._request("GET", "/v1/subjects", params={"name": name})["subjects"]
        return wire.subject_from_json(found[0]) if found else None

    def subjects(self) -> list[Subject]:
        return [wire.subject_from_json(each) for each in self._request("GET", "/v1/subjects")["subjects"]]

    def standing(self, name: str) -> Subject:
        return wire.subject_from_json(self._request("GET", "/v1/standing", params={"subject": name}))

    def charge(self, name: str, request: Charge) -> Charged:
        payload = {
            "subject": name,
            "receipt": request.receipt,
            "event": request.event,
            "stage": request.stage,
            "note": request.note,
            "bound": request.bound,
            "seeded": request.seeded,
        }
        return wire.charged_from_json(self._request("POST", "/v1/charges", json=payload))

    def settle(self, receipt: str, holder: str | None, used: int, kept: dict[str, Any]) -> None:
        self._request("POST", f"/v1/receipts/{receipt}/settlement", json={"holder": holder, "used": used, "kept": kept})

    def charged(self, receipt: str) -> Charged:
        return wire.charged_from_json(self._request("GET", f"/v1/receipts/{receipt}"))

    def made_before(self, receipt: str) -> int:
        return int(self._request("GET", f"/v1/receipts/{receipt}/holder")["made_before"])

    def held(self, receipt: str) -> tuple[str, dict[str, Any]] | None:
        payload = self._request("GET", f"/v1/receipts/{receipt}/holder")
        return None if payload["kind"] is None else (payload["kind"], payload["body"])

    def give(self, receipt: str, holder: str, kind: str, upto: int | None, facts: dict[str, Any]) -> int:
        payload = {"holder": holder, "kind": kind, "upto": upto, "facts": facts}
        return int(self._request("POST", f"/v1/receipts/{receipt}/leases", json=payload)["upto"])

    def hand_over(self, receipt: str, holder: str, how: str, proof: str, used: int) -> tuple[int, bool]:
        payload = {"holder": holder, "how": how, "proof": proof, "used": used}
        found = self._request("POST", f"/v1/receipts/{receipt}/holder", json=payload)
        return int(found["upto"]), bool(found["exact"])

    def entries(self, subject: str | None) -> list[Entry]:
        found: list[Entry] = []
        while True:
            query: dict[str, Any] = {"after": found[-1].seq if found else 0}
            page = self._request("GET", "/v1/entries", params=query | ({} if subject is None else {"subject": subject}))
            found += [wire.entry_from_json(each) for each in page["entries"]]
            if not page["more"]:
                return found

    def head(self) -> str:
        return str(self._request("GET", "/v1/head")["head"])

    def verify(self, head: str | None) -> tuple[int, list[Underpriced]]:
        payload = self._request("GET", "/v1/verification", params={} if head is None else {"head": head})
        return int(payload["entries"]), [wire.underpriced_from_json(each) for each in payload["priced_too_low"]]

    def _request(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        """Send until there is a response: every request is idempotent."""
        deadline, wait = time.monotonic() + self.patience, 0.05
        while True:
            try:
                answer = self._client.request(method, path, **arguments)
                if answer.status_code not in _AGAIN:
                    return self._read(answer)
                wait = max(wait, _seconds(answer.headers.get("Retry-After", "")))
            except self._lost:
                pass
            if time.monotonic() + wait > deadline:
                raise LedgerError(
                    f"The ledger {self.url} does not answer. If a charge was requested, it may have been made, and "
                    "nothing was released on it."
                )
            time.sleep(wait * (0.5 + secrets.randbelow(1000) / 1000))  # many clients, not all at once
            wait = min(2 * wait, 5.0)

    def _read(self, answer: Any) -> dict[str, Any]:
        try:
            payload = answer.json()
        except ValueError:
            raise LedgerError(f"{self.url} is no ledger of tacit: it answered {answer.status_code}.") from None
        if answer.status_code < 300 and isinstance(payload, dict):
            return payload
        if isinstance(payload, dict) and "refusal" in payload:
            raise wire.refusal_from_json(payload)
        raise LedgerError(f"The ledger {self.url} refused with {answer.status_code}.")


def _seconds(header: str) -> float:
    """Retry-After in seconds; 0 where it is a date, as a proxy may write it, or no number."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return seconds if seconds >= 0 else 0.0
