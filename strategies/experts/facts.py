"""Expert parallelism without torch: its option, the units of experts, and its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from results.cell import Cell
from results.errors import SpecError
from results.groups import Dimension, GroupLayout
from results.parts import VALUE_BYTES, ModelParts, Part
from results.spec import Option, Spec
from strategies.closed_form.terms import Term, term

OPTIONS = MappingProxyType(
    {
        "ep": Option(
            kind="int", default=1, minimum=1, help="ranks among which the experts of a layer are dealt"
        )
    }
)
_COUNT_BYTES = 8
"""Bytes of the number of rows of an expert."""


def require_even(text: str, groups: GroupLayout) -> GroupLayout:
    """Return the groups. Raises SpecError if the ranks of a stage do not divide into groups of `expert`."""
    ranks = groups.shard_ranks * groups.tensor
    if ranks % groups.expert:
        raise SpecError(
            f"{text} deals experts among ranks of shards, sequences and split layers, of which a stage has "
            f"{ranks}: use an ep that divides {ranks}"
        )
    return groups


def refusal(spec: Spec) -> str | None:
    """Return why the tokens of ranks are not different, as a sentence; None if they are."""
    tensor = spec.integer("tp")
    if spec.integer("ep") > 1 and tensor > 1 and not spec.flag("sequence"):
        return f"{spec.text} would give experts the same tokens from {tensor} ranks: add sequence=true"
    return None


class View(NamedTuple):
    """The units of one kind of parameters, and the ranks among which these are sharded."""

    of: str
    """The end of the names of its messages."""
    dimension: Dimension
    ranks: int
    padded: Callable[[Part], int]
    """Returns the bytes of a rank's unit when it is gathered, in full precision, padded to equal shards."""


@lru_cache
def views(groups: GroupLayout) -> list[View]:
    """Return the views of a sharded model: all parameters, or the parameters of experts and all others."""
    shards, tensor = groups.shard_ranks, groups.tensor
    if groups.expert == 1:
        return [View("", "shard", shards, lambda unit: VALUE_BYTES * unit.padded_values(shards, tensor))]
    same = groups.expert_shard

    def of_others(unit: Part) -> int:
        return VALUE_BYTES * unit.divided[0].padded_values(shards, tensor)

    def of_experts(unit: Part) -> int:
        return VALUE_BYTES * unit.divided[1].padded_values(same, groups.expert)

    return [View("", "shard", shards, of_others), View(" of experts", "expert-shard", same, of_experts)]


def row_messages(
    cell: Cell, parts: ModelParts, groups: GroupLayout, checkpoints: Callable[[int], bool], *, pieces: int = 1
) -> Iterator[Term]:
    """Yield the messages of layers of experts in one step: rows go to their experts and back in forward, and
    so do their gradients in backward; before the rows of forward the ranks exchange their numbers (Lepikhin
    et al. 2020, arXiv:2006.16668, section 3). Checkpointing repeats the forward pass; `checkpoints` returns
    whether the strategy itself recomputes a block, given by its index; `pieces` are the microbatches of a
    micro-batch.

    The bytes are computed for balanced routing. With other routing a rank sends back as many results as it
    has received rows.
    """
    rounds = cell.accumulation * pieces
    share = cell.batch_per_replica / groups.context / groups.tensor
    rows = counts = operations = 0.0
    for index, block in enumerate(parts.blocks):
        if block.dispatched:
            forwards = 2 if cell.activation_checkpointing or checkpoints(index) else 1
            rows += share * block.dispatched * (2 * forwards + 2)
            counts += rounds * forwards * _COUNT_BYTES * block.experts
            operations += rounds * (3 * forwards + 2)
    if operations:
        along: tuple[Dimension, int] = ("expert", groups.expert)
        yield term("rows of experts", "all-to-all", along, payload=rows + counts, operations=operations)
