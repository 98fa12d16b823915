"""Totals through Flower's SecAgg+: the calibrator's side, and what a source checks before it gives a share.

SecAgg+ masks each source's numbers so that the masks cancel in the sum of at least ``threshold`` of them. What is
assumed: the server passes messages on as it should (it is curious, not malicious: Flower does not sign keys), and at
most ``threshold - 1`` sources collude with it, which is more than the noise allows for anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.message_type import MessageType
from flwr.client.mod.secure_aggregation.secaggplus_mod import secaggplus_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow
from flwr.serverapp import Grid

from tacit.calibrate._queries import Query, Shares
from tacit.calibrate.federated._masks import install

install()
_QUERY = "tacit"
_MODULUS = 2**32  # Flower's largest


class NotSecure(Exception):
    """A request that is no step of a secure aggregation as the source wants it. Its text is fixed and may travel."""


# -- the calibrator's side ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """As much of a client proxy as the workflow uses."""

    node_id: int


@dataclass
class _Collected:
    """Stands where Flower has a training strategy: asks one question, and keeps what comes out."""

    nodes: Mapping[int, str]
    query: Query
    values: list[float] | None = None
    sources: list[str] = field(default_factory=list)
    seeded: bool = False

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: object) -> list[Any]:
        del server_round, client_manager
        fields = {_QUERY: json.dumps(self.query.to_json())}
        return [(_Node(node), FitIns(parameters, dict(fields))) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> tuple[None, dict[str, Any]]:
        del server_round, failures
        if results:
            self.sources = [self.nodes[node.node_id] for node, _ in results]
            self.seeded = any(bool(reply.metrics.get("seeded")) for _, reply in results)
            self.values = parameters_to_ndarrays(results[0][1].parameters)[0].tolist()
        return None, {}


def secure_total(grid: Grid, nodes: Mapping[int, str], query: Query, shares: Shares, timeout: float) -> _Collected:
    """Run SecAgg+ over these nodes once; without enough of them there are no values."""
    collected = _Collected(nodes, query)
    size = 1 << shares.bits
    workflow = SecAggPlusWorkflow(
        num_shares=1.0,  # every source is every other's neighbour
        reconstruction_threshold=shares.needed,
        max_weight=1.0,
        clipping_range=size / 2,  # with these two, quantisation takes whole numbers as they are
        quantization_range=size,
        modulus_range=_MODULUS,
        timeout=timeout,
    )
    state = RecordDict()
    plain = Context(run_id=0, node_id=0, node_config={}, state=state, run_config={})
    context = LegacyContext(plain, strategy=collected)  # type: ignore[arg-type]
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(ndarrays_to_parameters([]), True)
    workflow(grid, context)
    if collected.values is not None:  # Flower returns the mean of what was shifted by half of the range
        count = len(collected.sources)
        collected.values = [round(value * count + count * size / 2) for value in collected.values]
    return collected


# -- the source's side -------------------------------------------------------------------------------------------------


def secure_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """SecAgg+ for training messages; one that is no step of it is refused, so that no share leaves without a mask."""
    if message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    if not message.has_content() or RECORD_KEY_CONFIGS not in message.content.config_records:
        raise NotSecure("unmasked")
    return secaggplus_mod(message, context, call_next)


def question(message: Message, context: Context) -> Query:
    """The question of a SecAgg+ message, if its terms are those that the protocol was set up with."""
    configs = compat.recorddict_to_fitins(message.content, keep_input=True).config
    query = Query.from_json(json.loads(str(configs[_QUERY])))
    state, shares = context.state.config_records.get(RECORD_KEY_STATE), query.shares
    if state is None or shares is None:
        raise NotSecure("unmasked")
    # Flower calls the app between these two stages, before it writes down the second
    if state.get("current_stage") not in (Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS):
        raise NotSecure("unmasked")
    size = 1 << shares.bits
    wanted: dict[str, Any] = {
        Key.SHARE_NUMBER: state.get(Key.SAMPLE_NUMBER),
        Key.MOD_RANGE: _MODULUS,
        Key.TARGET_RANGE: size,
        Key.CLIPPING_RANGE: size / 2,
        Key.MAX_WEIGHT: 1.0,
    }
    threshold = state.get(Key.THRESHOLD)
    enough = isinstance(threshold, int) and threshold >= shares.needed
    if not enough or any(state.get(key) != value for key, value in wanted.items()):
        raise NotSecure("other terms")
    return query


def given(message: Message, share: tuple[int, ...], shares: Shares, *, seeded: bool) -> Message:
    """A share as Flower masks it: whole numbers, shifted by half of the range."""
    values = np.array(share, dtype=np.float64) - (1 << (shares.bits - 1))
    reply = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([values]), 1, {"seeded": seeded})
    return Message(compat.fitres_to_recorddict(reply, keep_input=False), reply_to=message)
