"""Any input, any output: texts as mappings, tuples, outputs with positions, one logit; against gradients by hand."""

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit.adapt import DP, EATA, SAR, Adapter, Clip, DeYO, Tent, binary, entropy
from tacit.privacy import Ledger

sys.path.insert(0, str(Path(__file__).parent.parent / "data"))
import words

GOOD, BAD = (words.WORDS.index(word) + 4 for word in ("good", "bad"))
OTHERS = [words.WORDS.index(word) + 4 for word in ("film", "plot", "very", "a", "the", "so")]
CLIP, ROWS = 0.5, 8


def sentences(count: int, seed: int, *, drop: float = 0.0, typos: float = 0.0) -> tuple[dict[str, Tensor], Tensor]:
    """Six words around two that say what is thought; words are dropped, or misspelt so that nobody knows them."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=chance)
    tokens = torch.tensor(OTHERS)[torch.randint(0, len(OTHERS), (count, 8), generator=chance)]
    for place in torch.randint(0, 8, (2,), generator=chance).tolist():
        tokens[:, place] = torch.where(labels == 1, GOOD, BAD)
    tokens = torch.where(torch.rand(count, 8, generator=chance) < typos, 1, tokens)
    mask = (torch.rand(count, 8, generator=chance) >= drop).long()
    mask[:, 0] = 1
    ends = [torch.full((count, 1), each) for each in (2, 3)]
    ids = torch.cat([ends[0], tokens, ends[1]], 1)
    ones = torch.ones(count, 1, dtype=torch.long)
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([ones, mask, ones], 1),
        "token_type_ids": torch.zeros_like(ids),
    }, labels


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    """A small BERT that has learnt what is good and bad."""
    torch.manual_seed(0)
    model = words.bert("BertForSequenceClassification", num_labels=2, hidden_dropout_prob=0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(120):
        texts, labels = sentences(32, 1000 + step)
        loss = nn.functional.cross_entropy(model(**texts).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def right(model: Any, texts: dict[str, Tensor], labels: Tensor) -> float:
    with torch.no_grad():
        return (model(**texts).logits.argmax(1) == labels).double().mean().item()


def test_a_small_bert_adapts_to_typos_and_dropped_words(bert: nn.Module) -> None:
    shifted, labels = sentences(400, 5, drop=0.3, typos=0.3)
    clean, truth = sentences(200, 6)
    assert right(bert, clean, truth) > 0.95
    before = right(bert, shifted, labels)
    for form in (Clip(CLIP), DP(10.0, clip=CLIP)):
        adapter = Tent(copy.deepcopy(bert), privacy=form, batch_size=40, lr="auto", seed=1, ledger=ledger_of(form))
        hits = 0.0
        for start in range(0, 400, 40):
            batch = {name: each[start : start + 40] for name, each in shifted.items()}
            hits += float((adapter(batch).argmax(1) == labels[start : start + 40]).sum())
        assert adapter.watch.strain[-1] > 0
        assert hits / 400 > before - 0.03  # never much below the source
        assert right(adapter.model, clean, truth) > 0.9


def ledger_of(form: Any) -> Ledger | None:
    return Ledger("sqlite://") if isinstance(form, DP) else None


def test_the_step_on_texts_is_the_clipped_mean_by_hand(bert: nn.Module) -> None:
    model = copy.deepcopy(bert).double()
    twin = copy.deepcopy(model)
    adapter = Tent(model, privacy=Clip(CLIP), batch_size=ROWS, lr=0.1, momentum=0.0)
    texts, _ = sentences(ROWS, 9, drop=0.3)
    names, own = list(adapter.parameters), dict(twin.named_parameters())
    logits = adapter(texts)
    torch.testing.assert_close(logits, twin(**texts).logits.detach())
    total = {name: torch.zeros_like(own[name]) for name in names}
    for row in range(ROWS):
        loss = entropy(twin(**{key: each[row : row + 1] for key, each in texts.items()}).logits).sum()
        found = torch.autograd.grad(loss, [own[name] for name in names])
        norm = math.sqrt(sum(float(g.square().sum()) for g in found))
        for name, g in zip(names, found, strict=True):
            total[name] += g * min(1.0, CLIP / norm)
    for name in names:
        wanted = own[name].detach() - 0.1 * total[name] / ROWS
        torch.testing.assert_close(adapter.parameters[name].detach(), wanted, rtol=1e-4, atol=1e-7)


def test_texts_of_other_lengths_go_on_and_what_does_not_fit_is_refused_before_a_charge(bert: nn.Module) -> None:
    book = Ledger("sqlite://")
    adapter = Tent(copy.deepcopy(bert), privacy=DP(5.0, clip=CLIP), batch_size=ROWS, lr=0.01, ledger=book)
    texts, _ = sentences(ROWS, 1)
    with pytest.raises(ValueError, match="input_ids"):
        adapter({"attention_mask": texts["attention_mask"]})
    with pytest.raises(ValueError, match="one entry per row"):
        adapter({**texts, "input_ids": "good film"})
    assert [entry.kind for entry in book.entries()] == ["subject"]
    adapter(texts)
    adapter({name: each[:, :6] for name, each in texts.items()})
    assert adapter.steps == 2
    with pytest.raises(ValueError, match="keep to one kind"):
        adapter({"input_ids": texts["input_ids"]})
    assert adapter({name: each[:0] for name, each in texts.items()}).shape == (0, 2)
    assert adapter.steps == 2


class Marks(nn.Module):
    """One decision per position: rows x classes x positions, as segmentation has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(self.norm(first + second)).movedim(-1, 1)


PAIR = tuple(torch.rand(ROWS, 4, 6, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
COUNTS = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(3)) < 0.6
COUNTS[:, 0] = True


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", [None, Clip(CLIP), DP(math.inf, clip=CLIP)])
def test_positions_count_each_and_a_row_is_their_mean(form: Any, masked: bool) -> None:
    model = Marks().double()
    twin = copy.deepcopy(model)
    pair = tuple(each.double() for each in PAIR)

    def read(out: Tensor) -> Any:
        logits = out.movedim(1, -1)
        return (logits, COUNTS[: len(logits)]) if masked and len(logits) == ROWS else logits

    adapter = Tent(model, privacy=form, batch_size=ROWS, lr=0.1, momentum=0.0, logits=read)
    logits = adapter(pair)
    assert logits.shape == (ROWS, 4, 3)
    weights = COUNTS.double() if masked else torch.ones(ROWS, 4, dtype=torch.float64)
    each = entropy(twin(*pair).movedim(1, -1).reshape(-1, 3)).reshape(ROWS, 4)
    own = [twin.norm.weight, twin.norm.bias]
    if form is None:  # as published: the mean over what passes, everywhere
        wanted = torch.autograd.grad((each * weights).sum() / weights.sum(), own)
    else:
        wanted = [torch.zeros_like(p) for p in own]
        for row in range(ROWS):
            loss = (each[row] * weights[row]).sum() / weights[row].sum()
            found = torch.autograd.grad(loss, own, retain_graph=True)
            norm = math.sqrt(sum(float(g.square().sum()) for g in found))
            wanted = [w + g * min(1.0, CLIP / norm) / ROWS for w, g in zip(wanted, found, strict=True)]
    for parameter, before, gradient in zip((model.norm.weight, model.norm.bias), own, wanted, strict=True):
        torch.testing.assert_close(parameter.detach(), before.detach() - 0.1 * gradient, rtol=1e-4, atol=1e-8)


def test_filters_and_perturbations_take_positions_too() -> None:
    for make in (EATA, SAR):
        adapter: Adapter = make(
            Marks(), privacy=Clip(CLIP), batch_size=ROWS, lr=0.01, logits=lambda out: out.movedim(1, -1)
        )
        assert adapter(PAIR).shape == (ROWS, 4, 3)
        assert make(Marks(), batch_size=ROWS, logits=lambda out: out.movedim(1, -1))(PAIR).isfinite().all()
    with pytest.raises(ValueError, match="DeYO"):
        DeYO(Marks(), batch_size=ROWS, logits=lambda out: out.movedim(1, -1))(PAIR)


class OneLogit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.norm(rows))


def test_one_logit_is_two_classes_and_a_regression_is_refused() -> None:
    rows = torch.rand(ROWS, 6)
    with pytest.raises(ValueError, match=r"regression.*logits=adapt\.binary"):
        Tent(OneLogit(), batch_size=ROWS)(rows)
    model, twin = OneLogit().double(), OneLogit().double()
    adapter = Tent(model, batch_size=ROWS, lr=0.1, momentum=0.0, logits=binary)
    assert adapter(rows.double()).shape == (ROWS, 2)
    p = twin(rows.double())[:, 0].sigmoid()
    loss = -(p * p.log() + (1 - p) * (1 - p).log()).mean()
    (wanted,) = torch.autograd.grad(loss, [twin.norm.weight])
    torch.testing.assert_close(model.norm.weight.detach(), twin.norm.weight.detach() - 0.1 * wanted)


def test_outputs_whose_classes_are_nobody_knows_where_are_refused() -> None:
    with pytest.raises(ValueError, match="say where the classes are with logits="):
        Tent(Marks(), batch_size=ROWS)(PAIR)


def test_predictions_alone_teach_nothing() -> None:
    book = Ledger("sqlite://")
    adapter = Tent(OneLogit(), privacy=DP(1.0, clip=CLIP), batch_size=2, logits=binary, ledger=book)
    rows = torch.rand(7, 6)
    before = {name: p.detach().clone() for name, p in adapter.parameters.items()}
    torch.testing.assert_close(adapter.predict(rows), binary(OneLogit()(rows)).detach())
    assert all(p.equal(before[name]) for name, p in adapter.parameters.items())
    assert adapter.steps == 0
    assert [entry.kind for entry in book.entries()] == ["subject"]
