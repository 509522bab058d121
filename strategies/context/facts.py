"""Context parallelism without torch: its options and its messages."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from results.cell import Cell
from results.groups import GroupLayout
from results.parts import ModelParts
from results.spec import Option
from strategies.closed_form.terms import Collective, Receivers, Term, term

OPTIONS = MappingProxyType(
    {
        "cp": Option(kind="int", default=1, minimum=1, help="ranks that compute each sequence together"),
        "attention": Option(
            kind="str",
            default="ulysses",
            choices=("ulysses", "gathered"),
            help="with cp: exchange heads for tokens, or gather keys and values",
        ),
    }
)


def attention_messages(cell: Cell, parts: ModelParts, groups: GroupLayout, attention: str) -> Iterator[Term]:
    """Yield the messages of attention in one step.

    Ulysses (Jacobs et al. 2023, arXiv:2309.14509) exchanges queries, keys, values and the result of each
    block in forward, and their gradients in backward. `gathered` gathers keys and values in forward, and sums
    their gradients in backward (Llama 3, arXiv:2407.21783, section 3.3.2). Checkpointing repeats the forward
    pass. A model that repeats the heads of its keys exchanges the repeated ones.
    """
    ranks = groups.context
    rounds = cell.accumulation * len(parts.blocks)
    bytes_of_blocks = sum(block.input for block in parts.blocks)
    each = cell.batch_per_replica * bytes_of_blocks / ranks / groups.tensor
    forwards = 2 if cell.activation_checkpointing else 1
    along: Receivers = ("context", ranks)
    if attention == "ulysses":
        passes = 4 * forwards + 4
        yield term("heads", "all-to-all", along, payload=passes * each, operations=passes * rounds)
        return
    gathers = 2 * forwards
    yield term("keys and values", "all-gather", along, payload=gathers * each, operations=gathers * rounds)
    summed: Collective = "reduce-scatter" if cell.backend == "nccl" else "all-reduce"
    yield term("gradients of keys and values", summed, along, payload=2 * ranks * each, operations=2 * rounds)
