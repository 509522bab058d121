"""A study's folder: what is written stays, what is derived comes back to the same bytes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from launching import a_launch, an_attempt

from results.cell import Cell
from results.errors import SchemaError, StoreError, UsageError
from results.features import inner_folders
from results.launch import Attempt, Launch, Slot
from results.outcome import Outcome
from results.plan import Plan, Request
from results.store import Study, new_id, utc_now


def _plan(*cells: Cell, created_at: str = "2026-01-02T03:04:05.000Z") -> Plan:
    return Plan(
        study="demo",
        created_at=created_at,
        request=Request(workloads=("resnet18",), gpus=(2,), strategies=("ddp",)),
        cells=cells,
        series=(),
        skips=(),
    )


def _launch(*slots: Slot, code: object) -> Launch:
    return a_launch(launch_id="launch-1", slots=slots, code=code)


def _attempt(**outcomes: Outcome) -> Attempt:
    return an_attempt(
        launch_id="launch-1",
        exit_code=1,
        outcomes={name.replace("_", "-"): outcome for name, outcome in outcomes.items()},
        reasons={name.replace("_", "-"): f"seen {outcome}" for name, outcome in outcomes.items()},
    )


def _bytes(root: Path, *patterns: str) -> dict[str, bytes]:
    """Every file of a study, or those that match, hidden ones too."""
    paths = {path for pattern in patterns or ("**/*",) for path in root.glob(pattern)}
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(paths) if path.is_file()}


@pytest.fixture
def study(tmp_path, cell_of, record_of) -> Study:
    """Two cells of two whole runs of two ranks each."""
    study = Study(tmp_path / "demo")
    cells = (cell_of(), cell_of(workload="resnet50"))
    study.add_plan(_plan(*cells))
    for cell in cells:
        for repeat in (1, 2):
            study.start_run(cell.id, f"run-{repeat}")
            for rank in range(2):
                record = record_of(cell, rank, run_id=f"run-{repeat}", repeat=repeat, setup_ns=repeat)
                study.add_rank_record(record)
    return study


def test_plans_are_numbered_and_never_written_over(tmp_path, cell_of) -> None:
    study = Study(tmp_path)
    plans = [_plan(cell_of()), _plan(cell_of(), cell_of(gpus=4)), _plan(cell_of())]
    paths = [study.add_plan(plan) for plan in plans]
    assert [path.name for path in paths] == ["plan-0001.json", "plan-0002.json", "plan-0003.json"]
    assert study.plans() == plans
    assert study.cell_ids() == sorted([cell_of().id, cell_of(gpus=4).id])


def test_two_planners_that_meet_lose_no_plan(tmp_path, cell_of, monkeypatch) -> None:
    study = Study(tmp_path)
    study.add_plan(_plan(cell_of()))
    # The other process counted the plans before this one was there.
    monkeypatch.setattr(study, "plan_paths", list)
    with pytest.raises(StoreError, match=r"plan-0001.json exists and is never overwritten"):
        study.add_plan(_plan(cell_of(gpus=4)))
    assert Study(tmp_path).plans() == [_plan(cell_of())]


def test_a_plan_that_is_there_has_all_its_cells(tmp_path, cell_of, monkeypatch) -> None:
    study, cells = Study(tmp_path), [cell_of(gpus=gpus) for gpus in (1, 2, 4)]
    link = os.link
    done: list[str] = []

    def link_twice(source: str, target: str) -> None:
        if len(done) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done.append(target)
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link_twice)
        with pytest.raises(StoreError):
            study.add_plan(_plan(*cells))
    assert study.plan_paths() == []
    study.add_plan(_plan(*cells))
    assert [study.cell(cell.id) for cell in cells] == cells
    assert not [name for name in _bytes(tmp_path) if name.endswith(".tmp")]


def test_a_rank_record_is_written_once(study, cell_of, record_of) -> None:
    before = _bytes(study.root)
    with pytest.raises(StoreError, match=r"rank-00001.json exists and is never overwritten"):
        study.add_rank_record(record_of(cell_of(), 1, setup_ns=99))
    assert _bytes(study.root) == before


def test_an_edited_cell_is_read_from_its_plan_or_refused(study, cell_of) -> None:
    path = study.cell_folder(cell_of().id) / "cell.json"
    path.write_text(path.read_text().replace('"micro_batch":8', '"micro_batch":9'))
    assert study.cell(cell_of().id) == cell_of()
    (study.root / "plan-0001.json").unlink()
    with pytest.raises(SchemaError, match=f"{path} holds the cell resnet18-ddp-g002-b9-.*: it was edited"):
        study.cell(cell_of().id)


def test_collecting_writes_a_line_a_run(study) -> None:
    results = study.collect()
    lines = (study.root / "index.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=type(results[0])) for line in lines] == results
    assert [(run.outcome, run.repeat, run.setup_ns) for run in results] == [
        (Outcome.OK, 1, 1),
        (Outcome.OK, 2, 2),
    ] * 2
    assert [run.cell_id for run in results] == sorted(run.cell_id for run in results)


def test_a_result_that_was_derived_while_its_launch_lived_gets_the_start_up_afterwards(
    study, cell_of
) -> None:
    assert [run.startup_ns for run in study.collect()] == [None] * 4
    slots = [Slot(cell_id=cell_of().id, run_id=f"run-{repeat}", repeat=repeat) for repeat in (1, 2)]
    record = study.rank_records(cell_of().id, "run-1")[0]
    study.add_launch(_launch(*slots, code=record.environment.code))
    study.add_attempt(msgspec.structs.replace(_attempt(), startup_ns=7))
    # Runs of the same ids, of another cell, are of the same launch here.
    assert [run.startup_ns for run in study.collect()] == [7] * 4


def test_collecting_again_changes_nothing(study) -> None:
    results = study.collect()
    before = _bytes(study.root)
    assert study.collect() == results
    assert _bytes(study.root) == before


def test_forgotten_derived_files_are_derived_to_the_same_bytes(study) -> None:
    raw = _bytes(study.root)
    study.collect()
    before = _bytes(study.root)
    assert len(before) == len(raw) + 5  # four run.json and the index
    study.forget_derived()
    assert _bytes(study.root) == raw
    study.collect()
    assert _bytes(study.root) == before


def test_reading_results_writes_nothing(study) -> None:
    before = _bytes(study.root)
    assert len(study.results()) == 4
    assert _bytes(study.root) == before


def test_a_single_run_is_derived_and_kept(study, cell_of) -> None:
    result = study.result(cell_of().id, "run-1", None)
    assert result == study.results()[0]
    assert [name for name in _bytes(study.root, "cells/*/*/run.json")] == [
        f"cells/{cell_of().id}/run-1/run.json"
    ]


def test_a_run_that_left_nothing_is_known_to_have_begun(study, cell_of) -> None:
    study.start_run(cell_of().id, "run-3")
    run = study.collect()[2]
    assert (run.run_id, run.outcome, run.ranks_present) == ("run-3", Outcome.UNKNOWN, 0)


def test_an_incomplete_run_is_derived_anew_until_all_its_ranks_are_there(study, cell_of, record_of) -> None:
    slot = Slot(cell_id=cell_of().id, run_id="run-3", repeat=3)
    study.start_run(cell_of().id, "run-3")
    study.add_rank_record(record_of(cell_of(), 0, run_id="run-3", repeat=3))
    assert study.collect()[2].outcome is Outcome.UNKNOWN
    study.add_launch(_launch(slot, code=record_of(cell_of(), 0).environment.code))
    study.add_attempt(_attempt(run_3=Outcome.PREEMPTED))
    stopped = study.collect()[2]
    assert (stopped.outcome, stopped.reason) == (Outcome.PREEMPTED, "seen preempted")
    study.add_rank_record(record_of(cell_of(), 1, run_id="run-3", repeat=3))
    assert study.collect()[2].outcome is Outcome.OK


def test_an_attempt_is_found_by_each_of_its_runs(study, cell_of, record_of) -> None:
    slots = [Slot(cell_id=cell_of().id, run_id=f"run-{repeat}", repeat=repeat) for repeat in (1, 2)]
    launch = _launch(*slots, code=record_of(cell_of(), 0).environment.code)
    study.add_launch(launch)
    assert (study.launches(), study.attempts()) == ([launch], {})
    study.add_attempt(_attempt())
    assert study.attempts() == {"run-1": _attempt(), "run-2": _attempt()}
    with pytest.raises(StoreError, match=r"attempt.json exists and is never overwritten"):
        study.add_attempt(_attempt(run_1=Outcome.HUNG))


def test_a_new_folder_is_for_planning_and_no_study_yet(tmp_path, cell_of) -> None:
    root = tmp_path / "runs" / "demo"
    study = Study.for_planning(root)
    with pytest.raises(UsageError) as error:
        Study.existing(root)
    assert str(error.value) == (f"{root} is not a study: it has no plan-0001.json; name a folder under runs/")
    study.add_plan(_plan(cell_of()))
    assert Study.existing(root).name == Study.for_planning(root).name == "demo"


def test_a_folder_with_other_things_is_not_planned_in(tmp_path) -> None:
    (tmp_path / ".lock").touch()
    for name in inner_folders():
        (tmp_path / name).mkdir()
    Study.for_planning(tmp_path)  # what is hidden is not in the way, and short runs are continued
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not empty and holds no study; name a new folder"):
        Study.for_planning(tmp_path)
    with pytest.raises(UsageError, match="is a file; name a folder for the study"):
        Study.for_planning(tmp_path / "thesis.tex")


def test_a_read_only_study_can_be_read_and_says_so_when_written(
    small_disk, read_only_disk, cell_of, record_of
) -> None:
    study = Study(small_disk)
    study.add_plan(_plan(cell_of()))
    study.start_run(cell_of().id, "run-1")
    for rank in range(2):
        study.add_rank_record(record_of(cell_of(), rank))
    (small_disk / "index.jsonl").touch()
    read_only_disk()
    assert [run.outcome for run in study.results()] == [Outcome.OK]
    writes: list[Callable[[], object]] = [
        study.collect,
        study.forget_derived,
        lambda: study.add_plan(_plan(cell_of(gpus=4))),
        lambda: study.start_run(cell_of().id, "run-2"),
    ]
    for write in writes:
        with pytest.raises(StoreError, match="Read-only file system"):
            write()


def test_the_name_of_a_run_is_utc_time_and_chance() -> None:
    names = {new_id() for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", name) for name in names)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", utc_now())
