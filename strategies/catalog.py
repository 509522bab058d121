"""What there is: strategies, compressors, collectives and optimizers, with their options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from results.errors import SpecError
from results.groups import GroupLayout
from results.spec import Catalog, Entry, Option
from strategies.fsdp import block_choices

_BUCKET_MB = Option(kind="float", default=25.0, minimum=0.001, help="MiB of gradients in one exchange")
_FIRST_MB = Option(kind="float", default=1.0, minimum=0.001, help="MiB of the bucket that is full first")
_STATIC = Option(kind="bool", default=False, help="promise torch that the graph never changes")
_UNUSED = Option(kind="bool", default=False, help="look for parameters that a forward did not use")
_VIEW = Option(kind="bool", default=False, help="gradients are views of the buckets: one copy less")
_PERIOD = Option(kind="int", minimum=1, help="the steps from one average to the next")
_LOCAL_FROM = Option(
    kind="int", default=0, minimum=0, help="steps before that, which average gradients as they are"
)

_RESHARD = Option(
    kind="bool", default=True, help="give whole parameters up between forward and backward: ZeRO-3"
)
_OFFLOAD = Option(
    kind="str", default="none", choices=("none", "cpu"), help="where shards lie while they are not used"
)
_PREFETCH = Option(kind="int", default=0, minimum=0, maximum=8, help="blocks that are gathered ahead")
_PARAMS = Option(
    kind="str", default="fp32", choices=("fp32", "bf16"), help="what whole parameters are gathered in"
)
_TENSOR = Option(kind="int", default=1, minimum=1, help="ranks that compute each layer together")
_ALL_BLOCKS = {"prefetch": _PREFETCH, "params": _PARAMS, "tp": _TENSOR}
_FSDP = {"reshard": _RESHARD, "offload": _OFFLOAD, **_ALL_BLOCKS}
_CHOICES = Option(
    kind="str",
    canonical=block_choices.canonical,
    help="a choice for each block, such as reshard.checkpoint*2+keep*2",
)
_STAGE = Option(
    kind="int", default=3, minimum=1, maximum=3, help="ZeRO stage: optimizer, and gradients, and parameters"
)
_AHEAD = Option(kind="int", default=1, minimum=0, maximum=8, help="blocks that are gathered ahead")
_SCHEDULE = Option(
    kind="str", choices=("gpipe", "1f1b", "interleaved"), help="the schedule: gpipe, 1f1b or interleaved"
)
_MICROBATCHES = Option(kind="int", default=4, minimum=1, help="pieces that a micro-batch is cut into")
_CHUNKS = Option(kind="int", default=2, minimum=1, maximum=64, help="stages of a rank, for interleaved alone")
_COPIES = Option(kind="int", default=1, minimum=1, help="pipelines beside each other, on data of their own")

STRATEGIES = Catalog(
    "strategy",
    [
        Entry(name="single", help="one device, no exchange: the baseline of every curve"),
        Entry(
            name="ddp",
            help="torch's DistributedDataParallel: replicas, bucketed all-reduce during backward",
            options=MappingProxyType(
                {
                    "bucket_mb": _BUCKET_MB,
                    "static_graph": _STATIC,
                    "bucket_view": _VIEW,
                    "find_unused": _UNUSED,
                }
            ),
        ),
        Entry(
            name="scratch-ddp",
            help="ours on raw collectives: the same, gradients as views of the buckets",
            options=MappingProxyType(
                {"bucket_mb": _BUCKET_MB, "first_bucket_mb": _FIRST_MB, "find_unused": _UNUSED}
            ),
        ),
        Entry(
            name="local-sgd",
            help="every rank trains alone, parameters are averaged every so many steps",
            positional=_PERIOD,
            options=MappingProxyType({"warmup": _LOCAL_FROM}),
        ),
        Entry(
            name="fsdp",
            help="torch's FSDP2: parameters, gradients and optimizer state in shards, block by block",
            options=MappingProxyType(_FSDP),
        ),
        Entry(
            name="zero2",
            help="ZeRO-2: fsdp that keeps whole parameters till after backward",
            alias_of="fsdp:reshard=false",
        ),
        Entry(name="zero3", help="ZeRO-3: fsdp", alias_of="fsdp"),
        Entry(
            name="zero1",
            help="torch's ZeroRedundancyOptimizer: ddp, whose update each rank makes for a part",
            options=MappingProxyType({"bucket_mb": _BUCKET_MB}),
        ),
        Entry(
            name="scratch-fsdp",
            help="ours on raw collectives: flat shards, gathered ahead; stage=1, 2, 3 is ZeRO 1, 2, 3",
            options=MappingProxyType(
                {"stage": _STAGE, "prefetch": _AHEAD, "offload": _OFFLOAD, "params": _PARAMS}
            ),
        ),
        Entry(
            name="hsdp",
            help="fsdp inside of each node, replicas across nodes",
            options=MappingProxyType(_FSDP),
        ),
        Entry(
            name="manual",
            help="fsdp with a choice for each block: reshard or keep, with .checkpoint, .offload",
            positional=_CHOICES,
            options=MappingProxyType(_ALL_BLOCKS),
        ),
        Entry(
            name="pipeline",
            help="the blocks in stages, one after another; micro-batches follow each other through them",
            positional=_SCHEDULE,
            options=MappingProxyType({"microbatches": _MICROBATCHES, "chunks": _CHUNKS, "dp": _COPIES}),
        ),
        Entry(name="tp", help="tensor parallelism: every rank computes a part of each layer"),
        Entry(name="auto", help="what fits into memory and is predicted to be fastest: chosen by the plan"),
    ],
)

_RATIO = Option(kind="float", minimum=1e-6, maximum=1.0, help="the share that is sent, such as 0.01")
_RANK = Option(kind="int", minimum=1, maximum=1024, help="the rank of the approximation, such as 4")
_SELECT = Option(
    kind="str",
    default="exact",
    choices=("exact", "sampled", "block"),
    help="how the largest are found: all of them, by a threshold from a sample, or one of each block",
)
_FEEDBACK = Option(kind="bool", default=True, help="add what was not sent to the next gradient")
_NO_FEEDBACK = Option(kind="bool", default=False, help="add what was not sent to the next gradient")
_WARMUP = Option(kind="int", default=0, minimum=0, help="steps before it works as it will")
_BLOCK = Option(kind="int", default=256, minimum=8, maximum=65536, help="values that share one scale")
_MOMENTUM = Option(kind="float", default=0.9, minimum=0, maximum=1, help="momentum, kept before compression")

COMPRESSIONS = Catalog(
    "compression",
    [
        Entry(name="none", help="gradients are exchanged as they are, in full precision"),
        Entry(name="fp16", help="half precision, scaled so that no sum overflows"),
        Entry(name="bf16", help="bfloat16: the range of full precision, 8 bits of it"),
        Entry(
            name="topk",
            help="the largest elements of each bucket, with their places",
            positional=_RATIO,
            options=MappingProxyType({"select": _SELECT, "feedback": _FEEDBACK}),
        ),
        Entry(
            name="randomk",
            help="random elements, the same on all ranks, so that places need not be sent",
            positional=_RATIO,
            options=MappingProxyType({"feedback": _FEEDBACK}),
        ),
        Entry(
            name="powersgd",
            help="a low-rank approximation of each matrix, warm-started",
            positional=_RANK,
            options=MappingProxyType({"warmup": _WARMUP, "feedback": _FEEDBACK}),
        ),
        Entry(name="torch-powersgd", help="torch's PowerSGD hook, for ddp alone", positional=_RANK),
        Entry(
            name="int8",
            help="8 bits with a scale a block, stochastically rounded, in two stages",
            options=MappingProxyType({"block": _BLOCK, "feedback": _NO_FEEDBACK}),
        ),
        Entry(
            name="signsgd",
            help="one bit an element and a scale, in two stages",
            options=MappingProxyType({"feedback": _FEEDBACK}),
        ),
        Entry(
            name="dgc",
            help="deep gradient compression: top-k with momentum correction and masking",
            positional=_RATIO,
            options=MappingProxyType({"momentum": _MOMENTUM, "warmup": _WARMUP, "select": _SELECT}),
        ),
    ],
)

STANDS_ON: Mapping[str, str] = MappingProxyType(
    {"topk": "all-gather", "dgc": "all-gather", "int8": "all-to-all", "signsgd": "all-to-all"}
)
"""The collective that a compressor needs, where it is not an all-reduce."""

_CHUNK_MB = Option(kind="float", default=2.0, minimum=0.001, help="MiB that are sent at once")
_VIA = Option(
    kind="str",
    default="shards",
    choices=("shards", "leaders"),
    help="across nodes every rank moves its shard, or one rank a node moves all",
)

COLLECTIVES = Catalog(
    "collective",
    [
        Entry(name="default", help="the backend's own all-reduce"),
        Entry(
            name="ring",
            help="ours: reduce-scatter and all-gather around a ring of point-to-point sends",
            options=MappingProxyType({"chunk_mb": _CHUNK_MB}),
        ),
        Entry(
            name="tree",
            help="ours: up and down two binary trees, half of it each, in chunks that follow each other",
            options=MappingProxyType({"chunk_mb": _CHUNK_MB}),
        ),
        Entry(
            name="hierarchical",
            help="inside of the nodes, across them, inside again; compression across nodes alone",
            options=MappingProxyType({"via": _VIA}),
        ),
    ],
)

_LR = "learning rate"
_DECAY = Option(kind="float", default=0.0, minimum=0, help="weight decay")
OPTIMIZERS = Catalog(
    "optimizer",
    [
        Entry(
            name="sgd",
            help="stochastic gradient descent with momentum",
            options=MappingProxyType(
                {
                    "lr": Option(kind="float", default=0.1, minimum=0, help=_LR),
                    "momentum": Option(kind="float", default=0.9, minimum=0, help="momentum"),
                    "weight_decay": _DECAY,
                }
            ),
        ),
        Entry(
            name="adamw",
            help="AdamW",
            options=MappingProxyType(
                {
                    "lr": Option(kind="float", default=3e-4, minimum=0, help=_LR),
                    "weight_decay": Option(kind="float", default=0.01, minimum=0, help="weight decay"),
                }
            ),
        ),
    ],
)


def state_values(optimizer: str) -> int:
    """Values that an optimizer keeps for each parameter: two moments, a momentum, or none."""
    spec = OPTIMIZERS.parse(optimizer)
    return 2 if spec.name == "adamw" else int(spec.number("momentum") > 0)


def shards(strategy: str) -> bool:
    """Whether no rank has the whole of the gradients when it updates."""
    return STRATEGIES.parse(strategy).name in ("fsdp", "hsdp", "manual", "scratch-fsdp", "pipeline", "tp")


def microbatches(strategy: str) -> int:
    """Pieces that a replica's micro-batch is cut into, each of which has a forward and a backward pass."""
    spec = STRATEGIES.parse(strategy)
    return spec.integer("microbatches") if spec.name == "pipeline" else 1


def sums_micro_batches(strategy: str) -> bool:
    """Whether gradients are summed over the ranks micro-batch by micro-batch, so that none keeps its own."""
    spec = STRATEGIES.parse(strategy)
    return spec.name == "scratch-fsdp" and spec.integer("stage") > 1


def group_layout(strategy: str, gpus: int, node_size: int | None = None) -> GroupLayout:
    """How the ranks of a launch are grouped; `node_size` None: all are on one node.

    Raises SpecError, with the way out, where they do not divide.
    """
    spec = STRATEGIES.parse(strategy)
    match spec.name:
        case "pipeline":
            copies = spec.integer("dp")
            return GroupLayout(pipeline=_quotient(strategy, gpus, copies), replicate=copies)
        case "tp":
            return GroupLayout(tensor=gpus)
        case "fsdp" | "manual":
            parts = spec.integer("tp")
            return GroupLayout(shard=_quotient(strategy, gpus, parts), tensor=parts)
        case "hsdp":
            parts, node = spec.integer("tp"), min(node_size or gpus, gpus)
            nodes = _quotient(f"{strategy} on nodes of {node}", gpus, node)
            shard = _quotient(f"{strategy} on nodes of {node}", node, parts)
            return GroupLayout(replicate=nodes, shard=shard, tensor=parts)
        case "scratch-fsdp":
            return GroupLayout(shard=gpus)
        case "auto":
            raise SpecError("auto is for a plan to choose: name what `bench matrix --dry-run` says of it")
    return GroupLayout(replicate=gpus)


def _quotient(what: str, ranks: int, parts: int) -> int:
    if ranks % parts:
        raise SpecError(f"{what} needs a number of ranks that {parts} divides, not {ranks}")
    return ranks // parts


def period(strategy: str) -> int:
    """Steps after which everything that a strategy does has been done once."""
    spec = STRATEGIES.parse(strategy)
    return spec.count if spec.name == "local-sgd" else 1
