"""The catalogs: strategies, compressors, collectives and optimizers, with their options."""

from __future__ import annotations

from results.groups import GroupLayout
from results.registry import Registry
from strategies.collectives.catalog import COLLECTIVES
from strategies.compression.catalog import COMPRESSIONS
from strategies.facts import StrategyFacts
from strategies.optimizers import OPTIMIZERS

__all__ = ["COLLECTIVES", "COMPRESSIONS", "OPTIMIZERS", "STRATEGIES", "group_layout"]

STRATEGIES: Registry[StrategyFacts] = Registry(
    "strategy",
    {
        "single": "strategies.single:Single",
        "ddp": "strategies.ddp.facts:Ddp",
        "scratch-ddp": "strategies.scratch_ddp.facts:ScratchDdp",
        "local-sgd": "strategies.local_sgd.facts:LocalSgd",
        **dict.fromkeys(("fsdp", "zero2", "zero3"), "strategies.fsdp.facts:Fsdp"),
        "zero1": "strategies.zero1.facts:Zero1",
        "scratch-fsdp": "strategies.scratch_fsdp.facts:ScratchFsdp",
        "hsdp": "strategies.fsdp.facts:Hsdp",
        "manual": "strategies.fsdp.facts:Manual",
        "pipeline": "strategies.pipeline.facts:Pipeline",
        "tp": "strategies.tensor_parallel.facts:TensorParallel",
        "deepspeed": "strategies.deepspeed.facts:DeepSpeed",
        "auto": "strategies.auto:Auto",
    },
    base=StrategyFacts,
    packaged={"horovod": "pip install ./docs/examples/horovod"},
)


def group_layout(strategy: str, gpus: int, node_size: int | None = None) -> GroupLayout:
    """Return the groups of the ranks of a launch; `node_size` None: all ranks are on one node.

    Raises SpecError, with advice, if the ranks do not divide into groups.
    """
    return STRATEGIES.facts(strategy).groups(gpus, node_size)
