"""`scratch-fsdp` without torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import MappingProxyType

from results.cell import Cell
from results.groups import GroupLayout
from results.parts import VALUE_BYTES, ModelParts, Part
from results.spec import Option
from strategies.advice import SPLIT
from strategies.closed_form.moments import AveragingBytes, Gathered
from strategies.closed_form.sizes import HALF_BYTES, Sizes, Units
from strategies.closed_form.terms import Term, gatherings_of_units, sums_of_units, term_of
from strategies.facts import AutoPoint, Proposal
from strategies.sharding import OFFLOAD, PARAMS, ShardingFacts

MOST_UNDER_WAY = 2
"""The maximum number of flat vectors that are being averaged; the next one waits for the first of them."""


class ScratchFsdp(ShardingFacts):
    """Parameters are gathered in place; gradients are averaged from one vector, on CPU into a second one."""

    name = "scratch-fsdp"
    help = "ours on raw collectives: flat shards, gathered ahead; stage=1, 2, 3 is ZeRO 1, 2, 3"
    options = MappingProxyType(
        {
            "stage": Option(
                kind="int",
                default=3,
                minimum=1,
                maximum=3,
                help="ZeRO stage: 1 shards the optimizer's state, 2 also gradients, 3 also parameters",
            ),
            "prefetch": Option(
                kind="int",
                default=1,
                minimum=0,
                maximum=8,
                help="blocks that are gathered ahead",
                tuned=("1", "2"),
            ),
            "offload": OFFLOAD,
            "params": PARAMS,
        }
    )
    model = "strategies.scratch_fsdp.model:ScratchFsdpModel"
    eager = (
        f"it frees parameters between their uses, which torch.compile cannot trace; {SPLIT}, or leave "
        "--compile out"
    )

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.spec.integer("stage")

    @property
    def sums_micro_batches(self) -> bool:
        return self.stage > 1

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        return GroupLayout(shard=ranks)

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        for stage in (1, 2, 3):
            yield Proposal(strategy=f"scratch-fsdp:stage={stage}", complexity=(3, stage))

    def units(self, sizes: Sizes) -> Units:
        return Units(sizes, full=partial(self._flat, sizes.groups.shard), halved=self.gathers_bf16)

    def _flat(self, ranks: int, part: Part) -> int:
        """Return the bytes of a unit in full precision, padded to equal shards."""
        value_bytes = HALF_BYTES if self.gathers_bf16 else VALUE_BYTES
        return VALUE_BYTES * part.flat_values(ranks, value_bytes)

    def built(self, sizes: Sizes, units: Units) -> int:
        # Parameters are initialised one at a time, each in addition to the vector into which it is copied.
        return super().built(sizes, units) + VALUE_BYTES * sizes.parts.largest_weight

    def gathered(self, units: Units) -> Gathered:
        always = units.around + sum(units.blocks) if self.stage < 3 else 0
        ahead = min(1 + self.spec.integer("prefetch"), len(units.blocks)) * units.block
        part = always or units.around + ahead
        return Gathered(at_loss=part, at_block=part, at_end=always or units.around, at_update=always)

    def averaging(self, sizes: Sizes, units: Units) -> AveragingBytes:
        averaged = MOST_UNDER_WAY * (2 if sizes.cell.device == "cpu" else 1) * units.trained.full_block
        held = units.trained.shard if self.sums_micro_batches else units.trained.whole
        return AveragingBytes(held=held if sizes.accumulates else 0, at_block=averaged, at_end=averaged)

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        ranks, rounds = cell.gpus, cell.accumulation
        whole, each = partial(self._flat, ranks), ranks * (2 if self.gathers_bf16 else 1)
        at_each_use = self.stage == 3
        again = [at_each_use] * len(parts.blocks)
        pieces = gatherings_of_units(lambda unit: whole(unit) / each, parts, again, cell)
        yield term_of(
            "parameters",
            "all-gather",
            ("shard", ranks),
            pieces,
            rounds=rounds if at_each_use else 1,
            overlap="compute" if at_each_use else "first forward",
        )
        yield term_of(
            "gradients",
            "all-to-all" if cell.device == "cpu" else "reduce-scatter",
            ("shard", ranks),
            sums_of_units(whole, parts),
            rounds=rounds if self.sums_micro_batches else 1,
            overlap="backward" if self.sums_micro_batches else "last backward",
        )
