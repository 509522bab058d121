"""From the options of a call to requests: defaults filled in, every spec in its canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from harness.plan.options import BATCH_AUTO, read_duration_s
from harness.plan.study_file import BY_NAME, StudyFile, check_values, combinations
from results.cell import (
    BASELINE_STRATEGY,
    DEFAULT_COLLECTIVE,
    REFERENCE_STRATEGY,
    SYNTHETIC,
    UNCOMPRESSED,
    Checkpointing,
    StepPolicy,
)
from results.errors import UsageError
from results.features import hook
from results.notation import NO_LINK, link_text, read_link
from results.parts import Unknown
from results.plan import Pattern, Request
from strategies.auto import Auto
from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
from workloads.catalog import WORKLOADS, default_workloads, facts
from workloads.datasets.facts import DATASETS

_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "strategy": (BASELINE_STRATEGY, REFERENCE_STRATEGY),
    "compression": (UNCOMPRESSED,),
    "collective": (DEFAULT_COLLECTIVE,),
    "link": (NO_LINK,),
    "scaling": ("weak",),
    "batch_size": (),
    "global_batch_size": (),
}
"""Values of the axes that the options leave out; workloads depend on the device."""
_AXES = ("workload", "gpus", *_DEFAULTS)
_NEEDED = ("workload", "strategy", "gpus", "batch_size")
_COPIED_OPTIONS = (
    *("repeats", "precision", "accumulation", "memory_limit_mb", "compile", "memory_format", "seed"),
    *("gpus_per_node", "node_size"),
)
"""Options that are copied to the request: it has them under the same name, with the same default."""
_CATALOGS = {
    "workload": WORKLOADS,
    "strategy": STRATEGIES,
    "compression": COMPRESSIONS,
    "collective": COLLECTIVES,
}


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
    device = options.device or "auto"
    if device == "auto":
        device = "cuda" if machine_has_cuda else "cpu"
    if options.backend == "nccl" and device == "cpu":
        raise UsageError("--backend nccl needs --device cuda; use gloo on CPU")
    if options.gpus is None:
        raise UsageError(
            "--gpus is missing: how many workers? such as --gpus 1..8, or gpus: 1..8 in a study file"
        )
    given = {name: value for name in _AXES if (value := getattr(options, name)) is not None}
    values = {name: tuple(BY_NAME[name].kind.items(given[name], BY_NAME[name].flag)) for name in given}
    axes = {**_DEFAULTS, "workload": default_workloads(device), **values}
    axes |= {
        name: tuple(dict.fromkeys(catalog.parse(text).text for text in axes[name]))
        for name, catalog in _CATALOGS.items()
    }
    finds_batch = axes["batch_size"] == (BATCH_AUTO,)
    include, exclude = _patterns("include", options.include), _patterns("exclude", options.exclude)
    dataset = DATASETS.parse(options.dataset or SYNTHETIC).text  # type: ignore[arg-type]
    named = [*axes["workload"], *(pattern.workload for pattern in include if pattern.workload is not None)]
    _require_fit(dataset, named)
    reads_files = DATASETS.facts(dataset).file is not None
    known = [facts(WORKLOADS.parse(text)) for text in named]
    reads_files |= any(each.hashed_by is not None for each in known)
    others = {name: value for name in _COPIED_OPTIONS if (value := getattr(options, name)) is not None}
    request = Request(
        workloads=axes["workload"],
        gpus=axes["gpus"],
        strategies=axes["strategy"],
        compressions=axes["compression"],
        collectives=axes["collective"],
        links=tuple(dict.fromkeys(link_text(read_link(text)) for text in axes["link"])),
        batch_sizes=() if finds_batch else axes["batch_size"],
        batches=() if finds_batch else None,
        global_batch_sizes=axes["global_batch_size"],
        scalings=axes["scaling"],
        dataset=dataset,
        device=device,
        backend=options.backend or ("nccl" if device == "cuda" else "gloo"),
        activation_checkpointing=_checkpointing(options),
        optimizer=OPTIMIZERS.parse(str(options.optimizer)).text if options.optimizer else None,
        steps=_steps(options),
        env=tuple(options.env or ()),
        # A float whatever was given: 1 and 1.0 are the same work and must have the same id.
        clip_norm=None if options.clip_norm is None else float(cast(float, options.clip_norm)),
        include=include,
        exclude=exclude,
        # A plan names no path that it does not need.
        source_folder=str(source_folder.absolute()) if reads_files else None,
        **others,
    )
    _check_nodes(request)
    if finds_batch:
        _check_batch_auto(request)
    return request


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
        fields = {key: value for key, value in msgspec.structs.asdict(pattern).items() if value is not None}
        missing = [key for key in _NEEDED if key not in fields]
        if option == "include" and missing:
            raise UsageError(
                f"include[{at}] names no {missing[0]}; a point has workload, strategy, gpus and batch_size"
            )
        if not fields:
            raise UsageError(
                f"exclude[{at}] is empty, and would exclude everything; pass a value, such as gpus: 8, or "
                f"omit it"
            )
        specs = {key: catalog.parse(fields[key]).text for key, catalog in _CATALOGS.items() if key in fields}
        if "link" in fields:
            specs["link"] = link_text(read_link(fields["link"]))
        made.append(msgspec.structs.replace(pattern, **specs))
    return tuple(made)


def _require_fit(dataset: str, workloads: Sequence[str]) -> None:
    """Raise UsageError if no workload takes the data set. If some do or may, the others become skips."""
    name = DATASETS.parse(dataset).name
    takes = {workload: facts(WORKLOADS.parse(workload)).datasets for workload in workloads}
    refusing = {
        workload: names
        for workload, names in takes.items()
        if not isinstance(names, Unknown) and name not in names
    }
    if len(refusing) == len(takes):
        what = "; ".join(f"{workload} takes {', '.join(names)}" for workload, names in refusing.items())
        raise UsageError(f"--dataset {name} fits none of the workloads: {what}")
