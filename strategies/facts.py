"""The facts of a strategy, without torch: for planning, predictions, the proof and the report."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from results.cell import Cell
from results.engine import Engine
from results.errors import SpecError
from results.groups import GroupLayout
from results.parts import ModelParts
from results.registry import CatalogFacts
from strategies.closed_form.moments import Footprint, step_moments
from strategies.closed_form.sizes import Sizes
from strategies.closed_form.terms import Term
from strategies.promise import Promise

Complexity = tuple[int, ...]
"""How much the user of a strategy has to understand; `auto` prefers the least. The first number is 0 for one
device, 1 for replicas, 2 for shards by torch, 3 for shards by us, 4 for shards inside of nodes,
5 for split layers, 6 for shards of split layers or sequences, 7 for offloading, 8 for stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPoint:
    """The point of the matrix for which `auto` chooses a strategy."""

    cell: Cell
    """Its strategy and micro-batch are ignored."""
    node_size: int
    """Ranks of a node."""
    blocks: int
    """Blocks of the model."""
    micro_batch: Callable[[str], int | str]
    """Returns the samples of a micro-batch with a strategy, or why the strategy makes no sense there."""
    tokens: int | None = None
    """Tokens of a sample; None: samples are not tokens, or their number is not known."""
    heads: int | None = None
    """Attention heads of queries; None: not known."""
    experts: int = 0
    """Experts of a layer; 0: none, or their number is not known."""

    @property
    def several_nodes(self) -> bool:
        return self.node_size < self.cell.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A strategy that `auto` may take."""

    strategy: str
    complexity: Complexity
    refused: str | None = None
    """Why it makes no sense, if that is known before its cell is built."""
    varied: bool = True
    """Whether `bench tune` tries it with other values of its main options, too."""


class StrategyFacts(CatalogFacts):
    """The facts of one strategy with its options; the defaults describe replicas that average gradients."""

    model: ClassVar[str]
    """The `ParallelModel`, as `package.module:Class`; imported only on a rank."""
    places = ("model",)
    checked: ClassVar[tuple[str, ...]] = ()
    """Variants that `bench check` tries on two ranks as well."""
    engine: ClassVar[Engine | None] = None
    """The package that trains, and that need not be installed; None: torch and bench do."""
    distributed: ClassVar[bool | None] = True
    """Whether it uses more than one rank; None: it takes any number of them."""
    bucket_copies: ClassVar[int] = 0
    """Copies of all trained parameters that a rank has in addition to them and their gradients (buckets)."""
    takes_ddp_hooks: ClassVar[bool] = False
    """Whether a compressor can be a hook of torch's DistributedDataParallel."""
    fixed_exchange: ClassVar[str | None] = None
    """Why no compressor or collective can be chosen; None: any can."""
    by_blocks: ClassVar[bool] = False
    """Whether it depends on the number of blocks of a model: see `unfit`."""
    contiguous: ClassVar[str | None] = None
    """Why parameters must lie row by row in memory; None: they need not."""
    eager: ClassVar[str | None] = None
    """Why the model cannot be compiled; None: it can."""
    projected: ClassVar[bool] = False
    """Whether `bench project` projects its sizes to larger ones."""
    unprojected: ClassVar[str] = "no law is known for its steps"
    """Why sizes of a strategy that is not `projected` are not, as a clause."""
    norm_in_double: ClassVar[bool] = False
    """Whether clipping adds up the squares of gradients in double precision, as `clip_shards` does."""
    by_unit: ClassVar[bool] = False
    """Whether its model takes a module on the meta device, and gives it initial values unit by unit
    (`Setting.fill`)."""

    # Planning

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        """Return the groups of the ranks; `node_size` None: all ranks are on one node.

        Raises SpecError, with advice, if the ranks do not divide into groups.
        """
        return GroupLayout(replicate=ranks)

    def applies(self, workload: str) -> bool:
        """Return whether it is a strategy of a workload. The matrix has no point for another workload."""
        return True

    def refusal(self, cell: Cell) -> str | None:
        """Return why this strategy's own rules refuse a cell, as a sentence; None if they do not."""
        return None

    def redundant(self, cell: Cell) -> str | None:
        """Return which other strategy does the same there, as a sentence; a plan contains only that
        strategy."""
        return None

    @property
    def attention(self) -> str | None:
        """How the ranks of a sequence exchange for attention; None: no sequence is split."""
        return None

    @property
    def gathers_keys(self) -> bool:
        """Whether attention keeps the keys and values of all ranks of a sequence."""
        return False

    @property
    def splits_tokens(self) -> bool:
        """Whether the ranks that compute each layer together have a part of the tokens between its split
        layers."""
        return False

    @property
    def of_process(self) -> str:
        """The settings of the whole process that it runs in; cells with others need another launch."""
        return ""

    def misplaced(self, groups: GroupLayout, node_size: int) -> str | None:
        """Return why it makes no sense on nodes of `node_size` ranks; None if it does, or ignores nodes."""
        return None

    def unfit(self, cell: Cell, blocks: int) -> str | None:
        """Return why it does not fit a model of `blocks` blocks; None if it does."""
        return None

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        """Yield the variants that `auto` may choose at a point; none by default."""
        return iter(())

    # The training step

    @property
    def microbatches(self) -> int:
        """Pieces that a replica's micro-batch is cut into, each with a forward and a backward pass."""
        return 1

    @property
    def shards(self) -> bool:
        """Whether no rank has the complete gradients when it updates."""
        return False

    @property
    def sums_micro_batches(self) -> bool:
        """Whether gradients are summed over the ranks in every micro-batch, so that none keeps its own."""
        return False

    @property
    def gathers_bf16(self) -> bool:
        """Whether parameters are gathered, and computed with, in bfloat16."""
        return False

    @property
    def averages_half(self) -> bool:
        """Whether gradients are averaged in half precision, in every cell."""
        return False

    @property
    def own_layers(self) -> bool:
        """Whether it replaces functions of torch by others, which add up in another order."""
        return False

    @property
    def offloads(self) -> bool:
        """Whether shards lie in host memory while they are not used."""
        return False

    def checkpoints(self, block: int) -> bool:
        """Return whether it recomputes the activations of a block, given by its index, in backward."""
        return False

    def in_flight(self, cell: Cell, rank: int) -> int | None:
        """Return the maximum number of microbatches between forward and backward on the stage of `rank`, a
        rank of a pipeline; None for a strategy without a schedule."""
        return None

    def placement(self, ranks: int) -> list[list[int]]:
        """Return the stages of each rank of a pipeline if ranks have several; else nothing."""
        return []

    @property
    def promise(self) -> Promise:
        """The promise that the proof checks."""
        return Promise()

    @property
    def differences(self) -> tuple[str, ...]:
        """How its training differs from plain data parallelism, in words such as `averages every 4 steps`."""
        return ()

    # Predictions

    def sizes(self, cell: Cell, parts: ModelParts) -> Sizes:
        """Return the sizes of a rank of `cell`."""
        return Sizes(
            cell,
            parts,
            self.groups(cell.gpus, cell.node_size),
            self.checkpoints,
            gathers_keys=self.gathers_keys,
            splits_tokens=self.splits_tokens,
        )

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        """Yield the memory of the fullest rank at each moment at which it may be largest."""
        return step_moments(*self.whole_model(cell, parts))

    def whole_model(self, cell: Cell, parts: ModelParts) -> tuple[Sizes, Footprint]:
        """Return the sizes of a rank that has every layer, or a part of each, and the memory that it always
        holds."""
        sizes = self.sizes(cell, parts)
        trained = sizes.trained
        base = Footprint(
            moment="update",
            parameters=sizes.parameters,
            gradients=trained,
            optimizer=sizes.state(trained),
            buckets=self.bucket_copies * trained,
        )
        return sizes, base

    @abstractmethod
    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        """Yield the messages that the busiest rank sends in one step."""

    def updated_bytes(self, cell: Cell, parts: ModelParts) -> int:
        """Return the bytes of the parameters that the busiest rank updates."""
        return self.sizes(cell, parts).trained

    def busiest_share(self, cell: Cell, parts: ModelParts) -> float:
        """Return the share of a replica's computation that its busiest rank does. Only layers of the blocks
        are split."""
        blocks = sum(block.flops for block in parts.blocks)
        others = parts.flops - blocks
        groups = self.groups(cell.gpus, cell.node_size)
        return (others + blocks / groups.tensor) / groups.context / parts.flops

    def bubble(self, ranks: int) -> float:
        """Return the idle time of a rank relative to its computation, by the schedule."""
        return 0.0

    def replayed_bubble(self, ranks: int, seconds: Mapping[tuple[int, str], float]) -> float | None:
        """Return the share of a step in which the busiest rank of a pipeline idles, by the time of each part
        of a pass through each stage; None without stages."""
        return None


def quotient(what: str, ranks: int, parts: int) -> int:
    """Return `ranks` / `parts`. Raises SpecError, with the nearest sizes, if `parts` does not divide it."""
    if ranks % parts:
        near = nearest_multiples(ranks, parts)
        raise SpecError(f"{what} needs a multiple of {parts} ranks, not {ranks} (the nearest: {near})")
    return ranks // parts


def nearest_multiples(number: int, of: int) -> str:
    """Return the multiples of `of` just below and above `number`, such as `4 and 8`."""
    below = number // of * of
    return " and ".join(str(multiple) for multiple in (below, below + of) if multiple)


def uneven_tokens(tokens: int, pieces: int) -> str | None:
    """Return that sequences of `tokens` tokens do not divide into equal pieces, with the nearest lengths that
    do, as a clause; None if they divide."""
    if tokens % pieces == 0:
        return None
    nearest = nearest_multiples(tokens, pieces)
    return f"{tokens} tokens do not divide into {pieces} pieces (the nearest lengths: {nearest})"
