"""Who else is there changes no unit's arithmetic: a unit whose gradient is zero leaves every other bit as it was."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import ClippedSum, Engine, RowsMixed
from tacit.gradients._grad_factors import Factored, PerRow
from tacit.gradients._units import Units


def weighted(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return (model(*batch[:1], *batch[2:]) * batch[1]).flatten(1).sum(1)


def differ(one: ClippedSum, other: ClippedSum) -> int:
    return sum(int((one.sum[name] != other.sum[name]).sum()) for name in one.sum)


@pytest.mark.parametrize("extra", [1, 4, 9])
def test_a_convolution_of_units_beside_a_unit_of_another_size(extra: int) -> None:
    # two rows of a unit cancel, so that an allowance for rounding decides its norm; 16 positions and 3 rows are just
    # below where Gram matrices would pay if the mean number of rows decided
    torch.manual_seed(0)
    units, model = 20, nn.Conv2d(64, 64, 3, padding=1, bias=False)
    x = torch.randn(units, 1, 64, 4, 4).expand(-1, 3, -1, -1, -1).flatten(0, 1)
    signs = torch.tensor([1.0, -1.0, 0.003]).repeat(units).reshape(-1, 1, 1, 1)
    y = torch.randn(units, 1, 64, 4, 4).expand(-1, 3, -1, -1, -1).flatten(0, 1) * signs
    ids = torch.arange(units).repeat_interleave(3)
    engine = Engine(model, weighted, clip=1.0)
    alone = engine((x, y), unit_ids=ids)
    nothing = torch.zeros(extra, 64, 4, 4)
    more = torch.cat([ids, torch.full((extra,), units)])
    assert differ(alone, engine((torch.cat([x, nothing]), torch.cat([y, nothing])), unit_ids=more)) == 0


@pytest.mark.parametrize("rows", [3, 8, 33])
def test_the_mean_of_long_units_beside_a_unit_of_another_size(rows: int) -> None:
    torch.manual_seed(1)
    units, model = 16, nn.LayerNorm(24)
    x = torch.randn(units * rows, 5, 24)
    y = 1e6 * torch.randn(units * rows, 5, 24)
    ids = torch.arange(units).repeat_interleave(rows)
    engine = Engine(model, weighted, clip=0.01)
    alone = engine((x, y), unit_ids=ids)
    nothing = torch.zeros(rows + 1, 5, 24)
    more = torch.cat([ids, torch.full((rows + 1,), units)])
    assert differ(alone, engine((torch.cat([x, nothing]), torch.cat([y, nothing])), unit_ids=more)) == 0
    mixed = torch.randperm(len(ids))  # rows of a unit anywhere: only their own order matters, so sort within units
    order = mixed[torch.argsort(ids[mixed], stable=True)].reshape(units, rows).sort(1).values.T.flatten()
    apart = engine((x[order], y[order]), unit_ids=ids[order])
    assert differ(alone, apart) == 0


class Skipping(nn.Module):
    """Rows with a flag skip the layer: rows stay apart, but the layer sees fewer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        plain = flag == 0
        return x.clone().index_put((torch.nonzero(plain).flatten(),), self.linear(x[plain]))


def test_an_integer_of_one_unit_does_not_send_the_others_another_way() -> None:
    torch.manual_seed(2)
    units, model = 24, Skipping()
    signs = torch.ones(16)
    signs[::2] = -1
    signs[0] *= 1.02
    x = torch.randn(1, 1, 32).expand(units, 16, -1).clone()
    y = torch.randn(1, 1, 32) * signs[None, :, None].expand(units, -1, -1)
    flags = torch.zeros(units, dtype=torch.long)

    def run(*more: Tensor) -> ClippedSum:
        engine = Engine(model, weighted, clip=1.0)
        engine.validate((torch.zeros_like(x), torch.zeros_like(y), flags), rows=units)  # as loops do before a charge
        given = tuple(torch.cat(pair) for pair in zip((x, y, flags), more, strict=True)) if more else (x, y, flags)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning would tell that such a row is there
            found = engine(given)
            assert engine(given).sum["linear.weight"].equal(found.sum["linear.weight"])
        assert not engine.by_row
        return found

    nothing = torch.zeros(1, 16, 32)
    assert differ(run(), run(nothing, nothing, torch.ones(1, dtype=torch.long))) == 0


class Doubling(nn.Module):
    """With a flag the layer is used without being seen: its gradient is the double of what the fast path records."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        seen: Tensor = self.linear(x)
        return seen * (1 + flag)[:, None, None]


def test_integers_that_change_only_numbers_are_served_as_before() -> None:
    torch.manual_seed(3)
    model, flags = Doubling(), torch.zeros(6, dtype=torch.long)
    x, y = torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    engine = Engine(model, weighted, clip=1e6)
    engine.validate((x, y, flags))
    flags[2] = 1
    truth = torch.autograd.grad(weighted(model, (x, y, flags)).sum(), [model.linear.weight])[0]
    assert torch.allclose(engine((x, y, flags)).sum["linear.weight"].float(), truth, atol=1e-5)


def test_a_path_that_is_wrong_without_raising_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.gradients import _engine, _validation

    monkeypatch.setattr(_engine, "widened", lambda domains: domains)  # as if the model took no other integers
    torch.manual_seed(4)
    model, flags = Doubling(), torch.zeros(6, dtype=torch.long)
    batch = (torch.randn(6, 3, 4), torch.randn(6, 3, 4), flags)
    engine = Engine(model, weighted, clip=1.0)
    engine.validate(batch)
    right = _validation._agrees
    monkeypatch.setattr(_validation, "_agrees", lambda *given: right(*given) and False)
    with pytest.raises(RowsMixed, match="on public rows"):
        engine((*batch[:2], torch.tensor([0, 1, 0, 1, 0, 1])))


class Masked(nn.Module):
    """Positions beyond a row's length have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        seen: Tensor = self.linear(x)
        return seen * (torch.arange(x.shape[1]) < length)[..., None]


class Annealed:
    """A loss with a public number that changes at every step."""

    def __init__(self) -> None:
        self.temperature = 1.0

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return weighted(model, batch) * self.temperature


@pytest.mark.parametrize("model", [Masked(), Skipping()], ids=["length", "flag"])
@pytest.mark.parametrize("annealed", [False, True])
def test_integers_of_one_unit_change_no_other_units_path_at_any_step(model: nn.Module, annealed: bool) -> None:
    torch.manual_seed(5)
    units, positions, skips = 24, 16, isinstance(model, Skipping)
    signs = torch.ones(positions)
    signs[::2] = -1
    signs[0] *= 1.02
    x = 100 * torch.randn(1, 1, 32).expand(units, positions, -1)
    y = torch.randn(1, 1, 32) * signs[None, :, None].expand(units, -1, -1)
    usual = torch.zeros(units, dtype=torch.long) if skips else torch.full((units, 1), 4)
    nothing = torch.zeros(1, positions, 32)

    def run(last: int) -> list[ClippedSum]:
        public = Annealed()
        engine = Engine(model, public.loss, clip=1.0)
        engine.validate((torch.zeros_like(x), torch.zeros_like(y), usual), rows=units + 1)
        given = torch.cat([x, nothing]), torch.cat([y, nothing]), torch.cat([usual, torch.full_like(usual[:1], last)])
        found = []
        for _ in range(3):
            public.temperature *= 0.999 if annealed else 1
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found.append(engine(given))
        return found

    for one, other in zip(run(int(usual.flatten()[0])), run(1 if skips else 12), strict=True):
        assert differ(one, other) == 0


class Spans(nn.Module):
    """Refuses rows whose end is before their start."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, start: Tensor, end: Tensor) -> Tensor:
        if bool((start > end).any()):
            raise ValueError(f"a span from {start.max()}")
        found: Tensor = self.linear(x)
        return found


def test_integers_that_go_together_in_their_own_row_only_stop_nothing() -> None:
    torch.manual_seed(6)
    x, start, end = torch.randn(20, 8), torch.zeros(20, dtype=torch.long), torch.full((20,), 9)
    engine = Engine(Spans(), lambda model, batch: model(*batch).square().sum(1), clip=1.0)
    engine.validate((torch.zeros_like(x), start, end))
    usual = engine((x, start, end))
    start[3], end[3] = 471, 472
    assert differ(usual, engine((x, start, end))) == 0


class OneByOne(Spans):
    """Rows in a Python loop: no fast rule covers it."""

    def forward(self, x: Tensor, start: Tensor, end: Tensor) -> Tensor:
        super().forward(x, start, end)
        return torch.stack([self.linear(row) for row in x])


@pytest.mark.filterwarnings("ignore:The layer 'linear':UserWarning")  # said of public rows
def test_integers_of_one_unit_stop_no_model_that_goes_row_by_row() -> None:
    torch.manual_seed(6)
    x, start, end = torch.randn(20, 8), torch.zeros(20, dtype=torch.long), torch.full((20,), 9)
    engine = Engine(OneByOne(), lambda model, batch: model(*batch).square().sum(1), clip=1.0)
    engine.validate((torch.zeros_like(x), start, end))
    assert engine.by_row
    odd = start.clone(), end.clone()
    odd[0][3], odd[1][3] = 471, 472
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = engine((x, *odd))  # "a span from 471", before
    assert differ(found, engine((x, start, end))) == 0


class Levels(nn.Module):
    """Rows of level 40 have no finite loss; 0 and 1 are no levels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        if bool((level < 2).any()):
            raise ValueError("no level")
        found: Tensor = self.linear(x).sum(1) / (level - 40)
        return found


def test_a_row_without_a_finite_gradient_does_not_stop_a_run_as_mixing() -> None:
    torch.manual_seed(6)
    x = torch.randn(20, 8)
    engine = Engine(Levels(), lambda model, batch: model(*batch), clip=1.0)
    engine.validate((torch.zeros_like(x), torch.full((20,), 4)))
    level = torch.arange(20) % 8 + 4
    level[9] = 40  # is drawn for the row that is changed, and not for another
    assert engine((x, level)).private.nonfinite == 1


class Pooled(nn.Module):
    """The mean over a row's own length, which is 0 in blank rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        seen = self.linear(x) * (torch.arange(x.shape[1]) < length[:, None])[..., None]
        return seen.sum(1) / length[:, None]


@pytest.mark.parametrize("blank", [0, 16])
def test_lengths_of_blank_rows_are_neither_mixing_nor_slow(blank: int) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return nn.functional.cross_entropy(model(*batch[:2]), batch[2], reduction="none")

    nothing = torch.zeros(20, dtype=torch.long)
    engine = Engine(Pooled(), loss, clip=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.validate((torch.zeros(20, 16, 8), nothing + blank, nothing))
        total = engine((torch.randn(20, 16, 8), torch.arange(20) % 16 + 1, torch.arange(20) % 2))
    assert not engine.by_row
    assert total.private.nonfinite == 0


def test_numbers_of_a_loss_that_is_an_object_are_seen() -> None:
    class Loss:
        mixing = False

        def __init__(self) -> None:
            self.mixes = False

        def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
            found: Tensor = model(batch).square().sum(1)
            return found * found.mean() if self.mixes else found

    loss = Loss()
    engine = Engine(nn.Linear(4, 3), loss, clip=1.0)
    engine(torch.randn(8, 4))
    loss.mixes = True
    with pytest.raises(RowsMixed):
        engine(torch.randn(8, 4))


class Grown(nn.Module):
    """A weight that is computed from a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w.exp()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 4])
def test_a_computed_parameter_stays_within_the_bound_in_every_precision(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(7)
    engine = Engine(Grown(width).to(dtype), lambda model, batch: (model(batch[0]) * batch[1]).sum(1), clip=1.0)
    x, y = torch.randn(60, 1, width).to(dtype), (50 * torch.randn(60, 1, width)).to(dtype)
    assert max(float(engine(pair).sum["w"].double().norm()) for pair in zip(x, y, strict=True)) <= 1.0


@pytest.mark.parametrize("kernels", [True, False])
def test_gram_norms_that_underflow_are_not_too_small(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.gradients import _kernels

    if not kernels:
        monkeypatch.setattr(_kernels, "serves", lambda *_: False)
    layer = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(layer.weight)
    engine = Engine(layer, weighted, clip=1.0)
    engine.validate((torch.zeros(4, 16, 64), torch.zeros(4, 16, 64)))
    large = torch.full((1, 16, 64), 0.9e10 / 8)
    try:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            for size in (1e-19, 1e-21, 2.4e-23):
                for clip in (1e-6, 1e-8, 1e-10, 1e-12):
                    found = engine((large, torch.full((1, 16, 64), size)), clip=clip).sum["weight"]
                    assert float(found.norm()) <= clip * (1 + 1e-9)
    finally:
        torch.set_flush_denormal(False)


def test_norms_and_sums_are_in_full_precision() -> None:
    from tacit.gradients._norms import full_precision

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with full_precision():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_thread_does_not_end_the_full_precision_of_another() -> None:
    """The switches are the process's: a step that leaves must not take them from one that is still computing."""
    from tacit.gradients._norms import full_precision

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        first, second = full_precision(), full_precision()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        second.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def in_columns(t: Tensor) -> Tensor:
    """The same numbers, those of one feature side by side, as tables have them."""
    return t.movedim(-1, 0).contiguous().movedim(0, -1)


def test_a_table_in_columns_beside_a_unit_of_another_size() -> None:
    """Rows that cancel, but for a share that points one way; before, a unit of zeros moved others' sum by 277 clips.

    The view of a table in columns went another way than the copy of it, with another allowance for rounding.
    """
    units, rows, more, model = 400, 24, 5, nn.Linear(20, 3, bias=False)
    signs = torch.tensor([1.0, -0.999]).repeat(units * rows // 2)[:, None].expand(-1, 3)
    x, y = (torch.cat([t, torch.zeros(more, t.shape[1])]) for t in (torch.ones(units * rows, 20), signs))
    ids = torch.cat([torch.arange(units).repeat_interleave(rows), torch.full((more,), units)])
    engine = Engine(model, weighted, clip=1e-4)
    alone, beside = (
        engine((in_columns(x[:count]), y[:count]), unit_ids=ids[:count]) for count in (units * rows, len(ids))
    )
    assert differ(alone, beside) == 0


@pytest.mark.parametrize(
    ("positions", "rows", "m", "k"), [(1, 24, 30, 20), (50, 8, 13, 9), (6, 1, 13, 9), (6, 4, 1, 9)]
)
def test_norms_of_features_in_columns_beside_a_unit_of_another_size(positions: int, rows: int, m: int, k: int) -> None:
    units, more = 4, rows + 5
    u, v = (in_columns(torch.randn(units * rows + more, positions, size)) for size in (m, k))
    ids = torch.cat([torch.arange(units).repeat_interleave(rows), torch.full((more,), units)])

    def norms(count: int) -> Tensor:
        given = Units.from_labels(ids[:count])
        squares = Factored(u[:count], v[:count], (m, k)).square_norms(given, repair=False)
        return torch.stack([squares, PerRow(u[:count, 0]).settle(given).square_norms(given, repair=False)])

    assert torch.equal(norms(units * rows), norms(len(ids))[:, :units])
