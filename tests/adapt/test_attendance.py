"""Who takes part: at most k steps, at least b apart, whatever is fed; everybody gets predictions."""

import contextlib
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obvious import Curious, Loss, apart, images, net, norm_of, slow
from torch import Tensor, nn

from tacit.adapt import DP, Adapter, Tent
from tacit.adapt._participation import Participation
from tacit.privacy import Ledger, Neighbours

ROWS, CLIP = 6, 0.3


def admitted(participation: Participation, units: list[int], step: int) -> list[bool]:
    return [bool(x) for x in participation.admit(torch.tensor(units), step)]


def test_by_hand() -> None:
    """k = 2, b = 3."""
    participation = Participation(2, 3)
    assert admitted(participation, [1, 2, 1], 0) == [True, True, True]  # the rows of a unit in a batch are one step
    assert admitted(participation, [1, 3], 2) == [False, True]  # too soon
    assert admitted(participation, [1, 2], 3) == [True, True]
    assert admitted(participation, [1, 2, 3, 4], 9) == [False, False, True, True]


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    k=st.integers(1, 3),
    b=st.integers(1, 4),
    batches=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=14),
)
def test_nobody_beyond_k_nor_too_soon(k: int, b: int, batches: list[list[int]]) -> None:
    participation, steps = Participation(k, b), {}
    for step, units in enumerate(batches):
        came = admitted(participation, units, step)
        for unit, taken in set(zip(units, came, strict=True)):
            past = steps.setdefault(unit, [])
            assert taken == (len(past) < k and (not past or step - past[-1] >= b))
            if taken:
                past.append(step)
    for past in steps.values():
        assert len(past) <= k
        assert all(later - earlier >= b for earlier, later in itertools.pairwise(past))


def test_a_step_that_is_tried_again_counts_once() -> None:
    """Only a step that released nothing keeps its number; the next number is another step."""
    participation = Participation(2, 1)
    for _ in range(3):
        assert admitted(participation, [1], 0) == [True]
    assert admitted(participation, [1], 1) == [True]
    assert admitted(participation, [1], 2) == [False]


def test_the_file_is_private_and_survives(tmp_path: Path) -> None:
    path = tmp_path / "who"
    first = Participation(2, 1)
    admitted(first, [7, 8], 0)
    first.keep_at(path)
    admitted(first, [7, 9], 4)
    assert path.stat().st_mode & 0o777 == 0o600
    second = Participation(2, 1)
    second.resume(path)
    assert admitted(second, [7, 8, 9, 10], 5) == [False, True, True, True]
    third = Participation(2, 1)
    third.resume(path)
    assert admitted(third, [7, 8, 9, 10], 6) == [False, False, False, True]


def test_what_was_noted_before_the_file_is_in_it(tmp_path: Path) -> None:
    """Counts and last steps, also when the file moves to another folder."""
    first = Participation(3, 2)
    for step in (0, 2, 4):
        admitted(first, [1] if step < 4 else [2], step)
    for name in ("a", "b", "a"):
        first.keep_at(tmp_path / name)
        first.keep_at(tmp_path / name)
    second = Participation(3, 2)
    second.resume(tmp_path / "a")
    assert second._seen == {1: (2, 2), 2: (1, 4)}
    assert admitted(second, [1, 2], 5) == [True, False]


def test_one_file_under_two_names_is_kept(tmp_path: Path) -> None:
    """A link to the folder, or a path from the working directory: what was noted stays in the file."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    first = Participation(1, 1)
    first.keep_at(tmp_path / "folder" / "who")
    admitted(first, [7], 0)
    first.keep_at(tmp_path / "link" / "who")
    admitted(first, [8], 1)
    second = Participation(1, 1)
    second.resume(tmp_path / "folder" / "who")
    assert admitted(second, [7, 8, 9], 2) == [False, False, True]


def test_a_line_that_a_kill_cut_off_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "who"
    path.write_text("0 1 2\n1 3 4")
    participation = Participation(1, 1)
    participation.resume(path)
    assert admitted(participation, [1, 2, 5], 2) == [False, False, True]
    again = Participation(1, 1)
    again.resume(path)
    assert admitted(again, [1, 2, 5, 6], 3) == [False, False, False, True]
    path.write_text("0 1 two\n")
    with pytest.raises(ValueError, match="damaged") as error:
        Participation(1, 1).resume(path)
    assert "two" not in str(error.value)


def test_who_came_without_an_id_is_noted_before_the_release(tmp_path: Path) -> None:
    """In the file, once, wherever it moves; earlier versions read a line that names nobody."""
    first = Participation(1, 1)
    first.keep_at(tmp_path / "who")
    admitted(first, [7], 0)
    assert not first.unnamed
    for _ in range(2):
        first.admit_unnamed()
    assert len((tmp_path / "who").read_text().splitlines()) == 3
    second = Participation(1, 1)
    second.resume(tmp_path / "who")
    assert second.unnamed
    second.keep_at(tmp_path / "elsewhere")
    third = Participation(1, 1)
    third.resume(tmp_path / "elsewhere")
    assert third.unnamed
    assert admitted(third, [7, 8], 5) == [False, True]
    fourth = Participation(1, 1)
    fourth.keep_at(tmp_path / "fourth")
    with (tmp_path / "fourth").open("a") as file:
        file.write("9 123")  # where a disk was full: what comes next is glued to it
    with pytest.raises(OSError, match="damaged"):
        fourth.admit_unnamed()
    fourth.admit_unnamed()
    assert fourth.unnamed


def test_two_processes_on_one_file_never_admit_twice(tmp_path: Path) -> None:
    """An older holder may still be within its lease: what it notes counts for the newer one, and the other way."""
    path = tmp_path / "who"
    older, newer = Participation(1, 1), Participation(1, 1)
    older.keep_at(path)
    admitted(older, [1], 0)
    newer.resume(path)
    assert admitted(older, [2], 1) == [True]
    assert admitted(newer, [1, 2, 3], 100) == [False, False, True]
    assert admitted(older, [3, 4], 2) == [False, True]
    assert admitted(newer, [4, 5], 101) == [False, True]


@pytest.mark.parametrize("back", [False, True])
def test_who_was_overtaken_admits_nobody_once_the_list_has_moved(back: bool, tmp_path: Path) -> None:
    older, newer = Participation(1, 1), Participation(1, 1)
    older.keep_at(tmp_path / "a")
    admitted(older, [1], 0)
    newer.resume(tmp_path / "a")
    assert admitted(older, [2], 1) == [True]
    newer.keep_at(tmp_path / "b")
    if back:
        newer.keep_at(tmp_path / "a")
    assert admitted(newer, [2], 99) == [False]
    for unit in range(10, 20):
        with pytest.raises(OSError, match="another process has resumed"):
            older.admit(torch.tensor([unit]), unit)
        assert admitted(newer, [unit], 100 + unit) == [True]
    assert (tmp_path / "a").exists() == back


@pytest.mark.parametrize("link", [False, True])
def test_a_kill_while_the_list_moves_lets_nobody_in_again(
    link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a list, or an empty one, is not there under the new name; the old one stays until the new one is whole."""
    (tmp_path / "folder").mkdir()
    if link:
        (tmp_path / "new").symlink_to(tmp_path / "folder")
    else:
        (tmp_path / "new").mkdir()
    first = Participation(1, 1)
    first.keep_at(tmp_path / "folder" / "who")
    admitted(first, list(range(40)), 0)
    with monkeypatch.context() as patch:
        write, write_bytes = os.write, Path.write_bytes

        def killed(file: int, text: bytes) -> None:
            write(file, text[:20])
            raise KeyboardInterrupt

        def killed_too(path: Path, text: bytes) -> None:
            write_bytes(path, text[:20])
            raise KeyboardInterrupt

        patch.setattr(os, "write", killed)
        patch.setattr(Path, "write_bytes", killed_too)
        with pytest.raises(KeyboardInterrupt):
            first.keep_at(tmp_path / "new" / "who")
    assert (tmp_path / "new" / "who").exists() == link
    second = Participation(1, 1)
    second.resume(tmp_path / "folder" / "who")
    assert admitted(second, [*range(40), 99], 1) == [False] * 40 + [True]


def make(form: DP, **more: Any) -> tuple[Adapter, Curious]:
    curator = Curious()
    options = {"batch_size": ROWS, "lr": 0.05, "ledger": Ledger("sqlite://"), "seed": 1, "curator": curator, **more}
    return Tent(net(), privacy=form, **options), curator


def clipped_sum(adapter: Adapter, batch: Tensor, units: list[int]) -> dict[str, Tensor]:
    twin = slow(adapter, adapter.model, Loss(), CLIP)
    return twin.total(twin.unit_gradients(batch, units=units))


def test_beyond_k_a_unit_gets_predictions_and_contributes_nothing() -> None:
    adapter, curator = make(DP(10.0, clip=CLIP, contributions=2, separation=2))
    plan = [
        ([1, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        ([1, 6, 6, 7, 7, 7], [6, 7]),  # 1 is back too soon
        ([1, 8, 9, 10, 11, 6], [1, 8, 9, 10, 11]),  # 6 too
        ([1, 1, 1, 1, 1, 1], []),  # 1 was here twice
        ([6, 7, 1, 12, 12, 2], [6, 7, 12, 2]),
    ]
    for step, (units, taking) in enumerate(plan):
        batch = images(ROWS, seed=step)
        before = adapter.model(batch).detach()
        rows = [i for i, unit in enumerate(units) if unit in taking]
        expected = clipped_sum(adapter, batch[rows], [units[i] for i in rows])
        torch.testing.assert_close(adapter(batch, unit_ids=torch.tensor(units)), before)
        assert apart(curator.sums[-1], expected) <= 1e-6 * CLIP * ROWS
        assert adapter.steps == step + 1
    assert norm_of(curator.sums[3]) == 0


def test_two_threads_do_not_let_a_unit_into_two_releases() -> None:
    """Both were in step 0, in which the unit may take part, and released it twice."""
    adapter, curator = make(DP(10.0, clip=CLIP))
    adapter.start(images(1))
    forward, together = adapter._step._pass, threading.Barrier(2)  # type: ignore[attr-defined]

    def slowly(*given: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.5)  # until the other one has come as far, if it can
        return forward(*given)

    adapter._step._pass = slowly  # type: ignore[attr-defined]
    threads = [threading.Thread(target=adapter, args=(images(3),), kwargs={"unit_ids": [7, 7, 7]}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert adapter.steps == 2
    assert sorted(norm_of(total) > 0 for total in curator.sums) == [False, True]


def test_predictions_of_other_threads_are_in_no_release() -> None:
    """Rows that another thread had the model predict meanwhile were in the private statistics."""

    class Gate(nn.Module):
        """Has another thread predict in the middle of every pass of a step."""

        predict: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.predict is not None and threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=self.predict, daemon=True)
                thread.start()
                thread.join(0.1)  # those that wait for the step are done after it
            return x

    def released(others: Tensor, through: str) -> Tensor:
        torch.manual_seed(0)
        gate = Gate()
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), gate, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)]
        seen: list[Tensor] = []
        adapter = Tent(
            nn.Sequential(*layers).eval(),
            privacy=DP(epsilon=2.0, delta=1e-6, clip=1.0),
            batch_size=4,
            ledger=Ledger("sqlite://"),
            statistics="private",
            curator=lambda event: seen.append(event.clipped_sum.sum["batch statistics"]),
        )
        batch = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        adapter.start(batch)

        def predict() -> None:
            with torch.no_grad():
                adapter.predict(others) if through == "adapter" else adapter.model(others)

        gate.predict = predict
        adapter(batch)
        return seen[0]

    for through in ("adapter", "model"):
        alone = released(torch.zeros(4, 1, 8, 8), through)
        assert torch.equal(released(torch.full((4, 1, 8, 8), 9.0), through), alone)


def test_where_nobody_takes_part_noise_is_released_all_the_same() -> None:
    """Otherwise the silence would tell who came."""
    adapter, curator = make(DP(10.0, clip=CLIP))
    adapter(images(ROWS), unit_ids=torch.arange(ROWS))
    before = [p.detach().clone() for p in adapter.parameters.values()]
    adapter(images(ROWS), unit_ids=torch.arange(ROWS))
    assert norm_of(curator.sums[-1]) == 0
    assert adapter.stream is not None
    assert adapter.stream.steps == 2
    assert not any(torch.equal(a, b) for a, b in zip(before, adapter.parameters.values(), strict=True))


def test_rows_that_are_not_finite_leave_their_unit() -> None:
    """The unit's mean is over its other rows; a unit of nothing else contributes zero and has still been there."""
    adapter, curator = make(DP(10.0, clip=CLIP))
    batch = images(ROWS)
    expected = clipped_sum(adapter, batch[[0, 3]], [1, 2])
    batch[1], batch[2], batch[4:] = float("nan"), float("inf"), float("nan")
    adapter(batch, unit_ids=torch.tensor([1, 1, 1, 2, 3, 3]))
    assert apart(curator.sums[-1], expected) <= 1e-6 * CLIP
    adapter(images(ROWS), unit_ids=torch.tensor([3] * ROWS))
    assert norm_of(curator.sums[-1]) == 0


def test_what_a_reset_does_not_forget() -> None:
    adapter, curator = make(DP(10.0, clip=CLIP))
    adapter(images(ROWS), unit_ids=torch.arange(ROWS))
    adapter.reset()
    adapter(images(ROWS), unit_ids=torch.arange(ROWS))
    assert norm_of(curator.sums[-1]) == 0


def test_a_step_that_fails_before_its_release_may_be_tried_again() -> None:
    adapter, curator = make(DP(10.0, clip=CLIP))
    units, batch = torch.arange(ROWS), images(ROWS)
    adapter(batch[:1], unit_ids=units[:1] + 100)
    failing = adapter.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        adapter(batch, unit_ids=units)
    failing.remove()
    assert adapter.steps == 1
    expected = clipped_sum(adapter, batch, units.tolist())
    adapter(batch, unit_ids=units)
    assert apart(curator.sums[-1], expected) <= 1e-6 * CLIP * ROWS
    adapter(batch, unit_ids=units)
    assert norm_of(curator.sums[-1]) == 0


def test_a_step_that_fails_after_its_release_has_happened() -> None:
    """The noise is used and the people have been there: the same batch again contributes nothing."""
    adapter, curator = make(DP(10.0, clip=CLIP))
    units, batch = torch.arange(ROWS), images(ROWS)
    adapter(batch[:1], unit_ids=units[:1] + 100)
    assert adapter.stream is not None
    release = adapter.stream.release

    def interrupted(*given: Any) -> Any:
        release(*given)
        raise KeyboardInterrupt

    adapter.stream.release = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        adapter(batch, unit_ids=units)
    adapter.stream.release = release  # type: ignore[method-assign]
    assert adapter.steps == 2 == adapter.stream.steps
    adapter(batch, unit_ids=units)
    assert norm_of(curator.sums[-1]) == 0


def test_a_lease_that_is_refused_counts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, curator = make(DP(10.0, clip=CLIP), lease=1)
    units, batch = torch.arange(ROWS), images(ROWS)
    adapter(batch[:1], unit_ids=units[:1] + 100)
    assert adapter.stream is not None
    with monkeypatch.context() as patch:
        patch.setattr(adapter.stream, "lease", lambda: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            adapter(batch, unit_ids=units)
    adapter(batch, unit_ids=units)
    assert norm_of(curator.sums[-1]) > 0


def test_the_card_says_what_was_enforced() -> None:
    said = "assumes one row per person"
    adapter, _ = make(DP(10.0, clip=CLIP))
    adapter(images(2), unit_ids=torch.tensor([1, 2]))
    assert not any(said in line for line in adapter.assumptions)
    adapter(images(2))  # one batch without units, and it is an assumption for the whole stream
    assert any(said in line for line in adapter.assumptions)
    adapter(images(2), unit_ids=torch.tensor([3, 4]))
    assert any(said in line for line in adapter.assumptions)
    late, _ = make(DP(10.0, clip=CLIP, contributions=3))
    late(images(2))
    late(images(2), unit_ids=torch.tensor([3, 4]))
    assert any("assumes rows in at most 3 steps per person" in line for line in late.assumptions)


@pytest.mark.parametrize(
    "units", [torch.rand(4), torch.arange(3), torch.zeros(4, 1).long(), torch.ones(4).bool(), ["a", 1] * 2, "abcd"]
)
def test_units_are_one_integer_per_row(units: Any) -> None:
    adapter, _ = make(DP(10.0, clip=CLIP))
    with pytest.raises(ValueError, match="unit_ids are one integer or string per row"):
        adapter(images(4), unit_ids=units)
    assert adapter.stream is not None
    assert adapter.stream.receipt is None
    assert not adapter.participation.anyone


def test_units_may_be_a_list() -> None:
    adapter, curator = make(DP(10.0, clip=CLIP))
    adapter(images(4), unit_ids=[1, 1, 2, 2])  # type: ignore[arg-type]
    assert curator.told[0].private.norms.numel() == 2


def test_a_full_disk_stops_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    participation = Participation(1, 1)
    participation.keep_at(tmp_path / "who")
    with monkeypatch.context() as patch:
        write = os.write
        patch.setattr(os, "write", lambda file, text: write(file, text[:2]))
        with pytest.raises(OSError, match="no room"):
            admitted(participation, [123, 456], 0)
    assert not any(admitted(participation, [123], 0))  # glued to the broken line: nobody is let in by mistake
    assert admitted(participation, [789], 1) == [True]


# Whom the stream promises something to


def charges(ledger: Ledger) -> int:
    return sum(entry.kind == "charge" for entry in ledger.entries())


def test_a_named_unit_needs_ids_with_every_batch() -> None:
    ledger = Ledger("sqlite://")
    adapter, _ = make(DP(10.0, clip=CLIP, contributions=3), unit="patient", ledger=ledger)
    with pytest.raises(ValueError, match=r"promises something to a patient.*give unit_ids="):
        adapter(images(ROWS))
    assert charges(ledger) == 0
    adapter(images(ROWS), unit_ids=torch.arange(ROWS))
    before = [p.detach().clone() for p in adapter.parameters.values()]
    with pytest.raises(ValueError, match="give unit_ids="):
        adapter(images(ROWS))
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.parameters.values(), strict=True))
    assert (charges(ledger), adapter.steps) == (1, 1)
    rows, _ = make(DP(10.0, clip=CLIP))
    rows(images(ROWS))
    assert "assumes one row per person: not every batch came with unit_ids, so it was not enforced" in rows.assumptions


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"unit": "patient", "neighbours": "replace-one"}, "to a patient under replace-one"),
        ({"neighbours": "zero-out"}, "to a sample under zero-out"),
        ({}, "to a sample under add-remove"),
    ],
)
def test_a_subject_of_other_terms_does_not_pay(terms: dict[str, str], said: str) -> None:
    form, ledger = DP(10.0, clip=CLIP), Ledger("sqlite://")
    ledger.subject("people", form.budget, **terms)  # type: ignore[arg-type]
    before = ledger.entries()
    with pytest.raises(ValueError, match=f"The subject people promises something {said}.*must agree"):
        make(form, ledger=ledger, subject="people")
    assert ledger.entries() == before


def test_ids_may_be_strings() -> None:
    form = DP(10.0, clip=CLIP, contributions=2)
    (one, first), (other, second) = make(form, unit="user"), make(form, unit="user")
    names = ["ann", "ann", "bob", "eve", "bob", "eve"]
    for step in range(3):
        batch = images(ROWS, seed=step)
        one(batch, unit_ids=names)
        other(batch, unit_ids=torch.tensor([0, 0, 1, 2, 1, 2]))
        assert apart(first.sums[-1], second.sums[-1]) < 1e-12  # they are added in another order
    assert norm_of(first.sums[-1]) == 0  # everybody was here twice


def test_the_card_says_what_a_replacement_must_bring() -> None:
    said = "a user that takes another's place brings an id that nobody else has"
    for form, there in ((DP(9.0, clip=CLIP), True), (DP(9.0, clip=CLIP, neighbours=Neighbours.ZERO_OUT), False)):
        adapter, _ = make(form, unit="user")
        adapter(images(ROWS), unit_ids=range(ROWS))
        assert (said in adapter.assumptions) is there


def test_the_earlier_name_of_the_argument_warns() -> None:
    adapter, _ = make(DP(10.0, clip=CLIP))
    with pytest.warns(DeprecationWarning, match="units=…. is now unit_ids=…"):
        adapter(images(ROWS), units=torch.arange(ROWS))
    with pytest.raises(TypeError, match="leave units= out"):
        adapter(images(ROWS), units=torch.arange(ROWS), unit_ids=torch.arange(ROWS))
