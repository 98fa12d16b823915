"""`tacit calibrate`: files of every kind, the real protocol, errors with a way out, and nothing private in between."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tacit.calibrate import ece
from tacit.calibrate._files import read_outputs, read_unit_ids
from tacit.calibrate._simulation import reference
from tacit.cli import _main as main
from tacit.privacy import Ledger

LOGITS, LABELS = (part.numpy() for part in reference(0.1))
PROBS = torch.softmax(torch.from_numpy(LOGITS), dim=1).numpy()
FEW = ("--sources", "10", "--samples", "100", "--epsilon", "1")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def probs(tmp_path: Path) -> str:
    path = tmp_path / "outputs.npz"
    np.savez(path, predictions=PROBS.astype(np.float32), ground_truth=LABELS, patient=np.arange(len(LABELS)) // 2)
    return str(path)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main.run(["calibrate", *arguments])
    told = capsys.readouterr()
    return int(end.value.code or 0), told.out, told.err


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = call(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_numbers_are_those_of_the_samples_that_no_source_had(
    capsys: pytest.CaptureFixture[str], probs: str
) -> None:
    found = facts(capsys, "--probs", probs, *FEW, "--method", "acc-t", "--seed", "3")
    assert (found["queries"], found["epsilon"], found["sources"], found["evaluated_on"]) == (6, 1.0, 10, 3000)
    rest = np.random.default_rng(3).permutation(4000)[1000:]
    logits = torch.from_numpy(PROBS.astype(np.float32)).double().clamp_min(2.3e-308).log()[rest]
    assert found["ece_before"] == pytest.approx(ece(logits=logits, labels=LABELS[rest]))
    assert found["ece_after"] == pytest.approx(ece(logits=logits / found["temperature"], labels=LABELS[rest]))
    assert found["private"]
    assert "when one sample is added or removed" in found["guarantee"]


@pytest.mark.parametrize(
    ("method", "queries"),
    [("signed-gap", 2), ("nll-t", 6), ("ece-t", 6), ("histogram", 1), ("one-source", 0), ("nothing", 0)],
)
def test_every_method(capsys: pytest.CaptureFixture[str], probs: str, method: str, queries: int) -> None:
    found = facts(capsys, "--probs", probs, *FEW, "--method", method)
    assert found["queries"] == queries
    assert found["private"] is (method != "one-source")
    assert found["epsilon"] == (1.0 if queries else 0.0)
    assert (found["ece_before"] == found["ece_after"]) is (method == "nothing")


def test_options_reach_the_method_and_the_sources(capsys: pytest.CaptureFixture[str], probs: str) -> None:
    given = ("--method", "acc-t", "--iterations", "3", "--low", "1", "--high", "2", "--neighbours", "replace-one")
    whose = ("--unit", "patient", "--unit-ids", "patient")
    found = facts(capsys, "--probs", probs, *FEW, *given, "--delta", "1e-6", *whose)
    assert (found["queries"], found["noise"], found["neighbours"], found["delta"]) == (
        4,
        "gaussian",
        "replace-one",
        1e-6,
    )
    assert 1 <= found["temperature"] <= 2
    assert "one patient is replaced" in found["guarantee"]


def test_people_read_a_table_and_a_promise(capsys: pytest.CaptureFixture[str], probs: str) -> None:
    code, out, _ = call(capsys, "--probs", probs, *FEW)
    assert code == 0
    said = " ".join(out.split())
    assert "temperature" in said
    assert "on 3,000 samples given to no source, declared public for this evaluation" in said
    assert "(1, 0)-differential privacy" in said
    assert "in memory" in said
    code, out, _ = call(capsys, "--probs", probs, *FEW, "--method", "histogram")
    assert "confidences" in out


def test_a_budget_that_is_too_small_is_said(capsys: pytest.CaptureFixture[str], probs: str) -> None:
    small = ("--probs", probs, "--sources", "5", "--samples", "8", "--epsilon", "0.2")
    kept = facts(capsys, *small)
    assert (kept["temperature"], kept["queries"], kept["epsilon"]) == (1.0, 0, 0.0)
    assert "too small" in kept["notes"][0]
    named = facts(capsys, *small, "--method", "acc-t")
    assert named["queries"] == 6
    assert "small for this much data" in named["notes"][-1]
    cautious = facts(capsys, *small, "--method", "acc-t", "--cautious")
    assert cautious["queries"] == 0
    bold = facts(capsys, *small, "--no-cautious")
    assert bold["queries"] > 0


def test_ledgers_are_files_of_one_deal(capsys: pytest.CaptureFixture[str], probs: str, tmp_path: Path) -> None:
    given = ("--probs", probs, *FEW, "--method", "signed-gap", "--ledgers", str(tmp_path / "ledgers"))
    first = facts(capsys, *given, "--run-id", "a")
    assert facts(capsys, *given, "--run-id", "a")["temperature"] == first["temperature"]
    ledger = Ledger(tmp_path / "ledgers" / "source-01.db", create=False)
    assert ledger.spent("source-01").epsilon == pytest.approx(1.0)
    deal = tmp_path / "ledgers" / "deal.json"
    assert deal.stat().st_mode & 0o777 == 0o600  # it has a digest of all rows
    deal.chmod(0o644)  # as earlier versions wrote it
    code, out, err = call(capsys, *given)
    assert deal.stat().st_mode & 0o777 == 0o600
    assert (code, out) == (2, "")
    assert "cannot afford" in err
    code, out, err = call(capsys, *given, "--seed", "1")
    assert (code, out) == (2, "")
    assert "those of another partition" in err


KINDS: dict[str, Any] = {
    "a.npz": lambda path: np.savez(path, logits=LOGITS, labels=LABELS),
    "b.npz": lambda path: np.savez(path, scores=LOGITS, answers=LABELS[:, None].astype(np.uint8)),
    "c.safetensors": lambda path: save_file({"logits": LOGITS.astype(np.float32), "labels": LABELS}, path),
    "d.npy": lambda path: (np.save(path, LOGITS), np.save(path.with_name("labels.npy"), LABELS)),
    "e.csv": lambda path: np.savetxt(
        path, np.c_[LABELS, LOGITS], delimiter=",", header="label," + ",".join(f"c{i}" for i in range(10)), comments=""
    ),
    "f.csv": lambda path: (
        np.savetxt(path, LOGITS, delimiter=","),
        np.savetxt(path.with_name("labels.csv"), LABELS, fmt="%d"),
    ),
}
OPTIONS: dict[str, dict[str, str]] = {
    "b.npz": {"key": "scores", "labels_key": "answers"},
    "d.npy": {"labels": "labels.npy"},
    "f.csv": {"labels": "labels.csv"},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    KINDS[name](tmp_path / name)
    outputs, labels = read_outputs(name, "logits", **OPTIONS.get(name, {}))
    np.testing.assert_allclose(outputs, LOGITS, rtol=1e-6)
    np.testing.assert_array_equal(labels, LABELS)
    assert labels.dtype == np.int64


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--logits", "probs.npz"), "These look like probabilities: pass them as --probs"),
        (("--probs", "logits.npz"), "Every row of probs lies within [0, 1]"),
        ((), "Give the classifier's outputs as --logits FILE or as --probs FILE"),
        (("--logits", "logits.npz", "--probs", "probs.npz"), "one of the two"),
        (("--logits", "nowhere.npz"), "There is no file nowhere.npz"),
        (("--logits", "text.txt"), "none of the kinds that tacit reads"),
        (("--logits", "broken.npz"), "broken.npz"),
        (("--logits", "broken.safetensors"), "cannot be read as .safetensors"),
        (("--logits", "objects.npz"), "other than plain arrays"),
        (("--logits", "other.npz"), "it has a, b. Name the array with --key"),
        (("--logits", "other.npz", "--key", "c"), "no array 'c'"),
        (("--logits", "alone.npy"), "give the labels in a file of their own (--labels)"),
        (("--logits", "ragged.csv"), "some have not"),
        (("--logits", "words.csv"), "without a number in it"),
        (("--logits", "empty.csv"), "is empty"),
        (("--logits", "nan.npz"), "not finite"),
        (("--logits", "logits.npz", "--sources", "400"), "none is left to evaluate on"),
        (("--logits", "logits.npz", "--sources", "0"), "at least one source"),
        (("--logits", "logits.npz", "--epsilon", "-1"), "psilon"),
        (("--logits", "logits.npz", "--noise", "gaussian"), "needs a --delta above 0"),
        (("--logits", "logits.npz", "--noise", "laplace", "--delta", "1e-6"), "leave --delta out"),
        (("--logits", "logits.npz", "--noise", "pink"), "laplace or gaussian"),
        (("--logits", "logits.npz", "--method", "acct"), "did you mean 'acc-t'"),
        (("--logits", "logits.npz", "--method", "acc-t", "--bins", "5"), "has no option --bins"),
        (("--logits", "logits.npz", "--neighbours", "few"), "few"),
        (("--logits", "logits.npz", "--low", "2", "--high", "1"), "low < high"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("probs.npz", probs=PROBS, labels=LABELS)
    np.savez("logits.npz", logits=LOGITS, labels=LABELS)
    np.savez("other.npz", a=LOGITS, b=LABELS)
    np.savez("objects.npz", logits=np.array([{"a": 1}], dtype=object), labels=LABELS)
    np.savez("nan.npz", logits=np.full((4000, 10), np.nan), labels=LABELS)
    np.save("alone.npy", LOGITS)
    Path("broken.npz").write_bytes(b"no archive")
    Path("broken.safetensors").write_bytes(b"no tensors")
    Path("text.txt").write_text("")
    Path("empty.csv").write_text("")
    Path("ragged.csv").write_text("label,a,b\n1,2,3\n1,2\n")
    Path("words.csv").write_text("label,a,b\n1,2,three\n")
    few = dict(zip(FEW[::2], FEW[1::2], strict=True)) | dict(zip(arguments[::2], arguments[1::2], strict=True))
    code, out, err = call(capsys, *(word for pair in few.items() for word in pair))
    assert (code, out) == (2, "")
    assert sentence in " ".join(err.split())
    assert len(err.splitlines()) == 1


def test_a_unit_is_dealt_whole(tmp_path: Path) -> None:
    """No patient is at two sources, nor at one and in the evaluation; each source has as many patients as asked for."""
    from tacit.calibrate._partition import partition
    from tacit.privacy import Budget

    ids = [f"p{number}" for number in np.random.default_rng(0).integers(0, 50, 300)]
    scores, rows = 9 * np.eye(300), np.arange(300)  # the label of a row is its number
    options: dict[str, Any] = {"sources": 4, "samples": 10, "budget": Budget(1.0, 0.0), "unit": "patient"}
    split = partition(logits=scores, labels=rows, unit_ids=ids, ledgers=tmp_path, **options)
    parts = [source._outputs.shifted.argmax(1).tolist() for source in split.sources] + [split.labels.tolist()]
    assert sorted(row for part in parts for row in part) == rows.tolist()
    whose = [{ids[row] for row in part} for part in parts]
    assert [len(people) for people in whose] == [10] * 5
    assert len(set.union(*whose)) == 50  # nobody twice
    assert {len(source._units.unique()) for source in split.sources} == {10}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="another partition"):
        partition(logits=scores, labels=rows, unit_ids=ids[::-1], ledgers=tmp_path, **options)
    with pytest.raises(ValueError, match="5 sources of 10 units take 50 of 50 units"):
        partition(logits=scores, labels=rows, unit_ids=ids, **(options | {"sources": 5}))


def test_a_unit_without_ids_is_refused(capsys: pytest.CaptureFixture[str], probs: str) -> None:
    code, _, err = call(capsys, "--probs", probs, *FEW, "--unit", "patient")
    assert code == 2
    assert "--unit 'patient' needs to know whose each row is: give --unit-ids" in " ".join(err.split())
    code, _, err = call(capsys, "--probs", probs, *FEW, "--unit", "patient", "--unit-ids", "ward")
    assert code == 2
    assert "no array or column 'ward'" in " ".join(err.split())


def test_ids_in_a_table_are_no_outputs(tmp_path: Path) -> None:
    path = tmp_path / "outputs.csv"
    path.write_text("who,a,b,label\nann,0.5,0.5,1\nbob,0.1,0.9,0\nann,0.2,0.8,1\n")
    outputs, labels = read_outputs(path, "probs", unit_ids="who")
    assert outputs.tolist() == [[0.5, 0.5], [0.1, 0.9], [0.2, 0.8]]
    assert labels.tolist() == [1, 0, 1]
    assert read_unit_ids(path, "who").tolist() == ["ann", "bob", "ann"]
