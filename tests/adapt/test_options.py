"""Defaults and options: thresholds by the number of classes, constants of a base, layers by depth, several steps."""

import copy
import math
from typing import Any

import pytest
import timm
import torch
from obvious import Curious, images, net, sigma_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tacit.adapt import COME, DP, SAR, Clip, DeYO, EntropyFilter, RedundancyFilter, Tent, come, eata
from tacit.adapt._late_layers import late_layers
from tacit.adapt._views import View, shuffle_patches
from tacit.data import ImageShape, fashion_mnist
from tacit.models import embedded, normalisers
from tacit.privacy import Ledger

ROWS, CLIP = 6, 0.3


def test_the_redundancy_threshold_goes_with_the_classes() -> None:
    """A one-hot prediction is 1 / sqrt(K) alike to an even mix: the threshold stands to it as for 1,000 classes."""
    usual = RedundancyFilter()
    for classes in (10, 100, 1000):
        one, even = torch.eye(classes)[:1], torch.full((classes,), 1 / classes)
        alike = torch.nn.functional.cosine_similarity(one, even[None]).item()
        assert usual.threshold(classes) / alike == pytest.approx(0.05 * math.sqrt(1000))
    assert usual.threshold(1000) == pytest.approx(0.05)
    assert RedundancyFilter(0.2).threshold(10) == 0.2


def test_eata_learns_on_ten_classes_by_default() -> None:
    """Clothes after a batch of clothes: the published 0.05 passes none of them, the default nine of ten."""
    model, rows = embedded().eval(), fashion_mnist("test")[0][:320].float() / 255
    with torch.no_grad():
        logits = model(rows)
    view = View(logits=logits[64:], mean_probs=logits[:64].softmax(1).mean(0))
    assert not RedundancyFilter(0.05).keep(view, torch.zeros(256)).any()
    assert RedundancyFilter().keep(view, torch.zeros(256)).double().mean() > 0.8


def test_come_takes_all_constants_of_its_base() -> None:
    adapter = COME(net(), base="eata", margin=0.7, similarity=0.3, fisher_alpha=3.0, batch_size=ROWS)
    assert adapter.method.filters == (EntropyFilter(0.7), RedundancyFilter(0.3))
    assert (adapter.method.certainty_weight, adapter.method.fisher_alpha) == (0.7, 3.0)
    assert COME(net(), base="deyo", patches=2, threshold=0.1).method.patches == 2
    with pytest.raises(ValueError, match="tent has no constant 'radius': it has none"):
        COME(net(), radius=0.1)
    with pytest.raises(ValueError, match="sar has no constant 'similarity'"):
        come("sar", similarity=0.1)


def test_literal_weights_have_a_gradient() -> None:
    """d/dx exp(m - H) H = exp(m - H) (1 - H) dH/dx, where the authors' constants leave exp(m - H) dH/dx."""
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    unsure = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
    slope = torch.autograd.grad(unsure.sum(), logits, retain_graph=True)[0]
    weight = torch.exp(0.4 * math.log(7) - unsure).detach()[:, None]
    for literal, wanted in ((False, weight * slope), (True, weight * (1 - unsure.detach()[:, None]) * slope)):
        losses = eata(literal=literal).weighted(View(logits=logits))
        torch.testing.assert_close(torch.autograd.grad(losses.sum(), logits, retain_graph=True)[0], wanted)


def test_literal_deyo_is_the_printed_loss_by_hand() -> None:
    """(exp(m - H) + exp(p(x) - p(x'))) H with all of its gradient but that of x'; through a clipped step."""
    model = net()
    twin, rows = copy.deepcopy(model), images(ROWS)
    adapter = DeYO(model, privacy=Clip(1e9), literal=True, margin=9.0, threshold=-2.0, share=1.0, batch_size=ROWS)
    orders = torch.Generator().manual_seed(0)
    order = torch.rand(ROWS, 16, generator=orders).argsort(1)
    adapter(rows)
    moved = {name: (adapter.origin[name] - p.detach()) / 0.005 for name, p in adapter.parameters.items()}
    logits = twin(rows)
    p = logits.softmax(1)
    unsure = -(p * p.log()).sum(1)
    best = p.argmax(1)
    other = twin(shuffle_patches(rows, 4, order)).softmax(1).detach()
    gap = p[range(ROWS), best] - other[range(ROWS), best]
    loss = ((torch.exp(0.4 * math.log(5) - unsure) + gap.exp()) * unsure).sum() / ROWS
    names = [name for name, _ in twin.named_parameters() if name in moved]
    wanted = torch.autograd.grad(loss, [dict(twin.named_parameters())[name] for name in names])
    for name, gradient in zip(names, wanted, strict=True):
        torch.testing.assert_close(moved[name], gradient, rtol=1e-4, atol=1e-6)


def as_their_authors(model: nn.Module) -> list[str]:
    """SAR's and DeYO's `collect_params`, for ResNets and a ViT of twelve blocks."""
    out = ("layer4", "blocks.9", "blocks.10", "blocks.11", "norm.")
    found = [name for name, _ in normalisers(model) if not any(part in name for part in out)]
    return [name for name in found if name != "norm"]


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_base_patch16_224"])
def test_layers_are_those_of_the_authors(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    late = late_layers(model, 0.75)
    assert [each for each, _ in normalisers(model) if each not in late] == as_their_authors(model)


def test_layers_of_other_nets_go_by_stage_or_block() -> None:
    with torch.device("meta"):
        convnext, swin = timm.create_model("convnext_tiny"), timm.create_model("swin_tiny_patch4_window7_224")
    late = late_layers(convnext, 0.75)
    assert late == ["stages.3.downsample.0", *(f"stages.3.blocks.{i}.norm" for i in range(3)), "head.norm"]
    assert all(name.startswith("layers.3.") or name == "norm" for name in late_layers(swin, 0.75))
    assert len(late_layers(swin, 0.75)) == 6
    assert late_layers(net(), 0.75) == ["fourth"]  # no blocks: the last quarter of four layers
    two_stages = embedded()  # too few stages to leave a quarter of them out: six of eight blocks
    assert sum(p.numel() for p in SAR(two_stages).parameters.values()) == 640


def test_a_curator_without_sums_is_refused() -> None:
    with pytest.raises(ValueError, match="clipped sums, which the published form does not have"):
        Tent(net(), curator=Curious())


def test_noise_is_correlated_where_the_horizon_is_known() -> None:
    assert DP(1.0).noise == "independent"
    assert DP(1.0, horizon=8).noise == "correlated"
    assert DP(1.0, horizon=8) == DP(1.0, horizon=8, noise="correlated")
    assert DP(1.0, horizon=8, noise="independent").noise == "independent"


@pytest.mark.parametrize("form", [None, Clip(CLIP)])
def test_two_steps_by_a_batch_are_two_calls_with_it(form: Any) -> None:
    twice = Tent(net(), privacy=form, batch_size=ROWS, lr=0.05, steps=2)
    once = Tent(net(), privacy=form, batch_size=ROWS, lr=0.05)
    logits = twice(images(ROWS))
    once(images(ROWS))
    torch.testing.assert_close(logits, once(images(ROWS)), rtol=0, atol=0)
    assert (twice.steps, once.steps) == (2, 2)
    for name, p in twice.parameters.items():
        assert torch.equal(p, once.parameters[name])


def test_two_private_steps_are_two_releases_that_are_paid_for() -> None:
    with pytest.raises(ValueError, match=r"steps=2 takes every row into 2 releases: say DP\(..., contributions=2\)"):
        Tent(net(), privacy=DP(1.0, clip=CLIP), steps=2)
    curator, form = Curious(), DP(1.0, 1e-6, clip=CLIP, contributions=2)
    adapter = Tent(net(), privacy=form, steps=2, batch_size=ROWS, ledger=Ledger("sqlite://"), curator=curator)
    assert adapter.stream is not None
    ids = list(range(ROWS))
    adapter(images(ROWS), unit_ids=ids)
    adapter(images(ROWS), unit_ids=ids)  # everybody has had their two steps
    sizes = [max(float(g.abs().max()) for g in total.values()) for total in curator.sums]
    assert [size > 0 for size in sizes] == [True, True, False, False]
    assert adapter.guarantee is not None
    assert adapter.guarantee.epsilon == pytest.approx(1.0, abs=1e-3)
    assert adapter.stream.stream is not None
    sigma = adapter.stream.noise_multiplier * adapter.stream.stream.sensitivity  # of one release
    assert sigma == pytest.approx(math.sqrt(2) * sigma_of(1.0, 1e-6), rel=2e-3)


def test_predictions_along_a_loader() -> None:
    rows, labels = images(15), torch.arange(15)
    loader = DataLoader(TensorDataset(rows, labels), batch_size=ROWS)
    forms: list[dict[str, Any]] = [{"batch_size": ROWS, "lr": 0.05, "privacy": DP(1.0, clip=CLIP), "seed": 3}] * 2
    along, by_hand = (Tent(net(), **form) for form in forms)
    spent = []
    for logits, (batch, ids) in zip(
        along.predictions(loader, inputs=lambda b: b[0], unit_ids=lambda b: b[1]), loader, strict=True
    ):
        assert torch.equal(logits, by_hand(batch, unit_ids=ids))
        spent.append(None if along.guarantee is None else round(along.guarantee.epsilon, 3))
    assert spent == [1.0] * 3
    assert along.has_unit_ids
    for name, value in along.state_dict().items():
        assert torch.equal(value, by_hand.model.state_dict()[name])


def test_images_are_normalized_as_the_model_was_trained() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5).eval()
    rows = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model((rows - 0.5) / 0.5)
    for given in ("model", ImageShape(mean=(0.5,), std=(0.5,))):
        for form in (None, Clip(CLIP)):
            adapter = Tent(copy.deepcopy(model), privacy=form, normalize=given, batch_size=4, lr=0.01)  # type: ignore[arg-type]
            torch.testing.assert_close(adapter.predict(rows), wanted)
            torch.testing.assert_close(adapter(rows), wanted, rtol=1e-4, atol=1e-5)
            assert "normalized by mean (0.5" in repr(adapter)
    with pytest.raises(ValueError, match="normalize is an ImageShape"):
        Tent(model, normalize="imagenet")  # type: ignore[arg-type]


def test_pixels_from_0_to_255_are_refused_before_a_charge() -> None:
    pixels = torch.randint(0, 256, (4, 1, 8, 8)).double()
    book = Ledger("sqlite://")
    adapter = Tent(net(), privacy=DP(1.0, clip=CLIP), batch_size=ROWS, ledger=book)
    with pytest.raises(ValueError, match="from 0 to 255, as floats: divide by 255"):
        adapter(pixels)
    assert adapter.stream is not None
    assert adapter.stream.receipt is None
    assert adapter(pixels / 255).shape == (4, 5)
