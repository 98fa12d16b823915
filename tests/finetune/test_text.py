"""Private fine-tuning of language models: every scheme, classes and next tokens, people with many messages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import rows_in_checks
from torch import Tensor, nn
from torch.nn import functional
from words import bert, gpt2, sayings, tokenizer

from tacit import data, models
from tacit.finetune import DPGD, DPSGD, Evaluation, Fitted, NextToken, fit
from tacit.finetune._predictions import predictions
from tacit.finetune._tasks import Classes
from tacit.privacy import Ledger

CLIP = 0.5
SMALL: dict[str, Any] = {"bucket": 8, "max_length": 16}


def texts(count: int = 48, *, seed: int = 0, **options: Any) -> data.Texts:
    words, labels = sayings(count, seed)
    return data.Texts(tokenizer(), words, labels, **SMALL, **options)


def messages(count: int = 24, **options: Any) -> data.Texts:
    return data.Texts(tokenizer(marks=False), sayings(count)[0], **SMALL, **options)


def run(model: nn.Module, records: Any, **more: Any) -> Fitted:
    options: dict[str, Any] = {"optimizer": DPSGD(batch_size=16, steps=3, clip=CLIP, lr=0.5), "epsilon": 8.0}
    return fit(model, records, **({"delta": 1e-5, "size": 48, "seed": 3} | options | more))


def sum_of(model: nn.Module, records: Any, **more: Any) -> dict[str, Tensor]:
    """The clipped sum of a single step over everybody."""
    kept: list[dict[str, Tensor]] = []
    run(
        model,
        records,
        optimizer=DPGD(steps=1, clip=CLIP, lr=1e-9),
        curator=lambda event: kept.append({n: v.clone() for n, v in event.clipped_sum.sum.items()}),
        **more,
    )
    return kept[0]


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a))


@pytest.mark.parametrize("scheme", ["full", "bias", "selective", "adapter", "lora", "linear"])
def test_every_scheme_trains_what_it_says_and_nothing_else(scheme: str) -> None:
    torch.manual_seed(1)
    model = models.TextClassifier(bert(), 3)
    public = Evaluation(data=texts(12, seed=5), public=True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = run(model, texts(), scheme=scheme, classes=2, evaluate=public)
    assert found.guarantee.epsilon <= 8.0
    assert 0 <= found.scores["accuracy"] <= 100
    for name, parameter in model.named_parameters():
        old = before.get(name.replace(".base_layer", ""))  # LoRA keeps the weights that it lies beside in there
        if old is None:
            assert scheme in ("adapter", "lora")
            assert parameter.requires_grad
            assert parameter.any(), name  # noise moves all of them, and what starts at zero with it
        elif not name.startswith("head."):
            assert torch.equal(parameter, old) != parameter.requires_grad, name
    assert model.head.weight.shape == (2, 16)
    assert model.head.weight.any()


def test_it_learns_which_word_is_said_more_often() -> None:
    torch.manual_seed(1)
    found = run(
        models.TextClassifier(bert(), 2),
        texts(160),
        scheme="full",
        size=160,
        epsilon=math.inf,
        optimizer=DPSGD(batch_size=64, steps=20, rule="adam", lr=0.03),
        evaluate=Evaluation(data=texts(60, seed=9), public=True),
    )
    assert found.scores["accuracy"] > 90


def test_texts_of_all_lengths_add_up_to_what_one_text_at_a_time_gives() -> None:
    model = models.TextClassifier(bert(), 2).double()
    nn.init.normal_(model.head.weight)
    words, labels = sayings(20)
    found = sum_of(model, texts(20), scheme="selective", head="keep", size=20)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    total = [torch.zeros_like(p) for p in parameters]
    for text, label in zip(words, labels, strict=True):
        inputs = tokenizer()(text, return_tensors="pt")
        gradient = torch.autograd.grad(functional.cross_entropy(model(**inputs), torch.tensor([label])), parameters)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
        total = [t + g * min(1.0, CLIP * (1 - 1e-5) / norm) for t, g in zip(total, gradient, strict=True)]
    for name, value in zip(names, total, strict=True):
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)


def test_features_are_cached_and_pairs_are_read() -> None:
    model = models.TextClassifier(bert(), 2)
    seen: list[int] = []
    model.encoder.register_forward_hook(lambda *args: seen.append(len(args[2].last_hidden_state)))
    words, labels = sayings(48)
    pairs = data.Texts(tokenizer(), list(zip(words, reversed(words), strict=True)), labels, **SMALL)
    run(model, pairs, scheme="linear", optimizer=DPGD(steps=20))
    assert 48 <= sum(seen) <= 48 + 16 + rows_in_checks(48, kinds=3)  # everybody once, and rows to try; not 20 times


@pytest.mark.parametrize("scheme", ["full", "lora"])
def test_a_causal_model_gets_less_perplexed(scheme: str) -> None:
    torch.manual_seed(0)
    public = Evaluation(data=messages(16), public=True, every=8)
    found = run(
        gpt2(),
        messages(48),
        scheme=scheme,
        task=NextToken(14),
        head="keep",
        epsilon=math.inf,
        optimizer=DPSGD(batch_size=32, steps=16, rule="adam", lr=0.03),
        evaluate=public,
    )
    first, last = (score.scores["perplexity"] for score in found.history)
    assert last < first < 14.5  # 14 words: nothing learnt is a perplexity of about 14
    assert found.scores["accuracy"] > 100 / 14
    if scheme == "full":
        assert last < 9


def test_perplexity_is_that_of_transformers() -> None:
    model: Any = gpt2()
    records = messages(30)
    said = predictions(model, records, NextToken(14))
    assert said.owner.tolist() == list(range(30))
    losses, tokens = [], []
    for text in sayings(30)[0]:
        ids = tokenizer(marks=False)(text, return_tensors="pt")["input_ids"]
        tokens.append(ids.shape[1] - 1)
        losses.append(model(ids, labels=ids).loss.item())
    torch.testing.assert_close(said.probs[:, 2], torch.tensor(tokens).double())
    torch.testing.assert_close(said.probs[:, 0] / said.probs[:, 2], torch.tensor(losses).double(), rtol=1e-5, atol=0)
    expected = math.exp(sum(a * b for a, b in zip(losses, tokens, strict=True)) / sum(tokens))
    assert NextToken(14).scores(said.probs, said.labels)["perplexity"] == pytest.approx(expected, rel=1e-6)
    rows = records.rows(torch.arange(30), None)
    with torch.no_grad():
        each = NextToken(14).loss(model(**rows.inputs).logits, rows.labels)
    torch.testing.assert_close(each.double(), torch.tensor(losses).double(), rtol=1e-5, atol=0)


def test_a_text_of_one_token_says_nothing() -> None:
    records = data.Texts(tokenizer(marks=False), ["good", ""], **SMALL)
    rows = records.rows(torch.arange(2), None)
    task = NextToken(14)
    assert task.loss(torch.randn(2, 8, 14), rows.labels).tolist() == [0, 0]
    assert task.right(task.summary(torch.randn(2, 8, 14), rows.labels), rows.labels).tolist() == [0, 0]


def test_a_batch_of_such_texts_is_as_good_as_any_other() -> None:
    alone = data.Texts(tokenizer(marks=False), ["good", *sayings(8)[0]], bucket=1, max_length=16)
    torch.manual_seed(0)
    found = sum_of(gpt2(), alone, task=NextToken(14), head="keep", scheme="full", size=9)
    rest = data.Texts(tokenizer(marks=False), sayings(8)[0], bucket=8, max_length=16)
    torch.manual_seed(0)
    without = sum_of(gpt2(), rest, task=NextToken(14), head="keep", scheme="full", size=9)
    assert distance(found, without) < 1e-5


def test_a_killed_run_goes_on_with_the_same_factors(tmp_path: Path) -> None:
    def trained(folder: Path, **more: Any) -> dict[str, Tensor]:
        folder.mkdir(exist_ok=True)
        torch.manual_seed(1)
        model = models.TextClassifier(bert(), 2)
        with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
            run(model, texts(), scheme="lora", ledger=ledger, checkpoint=folder / "run", every=2, **more)
        return {n: p for n, p in model.named_parameters() if p.requires_grad}

    def kill(event: Any) -> None:
        if event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "a", curator=kill)
    again, whole = trained(tmp_path / "a"), trained(tmp_path / "b")
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_predictions_come_in_the_order_of_the_texts() -> None:
    model = models.TextClassifier(bert(), 2)
    nn.init.normal_(model.head.weight)
    said = predictions(model, texts(30), Classes(2))
    words, labels = sayings(30)
    assert said.labels.tolist() == labels
    with torch.no_grad():
        alone = torch.cat([model(**tokenizer()(text, return_tensors="pt")).softmax(1) for text in words])
    torch.testing.assert_close(said.probs, alone)


@pytest.mark.parametrize("rows_each", [None, 2])
def test_all_messages_of_a_user_move_the_sum_by_the_bound_at_most(rows_each: int | None) -> None:
    words = sayings(30)[0]
    owners = [i % 5 for i in range(24)]

    def summed(own: list[str]) -> dict[str, Tensor]:
        everything = [*words[:24], *own]
        people = owners + [9] * len(own)
        records = data.Texts(tokenizer(marks=False), everything, owners=people, rows_each=rows_each, **SMALL)
        torch.manual_seed(0)
        model = gpt2().double()
        return sum_of(model, records, unit="user", task=NextToken(14), head="keep", scheme="full", size=6)

    without, with_one = summed([]), summed(words[24:26])
    shouting = summed(["good bad"] * 40)
    assert CLIP / 100 < distance(without, with_one) <= CLIP
    assert CLIP / 100 < distance(without, shouting) <= CLIP
    assert 0 < distance(with_one, shouting) <= 2 * CLIP  # replaced by others: one leaves and one comes


def test_a_charged_evaluation_and_the_ledger(ledger: Ledger) -> None:
    held = Evaluation(data=messages(16), subject="held out", epsilon=50.0, size=16)
    found = run(
        gpt2(), messages(), task=NextToken(14), head="keep", scheme="selective", ledger=ledger, evaluate=held, size=24
    )
    assert set(found.scores) == {"accuracy"}
    assert {subject.name for subject in ledger.subjects()} == {"fine-tuning", "held out"}


def test_refusals_come_before_any_charge(ledger: Ledger) -> None:
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (bert(), texts(), {"unit": "user"}, "One unit of these data is a sample"),
        (bert(), texts(owners=[0, 1] * 24), {"unit": "sample"}, "One unit of these data is a user"),
        (bert(), data.Texts(tokenizer(), *sayings(48), max_length=40), {}, "does not take these rows"),
        (gpt2(), messages(), {"task": NextToken(14)}, "head='keep'"),
        (gpt2(), texts(), {"task": NextToken(14), "head": "keep"}, "without labels"),
        (gpt2(), messages(), {"task": NextToken(9), "head": "keep"}, "Tokens must be 0 to 8"),
    ]
    for body, records, options, said in cases:
        model = models.TextClassifier(body, 2) if "task" not in options else body
        with pytest.raises(ValueError, match=said):
            run(model, records, ledger=ledger, **options)
    assert not ledger.entries()
