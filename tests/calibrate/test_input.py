"""Files as people have them: read as they are meant, or refused with one sentence before anything is charged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tacit.calibrate import ece, read_outputs, read_unit_ids, reference
from tacit.calibrate._partition import partition
from tacit.cli import _main as main
from tacit.privacy import Budget, Ledger

LOGITS, LABELS = (part.numpy() for part in reference(0.1))
RUN = ["calibrate", "--sources", "3", "--samples", "100", "--epsilon", "1"]


def csv(path: Path, rows: int = 400, mark: str = ",", **columns: list[object]) -> Path:
    names = [*(name for name in columns if name == "id"), *(f"c{k}" for k in range(10)), "label"]
    lines = [mark.join(names)]
    for at in range(rows):
        values = [*(columns["id"][at : at + 1] if "id" in columns else []), *LOGITS[at].tolist()]
        label = columns["label"][at] if "label" in columns else int(LABELS[at])
        cells = [f"{v}" if not isinstance(v, float) else f"{v:.6f}" for v in values]
        lines.append(mark.join([*(c.replace(".", ",") if mark == ";" else c for c in cells), str(label)]))
    path.write_text("\n".join(lines))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main.run(list(arguments))
    out, err = capsys.readouterr()
    return int(left.value.code or 0), " ".join((out + err).split())


def test_a_column_of_ids_is_no_class(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", id=list(range(400)))
    with pytest.raises(ValueError, match=r"column 'id' that looks like an id.*--unit-ids"):
        read_outputs(path, "logits")
    outputs, _ = read_outputs(path, "logits", unit_ids="id")
    assert outputs.shape == (400, 10)


def test_semicolons_and_decimal_commas(tmp_path: Path) -> None:
    outputs, labels = read_outputs(csv(tmp_path / "a.csv", mark=";"), "logits")
    assert outputs == pytest.approx(LOGITS[:400], abs=1e-6)
    assert labels.tolist() == LABELS[:400].tolist()


def test_labels_may_be_names_of_columns(tmp_path: Path) -> None:
    named = csv(tmp_path / "a.csv", label=[f"c{k}" for k in LABELS[:400]])
    assert read_outputs(named, "logits")[1].tolist() == LABELS[:400].tolist()
    other = csv(tmp_path / "b.csv", label=["cat"] * 400)
    with pytest.raises(ValueError, match="names of the columns of outputs; some are neither"):
        read_outputs(other, "logits")
    one = tmp_path / "c.csv"
    one.write_text("p,label\n0.5,yes\n0.25,no\n")
    with pytest.raises(ValueError, match="one column of outputs labels are 0 and 1"):
        read_outputs(one, "probs")


def test_a_column_of_words_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("ward,a,b,label\nnorth,0.5,0.5,1\n,0.25,0.75,0\n")
    with pytest.raises(ValueError, match=r"a column 'ward' without a number in it.*--source-column if it says where"):
        read_outputs(path, "probs")
    assert read_outputs(path, "probs", source="ward")[0].tolist() == [[0.5, 0.5], [0.25, 0.75]]
    path.write_text("a,b,target\n0.5,0.5,a\n0.25,0.75,b\n")
    with pytest.raises(ValueError, match=r"a column 'target' without a number in it.*--labels-key"):
        read_outputs(path, "probs")
    assert read_outputs(path, "probs", labels_key="target")[1].tolist() == [0, 1]


def test_a_column_beside_numbered_ones_is_unexpected(tmp_path: Path) -> None:
    """A number that is small beside the logits would be an eleventh class, and no accuracy would show it."""
    path = tmp_path / "a.csv"
    for names, odd in (
        ("c0,c1,c2,weight,label", "weight"),
        ("mrn,0,1,2,label", "mrn"),
        ("logit_1,logit_2,target", "target"),
        ("c0,c1,c2,d3,label", "d3"),
    ):
        path.write_text(names + "\n" + ",".join(["0.5"] * names.count(",")) + ",1\n")
        with pytest.raises(ValueError, match=rf"a column '{odd}' beside numbered columns of outputs.*--labels-key"):
            read_outputs(path, "logits")
    path.write_text("PatientID,cat,dog,label\n1,0.5,0.5,1\n")
    with pytest.raises(ValueError, match="column 'PatientID' that looks like an id"):
        read_outputs(path, "logits")
    for names in ("0,1,2,label", "class 1,class 2,class 3,label", "cat,dog,label", "a1,b7,label", "b3,c1,c9,label"):
        path.write_text(names + "\n" + ",".join(["0.5"] * names.count(",")) + ",1\n")
        assert read_outputs(path, "logits")[0].shape == (1, names.count(","))


def test_labels_that_are_true_or_false_or_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("p,label\n0.5,True\n0.25,False\n")
    assert read_outputs(path, "probs")[1].tolist() == [1, 0]
    path = tmp_path / "a.npz"
    np.savez(path, probs=np.array([0.5, 0.25]), labels=np.array([True, False]))
    assert read_outputs(path, "probs")[1].tolist() == [1, 0]
    np.savez(path, probs=np.array([[0.5, 0.5], [0.25, 0.75]]), labels=np.array(["cat", "dog"]))
    with pytest.raises(ValueError, match=r"whole numbers, 0 for its first column.*In a \.csv"):
        read_outputs(path, "probs")


def test_a_file_without_a_header_is_read_by_the_numbers_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = np.c_[np.arange(50), LOGITS[:50, :4], LABELS[:50] % 4, LOGITS[:50, 4:]]
    np.savetxt(path, rows, delimiter=",", fmt="%.6f")
    with pytest.raises(ValueError, match=r"no labels.*first line names the columns.*--labels-key 1 is the first"):
        read_outputs(path, "logits")
    with pytest.raises(ValueError, match=r"no column '99'; its first line is a sample, and it has 12 columns"):
        read_outputs(path, "logits", labels_key="99")
    outputs, labels = read_outputs(path, "logits", labels_key="6", unit_ids="1")
    assert outputs == pytest.approx(LOGITS[:50], abs=1e-5)
    assert labels.tolist() == (LABELS[:50] % 4).tolist()
    assert read_unit_ids(path, "1").tolist() == [f"{k:.6f}" for k in range(50)]


def test_a_first_line_with_words_is_a_sample_if_the_others_are_like_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("0.5,0.5,1,ann\n0.1,0.9,0,bob\n0.2,0.8,1,ann\n")
    outputs, labels = read_outputs(path, "probs", labels_key="3", unit_ids="4")
    assert outputs.tolist() == [[0.5, 0.5], [0.1, 0.9], [0.2, 0.8]]
    assert (labels.tolist(), read_unit_ids(path, "4").tolist()) == ([1, 0, 1], ["ann", "bob", "ann"])
    path.write_text("0,1,label\n0.5,0.5,1\n0.1,0.9,0\n")  # pandas names columns so
    assert read_outputs(path, "probs")[0].tolist() == [[0.5, 0.5], [0.1, 0.9]]
    path.write_text("cat,dog,label\n0.5,0.5,cat\n0.1,0.9,dog\n")
    assert read_outputs(path, "probs")[1].tolist() == [0, 1]
    path.write_text("0.5,0.5,cat\n0.1,0.9,dog\n")
    with pytest.raises(ValueError, match="some are neither"):
        read_outputs(path, "probs", labels_key="3")
    path.write_text("0.5,0.5,1\n0.1,0.9\n")
    with pytest.raises(ValueError, match="the same number of columns"):
        read_outputs(path, "probs", labels_key="3")


def test_whole_logits_one_column_and_sharp_probabilities() -> None:
    whole = torch.tensor([[3, 1], [0, 2]])
    assert ece(logits=whole, labels=[0, 1]) == pytest.approx(ece(logits=whole.double(), labels=[0, 1]))
    p = torch.tensor([0.9, 0.2, 0.6])
    both = torch.stack([1 - p, p], dim=1)
    for given in (p, p[:, None]):
        assert ece(probs=given, labels=[1, 0, 1]) == ece(probs=both, labels=[1, 0, 1])
    logits = torch.full((1, 1000), -60.0, dtype=torch.float64)
    logits[0, 0] = 0.0
    from tacit.calibrate._outputs import Outputs

    exact, read = (Outputs.of(**{k: v}, labels=[0]) for k, v in (("logits", logits), ("probs", logits.softmax(1))))
    assert float(read.confidence(3.0)) == pytest.approx(float(exact.confidence(3.0)), abs=1e-9)


def test_labels_of_other_rows_are_refused_before_any_charge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, logits=LOGITS[:1000], labels=LABELS[1000:2000])
    code, said = run(capsys, *RUN, "--logits", str(path), "--ledgers", str(tmp_path / "ledgers"))
    assert code != 0
    assert "chance among 10 classes" in said
    assert (
        "source-1.db" not in {one.name for one in (tmp_path / "ledgers").iterdir()}
        or not Ledger(tmp_path / "ledgers" / "source-1.db").spent("source-1").epsilon
    )
    code, said = run(capsys, *RUN, "--logits", str(path), "--run-id", "a")
    assert "give --ledgers" in said


def test_a_new_run_id_where_nothing_is_left_is_one_true_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS)
    options = ["--logits", str(tmp_path / "a.npz"), "--ledgers", str(tmp_path / "l"), "--method", "signed-gap"]
    assert run(capsys, *RUN, *options, "--run-id", "a")[0] == 0  # an empty folder: the run starts under its name
    code, said = run(capsys, *RUN, *options, "--run-id", "b")
    assert code == 2
    assert said.startswith("3 of 3 sources did not answer question 1, the first being source-1: source-1 cannot afford")
    assert said.endswith("what is left is epsilon 0. Nothing was charged.")


HOSPITALS = np.array([f"h/{k % 4}" if k % 5 else "" for k in range(len(LABELS))])


def test_sources_of_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each source has the rows that name it; rows that name none are left over, and no size is published."""
    split = partition(logits=LOGITS, labels=LABELS, source_ids=HOSPITALS, budget=Budget(1.0, 0.0))
    assert [source.name for source in split.sources] == [f"h/{k}" for k in range(4)]
    assert [len(source._outputs) for source in split.sources] == [HOSPITALS.tolist().count(f"h/{k}") for k in range(4)]
    assert len(split.labels) == int((HOSPITALS == "").sum())
    assert {source.size for source in split.sources} == {None}
    few = partition(logits=LOGITS, labels=LABELS, source_ids=HOSPITALS, samples=30, budget=Budget(1.0, 0.0))
    assert ({len(source._outputs) for source in few.sources}, len(few.labels)) == ({30}, len(LABELS) - 120)
    with pytest.raises(ValueError, match="rows at several sources"):
        partition(
            logits=LOGITS, labels=LABELS, source_ids=HOSPITALS, unit_ids=[k // 4 for k in range(len(LABELS))],
            unit="patient", budget=Budget(1.0, 0.0),
        )  # fmt: skip
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS, hospital=HOSPITALS)
    given = ["calibrate", "--logits", str(tmp_path / "a.npz"), "--epsilon", "1", "--source-column", "hospital"]
    code, said = run(capsys, *given, "--ledgers", str(tmp_path / "l"), "--json")
    assert code == 0, said
    found = json.loads(said)
    assert (found["sources"], found["evaluated_on"], found["sizes_published"]) == (4, len(split.labels), False)
    assert (tmp_path / "l" / "h_3.db").exists()
    assert "leave --sources out" in run(capsys, *given, "--sources", "3")[1]
    assert "no array or column 'ward'" in run(capsys, *given[:-1], "ward")[1]
    assert "or --source-column" in run(capsys, *given[:-2], "--sources", "3")[1]


def test_all_rows_at_sources_leave_nothing_to_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [",".join([*(f"{v:.4f}" for v in row), str(label), f"h{k % 3}"]) for k, (row, label) in
             enumerate(zip(LOGITS[:900].tolist(), LABELS[:900].tolist(), strict=True))]  # fmt: skip
    (tmp_path / "a.csv").write_text("\n".join(lines))
    given = ["calibrate", "--logits", str(tmp_path / "a.csv"), "--labels-key", "11", "--source-column", "12"]
    code, said = run(capsys, *given, "--epsilon", "2")
    assert code == 0, said
    assert "not measured: every sample is at a source" in said


def test_one_noise_for_all_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS)
    given = ["--logits", str(tmp_path / "a.npz"), "--trust", "secure-aggregation", "--out", str(tmp_path / "out")]
    code, said = run(capsys, *RUN, *given, "--colluding", "0.4")
    assert code == 0, said
    assert "up to 1 of the other sources collude" in said
    card = " ".join((tmp_path / "out" / "privacy-card.md").read_text().split())
    assert "each source's promise holds if up to 1 of the other sources collude with the aggregator: 2 shares" in card
    assert "only totals over the sources are seen" in card
    assert "--colluding is for secure aggregation" in run(capsys, *RUN, *given[:2], "--colluding", "0.4")[1]
    assert "--trust is local or" in run(capsys, *RUN, *given[:2], "--trust", "me")[1]


def test_out_has_calibrated_outputs_and_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS)
    code, said = run(capsys, *RUN, "--logits", str(tmp_path / "a.npz"), "--out", str(tmp_path / "out"))
    assert code == 0, said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "calibrated.npz", "calibration.json", "privacy-card.md",
    }  # fmt: skip
    assert (tmp_path / "out" / "calibrated.npz").stat().st_mode & 0o777 == 0o600  # the sources' rows are among them
    with np.load(tmp_path / "out" / "calibrated.npz") as file:
        assert file["probs"].sum(axis=1) == pytest.approx(np.ones(len(LABELS)))
