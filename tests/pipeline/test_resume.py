"""Runs that are killed and run again: the ledger says what that of an uninterrupted run says."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tacit import _checkpoints as checkpoints
from tacit import pipeline
from tacit.pipeline._ledger import RunLedger
from tacit.privacy import Budget, Ledger, ReceiptError, events, replay
from tests.pipeline.killed import Killed, costs, dying, killed_and_resumed, writes
from tests.pipeline.made_up_images import ADAPT, CALIBRATE, FINETUNE, IMAGES, make_images

SIZED = IMAGES.replace("epsilon = 8.0", "epsilon = 8.0\nsize = 200")
RECIPES = {
    "three stages": IMAGES + FINETUNE + ADAPT + CALIBRATE,
    "a search": SIZED + '[tune]\nlr = [0.05, 2.0]\nsteps = [2, 4]\ntrials = 2\n\n[finetune]\nscheme = "linear"\n',
    "a search with batches": SIZED
    + '[tune]\nlr = [0.05, 2.0]\nsteps = [2, 3]\ntrials = 1\n\n[finetune]\nscheme = "linear"\n'
    + 'optimizer = "dpsgd"\nbatch_size = 20\n',
    "batches and a stream": SIZED + FINETUNE + 'optimizer = "dpsgd"\nbatch_size = 20\n' + ADAPT,
}


@pytest.mark.parametrize("which", RECIPES)
def test_killed_at_several_moments_the_ledger_is_that_of_an_uninterrupted_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    make_images(home, "stream.csv", 30, seed=1)
    make_images(home, "calibration.csv", 48, seed=2, source=True)
    recipe = home / "pipeline.toml"
    recipe.write_text(RECIPES[which])
    count, uninterrupted = writes(monkeypatch, recipe, home / "whole")
    expected = costs(uninterrupted)
    chance = random.Random(which)  # other moments for each recipe, the same every time
    for number in sorted(chance.sample(range(2, count), 4)):
        after = bool(number % 2)
        outcome = killed_and_resumed(monkeypatch, recipe, home / f"killed-{number}", number, after=after)
        assert costs(outcome) == expected, f"killed at write {number} of {count}"
        assert outcome.total.epsilon <= 8.0
        assert outcome.ledger.verify() > 0
        assert not list(home.glob("tacit-*")), "a private file was left behind"


def test_killed_by_a_signal_it_ends_with_the_same_weights(home: Path) -> None:
    recipe, out, kept = home / "pipeline.toml", home / "out", home.parent / "kept"
    recipe.write_text(IMAGES + FINETUNE.replace("steps = 4", "steps = 300").replace("every = 2", "every = 10"))
    command = [sys.executable, "-m", "tacit", "run", str(recipe), "--out", str(out)]
    checkpoint = out / "stages" / "finetune" / "checkpoint.safetensors"

    def kill() -> None:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before, end = _changed(checkpoint), time.monotonic() + 120
        while _changed(checkpoint) == before and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL

    def weights() -> dict[str, torch.Tensor]:
        assert subprocess.run(command, check=False, capture_output=True).returncode == 0
        ledger = Ledger(home / "ledger.db")
        assert len([entry for entry in ledger.entries() if entry.kind == "charge"]) == 1
        assert ledger.spent("train").epsilon == pytest.approx(8.0, rel=1e-9)
        return load_file(out / "model" / "model.safetensors")

    kill()
    shutil.copytree(home, kept)  # with the key of its noise: run on from here, both draw the same
    uninterrupted = weights()
    shutil.rmtree(home)
    kept.rename(home)
    kill()
    resumed = weights()
    assert all(torch.equal(resumed[name], value) for name, value in uninterrupted.items())


def _changed(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def test_a_search_does_not_go_on_with_other_data(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = home / "pipeline.toml"
    recipe.write_text(RECIPES["a search"])
    with dying(monkeypatch, 12, after=True), pytest.raises(Killed):
        pipeline.run(pipeline.read(recipe), home / "out")
    (mark,) = home.glob("tacit-search-*.data")
    assert mark.stat().st_mode & 0o777 == 0o600
    table = home / "labels.csv"
    told = table.read_text()
    table.write_text(told.replace("0.png,0", "0.png,1", 1))
    assert table.read_text() != told
    with pytest.raises(ValueError, match="The data is not what it was when this search began"):
        pipeline.run(pipeline.read(recipe), home / "out")
    table.write_text(told)
    assert pipeline.run(pipeline.read(recipe), home / "out").tuned is not None
    assert not list(home.glob("tacit-*"))


def test_a_search_that_is_killed_behind_its_model_does_not_release_another(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, model = home / "pipeline.toml", home / "out" / "stages" / "tune" / "model.safetensors"
    recipe.write_text(RECIPES["a search"])
    write = checkpoints.write

    def dying_behind_the_model(path: Path, content: bytes, mode: int = 0o644) -> None:
        write(path, content, mode)
        if path == model:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write", dying_behind_the_model)
        with pytest.raises(Killed):
            pipeline.run(pipeline.read(recipe), home / "out")
    released = model.read_bytes()
    outcome = pipeline.run(pipeline.read(recipe), home / "out")
    assert outcome.tuned is not None
    assert model.read_bytes() == released
    entries = outcome.ledger.entries()
    charged = {entry.receipt for entry in entries if entry.kind == "charge"}
    assert charged == {entry.receipt for entry in entries if entry.kind == "settle"}  # nothing can be drawn on any
    assert not list(home.glob("tacit-*"))


def test_a_recipe_that_was_refused_can_be_corrected(home: Path) -> None:
    recipe = home / "pipeline.toml"
    recipe.write_text((IMAGES + FINETUNE).replace("labels.csv", "lables.csv"))
    with pytest.raises(ValueError, match="There is no file"):
        pipeline.run(pipeline.read(recipe), home / "out")
    recipe.write_text(IMAGES + FINETUNE)
    assert pipeline.run(pipeline.read(recipe), home / "out").fitted is not None


def test_another_recipe_does_not_go_on_in_the_same_folder(home: Path) -> None:
    recipe = home / "pipeline.toml"
    recipe.write_text(IMAGES + FINETUNE)
    pipeline.run(pipeline.read(recipe), home / "out")
    recipe.write_text((IMAGES + FINETUNE).replace("steps = 4", "steps = 5"))
    with pytest.raises(ValueError, match="holds a run of another recipe"):
        pipeline.run(pipeline.read(recipe), home / "out")


def test_the_same_charge_twice_in_one_run_is_two_charges(tmp_path: Path) -> None:
    """The first of them was open, so that the second was taken for it: two releases on one charge."""
    ledger = RunLedger(tmp_path / "ledger.db", "run")
    ledger.subject("s", Budget(8.0, 1e-6))
    first, second = (ledger.charge("s", events.gaussian(4.0), stage="tune", note="trial") for _ in range(2))
    assert first.id != second.id
    later = RunLedger(tmp_path / "ledger.db", "run")  # after a kill: both, each once
    resumed = [later.charge("s", events.gaussian(4.0), stage="tune", note="trial").id for _ in range(3)]
    assert resumed[:2] == [first.id, second.id]
    assert resumed[2] not in resumed[:2]


def test_a_receipt_that_was_closed_is_not_charged_again_for_free(tmp_path: Path) -> None:
    """A search closes its receipt without an entry; after `finish` the next equal charge was that one, live again."""
    ledger = RunLedger(tmp_path / "ledger.db", "run")
    ledger.subject("s", Budget(8.0, 1e-6))
    first = ledger.charge("s", events.gaussian(4.0), stage="tune", note="search")
    first.close()
    ledger.finish()
    assert [entry.kind for entry in ledger.entries("s")].count("settle") == 1
    assert ledger.charge("s", events.gaussian(4.0), stage="tune", note="search").id != first.id


def test_what_was_given_away_is_not_adopted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "book.db")
    ledger.subject("people", Budget(8.0, 1e-5))
    orphan = ledger.charge("people", events.gaussian(4.0, steps=3), stage="test")
    again = replay.adopt(ledger, orphan.id)
    assert again.live
    assert again.used == 0
    secret = replay.keep(ledger, again)  # of which the chain knows, and which nothing was released with
    third = replay.adopt(ledger, orphan.id)
    assert replay.keep(ledger, third) != secret
    resumed, made = replay.resume(ledger, orphan.id, replay.keep(ledger, third), 0)
    assert (resumed.used, made) == (0, 0)
    with pytest.raises(ReceiptError, match="not the key"):
        replay.resume(ledger, orphan.id, secret, 0)
    from tacit.privacy import leases

    leases.extend(ledger, resumed, 2)
    with pytest.raises(ReceiptError, match="given away"):
        replay.adopt(ledger, orphan.id)
    ledger.settle(resumed, 3)
    with pytest.raises(ReceiptError, match="settled"):
        replay.adopt(ledger, orphan.id)
    assert ledger.verify() > 0
