"""The load of experts from the rows of the ranks, by hand."""

from __future__ import annotations

import msgspec

from results.derivation.load import busiest_expert, dropped_flops, dropped_share, rows_by_rank
from results.record import ExpertRows
from results.run import BusiestExpert


def _rows(module: str, rows: list[int], first: int = 0) -> ExpertRows:
    return ExpertRows(module=module, first=first, rows=rows)


def test_rows_of_ranks_are_of_a_step_and_those_of_replicas_are_added_up(two) -> None:
    """Six steps. Layer a: experts of 24 + 12, 12 + 12 and 12 + 36 rows, 36 on average; layer b: all 24."""
    each = (
        [_rows("a", [24, 12, 12]), _rows("b", [12] * 3)],
        [_rows("a", [12, 12, 36]), _rows("b", [12] * 3)],
    )
    found = two(experts=each, even_workload="even")
    assert found.busiest_expert == BusiestExpert(module="a", expert=2, times_mean=48 / 36)
    assert found.even_workload == "even"


def test_experts_that_are_split_over_ranks_are_of_one_layer(cell_of, record_of) -> None:
    """Expert 3 has 60 of 120 rows, 30 on average; rank 1 has 90 in 6 steps."""
    rows = ([_rows("a", [10, 20])], [_rows("a", [30, 60], first=2)])
    ranks = [record_of(cell_of(), rank, experts=own) for rank, own in enumerate(rows)]
    assert busiest_expert(ranks) == BusiestExpert(module="a", expert=3, times_mean=2.0)
    assert rows_by_rank(ranks) == [5.0, 15.0]


def test_without_counts_nothing_is_known_and_no_rows_are_no_load(two, cell_of, record_of) -> None:
    assert two().busiest_expert is None
    assert rows_by_rank([record_of(cell_of(), 0)]) is None
    idle = [record_of(cell_of(), 0, experts=[_rows("a", [0, 0])])]
    assert (rows_by_rank(idle), busiest_expert(idle)) == ([0.0], None)


def test_flops_of_dropped_rows_are_left_out_once_for_each_replica(cell_of, record_of, two) -> None:
    """Six steps. A row costs 10 FLOPs forward, and 20 backward."""
    drops = [ExpertRows(module="a", first=0, rows=[12], dropped=number, row_flops=10) for number in (6, 18)]
    ranks = [record_of(cell_of(), rank, experts=[own]) for rank, own in enumerate(drops)]
    assert dropped_flops(ranks, 2) == 30 * 24 / 6
    assert (dropped_share(ranks), two().dropped_share) == (24 / (24 + 24), None)
    # Two ranks of a replica compute the same tokens.
    assert dropped_flops([ranks[0], ranks[0]], 1) == 30 * 6 / 6
    # Two stages have a layer each.
    stages = [ranks[0], record_of(cell_of(), 1, experts=[msgspec.structs.replace(drops[1], module="b")])]
    assert dropped_flops(stages, 1) == 30 * 24 / 6
    assert two().flops_per_step - two(experts=tuple([own] for own in drops)).flops_per_step == 30 * 24 / 6
