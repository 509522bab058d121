"""The facts, without torch, of all strategies that shard parameters, gradients and optimizer state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from results.cell import Cell
from results.parts import ModelParts
from results.spec import Option
from strategies.closed_form.moments import AveragingBytes, Footprint, Gathered, built_whole, sharded_moments
from strategies.closed_form.sizes import Sizes, Units
from strategies.facts import StrategyFacts

OFFLOAD = Option(
    kind="str", default="none", choices=("none", "cpu"), help="where shards lie while they are not used"
)
PARAMS = Option(
    kind="str", default="fp32", choices=("fp32", "bf16"), help="data type in which parameters are gathered"
)


class ShardingFacts(StrategyFacts):
    """The memory is shards of 1/p, and the blocks that are gathered or averaged at a moment."""

    fixed_exchange = "it averages gradients into shards by its own collective"
    contiguous = "it cuts shards from parameters row by row"
    projected = True
    norm_in_double = True
    by_unit = True

    @property
    def shards(self) -> bool:
        return True

    @property
    def gathers_bf16(self) -> bool:
        return self.spec.word("params") == "bf16"

    @property
    def offloads(self) -> bool:
        return self.spec.word("offload") == "cpu"

    @property
    def differences(self) -> tuple[str, ...]:
        return ("gathers parameters in bf16",) if self.gathers_bf16 else ()

    def refusal(self, cell: Cell) -> str | None:
        if self.gathers_bf16 and cell.precision not in ("bf16", "float8"):
            return (
                f"{self.name}:params=bf16 computes in bf16: it needs --precision bf16 or float8, not "
                f"{cell.precision}"
            )
        return None

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        sizes = self.sizes(cell, parts)
        units = self.units(sizes)
        elsewhere = self.offloads and cell.device == "cuda"
        shard, trained = (0, 0) if elsewhere else (units.shard, units.trained.shard)
        state = sizes.state(trained)
        rest = Footprint(moment="update", parameters=shard, gradients=trained, optimizer=state)
        if parts.by_unit:
            if sizes.groups.tensor > 1:
                # While torch shards the first block, its tensor-parallel parts exist too.
                first = units.full_block // sizes.groups.shard_ranks
                most = sizes.split_by_layer(beside=first)
                yield Footprint(moment="model built", parameters=most, estimated=most)
            gathered = self.built(sizes, units)
            yield Footprint(moment="model built", parameters=shard, gathered=gathered, estimated=gathered)
        else:
            yield from built_whole(sizes, shard)
        yield from sharded_moments(sizes, units, rest, self.gathered(units), self.averaging(sizes, units))

    def updated_bytes(self, cell: Cell, parts: ModelParts) -> int:
        return self.units(self.sizes(cell, parts)).trained.shard

    @abstractmethod
    def units(self, sizes: Sizes) -> Units:
        """Return the units that are gathered."""

    def built(self, sizes: Sizes, units: Units) -> int:
        """Return the bytes of complete parameters, besides the shards, while a model is built unit by
        unit."""
        return max(units.full_around, units.full_block)

    @abstractmethod
    def gathered(self, units: Units) -> Gathered:
        """Return the gathered parameters during the backward pass and the update."""

    @abstractmethod
    def averaging(self, sizes: Sizes, units: Units) -> AveragingBytes:
        """Return the gradients that are being averaged into shards."""
