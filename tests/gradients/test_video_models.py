"""Video transformers without a slow path: TimeSformer, MViT, and the uses of bare parameters that they are made of."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import Engine

ROWS = 6
OWNERS = torch.tensor([4, 4, 1, 2, 2, 2])
CLIP = 0.05  # below every unit's norm: the factors count


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return nn.functional.cross_entropy(getattr(out, "logits", out), batch[1], reduction="none")


def by_hand(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The sum over units of clipped mean gradients, each row by plain autograd on its own."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = [torch.zeros_like(p) for p in parameters]
    for unit in OWNERS.unique():
        mine = torch.nonzero(unit == OWNERS).flatten()
        mean = [torch.zeros_like(p) for p in parameters]
        for row in mine:
            value = loss(model, (inputs[row, None], labels[row, None])).sum()
            for at, grad in zip(mean, torch.autograd.grad(value, parameters, allow_unused=True), strict=True):
                if grad is not None:
                    at += grad / len(mine)
        norm = torch.sqrt(sum((grad**2).sum() for grad in mean))
        for at, grad in zip(total, mean, strict=True):
            at += grad * min(1.0, CLIP * (1 - 1e-5) / float(norm))
    return dict(zip(names, total, strict=True))


def check(model: nn.Module, inputs: Tensor) -> Engine:
    """The fast path gives the same, and nobody is told of a slow one."""
    model = model.double().eval()
    for parameter in model.parameters():  # position embeddings are zero at the start
        nn.init.normal_(parameter, std=0.3)
    inputs, labels = inputs.double(), torch.arange(ROWS) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(model, loss, clip=CLIP)
        found = engine((inputs, labels), unit_ids=OWNERS).sum
    scale = CLIP * 1e-9
    for name, expected in by_hand(model, inputs, labels).items():
        assert float((found[name] - expected).abs().max()) < scale, name
    return engine


@pytest.mark.parametrize("frames", [4, 2, 6], ids=["as trained", "fewer frames", "more frames"])
@pytest.mark.parametrize("attention", ["divided_space_time", "joint_space_time"])
def test_timesformer(attention: str, frames: int) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.TimesformerConfig(
        image_size=16,
        patch_size=8,
        num_frames=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=2,
        attention_type=attention,
    )
    check(transformers.TimesformerForVideoClassification(config), torch.randn(ROWS, frames, 3, 16, 16))


def test_timesformer_on_larger_pictures() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.TimesformerConfig(
        image_size=16,
        patch_size=8,
        num_frames=2,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=2,
        attention_type="joint_space_time",
    )
    check(transformers.TimesformerForVideoClassification(config), torch.randn(ROWS, 2, 3, 24, 24))


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cls_token": True}, {"use_abs_pos": True, "rel_pos_type": ""}],
    ids=["relative", "with a class token", "absolute"],
)
def test_mvit_of_timm(options: dict[str, Any]) -> None:
    mvit = pytest.importorskip("timm.models.mvitv2")
    torch.manual_seed(2)
    config = mvit.MultiScaleVitCfg(depths=(1, 1), embed_dim=8, num_heads=1, **options)
    check(mvit.MultiScaleVit(config, img_size=32, num_classes=2), torch.randn(ROWS, 3, 32, 32))


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_mvit_of_torchvision(relative: bool) -> None:
    """Positions that are added up in place from three parameters; relative ones in space and time."""
    mvit = pytest.importorskip("torchvision.models.video.mvit")
    torch.manual_seed(3)
    shape = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3]}
    blocks = [
        mvit.MSBlockConfig(1, 8, 8, stride_q=[1, 1, 1], stride_kv=[1, 2, 2], **shape),
        mvit.MSBlockConfig(2, 8, 16, stride_q=[1, 2, 2], stride_kv=[1, 1, 1], **shape),
    ]
    model = mvit.MViT(
        (16, 16),
        4,
        blocks,
        residual_pool=relative,
        residual_with_cls_embed=not relative,
        rel_pos_embed=relative,
        proj_after_attn=relative,
        num_classes=2,
    )
    check(model, torch.randn(ROWS, 3, 4, 16, 16))


class Bare(nn.Module):
    """A net around one use of a parameter `p`."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(*shape))
        self.q = nn.Parameter(torch.randn(*shape))
        self.before, self.head, self.use = nn.Linear(6, 6), nn.LazyLinear(2), use

    def forward(self, rows: Tensor) -> Tensor:
        tokens = self.before(rows).view(len(rows), 4, 6) if rows.dim() == 2 else self.before(rows)
        return self.head(self.use(tokens, self).flatten(1))  # type: ignore[no-any-return, arg-type]


def in_place(x: Tensor, net: Any) -> Tensor:
    both = net.p.repeat_interleave(2, 0)
    both.add_(net.q.repeat(2, 1))  # of parameters alone, and nobody takes what it returns
    return x + both.mul_(0.5)


USES: dict[str, tuple[Callable[[Tensor, Any], Tensor], tuple[int, ...]]] = {
    "einsum, places": (lambda x, net: torch.einsum("btc,tkc->btk", x, net.p + net.q), (4, 3, 6)),
    "einsum, the parameter first": (lambda x, net: torch.einsum("tkc, btc -> bkt", net.p * net.q, x), (4, 3, 6)),
    "einsum, a list": (lambda x, net: torch.einsum("btc,kc->btk", [x, net.p + net.q]), (3, 6)),
    "einsum, folded rows": (
        lambda x, net: torch.einsum("nc,ck->nk", x.reshape(-1, 6), net.p + net.q).reshape(len(x), -1),
        (6, 3),
    ),
    "einsum, folded rows and places": (
        lambda x, net: torch.einsum("ntc,tkc->ntk", x.reshape(-1, 2, 6), net.p + net.q).reshape(len(x), -1),
        (2, 3, 6),
    ),
    "matrices, rows second": (
        lambda x, net: torch.matmul(x.transpose(0, 1), (net.p + net.q).transpose(1, 2)).transpose(0, 1),
        (4, 3, 6),
    ),
    "matrices, folded rows second": (
        lambda x, net: (
            torch.matmul(x.view(-1, 2, 2, 6).permute(1, 0, 2, 3).reshape(2, -1, 6), net.p + net.q)
            .transpose(0, 1)
            .reshape(len(x), -1)
        ),
        (2, 6, 3),
    ),
    "interpolated": (
        lambda x, net: x + nn.functional.interpolate((net.p + net.q).T[None], size=4, mode="linear").squeeze(0).T,
        (7, 6),
    ),
    "expanded and cut": (lambda x, net: torch.cat([(net.p + net.q).expand(len(x), -1, -1), x], 1)[:, 1:], (1, 2, 6)),
    "changed in place": (in_place, (2, 6)),
}


@pytest.mark.parametrize("use", USES)
def test_uses_of_a_bare_parameter(use: str) -> None:
    torch.manual_seed(4)
    model = Bare(*USES[use][:1], *USES[use][1])
    inputs = torch.randn(ROWS, 4, 6)
    model(inputs)
    check(model, inputs)


def test_the_parameter_to_blame_is_named() -> None:
    """It used to be the head, which has nothing to do with it."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
            self.table = nn.Parameter(torch.randn(3, 6))

        def forward(self, rows: Tensor) -> Tensor:
            waves = torch.fft.rfft(self.table, dim=0).abs().sum(0)
            return self.head((self.before(rows) + waves).mean(1))  # type: ignore[no-any-return]

    torch.manual_seed(5)
    model = Mixed().double()
    with pytest.warns(UserWarning, match="'table'"):
        found = Engine(model, loss, clip=CLIP)((torch.randn(ROWS, 3, 6).double(), torch.arange(ROWS) % 2))
    assert set(found.sum) == {name for name, _ in model.named_parameters()}
