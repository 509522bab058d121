"""What there is: strategies, compressors and optimizers, with their options and what they refuse."""

from __future__ import annotations

from types import MappingProxyType

from results.cell import Cell
from results.spec import Catalog, Entry, Option

_BUCKET_MB = Option(kind="float", default=25.0, minimum=0.001, help="MiB of gradients in one all-reduce")
_STATIC = Option(kind="bool", default=False, help="promise torch that the graph never changes")
_UNUSED = Option(kind="bool", default=False, help="look for parameters that a forward did not use")
_VIEW = Option(kind="bool", default=False, help="gradients are views of the buckets: one copy less")

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
    ],
)

COMPRESSIONS = Catalog(
    "compression", [Entry(name="none", help="gradients are exchanged as they are, in full precision")]
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


def refusal(cell: Cell) -> str | None:
    """Why a cell makes no sense, as a sentence for the report; None if it does."""
    strategy = STRATEGIES.parse(cell.strategy)
    if strategy.name == "single" and cell.gpus != 1:
        return "single runs on exactly 1"
    if strategy.name == "ddp" and cell.gpus < 2:
        return "ddp needs at least 2: on 1 there is nothing to exchange, and single is the same step"
    if strategy.name == "ddp" and strategy.flag("static_graph") and cell.accumulation > 1:
        return "ddp:static_graph=true does not go with accumulation: torch wants the first backward in sync"
    if cell.precision == "tf32" and cell.device == "cpu":
        return "tf32 exists on CUDA devices alone"
    if cell.backend == "nccl" and cell.device == "cpu":
        return "nccl moves data between CUDA devices alone; use gloo"
    return None
