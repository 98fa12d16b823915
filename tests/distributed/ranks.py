"""One rank of a run, as torchrun starts it: arguments are a folder, the number of steps, and when to die."""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from tacit import adapt, finetune
from tacit.finetune import PrivateLoop, make_private
from tacit.privacy import Budget, Ledger

SIZE = 96


def join() -> None:
    """A rank that lost another one ends after this time, whatever it waits for."""
    distributed.init_process_group("gloo", timeout=timedelta(minutes=5))


def leave() -> None:
    """End this rank at once, when all are done, and take nothing down in order.

    A thread of gloo (or of a backward pass) that lets go of a Python object asks for the interpreter's lock. If the
    interpreter is shutting down by then, CPython ends that thread by unwinding it, which C++ answers with
    std::terminate: "terminate called without an active exception", and SIGABRT after a run in which nothing went wrong.
    """
    distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(SIZE, 6, generator=drawn), torch.randint(3, (SIZE,), generator=drawn)


def fit(folder: Path, steps: int, *, checkpoint: bool = False, curator: object = None) -> finetune.Fitted:
    inputs, labels = data()
    return finetune.fit(
        net().train(),
        (inputs, labels),
        scheme="full",
        unit="patient",
        unit_ids=torch.arange(SIZE) // 2,
        optimizer=finetune.DPSGD(batch_size=30, steps=steps, lr=0.5),
        epsilon=4.0,
        delta=1e-3,
        size=SIZE // 2,
        ledger=Ledger(f"sqlite:///{folder}/ledger.db"),
        subject="clinic",
        seed=5,
        checkpoint=folder / "run.safetensors" if checkpoint else None,
        every=1,
        curator=curator,  # type: ignore[arg-type]
    )


def probe(folder: Path) -> finetune.Fitted:
    """A head on cached features, with evaluations of public and of private data on the way."""
    inputs, labels = data()
    torch.manual_seed(7)
    backbone = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3))
    ledger = Ledger(f"sqlite:///{folder}/probe.db")
    return finetune.fit(
        backbone,
        (inputs, labels),
        scheme="linear",
        optimizer=finetune.DPSGD(batch_size=40, steps=4, lr=0.5),
        epsilon=4.0,
        delta=1e-3,
        size=SIZE,
        ledger=ledger,
        subject="clinic",
        seed=5,
        evaluate=finetune.Evaluation(
            data=(inputs[:50], labels[:50]), subject="held out", epsilon=2.0, size=50, every=2
        ),
    )


def on_a_receipt(folder: Path) -> finetune.Fitted:
    """A run that was charged before: the leader has the receipt, the others what the ledger says of it."""
    ledger, optimizer = Ledger(f"sqlite:///{folder}/paid.db"), finetune.DPGD(steps=3, lr=0.5, free_step=False)
    box = [""]
    receipt: Any = None
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        ledger.subject("clinic", Budget(4.0, 1e-3))
        receipt = ledger.charge("clinic", optimizer.event(3.0, SIZE), stage="tune", seed=5)
        box = [receipt.id]
    if distributed.is_initialized():
        distributed.broadcast_object_list(box)
    receipt = receipt or ledger.receipt(box[0])
    paid: dict[str, Any] = {"receipt": receipt, "delta": 1e-3, "size": SIZE}
    return finetune.fit(net().train(), data(), scheme="full", optimizer=optimizer, **paid)


def own_loop(folder: Path, *, shuffled: bool = False) -> PrivateLoop:
    inputs, labels = data()
    if shuffled:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(distributed.get_rank()))
        inputs, labels = inputs[order], labels[order]
    model = net().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    private = make_private(
        model,
        optimizer,
        DataLoader(TensorDataset(inputs, labels), batch_size=60, shuffle=True),
        nn.CrossEntropyLoss(),
        epsilon=4.0,
        delta=1e-3,
        steps=3,
        clip=0.7,
        ledger=Ledger(f"sqlite:///{folder}/own.db"),
        subject="clinic",
        seed=5,
    )
    for batch in private:
        private.step(batch)
        scheduler.step()
    return private


def image_net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4)).eval()


def adapter(folder: Path, name: str = "stream") -> adapt.Adapter:
    privacy = adapt.DP(epsilon=3.0, delta=1e-6, clip=0.5, horizon=6, noise="correlated", contributions=2, separation=2)
    return adapt.Tent(
        image_net(),
        privacy=privacy,
        batch_size=40,
        lr=0.05,
        ledger=Ledger(f"sqlite:///{folder}/{name}.db"),
        subject="stream",
        unit="patient",
        monitor=True,
        seed=3,
    )


def stream(step: int) -> tuple[torch.Tensor, list[int]]:
    """Batches of different sizes, of people who come in several rows and again; one is smaller than a portion."""
    drawn = torch.Generator().manual_seed(step)
    rows = (40, 9, 37, 40, 1, 40)[step]
    images = torch.randn(rows, 1, 3, 4, generator=drawn)
    images[0, 0, 0, 0] = torch.nan if step == 2 else 0.5
    return images, torch.randint(30, (rows,), generator=drawn).tolist()


def adapted(folder: Path) -> tuple[adapt.Adapter, list[torch.Tensor]]:
    """Six steps; between the third and the fourth the stream is saved, and goes on in another adapter."""
    found, logits = adapter(folder), []
    for step in range(6):
        if step == 3:
            adapt.save_adapter(found, folder / "stream.safetensors")
            found = adapter(folder)
            assert adapt.resume_adapter(found, folder / "stream.safetensors")
            assert found.steps == 3
        images, who = stream(step)
        logits.append(found(images, unit_ids=who))
    return found, logits


def main(folder: Path, steps: int, dies: str) -> None:
    join()
    rank = distributed.get_rank()

    def curator(event: object) -> None:
        mark = folder / "died"
        if dies == "leader" and getattr(event, "step", -1) == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    if dies == "follower" and rank == 1 and not (folder / "died").exists():
        (folder / "died").touch()
        from tacit.finetune._team_run import TeamRun

        add_up, seen = TeamRun._add_up, [0]

        def dying(self: TeamRun, *given: object) -> object:
            seen[0] += 1
            if seen[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return add_up(self, *given)  # type: ignore[arg-type]

        TeamRun._add_up = dying  # type: ignore[method-assign,assignment]
    if dies == "shuffles":
        own_loop(folder, shuffled=True)
        leave()
    facts: dict[str, object] = {}
    tensors: dict[str, torch.Tensor] = {}
    if dies == "never":
        private = own_loop(folder)
        facts |= {"own": private.guarantee.epsilon, "receipt": len(private.receipt), "said": private.assumptions}
        tensors |= {f"own.{name}": p.detach() for name, p in private.model.named_parameters()}
        paid = on_a_receipt(folder)
        facts |= {"paid": paid.guarantee.epsilon, "receipt of the leader": len(paid.receipt)}
        tensors |= {f"paid.{name}": p.detach() for name, p in paid.model.named_parameters()}
        probed = probe(folder)
        facts |= {"history": [(score.step, score.scores) for score in probed.history]}
        tensors |= {f"probe.{name}": p.detach() for name, p in probed.model.named_parameters()}
        stepped, logits = adapted(folder)
        assert stepped.guarantee is not None
        facts |= {"stream": stepped.guarantee.epsilon, "assumes": stepped.assumptions}
        tensors |= {f"stream.{name}": p.detach() for name, p in stepped.model.named_parameters()}
        tensors |= {f"logits.{step}": value for step, value in enumerate(logits)}
    fitted = fit(folder, steps, checkpoint=dies != "never", curator=curator if rank == 0 else None)
    tensors |= {f"fit.{name}": p.detach() for name, p in fitted.model.named_parameters()}
    facts |= {"epsilon": fitted.guarantee.epsilon, "steps": fitted.steps}
    save_file(tensors, folder / f"rank{rank}.safetensors")
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
