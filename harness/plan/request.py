"""From the options of a call to a request: defaults filled in, every spec in its canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from harness.plan.options import Counts, Gpus, Names, read_counts, read_duration_s, read_gpus, read_names
from harness.plan.study_file import BY_NAME, StudyFile, check_values, combinations
from results.cell import (
    BASELINE_STRATEGY,
    DEFAULT_COLLECTIVE,
    REFERENCE_STRATEGY,
    SYNTHETIC,
    UNCOMPRESSED,
    Backend,
    Checkpointing,
    Device,
    StepPolicy,
)
from results.errors import UsageError
from results.link import NO_LINK, link_text, read_link
from results.plan import Pattern, Request, Scaling
from results.spec import Catalog
from results.unknown import Unknown
from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
from workloads.catalog import WORKLOADS, default_workloads, facts
from workloads.datasets.facts import DATASETS

DEFAULT_STRATEGIES = (BASELINE_STRATEGY, REFERENCE_STRATEGY)
_NEEDED = ("workload", "strategy", "gpus", "batch_size")
_AS_THEY_ARE = (
    "repeats",
    "precision",
    "accumulation",
    "memory_limit_mb",
    "compile",
    "memory_format",
    "seed",
    "gpus_per_node",
    "node_size",
)
"""Options that a request holds under the same name and with the same default."""
_CATALOGS = {
    "workload": WORKLOADS,
    "strategy": STRATEGIES,
    "compression": COMPRESSIONS,
    "collective": COLLECTIVES,
}


def make_requests(options: StudyFile, *, machine_has_cuda: bool, source_folder: Path) -> tuple[Request, ...]:
    """A request for each setting that `options` name: one value each of those of `SETTINGS`, in every
    combination. Raises as `make_request` does."""
    check_values(options, lambda name: BY_NAME[name].flag)
    made = (
        make_request(one, machine_has_cuda=machine_has_cuda, source_folder=source_folder)
        for one in combinations(options)
    )
    return tuple(dict.fromkeys(made))


def make_request(options: StudyFile, *, machine_has_cuda: bool, source_folder: Path) -> Request:
    """What `options` ask for, with the defaults of everything they leave out.

    `source_folder` is the folder of the study file, or of the call. Raises UsageError, naming the flag,
    the value and the rule, and SpecError and GpuCountsError, which are UsageErrors.
    """
    check_values(options, lambda name: BY_NAME[name].flag)
    options, *others = combinations(options)
    assert not others, "of several settings make_requests makes several"
    device = _device(options, machine_has_cuda)
    workloads = _canonical(WORKLOADS, options.workload, default_workloads(device))
    include, exclude = _patterns("include", options.include), _patterns("exclude", options.exclude)
    dataset = DATASETS.parse(cast(str, options.dataset or SYNTHETIC)).text
    named = [*workloads, *(pattern.workload for pattern in include if pattern.workload is not None)]
    _require_fit(dataset, named)
    given = {name: getattr(options, name) for name in _AS_THEY_ARE}
    request = Request(
        workloads=workloads,
        gpus=_gpus(options.gpus),
        strategies=_canonical(STRATEGIES, options.strategy, DEFAULT_STRATEGIES),
        compressions=_canonical(COMPRESSIONS, options.compression, (UNCOMPRESSED,)),
        collectives=_canonical(COLLECTIVES, options.collective, (DEFAULT_COLLECTIVE,)),
        links=_links(options.link),
        batch_sizes=_counts(options.batch_size, "batch_size"),
        global_batch_sizes=_counts(options.global_batch_size, "global_batch_size"),
        scalings=_scalings(options.scaling),
        dataset=dataset,
        device=device,
        backend=_backend(options, device),
        activation_checkpointing=_checkpointing(options),
        optimizer=OPTIMIZERS.parse(cast(str, options.optimizer)).text if options.optimizer else None,
        steps=_steps(options),
        # A float whatever was given: 1 and 1.0 are the same work and must have the same id.
        clip_norm=None if options.clip_norm is None else float(cast(float, options.clip_norm)),
        include=include,
        exclude=exclude,
        source_folder=_source_folder(named, dataset, source_folder),
        **{name: value for name, value in given.items() if value is not None},
    )
    _check_nodes(request)
    return request


def _device(options: StudyFile, machine_has_cuda: bool) -> Device:
    if options.device is None or options.device == "auto":
        return "cuda" if machine_has_cuda else "cpu"
    return options.device


def _backend(options: StudyFile, device: Device) -> Backend:
    if options.backend == "nccl" and device == "cpu":
        raise UsageError("--backend nccl moves data between CUDA devices alone; use gloo on CPU")
    return options.backend or ("nccl" if device == "cuda" else "gloo")


def _canonical(catalog: Catalog, given: Names, default: Sequence[str]) -> tuple[str, ...]:
    texts = default if given is None else read_names(given)
    return tuple(dict.fromkeys(catalog.parse(text).text for text in texts))


def _gpus(given: Gpus) -> tuple[int, ...]:
    if given is None:
        raise UsageError(
            "--gpus is missing: how many workers? such as --gpus 1..8, or gpus: 1..8 in a study file"
        )
    return read_gpus(given, "--gpus")


def _counts(given: Counts, name: str) -> tuple[int, ...]:
    return () if given is None else read_counts(given, BY_NAME[name].flag)


def _scalings(given: Names) -> tuple[Scaling, ...]:
    # The option's own check has let weak and strong through and nothing else.
    return ("weak",) if given is None else cast("tuple[Scaling, ...]", read_names(given))


def _links(given: Names) -> tuple[str, ...]:
    texts = (NO_LINK,) if given is None else read_names(given)
    return tuple(dict.fromkeys(link_text(read_link(text)) for text in texts))


def _check_nodes(request: Request) -> None:
    """Refuse virtual nodes that are at odds with the real ones."""
    per_node, size = request.gpus_per_node, request.node_size
    if per_node is None:
        return
    if request.has_links:
        raise UsageError(
            f"--gpus-per-node {per_node} is about real hosts, and a --link is between virtual nodes of one: "
            f"leave it out, and give their ranks with --node-size"
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
                "--selective-checkpointing is a kind of --activation-checkpointing: give one of the two, or "
                "several as settings with --activation-checkpointing true,selective"
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


def _patterns(key: str, given: list[Pattern] | None) -> tuple[Pattern, ...]:
    return tuple(_pattern(pattern, f"{key}[{at}]") for at, pattern in enumerate(given or ()))


def _pattern(pattern: Pattern, where: str) -> Pattern:
    fields = {key: value for key, value in msgspec.structs.asdict(pattern).items() if value is not None}
    missing = [key for key in _NEEDED if key not in fields]
    if where.startswith("include") and missing:
        raise UsageError(
            f"{where} names no {missing[0]}; a point has workload, strategy, gpus and batch_size"
        )
    if not fields:
        raise UsageError(
            f"{where} is empty, and would exclude everything; pass a value, such as gpus: 8, or omit it"
        )
    specs = {key: catalog.parse(fields[key]).text for key, catalog in _CATALOGS.items() if key in fields}
    if "link" in fields:
        specs["link"] = link_text(read_link(fields["link"]))
    return msgspec.structs.replace(pattern, **specs)


def _source_folder(workloads: Sequence[str], dataset: str, folder: Path) -> str | None:
    """`folder` where something is read from it, else None: a plan names no path that it does not need."""
    reads = DATASETS.facts(dataset).file is not None or any(
        facts(WORKLOADS.parse(text)).own_code for text in workloads
    )
    return str(folder.absolute()) if reads else None


def _require_fit(dataset: str, workloads: Sequence[str]) -> None:
    """Raise UsageError if no workload takes the data set; where some do, or may, the others become skips."""
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
