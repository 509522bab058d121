"""The folder of a study, and the names of its files. Files of jobs: `job_store`; logs: `launch`."""

from __future__ import annotations

import gc
import os
import re
import secrets
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from results import files, schemas
from results.cell import Cell
from results.derivation.run_result import derive
from results.errors import NewerSchemaError, SchemaError, StoreError, UsageError
from results.features import MEASURED, inner_folders, kind_of_file
from results.launch import Attempt, Launch, Slot
from results.outcome import Outcome
from results.plan import Plan
from results.rebuild import rebuilt_plan
from results.record import RankRecord, StepColumns
from results.review import Review, ReviewEntry
from results.run import RunResult
from results.schema import Schema

T = TypeVar("T")
KEPT = "training"
"""The folder of what the kind of a study keeps of a cell, among the folders of the cell's runs."""
_RANK_NAME = re.compile(r"rank-[0-9]{5}\.json")


def utc_now() -> str:
    """The time of day as ISO 8601 text, in UTC, to the millisecond."""
    return utc_text(datetime.now(UTC))


def utc_text(moment: datetime) -> str:
    """A moment in the format of `utc_now`; one without a time zone is in UTC."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_id() -> str:
    """A name for a run or a launch that sorts by time and is never used twice."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


class Study:
    """Reads and writes the files of one study's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def name(self) -> str:
        return self.root.resolve().name

    @classmethod
    def existing(cls, root: Path) -> Study:
        """The study at `root`. Raises UsageError if the folder does not hold one."""
        study = cls(root)
        if not study.is_there:
            raise UsageError(f"{root} is not a study: it has no plan-0001.json; name a folder under runs/")
        return study

    @classmethod
    def for_planning(cls, root: Path) -> Study:
        """The study at `root`, which may not exist yet. Raises UsageError if something else is there."""
        if root.exists() and not root.is_dir():
            raise UsageError(f"--out {root} is a file; name a folder for the study")
        study = cls(root)
        own = {path.name for path in root.iterdir() if path.name[0] != "."} if root.is_dir() else set()
        if own - inner_folders() and not study.is_there:
            raise UsageError(f"--out {root} is not empty and holds no study; name a new folder")
        return study

    # Plans

    @property
    def is_there(self) -> bool:
        """Whether the folder holds a study: a plan, cells whose plan was lost, or what may come before
        a plan: the record of a kind, or a job."""
        found = ("cells/*/", "jobs/*/job.json")
        return (
            bool(self.plan_paths() or any(path for name in found for path in self.root.glob(name)))
            or kind_of_file(self.root) != MEASURED
        )

    def plan_paths(self) -> list[Path]:
        return sorted(self.root.glob("plan-[0-9][0-9][0-9][0-9].json"))

    def plans(self) -> list[Plan]:
        """The plans that can be read, oldest first."""
        return list(self.numbered_plans().values())

    def numbered_plans(self) -> dict[int, Plan]:
        """The plans that can be read, by their numbers from 1."""
        found = {_number(path): _readable(schemas.PLAN, path) for path in self.plan_paths()}
        return {number: plan for number, plan in found.items() if plan is not None}

    def plan(self, number: int) -> Plan:
        """One plan. Raises SchemaError if it is damaged, and StoreError if it is not there."""
        return schemas.PLAN.read(self.root / f"plan-{number:04d}.json")

    @property
    def next_plan(self) -> int:
        """The number of the next plan. It does not reuse the numbers of damaged or lost plans before it."""
        return max(map(_number, self.plan_paths()), default=0) + 1

    def damaged_plans(self) -> list[str]:
        """Why plans cannot be read, in words that name each file."""
        damaged = []
        for path in self.plan_paths():
            try:
                schemas.PLAN.read(path)
            except NewerSchemaError:
                raise
            except SchemaError as error:
                damaged.append(str(error))
        return damaged

    def told_plans(self) -> list[Plan]:
        """The plans that can be read and, for cells that are in none of them, one that is rebuilt.

        Raises SchemaError if the study has no readable plan and no cells.
        """
        plans, cells = self.plans(), self.unplanned_cells()
        if not plans and not cells:
            # Without cells no plan can be rebuilt: this raises the error of the damaged plan.
            return [schemas.PLAN.read(path) for path in self.plan_paths()]
        if not cells:
            return plans
        found = [self.cell(cell) for cell in cells]
        return [*plans, rebuilt_plan(self.name, found, self.launches())]

    def unplanned_cells(self) -> list[str]:
        """Ids of cells that were planned, and are in no plan that can be read."""
        jobs = [job for path in self.root.glob("jobs/*/job.json") if (job := _readable(schemas.JOB, path))]
        # A job's baseline is a separate cell, which is in no plan.
        baselines = {job.baseline for job in jobs} - {cell for job in jobs for cell in job.cells}
        known = {*self._planned_cells(), *baselines}
        return [cell for cell in self.cell_ids() if cell not in known]

    def add_plan(self, plan: Plan) -> Path:
        """Keep a new plan, its cells first, so that a plan that is there has all its cells."""
        for cell in plan.cells:
            self.add_cell(cell)
        path = self.root / f"plan-{self.next_plan:04d}.json"
        files.write_once(path, schemas.PLAN.encode(plan))
        return path

    # Cells and runs

    def cell_folder(self, cell_id: str) -> Path:
        return self.root / "cells" / cell_id

    def run_folder(self, cell_id: str, run_id: str) -> Path:
        return self.cell_folder(cell_id) / run_id

    def start_run(self, cell_id: str, run_id: str) -> None:
        """Make the run's folder, which shows that the run began even if it leaves no file."""
        try:
            self.run_folder(cell_id, run_id).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write in {self.cell_folder(cell_id)}: {error.strerror}") from error

    def begun_slots(self, launch: Launch) -> list[Slot]:
        """The slots of a launch whose run any of its ranks has begun."""
        return [slot for slot in launch.slots if self.run_folder(slot.cell_id, slot.run_id).exists()]

    def add_cell(self, cell: Cell) -> None:
        path = self.cell_folder(cell.id) / "cell.json"
        if not path.exists():
            files.write_once(path, schemas.CELL.encode(cell))

    def cell(self, cell_id: str) -> Cell:
        """A cell by its id, from its file, or from a plan if the file is lost or damaged.

        Raises SchemaError if the file is damaged, or holds another cell, and no plan has the cell.
        """
        try:
            return self._own_cell(cell_id)
        except NewerSchemaError:
            raise
        except StoreError:
            planned = self._planned_cells().get(cell_id)
            if planned is None:
                raise
            return planned

    def _own_cell(self, cell_id: str) -> Cell:
        path = self.cell_folder(cell_id) / "cell.json"
        cell = schemas.CELL.read(path)
        if cell.id != cell_id:
            raise SchemaError(f"{path} holds the cell {cell.id}: it was edited, move it away")
        return cell

    def _planned_cells(self) -> dict[str, Cell]:
        return {cell.id: cell for plan in self.plans() for cell in plan.cells}

    def cell_ids(self) -> list[str]:
        """The cells that are known: by their own files, or by a plan."""
        return sorted(self._cell_folders() - set(self.lost_cells()))

    def lost_cells(self) -> list[str]:
        """The folders of cells that are known neither from their own file nor from a plan."""
        lost = []
        for name in sorted(self._cell_folders() - self._planned_cells().keys()):
            try:
                self._own_cell(name)
            except NewerSchemaError:
                raise
            except StoreError:
                lost.append(name)
        return lost

    def _cell_folders(self) -> set[str]:
        return {path.name for path in self.root.glob("cells/*/")}

    def run_ids(self, cell_id: str) -> list[str]:
        folders = (path.name for path in self.cell_folder(cell_id).iterdir() if path.is_dir())
        return sorted(name for name in folders if name != KEPT)

    def kept_folder(self, cell_id: str) -> Path:
        """The folder of what the study's kind keeps of a cell, over all launches."""
        return self.cell_folder(cell_id) / KEPT

    # Review

    @property
    def review_path(self) -> Path:
        return self.root / "review.jsonl"

    def review(self) -> Review:
        """The entries of its reviewers; a study without them has an empty review."""
        entries, damaged = [], []
        try:
            lines = list(files.read_lines(self.review_path))
        except FileNotFoundError:
            return Review()
        except OSError as error:
            raise StoreError(f"cannot read {self.review_path}: {error.strerror}") from error
        for line in lines:
            try:
                if line.data:
                    entries.append(schemas.REVIEW.decode(line))
            except NewerSchemaError:
                raise
            except SchemaError as error:
                damaged.append(str(error))
        return Review(tuple(entries), tuple(damaged))

    def add_to_review(self, entries: Sequence[ReviewEntry]) -> None:
        files.append(self.review_path, b"".join(map(schemas.REVIEW.encode, entries)))

    # Rank records

    def rank_path(self, cell_id: str, run_id: str, rank: int) -> Path:
        return self.run_folder(cell_id, run_id) / _rank_name(rank)

    def add_rank_record(self, record: RankRecord) -> None:
        path = self.rank_path(record.cell_id, record.run_id, record.rank)
        files.write_once(path, schemas.RANK_RECORD.encode(record))

    def rank_records(self, cell_id: str, run_id: str) -> list[RankRecord]:
        """The records of one run. Raises SchemaError for a file that belongs elsewhere or is damaged."""
        # Names instead of paths: a study may have 100,000 records, and to make a Path of each takes long.
        folder, names = str(self.run_folder(cell_id, run_id)), []
        with suppress(OSError), os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if _RANK_NAME.fullmatch(entry.name))
        records = []
        for name in names:
            path = f"{folder}/{name}"
            record = schemas.RANK_RECORD.read(path)
            place = (record.cell_id, record.run_id, _rank_name(record.rank))
            if place != (cell_id, run_id, name):
                raise SchemaError(
                    f"{path} is of cell {record.cell_id}, run {record.run_id}, rank {record.rank}: "
                    f"it was copied here; move it away"
                )
            records.append(record)
        return records

    def steps(self, run: RunResult) -> dict[int, StepColumns]:
        """Read the single steps of a run's ranks, by rank. Raises SchemaError as `rank_records` does."""
        return {record.rank: record.steps for record in self.rank_records(run.cell_id, run.run_id)}

    def measured(self, run: RunResult) -> dict[int, dict[str, Any]]:
        """Read what the ranks of a run of another package's kind have measured, by rank. Raises SchemaError
        as `rank_records` does."""
        records = self.rank_records(run.cell_id, run.run_id)
        return {record.rank: record.measured for record in records if record.measured is not None}

    # Traces and scalars

    def trace_path(self, cell_id: str, run_id: str, rank: int) -> Path:
        """The file of a rank with the trace of a few steps, JSON packed by gzip."""
        return self.run_folder(cell_id, run_id) / f"trace-{rank:05d}.json.gz"

    def trace_paths(self, cell_id: str, run_id: str) -> list[Path]:
        return sorted(self.run_folder(cell_id, run_id).glob("trace-[0-9][0-9][0-9][0-9][0-9].json.gz"))

    def scalars_folder(self, launch_id: str, rank: int, cell_id: str) -> Path:
        """The folder of a rank with the scalars of one cell; TensorBoard calls each such folder a run."""
        return self.launch_folder(launch_id) / "tensorboard" / f"rank-{rank:05d}" / cell_id

    # Launches

    def launch_folder(self, launch_id: str) -> Path:
        return self.root / "launches" / launch_id

    def add_launch(self, launch: Launch) -> Path:
        path = self.launch_folder(launch.launch_id) / "launch.json"
        files.write_once(path, schemas.LAUNCH.encode(launch))
        return path

    def add_attempt(self, attempt: Attempt) -> None:
        path = self.launch_folder(attempt.launch_id) / "attempt.json"
        files.write_once(path, schemas.ATTEMPT.encode(attempt))

    def has_attempt(self, launch_id: str) -> bool:
        return (self.launch_folder(launch_id) / "attempt.json").exists()

    def launches(self) -> list[Launch]:
        """The launches whose files can be read. Runs of a damaged one are known from their own records."""
        paths = sorted(self.root.glob("launches/*/launch.json"))
        return [launch for path in paths if (launch := _readable(schemas.LAUNCH, path)) is not None]

    def attempts(self) -> dict[str, Attempt]:
        """Attempts by the id of a run that each had to do; a damaged one counts as not there."""
        attempts: dict[str, Attempt] = {}
        for launch in self.launches():
            path = self.launch_folder(launch.launch_id) / "attempt.json"
            attempt = _readable(schemas.ATTEMPT, path) if path.exists() else None
            if attempt is not None:
                attempts |= {slot.run_id: attempt for slot in launch.slots}
        return attempts

    # What is derived

    def collect(self) -> list[RunResult]:
        """Every run of the study; results that are missing or out of date are derived.

        It writes `index.jsonl` again, and removes temporary files of killed processes.
        """
        for folders in ("", "*/*/", "*/*/*/"):
            files.remove_left(self.root.glob(f"{folders}.*.tmp"))
        results = self.results(keep=True)
        lines = [msgspec.json.encode(result) for result in results]
        files.replace(self.root / "index.jsonl", b"".join(line + b"\n" for line in lines), in_study=True)
        return results

    def results(self, *, keep: bool = False, cells: Set[str] | None = None) -> list[RunResult]:
        """Every run of the study, or of these cells. Writes derived results only to `keep` them."""
        attempts = self.attempts()
        wanted = [cell_id for cell_id in self.cell_ids() if cells is None or cell_id in cells]
        with _without_collector():
            return [
                self._result(cell, run_id, attempts.get(run_id), keep=keep)
                for cell in map(self.cell, wanted)
                for run_id in self.run_ids(cell.id)
            ]

    def result(self, cell_id: str, run_id: str, attempt: Attempt | None) -> RunResult:
        """One run, which `attempt` had to do; kept."""
        return self._result(self.cell(cell_id), run_id, attempt, keep=True)

    def _result(self, cell: Cell, run_id: str, attempt: Attempt | None, *, keep: bool) -> RunResult:
        path = self.run_folder(cell.id, run_id) / "run.json"
        try:
            kept = schemas.RUN_RESULT.read(path)
        except StoreError:
            # The result was not derived yet, was derived by another version, or is damaged.
            kept = None
        # A folder that was copied under another name holds another run's result: it counts once.
        own = kept is not None and (kept.cell_id, kept.run_id) == (cell.id, run_id)
        if kept is not None and own and _still_holds(kept, path):
            # A launch records its start-up time when it ends, maybe after this result was derived.
            startup_known = attempt is not None and attempt.startup_ns is not None
            if not (startup_known and kept.outcome is Outcome.OK and kept.startup_ns is None):
                return kept
        try:
            result = derive(cell, run_id, self.rank_records(cell.id, run_id), attempt)
        except NewerSchemaError:
            raise
        except StoreError as error:
            # One damaged file costs one run; the others of the study are unharmed.
            result = derive(cell, run_id, [], attempt)
            result = msgspec.structs.replace(result, outcome=Outcome.UNKNOWN, reason=str(error))
        if keep:
            # Without it the next call only takes longer.
            with suppress(StoreError):
                files.replace(path, schemas.RUN_RESULT.encode(result), in_study=True)
        return result

    def forget_derived(self) -> None:
        """Delete what can be rebuilt, so that the next `collect` derives all of it anew."""
        try:
            for path in (*self.root.glob("cells/*/*/run.json"), self.root / "index.jsonl"):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot delete derived files of {self.root}: {error.strerror}; make the folder writable"
            ) from error


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch the cyclic garbage collector off: it would scan records, which have no cycles, many times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _still_holds(kept: RunResult, path: Path) -> bool:
    """Whether all rank files of a complete run exist, and none was written after its result at `path`."""
    try:
        derived_ns = path.stat().st_mtime_ns
        with os.scandir(path.parent) as entries:
            written = [one.stat().st_mtime_ns for one in entries if one.name.startswith("rank-")]
    except OSError:
        return False
    return kept.ranks_present == kept.ranks_expected == len(written) and max(written, default=0) <= derived_ns


def _number(path: Path) -> int:
    """The number in plan-0012.json."""
    return int(path.stem.removeprefix("plan-"))


def _readable(schema: Schema[T], path: Path) -> T | None:
    """The value of a file; None if it is damaged. Raises NewerSchemaError."""
    try:
        return schema.read(path)
    except NewerSchemaError:
        raise
    except SchemaError:
        return None


def study_names(roots: Sequence[Path]) -> list[str]:
    """Names of studies that are shown together: their folders, with the parents needed to distinguish them.

    Raises UsageError for a folder that is given twice.
    """
    paths = [root.resolve() for root in roots]
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(f"the study {path} is given twice; name each study once")
    return [_name(path, paths) for path in paths]


def _name(path: Path, paths: Sequence[Path]) -> str:
    for length in range(1, len(path.parts)):
        ending = path.parts[-length:]
        if sum(other.parts[-length:] == ending for other in paths) == 1:
            return "/".join(ending)
    return str(path)
