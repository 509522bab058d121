"""Old studies: which of them nothing needs any more, and their removal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.gate import baseline_paths
from results import schemas
from results.errors import StudyBusyError, UsageError
from results.history import night_paths
from results.job_store import JobStore
from results.lock import study_lock
from results.store import Study

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What baselines and nights were made from."""

    runs: frozenset[str]
    """Ids of runs: a study that has one is named, whatever its folder is called by now."""
    studies: frozenset[str]
    """Folders' names in files that state no run."""

    def has(self, study: Study) -> bool:
        runs = {path.name for path in study.root.glob("cells/*/*/")}
        return study.name in self.studies or not self.runs.isdisjoint(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCandidate:
    """One study of a folder."""

    study: Study
    age_s: float
    """Since a launch or a plan was last written."""
    size_bytes: int
    kept: str | None
    """Why it stays; None: it may go."""


def candidates(folder: Path, *, keep_s: float, named: Named) -> list[PruneCandidate]:
    """The studies in `folder`, oldest first. Raises UsageError if there is none."""
    studies = [Study(path) for path in sorted(folder.glob("*")) if Study(path).plan_paths()]
    if not studies:
        raise UsageError(f"{folder} holds no study; name the folder of your studies, such as runs/")
    now = time.time()
    found = [_candidate(study, now, keep_s, named) for study in studies]
    return sorted(found, key=lambda one: one.age_s, reverse=True)


def named_studies(baselines: Path, history: Path) -> Named:
    """The runs and studies that baselines and nights were made from.

    Raises SchemaError for a damaged file: what it names could be removed.
    """
    kept = [schemas.BASELINE.read(path) for path in (*baseline_paths(baselines), *night_paths(history))]
    runs = {run for one in kept for subject in one.subjects for run in subject.run_ids}
    silent = [one for one in kept if not any(subject.run_ids for subject in one.subjects)]
    studies = {one.study for one in silent if one.study is not None}
    return Named(runs=frozenset(runs), studies=frozenset(studies))


def remove(study: Study) -> None:
    """Remove a study. It goes under another name first: what is left of an interrupted removal is no study.

    Raises StudyBusyError if another process works on it.
    """
    with study_lock(study.root):
        gone = study.root.with_name(f".removed-{study.root.name}")
        study.root.rename(gone)
    shutil.rmtree(gone)


def _candidate(study: Study, now: float, keep_s: float, named: Named) -> PruneCandidate:
    age_s = now - max(path.stat().st_mtime for path in (*study.plan_paths(), *study.root.glob("launches/*")))
    size = sum(path.stat().st_size for path in study.root.rglob("*") if path.is_file())
    reasons = _reasons(study, age_s, keep_s, named)
    return PruneCandidate(study=study, age_s=age_s, size_bytes=size, kept=next(reasons, None))


def _reasons(study: Study, age_s: float, keep_s: float, named: Named) -> Iterator[str]:
    if named.has(study):
        yield "a baseline or a night was made from it"
    if age_s < keep_s:
        yield f"written {age_s / DAY_S:.1f} days ago"
    store = JobStore(study.root)
    if any(store.ended(job.job_id) is None for job in store.jobs()):
        yield "a job of it has not ended"
    try:
        with study_lock(study.root):
            pass
    except StudyBusyError:
        yield "another bench works on it"
