"""The options of a study, each declared once: for study files, flags, --help, JSON Schema and docs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from harness.plan.launchers import DEFAULT, in_a_line, launcher_help
from harness.plan.options import (
    COMMON,
    Batches,
    Checkpointings,
    Counts,
    Duration,
    Gpus,
    JobTime,
    Limits,
    MemoryFormats,
    Names,
    Number,
    PlanOption,
    Precisions,
    Scalings,
    Switch,
    Switches,
    Text,
    Variables,
    Whole,
    option,
)
from results.cell import Backend
from results.job import OnFailedProof
from results.plan import Pattern
from results.strict_yaml import FileKind, Where

if TYPE_CHECKING:
    Launcher = str
else:
    Launcher = Literal[tuple(launcher_help())]


class StudyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The options that a study file or the flags give; None if they leave one out.

    An option with a heading is the first under it, in --help and in docs/options.md.
    """

    workload: Annotated[
        Names,
        COMMON,
        option(
            "what is trained: gpt-nano,py:MODULE:FUNCTION [=(a ResNet and a GPT for the device)]",
            heading="What is run",
        ),
    ] = None
    gpus: Annotated[Gpus, COMMON, option("workers: 1..256 (doubling), 8..64:8 (steps), 1,2")] = None
    strategy: Annotated[
        Names, COMMON, option("how a step is distributed: single,ddp:bucket_mb=50 [=single,ddp]")
    ] = None
    batch_size: Annotated[
        Batches,
        COMMON,
        option(
            "samples of a replica in one update; auto finds the largest that fits [=(the workload's)]", ge=1
        ),
    ] = None
    global_batch_size: Annotated[
        Counts, option("samples of all replicas in one update; kept under strong scaling", ge=1)
    ] = None
    scaling: Annotated[
        Scalings, COMMON, option("weak keeps the batch per replica, strong the global batch [=weak]")
    ] = None
    seq: Annotated[
        Counts, option("tokens of a sample, for workloads that take seq= [=(the workload's)]", ge=1)
    ] = None
    baseline: Annotated[
        Switch,
        option("plan single on 1 for strategies that need more, as their baseline [=(true in a new study)]"),
    ] = None
    dataset: Annotated[Names, COMMON, option("synthetic, digits, text[:PATH] or own [=synthetic]")] = None
    precision: Annotated[Precisions, COMMON, option("arithmetic; fp32 means no TF32 [=fp32]")] = None
    accumulation: Annotated[Counts, option("micro-batches added up before one update [=1]", ge=1)] = None
    optimizer: Annotated[Names, option("such as sgd:lr=0.1 or adamw [=(the workload's)]")] = None
    clip_norm: Annotated[Limits, option("global gradient norm to clip at [=none]", gt=0)] = None
    activation_checkpointing: Annotated[
        Checkpointings, option("recompute activations in backward: all, none, or selective [=none]")
    ] = None
    selective_checkpointing: Annotated[
        Switch,
        option(
            "the same as --activation-checkpointing selective: not matrix products and attention [=false]"
        ),
    ] = None
    compile: Annotated[Switches, option("compile the model with torch.compile [=false]")] = None
    memory_format: Annotated[MemoryFormats, option("layout of images in memory [=contiguous]")] = None
    seed: Annotated[Counts, option("seed of parameters, data and order [=0]", ge=0, le=2**32 - 1)] = None
    env: Annotated[
        Variables,
        option(
            "environment variable of the ranks, such as NCCL_ALGO=Ring; the same name again gives a further "
            "value"
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        COMMON,
        option("where it runs [=auto]", heading="Where it runs"),
    ] = None
    gpus_per_node: Annotated[Whole, COMMON, option("devices of one node [=(all on one)]", ge=1)] = None
    node_size: Annotated[Whole, option("ranks of one virtual node [=(all; 1 under a link)]", ge=1)] = None
    memory_limit_mb: Annotated[
        Whole,
        option("MiB that each rank may take beyond the idle worker: a smaller device than there is", ge=1),
    ] = None
    keep_unfit: Annotated[
        Switch, option("measure also cells that certainly need more memory than a GPU has [=false]")
    ] = None
    isolation: Annotated[
        Literal["launch", "cell", "fork"] | None,
        option(
            "cells of a placement share one launch, each has its own, or on CPU each run is forked [=launch]"
        ),
    ] = None
    oversubscribe: Annotated[
        Switch, option("run more workers than there are devices, as emulated [=false]")
    ] = None
    require: Annotated[
        Literal["all"] | None, option("exit with 1 if this machine cannot hold a point of the matrix")
    ] = None
    repeats: Annotated[
        Whole, COMMON, option("runs of each cell [=3]", ge=1, le=1000, heading="How long it runs")
    ] = None
    until: Annotated[
        Text,
        COMMON,
        option("grow from small sizes, by rounds, until the size to buy is certain, or has odds such as 0.9"),
    ] = None
    budget: Annotated[
        Duration, COMMON, option("time that a run measures for, its quads included: 20s, 2m [=20s]", ge=0)
    ] = None
    target: Annotated[
        Number,
        option("relative half-width of the interval at which a run stops measuring [=0.02]", ge=0, le=1),
    ] = None
    warmup_steps: Annotated[
        Whole,
        option(
            "most steps of warm-up, which ends sooner when the step time is steady; on a GPU it lasts 10 to "
            "40 s in the first run of a launch, 4 to 40 s in later ones, until its clock is flat too, and "
            "this option says only whether there is one: 0 for none [=40]",
            ge=0,
            le=100_000,
        ),
    ] = None
    block_steps: Annotated[
        Whole,
        option(
            "steps between two barriers; on a GPU, after a warm-up, half a second at least [=5]",
            ge=1,
            le=100_000,
        ),
    ] = None
    quads: Annotated[
        Whole,
        option(
            "most on, off, off, on quads that measure exposed communication; 0 for none [=5]", ge=0, le=1000
        ),
    ] = None
    proof: Annotated[
        OnFailedProof | None,
        option("a run whose proof fails ends (strict), or measures on as not proven (report) [=strict]"),
    ] = None
    max_time: Annotated[
        Duration, COMMON, option("stop after this, the run in flight is lost: 30m, 2h", gt=0)
    ] = None
    hang_after: Annotated[
        Duration, option("time without progress after which a launch is ended as hung [=15m]", ge=10)
    ] = None
    retries: Annotated[
        Whole,
        option("times a launch is tried again when the cluster failed, not the program [=2]", ge=0, le=100),
    ] = None
    rerun: Annotated[Literal["failed"] | None, option("run again what failed for good")] = None
    prune: Annotated[Switch, option("leave out cells whose smaller batch ran out of memory [=true]")] = None
    compression: Annotated[
        Names, COMMON, option("of gradients: none,bf16,topk:0.01 [=none]", heading="Exchange")
    ] = None
    collective: Annotated[Names, option("how gradients are summed: default,ring,hierarchical [=default]")] = (
        None
    )
    backend: Annotated[Backend | None, option("what moves gradients [=(gloo on CPU, nccl on GPUs)]")] = None
    link: Annotated[
        Names, option("network between virtual nodes of CPU ranks: none,100mbit,2.5gbit [=none]")
    ] = None
    launcher: Annotated[
        Launcher | None, COMMON, option(f"{in_a_line(launcher_help())} [={DEFAULT}]", heading="Cluster")
    ] = None
    site: Annotated[Text, COMMON, option("YAML profile of the cluster (docs/clusters.md)")] = None
    partition: Annotated[Text, option("Slurm partition [=(the profile's)]")] = None
    account: Annotated[Text, option("Slurm account [=(the profile's)]")] = None
    qos: Annotated[Text, option("Slurm quality of service [=(the profile's)]")] = None
    cpus_per_gpu: Annotated[Whole, option("CPUs of each worker [=(the profile's)]", ge=1)] = None
    time: Annotated[JobTime, option("time limit of every job: 30m, 2h [=(estimated)]", gt=0)] = None
    jobs_per_cell: Annotated[
        Switch, option("a job for each cell, not one for each number of workers [=false]")
    ] = None
    feed: Annotated[
        Literal["once", "wait", "depend"] | None,
        option(
            "where the cluster takes no more jobs: stop, wait for room, or have a job submit the rest [=once]"
        ),
    ] = None
    max_gpu_hours: Annotated[Number, option("submit nothing if the jobs may take more than this", gt=0)] = (
        None
    )
    report_job: Annotated[Switch, option("have a last job write the report [=false]")] = None
    scripts: Annotated[
        Switch, option("with --dry-run, print the script of every job, not only the first [=false]")
    ] = None
    apply: Annotated[Switch, option("hand Kubernetes manifests to kubectl, not only to stdout [=false]")] = (
        None
    )
    kind: Annotated[
        Literal["job", "statefulset"] | None,
        option("job makes an Indexed Job on Kubernetes; statefulset is refused [=job]"),
    ] = None
    name: Annotated[
        Text, COMMON, option("name, and folder under runs/ [=(by its axes)]", heading="Output")
    ] = None
    out: Annotated[Text, option("folder of the study [=(runs/NAME)]")] = None
    trace: Annotated[
        Counts, option("ranks that keep the profiler's trace of 3 steps after each run: 0,3", ge=0)
    ] = None
    tensorboard: Annotated[Switch, option("write each rank's loss and step times while it runs [=false]")] = (
        None
    )
    include: Annotated[
        list[Pattern] | None,
        option("more points; each names at least workload, strategy, gpus and batch_size"),
    ] = None
    exclude: Annotated[list[Pattern] | None, option("points of the matrix that are not run")] = None


OPTIONS = tuple(
    PlanOption(name=field.name, type=field.type)
    for field in msgspec.structs.fields(StudyFile)
    if field.name not in ("include", "exclude")
)
"""The options that are flags as well, those under one heading together."""
SETTINGS = (
    *("dataset", "precision", "accumulation", "optimizer", "clip_norm", "activation_checkpointing"),
    *("compile", "memory_format", "seed", "env"),
)
"""Options of which several values make several settings: a plan for each combination of them."""
BY_NAME = {known.name: known for known in OPTIONS}


def by_heading() -> dict[str, list[PlanOption]]:
    """The options under each heading, in the order of their declaration."""
    found: dict[str, list[PlanOption]] = {}
    heading = ""
    for known in OPTIONS:
        heading = known.heading or heading
        found.setdefault(heading, []).append(known)
    return found


def combinations(options: StudyFile) -> Iterator[StudyFile]:
    """The options with one value of each setting, in every combination; the last setting changes first."""
    given = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    each = [BY_NAME[name].kind.items(value, BY_NAME[name].flag) for name, value in given.items()]
    for values in product(*each):
        one = dict(zip(given, values, strict=True))
        if "env" in one:
            one["env"] = list(one["env"])
        yield msgspec.structs.replace(options, **one)


def merge(file: StudyFile, flags: StudyFile) -> StudyFile:
    """The options of both; where both give one, the flag wins."""
    given = {key: value for key, value in msgspec.structs.asdict(flags).items() if value is not None}
    return msgspec.structs.replace(file, **given)


def check_values(options: StudyFile, where: Where) -> None:
    """Check every given value against its rule. Raises UsageError, naming the key as `where` does."""
    for known in OPTIONS:
        value = getattr(options, known.name)
        if value is not None:
            known.check(value, where(known.name))


STUDY_FILE = FileKind(
    type=StudyFile,
    name="study file",
    example="gpus: 1..8",
    advice="check the name, or give only flags",
    check=check_values,
)
