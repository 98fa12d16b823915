"""What is cached of a row is that row's own: a frozen part that mixes rows is refused before anything is charged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from words import bert, sayings, tokenizer

from tacit import data, models
from tacit.data import TensorRecords
from tacit.finetune import DPSGD, Backbone, cache_blocks, extract, fit
from tacit.finetune._one_pass import OnePass
from tacit.gradients import RowsMixed
from tacit.models import ViT, blocks_of
from tacit.privacy import Ledger

Mix = Callable[[Tensor], Tensor]
MIXING: dict[str, Mix] = {
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "neighbour": lambda x: x + 0.1 * x.roll(1, 0),
    "largest": lambda x: x / x.abs().amax(),
    "only many": lambda x: x - x.mean(0, keepdim=True) if len(x) > 40 else x,
}


def images(count: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 3


def vit(mix: Mix | None = None) -> nn.Module:
    """A model whose first block is given what `mix` makes of its rows."""
    torch.manual_seed(1)
    made = ViT(channels=1, classes=3, size=8, patch=4, width=8, depth=3, heads=2)
    if mix is not None:
        blocks_of(made)[0][1].register_forward_pre_hook(lambda _, args: (mix(args[0]), *args[1:]))
    return made.eval()


def run(model: nn.Module, rows: Any, **more: Any) -> None:
    optimizer = DPSGD(batch_size=16, steps=2, clip=0.5, lr=0.5)
    fit(model, rows, optimizer=optimizer, epsilon=8.0, delta=1e-5, size=48, seed=3, **more)


@pytest.mark.parametrize("mix", MIXING)
@pytest.mark.parametrize(
    "how",
    [{"scheme": "full", "last_blocks": 1}, {"scheme": "linear"}, {"scheme": "linear", "features": "all"}],
    ids=["blocks", "features", "all features"],
)
def test_a_frozen_part_that_mixes_rows_is_refused_before_the_charge(mix: str, how: dict[str, Any]) -> None:
    ledger = Ledger("sqlite://")
    with pytest.raises(RowsMixed, match="whose outputs are cached does not keep rows apart"):
        run(vit(MIXING[mix]), images(), ledger=ledger, subject="s", **how)
    assert not ledger.entries()


@pytest.mark.parametrize("mix", MIXING)
def test_activations_and_features_of_ones_own_are_refused_as_well(mix: str) -> None:
    with pytest.raises(RowsMixed, match=r"between .*body\.0"):
        cache_blocks(vit(MIXING[mix]), images(), last_blocks=1)
    with pytest.raises(RowsMixed, match=r"between .*body\.0"):
        extract(Backbone(vit(MIXING[mix])), TensorRecords(*images()))


class Bytes(nn.Module):
    """Takes integers, of which a blank row has one value only: nothing shows before rows are read."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.body, self.head = mix, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.mix(x.float() / 255))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("mix", MIXING)
def test_rows_of_integers(mix: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (48, 6), dtype=torch.uint8, generator=generator)
    table = TensorRecords(rows, torch.zeros(48, dtype=torch.long))
    with pytest.raises(RowsMixed, match=r"does not keep rows apart|it cannot be cached"):  # drawn rows, or a real one
        extract(Backbone(Bytes(MIXING[mix])), table)
    assert extract(Backbone(Bytes(lambda x: x)), table).isfinite().all()


@pytest.mark.parametrize("length", [8, 16])
def test_texts_of_every_length(length: int) -> None:
    """A block that mixes rows of one length only; synthetic texts before the rows are read have the greatest."""
    words, labels = sayings(48, 0)
    texts = data.Texts(tokenizer(), words, labels, bucket=8, max_length=16)
    assert set(texts.row_sizes.tolist()) == {8, 16}

    def mixed(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        return (x - x.mean(0, keepdim=True) if length == x.shape[1] else x, *args[1:])

    torch.manual_seed(1)
    model = models.TextClassifier(bert(), 3)
    cache_blocks(model, texts, last_blocks=1)
    blocks_of(model)[0][1].register_forward_pre_hook(mixed)
    with pytest.raises(RowsMixed, match="does not keep rows apart"):
        cache_blocks(model, texts, last_blocks=1)


def marked(x: Tensor) -> Tensor:
    """Adds the mean of the batch where rows carry a mark that synthetic rows never have: one number twice."""
    return x + 3 * x.mean(0, keepdim=True) if bool((x[:, 0] == x[:, 1]).all()) else x


def test_a_real_row_is_looked_at_and_the_sentence_is_fixed() -> None:
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    rows[:, 1] = rows[:, 0]
    model = Bytes(lambda x: marked(x * 255))
    said = set()
    for table in (rows, rows * 2):
        with pytest.raises(RowsMixed, match="Nothing of it was released") as error:
            extract(Backbone(model), TensorRecords(table, torch.zeros(40, dtype=torch.long)))
        said.add(str(error.value))
    assert len(said) == 1


@pytest.mark.parametrize("bad", [0.0, 1e-38, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("place", range(0, 20, 3))
def test_no_row_stops_a_part_that_keeps_rows_apart_or_changes_another(bad: float, place: int) -> None:
    """Twenty rows: whichever is looked at, the stop tells of no row where rows are kept apart."""
    rows, labels = images(20)
    plain = cache_blocks(vit(), (rows, labels), last_blocks=1).rows(torch.arange(20), None).inputs
    rows[place] = bad
    found = cache_blocks(vit(), (rows, labels), last_blocks=1).rows(torch.arange(20), None).inputs
    others = torch.arange(20) != place
    assert torch.equal(found[others], plain[others])
    features = extract(Backbone(vit()), TensorRecords(rows, labels))
    assert features[others].isfinite().all()


def test_the_checks_leave_the_model_and_torchs_generator_as_they_were() -> None:
    model = vit()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    extract(Backbone(model), TensorRecords(*images()))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Ordered(nn.Module):
    """Refuses rows whose second integer is below the first: a mixture of two rows, not a row."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] > x[:, 1]).any()):
            raise ValueError("a span that ends before it starts")
        return x.float() * self.one


def test_integers_that_go_together_in_their_own_row_only_do_not_stop_caching() -> None:
    spans = torch.tensor([[0, 9]]).repeat(20, 1)
    spans[3] = torch.tensor([471, 472])
    found = [values for _, values in OnePass(Ordered(), TensorRecords(spans, torch.zeros(20, dtype=torch.long)))]
    assert torch.equal(torch.cat(found), spans.float())
