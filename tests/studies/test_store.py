"""The cell store: several processes, cells that are there already, and a file per cell."""

import json
from dataclasses import asdict
from pathlib import Path

from studies import store
from studies.dp_tta.cells import Data
from studies.grids import combinations
from tacit.recipes import fingerprint


def test_cells_in_two_processes(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []

    def progress(what: str, done: int, total: int, *, spent: tuple[float, float] | None = None) -> None:
        del spent
        said.append((what, done, total))

    cells = [Data(per_shift=count) for count in (1, 2, 3, 4)]
    store.write(store.path_of(tmp_path, cells[1]), {"cell": {}, "outcome": {"kept": True}})
    options = {"folder": tmp_path, "workers": 2, "progress": progress, "name": lambda cell: f"{cell.per_shift}"}
    found = store.outcomes([*cells, cells[0]], asdict, **options)  # type: ignore[arg-type]
    assert list(found) == cells
    assert found == {cell: {"kept": True} if cell == cells[1] else asdict(cell) for cell in cells}
    assert {total for _, _, total in said} == {3}
    assert {path.stem for path in tmp_path.iterdir()} == {fingerprint(cell) for cell in cells}
    kept = json.loads(store.path_of(tmp_path, cells[0]).read_text())
    assert kept["cell"]["per_shift"] == kept["outcome"]["per_shift"] == 1


def test_combinations_run_the_last_list_fastest() -> None:
    found = list(combinations({"a": (1, 2), "b": "same", "c": (True, False)}))
    assert [(one["a"], one["c"]) for one in found] == [(1, True), (1, False), (2, True), (2, False)]
    assert {one["b"] for one in found} == {"same"}
    assert list(combinations({"a": (), "b": (1,)})) == []
