"""From the options of a call to requests: defaults filled in, every spec in its canonical form.

A study without a name is named after its requests: readable, and the same for the same call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from harness.plan.options import BATCH_AUTO, read_counts, read_duration_s
from harness.plan.points import workloads_of
from harness.plan.study_file import BY_NAME, StudyFile, check_values, combinations
from results.cell import (
    BASELINE_STRATEGY,
    REFERENCE_STRATEGY,
    SYNTHETIC,
    Checkpointing,
    Device,
    StepPolicy,
    differing_fields,
)
from results.errors import UsageError
from results.features import hook
from results.notation import link_text, read_link
from results.parts import Unknown
from results.plan import Pattern, Point, Request, values_name
from results.store import Study, new_id
from strategies.auto import Auto
from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
from workloads.catalog import WORKLOADS, default_workloads, facts
from workloads.datasets.facts import DATASETS

_AXES = (*Point.__struct_fields__, "global_batch_size")
_NEEDED = ("workload", "strategy", "gpus", "batch_size")
_COPIED_OPTIONS = (
    *("repeats", "precision", "accumulation", "memory_limit_mb", "compile", "memory_format", "seed"),
    *("gpus_per_node", "node_size"),
)
"""Options that are copied to the request: it has them under the same name, with the same default."""
_CANONICAL: Mapping[str, Callable[[str], str]] = {
    "workload": lambda text: WORKLOADS.parse(text).text,
    "strategy": lambda text: STRATEGIES.parse(text).text,
    "compression": lambda text: COMPRESSIONS.parse(text).text,
    "collective": lambda text: COLLECTIVES.parse(text).text,
    "link": lambda text: link_text(read_link(text)),
}
"""The canonical form of a text of an axis. Raises SpecError, or UsageError."""


def make_requests(options: StudyFile, *, machine_has_cuda: bool, source_folder: Path) -> tuple[Request, ...]:
    """Make a request for each setting that `options` name: every combination of the values of `SETTINGS`.

    Options that are left out get their defaults. `source_folder` is the folder of the study file, or of the
    call. Raises UsageError, naming the flag, the value and the rule, and SpecError and GpuCountsError, which
    are UsageErrors.
    """
    check_values(options, lambda name: BY_NAME[name].flag)
    if (read := hook("read")) is not None:
        options = read(options, source_folder)
    made = (_request(one, machine_has_cuda, source_folder) for one in combinations(options))
    return tuple(dict.fromkeys(made))


def _request(options: StudyFile, machine_has_cuda: bool, source_folder: Path) -> Request:
    """Make the request of one setting."""
    device = _device(options, machine_has_cuda)
    request = Request(
        **_axes(options, device),
        dataset=DATASETS.parse(options.dataset or SYNTHETIC).text,  # type: ignore[arg-type]
        device=device,
        backend=options.backend or ("nccl" if device == "cuda" else "gloo"),
        activation_checkpointing=_checkpointing(options),
        optimizer=OPTIMIZERS.parse(str(options.optimizer)).text if options.optimizer else None,
        steps=_steps(options),
        env=tuple(options.env or ()),
        # A float whatever was given: 1 and 1.0 are the same work and must have the same id.
        clip_norm=None if options.clip_norm is None else float(cast(float, options.clip_norm)),
        include=_patterns("include", options.include),
        exclude=_patterns("exclude", options.exclude),
        source_folder=str(source_folder.absolute()),
        **_given(options, _COPIED_OPTIONS),
    )
    _require_fit(request)
    _check_nodes(request)
    if request.batches is not None:
        _check_batch_auto(request)
    # A plan names no path that it does not need.
    return request if _reads_files(request) else msgspec.structs.replace(request, source_folder=None)


def _device(options: StudyFile, machine_has_cuda: bool) -> Device:
    device: Device = "cuda" if machine_has_cuda else "cpu"
    if options.device in ("cpu", "cuda"):
        device = options.device
    if options.backend == "nccl" and device == "cpu":
        raise UsageError("--backend nccl needs --device cuda; use gloo on CPU")
    return device


def _given(options: StudyFile, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _axes(options: StudyFile, device: Device) -> dict[str, Any]:
    """The fields of the request that say which points there are, each spec in its canonical form."""
    if options.gpus is None:
        raise UsageError(
            "--gpus is missing: how many workers? such as --gpus 1..8, or gpus: 1..8 in a study file"
        )
    axes: dict[str, Any] = {
        "workload": default_workloads(device),
        "strategy": (BASELINE_STRATEGY, REFERENCE_STRATEGY),
    }
    for name, value in _given(options, _AXES).items():
        axes[name] = tuple(BY_NAME[name].kind.items(value, BY_NAME[name].flag))
    for name in filter(axes.__contains__, _CANONICAL):
        axes[name] = tuple(dict.fromkeys(map(_CANONICAL[name], axes[name])))
    if options.seq is not None:
        axes["workload"] = _of_lengths(axes["workload"], read_counts(options.seq, "--seq"))
    fields = {values_name(name): values for name, values in axes.items()}
    if fields.get("batch_sizes") == (BATCH_AUTO,):
        fields |= {"batch_sizes": (), "batches": ()}
    return fields


def _of_lengths(workloads: tuple[str, ...], lengths: tuple[int, ...]) -> tuple[str, ...]:
    """Return each workload that takes `seq=` with each length, and the others as they are.

    Raises UsageError if none takes it, and SpecError for a text that gives a length itself.
    """
    if not any("seq" in WORKLOADS.parse(text).options for text in workloads):
        raise UsageError(f"--seq gives workloads their length, and {', '.join(workloads)} take no seq=")
    found = [
        WORKLOADS.parse(f"{text}:seq={length}").text if "seq" in WORKLOADS.parse(text).options else text
        for text in workloads
        for length in lengths
    ]
    return tuple(dict.fromkeys(found))


def _reads_files(request: Request) -> bool:
    """Whether a workload or the data set is in the user's files."""
    if DATASETS.facts(request.dataset).file is not None:
        return True
    return any(facts(WORKLOADS.parse(text)).hashed_by is not None for text in workloads_of(request))


def _check_batch_auto(request: Request) -> None:
    """Refuse requests under which the largest batch that fits is not defined."""
    if "strong" in request.scalings:
        raise UsageError(
            "--batch-size auto finds the batch of a replica, and strong scaling keeps a global batch: give "
            "--global-batch-size, or leave --scaling strong out"
        )
    if Auto.name in request.every_strategy:
        raise UsageError(
            "--batch-size auto and --strategy auto depend on each other: name strategies, or a batch size"
        )
    if request.device == "cpu" and request.memory_limit_mb is None:
        raise UsageError(
            "--batch-size auto on CPU needs the memory of a rank, since ranks share the host's: give "
            "--memory-limit-mb, such as --memory-limit-mb 2048"
        )


def _check_nodes(request: Request) -> None:
    """Refuse virtual nodes that contradict the real ones."""
    per_node, size = request.gpus_per_node, request.node_size
    if per_node is None:
        return
    if request.has_links:
        raise UsageError(
            f"--gpus-per-node {per_node} describes real hosts, but --link connects virtual nodes of one "
            f"host: leave out --gpus-per-node, and set the ranks of a virtual node with --node-size"
        )
    if size is not None and per_node % size:
        raise UsageError(
            f"--node-size {size} does not divide --gpus-per-node {per_node}: a virtual node is a part of a "
            f"real one"
        )


def _checkpointing(options: StudyFile) -> Checkpointing:
    if options.selective_checkpointing:
        if options.activation_checkpointing not in (None, "selective"):
            raise UsageError(
                "--selective-checkpointing is a kind of --activation-checkpointing: give only one of the two "
                "options; --activation-checkpointing true,selective measures both kinds"
            )
        return "selective"
    return cast("Checkpointing", options.activation_checkpointing or False)


def _steps(options: StudyFile) -> StepPolicy:
    given = {name: getattr(options, name) for name in ("block_steps", "quads")}
    if options.warmup_steps is not None:
        given["warmup_max_steps"] = options.warmup_steps
    if options.target is not None:
        given["target"] = float(options.target)
    if options.budget is not None:
        given["budget_s"] = read_duration_s(options.budget, "--budget")
    return StepPolicy(**{name: value for name, value in given.items() if value is not None})


def _patterns(option: str, given: list[Pattern] | None) -> tuple[Pattern, ...]:
    """Check the patterns of `include` or `exclude`, and write their specs in canonical form."""
    made = []
    for at, pattern in enumerate(given or ()):
        missing = [axis for axis in _NEEDED if axis not in pattern.axes]
        if option == "include" and missing:
            raise UsageError(
                f"include[{at}] names no {missing[0]}; a point has workload, strategy, gpus and batch_size"
            )
        if not pattern.axes:
            raise UsageError(
                f"exclude[{at}] is empty, and would exclude everything; pass a value, such as gpus: 8, or "
                f"omit it"
            )
        specs = {axis: of(pattern.axes[axis]) for axis, of in _CANONICAL.items() if axis in pattern.axes}
        made.append(msgspec.structs.replace(pattern, **specs))
    return tuple(made)


def _require_fit(request: Request) -> None:
    """Raise UsageError if no workload takes the data set. If some do or may, the others become skips."""
    name = DATASETS.parse(request.dataset).name
    takes = {workload: facts(WORKLOADS.parse(workload)).datasets for workload in workloads_of(request)}
    refusing = {
        workload: names
        for workload, names in takes.items()
        if not isinstance(names, Unknown) and name not in names
    }
    if len(refusing) == len(takes):
        what = "; ".join(f"{workload} takes {', '.join(names)}" for workload, names in refusing.items())
        raise UsageError(f"--dataset {name} fits none of the workloads: {what}")


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
