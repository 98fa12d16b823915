"""The attack of the membership study: gradients row by row, scores against a density of its own."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from studies.dp_tta.membership import CLIP, FORMS, RIDGE, Attacker, foggy, gradients
from tacit import adapt
from tacit.data import fashion_mnist
from tacit.models import embedded

NAMES = list(adapt.Tent(embedded()).parameters)[-2:]  # the last normalisation layer: 128 numbers


def shown(start: int, count: int) -> torch.Tensor:
    return foggy(fashion_mnist("test")[0][start : start + count], 0)


@pytest.mark.parametrize("clip", [None, CLIP])
def test_gradients_are_those_of_single_rows(clip: float | None) -> None:
    images, model = shown(0, 3), embedded()
    rows = gradients(model, NAMES, images, clip)
    chosen = [p for name, p in model.named_parameters() if name in NAMES]
    for image, row in zip(images, rows, strict=True):
        loss = adapt.entropy(model(image[None])).sum()
        single = torch.cat([g.flatten() for g in torch.autograd.grad(loss, chosen)]).double()
        if clip is not None:
            single = single * min(1.0, clip / float(single.norm()))
        assert torch.allclose(row, single, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_the_score_is_the_logarithm_of_the_likelihood_ratio(form: str) -> None:
    batch, known, target = 4, shown(0, 200), shown(200, 2)
    attacker = Attacker(FORMS[form], NAMES, known)
    clip = None if form == "published" else CLIP
    rows = gradients(embedded(), NAMES, known, clip)
    mean, spread = rows.mean(0), torch.cov(rows.T)
    eye = torch.eye(len(mean), dtype=torch.float64)
    # delta(eps; mu) = 1e-6 at mu = 2 / z: z = 1.0822 at epsilon 10 and 8.4494 at epsilon 1 (golden numbers)
    noise = {"DP, eps 10": 1.0822, "DP, eps 1": 8.4494}.get(form, 0.0) * CLIP
    total = (spread + RIDGE * spread.diagonal().mean() * eye) / batch + (noise / batch) ** 2 * eye
    released = mean + 0.01 * torch.randn(len(mean), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for image, score in zip(target, attacker.scores(released, target, batch), strict=True):
        moved = mean + (gradients(embedded(), NAMES, image[None], clip)[0] - mean) / batch
        ratio = MultivariateNormal(moved, total).log_prob(released) - MultivariateNormal(mean, total).log_prob(released)
        assert float(score) == pytest.approx(float(ratio), rel=1e-3, abs=1e-4)
