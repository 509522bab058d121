"""The name of a study that was given none: readable, and the same for the same call."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from harness.plan.study_file import StudyFile
from results.cell import differing_fields
from results.errors import UsageError
from results.plan import Request
from results.store import Study, new_id

_GOOD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_FRESH = re.compile(r"(?P<base>.+)-\d{8}T\d{6}Z-[0-9a-f]{6}")
_NOT_WORK = ("repeats", "source_folder", "gpu_model", "network_gbit_per_s")
"""Fields that do not make another study: more repeats continue the same one, and neither the place of its
files nor a profile's description of the hardware changes the work."""


def study_name(request: Request, *others: Request, name: str | None = None) -> str:
    """The name of the study's folder: `name` if given, else one over the requests.

    Raises UsageError if `name` would not make a plain folder name.
    """
    if name is None:
        return default_name(request, *others)
    if not _GOOD.fullmatch(name):
        raise UsageError(
            f"--name {name!r} is not a plain folder name; write letters, digits and . _ + -, a letter or "
            f"digit first, at most 100; a path is given with --out"
        )
    return name


def fresh_study(options: StudyFile, study_file: Path | None) -> StudyFile:
    """The options of a study that does not exist yet, named `NAME-20260102T030405Z-0123ab`.

    NAME is the name in the options, else the name of the study file. Raises UsageError without either, or
    with `out`.
    """
    if options.out is not None:
        raise UsageError(f"--fresh makes a new folder under runs/: leave out --out {options.out}")
    base = options.name or (plain_name(study_file.stem) if study_file else None)
    if base is None:
        raise UsageError("--fresh needs a name for its studies: give --name, or a study file")
    return msgspec.structs.replace(options, name=f"{base}-{new_id()}")


def fresh_base(name: str) -> str:
    """NAME of `NAME-20260102T030405Z-0123ab`, a name that `fresh_study` gave."""
    match = _FRESH.fullmatch(name)
    assert match is not None, name
    return match["base"]


def fresh_studies(base: str, runs: Path) -> list[Path]:
    """The studies of `bench matrix --fresh` in a folder, oldest first by name; all if `base` is empty.

    Paired comparisons have such names, too, and no plan.
    """
    matches = [(path, _FRESH.fullmatch(path.name)) for path in runs.glob("*") if Study(path).plan_paths()]
    found = [path for path, match in matches if match is not None and base in ("", match["base"])]
    return sorted(found, key=lambda path: path.name[-len("20260102T030405Z-0123ab") :])


def plain_name(stem: str) -> str:
    """The name of a study file's study: its stem, with what a folder name should not hold replaced."""
    return _slug(stem)[:100] or "study"


def default_name(request: Request, *others: Request) -> str:
    """Name such as `gpt-nano+resnet18-32px-g1-2-3fa9c1`: workloads and counts, and 6 hex digits of a hash.

    The requests have workloads and counts in common. The hash is over the fields of all requests that differ
    from their defaults, so that a new field does not rename old calls.
    """
    workloads = "+".join(sorted(_slug(text) for text in request.workloads))[:60].rstrip("+-.")
    first, last = min(request.gpus), max(request.gpus)
    counts = f"g{first}" if first == last else f"g{first}-{last}"
    digest = hashlib.sha256()
    for one in (request, *others):
        given = {key: value for key, value in differing_fields(one).items() if key not in _NOT_WORK}
        digest.update(msgspec.json.encode(given, order="sorted"))
    return f"{workloads}-{counts}-{digest.hexdigest()[:6]}"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")
