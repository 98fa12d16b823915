"""Saving an adapter and resuming it.

A checkpoint holds released values only and may be shared: parameters, optimizer, counters, and which receipt paid.
Keys and correlated noise go to a private file (0600) beside the ledger. After a clean save the run goes on exactly;
after a kill it goes on from the checkpoint in a new noise block, at the step behind the last lease: `adapter.steps`
says which batch is next, and none before it may be fed again.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tacit import _checkpoints as checkpoints
from tacit.adapt._adapter import Adapter
from tacit.adapt._noise import NoisyStream
from tacit.adapt._strain import Strain
from tacit.privacy import Unit, leases
from tacit.privacy.correlated import Strategy
from tacit.privacy.leases import Secret

VERSION = 1
_MEMORY = "memory.last."
_WHO = "attendance"  # the ending of the file that tells who took part: those of earlier versions have it
# Names in the files of earlier versions, which are resumed: keys, and the filters of a method.
_EARLIER = {
    "told_units": "has_unit_ids",
    "mood": "ema_entropy",
    "optimiser": "optimizer",
    "pull strength": "fisher alpha",
    "memory.usual": "memory.mean_probs",
}
_EARLIER_FILTERS = {"Certain": "EntropyFilter", "Unusual": "RedundancyFilter", "Structured": "PLPDFilter"}


def save_adapter(adapter: Adapter, path: str | Path, *, private: str | Path | None = None) -> None:
    """Write a checkpoint of an adapter; in the private form also the private file (keys), first.

    Over several ranks all of them call it, and the first one writes.

    Args:
        adapter: The adapter.
        path: The checkpoint's file. It holds released values only and can be shared.
        private: The folder of the private file; by default that of the ledger's SQLite file.
    """
    if adapter.team is None:
        with adapter._turn.held():  # between two steps, whichever thread makes them
            _save(adapter, path, private)
    else:
        adapter.team.alone(lambda: _save(adapter, path, private))


def _save(adapter: Adapter, path: str | Path, private: str | Path | None) -> None:
    stream = adapter.stream
    secret = None
    if stream is not None and stream.stream is not None:
        folder = checkpoints.private_folder(stream.account.ledger, private)
        leases.check_holder(stream.account.ledger, stream.stream.receipt)
        adapter.participation.keep_at(folder / f"tacit-{stream.stream.receipt.id}.{_WHO}")
        secret = leases.secret_of(stream.stream)
        checkpoints.write(folder / f"tacit-{secret.receipt}.secret", _pack_secret(secret), 0o600)
    checkpoints.write(Path(path), _pack(adapter, secret))
    if secret is not None and stream is not None and stream.stream is not None:
        leases.save(stream.account.ledger, stream.stream.receipt, secret)


def resume_adapter(adapter: Adapter, path: str | Path, *, private: str | Path | None = None) -> bool:
    """Resume from a checkpoint that `save_adapter` wrote, in a new adapter made with the same options.

    Args:
        adapter: A new adapter.
        path: The checkpoint's file.
        private: The folder of the private file.

    Returns:
        True if the stream continues exactly; False if it continues with a new block of noise.

    Raises:
        ValueError: The checkpoint belongs to another model or other options.
    """
    if adapter.team is None:
        tensors, facts, exact = _resumed(adapter, path, private)
    else:
        team = adapter.team
        found = team.alone(lambda: _resumed(adapter, path, private))
        tensors = team.share_tensors(None if found is None else found[0])
        facts, exact = team.share(None if found is None else found[1:])
    _restore(adapter, tensors, facts)
    return exact


def _resumed(
    adapter: Adapter, path: str | Path, private: str | Path | None
) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
    """What a checkpoint says, and whether its stream goes on exactly."""
    tensors, facts = (_renamed(part) for part in checkpoints.unpack("adapter", VERSION, Path(path)))
    facts["adapter"] = {"statistics": "source", "literal": False} | _renamed(facts["adapter"])  # earlier: not said
    for earlier, name in _EARLIER_FILTERS.items():
        facts["adapter"]["filters"] = facts["adapter"]["filters"].replace(f"{earlier}(", f"{name}(")
    expected = _describe(adapter)
    for key, value in expected.items():
        stored = facts["adapter"].get(key)
        if stored != value and not (key == "optimizer" and _same_but_for_rounding(stored, value)):
            raise ValueError(f"The checkpoint {path} is of another adapter: its {key} is {stored!r}, not {value!r}.")
    if adapter.steps:
        raise ValueError("This adapter has begun already: resume a checkpoint with a new one.")
    exact = True
    if facts["receipt"] is not None:
        if adapter.stream is None:
            raise ValueError("This checkpoint is of a private run: resume it with the same privacy and its ledger.")
        exact = _resume(adapter, adapter.stream, facts, private)
        facts["steps"] = adapter.stream.steps  # by the ledger: who may take part again is counted in them
    return tensors, facts, exact


def close_adapter(adapter: Adapter, *, private: str | Path | None = None) -> None:
    """End the stream for good: nothing is released or resumed after this, and its private files are destroyed.

    The charge stays spent: a stream costs the same from its first step on. The adapted model stays as it is.

    Args:
        adapter: The adapter.
        private: The folder of the private file.
    """
    stream = adapter.stream
    if stream is None or stream.receipt is None:
        return
    ledger, receipt = stream.account.ledger, stream.receipt
    ledger.settle(receipt)
    if ledger.durable:
        folder = checkpoints.private_folder(ledger, private)
        for name in (f"tacit-{receipt.id}.{ending}" for ending in ("secret", _WHO)):
            for file in (folder / name, *folder.glob(f".{name}.*")):  # and what a kill has left
                file.unlink(missing_ok=True)


def _resume(adapter: Adapter, stream: NoisyStream, facts: dict[str, Any], private: str | Path | None) -> bool:
    ledger, receipt_id = stream.account.ledger, facts["receipt"]
    folder = checkpoints.private_folder(ledger, private)
    stream.refuse_stranger(ledger.receipt(receipt_id))
    participation, file = (folder / f"tacit-{receipt_id}.{kind}" for kind in (_WHO, "secret"))
    # Whoever takes part is noted in a file that is there from the first save on, also where nobody had come by then.
    if (facts["units"] or adapter.unit != Unit.SAMPLE) and not participation.exists():
        raise ValueError(f"Who took part is not in {participation}: say where it is with private=.")
    adapter.participation.resume(participation)
    if facts["units"] and not adapter.participation.anyone:
        raise ValueError(f"The file {participation}, which tells who took part, names nobody: it was cut or replaced.")
    facts["has_unit_ids"] &= not adapter.participation.unnamed  # rows may have come without ids after the save
    secret = _unpack_secret(file.read_bytes()) if file.exists() else None
    if secret is not None and leases.digest(secret) != facts["save"]:
        secret = None  # of another save than this checkpoint
    began = facts.get("noise")  # earlier versions did not say
    strategy = None if began is None else Strategy(**_with_tuples(began))
    receipt, noise, exact = leases.resume(ledger, receipt_id, secret, strategy=strategy)
    file.unlink(missing_ok=True)  # it is worth nothing any more
    stream.resume(receipt, noise)
    return exact


def _describe(adapter: Adapter) -> dict[str, Any]:
    """What must be the same when a run is resumed."""
    method, classes = adapter.method, adapter.classes
    constants = {each.name.replace("_", " "): getattr(method, each.name) for each in fields(method)}
    anchor = constants.pop("anchor")
    return {
        "method": constants.pop("name"),
        **constants,
        "uncertainty": getattr(method.uncertainty, "__name__", repr(method.uncertainty)),
        "filters": repr(method.filters),
        "anchor": None if anchor is None else [checkpoints.digest(part) for part in (anchor.importance, anchor.origin)],
        "classes": None if classes is None else classes.nonzero().flatten().tolist(),
        "privacy": repr(adapter.privacy),
        "batch size": adapter.batch_size,
        "optimizer": adapter.optimize,
        "parameters": {name: list(p.shape) for name, p in adapter.parameters.items()},
        "statistics": adapter.kind,
    }


def _same_but_for_rounding(stored: Any, now: dict[str, Any]) -> bool:
    """Whether two optimizers differ in the last digits of the rate alone: computed ("auto") elsewhere it may.

    It rests on coefficients of the noise that are optimised, and these differ from their third digit on.
    """
    close = isinstance(stored, dict) and math.isclose(stored.get("lr", math.nan), now["lr"], rel_tol=1e-3)
    return close and stored | {"lr": None} == now | {"lr": None}


def _renamed(part: dict[str, Any]) -> dict[str, Any]:
    """The same under today's names."""
    return {_EARLIER.get(key, key): value for key, value in part.items()}


def _pack(adapter: Adapter, secret: Secret | None) -> bytes:
    memory = adapter.memory
    tensors = {f"parameter.{name}": p.detach() for name, p in adapter.masters.values.items()}
    tensors |= {f"origin.{name}": value for name, value in adapter.origin.items()}
    tensors |= {f"{_MEMORY}{name}": value for name, value in (memory.last or {}).items()}
    if memory.mean_probs is not None:
        tensors["memory.mean_probs"] = memory.mean_probs
    state, scalars = checkpoints.optimizer_state(adapter.optimizer)
    tensors |= state
    tensors["generator"] = adapter.generator.get_state()
    if adapter.statistics is not None:
        tensors["statistics"] = torch.cat(
            [adapter.statistics.moments, torch.tensor([adapter.statistics.noise], dtype=torch.float64)]
        )
    receipt = adapter.stream.receipt if adapter.stream is not None else None
    noise = None if adapter.stream is None or adapter.stream.stream is None else adapter.stream.stream.strategy
    facts = {
        "adapter": _describe(adapter),
        "steps": adapter.steps,
        "has_unit_ids": adapter.has_unit_ids,
        "units": adapter.participation.anyone,
        "ema_entropy": memory.ema_entropy,
        "bound": memory.bound,
        "optimizer": scalars,
        "receipt": None if receipt is None else receipt.id,
        "head": None if receipt is None else receipt.head,
        "noise": None if noise is None else asdict(noise),
        "save": None if secret is None else leases.digest(secret),
        "guarantee": None if adapter.guarantee is None else adapter.guarantee.to_json(),
        "assumptions": adapter.assumptions,
    }
    return checkpoints.pack("adapter", VERSION, tensors, facts)


def _restore(adapter: Adapter, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    adapter.masters.load({name: tensors[f"parameter.{name}"] for name in adapter.parameters})
    for name, origin in adapter.origin.items():
        origin.copy_(tensors[f"origin.{name}"])
    adapter.strain = Strain(adapter.masters.values, adapter.origin)
    if adapter.statistics is not None:
        *_, noise = saved = tensors["statistics"].double().cpu()
        adapter.statistics.moments, adapter.statistics.noise = saved[:-1].clone(), float(noise)
        adapter.statistics.publish()
    adapter.optimize["lr"] = facts["adapter"]["optimizer"]["lr"]
    for group in adapter.optimizer.param_groups:
        group["lr"] = adapter.optimize["lr"]
    checkpoints.load_optimizer(adapter.optimizer, tensors, facts["optimizer"])
    device = next(iter(adapter.parameters.values())).device
    last = {key.removeprefix(_MEMORY): value.to(device) for key, value in tensors.items() if key.startswith(_MEMORY)}
    adapter.memory.last = last or None
    mean_probs = tensors.get("memory.mean_probs")
    adapter.memory.mean_probs = None if mean_probs is None else mean_probs.to(device)
    adapter.memory.ema_entropy, adapter.memory.bound = facts["ema_entropy"], facts["bound"]
    adapter.generator.set_state(tensors["generator"])
    adapter.steps, adapter.has_unit_ids = facts["steps"], facts["has_unit_ids"]
    adapter.resumed = True


def _pack_secret(secret: Secret) -> bytes:
    mixer = dict(secret.mixer)
    tensors = {f"{part}.{i}": t for part in ("past", "sums") for i, t in enumerate(mixer.pop(part))}
    tensors["none"] = torch.zeros(1)  # a file of tensors is never empty
    plain = asdict(secret) | {"mixer": mixer}
    return save(tensors, metadata={"secret": json.dumps(plain)})


def _unpack_secret(raw: bytes) -> Secret | None:
    try:
        tensors = load(raw)
        plain = json.loads(checkpoints.metadata(raw)["secret"])
    except (SafetensorError, ValueError, KeyError, TypeError):
        return None  # half written when the process died: the ledger knows of no such save
    mixer = plain["mixer"]
    mixer["shapes"] = {name: tuple(shape) for name, shape in mixer["shapes"].items()}
    mixer["strategy"] = _with_tuples(mixer["strategy"])
    for part in ("past", "sums"):
        found = sorted((int(k.split(".")[1]), t) for k, t in tensors.items() if k.startswith(f"{part}."))
        mixer[part] = [t for _, t in found]
    return Secret(**plain)


def _with_tuples(facts: dict[str, Any]) -> dict[str, Any]:
    """What was a dictionary of plain values before it was written as JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
