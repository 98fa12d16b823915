"""Training the last blocks on cached activations: the run that it stands for, its rows, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from words import bert, sayings, tokenizer

from tacit import data, finetune, models
from tacit.finetune import DPSGD, DPZO, Evaluation, Fitted, _linear_probe, fit
from tacit.finetune._linear_probe import LinearProbe
from tacit.models import ViT, blocks_of
from tacit.privacy import Ledger

SMALL: dict[str, Any] = {"bucket": 8, "max_length": 16}


def texts(count: int = 48, *, seed: int = 0, **options: Any) -> data.Texts:
    words, labels = sayings(count, seed)
    return data.Texts(tokenizer(), words, labels, **SMALL, **options)


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return models.TextClassifier(bert(), 3)


def vit() -> nn.Module:
    torch.manual_seed(1)
    return ViT(channels=1, classes=3, size=8, patch=4, width=8, depth=3, heads=2)


def run(model: nn.Module, records: Any, **more: Any) -> Fitted:
    options: dict[str, Any] = {"optimizer": DPSGD(batch_size=16, steps=4, clip=0.5, lr=0.5), "epsilon": 8.0}
    return fit(model, records, **({"delta": 1e-5, "size": 48, "seed": 3} | options | more))


def trained(fitted: Fitted) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in fitted.model.named_parameters() if p.requires_grad}


def only_above(model: nn.Module, first: int) -> list[str]:
    """Names by hand: what a test may know of this one model."""
    number = {name: i for i, (name, _) in enumerate(blocks_of(model))}
    return [n for n, _ in model.named_parameters() if any(n.startswith(b) and i >= first for b, i in number.items())]


def uncached(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """From here on `fit(last_blocks=...)` runs the whole model, with everything else frozen by name."""

    def whole(model: nn.Module, records: Any, held_out: Any, last_blocks: int, **how: Any) -> Any:
        del last_blocks, how
        kept = {*only_above(model, first), *(n for n, _ in model.named_parameters() if n.startswith(("head", "norm.")))}
        for name, p in model.named_parameters():
            p.requires_grad_(p.requires_grad and name in kept)
        return LinearProbe(model=model, body=model, records=records, held_out=held_out)

    monkeypatch.setattr(_linear_probe, "_on_blocks", whole)


@pytest.mark.parametrize("scheme", ["lora", "selective", "bias", "full", "adapter"])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_the_same_weights_as_without_a_cache(scheme: str, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = DPSGD(batch_size=16, steps=4, clip=0.5, lr=0.05, rule=rule)
    public = Evaluation(data=texts(12, seed=5), public=True)
    fast = run(classifier(), texts(), scheme=scheme, last_blocks=1, optimizer=optimizer, evaluate=public)
    uncached(monkeypatch, 1)
    slow = run(classifier(), texts(), scheme=scheme, last_blocks=1, optimizer=optimizer, evaluate=public)
    assert set(trained(fast)) == set(trained(slow))
    for (name, a), b in zip(fast.model.named_parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=name)
    assert (fast.scores, fast.guarantee, fast.trained) == (slow.scores, slow.guarantee, slow.trained)


def test_people_with_several_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = torch.arange(48) // 3
    each: dict[str, Any] = {"owners": owners, "rows_each": 2}
    fast = run(classifier(), texts(**each), size=16, last_blocks=1)
    uncached(monkeypatch, 1)
    slow = run(classifier(), texts(**each), size=16, last_blocks=1)
    for a, b in zip(trained(fast).values(), trained(slow).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)
    assert str(fast.guarantee.unit) == "user"


def test_rows_with_owners_are_cached_as_units() -> None:
    images, labels = torch.rand(12, 1, 8, 8), torch.arange(12) % 3
    owners = torch.arange(12) // 4
    rows = finetune.cache_blocks(vit(), (images, labels), last_blocks=1, unit="patient", unit_ids=owners, rows_each=2)
    assert (len(rows), rows.unit, rows.most_rows) == (3, "patient", 2)
    shown = rows.rows(torch.tensor([2, 0]), torch.full((2, rows.uniforms), 0.5))
    whole = rows.rows(torch.tensor([2, 0]), None)
    assert shown.owner.tolist() == [0, 0, 1, 1]
    assert whole.owner.tolist() == [0] * 4 + [1] * 4
    assert all(any(torch.equal(row, other) for other in whole.inputs) for row in shown.inputs)


@pytest.mark.parametrize("last_blocks", [1, 2])
def test_images(last_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = torch.rand(48, 1, 8, 8), torch.arange(48) % 3
    more: dict[str, Any] = {"scheme": "selective", "last_blocks": last_blocks, "classes": 3}
    fast = run(vit(), (images, labels), evaluate=Evaluation(data=(images, labels), public=True), **more)
    uncached(monkeypatch, 3 - last_blocks)
    slow = run(vit(), (images, labels), evaluate=Evaluation(data=(images, labels), public=True), **more)
    assert set(trained(fast)) == set(trained(slow))
    for a, b in zip(trained(fast).values(), trained(slow).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)
    assert fast.scores == slow.scores


def test_the_blocks_below_run_once_for_each_row_and_keep_their_weights() -> None:
    model = classifier()
    before = {n: p.clone() for n, p in model.named_parameters() if n.startswith("encoder") and "layer.1" not in n}
    seen: list[int] = []
    inside = next(module for module in blocks_of(model)[0][1].modules() if isinstance(module, nn.Linear))
    inside.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    rows = finetune.cache_blocks(model, texts(), last_blocks=1)
    tried = 4 * 4  # four synthetic rows: the whole, below, and twice to see if numbers are drawn
    few = 3 * (2 * 3 * 3)  # do rows stay apart? three, of synthetic texts, and of each of the two lengths
    many = 2 * 7 + 2 * 48  # seven, and as many as there are
    assert sum(seen) <= 48 + tried + few + many + 48  # and each of them among copies of a row
    counts = []
    for steps in (2, 6):
        seen.clear()
        run(model, rows, last_blocks=1, optimizer=DPSGD(batch_size=16, steps=steps, clip=0.5, lr=0.5))
        counts.append(len(seen))
    assert counts[0] == counts[1]
    after = dict(model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_zeroth_order_on_cached_blocks() -> None:
    fitted = run(classifier(), texts(), last_blocks=1, optimizer=DPZO(batch_size=16, steps=3, lr=0.01))
    assert fitted.steps == 3


def test_a_row_that_cannot_be_read_adds_nothing() -> None:
    images, labels = torch.rand(48, 1, 8, 8), torch.arange(48) % 3

    class Files:
        targets = labels

        def __len__(self) -> int:
            return 48

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            if i == 20:
                raise OSError("broken")
            return images[i], int(labels[i])

    rows = finetune.cache_blocks(vit(), Files(), last_blocks=1)
    found = rows.rows(torch.tensor([19, 20, 21]), torch.zeros(3, 0)).inputs
    assert found.isnan().flatten(1).all(1).tolist() == [False, True, False]
    assert found[[0, 2]].isfinite().all()
    fitted = run(vit(), rows, last_blocks=1, classes=3)
    assert all(value.isfinite().all() for value in trained(fitted).values())


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if event.step == 3:
            raise KeyboardInterrupt

    def durable(name: str, **more: Any) -> Fitted:
        kept: dict[str, Any] = {"checkpoint": tmp_path / f"{name}.safetensors", "every": 2, "last_blocks": 1}
        with Ledger(f"sqlite:///{tmp_path / name}.db") as ledger:
            return run(classifier(), texts(), ledger=ledger, **kept, **more)

    whole = durable("whole")
    with pytest.raises(KeyboardInterrupt):
        durable("parts", curator=stop)
    resumed = durable("parts")
    for a, b in zip(trained(whole).values(), trained(resumed).values(), strict=True):
        assert torch.equal(a, b)


class Around(nn.Module):
    """A net with a path around its last block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        return self.head(self.blocks[2](self.blocks[1](first)) + first)


def test_refusals() -> None:
    ledger = Ledger("sqlite://")
    refused: list[tuple[Any, Any, dict[str, Any], str]] = [
        (classifier(), texts(), {"last_blocks": 2}, "below the number of blocks, 2"),
        (classifier(), texts(), {"last_blocks": 0}, "at least 1"),
        (classifier(), texts(), {"last_blocks": 1, "features": "last", "scheme": "linear"}, "goes without features"),
        (Around(), (torch.randn(20, 4), torch.arange(20) % 2), {"last_blocks": 1}, "around it"),
        (classifier(), finetune.cache_blocks(classifier(), texts(), last_blocks=1), {}, "give last_blocks="),
    ]
    other = classifier()
    with torch.no_grad():
        for parameter in blocks_of(other)[0][1].parameters():
            parameter.mul_(1.5)
    refused.append((other, refused[-1][1], {"last_blocks": 1}, "of another model"))
    images = data.TensorRecords(torch.rand(20, 1, 8, 8), torch.arange(20) % 2, augment=2)
    refused.append((vit(), images, {"last_blocks": 1}, "not augmented"))
    for model, rows, more, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            run(model, rows, ledger=ledger, subject="s", **more)
    assert not ledger.entries()
