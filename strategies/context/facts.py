"""Context parallelism without torch: its options and its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType

from results.cell import Cell
from results.groups import GroupLayout
from results.parts import ModelParts
from results.spec import Option
from strategies.closed_form.terms import Collective, Receivers, Term, term
from strategies.facts import uneven_tokens

ULYSSES, GATHERED = "ulysses", "gathered"
OPTIONS = MappingProxyType(
    {
        "cp": Option(kind="int", default=1, minimum=1, help="ranks that compute each sequence together"),
        "attention": Option(
            kind="str",
            default=ULYSSES,
            choices=(ULYSSES, GATHERED),
            help="with cp: exchange heads for tokens, or gather keys and values",
        ),
    }
)


def pieces(attention: str, ranks: int) -> int:
    """Return the number of equal pieces of a sequence, of which each of `ranks` ranks has one, or two."""
    return ranks if attention == ULYSSES else 2 * ranks


def uneven(attention: str, groups: GroupLayout, tokens: int, heads: int | None) -> str | None:
    """Return why sequences of `tokens` tokens do not divide among ranks, as a clause; None if they do.

    `heads` are the heads of queries; None: not known.
    """
    if reason := uneven_tokens(tokens, pieces(attention, groups.context)):
        return reason
    ranks = groups.tensor * groups.context
    if attention == ULYSSES and heads is not None and heads % ranks:
        return f"{heads} attention heads do not divide by {ranks} ranks: use attention=gathered"
    return None


def attention_messages(
    cell: Cell,
    parts: ModelParts,
    groups: GroupLayout,
    attention: str,
    checkpoints: Callable[[int], bool],
    *,
    pieces: int = 1,
) -> Iterator[Term]:
    """Yield the messages of attention in one step.

    Ulysses (Jacobs et al. 2023, arXiv:2309.14509) exchanges queries, keys, values and the result of each
    block in forward, and their gradients in backward. `gathered` gathers keys and values in forward, and sums
    their gradients in backward (Llama 3, arXiv:2407.21783, section 3.3.2). Checkpointing repeats the forward
    pass; `checkpoints` returns whether the strategy itself recomputes a block, given by its index; `pieces`
    are the microbatches of a micro-batch. A model that repeats the heads of its keys exchanges the
    repeated ones.
    """
    ranks = groups.context
    share = cell.batch_per_replica / ranks / groups.tensor
    # Bytes of one exchanged tensor of each block, and the forward passes of the block.
    blocks = [
        (share * block.input, 2 if cell.activation_checkpointing or checkpoints(index) else 1)
        for index, block in enumerate(parts.blocks)
    ]
    along: Receivers = ("context", ranks)

    def total(what: str, collective: Collective, tensors: Callable[[int], int], copies: int = 1) -> Term:
        payload = copies * sum(size * tensors(forwards) for size, forwards in blocks)
        operations = cell.accumulation * pieces * sum(tensors(forwards) for _, forwards in blocks)
        return term(what, collective, along, payload=payload, operations=operations)

    if attention == ULYSSES:
        yield total("heads", "all-to-all", lambda forwards: 4 * forwards + 4)
        return
    yield total("keys and values", "all-gather", lambda forwards: 2 * forwards)
    summed: Collective = "reduce-scatter" if cell.backend == "nccl" else "all-reduce"
    yield total("gradients of keys and values", summed, lambda _: 2, copies=ranks)
