"""The names of all options of a study and the rule each value keeps: the same in YAML and as flags."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.plan.launchers import launcher_names, launchers_help
from results.errors import GpuCountsError, UsageError
from results.gpus import GpuCounts

Kind = Literal["names", "counts", "gpus", "int", "number", "duration", "switch", "word", "text"]
Names = str | list[str]
Counts = int | str | list[int | str]

MOST = 1_000_000_000
"""Whole numbers above this are typing errors, and would not fit every reader of JSON."""
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|m|h|d)?")
_UNIT_S = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOption:
    """One option: `name` is its key in a study file, and with dashes its flag."""

    name: str
    kind: Kind
    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """The value is more than this."""
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        """Whether several values may be given: a list in YAML, a comma text on the command line."""
        return self.kind in ("names", "counts", "gpus")


OPTIONS: tuple[PlanOption, ...] = (
    PlanOption(name="name", kind="text", help="name of the study: its folder under runs/"),
    PlanOption(name="workload", kind="names", help="what is trained: resnet18,gpt-nano,py:MODULE:FUNCTION"),
    PlanOption(
        name="gpus", kind="gpus", help="numbers of workers: 1..256 (doubling), 8..64:8 (steps), 1,2,96"
    ),
    PlanOption(name="strategy", kind="names", help="how a step is distributed: single,ddp:bucket_mb=50"),
    PlanOption(name="compression", kind="names", help="how gradients are compressed: none,bf16,topk:0.01"),
    PlanOption(name="collective", kind="names", help="how gradients are summed: default,ring,hierarchical"),
    PlanOption(
        name="link", kind="names", help="network between virtual nodes of CPU ranks: none,100mbit,2.5gbit"
    ),
    PlanOption(name="batch_size", kind="counts", minimum=1, help="batch per replica: samples of one update"),
    PlanOption(
        name="global_batch_size",
        kind="counts",
        minimum=1,
        help="global batch: samples of one update over all replicas; kept under strong scaling",
    ),
    PlanOption(
        name="scaling",
        kind="names",
        choices=("weak", "strong"),
        help="weak keeps the batch per replica, strong the global batch",
    ),
    PlanOption(name="repeats", kind="int", minimum=1, maximum=1000, help="runs of each cell"),
    PlanOption(name="dataset", kind="text", help="synthetic, digits or text[:PATH]"),
    PlanOption(name="device", kind="word", choices=("auto", "cpu", "cuda"), help="where it runs"),
    PlanOption(name="backend", kind="word", choices=("gloo", "nccl"), help="what moves gradients"),
    PlanOption(
        name="precision",
        kind="word",
        choices=("fp32", "tf32", "bf16", "fp16"),
        help="arithmetic of forward and backward; fp32 means no TF32",
    ),
    PlanOption(name="accumulation", kind="int", minimum=1, help="micro-batches added up before one update"),
    PlanOption(
        name="optimizer", kind="text", help="such as sgd:lr=0.1 or adamw; the workload's own if left out"
    ),
    PlanOption(name="clip_norm", kind="number", above=0, help="global gradient norm to clip at"),
    PlanOption(name="activation_checkpointing", kind="switch", help="recompute activations in backward"),
    PlanOption(
        name="selective_checkpointing",
        kind="switch",
        help="recompute activations in backward, but not matrix products and attention",
    ),
    PlanOption(
        name="memory_limit_mb",
        kind="int",
        minimum=1,
        help="MiB that each rank may take beyond the idle worker: a smaller device than there is",
    ),
    PlanOption(name="compile", kind="switch", help="compile the model with torch.compile"),
    PlanOption(
        name="memory_format",
        kind="word",
        choices=("contiguous", "channels_last"),
        help="layout of images in memory",
    ),
    PlanOption(
        name="seed", kind="int", minimum=0, maximum=2**32 - 1, help="seed of parameters, data and order"
    ),
    PlanOption(
        name="gpus_per_node", kind="int", minimum=1, help="devices of one node; all on one if left out"
    ),
    PlanOption(
        name="node_size", kind="int", minimum=1, help="ranks of one virtual node; under a link 1 if left out"
    ),
    PlanOption(
        name="budget", kind="duration", minimum=0, help="time after which a run stops measuring: 20s, 2m"
    ),
    PlanOption(
        name="target",
        kind="number",
        minimum=0,
        maximum=1,
        help="relative half-width of the interval at which a run stops measuring",
    ),
    PlanOption(
        name="warmup_steps",
        kind="int",
        minimum=0,
        maximum=100_000,
        help="most steps of warm-up; it ends sooner when the step time is steady",
    ),
    PlanOption(name="block_steps", kind="int", minimum=1, maximum=100_000, help="steps between two barriers"),
    PlanOption(
        name="quads",
        kind="int",
        minimum=0,
        maximum=1000,
        help="sync-on, off, off, on quads that measure exposed communication; 0 for none",
    ),
    PlanOption(
        name="launcher",
        kind="word",
        choices=launcher_names(),
        help=launchers_help(),
    ),
    PlanOption(name="site", kind="text", help="profile of the cluster: a YAML file, see docs/clusters.md"),
    PlanOption(name="partition", kind="text", help="Slurm partition, instead of the profile's"),
    PlanOption(name="account", kind="text", help="Slurm account, instead of the profile's"),
    PlanOption(name="qos", kind="text", help="Slurm quality of service, instead of the profile's"),
    PlanOption(
        name="cpus_per_gpu", kind="int", minimum=1, help="CPUs of each worker, instead of the profile's"
    ),
    PlanOption(
        name="time", kind="duration", above=0, help="time limit of every job, instead of an estimate: 30m, 2h"
    ),
    PlanOption(
        name="jobs_per_cell", kind="switch", help="a job for each cell, not one for each number of workers"
    ),
    PlanOption(
        name="feed",
        kind="word",
        choices=("once", "wait", "depend"),
        help="where the cluster takes no more jobs: stop there, wait for room, or have a job submit the rest",
    ),
    PlanOption(
        name="max_gpu_hours",
        kind="number",
        above=0,
        help="submit nothing if the jobs may take more than this",
    ),
    PlanOption(name="report_job", kind="switch", help="have a last job write the report"),
    PlanOption(name="apply", kind="switch", help="hand Kubernetes manifests to kubectl, not to stdout alone"),
    PlanOption(
        name="kind",
        kind="word",
        choices=("job", "statefulset"),
        help="what is made on Kubernetes; job if left out",
    ),
    PlanOption(
        name="isolation",
        kind="word",
        choices=("launch", "cell"),
        help="cells of a placement share one launch, or each has its own",
    ),
    PlanOption(
        name="oversubscribe", kind="switch", help="run more workers than there are devices, as emulated"
    ),
    PlanOption(
        name="max_time", kind="duration", above=0, help="stop after this, the run in flight is lost: 30m, 2h"
    ),
    PlanOption(
        name="hang_after",
        kind="duration",
        minimum=10,
        help="time without progress after which a launch is ended as hung: 15m",
    ),
    PlanOption(
        name="retries",
        kind="int",
        minimum=0,
        maximum=100,
        help="times a launch is tried again when the cluster failed, not the program",
    ),
    PlanOption(
        name="prune",
        kind="switch",
        help="leave out cells whose smaller batch ran out of memory (the default)",
    ),
    PlanOption(name="rerun", kind="word", choices=("failed",), help="run again what failed for good"),
    PlanOption(
        name="trace",
        kind="counts",
        minimum=0,
        help="ranks that keep the profiler's trace of 3 steps after each run: 0,3",
    ),
    PlanOption(name="tensorboard", kind="switch", help="write each rank's loss and step times while it runs"),
    PlanOption(name="out", kind="text", help="folder of the study, instead of runs/NAME"),
)

BY_NAME = {option.name: option for option in OPTIONS}


def nearest(name: str, known: Sequence[str]) -> str:
    """` (did you mean 'gpus'?)`, or nothing where no name is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def read_names(value: Names) -> tuple[str, ...]:
    """The distinct texts of a comma text or a list, in the order given."""
    texts = value.split(",") if isinstance(value, str) else value
    return tuple(dict.fromkeys(text.strip() for item in texts for text in item.split(",") if text.strip()))


def read_counts(value: Counts, where: str) -> tuple[int, ...]:
    """The distinct whole numbers of a number, a comma text or a list. Raises UsageError."""
    items = value if isinstance(value, list) else [value]
    texts = [text.strip() for item in items for text in str(item).split(",")]
    for text in texts:
        if not re.fullmatch(r"[+-]?\d{1,30}", text, re.ASCII):
            raise UsageError(f"{where} takes whole numbers joined by commas, such as 8,16, not {text!r}")
    return tuple(dict.fromkeys(int(text) for text in texts))


def read_gpus(value: Counts, where: str) -> tuple[int, ...]:
    """The counts of a number, a `1..256` text or a list of either. Raises GpuCountsError."""
    text = ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
    try:
        return GpuCounts.parse(text).counts
    except GpuCountsError as error:
        raise GpuCountsError(str(error).replace("--gpus", where, 1)) from error


def read_duration_s(value: float | str, where: str) -> float:
    """Seconds of a number (seconds) or a text like 90s, 30m, 2h, 1d. Raises UsageError."""
    if not isinstance(value, str):
        return float(value)
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise UsageError(f"{where} takes seconds or a time like 90s, 30m, 2h, not {value!r}")
    return float(match["number"]) * _UNIT_S[match["unit"]]


def check(option: PlanOption, value: object, where: str) -> None:
    """Hold one value against its rule. Raises UsageError naming `where`, the value and the rule."""
    if option.kind == "names":
        _check_names(option, value, where)
    elif option.kind == "counts":
        assert isinstance(value, int | str | list)
        for count in read_counts(value, where):
            _check_number(option, count, where)
    elif option.kind == "gpus":
        assert isinstance(value, int | str | list)
        read_gpus(value, where)
    elif option.kind == "duration":
        assert isinstance(value, int | float | str)
        _check_number(option, read_duration_s(value, where), where)
    elif option.kind in ("int", "number"):
        assert isinstance(value, int | float)
        _check_number(option, value, where)
    elif option.choices and value not in option.choices:
        raise UsageError(f"{where} is one of {', '.join(option.choices)}, not {value!r}")
    elif option.kind == "text" and not str(value).strip():
        raise UsageError(f"{where} is empty; give a value or leave it out")


def _check_names(option: PlanOption, value: object, where: str) -> None:
    assert isinstance(value, str | list)
    found = read_names(value)
    if not found:
        raise UsageError(f"{where} names nothing; give a value or leave it out")
    for name in found:
        if option.choices and name not in option.choices:
            raise UsageError(f"{where} takes {', '.join(option.choices)}, not {name!r}")


def _check_number(option: PlanOption, value: float, where: str) -> None:
    most = MOST if option.maximum is None else option.maximum
    if not math.isfinite(value):
        raise UsageError(f"{where} is a finite number, not {value}")
    if option.minimum is not None and value < option.minimum:
        raise UsageError(f"{where} is at least {option.minimum:g}, not {value}")
    if option.above is not None and value <= option.above:
        raise UsageError(f"{where} is more than {option.above:g}, not {value}")
    if value > most:
        raise UsageError(f"{where} is at most {most:.0f}, not {value}")
