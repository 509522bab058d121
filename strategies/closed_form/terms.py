"""One kind of message of a step, and the bytes that it sends over the wire.

The bytes on the wire follow from the standard algorithms (Thakur et al. 2005, IJHPCA 19(1), section 4). Each
of p ranks sends: all-reduce 2 (p - 1) / p n, reduce-scatter and all-gather (p - 1) / p n of the whole of n
bytes. Gloo runs torch's reduce-scatter as an all-reduce, which sends twice that; our own exchange runs it as
an all-to-all, which sends (p - 1) / p n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from results.cell import Cell
from results.groups import Dimension
from results.parts import VALUE_BYTES, ModelParts, Part

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send"]
Overlap = Literal["first forward", "forward", "last backward", "backward", "compute", "none"]
"""The computation that a message can overlap with: the forward or backward passes of one micro-batch or of
all of them, both, or none."""
Receivers = tuple[Dimension, int]
"""The receivers of a message: the ranks along a dimension, and their number."""

MIB = 2**20
BUCKET_BYTES = 25 * MIB
"""The size of a bucket of tensors that are exchanged at once, as in `strategies.exchange.buckets`."""


class Piece(NamedTuple):
    """One operation of a term."""

    payload_bytes: float
    share: float
    """The share of its pass after which a sum is ready, or before which a gathering is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One kind of message of a step, as sent by the rank that sends most of it."""

    what: str
    collective: Collective
    dimension: Dimension
    """The dimension of the groups within which it is sent."""
    ranks: int
    """Ranks of such a group."""
    payload_bytes: float
    """Bytes of the buffers that a rank hands over, over all operations; a mean over steps, if not every step
    sends it."""
    operations: float
    wire_factor: float
    """The ratio of the bytes that a rank sends to its payload."""
    overlap: Overlap
    pieces: tuple[Piece, ...] = ()
    """The operations of one round of the passes that it overlaps with, in their order; empty: they are taken
    to be equal, and spread evenly over the passes."""

    @property
    def wire_bytes(self) -> float:
        return self.wire_factor * self.payload_bytes


def term(
    what: str,
    collective: Collective,
    group: Receivers,
    *,
    payload: float,
    operations: float,
    overlap: Overlap = "none",
) -> Term:
    """Build a term; `payload` is in bytes, over all `operations` of a step."""
    dimension, ranks = group
    return Term(
        what=what,
        collective=collective,
        dimension=dimension,
        ranks=ranks,
        payload_bytes=payload,
        operations=operations,
        wire_factor=wire_factor(collective, ranks),
        overlap=overlap,
    )


def term_of(
    what: str,
    collective: Collective,
    group: Receivers,
    pieces: tuple[Piece, ...],
    *,
    overlap: Overlap,
    rounds: int = 1,
) -> Term:
    """Build a term whose operations are these pieces, in each of `rounds` rounds of a step."""
    payload, operations = rounds * sum(piece.payload_bytes for piece in pieces), rounds * len(pieces)
    whole = term(what, collective, group, payload=payload, operations=operations, overlap=overlap)
    return replace(whole, pieces=pieces)


def wire_factor(collective: Collective, ranks: int) -> float:
    """Return the bytes that one of `ranks` sends over its payload."""
    return _FACTORS[collective](ranks)


_FACTORS: dict[Collective, Callable[[int], float]] = {
    "all-reduce": lambda p: 2 * (p - 1) / p,
    "reduce-scatter": lambda p: (p - 1) / p,
    "all-to-all": lambda p: (p - 1) / p,
    # A rank sends its own shard, and forwards the shards of all other ranks but one.
    "all-gather": lambda p: p - 1,
    # Each byte starts at one rank and goes to p - 1 others, along a pipelined chain.
    "broadcast": lambda p: (p - 1) / p,
    "send": lambda p: 1.0,
}


def gradients_ready(parts: ModelParts) -> Iterator[tuple[int, float]]:
    """Yield the bytes of each gradient, and the share of a backward pass after which it is ready: last layer
    first.

    The share is a share of the FLOPs. Within a part it is divided by the number of parameters. A part without
    FLOPs (an embedding) has its gradients when the pass ends.
    """
    total, done = parts.flops, 0.0
    for part in reversed(parts.parts):
        held = 0
        for weight in reversed(part.weights):
            held += weight.values
            share = (done + part.flops * held / part.values) / total if total else 1.0
            yield VALUE_BYTES * weight.values, min(1.0, share)
        done += part.flops


def shares_before_blocks(parts: ModelParts) -> list[float]:
    """Return the share of a forward pass before each block, by FLOPs."""
    before = accumulate((block.flops for block in parts.blocks[:-1]), initial=parts.stem.flops)
    return [flops / parts.flops if parts.flops else 0.0 for flops in before] if parts.blocks else []


def sums_of_units(size: Callable[[Part], int], parts: ModelParts) -> tuple[Piece, ...]:
    """Return the sums of a sharded model in a backward pass: the last block first, last what is around the
    blocks; `size` returns the bytes of a unit. Units without trained parameters are left out."""
    trained, shares = parts.trained, [1.0 - share for share in shares_before_blocks(parts)]
    blocks = zip(reversed(trained.blocks), reversed(shares), strict=True)
    sums = [Piece(size(block), share) for block, share in blocks]
    return tuple(piece for piece in (*sums, Piece(size(trained.around), 1.0)) if piece.payload_bytes)


def gatherings_of_units(
    size: Callable[[Part], float], parts: ModelParts, again: Sequence[bool], cell: Cell
) -> tuple[Piece, ...]:
    """Return the gatherings of a sharded model in a micro-batch: what is around the blocks, then each block.

    `size` returns the bytes of a unit, and `again` says which blocks are gathered for backward as well. If no
    block is, shares are shares of the forward pass, else of both passes.
    """
    around, blocks = size(parts.around), [size(block) for block in parts.blocks]
    before = shares_before_blocks(parts)
    if not any(again):
        return _sent(Piece(around, 0.0), *map(Piece, blocks, before))
    # Backward takes twice as long as forward, and repeats it with activation checkpointing.
    forward = 1 / 4 if cell.activation_checkpointing is True else 1 / 3
    ends = [*before[1:], before[-1] + parts.blocks[-1].flops / (parts.flops or 1)]
    twice = [
        Piece(gathered, forward + (1 - forward) * (1 - end))
        for gathered, end, repeated in zip(blocks, ends, again, strict=True)
        if repeated
    ]
    once = (Piece(gathered, forward * share) for gathered, share in zip(blocks, before, strict=True))
    return _sent(Piece(around, 0.0), *once, *reversed(twice))


def _sent(*pieces: Piece) -> tuple[Piece, ...]:
    return tuple(piece for piece in pieces if piece.payload_bytes)


def runs(weights: list[int]) -> int:
    """Count the buckets of up to `BUCKET_BYTES` that parameters of these sizes fill; a larger parameter has
    its own bucket."""
    count, held = 0, 0
    for values in weights:
        size = VALUE_BYTES * values
        if count == 0 or held + size > BUCKET_BYTES:
            count, held = count + 1, 0
        held += size
    return count
