"""The embedded source model: its size, its accuracy on images that it has not seen, and its normalisation."""

import pytest
import torch
from safetensors.torch import save_file

from tacit.data import fashion_mnist
from tacit.models import embedded, normalisers
from tacit.models._embedded import architecture, load_convnet


def test_it_is_small_and_normalises_by_layer() -> None:
    model = embedded()
    assert sum(p.numel() for p in model.parameters()) == 103_530
    assert len(list(normalisers(model))) == 11
    assert all(isinstance(module, torch.nn.LayerNorm) for _, module in normalisers(model))
    assert not model.training


def test_it_knows_clothes() -> None:
    images, labels = (part[:1000] for part in fashion_mnist("test"))
    with torch.no_grad():
        right = (embedded()(images.float() / 255).argmax(1) == labels).float().mean()
    assert right > 0.86  # 89.3% of all 10,000; three standard deviations of 1,000 are 2.9 points


def test_the_normalisation_is_inside() -> None:
    model = embedded()
    images = torch.rand(3, 1, 28, 28)
    inside = model.body((images - 0.2860) / 0.3530).mean((2, 3))
    torch.testing.assert_close(model(images), model.head(model.norm(inside)))


def test_weights_that_do_not_fit_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    save_file({"other": torch.zeros(3)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="does not fit"):
        load_convnet(architecture(), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="no file"):
        load_convnet(architecture(), tmp_path / "none.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="does not fit"):
        load_convnet(architecture(), tmp_path / "junk.safetensors")
