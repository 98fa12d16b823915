"""What each method minimises, weighs and filters, against the formulas of its paper."""

import math

import pytest
import torch
from obvious import Loss, belief_entropy, images, net, orders_of, plain_entropy, shuffled_by_hand
from torch import Tensor
from torch.nn import functional

from tacit.adapt import EntropyFilter, PLPDFilter, RedundancyFilter, entropy, opinion, opinion_as_printed
from tacit.adapt._constructors import come, deyo, eata, sar, tent
from tacit.adapt._methods import Method
from tacit.adapt._views import View, logits_of, patch_orders, shuffle_patches

ROWS, K = 6, 5


def seen(method: Method, requires_grad: bool = True) -> tuple[View, Tensor, list[Tensor]]:
    """A view of some images, its logits as a leaf, and the orders of their patches."""
    model, batch = net(), images(ROWS)
    x = model(batch).detach().requires_grad_(requires_grad)
    if method.patches is None:
        return View(logits=x), x, []
    (orders,) = orders_of(7, ROWS, patches=method.patches)
    shuffled = model(torch.stack([shuffled_by_hand(b, method.patches, o) for b, o in zip(batch, orders, strict=True)]))
    return View(logits=x, shuffled=shuffled.softmax(1).detach()), x, list(orders)


@pytest.mark.parametrize(
    ("method", "loss"),
    [
        (tent(), Loss()),
        (eata(), Loss(margin=0.4)),
        (eata(margin=0.3), Loss(margin=0.3)),
        (sar(), Loss()),
        (deyo(), Loss(margin=0.4, patches=4)),
        (deyo(weight_margin=0.5, patches=2), Loss(margin=0.5, patches=2)),
        (come(), Loss(unsure=belief_entropy)),
        (come("eata"), Loss(unsure=belief_entropy, margin=0.4)),
        (come("sar"), Loss(unsure=belief_entropy)),
        (come("deyo"), Loss(unsure=belief_entropy, margin=0.4, patches=4)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_loss_and_gradient_row_by_row(method: Method, loss: Loss) -> None:
    """The gradient in the parameters, so that weights with a gradient of their own would show."""
    model, batch = net(), images(ROWS)
    orders = orders_of(7, ROWS, patches=method.patches or 1)[0]
    shuffled = None
    if method.patches is not None:
        shuffled = model(shuffle_patches(batch, method.patches, orders)).softmax(1).detach()
    found = method.weighted(View(logits=model(batch), shuffled=shuffled))
    parameters = list(model.parameters())
    for i in range(ROWS):
        own = loss(model, batch[i], orders[i])
        assert found[i].item() == pytest.approx(own.item(), rel=1e-9)
        expected = torch.autograd.grad(own, parameters)
        got = torch.autograd.grad(found[i], parameters, retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def test_weights_have_no_gradient() -> None:
    """The gradient in the logits is the weight times the entropy's own."""
    for method in (eata(), deyo()):
        view, x, _ = seen(method)
        weighted = torch.autograd.grad(method.weighted(view).sum(), x)[0]
        h = entropy(x.detach())
        weight = torch.exp(0.4 * math.log(K) - h)
        if view.shuffled is not None:
            best = x.detach().argmax(1)
            lost = [float(x.detach()[i].softmax(0)[b] - view.shuffled[i, b]) for i, b in enumerate(best)]
            weight = weight + torch.tensor(lost, dtype=torch.float64).exp()
        plain = torch.autograd.grad(entropy(x).sum(), x)[0]
        torch.testing.assert_close(weighted, weight[:, None] * plain)


def test_filters_by_hand() -> None:
    """K = 4, ln K = 1.386: entropies 0.693, 1.386 and about 0; thresholds 0.4 ln K = 0.555 and 0.5 ln K = 0.693."""
    x = torch.tensor([[0.0, 0.0, -1e4, -1e4], [0.0] * 4, [50.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert eata().keep(View(logits=x)).tolist() == [False, False, True]
    assert sar().keep(View(logits=x)).tolist() == [False, False, True]
    assert EntropyFilter(0.51).keep(View(logits=x), entropy(x)).tolist() == [True, False, True]
    assert (
        EntropyFilter(0.5).keep(View(logits=x), torch.tensor([math.log(2), 0.0, math.log(4) / 2])).tolist()[1] is True
    )
    shuffled = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.25] * 4, [0.79, 0.07, 0.07, 0.07]], dtype=torch.float64)
    view = View(logits=x, shuffled=shuffled)
    torch.testing.assert_close(view.plpd(), torch.tensor([0.2, 0.0, 0.21], dtype=torch.float64))
    assert deyo(margin=2.0, threshold=0.2).keep(view).tolist() == [False, False, True]  # more than, not at
    assert deyo(margin=2.0, threshold=0.1).keep(view).tolist() == [True, False, True]
    assert PLPDFilter(-0.1).keep(view, entropy(x)).tolist() == [True, True, True]


def test_at_the_threshold_nobody_passes() -> None:
    """H < margin ln K and |cos| < similarity, strictly."""
    view = View(logits=torch.zeros(1, 4, dtype=torch.float64))
    unsure = torch.tensor([0.4 * view.scale], dtype=torch.float64)
    assert not EntropyFilter(0.4).keep(view, unsure).item()
    unlike = View(logits=torch.tensor([[1e4, 0.0]]), mean_probs=torch.tensor([0.0, 1.0]))
    assert not RedundancyFilter(0.0).keep(unlike, unsure).item()
    assert RedundancyFilter(1e-6).keep(unlike, unsure).item()


def test_unusual_is_the_cosine_to_the_average() -> None:
    view = View(logits=seen(tent())[1].detach())
    assert RedundancyFilter().keep(view, torch.zeros(ROWS)).all()  # nothing to compare with yet
    mean_probs = torch.tensor([0.7, 0.1, 0.1, 0.05, 0.05], dtype=torch.float64)
    p = view.logits.softmax(1)
    cosines = [float(row @ mean_probs / row.norm() / mean_probs.norm()) for row in p]
    limit = sorted(cosines)[2] + 1e-9
    kept = RedundancyFilter(limit).keep(View(logits=view.logits, mean_probs=mean_probs), torch.zeros(ROWS)).tolist()
    assert kept == [c < limit for c in cosines]
    assert sum(kept) == 3


def test_filters_use_the_methods_own_uncertainty() -> None:
    """COME's filter asks the opinion, which is less certain than the probabilities."""
    x = torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    low, high = float(entropy(x)), float(opinion(x))
    assert low < high
    margin = (low + high) / 2 / math.log(5)
    assert eata(margin=margin).keep(View(logits=x)).item()
    assert not come("eata", margin=margin).keep(View(logits=x)).item()


def test_private_forms_keep_only_filters_that_see_one_row() -> None:
    assert [type(f) for f in eata().private_filters] == [EntropyFilter]
    assert [type(f) for f in deyo().private_filters] == [EntropyFilter, PLPDFilter]
    assert sar().private_filters == (EntropyFilter(0.4),)


def test_published_constants() -> None:
    assert eata().filters == (EntropyFilter(0.4), RedundancyFilter())
    assert RedundancyFilter().threshold(1000) == pytest.approx(0.05)
    assert eata().certainty_weight == 0.4
    assert sar().sharpness == 0.05
    assert sar().recovery is not None
    assert sar().recovery * math.log(1000) == pytest.approx(0.2, abs=5e-4)
    assert deyo().filters == (EntropyFilter(0.5), PLPDFilter(0.2))
    assert deyo().patches == 4
    assert (deyo().certainty_weight, deyo().structure_weight) == (0.4, True)
    assert [come(base).name for base in ("tent", "eata", "sar", "deyo")] == [
        "COME",
        "EATA-COME",
        "SAR-COME",
        "DeYO-COME",
    ]
    assert come().uncertainty is opinion
    assert come(evidence="paper").uncertainty is opinion_as_printed
    with pytest.raises(ValueError, match="base is one of"):
        come("cotta")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="evidence"):
        come(evidence="belief")  # type: ignore[arg-type]


def test_only_the_certainty_filter_is_asked_again() -> None:
    assert sar(margin=0.3).second_filters == (EntropyFilter(0.3),)
    assert tent().second_filters == ()
    assert Method(filters=(RedundancyFilter(),), filter_again=True).second_filters == (EntropyFilter(),)


@pytest.mark.parametrize("patches", [1, 2, 4])
def test_shuffling_moves_each_tile_to_its_place(patches: int) -> None:
    batch = torch.rand(3, 2, 8, 8)
    orders = patch_orders(3, patches, torch.Generator().manual_seed(0))
    assert all(sorted(order.tolist()) == list(range(patches**2)) for order in orders)
    expected = torch.stack([shuffled_by_hand(b, patches, o) for b, o in zip(batch, orders, strict=True)])
    assert torch.equal(shuffle_patches(batch, patches, orders), expected)


def test_sides_that_do_not_divide_are_resized_there_and_back() -> None:
    batch = torch.rand(2, 1, 10, 9)
    orders = patch_orders(2, 4, torch.Generator().manual_seed(0))
    small = functional.interpolate(batch, (8, 8), mode="bilinear", align_corners=False)
    moved = torch.stack([shuffled_by_hand(b, 4, o) for b, o in zip(small, orders, strict=True)])
    expected = functional.interpolate(moved, (10, 9), mode="bilinear", align_corners=False)
    torch.testing.assert_close(shuffle_patches(batch, 4, orders), expected)


@pytest.mark.parametrize("shape", [(2, 1, 3, 8), (2, 64), (2, 8, 8)])
def test_what_cannot_be_cut_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be cut into 4 x 4 patches"):
        shuffle_patches(torch.rand(shape), 4, patch_orders(2, 4, torch.Generator()))


def test_logits_come_from_tensors_and_objects() -> None:
    class Wrapped(torch.nn.Module):
        def forward(self, batch: Tensor) -> object:
            return type("Out", (), {"logits": batch})()

    batch = torch.rand(2, 3)
    assert torch.equal(logits_of(Wrapped(), batch), batch)
    for wrong in (torch.rand(2, 1), torch.rand(2), torch.rand(2, 3, 4)):
        with pytest.raises(ValueError, match=r"needs a classifier|not rows x classes"):
            logits_of(torch.nn.Identity(), wrong)


def test_plain_entropy_is_what_tent_minimises() -> None:
    view, x, _ = seen(tent())
    expected = torch.stack([plain_entropy(row) for row in x])
    torch.testing.assert_close(tent().weighted(view), expected)
