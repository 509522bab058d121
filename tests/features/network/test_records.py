"""From rank records to the network table: the slowest rank, the median, and its interval."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from builders import a_cell
from study_fixtures import Timing, rank_record

from harness.features.network.derivation import network_table
from results.errors import SchemaError
from results.network import NetworkTimes
from results.outcome import Evidence
from results.record import RankRecord


def record(rank: int, rows: list[NetworkTimes], **fields: Any) -> RankRecord:
    """The record of a rank with these rows, or what fields make of it."""
    made = rank_record(a_cell(), rank, "run-1", Timing(step_ms=1.0))
    return msgspec.structs.replace(made, network=rows, **fields)


def times(*milliseconds: float, collective="all-reduce", payload=1024, ranks=2) -> NetworkTimes:
    return NetworkTimes(
        collective=collective,
        payload_bytes=payload,
        ranks=ranks,
        nodes=1,
        duration_ns=[each * 1e6 for each in milliseconds],
    )


def test_a_sample_lasts_as_long_as_on_its_slowest_rank() -> None:
    run = [record(0, [times(1, 5, 3)]), record(1, [times(2, 4, 1)])]
    # 2, 5 and 3 ms; fewer than six samples have their range.
    (found,) = network_table(a_cell(link_mbit_per_s=100.0), [run]).measurements
    assert (found.median_s, found.low_s, found.high_s) == pytest.approx((3e-3, 2e-3, 5e-3))
    assert found.runs == 3


def test_several_runs_are_pooled_and_their_medians_are_in_the_interval() -> None:
    runs = [[record(0, [times(*row)]), record(1, [times(*row)])] for row in ([1] * 9, [1] * 9, [4] * 9)]
    table = network_table(a_cell(), runs)
    (found,) = table.measurements
    assert (found.median_s, found.low_s, found.high_s) == pytest.approx((1e-3, 1e-3, 4e-3))
    assert found.runs == 27
    assert table.evidence is Evidence.MEASURED


def test_one_emulated_rank_makes_the_table_emulated() -> None:
    run = [record(0, [times(1)]), record(1, [times(1)], evidence=Evidence.EMULATED)]
    assert network_table(a_cell(), [run]).evidence is Evidence.EMULATED


@pytest.mark.parametrize("edited", [[], [times(1, 2)], [times()]])
def test_ranks_that_took_other_samples_are_refused(edited) -> None:
    with pytest.raises(SchemaError, match="all-reduce"):
        network_table(a_cell(), [[record(0, [times(1, 2, 3)]), record(1, edited)]])
