"""Models in half precision learn in float32 copies, and a model that does not move is spoken of."""

import copy
import warnings
from collections import deque
from pathlib import Path

import pytest
import torch
from obvious import images, net
from torch import Tensor, nn

from tacit.adapt import DP, EATA, SAR, Adapter, Clip, Privacy, Tent, entropy, resume_adapter, save_adapter
from tacit.models import embedded
from tacit.privacy import Ledger

HALF = [torch.bfloat16, torch.float16]
CLIP, LR, ROWS = 0.5, 0.002, 16
FORMS: dict[str, Privacy] = {"published": None, "clip": Clip(CLIP), "dp": DP(10.0, clip=CLIP)}


def half(dtype: torch.dtype) -> nn.Module:
    return net().to(dtype)


def adapted(model: nn.Module, privacy: Privacy, lr: float = LR, **more: object) -> Adapter:
    if isinstance(privacy, DP):
        more = {"ledger": Ledger("sqlite://"), **more}
    return Tent(model, privacy=privacy, batch_size=ROWS, lr=lr, momentum=0.0, seed=3, **more)  # type: ignore[arg-type]


def batch(dtype: torch.dtype, seed: int) -> Tensor:
    return images(ROWS, seed=seed).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("form", FORMS)
def test_scales_move_where_the_type_alone_would_keep_them(dtype: torch.dtype, form: str) -> None:
    """Steps of a rate below the spacing of the type add up; rounded one by one, each would be lost."""
    adapter = adapted(half(dtype), FORMS[form], lr=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(40):
            adapter(batch(dtype, step))
    moved = [(p != adapter.origin[name]).double().mean().item() for name, p in adapter.parameters.items()]
    assert max(moved) > 0.5
    for name, p in adapter.parameters.items():
        assert p.dtype == dtype
        assert p.equal(adapter.masters.values[name].to(dtype))


def test_the_copies_are_the_sum_of_all_steps_by_hand() -> None:
    """Gradients row by row through the bfloat16 model, clipped and added in float64, steps added up in float32."""
    model = half(torch.bfloat16)
    twin = copy.deepcopy(model)
    adapter = adapted(model, Clip(CLIP), lr=0.02)
    names = list(adapter.parameters)
    own = dict(twin.named_parameters())
    masters = {name: own[name].detach().float() for name in names}
    for step in range(3):
        rows = batch(torch.bfloat16, 50 + step)
        adapter(rows)
        total = {name: torch.zeros_like(masters[name], dtype=torch.float64) for name in names}
        for row in rows:
            loss = entropy(twin(row[None]).float()).sum()
            found = torch.autograd.grad(loss, [own[name] for name in names])
            norm = sum(float(g.double().square().sum()) for g in found) ** 0.5
            for name, g in zip(names, found, strict=True):
                total[name] += g.double() * min(1.0, CLIP / norm)
        with torch.no_grad():
            for name in names:
                masters[name] -= 0.02 * (total[name] / ROWS).float()
                own[name].copy_(masters[name])
    for name in names:  # a kernel rounds a row's gradient to bfloat16 in another order than in a batch of sixteen
        moved = (masters[name] - adapter.origin[name].float()).norm()
        assert (adapter.masters.values[name] - masters[name]).norm() < 0.05 * moved + 1e-6, name


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_cannot_move_is_spoken_of_once(form: str) -> None:
    adapter = adapted(half(torch.bfloat16), FORMS[form], lr=1e-9)
    rows = [batch(torch.bfloat16, step) for step in range(12)]
    with pytest.warns(UserWarning, match="no adapted parameter has moved: their float32 copies") as said:
        deque(map(adapter, rows), maxlen=0)
    assert sum("has moved" in str(each.message) for each in said) == 1


def test_filters_that_pass_nothing_are_spoken_of() -> None:
    adapter = EATA(net(), margin=1e-9, batch_size=ROWS)
    with pytest.warns(UserWarning, match="no row passed the filters"):
        deque(map(adapter, [images(ROWS, seed=step) for step in range(8)]), maxlen=0)


def test_a_model_in_float32_has_no_copies_and_nothing_is_said() -> None:
    adapter = adapted(embedded(), None)
    assert all(master is adapter.parameters[name] for name, master in adapter.masters.values.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            adapter(torch.rand(4, 1, 28, 28))


def test_reset_and_resume_take_the_copies_along(tmp_path: Path) -> None:
    first = adapted(half(torch.bfloat16), Clip(CLIP))
    for step in range(3):
        first(batch(torch.bfloat16, step))
    save_adapter(first, tmp_path / "saved")
    second = adapted(half(torch.bfloat16), Clip(CLIP))
    resume_adapter(second, tmp_path / "saved")
    for each in (first, second):
        each(batch(torch.bfloat16, 9))
    assert all(second.masters.values[name].equal(value) for name, value in first.masters.values.items())
    first.reset()
    assert all(p.equal(first.origin[name]) for name, p in first.parameters.items())
    assert all(m.equal(first.origin[name].float()) for name, m in first.masters.values.items())


@pytest.mark.parametrize("dtype", HALF)
def test_sar_perturbs_and_puts_back_exactly(dtype: torch.dtype) -> None:
    adapter = SAR(half(dtype), privacy=DP(10.0, clip=CLIP), batch_size=ROWS, lr=LR, seed=1, ledger=Ledger("sqlite://"))
    for step in range(3):
        assert adapter(batch(dtype, step)).isfinite().all()
    assert all(p.equal(adapter.masters.values[name].to(dtype)) for name, p in adapter.parameters.items())
