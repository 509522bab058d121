"""The history of nights: one file a machine and night, never changed; two histories are merged by copying.

::

    history/<machine>/20260102T030405Z.json   a baseline (baseline.py), named by when it was measured
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path

import msgspec

from harness.features.gate.records.baseline import (
    BASELINE,
    MODEL,
    Baseline,
    Subject,
    file_word,
    machine_model,
)
from results import files
from results.errors import SchemaError, UsageError
from results.grouping import grouped

OF_MACHINE = (*MODEL, "threads")
"""Facts that identify a machine. Versions are not among them: a comparison of nights names changed ones."""


def machine(subject: Subject) -> str:
    """A folder's name for the machine that a subject was measured on: `nvidia-h200-0123abcd`.

    The hexadecimal end identifies the machine; a user may rename what is before it.
    """
    facts = {name: subject.facts[name] for name in OF_MACHINE if name in subject.facts}
    digest = hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:8]
    return f"{file_word(machine_model(subject.facts) or 'unknown', 40)}-{digest}"


def _digest(folder: str) -> str:
    """The end of a folder's name, which identifies the machine."""
    return folder.rpartition("-")[2]


def add_night(night: Baseline, folder: Path) -> list[Path]:
    """Keep a night, a file for each machine in it. Returns the new files.

    Raises UsageError if it has no figure, or was added before.
    """
    machines = grouped((machine(subject), subject) for subject in night.subjects if subject.failed is None)
    if not machines:
        raise UsageError(f"{night.name} has no cell with a figure: there is nothing to add")
    paths = {one: folder / one / _file_name(night) for one in machines}
    known = _added_before(night, machines, paths)
    added = [one for one in machines if one not in known]
    for one in added:
        kept = msgspec.structs.replace(night, subjects=tuple(machines[one]))
        files.write_once(paths[one], BASELINE.encode(kept))
    return [paths[one] for one in added]


def _added_before(
    night: Baseline, machines: Mapping[str, list[Subject]], paths: Mapping[str, Path]
) -> Set[str]:
    """The machines whose file an interrupted call has written. Raises UsageError if the night was added."""
    runs = {run for subject in night.subjects for run in subject.run_ids}
    known = {one: found for one in machines if (found := _same_night(runs, paths[one])) is not None}
    # A call that was ended between two machines has kept the complete night of one of them.
    complete = {one for one in known if _holds(paths[one], machines[one])}
    if len(known) == len(machines) or known.keys() != complete:
        raise UsageError(
            f"{next(iter(known.values()))} is there already: this night was added before; "
            f"bench matrix --fresh measures another"
        )
    return complete


def read_nights(folder: Path) -> tuple[dict[str, list[Baseline]], list[str]]:
    """The nights of each machine in the order of time, and a sentence for each file that is left out because
    it is damaged, or has another folder or name than its night has (a copy).

    Raises UsageError for a folder without nights.
    """
    nights: dict[str, list[Baseline]] = {}
    damaged = []
    for path in night_paths(folder):
        try:
            night = BASELINE.read(path)
        except SchemaError as error:
            damaged.append(str(error))
            continue
        if (why := _misplaced(night, path)) is None:
            nights.setdefault(path.parent.name, []).append(night)
        else:
            damaged.append(why)
    if not nights and not damaged:
        raise UsageError(f"{folder}/ holds no night; add one with bench history add STUDY")
    ordered = {one: sorted(found, key=lambda night: night.measured_at) for one, found in nights.items()}
    return ordered, damaged


def _misplaced(night: Baseline, path: Path) -> str | None:
    """A sentence on a night that belongs to another file than its own; None if it belongs there."""
    machines, name = sorted({machine(subject) for subject in night.subjects}), _file_name(night)
    if [_digest(one) for one in machines] == [_digest(path.parent.name)] and path.name == name:
        return None
    where = ", ".join(f"{one}/{name}" for one in machines) or "no history, as it has no figure"
    return f"{path} is left out: its night belongs to {where}; move it there, or remove a copy"


def _holds(path: Path, subjects: list[Subject]) -> bool:
    """Whether a file is a night with exactly these subjects."""
    with suppress(SchemaError):
        return path.exists() and BASELINE.read(path).subjects == tuple(subjects)
    return False


def _file_name(night: Baseline) -> str:
    """The name of a night's file, its time of measurement: `20260102T030405Z.json`."""
    return f"{re.sub(r'[.][0-9]+|[-:]', '', night.measured_at)}.json"


def _same_night(runs: Set[str], path: Path) -> Path | None:
    """The night of a machine that has one of these runs, or `path` if it exists; None if there is neither.

    Damaged files are ignored: `read_nights` names them.
    """
    for other in sorted(path.parent.glob("*.json")):
        with suppress(SchemaError):
            if any(not runs.isdisjoint(subject.run_ids) for subject in BASELINE.read(other).subjects):
                return other
    return path if path.exists() else None


def later_nights(path: Path) -> list[Path]:
    """The nights of the same machine that were measured after this one, by their names."""
    return [other for other in sorted(path.parent.glob("*.json")) if other.name > path.name]


def night_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.json"))
