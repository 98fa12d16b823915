"""The calibrator's side of the wire: a ``Transport`` over a Flower grid."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from tacit.calibrate._queries import Answer, Query
from tacit.calibrate._source import Terms
from tacit.calibrate._transport import CalibrationError, Refusal, Summed
from tacit.calibrate.federated._messages import REFUSALS, content, value_of
from tacit.calibrate.federated._secure import secure_total


class FlowerTransport:
    """The sources behind the nodes of a grid.

    ``sources`` nodes are waited for, and ``at_least`` of them (all, by default) must state their terms; nodes that come
    later are not asked. A node that gives no reply within ``timeout`` seconds counts as silent, whatever became of it:
    Flower reports a dead node late or not at all. A reply counts for the message that it replies to, so an answer that
    comes too late is never taken for the answer to another question; it stays charged where it was given.
    """

    def __init__(
        self, grid: Grid, *, sources: int, at_least: int | None = None, timeout: float = 60.0, poll: float = 0.2
    ) -> None:
        if sources < 1 or not timeout > 0:
            raise ValueError("There is at least one source to wait for, and some time to wait.")
        self.grid, self.sources, self.timeout, self.poll = grid, sources, timeout, poll
        self.at_least = sources if at_least is None else at_least
        self.names: dict[int, str] = {}

    def terms(self) -> list[Terms]:
        nodes = self._nodes()
        replies = self._exchange("terms", {}, nodes)
        found = {node: terms for node in nodes if (terms := _terms(replies.get(node))) is not None}
        if len(found) < self.at_least:
            raise CalibrationError(
                f"{len(found)} of {max(self.sources, len(nodes))} sources stated their terms within "
                f"{self.timeout:g} s, and {self.at_least} are needed.{_why(replies)} Nothing was asked or charged."
            )
        self.names = {node: terms.source for node, terms in found.items()}
        return list(found.values())

    def ask(self, query: Query) -> list[Answer | Refusal]:
        replies = self._exchange("answer", {"query": query.to_json()}, list(self.names))
        return [self._one(replies.get(node), name) for node, name in self.names.items()]

    def total(self, query: Query) -> Summed:
        """One run of SecAgg+: the sum of the sources' shares, as long as enough of them stay to the end."""
        if query.shares is None:
            raise CalibrationError("A total is asked for with shares of noise. Nothing was asked.")
        found = secure_total(self.grid, self.names, query, query.shares, self.timeout)
        if found.values is None:
            raise CalibrationError(
                f"Fewer than {query.shares.needed} of {len(self.names)} sources took part in the secure aggregation to "
                "its end, so its total was not seen. What was given stays charged."
            )
        values = tuple(int(value) % (1 << query.shares.bits) for value in found.values)
        return Summed(values=values, sources=tuple(found.sources), seeded=found.seeded)

    def _one(self, reply: dict[str, Any] | None, name: str) -> Answer | Refusal:
        if reply is None:
            return Refusal(source=name, reason=f"it did not answer within {self.timeout:g} s.")
        if "refused" in reply:
            return Refusal(source=name, reason=_sentence(reply["refused"]))
        try:
            answer = Answer.from_json(reply["answer"])
        except (ValueError, TypeError, KeyError):
            return Refusal(source=name, reason="its answer cannot be read.")
        if answer.source != name:
            return Refusal(source=name, reason="it answered in another's name.")
        return answer

    def _nodes(self) -> list[int]:
        """Every node there is, once there are enough of them or the time is over."""
        deadline = time.monotonic() + self.timeout
        while True:
            nodes = sorted(self.grid.get_node_ids())
            if len(nodes) >= self.sources or time.monotonic() > deadline:
                return nodes
            time.sleep(self.poll)

    def _exchange(self, action: str, value: dict[str, Any], nodes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What each node replied, unreadable replies as an empty object; silent nodes are not in it."""
        messages = [
            Message(content(value), dst_node_id=node, message_type=f"query.{action}", ttl=self.timeout + 5)
            for node in nodes
        ]
        sent = list(self.grid.push_messages(messages))
        waiting = {message: node for message, node in zip(sent, nodes, strict=False) if message}
        deadline = time.monotonic() + self.timeout
        got: dict[int, dict[str, Any]] = {}
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None and not reply.has_error():
                    got[node] = value_of(reply) or {}
            if time.monotonic() > deadline:
                break
            time.sleep(self.poll if waiting else 0)
        return got


def _terms(reply: dict[str, Any] | None) -> Terms | None:
    try:
        terms = Terms.from_json((reply or {})["terms"])
    except (ValueError, TypeError, KeyError):
        return None
    name = terms.source
    return terms if isinstance(name, str) and name.isprintable() and 0 < len(name) <= 200 else None


def _why(replies: dict[int, dict[str, Any]]) -> str:
    codes = sorted({str(reply.get("refused")) for reply in replies.values() if "refused" in reply} & set(REFUSALS))
    return "".join(f" Of one: {REFUSALS[code]}" for code in codes)


def _sentence(code: object) -> str:
    return REFUSALS.get(code, "it refuses.") if isinstance(code, str) else "it refuses."
