"""A study with damaged or lost plans or cells: the error names what is left, and the same command resumes."""

from __future__ import annotations

import pytest

from results.cell import Cell
from results.errors import StoreError
from results.plan import Plan, Request
from results.rebuild import rebuilt_plan
from results.store import Study


def _plan(*cells: Cell) -> Plan:
    request = Request(workloads=("mlp",), gpus=(2,), strategies=("ddp",))
    return Plan(study="s", created_at="", request=request, cells=cells, series=(), skips=())


@pytest.fixture
def study(tmp_path, cell_of, record_of) -> Study:
    """Two plans of a cell each, and a run of both."""
    study = Study(tmp_path / "s")
    for cell in (cell_of(), cell_of(gpus=4)):
        study.add_plan(_plan(cell))
        study.start_run(cell.id, "run-1")
        for rank in range(cell.gpus):
            study.add_rank_record(record_of(cell, rank, run_id="run-1"))
    return study


def _ok(study: Study) -> int:
    return sum(result.outcome == "ok" for result in study.results())


@pytest.mark.parametrize("lost", ["damaged", "moved away"])
def test_cells_of_a_lost_plan_are_told_by_their_own_files(study, cell_of, lost) -> None:
    path = study.root / "plan-0001.json"
    if lost == "damaged":
        path.write_bytes(path.read_bytes()[:50])
        [why] = study.damaged_plans()
        assert why.startswith(f"{path} is not a readable plan")
    else:
        path.rename(study.root / "kept")
        assert study.damaged_plans() == []
    assert (study.unplanned_cells(), _ok(study)) == ([cell_of().id], 2)
    first, rebuilt = Study.existing(study.root).told_plans()
    assert first == _plan(cell_of(gpus=4))
    assert rebuilt.cells == (cell_of(),)
    # Planned anew it has a number of its own, and nothing is written over.
    assert study.add_plan(_plan(cell_of())).name == "plan-0003.json"
    assert study.plan(3) == _plan(cell_of())
    assert study.numbered_plans().keys() == {2, 3}
    assert (study.unplanned_cells(), len(study.told_plans())) == ([], 2)


def test_a_study_without_any_plan_is_still_one(study, cell_of) -> None:
    for path in study.plan_paths():
        path.unlink()
    for there in (Study.existing(study.root), Study.for_planning(study.root)):
        [plan] = there.told_plans()
        assert {cell.id for cell in plan.cells} == {cell_of().id, cell_of(gpus=4).id}
    assert _ok(study) == 2
    with pytest.raises(StoreError, match=r"cannot read .*plan-0001.json"):
        study.plan(1)


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_lost_cell_is_told_by_its_plan(study, cell_of, damage) -> None:
    path = study.cell_folder(cell_of().id) / "cell.json"
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:30])
    assert study.cell(cell_of().id) == cell_of()
    assert (_ok(study), study.lost_cells(), study.unplanned_cells()) == (2, [], [])


def test_runs_whose_cell_nobody_tells_are_named(study, cell_of) -> None:
    (study.root / "plan-0001.json").unlink()
    path = study.cell_folder(cell_of().id) / "cell.json"
    path.rename(path.with_name("kept"))
    assert (study.lost_cells(), _ok(study)) == ([cell_of().id], 1)
    path.write_bytes(b"{")
    assert (study.lost_cells(), _ok(study)) == ([cell_of().id], 1)


def test_series_are_rebuilt_from_what_the_cells_have_in_common(cell_of) -> None:
    weak = [cell_of(gpus=gpus, micro_batch=8) for gpus in (4, 2, 1)]
    strong = [cell_of(gpus=2, micro_batch=16)]
    other = [cell_of(gpus=2, micro_batch=8, strategy="scratch-ddp:bucket_mb=25.0")]
    plan = rebuilt_plan("s", [*weak, *strong, *other], [])
    found = [
        (one.kind, one.strategy, one.batch_size, one.global_batch, len(one.cells)) for one in plan.series
    ]
    # 4 x 8 = 2 x 16.
    assert found == [
        ("strong", "ddp", 8, 32, 2),
        ("weak", "ddp", 8, None, 3),
        ("weak", "scratch-ddp:bucket_mb=25.0", 8, None, 1),
    ]
    assert plan.series[1].cells == tuple(cell.id for cell in reversed(weak))
    assert (plan.request.gpus, plan.request.batch_sizes, plan.request.repeats) == ((1, 2, 4), (8, 16), 1)
