"""What may be tried against the engine: rows mistaken for something else, mixing that hides, traces left behind."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_close, brute_force
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tacit.gradients import AdaptiveQuantile, Automatic, Engine, PerLayer, clipped_sum
from tacit.gradients._traced_parameter import TracedParameter

Forward = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slow paths announce themselves, which other tests check
        yield


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape).double()


def product(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The last part of the batch is the output gradient."""
    return (model(*batch[:-1]) * batch[-1]).flatten(1).sum(1)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Net(nn.Module):
    """Some layers and a forward over them."""

    def __init__(self, run: Forward, **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, nn.Parameter | nn.Module):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self, *inputs)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(rand(*shape))


def right(model: nn.Module, loss: Any, *batches: Any, clip: float = 0.3) -> Engine:
    """One engine, met in this order, agrees with brute force on every batch and leaves no gradient behind."""
    model = model.double()
    engine = Engine(model, loss, clip=clip)
    for batch in batches:
        expected, _ = brute_force(model, loss, batch, clip, list(range(batch[0].shape[0])))
        assert_close(engine(batch).sum, expected, 1e-6)
        assert all(p.grad is None for p in model.parameters())
    return engine


def refused(model: nn.Module, loss: Any, batch: Any, match: str = "Rows are mixed") -> None:
    with pytest.raises(ValueError, match=match):
        Engine(model, loss, clip=1.0)(batch)


# -- rows that look like something else


def sequences(*sizes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    return [(rand(n, length, 4), rand(n, length, 4)) for n, length in sizes]


@pytest.mark.parametrize("length", [3, 4, 7, 21])
def test_a_batch_as_long_as_its_sequences(length: int) -> None:
    sizes = sequences((5, length), (length, length), (1, length), (length, 4), (4, 2 * length))
    time_first = Net(lambda m, x: torch.tanh(m.f(x.transpose(0, 1))).transpose(0, 1), f=nn.Linear(4, 4))
    assert "autograd, row by row" not in right(time_first, product, *sizes).served.values()
    both = Net(lambda m, x: m.f(torch.tanh(m.f(x.transpose(0, 1)).transpose(0, 1))), f=nn.Linear(4, 4))
    right(both, product, *sizes)
    places = Net(
        lambda m, x: m.f(torch.tanh(x + m.p(torch.arange(x.shape[1])))), f=nn.Linear(4, 4), p=nn.Embedding(50, 4)
    )
    right(places, product, *sizes)


def test_a_constant_as_long_as_the_batch() -> None:
    net = Net(
        lambda m, x: torch.einsum("bi,ij,jk->bk", m.f(x), m.k, m.w), f=nn.Linear(8, 8), k=rand(8, 4), w=weight(4, 3)
    )
    right(net, product, *((rand(n, 8), rand(n, 3)) for n in (5, 8, 4, 1)))


@pytest.mark.parametrize("first", [True, False])
def test_one_function_on_a_parameter_with_rows_and_without(first: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        alone = m.k * m.w if first else 0
        y = x * m.w
        return m.f(y + (alone if first else m.k * m.w))

    net = Net(run, f=nn.Linear(4, 3), k=rand(4), w=weight(4))
    right(net, product, *((rand(n, 4), rand(n, 3)) for n in (5, 4, 1)))
    flat = Net(lambda m, x: m.f(x * m.w + (m.k * m.w)[0]), f=nn.Linear(4, 3), k=rand(1, 4), w=weight(4))
    right(flat, product, *((rand(n, 4), rand(n, 3)) for n in (5, 4, 1)))


def test_one_table_for_words_and_places() -> None:
    net = Net(
        lambda m, x: m.f(torch.tanh(m.e(x) + m.e(torch.arange(x.shape[1])))), e=nn.Embedding(9, 4), f=nn.Linear(4, 4)
    )
    sizes = [(5, 4), (4, 4), (1, 4), (6, 5)]
    right(net, product, *((torch.randint(0, 9, size), rand(*size, 4)) for size in sizes))


def picked(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x.new_zeros(*x.shape).index_put((mask,), m.f(x[mask]))


@pytest.mark.parametrize("kind", ["mask", "far", "zero"])
def test_positions_picked_by_their_values(kind: str) -> None:
    # Eight positions of two rows in a batch of four: as many as two for each row.
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[0], mask[1, :2] = True, True
    x, g = rand(4, 6, 4), rand(4, 6, 4)
    if kind == "mask":
        right(Net(picked, f=nn.Linear(4, 4)), product, (x, torch.ones_like(mask), g), (x, mask, g))
        return
    away = 200.0 if kind == "far" else 0.0
    given = x.masked_fill(~mask[..., None], away)
    net = Net(lambda m, x: picked(m, x, x[..., 0] != away), f=nn.Linear(4, 4))
    right(net, product, (given, g), (x, g), (given, g))


def test_a_branch_that_only_longer_rows_take() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        if x.shape[1] > 4:
            return torch.addcmul(m.f(x.transpose(0, 1)).transpose(0, 1), x, m.p)
        return m.f(x) * m.p

    right(Net(run, f=nn.Linear(4, 4), p=weight(4)), product, *sequences((5, 3), (6, 6), (6, 5), (1, 6)))


def test_small_losses_are_checked_as_strictly() -> None:
    time_first = Net(
        lambda m, x: m.g(torch.tanh(m.f(x.transpose(0, 1)))).transpose(0, 1), f=nn.Linear(4, 4), g=nn.Linear(4, 4)
    )
    right(time_first, lambda m, b: 1e-9 * product(m, b), *sequences((5, 6), (6, 6)), clip=1e-9)


# -- mixing that hides


def mixing(mix: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Net(lambda _, x: mix(x)), nn.Linear(4, 3))


def labelled(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randint(0, 3, (rows,))


@pytest.mark.parametrize("width", range(2, 8))
def test_mixing_by_a_row_that_stands_out(width: int) -> None:
    batch = torch.randn(6, width), torch.randint(0, 3, (6,))
    refused(nn.Sequential(Net(lambda _, x: x / x.abs().amax()), nn.Linear(width, 3)), classify, batch)

    def nearest(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        z = model(batch[0])
        return (torch.cdist(z, z.detach()) + 1e3 * torch.eye(len(z))).amin(1)

    refused(nn.Linear(width, 4), nearest, batch[:1])


def test_mixing_of_negative_numbers_only() -> None:
    refused(nn.Sequential(Net(lambda _, x: x - F.relu(-x).mean(0)), nn.Linear(4, 3)), classify, labelled())


def test_mixing_through_a_detached_statistic() -> None:
    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = classify(model, batch)
        return losses * torch.softmax(losses.detach(), 0)

    refused(nn.Linear(4, 3), weighted, labelled())


def test_mixing_in_a_small_loss() -> None:
    refused(mixing(lambda x: x - x.mean(0)), lambda m, b: 1e-8 * classify(m, b), labelled())


def test_mixing_that_starts_with_training_or_with_another_module() -> None:
    class InTraining(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.training else x

    model = nn.Sequential(nn.Linear(4, 4), InTraining(), nn.Linear(4, 3)).eval()
    engine = Engine(model, classify, clip=1.0)
    engine(labelled())
    model.train()
    with pytest.raises(ValueError, match="Rows are mixed in layer 1"):
        engine(labelled())
    model.eval()
    engine(labelled())
    model[1] = Net(lambda _, x: x - x.mean(0))
    with pytest.raises(ValueError, match="Rows are mixed in layer 1"):
        engine(labelled())


@pytest.mark.parametrize("word", [0, 7])
def test_mixing_of_integers_after_a_batch_of_one_word(word: int) -> None:
    net = Net(lambda m, x: m.f(m.e(x).mean(1) - m.e(x).mean((0, 1))), e=nn.Embedding(9, 4), f=nn.Linear(4, 3))
    engine = Engine(net, classify, clip=1.0)
    with pytest.raises(ValueError, match="Rows are mixed"):  # by the public rows already, with other words
        engine.validate((torch.full((2, 5), word), torch.tensor([0, 1])))


def test_mixing_by_a_loss_that_shares_its_code_with_another() -> None:
    class Trainer:
        def __init__(self, mix: bool) -> None:
            self.mix = mix

        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return classify(model, (batch[0] - batch[0].mean(0) if self.mix else batch[0], batch[1]))

    def made(mix: bool) -> Any:
        return lambda model, batch: Trainer(mix).loss(model, batch)

    def default(mix: bool) -> Any:
        return lambda model, batch, mix=mix: Trainer(mix).loss(model, batch)

    for make in (lambda mix: Trainer(mix).loss, made, default, lambda mix: functools.partial(default(False), mix=mix)):
        model = nn.Linear(4, 3)
        clipped_sum(model, make(False), labelled(), clip=1.0)
        with pytest.raises(ValueError, match="Rows are mixed"):
            clipped_sum(model, make(True), labelled(), clip=1.0)


# -- parameters that go their own ways


@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_a_parameter_that_the_loss_holds_itself(size: float) -> None:
    model = nn.Linear(4, 3).double()
    held = list(model.parameters())
    right(
        model,
        lambda m, b: product(m, b) + size * sum(p.square().sum() for p in held),
        (rand(5, 4), rand(5, 3)),
    )


def test_a_trainable_parameter_outside_the_model_is_refused_and_untouched() -> None:
    head = nn.Linear(4, 3)
    refused(nn.Linear(4, 4), lambda m, b: classify(head, (m(b[0]), b[1])), labelled(), "not the model's")
    assert head.weight.grad is None
    head.requires_grad_(False)
    Engine(nn.Linear(4, 4), lambda m, b: classify(head, (m(b[0]), b[1])), clip=1.0)(labelled())


def test_parameters_tied_replaced_or_frozen_later_are_named_and_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = Engine(model, product, clip=1.0)
    rows = torch.randn(5, 4), torch.randn(5, 4)
    engine(rows)
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"1\.weight"):
        engine(rows)
    assert model[1].weight is model[0].weight
    model[0].bias = frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    with pytest.raises(ValueError, match=r"0\.bias"):
        engine(rows)
    assert model[0].bias is frozen


@pytest.mark.parametrize(
    "model",
    [
        Net(lambda m, x: torch.cdist(m.f(x), m.p), f=nn.Linear(4, 4), p=weight(6, 4)),
        Net(lambda m, x: torch.matmul(m.p, m.f(x).T).T, f=nn.Linear(4, 4), p=weight(6, 4)),
        Net(lambda m, x: m.f(x).sub_(m.p).div_(m.q), f=nn.Linear(4, 6), p=weight(6), q=weight(6)),
        Net(
            lambda m, x: m.r(x[:, None], m.h.expand(1, len(x), 6).contiguous())[0][:, 0],
            r=nn.GRU(4, 6, batch_first=True),
            h=weight(1, 1, 6),
        ),
        Net(lambda m, x: torch.where((x[:, :1] > 0), m.f(x), m.g(x)), f=nn.Linear(4, 6), g=nn.Linear(4, 6)),
        Net(lambda m, x: picked(m, m.g(x)[:, None], (x[:, :1] > 0))[:, 0], f=nn.Linear(6, 6), g=nn.Linear(4, 6)),
        Net(
            lambda m, x: torch.einsum("ni,ij->nj", x, m.a @ m.b) * m.c * m.c,
            a=weight(4, 2),
            b=weight(2, 6),
            c=weight(6),
        ),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 6)),
        torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 6)).double(), backend="eager"),
        nn.DataParallel(nn.Linear(4, 6)),
    ],
)
def test_unusual_uses_of_parameters(model: nn.Module) -> None:
    right(model, product, *((rand(n, 4), rand(n, 6)) for n in (5, 6, 3, 1)))


def test_a_layer_used_outside_and_inside_a_checkpoint() -> None:
    layer = nn.Linear(4, 4).double()
    twice = Net(lambda m, x: checkpoint(lambda h: m.f(h).tanh(), m.f(x).tanh(), use_reentrant=True), f=layer)
    rows = rand(5, 4), rand(5, 4)
    expected, _ = brute_force(Net(lambda m, x: m.f(m.f(x).tanh()).tanh(), f=layer), product, rows, 0.3, list(range(5)))
    assert_close(Engine(twice, product, clip=0.3)(rows).sum, expected, 1e-9)


def test_an_embedding_with_sparse_gradients() -> None:
    dense = Net(lambda m, x: m.e(x).sum(1), e=nn.Embedding(9, 4)).double()
    sparse = copy.deepcopy(dense)
    sparse.e.sparse = True
    rows = torch.randint(0, 9, (5, 6)), rand(5, 4)
    expected = Engine(dense, product, clip=0.3)(rows)
    assert_close(Engine(sparse, product, clip=0.3)(rows).sum, expected.sum, 1e-12)


def test_rows_outside_the_domain_of_the_model() -> None:
    right(nn.Linear(4, 1), lambda m, b: torch.log(b[0] - 20).sum(1) * m(b[0])[:, 0], (rand(5, 4).abs() + 23,))


# -- buffers and traces


def test_a_counter_of_calls_and_a_power_iteration_are_no_memory_of_rows() -> None:
    def counted(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.f(x)

    model = Net(counted, f=nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), calls=torch.zeros(()).long())
    engine = Engine(model, classify, clip=1.0)
    before = {n: b.clone() for n, b in model.named_buffers()}
    engine.validate(labelled())
    assert all(torch.equal(before[n], b) for n, b in model.named_buffers())


def test_no_handle_stays_in_the_model() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    engine = right(model, product, (rand(5, 4), rand(5, 3)))
    engine((rand(5, 4), rand(5, 3)))
    assert not any(isinstance(v, TracedParameter) for m in model.modules() for v in m.__dict__.values())


def test_a_forward_of_the_users_own_stays() -> None:
    model = nn.LSTM(4, 4, batch_first=True).double()
    theirs = model.forward
    model.forward = own = lambda *given: theirs(*given)
    Engine(model, lambda m, b: (m(b[0])[0] * b[1]).flatten(1).sum(1), clip=1.0)(sequences((5, 3))[0])
    assert model.__dict__["forward"] is own


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        raise RuntimeError("failed")


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("how", ["shape", "forward", "backward"])
def test_after_a_failure_everything_is_as_before(how: str, learnt: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    model[0].weight.grad = grad = torch.ones(5, 4)
    fails = not learnt

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = classify(m, batch)
        if not fails:
            return losses
        if how == "forward":
            raise RuntimeError("failed")
        return losses.mean() if how == "shape" else _Fails.apply(losses)

    rows = labelled()
    engine = Engine(model, loss, clip=1.0)
    before = copy.deepcopy(model.state_dict())
    if learnt:
        engine.validate(rows)
        fails = True
    state = torch.get_rng_state()
    with pytest.raises((RuntimeError, ValueError), match=r"failed|one loss per row"):
        engine(rows)
    assert learnt or torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert model[0].weight.grad is grad
    assert bool((grad == 1).all())
    assert model[0].bias.grad is None
    assert (model[1].p, model.training) == (0.5, True)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_inputs_changed_in_place_are_drawn_again() -> None:
    net = Net(lambda m, x: m.f(x.sub_(0.5).div_(0.25)), f=nn.Linear(4, 3)).double()
    engine = Engine(net, product, clip=1.0)
    engine((rand(5, 4), rand(5, 3)))
    assert set(engine.served.values()) == {"linear"}


# -- policies


@pytest.mark.parametrize("policy", [PerLayer(0.5), AdaptiveQuantile(0.5), Automatic(0.5)])
def test_bad_rows_and_no_rows_under_every_policy(policy: Any) -> None:
    engine = Engine(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), product, clip=policy)
    x, g = torch.randn(6, 4), torch.randn(6, 3)
    g[2], x[4] = float("nan"), float("inf")
    kept = [0, 1, 3, 5]
    found, expected, none = engine((x, g)), engine((x[kept], g[kept])), engine((x[:0], g[:0]))
    assert found.bounds == expected.bounds == none.bounds
    for name, value in expected.sum.items():
        assert torch.allclose(found.sum[name], value, atol=1e-6), name
        assert float(none.sum[name].abs().sum()) == 0.0


@pytest.mark.parametrize("clip", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_hold_for_units_of_any_size(clip: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)
    engine = Engine(model, product, clip=1.0)
    for size in (1e-30, 1e-10, 1.0, 1e10, 1e19):
        for rows in (1, 4):
            batch = torch.randint(0, 5, (rows, 7)), (torch.randn(rows, 7, 4) * size).to(dtype)
            found = engine(batch, unit_ids=[3] * rows, clip=PerLayer(clip))
            for block, names in found.blocks.items():
                squares = [found.sum[n].double().square().sum() for n in names]
                assert float(torch.stack(squares).sum().sqrt()) <= found.bounds[block]
