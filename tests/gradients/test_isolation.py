"""What an engine refuses before it looks at a private row, and what it names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.gradients import Engine, clipped_sum


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


class OwnBatchNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3)


def net(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), middle, nn.Linear(5, 3))


def test_live_batch_norm_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\) is live.*Call \.eval\(\).*GroupNorm"):
        clipped_sum(net(nn.BatchNorm1d(5)), loss, batch(), clip=1.0)
    with pytest.raises(ValueError, match="BatchNorm1d"):
        clipped_sum(net(nn.BatchNorm1d(5, track_running_stats=False).eval()), loss, batch(), clip=1.0)


def test_frozen_batch_norm_is_accepted() -> None:
    assert clipped_sum(net(nn.BatchNorm1d(5).eval()), loss, batch(), clip=1.0).bounds == {"gradient": 1.0}


def test_unknown_mixing_is_caught_and_its_layer_named() -> None:
    with pytest.raises(ValueError, match=r"Rows are mixed in layer 1 \(OwnBatchNorm\)"):
        clipped_sum(net(OwnBatchNorm()), loss, batch(), clip=1.0)


def test_mixup_is_caught() -> None:
    def mixup(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return loss(model, (0.7 * x + 0.3 * x.flip(0), y))

    with pytest.raises(ValueError, match="by per_sample_loss, before the model"):
        clipped_sum(net(nn.ReLU()), mixup, batch(), clip=1.0)


def test_in_batch_negatives_are_caught() -> None:
    def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")

    with pytest.raises(ValueError, match="Rows are mixed by per_sample_loss, after"):
        clipped_sum(net(nn.ReLU()), contrast, batch(), clip=1.0)


def test_a_mixed_gradient_is_caught_where_the_losses_agree() -> None:
    class Swap(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: object, *grads: Tensor) -> Tensor:
            return grads[0].flip(0)

    def swapped(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(Swap.apply(model(batch[0])), batch[1], reduction="none")

    with pytest.raises(ValueError, match="Rows are mixed"):
        clipped_sum(net(nn.ReLU()), swapped, batch(), clip=1.0)


def test_a_buffer_that_remembers_rows_is_refused() -> None:
    class Remember(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.lerp_(x.detach().mean(0), 0.1)
            return x

    model = net(Remember())
    with pytest.raises(ValueError, match=r"buffer '1\.seen' changes"):
        clipped_sum(model, loss, batch(), clip=1.0)
    assert bool((model[1].seen == 0).all())


def test_instance_norm_that_keeps_statistics_is_refused() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(ValueError, match="InstanceNorm1d"):
        clipped_sum(model, loss, (torch.randn(6, 4, 3), torch.randint(0, 3, (6,))), clip=1.0)


def test_an_unreached_parameter_is_named_from_the_graph() -> None:
    model = net(nn.ReLU())
    model.register_parameter("forgotten", nn.Parameter(torch.zeros(3)))
    with pytest.raises(
        ValueError, match=r"does not reach 1 of 5 trainable parameters: forgotten.*requires_grad_\(False\)"
    ):
        clipped_sum(model, loss, batch(), clip=1.0)


def test_a_zero_gradient_is_not_an_unreached_parameter() -> None:
    model = net(nn.ReLU())
    nn.init.zeros_(model[2].weight)  # so the first layer's gradient is zero, as LoRA's A at step one
    assert float(clipped_sum(model, loss, batch(), clip=1.0).sum["0.weight"].abs().max()) == 0.0


def test_a_parameter_created_or_replaced_later_is_named() -> None:
    model = net(nn.ReLU())
    engine = Engine(model, loss, clip=1.0)
    engine(batch())
    model[1] = nn.PReLU()
    with pytest.raises(ValueError, match=r"created, replaced or unfrozen after the engine: 1\.weight.*new Engine"):
        engine(batch())
    model[1] = nn.ReLU()
    model[0].bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(ValueError, match=r"0\.bias"):
        engine(batch())


def test_the_check_leaves_no_trace() -> None:
    model = net(nn.Dropout(0.5))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rows = batch()
    state = torch.get_rng_state()
    Engine(model, loss, clip=1.0).validate(rows)
    assert torch.equal(state, torch.get_rng_state())
    for name, p in model.named_parameters():
        assert torch.equal(before[name], p)
        assert p.grad is None
        assert isinstance(p, nn.Parameter)


def test_the_wrong_number_of_losses_is_named() -> None:
    with pytest.raises(ValueError, match="one loss per row"):
        clipped_sum(net(nn.ReLU()), lambda m, b: m(b[0]).sum(), batch(), clip=1.0)
    with pytest.raises(ValueError, match="one loss per row"):
        clipped_sum(net(nn.ReLU()), lambda m, b: m(b[0]), batch(), clip=1.0)


def test_the_check_does_not_depend_on_the_values_of_rows() -> None:
    model, (x, y) = net(nn.ReLU()), batch()
    x[:] = float("nan")
    found = clipped_sum(model, loss, (x, y), clip=1.0)
    assert found.private.nonfinite == 6
    assert all(float(v.abs().max()) == 0.0 for v in found.sum.values())
