"""One damaged file costs one run: the others of the study stay, and mending it brings the run back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from results import schemas
from results.errors import NewerSchemaError
from results.outcome import Outcome
from results.rebuild import rebuilt_plan
from results.store import Study

Damage = Callable[[Path], object]
QUADS = (b"on_first", b"off_first", b"off_second", b"on_second")
VERSION = f'"schema_version":{schemas.RANK_RECORD.version}'.encode()


@pytest.fixture
def study(tmp_path, cell_of, record_of) -> Study:
    """One cell, three whole runs of two ranks; and another cell, one run."""
    study = Study(tmp_path / "demo")
    for cell, runs in ((cell_of(), 3), (cell_of(workload="resnet50"), 1)):
        study.add_cell(cell)
        for repeat in range(1, runs + 1):
            study.start_run(cell.id, f"run-{repeat}")
            for rank in range(2):
                study.add_rank_record(record_of(cell, rank, run_id=f"run-{repeat}", repeat=repeat))
    return study


@pytest.fixture
def victim(study, cell_of) -> Path:
    """Rank 1 of the second run."""
    return study.rank_path(cell_of().id, "run-2", 1)


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _replaced(old: bytes, new: bytes) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


def _of_another_cell(path: Path) -> None:
    (other,) = (cell for cell in path.parents[2].iterdir() if cell != path.parents[1])
    shutil.copy(other / "run-1" / path.name, path)


def _instead(make: Callable[[Path], object]) -> Damage:
    """Remove the file, and make something else in its place."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


HUGE_QUADS = b",".join(b'"%s_ns":[%d]' % (name, 2**63) for name in QUADS)
UNREADABLE, LARGE, IRREGULAR = "is not a readable rank-record", "is too large to have", "not a regular file"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "cut off": (_cut_off, UNREADABLE),
    "empty": (lambda path: path.write_bytes(b""), UNREADABLE),
    "other bytes": (_replaced(b"node-a", b"node-\xff"), UNREADABLE),
    "unequal columns": (_replaced(b'"forward_ns":[', b'"forward_ns":[1,'), "the columns differ in length"),
    "another kind": (
        lambda path: shutil.copy(path.parents[1] / "cell.json", path),
        "holds a bench/cell, not",
    ),
    "of rank 0": (lambda path: shutil.copy(path.with_name("rank-00000.json"), path), "run run-2, rank 0"),
    "of another run": (
        lambda path: shutil.copy(path.parent.with_name("run-3") / path.name, path),
        "run run-3, rank 1",
    ),
    "of another cell": (_of_another_cell, "run run-1, rank 1"),
    "version 0": (_replaced(VERSION, b'"schema_version":0'), UNREADABLE),
    "a folder": (_instead(Path.mkdir), "is a folder, not a rank-record"),
    "huge FLOPs": (_replaced(b'"flops":3', b'"flops":3' + b"0" * 400), LARGE),
    "huge quads": (_replaced(b'"quads":null', b'"quads":{"steps":1,' + HUGE_QUADS + b"}"), LARGE),
    "no date": (_replaced(b'"started_at":"2026-01-02T', b'"started_at":"2026-02-31T'), "day is out of range"),
    "a fifo": (_instead(os.mkfifo), IRREGULAR),
    "endless": (_instead(lambda path: path.symlink_to("/dev/zero")), IRREGULAR),
    "a link to itself": (_instead(lambda path: path.symlink_to(path)), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize(("damage", "why"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_rank_file_costs_only_its_run_until_it_is_mended(study, victim, damage, why) -> None:
    intact, healthy = victim.read_bytes(), study.results()
    damage(victim)
    results = study.collect()
    assert [run.outcome for run in results] == [Outcome.OK, Outcome.UNKNOWN, Outcome.OK, Outcome.OK]
    assert [results[0], *results[2:]] == [healthy[0], *healthy[2:]]
    lost = results[1]
    assert (lost.run_id, lost.step_ns, lost.samples_per_s) == ("run-2", None, None)
    assert lost.reason.startswith(f"{victim} ")
    assert why in lost.reason
    assert lost.outcome.runs_again
    if victim.is_dir():
        victim.rmdir()
    victim.unlink(missing_ok=True)
    victim.write_bytes(intact)
    assert study.collect() == healthy


def test_kept_results_stand_for_records_until_one_is_written_again(study, victim) -> None:
    found = study.results(keep=True)
    assert [run.outcome for run in found] == [Outcome.OK] * 4
    written = victim.stat().st_mtime_ns
    # A reader of the record would find that it is damaged.
    victim.write_bytes(b"{")
    os.utime(victim, ns=(written, written))
    assert study.results() == found
    os.utime(victim, ns=(2 * written, 2 * written))
    assert [run.outcome for run in study.results()].count(Outcome.UNKNOWN) == 1


def test_records_that_do_not_fit_together_cost_only_their_run(study, victim) -> None:
    victim.write_bytes(victim.read_bytes().replace(b'"blocks_ns":[', b'"blocks_ns":[1,'))
    results = study.collect()
    assert [run.outcome for run in results] == [Outcome.OK, Outcome.UNKNOWN, Outcome.OK, Outcome.OK]
    assert results[1].reason.startswith("the ranks of run run-2 of resnet18-ddp-g002-b8-")


def test_a_rank_beyond_the_cells_own_costs_only_its_run(study, victim, cell_of, record_of) -> None:
    study.add_rank_record(record_of(cell_of(), 2, run_id="run-2"))
    results = study.collect()
    assert [run.outcome for run in results] == [Outcome.OK, Outcome.UNKNOWN, Outcome.OK, Outcome.OK]
    assert "is of rank 2 of 2; the cell has 2 ranks" in (results[1].reason or "")


def test_leftovers_of_a_killed_writer_are_not_read(study, victim) -> None:
    healthy = study.results()
    victim.with_name(".rank-00001.json.123.0badcafe.tmp").write_bytes(b'{"schema":')
    (study.root / ".plan-0001.json.123.0badcafe.tmp").write_bytes(b"{")
    assert study.results() == healthy
    assert study.plan_paths() == []


def test_a_newer_record_is_refused_and_nothing_is_rewritten(study, victim) -> None:
    study.collect()
    study.forget_derived()
    victim.write_bytes(victim.read_bytes().replace(VERSION, b'"schema_version":99'))
    with pytest.raises(NewerSchemaError, match=r"rank-record version 99; .*: update bench to read it"):
        study.collect()
    assert not (study.root / "index.jsonl").exists()
    assert not victim.with_name("run.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"schema":"bench/run-result","schema_version":99}',
        b'{"schema":"bench/cell"}',
    ],
)
def test_a_damaged_result_is_derived_anew(study, victim, text) -> None:
    healthy = study.collect()
    path = victim.with_name("run.json")
    intact, index = path.read_bytes(), (study.root / "index.jsonl").read_bytes()
    path.write_bytes(text)
    assert study.collect() == healthy
    assert path.read_bytes() == intact
    assert (study.root / "index.jsonl").read_bytes() == index


def test_a_run_copied_under_another_name_counts_once(study, victim) -> None:
    # The copy would be an independent sample that never was.
    healthy = study.collect()
    shutil.copytree(victim.parent, victim.parent.with_name("run-4"))
    results = study.collect()
    assert [run.outcome for run in results] == [Outcome.OK] * 3 + [Outcome.UNKNOWN] + [Outcome.OK]
    assert results[3].run_id == "run-4"
    assert "it was copied here; move it away" in (results[3].reason or "")
    assert [*results[:3], results[4]] == healthy


def test_a_result_of_another_run_is_not_believed(study, victim) -> None:
    healthy = study.collect()
    shutil.copy(victim.parent.with_name("run-3") / "run.json", victim.with_name("run.json"))
    assert study.collect() == healthy
    kept = schemas.RUN_RESULT.read(victim.with_name("run.json"))
    assert kept.run_id == "run-2"


@pytest.mark.parametrize("damage", [_cut_off, _replaced(b"node-a", b"node-\xff"), Path.unlink])
def test_a_rank_file_that_is_damaged_after_its_run_was_derived_is_noticed(study, victim, damage) -> None:
    healthy = study.collect()
    damage(victim)
    results = study.results()
    assert [run.outcome is Outcome.OK for run in results] == [True, False, True, True]
    assert [*results[:1], *results[2:]] == [*healthy[:1], *healthy[2:]]


def test_a_result_whose_raw_files_are_gone_ends(study, victim) -> None:
    study.collect()
    for path in victim.parent.glob("rank-*.json"):
        path.unlink()
    lost = study.collect()[1]
    assert (lost.outcome, lost.ranks_present, lost.step_ns) == (Outcome.UNKNOWN, 0, None)


def test_a_derived_file_replaces_a_link_to_elsewhere(study, tmp_path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (study.root / "index.jsonl").symlink_to(tmp_path / "fifo")
    assert len(study.collect()) == 4
    assert (study.root / "index.jsonl").is_file()
    assert not (study.root / "index.jsonl").is_symlink()


def test_a_plan_whose_series_has_a_strange_cell_is_rebuilt(study, cell_of) -> None:
    study.add_plan(rebuilt_plan("demo", [cell_of()], []))
    path = study.root / "plan-0001.json"
    intact = path.read_bytes()
    path.write_bytes(intact.replace(b'"cells":["', b'"cells":["other-'))
    assert study.plans() == []
    assert "a series has the cell other-" in study.damaged_plans()[0]
    assert len(study.told_plans()) == 1
