"""What travels in one step, in closed form: bytes and operations of each collective.

Counted is a step of dense gradients; left out are buffers of BatchNorm, what ranks agree on in a few bytes
(overflows, a norm), and what only the first step sends. Activations are counted as fp32: under autocast those
of `tp`'s forward pass and of a pipeline's edges can be of half precision, and half of that.
"""

from __future__ import annotations

from results.cell import Cell
from results.parts import ModelParts
from strategies.catalog import STRATEGIES
from strategies.closed_form.terms import Term


def traffic(cell: Cell, parts: ModelParts) -> list[Term]:
    """All that the busiest rank of a cell sends in one step; nothing on one rank."""
    terms = STRATEGIES.facts(cell.strategy).terms(cell, parts)
    return [term for term in terms if term.payload_bytes]
