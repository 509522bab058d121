"""`deepspeed` without torch, and without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from types import MappingProxyType

from results.cell import Cell
from results.engine import Engine
from results.groups import GroupLayout
from results.parts import VALUE_BYTES, ModelParts
from results.spec import Option
from strategies.closed_form.moments import Footprint, step_moments
from strategies.closed_form.terms import Overlap, Receivers, Term, gradients_ready, term
from strategies.facts import StrategyFacts
from strategies.sharding import OFFLOAD

_OF_STAGE = MappingProxyType(
    {
        "reduce_bucket_size": 1,
        "overlap_comm": 1,
        "offload": 1,
        "prefetch_bucket_size": 3,
        "max_live_parameters": 3,
    }
)
"""The first stage that reads each option."""


class DeepSpeed(StrategyFacts):
    """The facts of DeepSpeed's engine; options have the names that DeepSpeed's configuration gives them.

    `differences` are empty, as a clause would leave the engine out of every purchase. A proven cell has no
    parameter that a step does not use, and an update that DeepSpeed leaves out ends its run.
    """

    name = "deepspeed"
    help = "DeepSpeed's own engine: replicas, or ZeRO stage 1, 2 or 3"
    options = MappingProxyType(
        {
            "stage": Option(
                kind="int",
                default=0,
                minimum=0,
                maximum=3,
                help="ZeRO stage: 0 replicas, 1 shards the optimizer's state, 2 also gradients, 3 also "
                "parameters",
            ),
            "reduce_bucket_size": Option(
                kind="int",
                default=500_000_000,
                minimum=1,
                help="values of gradients that are averaged at once",
            ),
            "overlap_comm": Option(
                kind="bool",
                help="average gradients during backward; absent: DeepSpeed's choice for the stage",
            ),
            "offload": OFFLOAD,
            "prefetch_bucket_size": Option(
                kind="int", default=50_000_000, minimum=0, help="stage 3: values that are gathered ahead"
            ),
            "max_live_parameters": Option(
                kind="int",
                default=0,
                minimum=0,
                help="stage 3: values that may stay gathered; DeepSpeed's default of 1000000000 gathers a "
                "smaller model once and shards nothing",
            ),
        }
    )
    engine = Engine(
        package="deepspeed",
        module="deepspeed",
        release="0.19.8",
        install="DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.8",
        device_variable="DS_ACCELERATOR",
    )
    model = "strategies.deepspeed.model:DeepSpeedModel"
    fixed_exchange = "DeepSpeed averages gradients by its own collectives"
    contiguous = "DeepSpeed keeps parameters in flat vectors"
    eager = "its hooks gather and free parameters, which torch.compile cannot trace; leave --compile out"

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.spec.integer("stage")

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        return GroupLayout(shard=ranks) if self.stage else GroupLayout(replicate=ranks)

    def refusal(self, cell: Cell) -> str | None:
        if cell.precision == "fp16":
            return (
                f"{self.spec.text} does not go with --precision fp16: DeepSpeed's own scaling of the loss is "
                f"not built here for GPUs, and it computes in fp16 on no CPU; use bf16"
            )
        if cell.precision == "float8":
            return f"{self.spec.text} does not go with --precision float8, which was not tried; use bf16"
        if self.stage == 3 and cell.activation_checkpointing == "selective":
            return (
                f"{self.spec.text} does not go with --selective-checkpointing: DeepSpeed's linear layers add "
                f"their bias to the products that are kept, and again in backward; use "
                f"--activation-checkpointing"
            )
        for key, first in _OF_STAGE.items():
            if self.stage < first and self._given(key):
                return f"{self.spec.text}: {key} needs stage={first} at least, and the stage is {self.stage}"
        if not self.live and self._given("prefetch_bucket_size"):
            return (
                f"{self.spec.text}: prefetch_bucket_size needs max_live_parameters above 0: DeepSpeed "
                f"gathers ahead only what may stay gathered"
            )
        return None

    def _given(self, key: str) -> bool:
        return self.spec.options[key] != self.options[key].default

    @property
    def live(self) -> int:
        """The values that may stay gathered at stage 3."""
        return self.spec.integer("max_live_parameters")

    @property
    def shards(self) -> bool:
        return self.stage > 0

    @property
    def sums_micro_batches(self) -> bool:
        return self.stage > 1

    @property
    def own_layers(self) -> bool:
        return self.stage == 3

    @property
    def offloads(self) -> bool:
        return self.spec.word("offload") == "cpu"

    @property
    def overlaps(self) -> bool:
        """Whether gradients are averaged during backward."""
        asked = self.spec.options["overlap_comm"]
        return self.stage == 3 if asked is None else bool(asked)

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        """Yield the moments of a rank with every layer: an upper estimate, as DeepSpeed frees much of it."""
        sizes, base = self.whole_model(cell, parts)
        if not self.stage:
            return step_moments(sizes, replace(base, buckets=sizes.trained))
        trained, whole = sizes.trained, sizes.parameters
        shard, own = self._share(whole, cell.gpus), self._share(trained, cell.gpus)
        if self.offloads and cell.device == "cuda":
            shard = own = 0
        # A bucket is filled in a buffer, of which there are two if the next one is filled meanwhile, and is
        # copied to be summed. A CPU without a limit gives a buffer the memory that is used.
        bucket = VALUE_BYTES * self.spec.integer("reduce_bucket_size")
        buffers = bucket * (2 if self.overlaps and self.stage < 3 else 1)
        if cell.device == "cpu" and cell.memory_limit_mb is None:
            buffers = min(trained, buffers)
        buckets = buffers + min(trained, bucket)
        rest = replace(
            base,
            parameters=own + (shard if self.stage == 3 else whole),
            optimizer=sizes.state(own),
            gradients=own if self.stage > 1 else trained,
            buckets=buckets,
        )
        return (replace(one, estimated=one.estimated + buckets + own) for one in step_moments(sizes, rest))

    def updated_bytes(self, cell: Cell, parts: ModelParts) -> int:
        trained = self.sizes(cell, parts).trained
        return self._share(trained, cell.gpus) if self.stage else trained

    @staticmethod
    def _share(whole: int, ranks: int) -> int:
        """Return the bytes of a rank's part of `whole` bytes, rounded up to a value."""
        return VALUE_BYTES * ceil(whole / VALUE_BYTES / ranks)

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        trained = VALUE_BYTES * parts.trained.values
        group: Receivers = ("shard" if self.stage else "replicate"), cell.gpus
        rounds = cell.accumulation if self.sums_micro_batches else 1
        backward: Overlap = "backward" if self.sums_micro_batches else "last backward"
        beside = self.overlaps and cell.device == "cuda"
        yield term(
            "gradients",
            "reduce-scatter" if self.stage == 3 else "all-reduce",
            group,
            payload=rounds * trained,
            operations=rounds * self._buckets(parts),
            overlap=backward if beside else "none",
        )
        if self.stage == 3:
            yield self._gathering(cell, parts, group, overlap="compute" if beside else "none")
        elif self.stage:
            yield term("updated parameters", "all-gather", group, payload=trained / cell.gpus, operations=1)

    def _gathering(self, cell: Cell, parts: ModelParts, group: Receivers, *, overlap: Overlap) -> Term:
        """Each module is gathered by itself, forward and backward; their number is not in the parts.

        With checkpointing blocks are gathered once more; an upper estimate. What is used again before as many
        values as may stay gathered, forward and backward, is not gathered again.
        """
        whole = VALUE_BYTES * parts.values
        blocks = sum(block.values for block in parts.blocks) if cell.activation_checkpointing else 0
        sent = max(whole, 2 * whole + VALUE_BYTES * blocks - VALUE_BYTES * self.live / 2)
        return term(
            "parameters",
            "all-gather",
            group,
            payload=cell.accumulation * sent / cell.gpus,
            operations=cell.accumulation * (1 if self.live else 2 * len(parts.parts)),
            overlap=overlap,
        )

    def _buckets(self, parts: ModelParts) -> int:
        """Count the buckets that gradients fill, in the reverse order of registration."""
        limit = VALUE_BYTES * self.spec.integer("reduce_bucket_size")
        count, held = 1, 0
        for size, _ in gradients_ready(parts.trained):
            if held and held + size > limit:
                count, held = count + 1, 0
            held += size
        return count
