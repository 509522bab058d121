"""Old studies and paired comparisons: which of them nothing needs any more, and their removal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from harness.features.gate.baselines import baseline_paths
from harness.features.gate.records.baseline import BASELINE
from harness.features.gate.records.history import night_paths
from harness.features.gate.records.paired import CALL
from harness.plan.options import read_duration_s
from harness.terminal.console import Console
from reports.text import size
from results.errors import UsageError
from results.files import DAY_S, is_busy, study_lock
from results.job_store import JobStore
from results.store import KEPT, Study


class Origins(NamedTuple):
    """The runs and studies that baselines and nights were made from."""

    runs: Set[str]
    """Ids of runs: a study that has one is named, whatever its folder is called by now."""
    studies: Set[str]
    """Names of study folders, from files that state no run."""

    def has(self, study: Study) -> bool:
        runs = {path.name for path in study.root.glob("cells/*/*/")}
        return study.name in self.studies or not self.runs.isdisjoint(runs)


class PruneCandidate(NamedTuple):
    """One study of a folder, or one paired comparison with all of its studies."""

    root: Path
    age_s: float
    """Seconds since a launch or a plan was last written."""
    size_bytes: int
    kept: str | None
    """Why it stays; None: it may go."""


def candidates(folder: Path, *, keep_s: float, named: Origins) -> list[PruneCandidate]:
    """The studies and comparisons in `folder`, oldest first. Raises UsageError without a study."""
    found = []
    for root in sorted(folder.glob("*/")):
        paired = (root / CALL).is_file()
        # A link is not followed: its target is elsewhere, and is not removed.
        if root.name.startswith(".") or root.is_symlink() or not (paired or Study(root).plan_paths()):
            continue
        # A paired comparison has the studies of all its pairs.
        places = [*root.glob("[0-9]*/base"), *root.glob("[0-9]*/new")] if paired else [root]
        studies = [Study(path) for path in places if Study(path).plan_paths()]
        age_s = time.time() - _written(root, studies)
        size_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        kept = next(_reasons(root, age_s, keep_s, named, studies), None)
        found.append(PruneCandidate(root, age_s, size_bytes, kept))
    if not found:
        raise UsageError(f"{folder} holds no study; name the folder of your studies, such as runs/")
    return sorted(found, key=lambda one: one.age_s, reverse=True)


def _written(root: Path, studies: Sequence[Study]) -> float:
    """When a launch or a plan of a study or a comparison was last written, as a Unix time in seconds."""
    written = [*root.glob(CALL)]
    for study in studies:
        written += [*study.plan_paths(), *study.root.glob("launches/*")]
    return max(path.stat().st_mtime for path in written)


def named_studies(baselines: Sequence[Path], histories: Sequence[Path]) -> Origins:
    """The runs and studies that the baselines and nights in these folders were made from.

    Raises SchemaError for a damaged file: what it names could be removed.
    """
    paths = chain(*map(baseline_paths, baselines), *map(night_paths, histories))
    runs, studies = set[str](), set[str]()
    for one in map(BASELINE.read, paths):
        own = {run for subject in one.subjects for run in subject.run_ids}
        runs |= own
        if not own and one.study is not None:
            studies.add(one.study)
    return Origins(runs, studies)


def kept_folders(given: Path | None, name: str, runs: Path) -> list[Path]:
    """The folders with baselines or nights: the given folder, else folders of this name here and next to
    `runs`.

    A call from elsewhere thus keeps all studies that are named next to `runs`. Raises UsageError if the given
    folder does not exist.
    """
    if given is None:
        return list(dict.fromkeys(path.resolve() for path in (Path(name), runs.resolve().parent / name)))
    if not given.is_dir():
        raise UsageError(f"--{name} {given} is not a folder: studies that it names could be removed")
    return [given]


def remove(root: Path) -> None:
    """Remove a study or a comparison. It is renamed first: the rest of an interrupted removal
    is not a study.

    Raises StudyBusyError if another process works on it.
    """
    with study_lock(root):
        gone = root.with_name(f".removed-{root.name}")
        root.rename(gone)
    # Another process may finish it at the same time.
    with suppress(FileNotFoundError):
        shutil.rmtree(gone)


def _reasons(
    root: Path, age_s: float, keep_s: float, named: Origins, studies: Sequence[Study]
) -> Iterator[str]:
    if any(named.has(study) for study in studies):
        yield "a baseline or a night was made from it"
    if age_s < keep_s:
        yield f"written {age_s / DAY_S:.1f} days ago"
    for name in sorted(set(_kept_names(studies))):
        yield f"it has {name} of {KEPT}, which no measurement gives again: remove the folder yourself"
    for study in studies:
        store = JobStore(study.root)
        if any(store.ended(job.job_id) is None for job in store.jobs()):
            yield "a job of it has not ended"
    if any(map(is_busy, (root, *(study.root for study in studies)))):
        yield "another bench works on it"


def _kept_names(studies: Sequence[Study]) -> Iterator[str]:
    """The names of what studies keep for the kinds of their cells, such as checkpoints."""
    for study in studies:
        for cell in study.cell_ids():
            for folder in study.kept_folder(cell).glob("*/"):
                if any(folder.glob("[!.]*")):
                    yield folder.name


def prune(folder: Path, keep: str, *, yes: bool, baselines: Path | None, history: Path | None) -> int:
    """Print what of `folder` may go, and remove it if `yes`; returns the exit code."""
    console = Console()
    named = named_studies(
        kept_folders(baselines, "baselines", folder), kept_folders(history, "history", folder)
    )
    keep_s = read_duration_s(keep, "--keep", readings="d")
    for path in folder.glob(".removed-*") if yes else ():
        # An interrupted removal left it, and another process may remove it at the same time.
        shutil.rmtree(path, ignore_errors=True)
    found = candidates(folder, keep_s=keep_s, named=named)
    going = [one for one in found if one.kept is None]
    for one in going if yes else ():
        remove(one.root)
    gone = "removed" if yes else "would be removed"
    rows = [
        (
            one.root.name,
            f"{one.age_s / DAY_S:.1f}",
            size(one.size_bytes),
            f"stays: {one.kept}" if one.kept else gone,
        )
        for one in found
    ]
    console.table(("study", "days", "size", "what"), rows, numeric=[False, True, True, False])
    if not going:
        console.result(f"no study can be removed: each is younger than {keep.strip()}, or is needed")
    if going and not yes:
        freed = size(sum(one.size_bytes for one in going))
        console.result(
            f"{len(going)} of {len(found)} studies would go, older than {keep.strip()}, {freed}: add --yes "
            f"to remove them"
        )
    return 0
