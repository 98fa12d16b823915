"""The page "From opacus": its line counts, and one accountant over what both libraries release."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit.privacy import Ledger

PAGE = Path(__file__).parents[2] / "docs" / "from-opacus.md"
TITLES = {"Images": "images, DP-SGD", "BERT with LoRA": "BERT with LoRA", "A language model": "language model"}


def counted() -> dict[str, dict[str, int]]:
    """Job -> library -> the lines of its block."""
    found: dict[str, dict[str, int]] = {}
    for part in re.split(r"^### ", PAGE.read_text("utf-8"), flags=re.M)[1:]:
        title, _, rest = part.partition("\n")
        blocks = re.findall(r"^(Plain|opacus|tacit)[^\n]*:\n\n```python\n(.*?)```", rest, flags=re.M | re.S)
        code = {who.lower(): [line for line in body.splitlines() if line.strip()] for who, body in blocks}
        found[title] = {w: len([x for x in lines if not x.startswith(("from", "import"))]) for w, lines in code.items()}
    return found


def test_the_page_counts_its_lines_and_a_plain_loop_needs_at_most_four_more() -> None:
    lines = counted()
    assert set(lines) == set(TITLES)
    cells = re.findall(r"^\| ([^|]+) \| (\S+) \| (\S+) \| (\S+) \|$", PAGE.read_text("utf-8"), re.M)
    table = {row[0]: row[1:] for row in cells}
    for title, name in TITLES.items():
        found = lines[title]
        rows = [row for job, row in table.items() if job.startswith(name)]
        shown = [max((int(row[i]) for row in rows if row[i] != "—"), default=0) for i in range(3)]
        assert shown == [found["plain"], found["opacus"], found["tacit"]]
        assert found["tacit"] <= found["plain"] + 4
        assert found["tacit"] < found["opacus"]


# One accountant over both


ROWS, BATCH, EPOCHS, CLIP, WIDTH = 64, 16, 2, 0.7, 300


def nothing(model: nn.Module, batch: Any) -> Tensor:
    """A loss whose gradient is zero, so that what is released is noise and nothing else."""
    return 0 * model(batch[0]).sum(1)


def linear() -> nn.Module:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.zeros_(model.weight)
    return model


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.rand(ROWS, WIDTH)), batch_size=BATCH, shuffle=True)


def by_opacus() -> tuple[float, int, float, Tensor]:
    """Rate, steps, noise multiplier, and the released weights."""
    model, optimizer = linear(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, batches = PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=loader(),
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=EPOCHS,
            max_grad_norm=CLIP,
        )
        steps = 0
        for _ in range(EPOCHS):
            for batch in batches:
                optimizer.zero_grad()
                nothing(model, batch).mean().backward()
                optimizer.step()
                steps += 1
    (weight,) = model.parameters()
    return 1 / len(loader()), steps, float(optimizer.noise_multiplier), weight.detach()


def by_tacit() -> tuple[float, int, float, Tensor]:
    model = linear()
    private = tacit.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loader(),
        nothing,
        epsilon=3.0,
        delta=1e-5,
        epochs=EPOCHS,
        clip=CLIP,
        ledger=Ledger("sqlite://"),
    )
    for batch in private:
        private.step(batch)
    (weight,) = model.parameters()
    return BATCH / ROWS, private.done, private.noise_multiplier, weight.detach()


@pytest.mark.parametrize("run", [by_opacus, by_tacit], ids=["opacus", "tacit"])
def test_released_weights_have_the_noise_that_one_accountant_prices(run: Any) -> None:
    """90,000 weights are sums of T noises of sigma * clip / batch: their variance is known to 0.5%, bounded at 3%
    (six deviations: a false alarm once in 5e8). The accountant gets the sigma that was *measured*."""
    rate, steps, noise, weight = run()
    assert steps == EPOCHS * ROWS // BATCH
    measured = float(weight.double().std()) * BATCH / CLIP / math.sqrt(steps)
    assert measured == pytest.approx(noise, rel=0.015)
    accountant = PLDAccountant()
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    assert 2.9 < accountant.get_epsilon(1e-5) < 3.0 + 1e-6
    theirs = PRVAccountant()
    theirs.history = [(noise, rate, steps)]
    assert 2.9 < theirs.get_epsilon(1e-5) < 3.05
