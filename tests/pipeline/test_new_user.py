"""As a new user would: files of one's own, a starter recipe, a few lines edited, the command; killed again."""

import csv
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tacit.data import fashion_mnist
from tacit.privacy import Ledger
from tests.data.words import bert, saved

TACIT = [sys.executable, "-m", "tacit"]
KILLS = 10


def images(home: Path) -> dict[str, str]:
    """Photographs of clothes, as PNG and JPEG, in grey and in colour; three of each patient."""
    pytest.importorskip("timm")
    pictures, kinds = fashion_mnist("unseen")
    chosen = [row for row in range(400) if kinds[row] in (0, 3)][:48]
    (home / "images" / "ward 1").mkdir(parents=True)
    with (home / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "label", "patient"])
        for place, row in enumerate(chosen):
            name = f"ward 1/{place}.{'jpg' if place % 2 else 'png'}"
            picture = Image.fromarray(pictures[row, 0].numpy())
            (picture if place % 3 else picture.convert("RGB")).save(home / "images" / name)
            table.writerow([name, int(kinds[row] == 3), f"patient {place // 3}"])
    return {
        'name = "timm:vit_tiny_patch16_224"': 'name = "timm:test_vit"\npretrained = false',
        'scheme = "linear"': 'scheme = "selective"',
        "steps = 30": "steps = 60\nevery = 1",
    }


def text(home: Path) -> dict[str, str]:
    """Short texts, three of each user, and a tiny model of transformers in a folder."""
    pytest.importorskip("peft")
    saved(bert("BertForSequenceClassification"), home / "bert")
    with (home / "texts.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label", "user"])
        for row in range(48):
            table.writerow([f"{'very ' * (row % 3)}{('bad', 'good')[row % 2]} film", row % 2, f"user {row // 3}"])
    return {
        "transformers:distilbert-base-uncased": "transformers:bert",
        "max_length = 128": "max_length = 16",
        "steps = 30": "steps = 200\nevery = 5",
    }


FILES: dict[str, Callable[[Path], dict[str, str]]] = {"images": images, "text": text}


def prepared(kind: str, home: Path) -> list[str]:
    """The files, the starter recipe with a few lines edited, and the command."""
    home.mkdir()
    changes = FILES[kind](home)
    recipe = home / "mine.toml"
    assert subprocess.run([*TACIT, "init", kind, str(recipe)], check=False, capture_output=True).returncode == 0
    told = recipe.read_text()
    for old, new in changes.items():
        assert old in told, old
        told = told.replace(old, new)
    recipe.write_text(told)
    return [*TACIT, "run", str(recipe), "--out", str(home / "out")]


def killed(command: list[str], until: Callable[[float], bool]) -> bool:
    """Start the command and kill it once `until(seconds so far)`; False if it ended before that."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    start = time.monotonic()
    while process.poll() is None and not until(time.monotonic() - start):
        time.sleep(0.01)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def moment(chance: random.Random, checkpoint: Path, length: float) -> Callable[[float], bool]:
    """A random moment: some time after the start, or behind the n-th new checkpoint, whichever is first."""
    seconds, wanted, wait = chance.uniform(0.1, 1.0) * length, chance.randint(1, 4), chance.uniform(0.0, 0.3)
    seen, since = [checkpoint.stat().st_mtime_ns], [0.0]

    def now(clock: float) -> bool:
        changed = checkpoint.stat().st_mtime_ns
        if changed != seen[-1]:
            seen.append(changed)
            since[0] = clock
        return clock > seconds or (len(seen) > wanted and clock > since[0] + wait)

    return now


def books(home: Path) -> list[tuple[str, str, object, object]]:
    """Every charge of a ledger: whom, by which stage, what was released and its price."""
    ledger = Ledger(home / "ledger.db")
    assert ledger.verify() > 0
    return [
        (entry.subject, entry.body["stage"], entry.body["event"], entry.body["cost"])
        for entry in ledger.entries()
        if entry.kind == "charge"
    ]


def weights(home: Path) -> dict[str, torch.Tensor]:
    return load_file(home / "out" / "model" / "model.safetensors")


def interrupted(kind: str, tmp_path: Path, kills: int) -> tuple[Path, int]:
    """A run that is killed so often is compared with a copy of itself that is killed once and then left alone.

    Both have the same key (which lies beside the ledger until the run ends), so that the same noise is drawn: the
    weights must agree bit for bit, whatever was lost and replayed in between.
    """
    home, twin, kept = tmp_path / "home", tmp_path / "twin", tmp_path / "kept"
    command = prepared(kind, home)
    checkpoint = home / "out" / "stages" / "finetune" / "checkpoint.safetensors"
    assert killed(command, lambda _: checkpoint.exists())
    shutil.copytree(home, kept)
    start = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    home.rename(twin)
    kept.rename(home)  # the key is found by the checkpoint's path
    length, chance, hits = time.monotonic() - start, random.Random(kind), 1
    for _ in range(kills - 1):
        hits += killed(command, moment(chance, checkpoint, length))
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert books(home) == books(twin)
    assert len(books(home)) == 1
    ours, theirs = weights(home), weights(twin)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not list(home.glob("tacit-*")), "a private file was left behind"
    return home, hits


def check_results(kind: str, home: Path) -> None:
    """What the user does next: load the weights without tacit, and read page and card."""
    folder = home / "out" / "model"
    if kind == "images":
        import timm

        plain = timm.create_model("test_vit", num_classes=2, checkpoint_path=str(folder / "model.safetensors"))
        with torch.no_grad():
            assert plain.eval()(torch.rand(2, 3, 160, 160)).shape == (2, 2)
    else:
        import transformers

        plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        words = transformers.AutoTokenizer.from_pretrained(folder)(["a good film"], return_tensors="pt")
        assert plain(**words).logits.shape == (1, 2)
    stored = weights(home)
    assert all(torch.equal(stored[name], value) for name, value in plain.state_dict().items() if name in stored)
    card = subprocess.run([*TACIT, "card", str(home / "out")], check=True, capture_output=True, text=True).stdout
    unit = {"images": "patient", "text": "user"}[kind]
    assert f"Every {unit} in the data, with all rows of that {unit} together." in card
    page = (home / "out" / "report.html").read_text()
    assert re.search(r"ε = 8\b", page)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(FILES))
def test_killed_at_ten_random_moments(tmp_path: Path, kind: str) -> None:
    home, hits = interrupted(kind, tmp_path, KILLS)
    assert hits == KILLS, "some of the kills came when the run had ended"
    check_results(kind, home)
