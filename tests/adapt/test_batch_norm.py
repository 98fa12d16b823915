"""BatchNorm layers: the source's statistics, those of a batch as published, and private ones in the same release."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from obvious import sigma_of
from torch import Tensor, nn

from tacit.adapt import DP, Adapter, Clip, Tent, entropy, resume_adapter, save_adapter
from tacit.adapt._side_blocks import bounded_total, split
from tacit.adapt._statistics import BatchStatistics, _Source, best_share, calmest_rate
from tacit.gradients import AdaptiveQuantile
from tacit.privacy import Budget, Ledger

ROWS, CLIP = 6, 0.3


def net(seed: int = 0) -> nn.Sequential:
    """Two BatchNorm layers with statistics that are neither 0 nor 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5), nn.BatchNorm1d(5),
            nn.Linear(5, 4),
        )  # fmt: skip
        model.train()
        model(torch.rand(64, 1, 8, 8))
        return model.double().eval()


def images(rows: int = ROWS, seed: int = 1, shift: float = 0.7) -> Tensor:
    return shift + torch.rand(rows, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).double()


def private(form: DP | None = None, model: nn.Module | None = None, **more: Any) -> Adapter:
    options: dict[str, Any] = {"batch_size": ROWS, "lr": 0.01, "ledger": Ledger("sqlite://"), "statistics": "private"}
    return Tent(model or net(), privacy=form or DP(10.0, clip=CLIP), **options | more)


def own_moments(model: nn.Sequential, row: Tensor) -> Tensor:
    """What one row adds, written out: standardised by the source, mean over positions of z and of z^2 - 1."""
    first, second = model[1], model[5]
    before = model[0](row[None])[0]
    hidden = model[4](model[3](model[2](model[1](before[None]))))[0]
    parts: list[list[float]] = [[], []]
    for layer, values in ((first, before.flatten(1)), (second, hidden[:, None])):
        for channel in range(layer.num_features):
            z = (values[channel] - layer.running_mean[channel]) / (layer.running_var[channel] + layer.eps).sqrt()
            parts[0].append(z.mean().item())
            parts[1].append((z * z).mean().item() - 1)
    return torch.tensor(parts[0] + parts[1], dtype=torch.float64)


def test_without_noise_the_moments_are_those_of_the_rows_by_hand() -> None:
    model = net()
    source = copy.deepcopy(model)
    adapter = private(DP(math.inf, clip=CLIP), model)
    bound = math.sqrt(2 * 8) / 2
    rows = images()
    wanted = torch.zeros(16, dtype=torch.float64)
    with torch.no_grad():
        for row in rows:
            moments = own_moments(source, row)
            wanted += moments * min(1.0, bound / moments.norm().item())
    adapter(rows)
    statistics = adapter.statistics
    assert statistics is not None
    torch.testing.assert_close(statistics.moments, 0.4 * wanted / ROWS, rtol=2e-5, atol=1e-7)
    shift, more = statistics.moments[:3], statistics.moments[8:11]
    mean, var = source[1].running_mean, source[1].running_var
    torch.testing.assert_close(model[1].running_mean, mean + shift * (var + source[1].eps).sqrt())
    torch.testing.assert_close(model[1].running_var, var * (1 + more - shift**2))


def test_predictions_use_what_was_released_before_the_batch() -> None:
    adapter = private()
    adapter(images())
    twin = copy.deepcopy(adapter.model)
    rows = images(seed=5)
    with torch.no_grad():
        torch.testing.assert_close(adapter(rows), twin(rows))


def test_as_published_statistics_are_those_of_the_batch() -> None:
    """Tent's own code: no running statistics, one backward through the batch's, SGD with momentum."""
    model, twin = net(), net()
    adapter = Tent(model, batch_size=ROWS, lr=0.05, momentum=0.9)
    for layer in twin:
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.train()
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
        else:
            layer.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(4):
        rows = images(seed=step)
        wanted = twin(rows)
        loss = entropy(wanted).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(adapter(rows), wanted.detach())
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    source = net()
    assert model[1].running_mean.equal(source[1].running_mean)


def test_clipped_with_the_statistics_of_the_batch_as_constants() -> None:
    model = net()
    adapter = Tent(model, privacy=Clip(CLIP), statistics="batch", batch_size=ROWS, lr=0.05)
    twin, rows = net(), images()
    twin[1].train(), twin[5].train()
    torch.testing.assert_close(adapter(rows), twin(rows).detach())


def test_the_blocks_together_cost_what_was_paid() -> None:
    """Replaced, a unit moves each block by twice its bound; the joint Gaussian's mu, by hand, is that of the budget."""
    for policy in (CLIP, AdaptiveQuantile(CLIP)):
        for horizon in (None, 40):
            more: dict[str, Any] = {} if horizon is None else {"noise": "correlated", "horizon": horizon}
            form = DP(10.0, 1e-6, clip=policy, **more)
            adapter = private(form)
            bounds = {"gradient": CLIP, "batch statistics": 2.0}
            if isinstance(policy, AdaptiveQuantile):
                bounds["count"] = 0.5
            noise = split(form.noise_multiplier(), bounds, adapter.shares, policy, ROWS)
            assert noise is not None
            mu = math.sqrt(sum((2 * bounds[name] / (noise[name] * bounds[name])) ** 2 for name in bounds))
            assert mu == pytest.approx(Budget(10.0, 1e-6).mu, rel=1e-6)
            assert 2 / mu == pytest.approx(sigma_of(10.0, 1e-6), rel=1e-6)
            adapter(images())
            assert adapter.guarantee is not None
            assert adapter.guarantee.epsilon == pytest.approx(10.0, rel=1e-6)


def test_released_statistics_have_the_noise_of_their_share() -> None:
    """Blank rows at the source's statistics: what is released is noise. 400 x 16 draws; 6 standard errors."""
    form = DP(5.0, 1e-6, clip=CLIP)
    adapter = private(form, lr=1e-9)
    share = adapter.shares["batch statistics"]
    found = []
    for _ in range(100):
        adapter(images() + math.nan)  # rows that are not numbers contribute nothing
        found.append(adapter.statistics.latest * ROWS)  # type: ignore[union-attr]
    wanted = sigma_of(5.0, 1e-6) / math.sqrt(share) * 2.0
    draws = torch.cat(found)
    assert draws.std().item() == pytest.approx(wanted, rel=6 / math.sqrt(2 * len(draws)))
    assert abs(draws.mean().item()) < 6 * wanted / math.sqrt(len(draws))


@pytest.mark.parametrize("odd", [0.0, 1e6, 1e30, math.nan, math.inf, -1e12])
def test_one_row_moves_the_sum_by_its_bound_and_nobody_elses_part(odd: float) -> None:
    totals = []
    for value in (0.5, odd):
        found: list[Tensor] = []
        adapter = private(curator=lambda event, found=found: found.append(event.clipped_sum.sum["batch statistics"]))
        rows = images()
        rows[2] = value
        adapter(rows)
        totals.append(found[0])
    others = images()[[0, 1, 3, 4, 5]]
    with torch.no_grad():
        alone = [own_moments(net(), row) for row in others]
    rest = sum(m * min(1.0, 2.0 / m.norm().item()) for m in alone)
    for total in totals:
        assert (total - rest).norm() <= 2.0 * (1 + 1e-4)
    assert (totals[0] - totals[1]).norm() <= 2 * 2.0


def test_a_unit_of_many_rows_is_the_mean_of_those_that_take_part() -> None:
    values = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 9.0], [math.nan, 0.0], [50.0, 50.0]])
    units, mute = torch.tensor([7, 7, 3, 7, 3]), torch.tensor([False, False, False, False, True])
    wanted = torch.tensor([2.0, 0.0]) + torch.tensor([0.0, 5.0])  # (3 + 1) / 2, and 9 scaled down to 5
    found = bounded_total(values, 5.0, units, mute)
    torch.testing.assert_close(found, wanted.double(), rtol=2e-5, atol=1e-9)


def slow_total(values: Tensor, bound: float, units: list[int], mute: list[bool]) -> Tensor:
    """The bounded sum, written out unit by unit."""
    total = torch.zeros(values.shape[1], dtype=torch.float64)
    for unit in sorted(set(units)):
        mine = [v.double() for v, u, m in zip(values, units, mute, strict=True) if u == unit and not m]
        mine = [row for row in mine if bool(row.isfinite().all())]
        if mine:
            mean = torch.stack(mine).mean(0)
            total += mean * min(1.0, bound / max(mean.norm().item(), 1e-300))
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 700])
def test_bounded_sums_are_those_written_out(dtype: torch.dtype, width: int) -> None:
    """Rows below and beyond the bound, of zeros, not finite, muted; a view with gaps; alone and in units.

    A part is short by 1e-5, and by 2.5e-6 where its norm is taken in float32: at most that of its bound, of 12 parts.
    """
    off = 1.3e-5 * 0.7
    generator = torch.Generator().manual_seed(width)
    values = torch.randn(12, width + 2, generator=generator).to(dtype)[:, 1:-1]
    values *= torch.logspace(-20, 18, 12, dtype=torch.float64)[:, None].to(dtype)
    values[3], values[5, 0], values[7, -1] = 0.0, math.nan, -math.inf
    mute, units = [place in (1, 8, 11) for place in range(12)], [4, 9, 4, 2, 2, 7, 9, 1, 0, 1, 4, 3]
    for silent in ([False] * 12, mute):
        told = torch.tensor(silent)
        for owners in (list(range(12)), units):
            given = None if owners != units else torch.tensor(units)
            found = bounded_total(values, 0.7, given, told if any(silent) else None)
            assert (found - slow_total(values, 0.7, owners, silent)).norm().item() <= 12 * off
    for place in range(12):
        row = values[place : place + 1]
        alone = bounded_total(row, 0.7, None, None)
        assert alone.norm().item() <= 0.7
        assert (alone - slow_total(row, 0.7, [0], [False])).norm().item() <= off


@pytest.mark.parametrize("far", [0.0, 1e3])
def test_moments_in_torch_are_those_of_the_kernel(far: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x = far + torch.randn(5, 4, 6, 7, generator=generator)
    source = _Source(far + torch.rand(4, generator=generator), 0.5 + torch.rand(4, generator=generator), 1e-5)
    for given in (x, x.double(), x.to(memory_format=torch.channels_last), x[:, :, 0, 0]):
        found = torch.full((5, 2, 9), torch.nan)  # columns of a larger matrix, as `watched` has them
        source.moments(given, found.transpose(0, 1)[..., 3:7])
        torch.testing.assert_close(
            found[..., 3:7].transpose(0, 1), source.in_torch(given.float()), rtol=1e-4, atol=1e-4
        )
        assert bool(found[..., [0, 1, 2, 7, 8]].isnan().all())


@pytest.mark.parametrize("again", [lambda x: x[:1], lambda x: x.repeat(2, 1, 1, 1)])
def test_a_layer_that_sees_other_rows_than_the_batch_is_refused(again: Any) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.BatchNorm2d(1), nn.BatchNorm2d(1)

        def forward(self, x: Tensor) -> Tensor:
            self.second(again(x))
            return self.first(x).flatten(1)[:, :4]

    ledger = Ledger("sqlite://")
    with pytest.raises(ValueError, match="see the rows of the batch"):
        private(model=Other().double().eval(), ledger=ledger, subject="people")(images())
    assert ledger.spent("people").epsilon == 0


def test_a_layer_that_is_used_twice_has_the_mean_of_its_uses() -> None:
    layer = nn.BatchNorm1d(3)
    statistics = BatchStatistics(nn.Sequential(layer))
    first, second = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(2)).unbind()
    with statistics.watched() as noted:
        layer.eval()(first), layer(second), layer(2 * first)
    each = [
        torch.cat(list(_Source(torch.zeros(3), torch.ones(3), layer.eps).in_torch(x)), 1)
        for x in (first, second, 2 * first)
    ]
    torch.testing.assert_close(noted[0], torch.stack(each).mean(0))


def test_layers_are_set_one_by_one_as_together() -> None:
    """Every layer's own James-Stein factor, mean and variance, written out layer by layer."""
    model, source = net(), net()
    statistics = BatchStatistics(model)
    generator = torch.Generator().manual_seed(4)
    statistics.moments = 0.5 * torch.randn(16, dtype=torch.float64, generator=generator)
    statistics.noise = 0.05
    statistics.publish()
    start = 0
    for place in (1, 5):
        layer, size = source[place], source[place].num_features
        first, second = statistics.moments[start : start + size], statistics.moments[8 + start : 8 + start + size]
        first, second = (part * max(0.0, 1 - 0.05 / part.square().mean().item()) for part in (first, second))
        spread = (1 + second - first**2).clamp(0.05, 20.0)
        mean = layer.running_mean + first * (layer.running_var + layer.eps).sqrt()
        torch.testing.assert_close(model[place].running_mean, mean)
        torch.testing.assert_close(model[place].running_var, layer.running_var * spread)
        start += size


def test_noise_beyond_the_moments_leaves_the_source() -> None:
    """James and Stein: with known noise variance, a layer whose mean square is no larger stays as it was."""
    model = net()
    statistics = BatchStatistics(model)
    statistics.moments, statistics.noise = torch.full((16,), 0.2, dtype=torch.float64), 0.04
    statistics.publish()
    source = net()
    torch.testing.assert_close(model[1].running_mean, source[1].running_mean)
    statistics.noise = 0.01  # the factor is 1 - 0.01 / 0.04
    statistics.publish()
    std = (source[1].running_var + source[1].eps).sqrt()
    torch.testing.assert_close(model[1].running_mean, source[1].running_mean + 0.75 * 0.2 * std)


def test_the_share_minimises_the_noise_of_both() -> None:
    told = {"lr": 0.05, "momentum": 0.9, "clip": 1.0, "steps": 100, "bound": 6.0, "rate": 0.1}
    share = best_share(**told)  # type: ignore[arg-type]
    a, b = 0.05 * 1.0 * 10 / 0.1, 6.0 * math.sqrt(0.1 / 1.9)
    grid = torch.linspace(0.01, 0.99, 9801, dtype=torch.float64)
    best = grid[(a**2 / (1 - grid) + b**2 / grid).argmin()].item()
    assert share == pytest.approx(best, abs=2e-4)


def test_noise_slows_the_average_down_to_what_a_net_bears() -> None:
    told = {"share": 0.5, "bound": 4.0, "batch_size": 8, "fastest": 0.4}
    assert calmest_rate(noise=0.0, **told) == 0.4  # type: ignore[arg-type]
    rate = calmest_rate(noise=2.0, **told)  # type: ignore[arg-type]
    left, step = 0.0, 2.0 * 4.0 / (math.sqrt(0.5) * 8)
    for _ in range(5000):
        left = (1 - rate) ** 2 * left + (rate * step) ** 2
    assert math.sqrt(left) == pytest.approx(0.1, rel=1e-6)


def test_reset_and_resume(tmp_path: Path) -> None:
    first = private(DP(math.inf, clip=CLIP))
    for step in range(3):
        first(images(seed=step))
    save_adapter(first, tmp_path / "saved")
    second = private(DP(math.inf, clip=CLIP))
    resume_adapter(second, tmp_path / "saved")
    assert second.model[1].running_mean.equal(first.model[1].running_mean)
    torch.testing.assert_close(first(images(seed=9)), second(images(seed=9)))
    first.reset()
    assert first.model[1].running_var.equal(net()[1].running_var)
    with pytest.raises(ValueError, match="statistics"):
        resume_adapter(private(DP(math.inf, clip=CLIP), statistics="source"), tmp_path / "saved")


@pytest.mark.parametrize(
    ("told", "form", "message"),
    [
        ("batch", DP(1.0, clip=CLIP), "mix people"),
        ("private", None, "goes with DP"),
        ("private", Clip(CLIP), "goes with DP"),
        ("running", None, "one of source, batch, private"),
    ],
)
def test_what_cannot_be_is_refused_before_any_change(told: Any, form: Any, message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        Tent(model, privacy=form, statistics=told)
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="this model has none"):
        Tent(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), statistics="batch")


def test_a_small_batch_moves_the_average_less_and_not_with_more_noise() -> None:
    statistics = BatchStatistics(net(), rate=0.4)
    statistics.mix(torch.full((16,), 2.0), 0.25, 8, 3.0)  # two rows of eight, each of which said 1
    torch.testing.assert_close(statistics.moments, torch.full((16,), 0.4 * 2 / 8, dtype=torch.float64))
    assert statistics.noise == pytest.approx((0.4 * 3 / 8) ** 2)
    for _ in range(400):
        statistics.mix(torch.full((16,), 2.0), 0.25, 8, 0.0)
    torch.testing.assert_close(statistics.moments, torch.ones(16, dtype=torch.float64))  # what every row said
