"""Saving and taking up again: exact after a clean save, behind the lease after a kill, and no noise ever twice."""

import dataclasses
import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from obvious import images, net, norm_of, same_bits
from safetensors.torch import load, save
from torch import Tensor

from tacit import _checkpoints as checkpoints
from tacit._checkpoints import metadata as words_of
from tacit._checkpoints import private_folder
from tacit.adapt import (
    COME,
    DP,
    EATA,
    SAR,
    Adapter,
    Clip,
    DeYO,
    Tent,
    close_adapter,
    fisher,
    resume_adapter,
    save_adapter,
)
from tacit.gradients import AdaptiveQuantile
from tacit.privacy import Ledger
from tacit.privacy._noise import NoiseKey
from tacit.privacy._receipts import ReceiptError
from tacit.privacy.correlated import Strategy, _designs

ROWS, CLIP, SEED = 4, 0.3, 5
Maker = Callable[..., Adapter]


def batch(step: int) -> Tensor:
    return images(ROWS, seed=200 + step)


def fresh(folder: Path, make: Maker = Tent, form: DP | Clip | None = None, **more: Any) -> Adapter:
    """An adapter on the folder's ledger, as a new process would make it."""
    folder.mkdir(exist_ok=True)
    form = form or DP(10.0, clip=CLIP)
    options: dict[str, Any] = {"batch_size": ROWS, "lr": 0.05, "seed": SEED, "lease": 4, **more}
    if isinstance(form, DP):
        options = {"ledger": Ledger(f"sqlite:///{folder / 'ledger.db'}"), "subject": "people", **options}
    return make(net(), privacy=form, **options)


def run(adapter: Adapter, first: int, last: int, units: bool = False) -> Adapter:
    for step in range(first, last):
        adapter(batch(step), unit_ids=torch.arange(ROWS) + ROWS * (step // 2) if units else None)
    return adapter


def kinds(folder: Path) -> list[str]:
    with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        ledger.verify()
        return [entry.kind for entry in ledger.entries()]


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The first number of every release's noise."""
    seen: list[float] = []
    normals = NoiseKey.normals

    def noting(key: NoiseKey, release: int, count: int) -> Tensor:
        found = normals(key, release, count)
        seen.append(float(found[0]))
        return found

    monkeypatch.setattr(NoiseKey, "normals", noting)
    return seen


def in_a_child(work: Callable[[], None]) -> int:
    """Do this in another process; how it ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


EXACT: dict[str, dict[str, Any]] = {
    "independent": {},
    "correlated": {"form": DP(10.0, clip=CLIP, noise="correlated", horizon=5)},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "sar": {"make": SAR},
    "adaptive": {"form": DP(10.0, clip=AdaptiveQuantile(CLIP))},
    "deyo": {"make": DeYO, "form": DP(10.0, clip=CLIP, filters="per-sample"), "threshold": 0.0, "margin": 1.0},
    "units": {"form": DP(10.0, clip=CLIP, noise="correlated", horizon=4, contributions=2)},
    "original eata": {"make": EATA, "form": Clip(CLIP), "margin": 1.0, "similarity": 2.0},
    "original sar": {"make": SAR, "form": Clip(AdaptiveQuantile(CLIP)), "margin": 1.0, "recovery": 0.0},
}


@pytest.mark.parametrize("case", EXACT)
def test_after_a_clean_save_all_goes_on_exactly(case: str, tmp_path: Path) -> None:
    """Parameters, optimizer, memory and attendance, bit for bit, past the lease and the horizon."""
    options, units = EXACT[case], case == "units"
    whole = run(fresh(tmp_path / "whole", **options), 0, 7, units)
    first = run(fresh(tmp_path / "parts", **options), 0, 3, units)
    save_adapter(first, tmp_path / "checkpoint")
    second = fresh(tmp_path / "parts", **options)
    assert resume_adapter(second, tmp_path / "checkpoint")
    assert second.steps == 3
    run(second, 3, 7, units)
    assert same_bits(whole, second)
    assert not same_bits(first, second)
    assert (whole.memory.ema_entropy, whole.memory.bound) == (second.memory.ema_entropy, second.memory.bound)
    a, b = (adapter.optimizer.state_dict()["state"] for adapter in (whole, second))
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[i][key]) for i, own in a.items() for key, value in own.items())
    assert whole.participation._seen == second.participation._seen
    assert torch.equal(whole.generator.get_state(), second.generator.get_state())
    assert all(torch.equal(whole.origin[n], second.origin[n]) for n in whole.origin)


def test_on_another_processor_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the coefficients, and the rate that rests on them, come out a little different."""
    form, options = DP(0.5, clip=CLIP, noise="correlated", horizon=200), {"lr": "auto"}
    whole = run(fresh(tmp_path / "whole", form=form, **options), 0, 6)
    adapter = run(fresh(tmp_path / "parts", form=form, **options), 0, 3)
    save_adapter(adapter, tmp_path / "checkpoint")
    shutil.copytree(tmp_path, tmp_path.with_name("killed"))
    designed = _designs.buffered

    def elsewhere(*args: Any, **how: Any) -> Strategy:
        made = designed(*args, **how)
        return dataclasses.replace(made, weights=tuple(0.999 * weight for weight in made.weights))

    monkeypatch.setattr(_designs, "buffered", elsewhere)
    other = fresh(tmp_path / "parts", form=form, **options)
    assert other.optimize["lr"] != adapter.optimize["lr"]
    assert resume_adapter(other, tmp_path / "checkpoint")
    assert same_bits(whole, run(other, 3, 6))
    killed = tmp_path.with_name("killed")
    for secret in (killed / "parts").glob("*.secret"):
        secret.unlink()
    third = fresh(killed / "parts", form=form, **options)
    assert not resume_adapter(third, killed / "checkpoint")
    assert third.stream is not None
    assert third.stream.stream is not None
    assert adapter.stream is not None
    assert adapter.stream.stream is not None
    assert third.stream.stream.strategy == adapter.stream.stream.strategy


def test_in_another_process_too(tmp_path: Path) -> None:
    form = DP(10.0, clip=CLIP, noise="correlated", horizon=6)
    whole = run(fresh(tmp_path / "whole", SAR, form), 0, 6)
    adapter = run(fresh(tmp_path / "parts", SAR, form), 0, 3)
    save_adapter(adapter, tmp_path / "checkpoint")

    def resume_after_lease() -> None:
        other = fresh(tmp_path / "parts", SAR, form)
        assert resume_adapter(other, tmp_path / "checkpoint")
        save_adapter(run(other, 3, 6), tmp_path / "later")

    assert in_a_child(resume_after_lease) == 0
    third = fresh(tmp_path / "parts", SAR, form)
    assert resume_adapter(third, tmp_path / "later")
    assert same_bits(whole, third)
    with pytest.raises(ReceiptError, match="Another process has resumed"):
        adapter(batch(3))


def test_a_second_taking_up_is_not_exact_and_reuses_no_noise(tmp_path: Path, draws: list[float]) -> None:
    adapter = run(fresh(tmp_path), 0, 2)
    save_adapter(adapter, tmp_path / "checkpoint")
    (secret,) = tmp_path.glob("*.secret")
    copy = secret.read_bytes()
    first = fresh(tmp_path)
    assert resume_adapter(first, tmp_path / "checkpoint")
    assert not secret.exists()
    secret.write_bytes(copy)  # as if somebody had kept it
    second = fresh(tmp_path)
    assert not resume_adapter(second, tmp_path / "checkpoint")
    assert second.steps == 2  # the first took nothing yet
    with pytest.raises(ReceiptError, match="Another process"):
        first(batch(2))
    run(second, 2, 5)
    third = fresh(tmp_path)
    assert not resume_adapter(third, tmp_path / "checkpoint")
    assert third.steps == 6  # behind the lease of 4
    run(third, 6, 8)
    assert len(set(draws)) == len(draws) == 7
    kinds(tmp_path)


def test_after_a_kill_it_goes_on_behind_the_lease(tmp_path: Path, draws: list[float]) -> None:
    """Three steps, a save, two more, killed: the rest of the lease is spent, and those who came have been there."""
    form = DP(10.0, clip=CLIP, noise="correlated", horizon=50)
    units = torch.arange(ROWS)

    def killed() -> None:
        adapter = fresh(tmp_path, form=form)
        for step in range(3):
            adapter(batch(step), unit_ids=units + 10 * step)
        save_adapter(adapter, tmp_path / "checkpoint")
        for step in range(3, 5):
            adapter(batch(step), unit_ids=units + 10 * step)
        (tmp_path / "draws").write_text(json.dumps(draws))
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(in_a_child(killed)) == signal.SIGKILL
    before = json.loads((tmp_path / "draws").read_text())
    assert len(before) == 5
    adapter = fresh(tmp_path, form=form)
    assert not resume_adapter(adapter, tmp_path / "checkpoint")
    assert adapter.stream is not None
    assert adapter.steps == adapter.stream.steps == 7
    assert adapter.stream.stream is not None
    assert adapter.stream.stream._mixer.state()["step"] == 0  # a new noise block
    saved = load((tmp_path / "checkpoint").read_bytes())
    assert all(torch.equal(p, saved[f"parameter.{n}"]) for n, p in adapter.parameters.items())
    sums: list[dict[str, Tensor]] = []
    adapter._step.curator = lambda event: sums.append(dict(event.clipped_sum.sum))  # type: ignore[attr-defined]
    adapter(batch(7), unit_ids=units + 40)  # they came in a step that was lost with its process
    assert norm_of(sums[-1]) == 0
    adapter(batch(8), unit_ids=units + 80)
    assert norm_of(sums[-1]) > 0
    assert not set(before) & set(draws)
    assert len(set(draws)) == 2
    assert kinds(tmp_path) == ["subject", "charge", "lease", "saved", "lease", "resumed", "lease"]


def test_keys_and_noise_are_in_the_private_file_only(tmp_path: Path) -> None:
    form = DP(10.0, clip=CLIP, noise="correlated", horizon=10)
    adapter = run(fresh(tmp_path / "ledger", SAR, form, seed=None), 0, 3)
    save_adapter(adapter, tmp_path / "checkpoint")
    (secret,) = (tmp_path / "ledger").glob("*.secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert adapter.stream is not None
    assert adapter.stream.stream is not None
    receipt = adapter.stream.stream.receipt
    assert receipt._key is not None
    key = receipt._key.secret()
    buffers = adapter.stream.stream._mixer.state()["sums"]
    assert buffers
    assert key.encode() in secret.read_bytes()
    shown = [(tmp_path / "checkpoint").read_bytes(), (tmp_path / "ledger" / "ledger.db").read_bytes()]
    shown += [
        repr(x).encode() for x in (adapter, adapter.stream.account, receipt, adapter.guarantee, adapter.assumptions)
    ]
    for text in shown:
        assert key.encode() not in text
        assert bytes.fromhex(key) not in text
        for buffer in buffers:
            for number in buffer[:8]:
                assert number.numpy().tobytes() not in text
    tensors = load(shown[0])
    allowed = ("parameter.", "origin.", "optimiser.", "memory.last.", "generator")
    assert all(name.startswith(allowed) for name in tensors)


def test_a_checkpoint_does_not_tell_who_dropped_out(tmp_path: Path) -> None:
    """The state of the shuffling of patches depends on the batches' sizes alone."""
    states = []
    for bad in (False, True):
        adapter = fresh(tmp_path / f"{bad}", DeYO)
        shown = batch(0)
        if bad:
            shown[1:3] = float("nan")
        adapter(shown)
        save_adapter(adapter, tmp_path / "checkpoint")
        tensors = load((tmp_path / "checkpoint").read_bytes())
        facts = json.loads(words_of((tmp_path / "checkpoint").read_bytes())["tacit"])
        states.append((tensors["generator"], {k: v for k, v in facts.items() if k not in ("receipt", "head", "save")}))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


def test_a_clean_save_stays_exact_when_the_run_went_on_and_saved_again(tmp_path: Path) -> None:
    """The newest checkpoint goes on exactly; an older one is resumed with the newest count and fresh noise."""
    adapter = run(fresh(tmp_path), 0, 2)
    save_adapter(adapter, tmp_path / "old")
    run(adapter, 2, 3)
    save_adapter(adapter, tmp_path / "new")
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    older = fresh(tmp_path)
    assert not resume_adapter(older, tmp_path / "old")
    assert older.steps == 3  # the release of step 2 was made
    again = fresh(tmp_path.with_name("copy"))
    assert resume_adapter(again, tmp_path / "new")
    assert same_bits(again, adapter)


def test_going_on_after_a_save_makes_the_secret_worthless(tmp_path: Path, draws: list[float]) -> None:
    adapter = run(fresh(tmp_path), 0, 2)
    save_adapter(adapter, tmp_path / "checkpoint")
    run(adapter, 2, 3)
    other = fresh(tmp_path)
    assert not resume_adapter(other, tmp_path / "checkpoint")
    assert other.steps == 6  # saved at 2, leased up to 6
    run(other, 6, 7)
    assert len(set(draws)) == len(draws) == 4


def test_two_processes_on_one_stream(tmp_path: Path, draws: list[float]) -> None:
    """The older one may use up its lease, which nobody else gets, and is refused at its next."""
    older = fresh(tmp_path)
    run(older, 0, 1)
    save_adapter(older, tmp_path / "checkpoint")
    run(older, 1, 2)  # leases steps 1 to 4
    newer = fresh(tmp_path)
    assert not resume_adapter(newer, tmp_path / "checkpoint")
    assert newer.steps == 5
    run(older, 2, 5)
    before = {n: p.detach().clone() for n, p in older.parameters.items()}
    for _ in range(2):
        with pytest.raises(ReceiptError, match="Another process has resumed the stream"):
            older(batch(5))
    assert all(torch.equal(p, before[n]) for n, p in older.parameters.items())
    files = {p: p.read_bytes() for p in tmp_path.iterdir() if p.name.endswith((".secret", ".attendance", "checkpoint"))}
    with pytest.raises(ReceiptError, match="Another process has resumed the stream"):
        save_adapter(older, tmp_path / "checkpoint")
    assert all(path.read_bytes() == content for path, content in files.items())
    run(newer, 5, 8)
    assert len(set(draws)) == len(draws) == 8
    kinds(tmp_path)


# -- what is refused -------------------------------------------------------------------------------------------------


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"make": EATA}, "its method is 'Tent', not 'EATA'"),
    "uncertainty": ({"make": COME}, "is of another adapter"),
    "privacy": ({"form": DP(10.0, clip=2 * CLIP)}, "its privacy is"),
    "epsilon": ({"form": DP(9.0, clip=CLIP)}, "its privacy is"),
    "form": ({"form": Clip(CLIP)}, "its privacy is"),
    "batch size": ({"batch_size": 5}, "its batch size is 4, not 5"),
    "rate": ({"lr": 0.1}, "its optimizer is"),
    "parameters": ({"scheme": "selective"}, "its parameters is"),
    "classes": ({"classes": torch.tensor([True, True, True, False, False])}, "its classes is None"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_another_adapter(case: str, tmp_path: Path) -> None:
    save_adapter(run(fresh(tmp_path), 0, 1), tmp_path / "checkpoint")
    options, said = OTHERS[case]
    adapter = fresh(tmp_path, **options)
    refused(adapter, tmp_path, said)


def refused(adapter: Adapter, folder: Path, said: str, path: str = "checkpoint", **more: Any) -> None:
    """A ValueError with a sentence; ledger, files and parameters stay."""
    entries, files = kinds(folder), sorted(p.name for p in folder.glob("*.secret"))
    with pytest.raises(ValueError, match=said):
        resume_adapter(adapter, folder / path, **more)
    assert kinds(folder) == entries
    assert sorted(p.name for p in folder.glob("*.secret")) == files
    assert all(torch.equal(p, adapter.origin[n]) for n, p in adapter.parameters.items())
    assert adapter.steps == 0


@pytest.mark.parametrize(
    ("make", "one", "other", "said"),
    [
        (EATA, {"margin": 0.4}, {"margin": 0.5}, "EntropyFilter.margin=0.4.*, not .*EntropyFilter.margin=0.5"),
        (COME, {"evidence": "paper"}, {"evidence": "opinion"}, "its uncertainty is 'opinion_as_printed'"),
        (SAR, {"radius": 0.05}, {"radius": 0.1}, "its sharpness is 0.05"),
        (DeYO, {"threshold": 0.2}, {"threshold": 0.3}, "its filters is"),
        (EATA, {"anchor": "a"}, {}, "its anchor is"),
        (EATA, {"anchor": "a"}, {"anchor": "b"}, "its anchor is"),
    ],
)
def test_other_constants_are_another_adapter(
    make: Maker, one: dict[str, Any], other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    anchors = {name: fisher(net(), images(2, seed=i), public=True) for i, name in enumerate("ab")}
    one, other = ({k: anchors[v] if k == "anchor" else v for k, v in given.items()} for given in (one, other))
    save_adapter(fresh(tmp_path, make, **one), tmp_path / "checkpoint")
    refused(fresh(tmp_path, make, **other), tmp_path, said)
    assert resume_adapter(fresh(tmp_path, make, **one), tmp_path / "checkpoint")


def damaged(good: bytes) -> Iterator[tuple[str, bytes]]:
    tensors, metadata = load(good), words_of(good)
    facts = json.loads(metadata["tacit"])
    yield "empty", b""
    yield "cut", good[:-10]
    yield "noise", bytes(range(256)) * 4
    yield "a bit in the data", good[:-3] + bytes([good[-3] ^ 1]) + good[-2:]
    yield "steps", save(tensors, metadata=metadata | {"tacit": json.dumps(facts | {"steps": 0})})
    yield "receipt", save(tensors, metadata=metadata | {"tacit": json.dumps(facts | {"receipt": "0" * 32})})
    yield "a tensor less", save({n: t for n, t in tensors.items() if n != "generator"}, metadata=metadata)
    yield "no facts", save(tensors)
    yield "a list", save(tensors, metadata={"tacit": "[]"})


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    save_adapter(run(fresh(tmp_path), 0, 1), tmp_path / "checkpoint")
    for name, content in damaged((tmp_path / "checkpoint").read_bytes()):
        (tmp_path / "bad").write_bytes(content)
        refused(fresh(tmp_path), tmp_path, "damaged", path="bad")
        assert name
    assert resume_adapter(fresh(tmp_path), tmp_path / "checkpoint")


@pytest.mark.parametrize("form", [DP(10.0, clip=CLIP), Clip(CLIP)], ids=["private", "clip"])
def test_a_checkpoint_of_an_earlier_version_is_resumed(tmp_path: Path, form: DP | Clip) -> None:
    """Names in files changed with those in the code; what was saved before says the same in other words."""
    before = run(fresh(tmp_path, EATA, form), 0, 1, units=True)
    save_adapter(before, tmp_path / "checkpoint")
    tensors, facts = checkpoints.unpack("adapter", 1, tmp_path / "checkpoint")
    facts = {"told_units" if key == "has_unit_ids" else key: value for key, value in facts.items()}
    facts = {"mood" if key == "ema_entropy" else key: value for key, value in facts.items()}
    for part in (facts, facts["adapter"]):
        part["optimiser"] = part.pop("optimizer")
    facts["adapter"]["pull strength"] = facts["adapter"].pop("fisher alpha")
    assert facts["adapter"]["filters"] == "(EntropyFilter(margin=0.4), RedundancyFilter(similarity=None))"
    facts["adapter"]["filters"] = "(Certain(margin=0.4), Unusual(similarity=None))"
    if before.memory.mean_probs is not None:
        tensors["memory.usual"] = tensors.pop("memory.mean_probs")
    (tmp_path / "checkpoint").write_bytes(checkpoints.pack("adapter", 1, tensors, facts))
    after = fresh(tmp_path, EATA, form)
    assert resume_adapter(after, tmp_path / "checkpoint")
    assert (after.steps, after.has_unit_ids) == (before.steps, before.has_unit_ids)
    assert after.memory.ema_entropy == before.memory.ema_entropy
    assert (after.memory.mean_probs is None) == (before.memory.mean_probs is None)
    if after.memory.mean_probs is not None and before.memory.mean_probs is not None:
        assert torch.equal(after.memory.mean_probs, before.memory.mean_probs)


def test_a_checkpoint_of_another_version(tmp_path: Path) -> None:
    save_adapter(run(fresh(tmp_path), 0, 1), tmp_path / "checkpoint")
    raw = (tmp_path / "checkpoint").read_bytes()
    facts = json.loads(words_of(raw)["tacit"]) | {"tacit adapter": 99}
    (tmp_path / "bad").write_bytes(save(load(raw), metadata={"tacit": json.dumps(facts)}))
    refused(fresh(tmp_path), tmp_path, "another version of tacit", path="bad")


def test_a_stream_of_other_people(tmp_path: Path) -> None:
    """A receipt charged to one subject releases nothing about another's."""
    save_adapter(run(fresh(tmp_path), 0, 1), tmp_path / "checkpoint")
    refused(fresh(tmp_path, subject="others"), tmp_path, "was charged to people, not to others")


def test_without_the_list_of_who_took_part(tmp_path: Path) -> None:
    save_adapter(run(fresh(tmp_path), 0, 1, units=True), tmp_path / "checkpoint")
    (listed,) = tmp_path.glob("*.attendance")
    listed.rename(tmp_path / "elsewhere")
    refused(fresh(tmp_path), tmp_path, "Who took part is not in")
    (tmp_path / "elsewhere").rename(listed)
    assert resume_adapter(fresh(tmp_path), tmp_path / "checkpoint")


def test_without_the_list_of_who_took_part_after_the_first_save(tmp_path: Path) -> None:
    """Saved before anybody came, then killed: without the list, all who came since would come once more."""
    adapter = fresh(tmp_path, unit="patient")
    adapter.start(batch(0))
    save_adapter(adapter, tmp_path / "checkpoint")
    run(adapter, 0, 1, units=True)
    (listed,) = tmp_path.glob("*.attendance")
    listed.rename(tmp_path / "elsewhere")
    refused(fresh(tmp_path, unit="patient"), tmp_path, "Who took part is not in")
    (tmp_path / "elsewhere").rename(listed)
    again = fresh(tmp_path, unit="patient")
    assert not resume_adapter(again, tmp_path / "checkpoint")
    assert not again.participation.admit(torch.arange(ROWS), again.steps).any()


def test_a_list_of_who_took_part_that_was_emptied(tmp_path: Path) -> None:
    save_adapter(run(fresh(tmp_path), 0, 2, units=True), tmp_path / "checkpoint")
    (who,) = tmp_path.glob("*.attendance")
    for left in (b"", who.read_bytes().splitlines(keepends=True)[0]):
        who.write_bytes(left)
        refused(fresh(tmp_path), tmp_path, "names nobody")


def test_rows_without_ids_after_the_last_save_are_not_forgotten(tmp_path: Path) -> None:
    """After a kill the card said that everybody had an id, for so had all those before the save."""

    def killed() -> None:
        adapter = run(fresh(tmp_path), 0, 2, units=True)
        save_adapter(adapter, tmp_path / "checkpoint")
        assert adapter.has_unit_ids
        run(adapter, 2, 3)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(killed) == signal.SIGKILL
    adapter = fresh(tmp_path)
    resume_adapter(adapter, tmp_path / "checkpoint")
    assert not adapter.has_unit_ids
    adapter(batch(adapter.steps), unit_ids=torch.arange(ROWS) + 1000)
    assert not adapter.has_unit_ids
    assert any("not every batch came with unit_ids" in said for said in adapter.assumptions)


def test_an_adapter_that_has_begun(tmp_path: Path) -> None:
    adapter = run(fresh(tmp_path), 0, 1)
    save_adapter(adapter, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="has begun already"):
        resume_adapter(adapter, tmp_path / "checkpoint")


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    adapter = Tent(net(), privacy=DP(10.0, clip=CLIP), batch_size=ROWS)
    adapter(batch(0))
    with pytest.raises(ValueError, match="not durable"):
        save_adapter(adapter, tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())

    class Server:
        durable, url = True, "postgresql://server/db"

    with pytest.raises(ValueError, match="private="):
        private_folder(Server(), None)  # type: ignore[arg-type]
    assert private_folder(Server(), tmp_path) == tmp_path  # type: ignore[arg-type]


def test_another_folder_for_what_is_private(tmp_path: Path) -> None:
    """Also when it changes from one save to the next: the list of who took part moves along."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    adapter = run(fresh(tmp_path), 0, 2, units=True)
    save_adapter(adapter, tmp_path / "checkpoint", private=tmp_path / "a")
    second = fresh(tmp_path)
    assert resume_adapter(second, tmp_path / "checkpoint", private=tmp_path / "a")
    save_adapter(second, tmp_path / "checkpoint", private=tmp_path / "b")
    assert sorted(p.suffix for p in (tmp_path / "b").iterdir()) == [".attendance", ".secret"]
    refused(fresh(tmp_path), tmp_path, "Who took part", private=tmp_path)
    third = fresh(tmp_path)
    assert resume_adapter(third, tmp_path / "checkpoint", private=tmp_path / "b")
    assert third.participation._seen == adapter.participation._seen
    run(third, 2, 3, units=True)
    refused(fresh(tmp_path), tmp_path, "Who took part", private=tmp_path / "a")  # a list that was left there is too old


def test_before_the_first_step_nothing_is_charged(tmp_path: Path) -> None:
    save_adapter(fresh(tmp_path), tmp_path / "checkpoint")
    adapter = fresh(tmp_path)
    assert resume_adapter(adapter, tmp_path / "checkpoint")
    assert kinds(tmp_path) == ["subject"]
    run(adapter, 0, 1)
    assert kinds(tmp_path) == ["subject", "charge", "lease"]


def test_a_seeded_run_stays_seeded(tmp_path: Path) -> None:
    """Whoever takes it up without a seed cannot make it private again."""
    save_adapter(run(fresh(tmp_path), 0, 1), tmp_path / "checkpoint")
    adapter = fresh(tmp_path, seed=None)
    assert resume_adapter(adapter, tmp_path / "checkpoint")
    assert "seeded: not private" in adapter.assumptions


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = run(fresh(tmp_path), 0, 1)
    save_adapter(adapter, tmp_path / "checkpoint")
    before = (tmp_path / "checkpoint").read_bytes()
    run(adapter, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            save_adapter(adapter, tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint").read_bytes() == before
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    run(adapter, 2, 3)
    save_adapter(adapter, tmp_path / "checkpoint")
    assert resume_adapter(fresh(tmp_path), tmp_path / "checkpoint")


def test_a_closed_stream_is_over_and_its_private_files_are_gone(tmp_path: Path) -> None:
    adapter = run(fresh(tmp_path), 0, 2, units=True)
    save_adapter(adapter, tmp_path / "checkpoint")
    assert {path.suffix for path in tmp_path.glob("tacit-*")} == {".secret", ".attendance"}
    for path in list(tmp_path.glob("tacit-*")):  # as after a kill in the middle of writing
        (tmp_path / f".{path.name}.0123456789ab.part{path.suffix}").touch()
    spent = adapter.guarantee
    close_adapter(adapter)
    assert list(tmp_path.glob("*tacit-*")) == []
    assert adapter.guarantee == spent  # a stream costs the same from its first step on
    with pytest.raises(ReceiptError):
        adapter(batch(2))
    with pytest.raises((ReceiptError, ValueError)):
        resume_adapter(fresh(tmp_path), tmp_path / "checkpoint")
    close_adapter(fresh(tmp_path, form=Clip(CLIP)))  # nothing was promised, and nothing is to be closed


@pytest.mark.parametrize(("other", "resumes"), [(1 + 1e-14, True), (1.01, False)])
def test_a_computed_rate_may_be_rounded_otherwise_where_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: float, resumes: bool
) -> None:
    """Another version of a library rounds "auto" in its last digits: the stream went nowhere, its budget spent."""
    first = run(fresh(tmp_path, lr="auto"), 0, 2)
    save_adapter(first, tmp_path / "adapter.safetensors")
    rate = first.optimize["lr"]
    monkeypatch.setattr("tacit.adapt._adapter.rate_for", lambda *_, **__: rate * other)
    second = fresh(tmp_path, lr="auto")
    if not resumes:
        with pytest.raises(ValueError, match="of another adapter: its optimizer"):
            resume_adapter(second, tmp_path / "adapter.safetensors")
        return
    assert resume_adapter(second, tmp_path / "adapter.safetensors")
    assert second.optimize["lr"] == second.optimizer.param_groups[0]["lr"] == rate
    assert run(second, 2, 3).steps == 3


@pytest.mark.parametrize("claimed", [0, 1000])
def test_a_checkpoint_that_lies_about_its_steps_lets_nobody_take_part_too_soon(tmp_path: Path, claimed: int) -> None:
    """A checkpoint may be shared, and come back changed; how many steps there were is in the ledger."""
    form = DP(10.0, clip=CLIP, noise="correlated", horizon=40, contributions=2, separation=10)
    first = fresh(tmp_path, form=form)
    for step in range(2):
        first(batch(step), unit_ids=torch.arange(ROWS) + ROWS * step)
    path = tmp_path / "run.safetensors"
    save_adapter(first, path)
    tensors, facts = checkpoints.unpack("adapter", 1, path)
    path.write_bytes(checkpoints.pack("adapter", 1, tensors, facts | {"steps": claimed}))
    sums: list[Any] = []
    again = fresh(tmp_path, form=form, curator=lambda event: sums.append(event.clipped_sum))
    assert resume_adapter(again, path)
    assert again.steps == 2
    again(batch(2), unit_ids=torch.arange(ROWS))  # who took part two steps ago
    assert all(not value.any() for value in sums[0].sum.values())
