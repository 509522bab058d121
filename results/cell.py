"""A cell: one point of the matrix, with all settings that decide which work is done.

Its label names the strategy and the exchange of gradients. A cell is not run if a smaller batch of the same
cell ran out of memory.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Set
from functools import cache, cached_property
from typing import Literal

import msgspec

from results.notation import NO_LINK, link_text

BASELINE_STRATEGY = "single"
"""The strategy of one device, from which curves start."""
REFERENCE_STRATEGY = "ddp"
"""Plain data parallelism. A study that names no strategy measures it and the baseline, and the exchanges of
other strategies are compared with its dense one."""
UNCOMPRESSED = "none"
SYNTHETIC = "synthetic"
"""The data that each workload draws for itself."""
DEFAULT_COLLECTIVE = "default"
"""The backend's own all-reduce."""
Device = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "float8"]
HALVES = ("bf16", "fp16", "float8")
"""The precisions under autocast; `float8` has autocast to bf16 around its products."""
MemoryFormat = Literal["contiguous", "channels_last"]
Checkpointing = bool | Literal["selective"]
"""False: all activations are kept; True: a block's are computed again in backward; selective: results of
matrix products are kept, and only activations that take little time are computed again."""
FEWEST_QUADS = 3
"""Quads that are measured with any budget, or all of them where fewer are asked for."""
GPU_BLOCK_S = 0.5
"""A block on a GPU lasts at least this long: the skew of its start and end is then a small share of it."""
GPU_WARM_UP_S = 10.0
"""The first warm-up of a process on a GPU lasts at least this long. The clock rises within the first second
of load and falls while the chip heats up; to see that it no longer falls takes two means over 5 s each."""
GPU_LONGEST_WARM_UP_S = 40.0
"""The first warm-up of a process on a GPU ends then, steady or not: heat settles over some tens of seconds,
and more than twice the default budget of measuring would not be worth it."""
GPU_HOT_WARM_UP_S = 4.0
"""Any warm-up on a GPU lasts at least this long: in fewer readings of the clock a fall of 1 % a second looks
like noise."""


def gpu_warm_up_s(idle_s: float) -> tuple[float, float]:
    """Return the shortest and the longest warm-up on a GPU whose process timed its last steps `idle_s` ago.

    A GPU cools for as long as it is idle, so its clock must be flat for that long; infinity is a process that
    has timed nothing, and warms up as after `GPU_WARM_UP_S`.
    """
    least_s = min(max(idle_s, GPU_HOT_WARM_UP_S), GPU_WARM_UP_S)
    return least_s, GPU_LONGEST_WARM_UP_S * least_s / GPU_WARM_UP_S


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} is at least {least}, not {value}")
    if value == math.inf:
        raise ValueError(f"{name} is a finite number, not inf")


def _as_float(struct: msgspec.Struct, name: str) -> None:
    # A whole number in a float field is written 1 by JSON and read back 1.0: two ids of one cell.
    msgspec.structs.force_setattr(struct, name, float(getattr(struct, name)))


class StepPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How long a run warms up and measures."""

    block_steps: int = 5
    """The fewest steps between two barriers (`steps_of_block`). These steps are a block, which is timed."""
    warmup_max_steps: int = 40
    """Warm-up ends when the step time is steady, or here. On a GPU it ends by time, and only 0 has a
    meaning: no warm-up."""
    min_blocks: int = 6
    """Blocks that are measured with any budget."""
    max_blocks: int = 200
    target: float = 0.02
    """Relative half-width of the within-run interval at which measuring stops."""
    budget_s: float = 20.0
    """Seconds of blocks and quads after which measuring stops, the target met or not."""
    quads: int = 5
    """The most sync-on, off, off, on quads from which the exposed communication is measured; 0 for none."""

    def __post_init__(self) -> None:
        for name in ("block_steps", "min_blocks", "max_blocks"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup_max_steps", "quads", "target", "budget_s"):
            _at_least(name, getattr(self, name), 0)
        for name in ("target", "budget_s"):
            _as_float(self, name)
        if self.max_blocks < self.min_blocks:
            raise ValueError(f"max_blocks ({self.max_blocks}) is less than min_blocks ({self.min_blocks})")

    def steps_of_block(self, period: int, gpu_step_s: float | None = None) -> int:
        """Return the steps of a block: whole periods, at least `block_steps`. Where steps on a GPU take
        `gpu_step_s`, the block also lasts at least `GPU_BLOCK_S`; `None` is a CPU or an unknown step time."""
        by_time = math.ceil(GPU_BLOCK_S / gpu_step_s) if gpu_step_s else 0
        return math.ceil(max(self.block_steps, by_time) / period) * period


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True, weakref=True):
    """One point of the matrix. Immutable and content-addressed: equal work has an equal `id`.

    Fields are only added, each with a default that describes the behaviour before it existed, so that the ids
    of old cells stay. Specs are canonical strings.
    """

    workload: str
    dataset: str
    strategy: str
    gpus: int
    micro_batch: int
    """Samples that one data-parallel replica puts through forward and backward at once."""
    device: Device
    backend: Backend
    optimizer: str
    compression: str = UNCOMPRESSED
    collective: str = DEFAULT_COLLECTIVE
    node_size: int | None = None
    """The number of consecutive ranks that form a virtual node; None: the nodes are real hosts."""
    link_mbit_per_s: float | None = None
    """Rate of every virtual node's network link in each direction; None: the network is not shaped."""
    accumulation: int = 1
    """Micro-batches whose gradients are added up before one update."""
    precision: Precision = "fp32"
    clip_norm: float | None = None
    """Global gradient norm above which gradients are scaled down; None: no clipping."""
    activation_checkpointing: Checkpointing = False
    compile: bool = False
    memory_format: MemoryFormat = "contiguous"
    seed: int = 0
    source_hash: str | None = None
    """Hash of a user's own model source (`py:` workloads)."""
    dataset_hash: str | None = None
    """Hash of a user's own data file."""
    model_parallel: int = 1
    """Ranks that one replica is split over, within layers (tensor) or between them (pipeline)."""
    memory_limit_mb: int | None = None
    """MiB that a rank may take beyond the idle worker; None: what the device has."""
    steps: StepPolicy = StepPolicy()
    env: tuple[str, ...] = ()
    """Environment variables that its launches have in addition, as `NAME=VALUE`, by name."""

    def __post_init__(self) -> None:
        for name in ("gpus", "micro_batch", "accumulation", "model_parallel"):
            _at_least(name, getattr(self, name), 1)
        if self.gpus % self.model_parallel:
            raise ValueError(f"{self.gpus} ranks do not divide into replicas of {self.model_parallel}")
        if self.memory_limit_mb is not None:
            _at_least("memory_limit_mb", self.memory_limit_mb, 1)
        if self.node_size is not None:
            _at_least("node_size", self.node_size, 1)
        if self.link_mbit_per_s is not None:
            _at_least("link_mbit_per_s", self.link_mbit_per_s, 1)
            _as_float(self, "link_mbit_per_s")
        if self.clip_norm is not None:
            if not 0 < self.clip_norm < math.inf:
                raise ValueError(f"clip_norm is finite and more than 0, not {self.clip_norm}")
            _as_float(self, "clip_norm")

    @property
    def link(self) -> str:
        """The rate of the link as a user writes it: `1gbit`, or `none`."""
        return link_text(self.link_mbit_per_s)

    @property
    def synthetic(self) -> bool:
        """Whether its samples are noise with random targets, from which a model cannot learn."""
        return self.dataset == SYNTHETIC

    @property
    def compresses(self) -> bool:
        """Whether gradients are sent in another form than they are computed in."""
        return self.compression != UNCOMPRESSED

    @property
    def dense(self) -> bool:
        """Whether gradients are sent as they are, by the backend's own collectives."""
        return not self.compresses and self.collective == DEFAULT_COLLECTIVE

    @property
    def replicas(self) -> int:
        """The data-parallel degree: how many copies of the model see different data."""
        return self.gpus // self.model_parallel

    @property
    def batch_per_replica(self) -> int:
        """Samples of one update on one replica: all of its micro-batches."""
        return self.micro_batch * self.accumulation

    @property
    def global_batch(self) -> int:
        """Samples of one update, over all replicas."""
        return self.batch_per_replica * self.replicas

    @cached_property
    def id(self) -> str:
        """A readable prefix and 16 hex digits over every field that differs from the schema's default."""
        data = msgspec.json.encode(differing_fields(self), order="sorted")
        digest = hashlib.sha256(data).hexdigest()[:16]
        parts = [self.workload, self.strategy]
        if self.compresses:
            parts.append(self.compression)
        if self.collective != DEFAULT_COLLECTIVE:
            parts.append(self.collective)
        if self.link_mbit_per_s is not None:
            parts.append(self.link)
        parts += self.env
        prefix = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") for part in parts)[:60].strip("-.")
        return f"{prefix}-g{self.gpus:03d}-b{self.micro_batch}-{digest}"


def differing_fields(struct: msgspec.Struct) -> dict[str, object]:
    """The fields whose value is not the schema's default.

    By equality: msgspec's `omit_defaults` compares by identity, so that a 0.02 read from a file is written
    where the default 0.02 is not, and equal cells would have different ids.
    """
    given: dict[str, object] = {}
    for name, default in _defaults(type(struct)):
        value = getattr(struct, name)
        if value != default:
            given[name] = differing_fields(value) if isinstance(value, msgspec.Struct) else value
    return given


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    return tuple((info.name, info.default) for info in msgspec.structs.fields(kind))


def inferred_out_of_memory(cells: Iterable[Cell], failed: Set[str]) -> dict[str, str]:
    """Map each cell with a larger micro-batch than a cell in `failed` to the id of that cell.

    The two are the same in everything else. Of several, the smallest that failed is named.
    """
    ordered = sorted(cells, key=lambda cell: cell.micro_batch)
    smallest: dict[str, str] = {}
    inferred: dict[str, str] = {}
    for cell in ordered:
        rest = msgspec.structs.replace(cell, micro_batch=1).id
        if cell.id in failed:
            smallest.setdefault(rest, cell.id)
        elif rest in smallest:
            inferred[cell.id] = smallest[rest]
    return inferred


def pruning_reason(cause: str) -> str:
    """Why a cell is not run, in words."""
    return f"inferred out of memory: {cause} has a smaller batch and ran out of it"


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """The names of what a cell computes, and of how its gradients travel."""

    workload: str
    strategy: str
    compression: str = UNCOMPRESSED
    collective: str = DEFAULT_COLLECTIVE
    link: str = NO_LINK


def named(of: Cell | Names) -> dict[str, str]:
    """The fields of `Names` of a cell, a point or a series."""
    return {axis: getattr(of, axis) for axis in Names.__struct_fields__}


def label(named: Cell | Names) -> str:
    """Label of the exchange and its link: `ddp + topk:0.01, ring, 1gbit`; defaults are left out."""
    return exchange_label(named) if named.link == NO_LINK else f"{exchange_label(named)}, {named.link}"


def exchange_label(named: Cell | Names) -> str:
    """The label without the link: `ddp + topk:0.01, ring`."""
    compressed = (
        named.strategy if named.compression == UNCOMPRESSED else f"{named.strategy} + {named.compression}"
    )
    return compressed if named.collective == DEFAULT_COLLECTIVE else f"{compressed}, {named.collective}"


def point(cell: Cell) -> str:
    """The label of a cell among the cells of its workload: `ddp on 8, batch 32`."""
    return f"{label(cell)} on {cell.gpus:,}, batch {cell.batch_per_replica:,}"
