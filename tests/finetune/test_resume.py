"""Kill and resume: the same weights, bit for bit; one charge; a key that nobody else sees and is gone then."""

import contextlib
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SEED, net, people, same_bits
from safetensors.torch import load, save
from torch import nn

from tacit import _checkpoints as checkpoints
from tacit.finetune import DPGD, DPSGD, Classes, Evaluation, Fitted, fit
from tacit.finetune import _account as account
from tacit.finetune._account import Account
from tacit.finetune._loop import Run
from tacit.finetune._saving import Store
from tacit.models import ViT
from tacit.privacy import BudgetExceeded, Ledger, replay
from tacit.privacy._receipts import ReceiptError

STEPS, EVERY = 6, 2
SGD: dict[str, Any] = {
    "batch_size": 8,
    "steps": STEPS,
    "clip": 0.5,
    "lr": 0.05,
    "rule": "adam",
    "average": "ema",
    "decay": 0.7,
}


def begin(folder: Path, **more: Any) -> Fitted:
    """The call that one makes again after a kill."""
    folder.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "optimizer": DPSGD(**SGD),
        "epsilon": 5.0,
        "delta": 1e-5,
        "size": 20,
        "scheme": "full",
        "head": "keep",
        "seed": SEED,
        "checkpoint": folder / "run.safetensors",
        "every": EVERY,
        "subject": "clinic",
    }
    model, data = more.pop("model", None) or net(), more.pop("data", people())
    with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        return fit(model, data, ledger=ledger, **(options | more))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(wanted: int) -> Callable[[Any], None]:
    """A curator who kills the process in the middle of a step."""
    return lambda event: die() if event.step == wanted else None


def fatal(where: Any, name: str, call: int = 1, *, before: bool = False) -> None:
    """The process dies right after (or before) some call of a function."""
    plain, calls = getattr(where, name), [0]

    def deadly(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if before and calls[0] == call:
            die()
        found = plain(*args, **options)
        if calls[0] == call:
            die()
        return found

    setattr(where, name, deadly)


def killed(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def kinds(folder: Path) -> list[str]:
    with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        ledger.verify()
        return [entry.kind for entry in ledger.entries()]


def spent(folder: Path, subject: str = "clinic") -> float:
    with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        return ledger.spent(subject).epsilon


def secrets(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if ".key" in path.name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """The run that nobody interrupted."""
    return begin(tmp_path_factory.mktemp("whole"))


MOMENTS: dict[str, Callable[[], object]] = {
    "after the key file": lambda: fatal(Store, "begin"),
    "between the private file and the first checkpoint": lambda: fatal(checkpoints, "write", 3, before=True),
    "after the first checkpoint": lambda: fatal(Store, "save"),
    "between the private file and a later checkpoint": lambda: fatal(checkpoints, "write", 5, before=True),
    "while the private file is written": lambda: fatal(os, "replace", 4, before=True),
    "after the last step": lambda: fatal(Run, "_steps"),
    "after the last checkpoint": lambda: fatal(Store, "save", 5),
    "after settling": lambda: fatal(Ledger, "settle"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_changes_nothing(moment: str, whole: Fitted, tmp_path: Path) -> None:
    killed(lambda: (MOMENTS[moment](), begin(tmp_path)))
    assert len(secrets(tmp_path)) >= 1
    again = begin(tmp_path)
    assert same_bits(whole.model, again.model)
    assert again.steps == STEPS
    assert kinds(tmp_path).count("charge") == kinds(tmp_path).count("settle") == 1
    assert secrets(tmp_path) == []
    assert spent(tmp_path) <= 5.0


def test_many_kills_in_a_row(whole: Fitted, tmp_path: Path) -> None:
    """In the middle of steps 1, 0, 3, 2, 5: always back to the last checkpoint, with other leases each time."""
    for step, every in ((1, 2), (0, 1), (3, 3), (3, 1), (5, 2)):
        killed(lambda step=step, every=every: begin(tmp_path, curator=at_step(step), every=every))
        kinds(tmp_path)
    again = begin(tmp_path, every=3)
    assert same_bits(whole.model, again.model)
    assert kinds(tmp_path).count("charge") == 1
    assert kinds(tmp_path).count("resumed") == 5
    assert secrets(tmp_path) == []


def test_kills_at_random_moments(whole: Fitted, tmp_path: Path) -> None:
    """Whenever the machine takes the process away; the first kill leaves a key, and from there on nothing is lost."""
    killed(lambda: begin(tmp_path, curator=at_step(0)))
    chance = random.Random(5)
    for _ in range(50):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            begin(tmp_path, every=1, curator=lambda _: time.sleep(0.02))
            os._exit(0)
        time.sleep(chance.uniform(0.05, 0.5))
        os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] == 0:
            break
    assert same_bits(whole.model, begin(tmp_path).model)
    assert kinds(tmp_path).count("charge") == kinds(tmp_path).count("settle") == 1
    assert secrets(tmp_path) == []


def test_a_run_without_a_seed_goes_on_too(tmp_path: Path) -> None:
    """Its noise is known to its key alone: what was released in the lost steps comes again."""
    told = tmp_path / "weights"

    def until_the_kill() -> None:
        model = net()

        def note(event: Any) -> None:
            if event.step == 5:
                told.write_bytes(save({n: p.detach() for n, p in model.named_parameters()}))
                die()

        begin(tmp_path / "run", model=model, seed=None, curator=note, every=100)

    killed(until_the_kill)
    model, seen = net(), {}
    again = begin(
        tmp_path / "run",
        model=model,
        seed=None,
        every=100,
        curator=lambda event: (
            seen.update({n: p.detach().clone() for n, p in model.named_parameters()}) if event.step == 5 else None
        ),
    )
    before = load(told.read_bytes())
    assert all(torch.equal(before[n], value) for n, value in seen.items())
    assert "seeded: not private" not in again.assumptions
    assert kinds(tmp_path / "run").count("charge") == 1


def test_a_kill_between_charge_and_key_has_spent(tmp_path: Path) -> None:
    """Nobody has that key any more: the charge stays, and a second one is refused, not added."""
    for work in (lambda: fatal(Account, "charge"), lambda: fatal(replay, "keep")):
        folder = tmp_path / str(id(work))
        killed(lambda work=work, folder=folder: (work(), begin(folder)))
        with pytest.raises(BudgetExceeded):
            begin(folder)
        assert kinds(folder).count("charge") == 1


def test_a_finished_run_is_handed_out_again(tmp_path: Path) -> None:
    first = begin(tmp_path)
    before = kinds(tmp_path)
    again = begin(tmp_path)
    assert same_bits(first.model, again.model)
    assert (again.steps, again.receipt) == (first.steps, first.receipt)
    assert kinds(tmp_path) == before
    assert secrets(tmp_path) == []


def test_the_key_is_beside_the_ledger_and_nowhere_else(tmp_path: Path) -> None:
    inputs, _ = people()
    killed(lambda: begin(tmp_path / "a", seed=None, curator=at_step(4), checkpoint=tmp_path / "shared"))
    (secret,) = secrets(tmp_path / "a")
    assert secret.stat().st_mode & 0o777 == 0o600
    kept = json.loads(secret.read_text())
    public = (tmp_path / "shared").read_bytes() + (tmp_path / "a" / "ledger.db").read_bytes()
    for private in (kept["key"], kept["data"]):
        assert private.encode() not in public
        assert bytes.fromhex(private) not in public
    assert inputs[0].numpy().tobytes() not in public
    facts = json.loads(checkpoints.metadata((tmp_path / "shared").read_bytes())["tacit"])
    told = {"tacit fine-tuning", "run", "step", "finished", "updater", "history", "receipt", "head", "guarantee"}
    assert set(facts) == told
    names = {n for n, _ in net().named_parameters()}
    allowed = {f"{kind}.{n}" for kind in ("weight", "mean") for n in names}
    assert all(n in allowed or n.startswith("optimiser.") for n in load((tmp_path / "shared").read_bytes()))


def test_the_name_of_a_run_does_not_depend_on_who_is_there(tmp_path: Path) -> None:
    """It is in the checkpoint, which may be shared: other people, or one with more rows, give the same name."""
    found = []
    for i, (count, owner) in enumerate(((24, torch.arange(24) // 2), (21, torch.arange(21) // 3))):
        killed(
            lambda i=i, count=count, owner=owner: begin(
                tmp_path / str(i), data=(*people(count), owner), unit="patient", curator=at_step(0)
            )
        )
        raw = (tmp_path / str(i) / "run.safetensors").read_bytes()
        found.append(json.loads(checkpoints.metadata(raw)["tacit"])["run"])
    assert found[0] == found[1]


def _other_label() -> Any:
    inputs, labels = people()
    return inputs, (labels + (torch.arange(len(labels)) == 7)) % 3


def _other_weight(of: int) -> nn.Module:
    model = net()
    with torch.no_grad():
        model[of].weight[0, 0] += 1e-3
    return model


def _other_make(kind: str) -> nn.Module:
    model = net()
    if kind == "activation":
        model[1] = nn.Hardtanh()
    else:
        model.register_buffer("offset", torch.ones(3), persistent=False)
    return model


OTHERS: dict[str, dict[str, Any]] = {
    "activation": {"model": _other_make("activation")},
    "buffer": {"model": _other_make("buffer")},
    "label": {"data": _other_label()},
    "order": {"data": tuple(part.flip(0) for part in people())},
    "fewer people": {"data": tuple(part[:-1] for part in people())},
    "learning rate": {"optimizer": DPSGD(**(SGD | {"lr": 0.06}))},
    "clip": {"optimizer": DPSGD(**(SGD | {"clip": 0.6}))},
    "steps": {"optimizer": DPSGD(**(SGD | {"steps": 7}))},
    "size": {"size": 21},
    "seed": {"seed": 4},
    "microbatch": {"microbatch": 3},
    "scheme": {"scheme": "linear"},
    "evaluation": {"evaluate": Evaluation(data=people(5), public=True)},
}


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its fourth step."""
    folder = tmp_path_factory.mktemp("dead")
    killed(lambda: begin(folder, curator=at_step(3)))
    return folder


@pytest.mark.parametrize("what", OTHERS)
def test_what_has_changed_is_refused_and_costs_nothing(what: str, dead: Path) -> None:
    before = kinds(dead)
    with pytest.raises((ValueError, BudgetExceeded), match=r"another run|data is not what it was|other settings"):
        begin(dead, **OTHERS[what])
    assert kinds(dead) == before


class Table64(nn.Module):
    """A model that takes whole numbers, so that its own precision is all that changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).mean(1))  # type: ignore[no-any-return]


def test_another_precision_is_another_run(tmp_path: Path) -> None:
    """The same noise on a sum in float64 would give away what float32 had rounded."""
    words = (torch.arange(48).view(24, 2) % 9, people()[1])
    killed(lambda: begin(tmp_path, model=Table64(), data=words, curator=at_step(3)))
    before = kinds(tmp_path)
    with pytest.raises(ValueError, match="another run"):
        begin(tmp_path, model=Table64().double(), data=words)
    assert kinds(tmp_path) == before
    assert begin(tmp_path, model=Table64(), data=words).steps == 6


SWITCHES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: _switched(torch.set_default_dtype, torch.float64, torch.float32),
    "products": lambda: _switched(torch.set_float32_matmul_precision, "medium", "highest"),
}


@contextlib.contextmanager
def _switched(switch: Callable[[Any], Any], there: Any, back: Any) -> Iterator[None]:
    switch(there)
    try:
        yield
    finally:
        switch(back)


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_that_round_otherwise_make_another_run(switch: str, dead: Path) -> None:
    before = kinds(dead)
    with SWITCHES[switch](), pytest.raises(ValueError, match="another run"):
        begin(dead)
    assert kinds(dead) == before


def test_another_order_of_additions_is_another_run(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    before = kinds(dead)
    with pytest.raises(ValueError, match="another run"):
        begin(dead)
    assert kinds(dead) == before


def test_another_torch_is_another_run(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(ValueError, match="another run"):
        begin(dead)


def damaged(raw: bytes, what: str) -> bytes:
    if what == "truncated":
        return raw[: len(raw) // 2]
    if what == "one bit":
        return raw[:-1] + bytes([raw[-1] ^ 1])
    told = json.loads(checkpoints.metadata(raw)["tacit"])
    tensors = load(raw)
    version = told.pop("tacit fine-tuning")
    if what == "version":
        return checkpoints.pack("fine-tuning", version + 1, tensors, told)
    if what == "finished":
        told["finished"] = True
    if what == "weights":
        tensors["weight.0.bias"] += 1
    return checkpoints.pack("fine-tuning" if what != "kind" else "adapter", version, tensors, told)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("truncated", "damaged"),
        ("one bit", "damaged"),
        ("version", "another version"),
        ("kind", "no checkpoint of a fine-tuning"),
        ("weights", "not a checkpoint that this run wrote"),
        ("finished", "not a checkpoint that this run wrote"),
    ],
)
def test_a_foreign_or_damaged_checkpoint_is_refused(what: str, said: str, dead: Path) -> None:
    path = dead / "run.safetensors"
    raw, before = path.read_bytes(), kinds(dead)
    path.write_bytes(damaged(raw, what))
    try:
        with pytest.raises(ValueError, match=said):
            begin(dead)
    finally:
        path.write_bytes(raw)
    assert kinds(dead) == before
    assert len(secrets(dead)) == 1


def test_a_checkpoint_that_is_swapped_back_after_it_was_read_is_refused(
    dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dead / "run.safetensors"
    raw, read = path.read_bytes(), Path.read_bytes
    path.write_bytes(damaged(raw, "weights"))

    def then_swapped(self: Path) -> bytes:
        found = read(self)
        if self == path:
            path.write_bytes(raw)
        return found

    monkeypatch.setattr(Path, "read_bytes", then_swapped)
    with pytest.raises(ValueError, match="not a checkpoint that this run wrote"):
        begin(dead)
    assert path.read_bytes() == raw


def test_without_its_key_or_with_another_a_run_is_over(tmp_path: Path) -> None:
    killed(lambda: begin(tmp_path, curator=at_step(3)))
    (secret,) = secrets(tmp_path)
    raw, before = secret.read_text(), kinds(tmp_path)
    secret.unlink()
    with pytest.raises(ValueError, match=r"key of the run in .* is gone"):
        begin(tmp_path)
    secret.write_text(json.dumps(json.loads(raw) | {"key": "00" * 32}))
    with pytest.raises(ReceiptError, match="not the key of receipt"):
        begin(tmp_path)
    secret.write_text(raw[:40])
    with pytest.raises(ValueError, match=r"private file .* is damaged"):
        begin(tmp_path)
    assert kinds(tmp_path) == before


def test_a_lost_checkpoint_is_replayed_from_the_same_start_only(whole: Fitted, tmp_path: Path) -> None:
    """The same noise on the gradient of other weights would give the difference of two gradients away."""
    killed(lambda: begin(tmp_path, curator=at_step(3)))
    (tmp_path / "run.safetensors").unlink()
    for layer in (0, 2):
        with pytest.raises(ValueError, match="does not start as it did"):
            begin(tmp_path, model=_other_weight(layer))
    assert same_bits(whole.model, begin(tmp_path).model)


@pytest.mark.parametrize("features", [None, "last"])
def test_another_backbone_under_cached_features_is_refused(features: Any, tmp_path: Path) -> None:
    killed(lambda: begin(tmp_path, scheme="linear", features=features, curator=at_step(3)))
    with pytest.raises(ValueError, match="another run"):
        begin(tmp_path, scheme="linear", features=features, model=_other_weight(0))
    begin(tmp_path, scheme="linear", features=features)
    assert kinds(tmp_path).count("charge") == 1


def test_adapters_begin_at_random_and_go_on_all_the_same(tmp_path: Path) -> None:
    """Another process makes other random adapters; the checkpoint has the ones that were."""
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(12, 1, 8, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)

    def model() -> nn.Module:
        torch.manual_seed(1)
        return ViT(size=8, patch=4, channels=1, width=8, depth=2, heads=2, classes=3)

    def call(folder: Path, chance: int, **more: Any) -> Fitted:
        made = model()
        torch.manual_seed(chance)
        return begin(folder, model=made, data=data, scheme="adapter", head="new", **more)

    expected = call(tmp_path / "whole", 5)
    killed(lambda: call(tmp_path / "run", 5, curator=at_step(3)))
    assert same_bits(expected.model, call(tmp_path / "run", 6).model)


def test_the_noise_is_the_one_that_was_charged(whole: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solved for again it may differ in a digit; the same normals at two scales would give the sum away."""
    killed(lambda: begin(tmp_path, curator=at_step(3)))
    monkeypatch.setattr(account, "_scale", lambda *_, **__: whole.noise_multiplier * 1.001)
    again = begin(tmp_path)
    assert again.noise_multiplier == whole.noise_multiplier
    assert same_bits(whole.model, again.model)


def test_who_takes_a_run_up_stops_the_one_before(tmp_path: Path) -> None:
    """The first may finish the steps that it has leased (they are the same releases), and no more."""
    results: list[Fitted] = []

    def overtaken(event: Any) -> None:
        if event.step == 1:
            results.append(begin(tmp_path))

    with pytest.raises(ReceiptError, match=r"was settled|Another process"):
        begin(tmp_path, curator=overtaken)
    assert len(results) == 1
    assert kinds(tmp_path).count("charge") == kinds(tmp_path).count("settle") == 1
    assert secrets(tmp_path) == []
    before = kinds(tmp_path)
    assert same_bits(results[0].model, begin(tmp_path).model)  # its last checkpoint is still there
    assert kinds(tmp_path) == before


def test_two_that_start_at_once_spend_once(whole: Fitted, tmp_path: Path) -> None:
    """Whoever comes second takes the run up, or finds the budget spent; either way there is one charge."""
    tmp_path.joinpath("run").mkdir()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            with contextlib.suppress(Exception):
                begin(tmp_path / "run", every=1)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert kinds(tmp_path / "run").count("charge") == 1
    assert same_bits(whole.model, begin(tmp_path / "run").model)
    assert kinds(tmp_path / "run").count("charge") == 1
    assert secrets(tmp_path / "run") == []


def test_parts_that_do_not_tell_their_settings_are_refused_first(tmp_path: Path) -> None:
    class Odd(Classes):
        __repr__ = object.__repr__

    with pytest.raises(ValueError, match="repr of their values"):
        begin(tmp_path, task=Odd(3))
    assert kinds(tmp_path) == []


def test_ledgers_that_cannot_keep_a_key_are_refused_first(tmp_path: Path) -> None:
    common: dict[str, Any] = {"optimizer": DPGD(steps=2), "epsilon": 5.0, "delta": 1e-5, "size": 20, "scheme": "full"}
    with pytest.raises(ValueError, match="give ledger="):
        fit(net(), people(), checkpoint=tmp_path / "x", **common)
    with Ledger("sqlite://") as memory, pytest.raises(ValueError, match="not durable"):
        fit(net(), people(), checkpoint=tmp_path / "x", ledger=memory, **common)
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        ledger.url = "postgresql://clinic/ledger"  # as far as its address tells
        with pytest.raises(ValueError, match="Say where keys are kept with private="):
            fit(net(), people(), checkpoint=tmp_path / "x", ledger=ledger, **common)
        assert ledger.entries() == []
        (tmp_path / "keys").mkdir()
        seen: list[Path] = []
        fit(
            net(),
            people(),
            checkpoint=tmp_path / "x",
            private=tmp_path / "keys",
            ledger=ledger,
            curator=lambda _: seen.extend(secrets(tmp_path / "keys")),
            **common,
        )
    assert len(seen) == 2
    assert secrets(tmp_path / "keys") == []


def test_rows_that_cannot_be_read_for_now_stop_the_run_and_are_replayed(tmp_path: Path) -> None:
    """Left out now and there in the replay, a unit would be the difference of two releases under the same noise."""

    class Disk(torch.utils.data.Dataset):  # type: ignore[type-arg]
        broken, targets = False, people()[1]

        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> Any:
            if self.broken and i % 2:
                raise OSError(f"patient {i} has a secret")
            return people()[0][i], self.targets[i]

    disk = Disk()
    with pytest.raises(OSError, match=r"^Some rows cannot be read now") as error:
        begin(tmp_path, data=disk, curator=lambda event: setattr(disk, "broken", event.step == 2))
    assert error.value.__context__ is None
    disk.broken = False
    again = begin(tmp_path, data=disk)
    assert same_bits(again.model, begin(tmp_path / "whole", data=disk).model)
