"""The attack of the membership study: gradients against a step, scores against densities."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from studies.dp_tta.membership import CLIP, FORMS, RIDGE, Attacker, foggy, gradients, step
from tacit import adapt
from tacit.data import fashion_mnist
from tacit.models import embedded

NAMES = list(adapt.Tent(embedded()).parameters)[-2:]  # the last normalisation layer: 128 numbers


def shown(start: int, count: int) -> torch.Tensor:
    return foggy(fashion_mnist("test")[0][start : start + count], 0)


def test_gradients_are_those_of_the_step_that_is_attacked() -> None:
    images = shown(0, 4)
    released = step(None, images, NAMES, seed=0)  # published Tent: the mean of all four
    assert torch.allclose(gradients(images, NAMES).mean(0), released, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_the_score_is_the_logarithm_of_the_likelihood_ratio(form: str) -> None:
    batch, known, target = 4, gradients(shown(0, 200), NAMES), gradients(shown(200, 2), NAMES)
    clip = math.inf if form == "published" else CLIP

    def clipped(row: torch.Tensor) -> torch.Tensor:
        return row * min(1.0, clip / float(row.norm()))

    rows = torch.stack([clipped(row) for row in known])
    mean, spread = rows.mean(0), torch.cov(rows.T)
    eye = torch.eye(len(mean), dtype=torch.float64)
    # delta(eps; mu) = 1e-6 at mu = 2 / z: z = 1.0822 at epsilon 10 and 8.4494 at epsilon 1 (golden numbers)
    noise = {"DP, eps 10": 1.0822, "DP, eps 1": 8.4494}.get(form, 0.0) * CLIP
    total = (spread + RIDGE * spread.diagonal().mean() * eye) / batch + (noise / batch) ** 2 * eye
    released = mean + 0.01 * torch.randn(len(mean), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row, score in zip(target, Attacker(FORMS[form], known).scores(released, target, batch), strict=True):
        moved = mean + (clipped(row) - mean) / batch
        ratio = MultivariateNormal(moved, total).log_prob(released) - MultivariateNormal(mean, total).log_prob(released)
        assert float(score) == pytest.approx(float(ratio), rel=1e-3, abs=1e-4)
