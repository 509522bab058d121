"""Which computations of a cell can be repeated bit for bit, and how many terms are summed in any order."""

from __future__ import annotations

from results.cell import Cell
from strategies.catalog import STRATEGIES


def exact_arithmetic(cell: Cell) -> bool:
    """Whether two computations of the same micro-batch give the same bits: not where several ranks compute
    it together, in pieces of its matrices or its samples."""
    return cell.device == "cpu" and cell.precision == "fp32" and not cell.compile and cell.model_parallel == 1


def exact_update(cell: Cell) -> bool:
    """Whether two updates by the same gradients give the same bits: a norm over shards is summed in another
    order than one over whole gradients."""
    return exact_arithmetic(cell) and not (
        cell.clip_norm is not None and STRATEGIES.facts(cell.strategy).shards
    )


def summed_terms(cell: Cell, replicas: int) -> int:
    """What is added up in an order of the strategy's own: whole replicas, or each micro-batch of each."""
    return replicas * cell.accumulation if STRATEGIES.facts(cell.strategy).sums_micro_batches else replicas


def sizes_matter(cell: Cell, replicas: int) -> bool:
    """Whether a comparison is bounded by the absolute values of what is summed: that of a lossy exchange is,
    and that of a sum of more than two terms, element by element."""
    return cell.compresses or (exact_arithmetic(cell) and summed_terms(cell, replicas) > 2)
