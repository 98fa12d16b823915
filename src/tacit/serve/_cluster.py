"""An adapting model on Ray Serve: one replica learns, many predict with the released parameters that it sends them.

Formal guarantee: that of `AdaptingModel`, which runs in the one learning replica: it alone has the ledger, the key and
the rows that wait. Replicas that predict hold released parameters, by version, and pass rows on once they have answered
them. If the learning replica dies, the others serve on with the version that they have; Ray starts it again and it
resumes from its folder. Rows that arrive meanwhile are answered and not used for adaptation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit.adapt import Adapter
from tacit.serve._adapting import AdaptingModel, Facts, QueueFull, Rules, check_rows, predicted, put_values

_FULL = "full"
_PATIENCE = 10.0  # seconds that a replica waits for the learning one


class Learner:
    """The replica that learns: there is one."""

    def __init__(
        self,
        source: Callable[[], nn.Module],
        adapter: Callable[[nn.Module], Adapter],
        example: Tensor,
        folder: str,
        rules: Rules,
        private: str | None,
    ) -> None:
        self._model = AdaptingModel(lambda: adapter(source()), example, folder, rules=rules, private=private)

    def offer(self, rows: Tensor, unit_ids: list[str] | None) -> str | None:
        """Rows to learn from; "full" if too many wait."""
        try:
            self._model.offer(rows, unit_ids)
        except QueueFull:
            return _FULL
        return None

    def news(self, version: int | None) -> tuple[Facts, dict[str, Tensor] | None]:
        """What there is to say, and the released parameters if they are of another version."""
        facts = self._model.facts()
        if facts.served == version:
            return facts, None
        found, values = self._model.released()
        return replace(facts, served=found), values

    def roll_back(self, version: int) -> str | None:
        """Serve a kept version; what is wrong if it is not kept."""
        try:
            self._model.roll_back(version)
        except ValueError as error:
            return str(error)
        return None


class Predictor:
    """A replica that answers requests."""

    def __init__(
        self,
        learner: Any,
        source: Callable[[], nn.Module],
        example: Tensor,
        rules: Rules,
        name: str,
        refresh: float,
        admin_token: str | None,
        largest: int,
    ) -> None:
        self.example, self.rules = example, rules
        self._learner, self._name, self._refresh = learner, name, refresh
        self._admin_token, self._largest = admin_token, largest
        self._model = source().eval().requires_grad_(False)
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._facts: Facts | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tacit-versions", daemon=True)
        self._thread.start()

    def __serve_build_asgi_app__(self) -> Any:
        from tacit.serve._model_app import model_app

        return model_app(self, name=self._name, admin_token=self._admin_token, largest=self._largest)

    def predict(self, rows: Tensor, unit_ids: Sequence[str] | None = None) -> tuple[Tensor, int]:
        """Logits of the released parameters that this replica has, and their version; the rows are passed on."""
        facts = self.facts()
        check_rows(rows, unit_ids, self.example, facts.unit)
        rows = rows.to(self.example.dtype)
        with torch.inference_mode(), self._lock:
            logits, version = predicted(self._model, rows, self.example), self.facts().served
        if facts.stopped is None and self._ask("offer", rows, None if unit_ids is None else list(unit_ids)) == _FULL:
            raise QueueFull
        return logits, version

    def facts(self) -> Facts:
        """As the learning replica last said."""
        if not self._ready.wait(_PATIENCE) or self._facts is None:
            raise ValueError("The replica that learns has not answered yet: ask again later.")
        return self._facts

    def roll_back(self, version: int) -> None:
        """On all replicas, within a refresh."""
        wrong = self._ask("roll_back", version)
        if wrong is not None:
            raise ValueError(wrong)

    def close(self) -> None:
        """Stop asking for versions."""
        self._ending.set()

    def _ask(self, method: str, *given: Any) -> Any:
        """The learning replica's answer; None if it is down, for then nothing is learnt and predictions go on."""
        try:
            return getattr(self._learner, method).remote(*given).result(timeout_s=_PATIENCE)
        except Exception:  # of Ray, of many kinds; its text may quote rows
            return None

    def _follow(self) -> None:
        while not self._ending.is_set():
            said = self._ask("news", None if self._facts is None else self._facts.served)
            if said is not None:
                facts, values = said
                with self._lock:
                    if values is not None:
                        put_values(self._model, values)
                    self._facts = facts
                self._ready.set()
            self._ending.wait(self._refresh)


def cluster_application(
    source: Callable[[], nn.Module],
    adapter: Callable[[nn.Module], Adapter],
    example: Tensor,
    folder: str | Path,
    *,
    replicas: int = 2,
    rules: Rules | None = None,
    private: str | Path | None = None,
    name: str = "model",
    refresh: float = 0.5,
    admin_token: str | None = None,
    largest: int = 16_000_000,
    cpus: float = 1.0,
) -> Any:
    """An adapting model as an application of Ray Serve: `ray.serve.run(cluster_application(…))`.

    Args:
        source: Makes the source model, in every replica.
        adapter: Makes the adapter of a model, with its ledger, in the replica that learns.
        example: One row of the kind that it takes.
        folder: Where the state and the versions are kept: on a disk that the learning replica finds again.
        replicas: How many predict.
        rules: How requests become batches.
        private: The folder of the adapter's private file; by default beside the ledger's file.
        name: Its name in the protocol.
        refresh: Seconds between two questions for a new version.
        admin_token: What allows to roll back; None: roll-backs are refused.
        largest: Bytes of a request's body; a larger one is refused with 413.
        cpus: Processors that Ray reserves for each replica.

    Returns:
        The application.

    Raises:
        ValueError: Ray Serve is not installed, or there would be no replica.
    """
    try:
        from ray import serve
    except ImportError:
        raise ValueError("Ray Serve is not installed: pip install 'tacit[cluster,serve]'.") from None
    if replicas < 1 or not refresh > 0:
        raise ValueError("At least one replica predicts, and refresh is above 0 seconds.")
    rules, room = rules or Rules(), {"num_cpus": cpus}
    learner = serve.deployment(
        Learner, name="Learner", num_replicas=1, max_ongoing_requests=256, ray_actor_options=room
    )
    predictor = serve.deployment(
        serve.ingress()(Predictor), name="Predictor", num_replicas=replicas, ray_actor_options=room
    )
    learns = learner.bind(source, adapter, example, str(folder), rules, None if private is None else str(private))
    return predictor.bind(learns, source, example, rules, name, refresh, admin_token, largest)
