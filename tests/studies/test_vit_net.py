"""timm's ViT-Ti as one of the small nets: the same outputs, at its own size and with resized positions."""

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

from studies.prepare import vit_net


@pytest.mark.parametrize("side", [224, 64])
def test_the_converted_net_says_what_timms_says(side: int) -> None:
    torch.manual_seed(0)
    found = timm.create_model(vit_net.NAME).state_dict()
    found = {name: value + 0.02 * torch.randn_like(value) for name, value in found.items()}  # biases are not all 0
    cells = [side // vit_net.PATCH] * 2
    theirs = timm.create_model(vit_net.NAME, img_size=side).eval()
    theirs.load_state_dict(found | {"pos_embed": resample_abs_pos_embed(found["pos_embed"], cells)})
    for module in theirs.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-5  # as in `models.ViT`
    images = torch.rand(2, 3, side, side)
    with torch.inference_mode():
        ours = vit_net.converted(found, side)(images)
        expected = theirs((images - 0.5) / 0.5)
    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)
    assert float(expected.std()) > 0.1
