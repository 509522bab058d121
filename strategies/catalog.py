"""The catalogs: strategies, compressors, collectives and optimizers, with their options."""

from __future__ import annotations

from results.groups import GroupLayout
from results.registry import Registry
from strategies.auto import Auto
from strategies.collectives.catalog import COLLECTIVES
from strategies.compression.catalog import COMPRESSIONS
from strategies.ddp.facts import Ddp
from strategies.deepspeed.facts import DeepSpeed
from strategies.facts import StrategyFacts
from strategies.fsdp.facts import Fsdp, Hsdp, Manual
from strategies.local_sgd.facts import LocalSgd
from strategies.optimizers import OPTIMIZERS
from strategies.pipeline.facts import Pipeline
from strategies.scratch_ddp.facts import ScratchDdp
from strategies.scratch_fsdp.facts import ScratchFsdp
from strategies.single import Single
from strategies.tensor_parallel.facts import TensorParallel
from strategies.zero1.facts import Zero1

__all__ = ["COLLECTIVES", "COMPRESSIONS", "OPTIMIZERS", "STRATEGIES", "group_layout"]

STRATEGIES: Registry[StrategyFacts] = Registry(
    "strategy",
    (
        Single,
        Ddp,
        ScratchDdp,
        LocalSgd,
        Fsdp,
        Zero1,
        ScratchFsdp,
        Hsdp,
        Manual,
        Pipeline,
        TensorParallel,
        DeepSpeed,
        Auto,
    ),
    base=StrategyFacts,
    packaged={"horovod": "pip install ./docs/examples/horovod"},
)


def group_layout(strategy: str, gpus: int, node_size: int | None = None) -> GroupLayout:
    """Return the groups of the ranks of a launch; `node_size` None: all ranks are on one node.

    Raises SpecError, with advice, if the ranks do not divide into groups.
    """
    return STRATEGIES.facts(strategy).groups(gpus, node_size)
