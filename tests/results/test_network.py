"""The network table: bandwidths by nccl-tests, and times of sizes and groups that were not measured."""

from __future__ import annotations

import msgspec
import pytest
from builders import a_cell, an_environment

from results.errors import SchemaError, UsageError
from results.files import Content
from results.network import Measurement, NetworkFacts, NetworkTable, busbw_factor
from results.outcome import Evidence
from results.schemas import NETWORK

MIB = 2**20
FACTS = NetworkFacts(backend="gloo", device_name="CPU A", library="Gloo of torch 2.13.0")


def row(collective="all-reduce", payload=MIB, ranks=2, nodes=1, seconds=1e-3) -> Measurement:
    return Measurement.of((collective, payload, ranks, nodes), seconds, seconds / 1.25, seconds * 1.25, 9)


def table(*rows: Measurement, facts: NetworkFacts = FACTS) -> NetworkTable:
    return NetworkTable(
        source="bench", measured_at="", facts=facts, evidence=Evidence.MEASURED, measurements=rows
    )


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # nccl-tests on 8 ranks: an all-reduce of 1e9 bytes in 10 ms has algbw 100 GB/s and busbw 175 GB/s.
    assert row(payload=10**9, ranks=8, seconds=0.01).algbw == pytest.approx(100e9)
    assert row(payload=10**9, ranks=8, seconds=0.01).busbw == pytest.approx(175e9)
    # Its size of an all-gather is what a rank ends with: 8 shards.
    gathered = row("all-gather", payload=10**9 // 8, ranks=8, seconds=0.01)
    assert gathered.algbw == pytest.approx(100e9)
    assert gathered.busbw == pytest.approx(87.5e9)
    assert busbw_factor("reduce-scatter", 4) == busbw_factor("all-to-all", 4) == 0.75
    assert busbw_factor("broadcast", 4) == busbw_factor("send", 2) == 1


def test_between_measured_sizes_logarithms_are_interpolated() -> None:
    known = table(row(payload=MIB, seconds=1e-3), row(payload=4 * MIB, seconds=9e-3))
    for payload, seconds in ((MIB, 1e-3), (2 * MIB, 3e-3), (4 * MIB, 9e-3)):
        assert known.seconds("all-reduce", payload, 2, 1) == pytest.approx(seconds)


def test_no_line_is_continued_below_the_smallest_size_and_the_bandwidth_is_kept_above_the_largest() -> None:
    known = table(row(payload=MIB, seconds=1e-3), row(payload=4 * MIB, seconds=8e-3))
    small, large = (known.seconds("all-reduce", payload, 2, 1) for payload in (1024, 8 * MIB))
    # A line through both would be below zero at 1 KiB.
    assert (small, large) == pytest.approx((1e-3, 16e-3))


def test_larger_groups_keep_the_bandwidth_and_their_latency_is_the_mean_of_two_laws() -> None:
    # 4 ranks, 1 ms for each MB beyond a latency of 3 ms.
    rows = [row(payload=mb * 10**6, ranks=4, nodes=4, seconds=s) for mb, s in ((1, 4e-3), (100, 0.103))]
    smaller = row(payload=10**6, ranks=2, nodes=2, seconds=5.0)
    found = table(smaller, *rows).seconds("all-reduce", 100e6, 16, 16)
    latency, moving = 3e-3, 0.1 * (15 / 8) / 1.5
    # log2: 4 / 2; linear: 15 / 3.
    assert found == pytest.approx(3.5 * latency + moving)


def test_a_larger_group_gathers_smaller_shards_of_the_same_array() -> None:
    rows = [row("all-gather", mb * 10**6, 4, 4, seconds=s) for mb, s in ((1, 3e-3), (10, 30e-3))]
    # No latency: 4 shards of 10 MB and 8 of 5 MB are one array, of which a rank receives 3/4 and 7/8.
    found = table(*rows).seconds("all-gather", 5e6, 8, 8)
    assert found == pytest.approx(30e-3 * (7 / 8) / (3 / 4))


@pytest.mark.parametrize(
    ("ranks", "nodes", "covered"),
    [(1, 1, True), (2, 1, True), (4, 1, True), (8, 1, False), (16, 4, True), (12, 3, True), (4, 4, False)],
)
def test_a_level_is_covered_by_groups_that_share_a_node_alike(ranks, nodes, covered) -> None:
    known = table(row(ranks=4), row(ranks=8, nodes=2))
    assert known.covers("all-reduce", ranks, nodes) is covered
    assert not known.covers("broadcast", 2, 1)
    if not covered:
        with pytest.raises(UsageError, match="bench network"):
            known.seconds("all-reduce", MIB, ranks, nodes)


def test_a_send_has_two_ranks_however_long_the_pipeline() -> None:
    known = table(row("send", ranks=2, nodes=2, seconds=7e-3))
    assert known.seconds("send", MIB, 8, 8) == pytest.approx(7e-3)
    assert known.covers("send", 8, 8)
    assert not known.covers("send", 8, 1)


def test_one_rank_and_an_empty_message_take_no_time() -> None:
    assert table().seconds("all-reduce", MIB, 1, 1) == 0
    assert table().seconds("all-reduce", 0, 8, 1) == 0


def test_a_variable_that_a_cell_sets_belongs_to_its_network() -> None:
    environment = an_environment(nccl_settings={"NCCL_NET": "IB"})
    cells = [a_cell(device="cuda", backend="nccl", env=env) for env in ((), ("A=1", "NCCL_ALGO=Ring"))]
    plain, ring = (NetworkFacts.of(environment, cell) for cell in cells)
    assert plain.unlike(ring) == ["settings: NCCL_NET=IB in the table, NCCL_ALGO=Ring NCCL_NET=IB here"]


def test_tables_of_other_networks_are_told_apart() -> None:
    other = msgspec.structs.replace(FACTS, device_name="CPU B", link_mbit_per_s=100.0)
    assert [line.partition(":")[0] for line in FACTS.unlike(other)] == ["device", "link"]
    # What a side does not know is not compared.
    assert FACTS.unlike(NetworkFacts(backend="gloo")) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"high_s": 1e-9},
        {"low_s": -1.0},
        {"median_s": 0.0},
        {"ranks": 1},
        {"nodes": 3},
        {"collective": "all-scatter"},
        {"payload_bytes": 0},
    ],
)
def test_a_damaged_row_is_refused(wrong) -> None:
    good = msgspec.to_builtins(table(row()))
    good["measurements"] = [good["measurements"][0] | wrong]
    data = msgspec.json.encode({"schema": "bench/network", "schema_version": 1, **good})
    with pytest.raises(SchemaError, match="bench network"):
        NETWORK.decode(Content("network.json", data))


def test_a_table_without_a_row_is_refused() -> None:
    with pytest.raises(SchemaError, match="bench network"):
        NETWORK.decode(
            Content("n", NETWORK.encode(table(row())).partition(b'"measurements"')[0] + b'"measurements":[]}')
        )


def test_one_size_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        table(row(), row(seconds=2e-3))
