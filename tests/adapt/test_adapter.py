"""The adapter itself: predictions before updates, resets, bad input, odd models, and what it charges."""

import copy
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from obvious import Curious, epsilon_of, images, net, norm_of, same_bits, sigma_of
from torch import Tensor, nn

from tacit.adapt import COME, DP, EATA, SAR, Adapter, Clip, DeYO, Method, Tent, fisher
from tacit.gradients import AdaptiveQuantile, BatchClip, FilterByNorm, PerLayer
from tacit.privacy import Budget, BudgetExceeded, Ledger, Neighbours, ReceiptError, Unit

ROWS, CLIP = 6, 0.3
MAKERS = [Tent, EATA, SAR, DeYO, COME]
FORMS = {
    "original": None,
    "clip": Clip(CLIP),
    "clip, ascent too": Clip(CLIP, ascent=True),
    "private": DP(5.0, clip=CLIP),
    "correlated": DP(5.0, clip=CLIP, noise="correlated", horizon=8),
    "v2": DP(5.0, clip=CLIP, filters="per-sample"),
    "adaptive": DP(5.0, clip=AdaptiveQuantile(CLIP)),
    "no noise": DP(math.inf, clip=CLIP),
}


def made(make: Callable[..., Adapter], form: Any, model: nn.Module | None = None, **more: Any) -> Adapter:
    options: dict[str, Any] = {"batch_size": ROWS, "lr": 0.05, "ledger": Ledger("sqlite://"), **more}
    return make(net() if model is None else model, privacy=form, **options)


# -- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "form"),
    [(make, form) for make in MAKERS for form in FORMS if make in (SAR, DeYO) or form in ("original", "private")],
)
def test_predictions_are_those_of_before(make: Callable[..., Adapter], form: str) -> None:
    """Whatever the batch teaches, whoever is in it, however it is taken apart."""
    adapter = made(make, FORMS[form], microbatch=None if form != "private" else 2)
    units = torch.tensor([4, 1, 4, 2, 2, 4])
    for step in range(3):
        batch = images(ROWS, seed=step)
        if step == 2:
            batch[1] = math.nan
        before = copy.deepcopy(adapter.model)
        found = adapter(batch, unit_ids=None if step == 0 else units + step)
        torch.testing.assert_close(found, before(batch.nan_to_num(0)).detach())
        assert not found.requires_grad
        assert found.is_leaf


@pytest.mark.parametrize("make", [Tent, SAR, DeYO])
def test_predictions_do_not_depend_on_the_other_rows(make: Callable[..., Adapter]) -> None:
    batch = images(ROWS)
    together = made(make, DP(5.0, clip=CLIP))(batch)
    for row in (0, ROWS - 1):
        others = 100 * images(ROWS, seed=9)
        others[row] = batch[row]
        torch.testing.assert_close(made(make, DP(5.0, clip=CLIP))(others)[row], together[row])
        torch.testing.assert_close(made(make, DP(5.0, clip=CLIP))(batch[row : row + 1])[0], together[row])


@pytest.mark.parametrize("make", [Tent, SAR, DeYO])
def test_who_drops_out_does_not_show_in_anybody_elses_prediction(make: Callable[..., Adapter]) -> None:
    """To the last bit, at the first step and at a later one (SAR climbs there): not finite, or beyond its k."""
    adapters = [made(make, DP(5.0, clip=CLIP), net().float(), seed=1) for _ in range(3)]
    units = torch.arange(ROWS)
    for step in range(2):
        batch = images(ROWS, seed=step).float()
        broken = batch.clone()
        broken[2] = math.nan
        late = units + 10 * step
        late[2] = 0 if step else 2  # has been here
        plain = adapters[0](batch, unit_ids=units + 10 * step)
        bad = adapters[1](broken, unit_ids=units + 10 * step)
        twice = adapters[2](batch, unit_ids=late)
        others = units != 2
        assert torch.equal(plain[others], bad[others])
        assert torch.equal(plain, twice)
        for adapter in adapters[1:]:  # as if the same had been released to all
            for name, parameter in adapter.parameters.items():
                parameter.data.copy_(adapters[0].parameters[name])
            adapter.memory.last = adapters[0].memory.last


def test_an_empty_batch_is_no_step() -> None:
    for form in (None, Clip(CLIP), DP(5.0, clip=CLIP)):
        adapter = made(Tent, form)
        assert adapter(images(0)).shape == (0, 5)
        assert adapter.steps == 0
        assert adapter.stream is None or adapter.stream.receipt is None


@pytest.mark.parametrize("form", [None, Clip(CLIP), DP(5.0, clip=CLIP)])
def test_images_and_modes_of_the_caller_are_left_alone(form: Any) -> None:
    """Images that ask for a gradient get none; it works inside no_grad and inference_mode too."""
    adapters = [made(Tent, form, seed=1) for _ in range(3)]
    batch = images(ROWS).requires_grad_()
    found = adapters[0](batch)
    assert batch.grad is None
    assert not found.requires_grad
    with torch.no_grad():
        adapters[1](images(ROWS))
    with torch.inference_mode():
        inner = images(ROWS)
        assert inner.is_inference()
        adapters[2](inner)
    assert same_bits(adapters[0], adapters[1])
    assert same_bits(adapters[0], adapters[2])
    assert all(p.grad is None for a in adapters for p in a.model.parameters())


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    """No draw from torch's global generator, in any form; private noise does not come from a generator at all."""
    for form in (None, Clip(CLIP), DP(5.0, clip=CLIP)):
        torch.manual_seed(3)
        expected = torch.rand(3)
        torch.manual_seed(3)
        adapter = made(DeYO, form)
        adapter(images(ROWS))
        assert torch.equal(torch.rand(3), expected)
    ends = []
    for _ in range(2):
        torch.manual_seed(3)
        adapter = made(Tent, DP(5.0, clip=CLIP))
        adapter(images(ROWS))
        ends.append(adapter)
    assert not same_bits(*ends)


# -- reset -----------------------------------------------------------------------------------------------------------


RESETS: dict[str, tuple[Callable[..., Adapter], Any, dict[str, Any]]] = {
    "EATA": (EATA, None, {"margin": 1.0, "similarity": 2.0}),
    "SAR": (SAR, Clip(CLIP), {"margin": 1.0, "recovery": 0.0}),
    "DeYO": (DeYO, Clip(CLIP), {"margin": 1.0, "threshold": -1.0}),
    "Adam": (Tent, DP(math.inf, clip=CLIP), {"optimizer": "adam"}),
    "DP-SAR": (SAR, DP(math.inf, clip=CLIP), {}),
    "adaptive": (DeYO, DP(math.inf, clip=AdaptiveQuantile(CLIP)), {}),
}


@pytest.mark.parametrize("case", RESETS)
def test_after_a_reset_all_is_as_at_the_start(case: str) -> None:
    make, form, options = RESETS[case]
    used, fresh = made(make, form, **options), made(make, form, **options)
    for step in range(3):
        used(images(ROWS, seed=step))
    assert not same_bits(used, fresh)
    used.reset()
    assert same_bits(used, fresh)
    assert used.memory == fresh.memory
    assert not used.optimizer.state
    for step in range(3, 6):
        batch = images(ROWS, seed=step)
        assert torch.equal(used(batch), fresh(batch))
        assert same_bits(used, fresh)


def test_a_reset_starts_a_new_noise_block_and_repeats_no_noise() -> None:
    """The noise of a step is what was released less what was summed."""
    curator = Curious()
    adapter = made(Tent, DP(5.0, clip=CLIP, noise="correlated", horizon=8), curator=curator, lr=1.0, momentum=0.0)
    noises = []
    for step in range(6):
        if step == 3:
            adapter.reset()
            assert adapter.stream is not None
            assert adapter.stream.stream is not None
            assert adapter.stream.stream._mixer.state()["step"] == 0
        before = {n: p.detach().clone() for n, p in adapter.parameters.items()}
        adapter(images(ROWS, seed=step))
        total = curator.sums[-1]
        noises.append({n: (before[n] - p.detach()) * ROWS - total[n] for n, p in adapter.parameters.items()})
    for i, one in enumerate(noises):
        for other in noises[i + 1 :]:
            assert all(not torch.isclose(a, b).any() for a, b in zip(one.values(), other.values(), strict=True))
    assert adapter.stream is not None
    assert adapter.stream.steps == 6  # a reset gives no release back


# -- bad input -------------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    values = {n: v.clone() for n, v in model.state_dict().items()}
    return values, [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]


def unchanged(model: nn.Module, before: tuple[Any, ...]) -> bool:
    values, flags, modes = snapshot(model)
    return all(torch.equal(v, before[0][n]) for n, v in values.items()) and (flags, modes) == before[1:]


class Mixing(nn.Module):
    """Rows see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net().float()

    def forward(self, batch: Tensor) -> Tensor:
        return self.inner(batch - batch.mean(0))


BATCHES: dict[str, tuple[Tensor, str]] = {
    "integers": (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "float tensor"),
    "a vector": (torch.zeros(8), "float tensor"),
    "too many rows": (images(ROWS + 1), "split the batch"),
    "another type": (images(2).float(), "does not take images"),
    "another size": (images(2, size=9), "does not take images"),
    "another rank": (torch.rand(2, 64).double(), "does not take images"),
}


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("form", [None, DP(5.0, clip=CLIP)])
def test_a_bad_first_batch_changes_nothing(case: str, form: Any) -> None:
    ledger = Ledger("sqlite://")
    adapter = made(Tent, form, ledger=ledger)
    before, entries = snapshot(adapter.model), len(ledger.entries())
    batch, said = BATCHES[case]
    with pytest.raises(ValueError, match=said):
        adapter(batch)
    assert unchanged(adapter.model, before)
    assert len(ledger.entries()) == entries
    adapter(images(2))


@pytest.mark.parametrize(
    "batch", [images(2).float(), images(2, size=7), torch.rand(2, 2, 8, 8).double(), images(ROWS + 1), [1.0]]
)
def test_a_bad_later_batch_changes_nothing(batch: Any) -> None:
    ledger = Ledger("sqlite://")
    adapter = made(Tent, DP(5.0, clip=CLIP), ledger=ledger)
    adapter(images(2), unit_ids=torch.tensor([1, 2]))
    before, entries, seen = snapshot(adapter.model), len(ledger.entries()), dict(adapter.participation._seen)
    with pytest.raises(ValueError, match=r"keep to one kind|split the batch|float tensor"):
        adapter(batch, unit_ids=torch.arange(len(batch)) + 5)
    assert unchanged(adapter.model, before)
    assert len(ledger.entries()) == entries
    assert (adapter.steps, adapter.participation._seen) == (1, seen)


def live() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "live statistics": (live, {}, "is live"),
    "no normalisation": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), {}, "finds nothing to train"),
    "unknown scheme": (net, {"scheme": "all"}, "Unknown scheme"),
    "no bound": (net, {"privacy": DP(5.0, clip=BatchClip(1.0))}, "BatchClip bounds nobody"),
    "a filter": (net, {"privacy": DP(5.0, clip=FilterByNorm(1.0))}, "bounds nobody"),
    "a layer without a bound": (net, {"privacy": DP(5.0, clip=PerLayer({"first": 1.0}))}, "No clip bound"),
    "batch size": (net, {"batch_size": 0}, "at least 1"),
    "fractions": (net, {"batch_size": 2.5}, "whole"),
    "lease": (net, {"lease": 1.5}, "whole"),
    "microbatch": (net, {"microbatch": 0}, "at least 1"),
    "rate": (net, {"lr": 0.0}, "lr must be positive"),
    "momentum": (net, {"momentum": 1.0}, "momentum in"),
    "optimizer": (net, {"optimizer": "lion"}, "sgd or adam"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_at_the_start_changes_nothing(case: str) -> None:
    build, options, said = REFUSED[case]
    model, ledger = build(), Ledger("sqlite://")
    if case == "no normalisation":
        model[1].bias.requires_grad_(False)  # type: ignore[index]
    before = snapshot(model)
    options = {"privacy": DP(5.0, clip=CLIP), "ledger": ledger, **options}
    with pytest.raises(ValueError, match=said):
        Tent(model, **options)
    assert unchanged(model, before)
    assert ledger.entries() == []


def test_only_a_form_is_a_form() -> None:
    with pytest.raises(TypeError, match="privacy is None"):
        Tent(net(), privacy=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"neighbours": Neighbours.ADD_REMOVE}, "replace-one or zero-out"),
        ({"neighbours": "add-remove"}, "replace-one or zero-out"),
        ({"noise": "correlated"}, "needs horizon="),
        ({"noise": "pink"}, "noise is one of"),
        ({"filters": "all"}, "filters is one of"),
        ({"epsilon": 0.0}, "psilon"),
        ({"epsilon": -1.0}, "psilon"),
        ({"epsilon": -math.inf}, "psilon"),
        ({"epsilon": math.nan}, "psilon"),
        ({"delta": 0.0}, "delta above 0"),
        ({"delta": 1.5}, "elta"),
        ({"clip": 0.0}, "clip is a positive number"),
        ({"horizon": 0.5, "noise": "correlated"}, "whole and at least 1"),
        ({"contributions": 0}, "at least 1"),
        ({"separation": -1}, "at least 1"),
    ],
)
def test_terms_that_cannot_be_kept(terms: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DP(**{"epsilon": 1.0, **terms})


def test_a_budget_that_is_not_there() -> None:
    """The ledger cannot afford it: an error before anything is charged, and the model as it was."""
    ledger = Ledger("sqlite://")
    ledger.subject("people", Budget(1.0, 1e-6), neighbours=Neighbours.REPLACE_ONE)
    adapter = made(Tent, DP(2.0, clip=CLIP), ledger=ledger, subject="people")
    before = snapshot(adapter.model)
    for _ in range(2):
        with pytest.raises(BudgetExceeded, match="cannot afford"):
            adapter(images(ROWS), unit_ids=torch.arange(ROWS))
    assert unchanged(adapter.model, before)
    assert [e.kind for e in ledger.entries()] == ["subject"]
    assert adapter.steps == 0
    assert not adapter.participation.anyone
    poorer = made(Tent, DP(1.0, clip=CLIP), ledger=ledger, subject="people")
    poorer(images(ROWS))
    with pytest.raises(BudgetExceeded):
        made(Tent, DP(1.0, clip=CLIP), ledger=ledger, subject="people")(images(ROWS))


def test_a_model_that_mixes_rows() -> None:
    ledger = Ledger("sqlite://")
    adapter = made(Tent, DP(5.0, clip=CLIP), Mixing(), ledger=ledger)
    before = snapshot(adapter.model)
    with pytest.raises(ValueError, match="Rows are mixed"):
        adapter(images(ROWS).float())
    assert unchanged(adapter.model, before)
    assert [e.kind for e in ledger.entries()] == ["subject"]


def test_statistics_that_come_alive_later() -> None:
    """A model that somebody put back into training is refused before it sees a row."""
    model = live().eval()
    for form in (None, DP(5.0, clip=CLIP)):
        adapter = made(Tent, form, model, statistics="source")
        adapter(images(ROWS).float())
        model.train()
        before = snapshot(model)
        with pytest.raises(ValueError, match="is live"):
            adapter(images(ROWS).float() + math.nan)
        assert unchanged(model, before)
        model.eval()


@pytest.mark.parametrize("shape", [(2, 1, 3, 3), (2, 64)])
def test_images_that_cannot_be_shuffled(shape: tuple[int, ...]) -> None:
    size = math.prod(shape[1:])
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(size), nn.Linear(size, 3))
    for form in (None, Clip(CLIP), DP(5.0, clip=CLIP)):
        ledger = Ledger("sqlite://")
        adapter = made(DeYO, form, model, ledger=ledger)
        with pytest.raises(ValueError, match="cannot be cut into"):
            adapter(torch.rand(shape))
        assert [e.kind for e in ledger.entries()] in ([], ["subject"])


@pytest.mark.parametrize(
    "mask", [torch.ones(4).bool(), torch.ones(5), torch.tensor([True, False, False, False, False])], ids=str
)
def test_a_mask_of_the_wrong_kind(mask: Tensor) -> None:
    adapter = made(Tent, DP(5.0, clip=CLIP), classes=mask)
    with pytest.raises(ValueError, match="a bool per class"):
        adapter(images(2))


def test_errors_do_not_show_values() -> None:
    """A model that complains about what it sees is asked with a blank image first."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 3)

        def forward(self, batch: Tensor) -> Tensor:
            if batch.shape[1:] != (64,):
                raise RuntimeError(f"bad batch {batch}")
            return self.head(self.norm(batch))

    adapter = made(Tent, DP(5.0, clip=CLIP), Picky())
    with pytest.raises(ValueError, match="does not take images") as error:
        adapter(torch.full((2, 1, 8), 0.123456))
    assert "0.1235" not in str(error.value)


@pytest.mark.parametrize("make", [SAR, Tent])
@pytest.mark.parametrize("when", ["forward", "release"])
def test_a_failure_in_the_middle_leaves_the_parameters(make: Callable[..., Adapter], when: str) -> None:
    """SAR is perturbed in between; its parameters come back whatever happens, and the next step works."""
    adapter = made(make, DP(5.0, clip=CLIP))
    for step in range(2):
        adapter(images(ROWS, seed=step))
    before = snapshot(adapter.model)

    def fail(*_: object) -> None:
        if torch.is_grad_enabled() or when == "release":  # not in the predictions, which come before the perturbation
            raise RuntimeError("out of memory")

    assert adapter.stream is not None
    if when == "forward":
        hook = adapter.model.head.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            adapter(images(ROWS, seed=2))
        hook.remove()
    else:
        release, adapter.stream.release = adapter.stream.release, fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            adapter(images(ROWS, seed=2))
        adapter.stream.release = release  # type: ignore[method-assign]
    assert unchanged(adapter.model, before)
    assert adapter.steps == 2
    adapter(images(ROWS, seed=2))
    assert adapter.steps == 3


# -- models as people have them --------------------------------------------------------------------------------------


class Output(nn.Module):
    """Answers with an object, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, batch: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inner(batch), hidden_states=None)


class ByLength(nn.Module):
    """Cannot reshape no rows at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 3)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.norm(batch.reshape(len(batch), -1)))


def frozen() -> nn.Module:
    return live().eval()


@pytest.mark.parametrize("make", [Tent, SAR, DeYO])
@pytest.mark.parametrize("form", ["original", "clip", "private"])
@pytest.mark.parametrize("build", [Output, ByLength, frozen])
def test_odd_models(build: Callable[[], nn.Module], form: str, make: Callable[..., Adapter]) -> None:
    model = build()
    adapter = made(make, FORMS[form], model, share=1.0) if make in (SAR, DeYO) else made(make, FORMS[form], model)
    dtype = next(model.parameters()).dtype
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    for step in range(2):
        batch = images(ROWS, seed=step).to(dtype)
        if step:
            batch[:] = math.nan  # nobody takes part
        before = copy.deepcopy(model)(batch.nan_to_num(0))
        torch.testing.assert_close(adapter(batch), getattr(before, "logits", before).detach())
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    if isinstance(FORMS[form], DP):
        assert norm_of({n: p.detach() - adapter.origin[n] for n, p in adapter.parameters.items()}) > 0


def test_one_normalisation_layer_is_enough() -> None:
    """The last quarter of one layer is none of it."""
    adapter = SAR(ByLength())
    assert set(adapter.parameters) == {"norm.weight", "norm.bias"}
    assert Adapter(ByLength(), Method(share=0.0)).parameters


def test_the_model_of_objects_has_a_fisher_anchor() -> None:
    model = Output()
    plain = fisher(model.inner, images(3), public=True)
    wrapped = fisher(model, images(3), public=True)
    for name, value in plain.importance.items():
        torch.testing.assert_close(wrapped.importance[f"inner.{name}"], value)


# -- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon", "sigma"), [(1, 8.4494), (5, 1.9601), (10, 1.0822), (15, 0.7763), (20, 0.6182)])
def test_noise_for_a_budget(epsilon: float, sigma: float) -> None:
    """One Gaussian release under replace-one, delta 1e-6; the closed form solved by scipy, and golden numbers."""
    form = DP(epsilon, 1e-6)
    assert form.noise_multiplier() == pytest.approx(sigma, abs=5e-5)
    assert form.noise_multiplier() == pytest.approx(sigma_of(epsilon, 1e-6), rel=1e-9)
    half = DP(epsilon, 1e-6, neighbours=Neighbours.ZERO_OUT).noise_multiplier()
    assert half == pytest.approx(form.noise_multiplier() / 2, rel=1e-9)


@pytest.mark.parametrize(
    "form",
    [
        DP(3.0, 1e-5, clip=CLIP),
        DP(3.0, 1e-5, clip=CLIP, contributions=9),
        DP(3.0, 1e-5, clip=CLIP, noise="correlated", horizon=3),
        DP(3.0, 1e-5, clip=AdaptiveQuantile(CLIP), filters="per-sample"),
        DP(3.0, 1e-5, clip=CLIP, neighbours=Neighbours.ZERO_OUT),
    ],
    ids=["plain", "nine times", "correlated", "adaptive", "zero-out"],
)
def test_what_is_charged_is_the_budget_once(form: DP) -> None:
    """However many steps, the stream is one Gaussian release: epsilon from mu = factor / sigma, by scipy."""
    ledger = Ledger("sqlite://")
    adapter = made(Tent, form, ledger=ledger, subject="people", unit=Unit.VIDEO)
    assert adapter.guarantee is not None
    assert adapter.guarantee.epsilon == 0
    for step in range(5):
        adapter(images(ROWS, seed=step), unit_ids=torch.arange(ROWS) + ROWS * step)
    factor = 1 if form.neighbours is Neighbours.ZERO_OUT else 2
    (charge,) = [e for e in ledger.entries() if e.kind == "charge"]
    event = charge.body["event"]
    mu = factor / event["noise_multiplier"]
    assert epsilon_of(mu, 1e-5) == pytest.approx(3.0, rel=1e-9)
    promised = adapter.guarantee
    assert promised.epsilon == pytest.approx(3.0, rel=1e-9)
    assert (promised.delta, promised.neighbours, promised.unit) == (1e-5, form.neighbours, Unit.VIDEO)
    assert promised.mu == pytest.approx(mu)
    assert (event["contributions"], event["strategy"]) == (
        form.contributions,
        "buffered" if form.noise == "correlated" else "independent",
    )


@pytest.mark.parametrize("k", [1, 4, 9])
def test_k_contributions_cost_the_root_of_k(k: int) -> None:
    """Independent noise: the released noise has standard deviation sqrt(k) sigma C; checked on the stream's scale."""
    adapter = made(Tent, DP(3.0, clip=CLIP, contributions=k))
    adapter(images(1))
    assert adapter.stream is not None
    assert adapter.stream.stream is not None
    assert adapter.stream.stream.sensitivity == pytest.approx(math.sqrt(k))


def test_steps_are_leased_in_blocks() -> None:
    ledger = Ledger("sqlite://")
    adapter = made(Tent, DP(3.0, clip=CLIP), ledger=ledger, lease=3)
    for step in range(7):
        adapter(images(1, seed=step))
    leases = [e.body["upto"] for e in ledger.entries() if e.kind == "lease"]
    assert leases == [3, 6, 9]
    assert ledger.verify() == 5


def test_without_a_ledger_it_says_so() -> None:
    with pytest.warns(UserWarning, match="not durable"):
        adapter = Tent(net(), privacy=DP(3.0, clip=CLIP))
    adapter(images(2))
    assert adapter.guarantee is not None
    assert adapter.guarantee.epsilon == pytest.approx(3.0)
    assert any("not durable" in line for line in adapter.assumptions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in (None, Clip(CLIP), DP(math.inf, clip=CLIP)):
            Tent(net(), privacy=form)(images(2))


def test_a_subject_without_fixed_places_is_refused() -> None:
    ledger = Ledger("sqlite://")
    ledger.subject("people", Budget(9.0, 1e-6), neighbours=Neighbours.ADD_REMOVE)
    with pytest.raises(ValueError, match="under add-remove, but a sample under replace-one was requested"):
        made(Tent, DP(3.0, clip=CLIP), ledger=ledger, subject="people")
    assert [e.kind for e in ledger.entries()] == ["subject"]


def test_a_seeded_run_says_that_it_is_not_private() -> None:
    adapter = made(Tent, DP(3.0, clip=CLIP), seed=1)
    adapter(images(2))
    assert "seeded: not private" in adapter.assumptions
    assert adapter.guarantee is not None
    assert adapter.guarantee.seeded
    assert "seeded: not private" not in made(Tent, DP(3.0, clip=CLIP)).assumptions


def test_what_is_shown_shows_no_rows() -> None:
    adapter = made(SAR, DP(3.0, clip=CLIP))
    adapter(images(2))
    assert repr(adapter) == "Adapter(SAR, epsilon 3, 40 parameters, batch size 6)"
    with pytest.raises((TypeError, RuntimeError)):
        copy.deepcopy(adapter)  # a copy would draw the same noise for other people


def test_nothing_is_released_that_was_not_charged() -> None:
    """Charging has one place, before the first step; a release by itself pays for nothing."""
    ledger = Ledger("sqlite://")
    adapter = Tent(net(), privacy=DP(1.0, clip=1.0), batch_size=ROWS, ledger=ledger, subject="people")
    assert adapter.stream is not None
    with pytest.raises(ReceiptError, match="was not charged"):
        adapter.stream.release(adapter._step._engine.zero_sum(), 1.0)  # type: ignore[attr-defined]
    assert [entry for entry in ledger.entries() if entry.kind == "charge"] == []
    adapter(images(ROWS))
    assert len([entry for entry in ledger.entries() if entry.kind == "charge"]) == 1
    assert adapter.stream.steps == 1
