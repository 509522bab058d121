"""A plan: the expanded matrix of one `bench matrix` call. It is written once, before the first run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from results.cell import (
    DEFAULT_COLLECTIVE,
    SYNTHETIC,
    UNCOMPRESSED,
    Cell,
    Checkpointing,
    Device,
    MemoryFormat,
    Names,
    Precision,
    StepPolicy,
    label,
    named,
)
from results.errors import SchemaError, UsageError
from results.features import MEASURED, Kind, kind_named
from results.notation import NO_LINK

Scaling = Literal["weak", "strong"]
Rule = Literal[
    "excluded",
    "auto",
    "groups",
    "batch",
    "strategy",
    "network",
    "workload",
    "split",
    "nodes",
    "link",
    "machine",
    "memory",
]
"""Reasons for leaving a point out: the study file, `auto` (no proposal fits or can be compared), the groups
of ranks that a strategy forms, the division of the batch, settings that the strategy, the link or the
workload does not support, the split of the model, incomplete nodes, no link here, too few devices here, too
little memory of a GPU."""
BatchBasis = Literal["predicted", "measured", "nothing fits"]
EXCLUDED = "excluded by the study file"
"""The beginning of the reason of an excluded point."""


class Pattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An `include:` or `exclude:` line of a study file: the axes it names must all match."""

    workload: str | None = None
    strategy: str | None = None
    compression: str | None = None
    collective: str | None = None
    link: str | None = None
    gpus: Annotated[int, msgspec.Meta(ge=1)] | None = None
    batch_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    scaling: Scaling | None = None

    @property
    def axes(self) -> dict[str, Any]:
        """The axes that it names, with their values."""
        return {axis: value for axis, value in msgspec.structs.asdict(self).items() if value is not None}

    def matches(self, point: Point) -> bool:
        return all(getattr(point, axis) == value for axis, value in self.axes.items())


class SeriesId(Names, frozen=True, kw_only=True):
    """The key of a series in its plan: the axes that its points, run or skipped, have in common."""

    scaling: Scaling
    batch_size: int
    """The batch that was asked for, as in the stored `Series` and `Skip`: per replica, or global where a
    strong series has its own `--global-batch-size`."""


class Point(Names, frozen=True, kw_only=True):
    """One point of the matrix: a cell under one rule of scaling, before it is known to make sense.

    A new axis whose values are strings is a field of `Names`, with its default, of `Cell`, of `Pattern`, of
    `Request` in the plural, and of `StudyFile`. All that plans, stores and shows points follows.
    """

    gpus: int
    batch_size: int
    """The batch that was asked for, as `SeriesId` has it."""
    scaling: Scaling

    @property
    def series_id(self) -> SeriesId:
        return SeriesId(**named(self), scaling=self.scaling, batch_size=self.batch_size)


def values_name(axis: str) -> str:
    """The field of a `Request` that has the values of an axis: the plural of its name."""
    if axis.endswith("s"):
        return axis
    return f"{axis[:-1]}ies" if axis.endswith("y") else f"{axis}s"


class FittingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The batch of a weak series under `--batch-size auto`: the largest that fits at all of its sizes."""

    series: SeriesId
    """With the samples of a replica in one update; if none fits, with the smallest number."""
    work: str
    """The id of the series' cell on one worker with a micro-batch of one sample; empty if no size can run."""
    basis: BatchBasis
    why: str
    """How the batch was found, or why nothing fits, as a clause."""

    @property
    def words(self) -> str:
        found = "finds none" if self.basis == "nothing fits" else f"is {self.series.batch_size:,}"
        return f"batch size auto {found} for {self.series.workload}, {label(self.series)}: {self.why}"


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a user asked for, defaults filled in: the same from flags and from a study file."""

    workloads: tuple[str, ...]
    gpus: tuple[int, ...]
    strategies: tuple[str, ...]
    compressions: tuple[str, ...] = (UNCOMPRESSED,)
    collectives: tuple[str, ...] = (DEFAULT_COLLECTIVE,)
    links: tuple[str, ...] = (NO_LINK,)
    """Networks between the virtual nodes, as canonical strings; `none` is the network as it is."""
    batch_sizes: tuple[int, ...] = ()
    """Samples per data-parallel replica and update; empty: each workload's own, or `batches`."""
    batches: tuple[FittingBatch, ...] | None = None
    """The batch of each series under `--batch-size auto`, empty until it is predicted; None: it is not
    asked for."""
    global_batch_sizes: tuple[int, ...] = ()
    """Global batches of the strong series; empty: each batch size times the largest replica count."""
    scalings: tuple[Scaling, ...] = ("weak",)
    repeats: int = 3
    dataset: str = SYNTHETIC
    device: Device = "cpu"
    backend: Literal["gloo", "nccl"] = "gloo"
    precision: Precision = "fp32"
    accumulation: int = 1
    optimizer: str | None = None
    clip_norm: float | None = None
    activation_checkpointing: Checkpointing = False
    compile: bool = False
    memory_format: MemoryFormat = "contiguous"
    seed: int = 0
    env: tuple[str, ...] = ()
    """Environment variables of the launches of its cells, as `NAME=VALUE`, by name."""
    memory_limit_mb: int | None = None
    """MiB that each rank may take beyond the idle worker; None: all memory of the device."""
    steps: StepPolicy = StepPolicy()
    gpus_per_node: int | None = None
    """Devices of one node; None: all of a cell's workers are on one."""
    gpu_model: str | None = None
    """The catalogue's name of the GPUs that `auto` chooses for; None: the GPUs of this machine."""
    network_gbit_per_s: float | None = None
    """Rate of a node, all adapters together; None: not known."""
    node_size: int | None = None
    """Ranks of one virtual node; None: nodes are real hosts, and under a link one rank each."""
    include: tuple[Pattern, ...] = ()
    exclude: tuple[Pattern, ...] = ()
    source_folder: str | None = None
    """The folder of the study file (or of the call): where `py:` workloads are imported from."""

    def values(self, axis: str) -> tuple[Any, ...]:
        """The values of an axis of the matrix, without the values of single points."""
        values: tuple[Any, ...] = getattr(self, values_name(axis))
        return values

    @property
    def every_strategy(self) -> frozenset[str]:
        """All strategies that are named, also for single points."""
        return frozenset(
            (*self.strategies, *(pattern.strategy for pattern in self.include if pattern.strategy))
        )

    @property
    def has_links(self) -> bool:
        """Whether some of its points are under a link."""
        named = [pattern.link for pattern in self.include if pattern.link is not None]
        return any(link != NO_LINK for link in (*self.links, *named))

    def __post_init__(self) -> None:
        for name in ("repeats", "accumulation"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is at least 1, not {getattr(self, name)}")
        for batch in (*self.batch_sizes, *self.global_batch_sizes):
            if batch < 1:
                raise UsageError(f"a batch size is at least 1, not {batch}")


class _Kind(Names, frozen=True):
    kind: Scaling
    """The scaling. Files have it before the names: a field that is not keyword-only comes first."""


class Series(_Kind, frozen=True, kw_only=True):
    """Cells that differ by one rule in only `gpus` (under strong scaling also in micro-batch)."""

    batch_size: int
    """Batch per replica under weak scaling; the user's `--batch-size` under strong."""
    global_batch: int | None
    """The constant global batch of a strong series; None for weak."""
    cells: tuple[str, ...]
    """Cell ids, by ascending gpus."""

    @property
    def id(self) -> SeriesId:
        return SeriesId(**named(self), scaling=self.kind, batch_size=self.batch_size)

    def point(self, gpus: int) -> Point:
        """The point of its cell of this size."""
        return Point(**msgspec.structs.asdict(self.id), gpus=gpus)


class Skip(Point, frozen=True, kw_only=True):
    """A point of the matrix that is not run, and why."""

    reason: str
    rule: Rule | None = None
    """The rule that left it out; None in plans that were made before rules were kept."""
    predicate: str | None = None
    """The reason without its subject, the strategy, so that it is equal for all strategies that a rule
    refuses. None if the reason has another subject, and in older plans."""

    @property
    def excluded(self) -> bool:
        """Whether the user left it out."""
        return self.rule == "excluded" if self.rule is not None else self.reason.startswith(EXCLUDED)

    @property
    def point(self) -> Point:
        return Point(**{axis: getattr(self, axis) for axis in Point.__struct_fields__})


class Placement(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The placement of the workers of a launch: equal nodes, one device a worker."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


T = TypeVar("T")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The work of ranks on cells that are not measured."""

    kind: str
    """The name of the `results.features.Kind`, which knows the values."""
    values: dict[str, Any] = {}

    @classmethod
    def of(cls, kind: str, values: msgspec.Struct) -> Order:
        """The order with these values, equal to the one that a file gives back."""
        return cls(kind=kind, values=msgspec.json.decode(msgspec.json.encode(values)))


def read_values(values: Mapping[str, Any], as_type: type[T]) -> T:
    """Read the values of a stored order as the type of its kind. Raises SchemaError if they do not fit it."""
    try:
        return msgspec.convert(values, as_type)
    except msgspec.ValidationError as error:
        raise SchemaError(
            f"the order of a plan or launch is damaged: {error}; remove the plan, and repeat the command "
            f"that wrote it"
        ) from error


def kind_of(order: Order | None) -> Kind:
    """The kind of the studies with an order. Raises UsageError if this installation lacks it."""
    return MEASURED if order is None else kind_named(order.kind)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round of a study that grows until the size to buy is certain (`--until`)."""

    number: int
    """1 for the first round; the `repeat` of its runs."""
    odds: float
    """The odds at which a size is certain."""
    runs: dict[str, int]
    """Runs of each cell up to this round, by id; a cell that is not there is not reached."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One expanded matrix of a study."""

    study: str
    """The study's name when the plan was made."""
    created_at: str
    request: Request
    cells: tuple[Cell, ...]
    series: tuple[Series, ...]
    skips: tuple[Skip, ...]
    command: tuple[str, ...] = ()
    """The words after `bench` that asked for it; none in plans from before they were kept."""
    predicted_bytes: dict[str, int] = {}
    """Memory of the fullest rank in closed form (docs/memory.md), by the ids of cells for which it is
    known."""
    unpredicted: dict[str, str] = {}
    """Why the memory of a workload's cells is not predicted; empty in plans from before reasons were kept."""
    order: Order | None = None
    """The work of the ranks; None: they measure steps."""
    round: Round | None = None
    """The round that it is the plan of; None: all of its cells have all repeats."""

    @property
    def last_repeat(self) -> int:
        """The `repeat` of its last runs."""
        return self.request.repeats if self.round is None else self.round.number

    def wanted(self, cell_id: str) -> int:
        """The number of runs that a cell needs."""
        return self.request.repeats if self.round is None else self.round.runs.get(cell_id, 0)

    @property
    def kind(self) -> Kind:
        """The kind of the study that it is a plan of. Raises UsageError if this installation lacks it."""
        return kind_of(self.order)

    def __post_init__(self) -> None:
        known = {cell.id for cell in self.cells}
        strange = [cell for series in self.series for cell in series.cells if cell not in known]
        if strange:
            raise ValueError(f"a series has the cell {strange[0]}, which is not among the plan's cells")

    @property
    def virtual_cells(self) -> frozenset[str]:
        """Ids of the cells that have virtual nodes."""
        per_node = self.request.gpus_per_node
        return frozenset(
            cell.id for cell in self.cells if has_virtual_nodes(cell, placement_of(cell, per_node))
        )


def placement_of(cell: Cell, gpus_per_node: int | None) -> Placement:
    """The placement of a cell's workers on nodes of `gpus_per_node` (None: all on one node).

    Under a link its nodes are the virtual ones, whose ranks are apart from each other. Raises UsageError if
    the workers do not fill whole nodes.
    """
    if cell.link_mbit_per_s is not None:
        return _on_nodes(cell, cell.node_size or 1, "virtual nodes")
    return _on_nodes(cell, gpus_per_node or cell.gpus, "nodes")


def _on_nodes(cell: Cell, node_size: int, noun: str) -> Placement:
    per_node = min(cell.gpus, node_size)
    if cell.gpus % per_node:
        raise UsageError(f"{cell.gpus} workers do not fill whole {noun} of {per_node}")
    return Placement(nodes=cell.gpus // per_node, gpus_per_node=per_node)


def has_virtual_nodes(cell: Cell, placement: Placement) -> bool:
    """Whether some nodes of a cell are virtual, so that its figures are emulated on any machine."""
    size = cell.node_size
    return cell.link_mbit_per_s is not None or (size is not None and size < placement.gpus_per_node)
