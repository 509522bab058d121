"""The verdict of a preflight from records of ranks, the order of its all-reduces, and its files."""

from __future__ import annotations

from itertools import chain, combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import a_cell, an_environment
from golden_laws import GoldenLaws

from harness.features.preflight.verdict import PREFLIGHT, Examined, Reduced, judge
from harness.features.preflight.worker.examine import MOST_ROUNDS, rounds_of_pairs
from results.record import RankRecord

NAMES = ("n1", "n2", "n3", "n4")
PAIRS = list(combinations(range(4), 2))
MS = 1_000_000


class TestGolden(GoldenLaws):
    golden = Path(__file__).with_name("golden")
    schemas = (PREFLIGHT,)


@pytest.fixture
def nodes(record_of):
    """Records of four nodes of one device each: 100 GFLOP/s, and 80 MB/s between all of them.

    An all-reduce of 8 MB over two ranks has a bus bandwidth of 8 MB over its time. `slow_ms` are the times of
    pairs that differ from 100 ms; `others` are fields of `Examined` or facts of the environment, by node.
    """

    def make(slow_ms: dict[tuple[int, int], int] | None = None, **others: dict[int, Any]) -> list[RankRecord]:
        records = []
        for node in range(4):
            own = {name: values[node] for name, values in others.items() if node in values}
            base = {"products": [9e9, 100e9, 100e9, 100e9], "free_bytes": 64 * 10**9, "faults": []}
            reduced = [
                # The slower rank counts: the second of the pair waits less.
                Reduced(over="gloo", nodes=pair, ranks=2, payload_bytes=8_000_000, duration_ns=[took, took])
                for pair in PAIRS
                if node in pair
                for took in [(slow_ms or {}).get(pair, 100) * MS - (node == pair[1])]
            ]
            found = base | {name: value for name, value in own.items() if name in base}
            facts = {name: value for name, value in own.items() if name not in base}
            records.append(
                record_of(
                    a_cell(gpus=4),
                    node,
                    node_rank=node,
                    local_rank=0,
                    measured=msgspec.to_builtins(Examined(**found, reduced=reduced)),
                    environment=an_environment(host=f"host-{node}", **facts),
                )
            )
        return records

    return make


def faults(records: list[RankRecord], slow_below: float = 0.85) -> dict[str, tuple[str, ...]]:
    return {node.name: node.faults for node in judge(records, NAMES, slow_below).nodes if node.faults}


def test_equal_nodes_are_fine(nodes) -> None:
    verdict = judge(nodes(), NAMES, 0.85)
    assert verdict.named == ()
    assert {node.figures["products"] for node in verdict.nodes} == {100e9}
    assert {node.figures["all-reduce with another over gloo"] for node in verdict.nodes} == {80e6}
    assert [node.host for node in verdict.nodes] == ["host-0", "host-1", "host-2", "host-3"]


def test_a_node_whose_pairs_are_all_slow_is_named_and_its_partners_are_not(nodes) -> None:
    slow = {pair: 1000 for pair in PAIRS if 1 in pair}
    assert faults(nodes(slow)) == {
        "n2": ("all-reduce with another over gloo 8.00 MB/s, 10.0 % of the median",),
    }


def test_a_slow_path_between_two_good_nodes_is_a_note(nodes) -> None:
    verdict = judge(nodes({(0, 3): 200}), NAMES, 0.85)
    assert verdict.named == ()
    assert verdict.notes == ("n1 and n4 together: 40.0 MB/s over gloo, 50.0 % of the median pair.",)


def test_a_slow_device_is_slow_against_the_median_below_the_threshold(nodes) -> None:
    records = nodes(products={2: [100e9, 100e9, 80e9, 80e9]})
    assert faults(records) == {"n3": ("device 0: products 80.0 GFLOP/s, 80.0 % of the median",)}
    assert faults(records, 0.75) == {}


def test_memory_that_is_taken_and_what_a_device_reports_name_the_node(nodes) -> None:
    records = nodes(free_bytes={0: 16 * 10**9}, faults={3: ["GPU 0 has 2 uncorrected ECC errors"]})
    records[1] = msgspec.structs.replace(
        records[1], warnings=["rank 1: the GPU reported Xid 48 during the run", "rank 0: of another"]
    )
    assert faults(records) == {
        "n1": ("device 0: free memory 16.0 GB, 25.0 % of the median",),
        "n2": ("rank 1: the GPU reported Xid 48 during the run",),
        "n4": ("GPU 0 has 2 uncorrected ECC errors",),
    }


def test_a_node_with_another_version_is_wrong_and_of_two_halves_none_is(nodes) -> None:
    usual = an_environment().torch
    assert faults(nodes(torch={3: "2.0.1"})) == {"n4": (f"torch is 2.0.1, elsewhere {usual}",)}
    assert faults(nodes(torch={2: "2.0.1", 3: "2.0.1"})) == {}


@pytest.mark.parametrize("count", range(1, 9))
def test_of_up_to_eight_nodes_each_pair_meets_once_and_no_node_twice_at_once(count) -> None:
    rounds = rounds_of_pairs(count)
    assert sorted(chain(*rounds)) == list(combinations(range(count), 2))
    assert all(len(set(chain(*pairs))) == 2 * len(pairs) for pairs in rounds)


def test_of_many_nodes_each_meets_a_few_others() -> None:
    rounds = rounds_of_pairs(256)
    assert len(rounds) == MOST_ROUNDS
    assert len(set(chain(*rounds))) == MOST_ROUNDS * 128
