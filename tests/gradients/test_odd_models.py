"""Models that crashed, were refused for the wrong reason, or came out wrong row by row."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_close, brute_force
from torch import Tensor, nn

from tacit.gradients import Engine
from tacit.gradients._batches import change


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def labelled(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4).double(), torch.randint(0, 3, (rows,))


def in_pairs(model: nn.Module, loss: Any, batch: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Every row's gradient from a batch of two of it."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = []
    for i in range(len(batch[0])):
        value = loss(model, change(batch, lambda t, i=i: t[[i, i]]))
        found.append(dict(zip(parameters, torch.autograd.grad(value[0], list(parameters.values())), strict=True)))
    norms = torch.stack([torch.stack([g.square().sum() for g in row.values()]).sum().sqrt() for row in found])
    return norms, found


@pytest.mark.filterwarnings("ignore")
def test_row_by_row_is_right_behind_a_frozen_batch_norm_with_a_transposed_gradient() -> None:
    torch.manual_seed(0)

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 5, 1), nn.BatchNorm1d(5)
            self.out, self.skip = nn.Linear(5, 3), nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.conv(x)).transpose(1, 2)
            return self.out(hidden * torch.cumsum(self.skip, 0)).mean(1)

    model = Transposed().eval()
    nn.init.uniform_(model.norm.running_mean)
    model.norm.running_var.uniform_(0.5, 2.0)
    batch = torch.randn(5, 3, 7), torch.randint(0, 3, (5,))
    engine = Engine(model, classify, clip=1e6)
    engine.validate(batch)
    engine._plan.by_row = True
    norms, rows = in_pairs(model, classify, batch)
    found = engine(batch)
    assert torch.allclose(found.private.norms, norms.double(), rtol=1e-4)
    for name in rows[0]:
        assert torch.allclose(found.sum[name].float(), torch.stack([r[name] for r in rows]).sum(0), atol=1e-5), name


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("microbatch", [None, 2])
def test_a_power_iteration_advances_once_per_sum(by_row: bool, microbatch: int | None) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = labelled()
    engine = Engine(model, classify, clip=0.1, microbatch=microbatch)
    engine.validate(batch)
    engine._plan.by_row = by_row
    start = {n: b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        model(batch[0])
    once = {n: b.clone() for n, b in model.named_buffers()}
    rows = []
    for i in range(6):
        for n, b in model.named_buffers():
            b.copy_(start[n])
        loss = classify(model, (batch[0][i : i + 1], batch[1][i : i + 1]))
        gradient = torch.autograd.grad(loss.sum(), list(model.parameters()))
        size = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
        rows.append([g * min(1.0, 0.1 * (1 - 1e-5) / float(size)) for g in gradient])
    for n, b in model.named_buffers():
        b.copy_(start[n])
    found = engine(batch)
    expected = dict(zip(dict(model.named_parameters()), (sum(parts) for parts in zip(*rows, strict=True)), strict=True))
    assert_close(found.sum, expected, 1e-9)
    for n, b in model.named_buffers():
        assert torch.allclose(b, once[n]), n


def test_integers_without_entries() -> None:
    model = nn.Linear(4, 3).double()
    x, y = labelled()
    batch = x, torch.zeros(6, 0, dtype=torch.long), y
    found = Engine(model, lambda m, b: classify(m, (b[0], b[2])), clip=0.1)(batch)
    expected, _ = brute_force(model, classify, (x, y), 0.1, list(range(6)))
    assert_close(found.sum, expected, 1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", ["script", "trace"])
def test_a_model_compiled_by_torch_jit_goes_row_by_row_and_says_so(compiled: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = labelled()
    made = torch.jit.script(model) if compiled == "script" else torch.jit.trace(model, batch[0])
    with pytest.warns(UserWarning, match="torch.jit"):
        found = Engine(made, classify, clip=0.1)(batch)
    expected, _ = brute_force(model, classify, batch, 0.1, list(range(6)))
    assert_close(found.sum, expected, 1e-9)


def test_biases_that_are_cached_in_evaluation_mode() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("levit_128s", num_classes=3).double().eval()
    for name, p in model.named_parameters():
        p.requires_grad_("attention_bias" in name or "head" in name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # some are zero at first, and hide what is before them
    images = torch.randn(3, 3, 224, 224).double()
    with torch.no_grad():
        model(images[:1])  # fills the caches
    found = Engine(model, classify, clip=0.1)((images, torch.tensor([0, 1, 2])))
    biases = [name for name in found.sum if "attention_bias" in name]
    assert biases
    assert all(float(found.sum[name].abs().max()) > 0 for name in biases)


def speech(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_kernel=(4, 4),
        conv_stride=(4, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_labels=3,
        classifier_proj_size=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        **options,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config).train()


def heard(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="none")


def test_random_time_masks_are_not_taken_for_mixing() -> None:
    torch.manual_seed(0)
    model = speech(layerdrop=0.0, mask_time_prob=0.3, mask_time_length=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Engine(model, heard, clip=0.1)((torch.randn(4, 400), torch.randint(0, 3, (4,))))
    assert found.private.nonfinite == 0


def test_layers_that_are_skipped_at_random_are_named() -> None:
    torch.manual_seed(0)
    model = speech(layerdrop=0.5, mask_time_prob=0.0)
    with pytest.warns(UserWarning, match="skipped at random.*layerdrop"):
        Engine(model, heard, clip=0.1)((torch.randn(4, 400), torch.randint(0, 3, (4,))))


def test_random_numbers_of_the_loss_itself_are_named() -> None:
    generator = torch.Generator()

    def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return classify(model, (batch[0] + torch.randn(batch[0].shape, generator=generator).double(), batch[1]))

    with pytest.raises(ValueError, match="draws random numbers of its own"):
        Engine(nn.Linear(4, 3).double(), noisy, clip=1.0)(labelled())
