"""Reads the two sides of `bench compare` and the figures of `bench baseline`, and keeps baselines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from harness.features.gate.metrics import TIMED, require_margins
from harness.features.gate.records.baseline import (
    BASELINE,
    THRESHOLDS,
    Acceptance,
    Baseline,
    Subject,
    Thresholds,
    exact_text,
    machine_model,
    thresholds_path,
)
from harness.features.gate.reduce import NOT_RUN, read_pytest_benchmark, reduce_study
from harness.features.gate.text import figure_text
from harness.plan.request import fresh_studies
from harness.reporting.studies import read_results, warn_of_lost_runs
from harness.terminal.console import Console
from reports.analysis.pooling import differing
from results import files
from results.errors import UsageError, bench_call, nearest
from results.store import Study, utc_now

FOLDER = Path("baselines")
"""A folder of the repository, so that a change of a baseline is reviewed with the change that needs it."""
LATEST = "@latest"
"""An argument with this suffix names the newest study of `bench matrix --fresh`."""


def read_side(text: str, folder: Path = FOLDER, console: Console | None = None) -> Baseline:
    """Read the figures that an argument names: a study, the folder of a run, a file, or a kept baseline.

    A file is from `bench baseline save` or from pytest-benchmark, whose files in one folder are runs.
    `@latest` is the newest night, `NAME@latest` the newest night of NAME. `console` shows a warning for runs
    that do not count although others of their cell do. Raises UsageError for any other argument.
    """
    path = latest(text) if text.endswith(LATEST) else Path(text)
    kept = folder / f"{text}.json"
    if path.is_dir():
        return _of_folder(path, console, kept)
    if path.is_file():
        content = files.read_given(path)
        if b'"bench/baseline"' in content.data[:200]:
            return BASELINE.decode(content)
        return read_pytest_benchmark(path.stem, [path])
    if kept.is_file():
        return BASELINE.read(kept)
    names = [path.stem for path in baseline_paths(folder)]
    raise UsageError(
        f"{text} names no study, run or file, and no baseline in {folder}/{nearest(text, names)}; name a "
        f"folder under runs/, a file of pytest-benchmark or of bench baseline save, or one of its baselines"
    )


def latest(text: str) -> Path:
    """The newest night that `@latest` or `NAME@latest` means. Raises UsageError if no night matches."""
    found = fresh_studies(text.removesuffix(LATEST), Path("runs"))
    if not found:
        raise UsageError(
            f"{text}: runs/ holds no such night; bench matrix NAME.yaml --fresh makes one of NAME"
        )
    return found[-1]


def _of_folder(path: Path, console: Console | None, kept: Path) -> Baseline:
    """Read the figures in a folder; `kept` is where a baseline of that name would be."""
    if list(path.glob("plan-[0-9]*.json")):
        study = Study(path)
        results = read_results(study)
        if console is not None:
            warn_of_lost_runs(study, results, console)
        return reduce_study(study, results)
    if list(path.glob("rank-[0-9]*.json")):
        study = Study.existing(path.resolve().parents[2])
        runs = [result for result in read_results(study) if result.run_id == path.resolve().name]
        whole = reduce_study(study, runs)
        measured = tuple(subject for subject in whole.subjects if subject.runs or subject.failed != NOT_RUN)
        return msgspec.structs.replace(whole, name=path.resolve().name, subjects=measured)
    if (path / "cell.json").is_file():
        raise UsageError(f"{path} is a cell of a study: name the study, or one of the cell's runs")
    found = sorted(path.glob("*.json"))
    if not found:
        hint = f"; the baseline of that name is {kept}" if kept.is_file() else ""
        raise UsageError(f"{path} is not a study (no plan-0001.json) or a run, and has no JSON file{hint}")
    return read_pytest_benchmark(path.name, found)


def require_figures(side: Baseline) -> None:
    """Refuse a side that nothing can be compared with, because a gate against it would always be green."""
    failed = next((subject.failed for subject in side.subjects if subject.failed is not None), "it is empty")
    if all(subject.failed is not None for subject in side.subjects):
        raise UsageError(f"{side.name} has no cell with a figure ({failed}): name a measurement that ran")


def require_approval(text: str) -> None:
    """Raise UsageError unless an argument names a study with an approval of its present records."""
    study = Study(latest(text) if text.endswith(LATEST) else Path(text))
    if not study.is_there:
        raise UsageError(f"--reviewed needs a study that was approved, and {text} is not a study")
    review = study.review()
    if review.damaged:
        raise UsageError(
            f"{study.root} was approved, if at all, without a damaged entry: {review.damaged[0]}"
        )
    words, stands = review.approval(read_results(study))
    if not stands:
        command = bench_call("review", study.root, "--approve")
        raise UsageError(f"{study.root} is {words or 'not approved'}: read its report, then call {command}")


def warn_of_edits(side: Baseline, console: Console) -> None:
    """Warn if the commit of a kept baseline does not reproduce it."""
    if side.dirty:
        console.warn(
            f"{side.name} was measured with uncommitted changes: commit {side.commit} does not reproduce it"
        )


def warn_of_failures(side: Baseline, console: Console) -> None:
    """Warn of cells for which a baseline has no figure, as they are not compared."""
    for subject in side.subjects:
        if subject.failed is not None:
            console.warn(
                f"{subject.label} has no figure ({subject.failed}): it is not gated; measure it, then bench "
                f"baseline promote"
            )


def baseline_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def save(name: str, side: Baseline, folder: Path = FOLDER) -> Path:
    """Keep a baseline under a new name.

    Raises UsageError if the name is taken or no file name, or where no cell has a figure.
    """
    path = _path(name, folder)
    require_figures(side)
    if path.exists():
        raise UsageError(f"{path} is there already; accept changes by bench baseline promote {name}")
    _write(path, BASELINE.encode(msgspec.structs.replace(side, name=name)))
    return path


def promote(
    name: str, side: Baseline, reason: str, only: Iterable[str], remove: Iterable[str], folder: Path
) -> tuple[Path, tuple[Acceptance, ...]]:
    """Replace the figures of the baseline by the figures of `side`, and record the reason. Returns the
    accepted subjects.

    Only subjects with one of the names `only` are accepted; without names, all are. Subjects of the baseline
    that `side` lacks stay, except those with one of the names `remove`. If one stays, the baseline keeps its
    commit and time, and each acceptance states the commit of `side`.

    Raises UsageError without a reason, or where no subject is meant, or for one without figures.
    """
    path = _path(name, folder)
    if not reason.strip():
        raise UsageError("--reason is empty; say why the change is right, for whoever reads the baseline")
    if not path.is_file():
        raise UsageError(f"there is no baseline {path}; keep one with bench baseline save {name} STUDY")
    kept, chosen = BASELINE.read(path), _chosen(side, set(only))
    before = {subject.key: subject for subject in kept.subjects}
    removed = _removed(kept, side, tuple(remove))
    changes = [(subject, _changes(before, subject)) for subject in chosen.values()]
    changes += [(subject, {"cell": "removed"}) for subject in removed]
    at = utc_now()
    accepted = tuple(
        Acceptance(subject=subject.label, reason=reason, at=at, commit=side.commit, changes=changed)
        for subject, changed in changes
    )
    stays = any(key not in chosen and subject not in removed for key, subject in before.items())
    origin = kept if stays else side
    merged = msgspec.structs.replace(
        kept,
        **{name: getattr(origin, name) for name in ("measured_at", "study", "commit", "dirty")},
        subjects=tuple(subject for subject in (before | chosen).values() if subject not in removed),
        accepted=(*kept.accepted, *accepted),
    )
    _write(path, BASELINE.encode(merged))
    return path, accepted


def _chosen(side: Baseline, named: set[str]) -> dict[str, Subject]:
    """The subjects of `side` with one of the names, by key; without names, all.

    Raises UsageError for a name that none of them has, and for a subject without figures.
    """
    chosen = {s.key: s for s in side.subjects if not named or named & _names(s)}
    if unknown := named.difference(*map(_names, chosen.values())):
        labels = "; ".join(subject.label for subject in side.subjects)
        raise UsageError(f"no cell of {side.name} is called {' or '.join(sorted(unknown))}: {labels}")
    for subject in chosen.values():
        if subject.failed is not None:
            raise UsageError(f"{subject.label} has no figures to accept: {subject.failed}")
    return chosen


_LABEL = re.compile(r"(?P<workload>[^,]+), (?P<exchange>.+), (?P<size>\d+ x \d+)(?:, (?P<settings>.+))?")


def _names(subject: Subject) -> set[str]:
    """The names by which a user may mean a subject: its id, its label, and the parts of its label.

    The parts of a cell's label are the workload, the strategy with its compression and collective, the size
    with its batch, and the settings. The part of a benchmark's label is its function.
    """
    parts = _LABEL.fullmatch(subject.label)
    found = parts.groupdict().values() if parts else (subject.label.rpartition("::")[2],)
    return {subject.key, subject.label, *filter(None, found)}


def _removed(kept: Baseline, side: Baseline, names: Sequence[str]) -> list[Subject]:
    """The baseline's subjects that `side` lacks and that have one of the names.

    Raises UsageError for names that none of them has.
    """
    measured = {subject.key for subject in side.subjects}
    missing = [subject for subject in kept.subjects if subject.key not in measured]
    for name in names:
        if not any(name in _names(subject) for subject in missing):
            labels = "; ".join(subject.label for subject in missing) or "none is missing"
            raise UsageError(f"--remove {name}: {side.name} lacks no cell of {kept.name} called so: {labels}")
    return [subject for subject in missing if _names(subject) & set(names)]


def _changes(before: dict[str, Subject], subject: Subject) -> dict[str, str]:
    """The facts, the counters, and the means of metrics with a margin that differ, before and after."""
    known = before.get(subject.key)
    if known is None:
        return {"cell": "new"}
    texts = dict(differing(known.facts, subject.facts))
    for name in sorted(known.exact.keys() | subject.exact.keys()):
        old, new = (side.exact.get(name, ()) for side in (known, subject))
        if set(old) != set(new):
            texts[name] = (exact_text(old), exact_text(new))
    means = _means(known)
    texts |= {
        name: (means[name], mean) for name, mean in _means(subject).items() if means.get(name, mean) != mean
    }
    return {name: f"{old} to {new}" for name, (old, new) in texts.items()}


def _means(subject: Subject) -> dict[str, str]:
    return {
        name: figure_text(metric, fmean(subject.timed[name]))
        for name, metric in TIMED.items()
        if metric.margin is not None and name in subject.timed
    }


def machine_margins(side: Baseline, folder: Path) -> tuple[dict[str, float], list[Path]]:
    """The margins of the machines that `side` was measured on, and the files that state them.

    Of several machines the widest counts. Raises SchemaError for a damaged file, UsageError for margins that
    would judge nothing.
    """
    names = {name for subject in side.subjects if (name := machine_model(subject.facts)) is not None}
    paths = [path for name in sorted(names) if (path := thresholds_path(name, folder)).is_file()]
    margins: dict[str, float] = {}
    for path in paths:
        stated = THRESHOLDS.read(path).fail_above
        require_margins(stated, str(path))
        for metric, share in stated.items():
            margins[metric] = max(share, margins.get(metric, 0.0))
    return margins, paths


def save_thresholds(thresholds: Thresholds, folder: Path = FOLDER) -> Path:
    """Write the thresholds of a machine; they replace its earlier ones."""
    path = thresholds_path(thresholds.machine, folder)
    _write(path, THRESHOLDS.encode(thresholds))
    return path


def _path(name: str, folder: Path) -> Path:
    if not name or name != Path(name).name or name.startswith("."):
        raise UsageError(f"the name of a baseline is a file name, such as nightly, not {name!r}")
    return folder / f"{name}.json"


def _write(path: Path, encoded: bytes) -> None:
    """Write the file indented, so that a reviewer's diff shows single figures."""
    files.replace(path, msgspec.json.format(encoded) + b"\n")
