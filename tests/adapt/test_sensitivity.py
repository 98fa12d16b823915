"""What one unit can do to a private step: at most 2C in the sum if it is replaced, C if it is blanked."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obvious import Curious, apart, images, net, norm_of
from torch import Tensor

from tacit.adapt import COME, DP, EATA, SAR, Adapter, DeYO, Tent, entropy, fisher
from tacit.adapt._participation import Participation
from tacit.gradients import AdaptiveQuantile, Automatic, PerLayer
from tacit.privacy import Ledger

ROWS, CLIP = 6, 0.05  # small, so that rows are clipped
BATCH = images(ROWS, seed=90).float()
CASES: dict[str, tuple[Callable[..., Adapter], dict[str, Any], dict[str, Any]]] = {
    "Tent": (Tent, {}, {}),
    "EATA": (EATA, {}, {}),
    "SAR": (SAR, {}, {}),
    "DeYO": (DeYO, {}, {}),
    "COME": (COME, {}, {}),
    "COME as printed": (COME, {"evidence": "paper"}, {}),
    "EATA-COME": (COME, {"base": "eata"}, {}),
    "SAR-COME": (COME, {"base": "sar"}, {}),
    "DeYO-COME": (COME, {"base": "deyo"}, {}),
    "EATA v2": (EATA, {"margin": 0.8}, {"filters": "per-sample"}),
    "SAR v2": (SAR, {"margin": 0.8}, {"filters": "per-sample"}),
    "DeYO v2": (DeYO, {"margin": 2.0, "threshold": 0.0}, {"filters": "per-sample"}),
    "correlated": (Tent, {}, {"noise": "correlated", "horizon": 64}),
    "adaptive": (Tent, {}, {"clip": AdaptiveQuantile(CLIP)}),
    "automatic": (Tent, {}, {"clip": Automatic(CLIP)}),
    "per layer": (Tent, {}, {"clip": PerLayer(CLIP)}),
}
_made: dict[str, tuple[Adapter, Curious]] = {}


def sum_of(name: str, batch: Tensor, units: Tensor | None = None) -> dict[str, Tensor]:
    """The sum that the stream would get of this batch, always from the same state."""
    if name not in _made:
        make, options, terms = CASES[name]
        curator = Curious()
        form = DP(10.0, **{"clip": CLIP, **terms})
        adapter = make(
            net().float(), privacy=form, batch_size=ROWS, curator=curator, ledger=Ledger("sqlite://"), **options
        )
        adapter.participation = Participation(contributions=1 << 30, separation=1)  # only the sums matter here
        adapter(BATCH)
        _made[name] = adapter, curator
    adapter, curator = _made[name]
    adapter.reset()
    if adapter.method.sharpness is not None:  # SAR as in the middle of a stream
        generator = torch.Generator().manual_seed(0)
        adapter.memory.last = {n: torch.randn(p.shape, generator=generator) for n, p in adapter.parameters.items()}
    adapter(batch, unit_ids=units)
    assert curator.told[-1].bounds  # what the stream relies on
    return curator.sums.pop()


def within(a: dict[str, Tensor], b: dict[str, Tensor], bound: float) -> None:
    """Gradient and count, each within its own bound; sums of float32 are rounded by 6e-8 of their size."""
    a, b = dict(a), dict(b)
    counts = [x.pop("count", torch.zeros(())) for x in (a, b)]
    assert abs(float(counts[0] - counts[1])) <= bound / CLIP * 0.5
    assert apart(a, b) <= bound + 1e-6 * max(norm_of(a), norm_of(b), CLIP)


def edge() -> Tensor:
    """A row at EATA's and SAR's threshold, up to bisection."""
    model = net().float()
    low, high = BATCH[0], torch.zeros_like(BATCH[0])
    limit = 0.8 * math.log(5)
    below = lambda x: bool(entropy(model(x[None])).item() < limit)  # noqa: E731
    for _ in range(40):
        mid = (low + high) / 2
        low, high = (mid, high) if below(mid) == below(low) else (low, mid)
    return low


ROW = {
    "plain": lambda s: images(1, seed=s)[0].float(),
    "huge": lambda s: 10.0 ** (3 + s % 35) * images(1, seed=s)[0].float(),
    "largest": lambda s: torch.full((1, 8, 8), 3.4e38) * (-1) ** s,
    "nan": lambda _: torch.full((1, 8, 8), math.nan),
    "one nan": lambda s: images(1, seed=s)[0].float().index_fill(1, torch.tensor([s % 8]), math.nan),
    "inf": lambda s: torch.full((1, 8, 8), math.inf) * (-1) ** s,
    "blank": lambda _: torch.zeros(1, 8, 8),
    "twin": lambda s: BATCH[s % ROWS],
    "tiny": lambda s: 1e-30 * images(1, seed=s)[0].float(),
    "edge": lambda _: edge(),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_neighbouring_batches(name: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, ROWS - 1))
    first, second = (ROW[data.draw(st.sampled_from(sorted(ROW)))](data.draw(st.integers(0, 1000))) for _ in range(2))
    here, there = BATCH.clone(), BATCH.clone()
    here[place], there[place] = first, second
    a, b = sum_of(name, here), sum_of(name, there)
    assert all(torch.isfinite(value).all() for value in (*a.values(), *b.values()))
    within(a, b, 2 * CLIP)
    missing = BATCH.clone()
    missing[place] = math.nan  # a row that contributes nothing: the zero-out relation
    within(a, sum_of(name, missing), CLIP)


@pytest.mark.parametrize("name", ["DeYO", "DeYO v2", "DeYO-COME"])
def test_who_drops_out_changes_nobody_elses_patches(name: str) -> None:
    """Orders go by place: without row 0 the sum of the others is the same, in whatever way it drops out."""
    units = torch.tensor([5, 1, 2, 3, 4, 0])
    whole = sum_of(name, BATCH)
    out = BATCH.clone()
    out[0] = math.nan
    rest = sum_of(name, out)
    assert apart(whole, rest) <= CLIP * (1 + 1e-5)
    labelled = sum_of(name, BATCH, units)
    assert apart(whole, labelled) <= 1e-5 * norm_of(whole)
    for row in range(1, ROWS):  # with the first out, what each other row adds is what it added before
        less, least = BATCH.clone(), out.clone()
        less[row], least[row] = math.nan, math.nan
        with_first = apart(whole, sum_of(name, less))
        without = apart(rest, sum_of(name, least))
        assert with_first == pytest.approx(without, abs=1e-6)


@pytest.mark.parametrize("name", ["Tent", "DeYO v2", "SAR", "adaptive"])
def test_a_unit_of_many_rows_is_one(name: str) -> None:
    """Four rows of one unit, all replaced, are still within 2C."""
    units = torch.tensor([1, 1, 2, 1, 3, 1])
    other = BATCH.clone()
    other[units == 1] = 1e4 * images(4, seed=91).float()
    a, b = sum_of(name, BATCH, units), sum_of(name, other, units)
    within(a, b, 2 * CLIP)
    relabelled = torch.where(units == 1, 77, units)  # another person in the same places
    within(a, sum_of(name, other, relabelled), 2 * CLIP)


@pytest.mark.parametrize("name", ["EATA v2", "DeYO v2", "SAR v2"])
def test_no_denominator_counts_rows(name: str) -> None:
    """Blanking all rows but one leaves that one's contribution as it was: nothing is divided by who is left."""
    for row in (0, ROWS - 1):
        alone, without = torch.full_like(BATCH, math.nan), BATCH.clone()
        alone[row], without[row] = BATCH[row], math.nan
        whole, rest, own = sum_of(name, BATCH), sum_of(name, without), sum_of(name, alone)
        for key, value in own.items():
            torch.testing.assert_close(whole[key] - rest[key], value, rtol=1e-4, atol=1e-7)


def test_what_follows_the_noise_reads_no_rows() -> None:
    """With the same releases, two streams of different people leave the same state, checkpoint facts included."""
    states = []
    for seed in (1, 2):
        model = net()
        anchor = fisher(model, images(3, seed=4), public=True)
        adapter = EATA(
            model, anchor=anchor, privacy=DP(1.0, clip=CLIP), batch_size=ROWS, ledger=Ledger("sqlite://"), seed=0
        )
        assert adapter.stream is not None
        constant = {n: torch.ones_like(p) for n, p in adapter.parameters.items()}
        adapter.stream.release = lambda total, policy, c=constant: dict(c)  # type: ignore[method-assign]  # noqa: ARG005
        for step in range(3):
            adapter(images(ROWS, seed=100 * seed + step))
        memory = adapter.memory
        states.append([p.detach().clone() for p in adapter.parameters.values()])
        assert (memory.mean_probs, memory.ema_entropy, memory.last, memory.bound) == (None, None, None, None)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
