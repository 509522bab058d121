"""`fsdp`, `hsdp` and `manual` without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType

from results.cell import Cell
from results.groups import GroupLayout
from results.parts import VALUE_BYTES, ModelParts, Part
from results.spec import Entry, Option
from strategies.closed_form.moments import AveragingBytes, Footprint, Gathered
from strategies.closed_form.sizes import Sizes, Units
from strategies.closed_form.terms import (
    Collective,
    Overlap,
    Piece,
    Receivers,
    Term,
    gatherings_of_units,
    sums_of_units,
    term_of,
)
from strategies.context.facts import GATHERED, ULYSSES, attention_messages
from strategies.context.facts import OPTIONS as CONTEXT
from strategies.experts.facts import OPTIONS as EXPERTS
from strategies.experts.facts import View, require_even, row_messages, views
from strategies.experts.facts import refusal as same_tokens
from strategies.facts import AutoPoint, Proposal, quotient
from strategies.fsdp.block_choices import BlockChoice, canonical, read_choices
from strategies.sharding import OFFLOAD, PARAMS, ShardingFacts
from strategies.tensor_parallel.facts import OPTIONS as SEQUENCE
from strategies.tensor_parallel.facts import activation_messages

_ALL_BLOCKS = {
    "prefetch": Option(
        kind="int",
        default=0,
        minimum=0,
        maximum=8,
        help="blocks that are gathered ahead",
        tuned=("0", "1"),
    ),
    "params": PARAMS,
    "tp": Option(kind="int", default=1, minimum=1, help="ranks that compute each layer together"),
    **SEQUENCE,
    **CONTEXT,
    **EXPERTS,
}
_OPTIONS = MappingProxyType(
    {
        "reshard": Option(
            kind="bool",
            default=True,
            help="free complete parameters between forward and backward: ZeRO-3",
            tuned=("true", "false"),
        ),
        "offload": OFFLOAD,
        **_ALL_BLOCKS,
    }
)
_DEGREES = (1, 2, 4, 8)
"""The numbers of ranks that compute each layer, or each sequence, together from which `auto` chooses."""


def padded_bytes(groups: GroupLayout, unit: Part) -> int:
    """Return the bytes of a rank's unit in full precision when it is gathered, padded to equal shards."""
    return sum(view.padded(unit) for view in views(groups))


def shard_bytes(groups: GroupLayout, unit: Part) -> int:
    """Return the bytes of a rank's shard of a unit in full precision."""
    return sum(view.padded(unit) // view.ranks for view in views(groups))


def units_of(sizes: Sizes, *, halved: bool, parts: ModelParts | None = None) -> Units:
    """Return the units of `parts`, as `Units` does for the padding of torch's FSDP2."""
    groups = sizes.groups
    shard = partial(shard_bytes, groups) if groups.expert > 1 else None
    return Units(sizes, full=partial(padded_bytes, groups), shard=shard, halved=halved, parts=parts)


class Fsdp2Facts(ShardingFacts):
    """The facts of all strategies that use torch's `fully_shard`.

    A unit is gathered in one piece, which is then copied into its parameters; gradients are copied into one
    piece, which Gloo copies again to sum it. The piece of the last block is kept until the next forward pass.
    """

    model = "strategies.fsdp.model:FsdpModel"

    def choices(self, blocks: int) -> list[BlockChoice]:
        """Return the choices for each of `blocks` blocks, in the order of the forward pass."""
        alike = BlockChoice(reshard=self.spec.flag("reshard"), offload=self.offloads)
        return [alike] * blocks

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        tensor, context = self.spec.integer("tp"), self.spec.integer("cp")
        shard = quotient(self.spec.text, ranks, tensor * context)
        expert = self.spec.integer("ep")
        return require_even(
            self.spec.text, GroupLayout(shard=shard, context=context, tensor=tensor, expert=expert)
        )

    @property
    def gathers_keys(self) -> bool:
        return self.attention == GATHERED

    @property
    def attention(self) -> str | None:
        return self.spec.word("attention") if self.spec.integer("cp") > 1 else None

    @property
    def splits_tokens(self) -> bool:
        return self.spec.flag("sequence")

    def redundant(self, cell: Cell) -> str | None:
        if cell.gpus == self.spec.integer("tp") and self.spec.integer("ep") == 1:
            same = "tp:sequence=true" if self.splits_tokens else "tp"
            nothing = f"{self.spec.text} leaves nothing to shard on {cell.gpus} ranks"
            return f"{nothing}: use {same}, which is the same"
        return None

    def refusal(self, cell: Cell) -> str | None:
        if self.attention is None and self.spec.word("attention") != ULYSSES:
            return f"{self.spec.text} splits no sequence: add cp=2, or leave attention out"
        if self.splits_tokens and self.spec.integer("tp") == 1:
            return f"{self.spec.text} splits no layers: add tp=2, or leave sequence out"
        if same := same_tokens(self.spec):
            return same
        if cell.compile and any(self.spec.integer(option) > 1 for option in ("tp", "cp", "ep")):
            return (
                f"{self.spec.text} does not go with --compile: it exchanges activations inside of layers, "
                f"which torch.compile cannot trace; leave --compile out"
            )
        return super().refusal(cell)

    def units(self, sizes: Sizes) -> Units:
        return units_of(sizes, halved=self.gathers_bf16)

    def built(self, sizes: Sizes, units: Units) -> int:
        weights = (weight for block in sizes.parts.blocks for weight in block.weights if weight.experts)
        # The experts of one matrix are complete until each rank has its own.
        dealt = max((weight.values for weight in weights), default=0) if sizes.groups.expert > 1 else 0
        return super().built(sizes, units) + VALUE_BYTES * dealt

    def gathered(self, units: Units) -> Gathered:
        choices = self.choices(len(units.blocks))
        stays = units.around + sum(
            block for block, choice in zip(units.blocks, choices, strict=True) if not choice.reshard
        )
        resharded = any(choice.reshard for choice in choices)
        ahead = (1 + self.spec.integer("prefetch")) * units.block if resharded else 0
        return Gathered(
            at_loss=stays + units.block, at_block=stays + units.block + ahead, at_end=units.around
        )

    def averaging(self, sizes: Sizes, units: Units) -> AveragingBytes:
        return AveragingBytes(
            held=units.trained.whole if sizes.accumulates else 0,
            at_block=2 * units.trained.full_block,
            at_end=units.trained.full_block,
        )

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        groups = self.groups(cell.gpus, cell.node_size)
        after: Overlap = "last backward" if cell.device == "cuda" else "none"
        for view in views(groups):
            sums, of = sums_of_units(view.padded, parts), view.of
            if view.ranks > 1:
                yield self._gatherings(cell, parts, view)
                summed: Collective = "reduce-scatter" if cell.backend == "nccl" else "all-reduce"
                within: Receivers = (view.dimension, view.ranks)
                yield term_of(f"gradients{of}", summed, within, sums, overlap=after)
            if groups.replicate > 1:
                pieces = tuple(Piece(size / view.ranks, at) for size, at in sums)
                across: Receivers = ("replicate", groups.replicate)
                yield term_of(f"shards of gradients{of}", "all-reduce", across, pieces, overlap=after)
        if groups.tensor > 1:
            yield from activation_messages(cell, parts, groups, self.checkpoints, sequence=self.splits_tokens)
        if self.attention is not None:
            yield from attention_messages(cell, parts, groups, self.attention, self.checkpoints)
        if groups.expert > 1:
            yield from row_messages(cell, parts, groups, self.checkpoints)

    def _gatherings(self, cell: Cell, parts: ModelParts, view: View) -> Term:
        """Return the gatherings of a micro-batch: a block that was freed is gathered again for backward."""
        again = [choice.reshard for choice in self.choices(len(parts.blocks))]
        ahead: Overlap = "compute" if any(again) else "forward"
        if cell.device == "cpu" and not self.spec.integer("prefetch"):
            ahead = "none"
        each = view.ranks * (2 if self.gathers_bf16 else 1)
        pieces = gatherings_of_units(lambda unit: view.padded(unit) / each, parts, again, cell)
        within: Receivers = (view.dimension, view.ranks)
        what, rounds = f"parameters{view.of}", cell.accumulation
        return term_of(what, "all-gather", within, pieces, rounds=rounds, overlap=ahead)


def _grids(point: AutoPoint, name: str, ranks: int, last: int) -> Iterator[Proposal]:
    """Yield a strategy that shards over `ranks` ranks with layers and sequences that ranks of one node
    divide, so that something is left to shard; `last` is the last number of the complexity."""
    yield from _dealt(point, name, ranks, last)
    for tensor, context in product(_DEGREES, repeat=2):
        size = tensor * context
        if size == 1 or tensor == ranks or point.node_size % size:
            continue
        if context == 1:
            yield Proposal(strategy=f"{name}:tp={tensor}", complexity=(6, 1, size, 0, last))
        if point.tokens is not None:
            gathered = (point.heads or size) % size > 0
            words = [name, *_split_tokens(tensor, context, gathered)]
            dimensions = 1 + (min(tensor, context) > 1)
            order = (6, dimensions, size, context, last)
            yield Proposal(strategy=":".join(words), complexity=order, varied=False)


def _dealt(point: AutoPoint, name: str, ranks: int, last: int) -> Iterator[Proposal]:
    """Yield a strategy that deals experts among ranks of one node, if the model has any."""
    for expert in _DEGREES[1:] if point.experts else ():
        if not (point.experts % expert or point.node_size % expert or ranks % expert):
            yield Proposal(strategy=f"{name}:ep={expert}", complexity=(6, 1, expert, 0, last), varied=False)


def _split_tokens(tensor: int, context: int, gathered: bool) -> Iterator[str]:
    """Yield the options by which these ranks divide tokens; `gathered`: attention gathers keys and values."""
    if tensor > 1:
        yield f"tp={tensor}:sequence=true"
    if context > 1:
        yield f"cp={context}" + f":attention={GATHERED}" * gathered


class Fsdp(Fsdp2Facts):
    """Shards over all ranks."""

    name = "fsdp"
    help = "torch's FSDP2: parameters, gradients and optimizer state in shards, block by block"
    options = _OPTIONS
    checked = ("fsdp:cp=2",)
    aliases = (
        Entry(
            name="zero2",
            help="ZeRO-2: fsdp that keeps complete parameters until backward has ended",
            alias_of="fsdp:reshard=false",
        ),
        Entry(name="zero3", help="ZeRO-3: fsdp", alias_of="fsdp"),
    )

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        yield Proposal(strategy="zero2", complexity=(2, 2))
        yield Proposal(strategy="zero3", complexity=(2, 3))
        yield from _grids(point, "fsdp", point.cell.gpus, 0)
        if point.cell.device == "cuda":
            yield Proposal(strategy="fsdp:offload=cpu", complexity=(7,))


class Hsdp(Fsdp2Facts):
    """Shards over the ranks of a node, replicas over nodes."""

    name = "hsdp"
    help = "fsdp inside of each node, replicas across nodes"
    options = _OPTIONS

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        tensor, context = self.spec.integer("tp"), self.spec.integer("cp")
        node = min(node_size or ranks, ranks)
        what = f"{self.spec.text} on nodes of {node}"
        nodes, shard = quotient(what, ranks, node), quotient(what, node, tensor * context)
        groups = GroupLayout(
            replicate=nodes, shard=shard, context=context, tensor=tensor, expert=self.spec.integer("ep")
        )
        return require_even(self.spec.text, groups)

    def misplaced(self, groups: GroupLayout, node_size: int) -> str | None:
        instead = f"or use {self.spec.text.replace('hsdp', 'fsdp', 1)}"
        if groups.replicate == 1:
            return (
                f"hsdp shards inside of nodes and replicates across them, and there is only one node, of "
                f"{node_size}: give a smaller --node-size or --gpus-per-node, {instead}"
            )
        if groups.shard_ranks == 1:
            few = f"{self.spec.text} has nothing left to shard on nodes of {node_size}"
            return f"{few}: give a --node-size of more than {node_size}, {instead}"
        return None

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        if not point.several_nodes:
            return
        if point.node_size > 1:
            yield Proposal(strategy="hsdp", complexity=(4,))
        yield from _grids(point, "hsdp", point.node_size, 1)


class Manual(Fsdp2Facts):
    """A choice for each block."""

    name = "manual"
    help = "fsdp with a choice for each block: reshard or keep, with .checkpoint, .offload"
    projected = False
    unprojected = "its blocks differ, and the laws are of models whose blocks are treated alike"
    positional = Option(
        kind="str",
        canonical=canonical,
        help="a choice for each block",
        example="reshard.checkpoint*2+keep*2",
    )
    options = MappingProxyType(_ALL_BLOCKS)
    by_blocks = True

    @property
    def _text(self) -> str:
        return str(self.spec.positional)

    @property
    def offloads(self) -> bool:
        """False: parameters around the blocks stay on the device."""
        return False

    def choices(self, blocks: int) -> list[BlockChoice]:
        return read_choices(self._text)

    def checkpoints(self, block: int) -> bool:
        return read_choices(self._text)[block].checkpoint

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        """Yield the moments. They count offloaded blocks as if these were on the device: if a GPU offloads
        blocks, all bytes of a moment except the activations therefore count as estimated."""
        found = super().moments(cell, parts)
        if cell.device == "cuda" and any(choice.offload for choice in read_choices(self._text)):
            return (replace(each, estimated=each.total - each.activations) for each in found)
        return found

    def refusal(self, cell: Cell) -> str | None:
        if cell.activation_checkpointing:
            return (
                "manual does not take --activation-checkpointing and --selective-checkpointing: write "
                ".checkpoint behind the blocks that are to be checkpointed"
            )
        return super().refusal(cell)

    def redundant(self, cell: Cell) -> str | None:
        same = {BlockChoice(reshard=True): "", BlockChoice(reshard=False): "reshard=false"}
        [choice, *others] = dict.fromkeys(read_choices(self._text))
        if others or choice not in same:
            return super().redundant(cell)
        given = self.spec.text.removeprefix(f"manual:{self._text}").split(":")[1:]
        options = sorted([*given, *filter(None, [same[choice]])])
        plain = ":".join(["fsdp", *options])
        return f"{self.spec.text} makes the same choice for all blocks: use {plain}, which is the same"

    def unfit(self, cell: Cell, blocks: int) -> str | None:
        chosen = len(read_choices(self._text))
        if chosen != blocks:
            instead = f"write a choice for each of the {blocks}" if blocks else "use fsdp"
            return (
                f"{cell.workload} has {blocks} blocks, and {self.spec.text} chooses for {chosen}; {instead}"
            )
        return None
