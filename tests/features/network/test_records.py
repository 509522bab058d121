"""From rank records to the network table: the slowest rank, the median, and its interval."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from builders import a_cell

from harness.features.network.derivation import network_table
from results.errors import SchemaError
from results.network import NetworkTimes, measured_groups
from results.outcome import Evidence
from results.record import RankRecord
from results.statistics import median_of


@pytest.fixture
def record(cell_of, record_of) -> Callable[..., RankRecord]:
    """The record of a rank with these rows, or what fields make of it."""
    return lambda rank, rows, **fields: record_of(cell_of(), rank, network=rows, **fields)


def times(*milliseconds: float, collective="all-reduce", payload=1024, ranks=2) -> NetworkTimes:
    return NetworkTimes(
        collective=collective,
        payload_bytes=payload,
        ranks=ranks,
        nodes=1,
        duration_ns=[each * 1e6 for each in milliseconds],
    )


def test_a_sample_lasts_as_long_as_on_its_slowest_rank(record) -> None:
    run = [record(0, [times(1, 5, 3)]), record(1, [times(2, 4, 1)])]
    # 2, 5 and 3 ms; fewer than six samples have their range.
    (found,) = network_table(a_cell(link_mbit_per_s=100.0), [run]).measurements
    assert (found.median_s, found.low_s, found.high_s) == pytest.approx((3e-3, 2e-3, 5e-3))
    assert found.runs == 3


def test_several_runs_are_pooled_and_their_medians_are_in_the_interval(record) -> None:
    runs = [[record(0, [times(*row)]), record(1, [times(*row)])] for row in ([1] * 9, [1] * 9, [4] * 9)]
    table = network_table(a_cell(), runs)
    (found,) = table.measurements
    assert (found.median_s, found.low_s, found.high_s) == pytest.approx((1e-3, 1e-3, 4e-3))
    assert found.runs == 27
    assert table.evidence is Evidence.MEASURED


def test_one_emulated_rank_makes_the_table_emulated(record) -> None:
    run = [record(0, [times(1)]), record(1, [times(1)], evidence=Evidence.EMULATED)]
    assert network_table(a_cell(), [run]).evidence is Evidence.EMULATED


@pytest.mark.parametrize("edited", [[], [times(1, 2)], [times()]])
def test_ranks_that_took_other_samples_are_refused(record, edited) -> None:
    with pytest.raises(SchemaError, match="all-reduce"):
        network_table(a_cell(), [[record(0, [times(1, 2, 3)]), record(1, edited)]])


@pytest.mark.parametrize(
    ("count", "below"),
    # Ranks of the ends of the 95 % interval of a median (Conover, Practical Nonparametric Statistics): with
    # n = 6 the extremes, with 10 the second and ninth value, with 20 the sixth and fifteenth.
    [(5, 0), (6, 0), (8, 0), (9, 1), (10, 1), (20, 5), (30, 9)],
)
def test_the_interval_of_a_median_is_by_order_statistics(count, below) -> None:
    median, low, high = median_of([float(value) for value in range(count, 0, -1)])
    assert (median, low, high) == ((count + 1) / 2, below + 1, count - below)


def test_groups_are_dense_inside_a_node_and_doubling_across() -> None:
    assert measured_groups(1, 1) == []
    assert [(len(ranks), nodes) for ranks, nodes in measured_groups(1, 4)] == [(2, 1), (3, 1), (4, 1)]
    found = measured_groups(6, 2)
    assert found[0] == ((0, 1), 1)
    # One rank of each node, then all ranks.
    assert found[1:3] == [((0, 2), 2), ((0, 2, 4), 3)]
    assert [(len(ranks), nodes) for ranks, nodes in found[1:]] == [
        *((2, 2), (3, 3), (4, 4), (6, 6)),
        *((4, 2), (6, 3), (8, 4), (12, 6)),
    ]
    assert [len(ranks) for ranks, nodes in measured_groups(1, 24)] == [*range(2, 9), 16, 24]
