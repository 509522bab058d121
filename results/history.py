"""The history of nights: one file a machine and night, never changed; two histories are merged by copying.

::

    history/<machine>/20260102T030405Z.json   a baseline (results/baseline.py), named by when it was measured
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

import msgspec

from results import files, schemas
from results.baseline import Baseline, Subject
from results.errors import SchemaError, UsageError

OF_MACHINE = ("device_name", "cpu_model", "threads")
"""Facts that make another machine. Versions are none: what changed among them is told beside a change."""


def machine(subject: Subject) -> str:
    """A folder's name for the machine that a subject was measured on: `nvidia-h200-0123abcd`."""
    facts = {name: subject.facts[name] for name in OF_MACHINE if name in subject.facts}
    digest = hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:8]
    name = re.sub(r"[^a-z0-9]+", "-", next(iter(facts.values()), "unknown").lower())
    return f"{name[:40].strip('-')}-{digest}"


def add_night(night: Baseline, folder: Path) -> list[Path]:
    """Keep a night, a file for each machine in it. Raises UsageError if it has no figure, or was added."""
    machines: dict[str, list[Subject]] = {}
    for subject in night.subjects:
        if subject.failed is None:
            machines.setdefault(machine(subject), []).append(subject)
    if not machines:
        raise UsageError(f"{night.name} has no cell with a figure: there is nothing to add")
    name = re.sub(r"\.\d+|[-:]", "", night.measured_at)
    paths = {one: folder / one / f"{name}.json" for one in machines}
    runs = {run for subject in night.subjects for run in subject.run_ids}
    known = [path for one in machines for path in _nights_with(runs, folder / one)]
    known += [path for path in paths.values() if path.exists()]
    if known:
        raise UsageError(
            f"{known[0]} is there already: this night was added before; bench matrix --fresh measures another"
        )
    for one, subjects in machines.items():
        kept = msgspec.structs.replace(night, subjects=tuple(subjects))
        files.write_once(paths[one], schemas.BASELINE.encode(kept))
    return list(paths.values())


def read_nights(folder: Path) -> tuple[dict[str, list[Baseline]], list[str]]:
    """The nights of each machine in the order of time, and one sentence for each file that is damaged.

    Raises UsageError where there is no history.
    """
    nights: dict[str, list[Baseline]] = {}
    damaged = []
    for path in night_paths(folder):
        try:
            nights.setdefault(path.parent.name, []).append(schemas.BASELINE.read(path))
        except SchemaError as error:
            damaged.append(str(error))
    if not nights and not damaged:
        raise UsageError(f"{folder}/ holds no night; add one with bench history add STUDY")
    ordered = {one: sorted(found, key=lambda night: night.measured_at) for one, found in nights.items()}
    return ordered, damaged


def _nights_with(runs: Set[str], folder: Path) -> Iterator[Path]:
    """The nights of a machine that one of these runs is in; what is damaged is told where it is read."""
    for path in sorted(folder.glob("*.json")):
        with suppress(SchemaError):
            if any(not runs.isdisjoint(subject.run_ids) for subject in schemas.BASELINE.read(path).subjects):
                yield path


def later_nights(path: Path) -> list[Path]:
    """The nights of the same machine that were measured after this one, by their names."""
    return [other for other in sorted(path.parent.glob("*.json")) if other.name > path.name]


def night_paths(folder: Path) -> list[Path]:
    """Every file of a history."""
    return sorted(folder.glob("*/*.json"))
