"""Operations matched over ranks, and their sums a step, worked out by hand; times are in ns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.derivation.communication import bus_factor, step_communication
from results.derivation.matching import Matched, match
from results.derivation.run_result import derive
from results.errors import SchemaError
from results.groups import GroupLayout
from results.record import KernelTimes, LinkPeak, Operations, RankRecord, Recorded
from results.run import Communication, DimensionSummary, OperationSummary

Row = tuple[int, str, str, int, int, int]
"""Step, name, group, payload, issued, duration."""
Ranks = Callable[..., list[RankRecord]]


def _operations(rows: Sequence[Row]) -> Operations:
    """Build a rank's operations with only its own names and groups, in the order in which it met them."""
    names = list(dict.fromkeys(row[1] for row in rows))
    groups = list(dict.fromkeys(row[2] for row in rows))
    return Operations(
        names=names,
        groups=groups,
        step=[row[0] for row in rows],
        name=[names.index(row[1]) for row in rows],
        group=[groups.index(row[2]) for row in rows],
        payload_bytes=[row[3] for row in rows],
        issued_ns=[row[4] for row in rows],
        duration_ns=[row[5] for row in rows],
    )


@pytest.fixture(scope="session")
def ranks_of(cell_of, record_of) -> Ranks:
    """The records of ranks that recorded these rows in `steps` steps."""

    def make(*each: Sequence[Row], steps: int = 2, **fields: object) -> list[RankRecord]:
        cell = cell_of(gpus=len(each))
        return [
            record_of(
                cell,
                rank,
                recorded=Recorded(step_ns=[100] * steps, operations=_operations(rows)),
                **fields,
            )
            for rank, rows in enumerate(each)
        ]

    return make


def _matched(records: list[RankRecord]) -> Matched:
    matched = match(records)
    assert matched is not None
    return matched


def _communication(records: list[RankRecord]) -> Communication:
    found = step_communication(records, match(records), "nccl")
    assert found is not None
    return found


def test_the_shortest_duration_is_the_transfer_and_the_rest_is_wait(ranks_of) -> None:
    # Rank 1 comes last to the first all-reduce (4), rank 0 to the second (6).
    records = ranks_of(
        [(0, "allreduce", "0-1", 8, 0, 9), (1, "allreduce", "0-1", 8, 0, 6)],
        [(0, "allreduce", "0-1", 8, 5, 4), (1, "allreduce", "0-1", 8, 0, 7)],
    )
    matched = _matched(records)
    assert matched.transfer_ns.tolist() == [4, 6, 4, 6]
    assert matched.wait_ns.tolist() == [[5, 0], [0, 1]]
    found = _communication(records)
    # (4 + 6 + 4 + 6) / 4 and (5 + 1) / 4
    assert (found.transfer_ns, found.wait_ns) == (5, 1.5)


def test_each_dimension_has_the_operations_of_its_groups(ranks_of) -> None:
    def rows(rank: int, tensor_ns: int, shard_ns: int) -> list[Row]:
        tensor, shard = ("0-1", "2-3")[rank // 2], ("0,2", "1,3")[rank % 2]
        return [
            (0, "allreduce", tensor, 8, 0, tensor_ns),
            (0, "_allgather_base", shard, 16, 0, shard_ns),
            (1, "allreduce", "0-3", 4, 0, 10),
        ]

    each = [rows(0, 9, 20), rows(1, 5, 20), rows(2, 6, 24), rows(3, 6, 20)]
    found = _communication(ranks_of(*each, layout=GroupLayout(shard=2, tensor=2)))
    # Over 4 ranks and 2 steps. Shards wait 4, and tensor parts 4; all ranks together differ in both.
    assert found.dimensions == (
        DimensionSummary(name="shard", payload_bytes=8, transfer_ns=10, wait_ns=0.5),
        DimensionSummary(name="tensor", payload_bytes=4, transfer_ns=22 / 8, wait_ns=0.5),
        DimensionSummary(name=None, payload_bytes=2, transfer_ns=5, wait_ns=0),
    )
    assert _communication(ranks_of(*each)).dimensions == ()


def test_messages_of_a_pipeline_have_bytes_and_no_transfer(ranks_of) -> None:
    sent, received = (0, "send", "0-1", 8, 0, 10), (0, "recv", "0-1", 8, 0, 30)
    [found] = _communication(ranks_of([sent], [received], layout=GroupLayout(pipeline=2))).dimensions
    assert found == DimensionSummary(name="pipeline", payload_bytes=2, transfer_ns=None, wait_ns=None)


def test_operations_between_two_ranks_are_not_matched(ranks_of) -> None:
    # Rank 0 sends twice, rank 1 receives once: that is no damage, and nobody waits in a collective.
    records = ranks_of(
        [(0, "send", "0-1", 8, 0, 10), (1, "send", "0-1", 8, 0, 20)],
        [(0, "recv", "0-1", 16, 0, 30)],
    )
    assert _matched(records).wait_ns.tolist() == [[0, 0], [0, 0]]
    found = _communication(records)
    assert (found.transfer_ns, found.wait_ns, found.bus_bytes_per_s) == (None, None, None)
    # Means over two steps of two ranks.
    assert found.operations == (
        OperationSummary(
            name="recv",
            group_size=2,
            count=0.25,
            payload_bytes=4,
            duration_ns=7.5,
            transfer_ns=None,
            wait_ns=None,
        ),
        OperationSummary(
            name="send",
            group_size=2,
            count=0.5,
            payload_bytes=4,
            duration_ns=7.5,
            transfer_ns=None,
            wait_ns=None,
        ),
    )


GROUPS = {"0-3": [0, 1, 2, 3], "0-1": [0, 1], "2-3": [2, 3], "0,2": [0, 2], "1,3": [1, 3], "0-1,3": [0, 1, 3]}


@st.composite
def _programs(draw: st.DrawFn) -> list[list[Row]]:
    """Rows of four ranks: all issue the collectives of a group in one order, but each interleaves the groups
    and its sends differently."""
    sequences = {
        group: sorted(
            draw(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["allreduce", "reduce"])), max_size=4))
        )
        for group in GROUPS
    }
    ranks = []
    for rank in range(4):
        left = {group: list(kinds) for group, kinds in sequences.items() if rank in GROUPS[group] and kinds}
        rows: list[Row] = []
        while left:
            group = draw(st.sampled_from(sorted(left)))
            step, name = left[group].pop(0)
            rows.append((step, name, group, 8, draw(st.integers(0, 50)), draw(st.integers(0, 99))))
            if draw(st.booleans()):
                rows.append((step, "send", "0-3", 8, 0, draw(st.integers(0, 99))))
            left = {group: kinds for group, kinds in left.items() if kinds}
        ranks.append(rows)
    return ranks


@given(_programs())
def test_matching_is_that_of_plain_loops(ranks_of, ranks) -> None:
    events: dict[tuple[str, int], list[int]] = {}
    places: list[list[tuple[str, int] | None]] = []
    for rows in ranks:
        seen = dict.fromkeys(GROUPS, 0)
        places.append([])
        for _, name, group, _, _, duration in rows:
            if name == "send":
                places[-1].append(None)
                continue
            events.setdefault((group, seen[group]), []).append(duration)
            places[-1].append((group, seen[group]))
            seen[group] += 1
    waits = [[0, 0] for _ in ranks]
    expected = []
    for rank, rows in enumerate(ranks):
        for row, place in zip(rows, places[rank], strict=True):
            expected.append(row[5] if place is None else min(events[place]))
            waits[rank][row[0]] += row[5] - expected[-1]
    matched = _matched(ranks_of(*ranks))
    assert matched.transfer_ns.tolist() == expected
    assert matched.wait_ns.tolist() == waits


ONE = (0, "allreduce", "0-1", 8, 0, 5)


@pytest.mark.parametrize(
    ("each", "why"),
    [
        (([ONE, ONE], [ONE]), "ranks 0 and 1 recorded 2 and 1 collectives of the group 0-1"),
        (([ONE], []), "ranks 0 and 1 recorded 1 and 0 collectives of the group 0-1"),
        (
            ([ONE, ONE], [ONE, (0, "broadcast", "0-1", 8, 0, 5)]),
            "ranks 0 and 1 differ in the name or the step of collective 1 of the group 0-1",
        ),
        (
            ([ONE], [(1, "allreduce", "0-1", 8, 0, 5)]),
            "ranks 0 and 1 differ in the name or the step of collective 0 of the group 0-1",
        ),
        (
            ([], [], [(0, "reduce", "1-2", 8, 0, 5)]),
            "ranks 1 and 2 recorded 0 and 1 collectives of the group 1-2",
        ),
        (([(0, "reduce", "1", 8, 0, 5)], []), "rank 0 recorded collectives of the group 1"),
        (([(0, "reduce", "0-2", 8, 0, 5)], []), "'0-2'"),
        (([(0, "reduce", "1-0", 8, 0, 5)], []), "'1-0'"),
        (([(0, "send", "all", 8, 0, 5)], []), "'all'"),
        (([(2, "send", "0-1", 8, 0, 5)], []), "rank 0 has an operation whose step is not one of 2"),
        (([], [(-1, "send", "0-1", 8, 0, 5)]), "rank 1 has an operation whose step is not one of 2"),
    ],
)
def test_ranks_that_did_not_do_the_same_are_refused(ranks_of, cell_of, each, why) -> None:
    with pytest.raises(SchemaError) as error:
        derive(cell_of(gpus=len(each)), "run-1", ranks_of(*each), None)
    assert str(error.value).startswith("the recorded operations of run run-1 of resnet18-ddp-")
    assert f": {why}" in str(error.value)
    assert str(error.value).endswith("move the run away")


def test_an_index_that_points_nowhere_is_refused(ranks_of) -> None:
    for field in ("name", "group"):
        records = ranks_of([ONE], [ONE])
        getattr(records[1].recorded.operations, field)[0] = 1
        with pytest.raises(SchemaError, match=f"rank 1 has an operation whose {field} is not one of 1"):
            match(records)


def test_ranks_that_recorded_unlike_numbers_of_steps_are_refused(ranks_of) -> None:
    records = [*ranks_of([], [], steps=2)[:1], *ranks_of([], [], steps=3)[1:]]
    with pytest.raises(SchemaError, match="ranks 0 and 1 recorded 2 and 3 steps"):
        match(records)


def test_without_the_record_of_one_rank_there_is_no_account(cell_of, record_of, ranks_of) -> None:
    cell = cell_of()
    with_it = ranks_of([ONE], [ONE])
    for other in (record_of(cell, 1), record_of(cell, 1, recorded=Recorded())):
        assert match([with_it[0], other]) is None
        run = derive(cell, "run-1", [with_it[0], other], None)
        assert (run.communication, run.absent["communication"]) == (None, "not all ranks recorded steps")
    told = record_of(cell, 1, absent={"recorded": "a period has 5000 operations"})
    run = derive(cell, "run-1", [with_it[0], told], None)
    assert run.absent["communication"] == "a period has 5000 operations"


def test_total_is_the_union_of_what_is_in_flight(ranks_of) -> None:
    # Rank 0, step 0: [0, 10) and [5, 15) and a send in [30, 34): 19; step 1, at the same times: [0, 10).
    # Rank 1: [0, 12) with [2, 8) inside: 12; and [40, 45). (19 + 10 + 12 + 5) / 4
    records = ranks_of(
        [
            (0, "allreduce", "0-1", 8, 0, 10),
            (0, "allreduce", "0-1", 8, 5, 10),
            (0, "send", "0-1", 8, 30, 4),
            (1, "allreduce", "0-1", 8, 0, 10),
        ],
        [
            (0, "allreduce", "0-1", 8, 0, 12),
            (0, "allreduce", "0-1", 8, 2, 6),
            (1, "allreduce", "0-1", 8, 40, 5),
        ],
    )
    found = _communication(records)
    assert found.total_ns == 11.5
    # The shortest of the all-reduces, on both ranks 10 + 6 + 5; a send is no transfer that is known.
    assert found.transfer_ns == 10.5


def test_operations_are_summed_up_by_name_and_size_of_the_group(ranks_of) -> None:
    # Per step of 2 and rank of 3. All-reduce over all: 3 rows in one step, 10 + 12 + 11 and thrice 10;
    # over two: 2 rows, 8 + 6 and twice 6.
    records = ranks_of(
        [(0, "allreduce", "0-2", 600, 0, 10), (1, "allreduce", "0-1", 90, 0, 8)],
        [(1, "allreduce", "0-1", 90, 0, 6), (0, "allreduce", "0-2", 600, 0, 12)],
        [(0, "allreduce", "0-2", 600, 0, 11)],
    )
    assert _communication(records).operations == (
        OperationSummary(
            name="allreduce",
            group_size=2,
            count=1 / 3,
            payload_bytes=30,
            duration_ns=14 / 6,
            transfer_ns=2,
            wait_ns=2 / 6,
        ),
        OperationSummary(
            name="allreduce",
            group_size=3,
            count=0.5,
            payload_bytes=300,
            duration_ns=5.5,
            transfer_ns=5,
            wait_ns=0.5,
        ),
    )


def test_a_run_that_exchanges_nothing_has_an_account_of_nothing(ranks_of) -> None:
    found = _communication(ranks_of([]))
    assert (found.steps, found.step_ns, found.total_ns, found.operations) == (2, 100, 0, ())
    assert (found.transfer_ns, found.wait_ns, found.bus_bytes_per_s) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "handed_over", "factor"),
    [
        # Of 4 ranks with 100 bytes of result each, nccl-tests counts 100 x 2 x 3/4 for an all-reduce, and
        # 400 x 3/4 for an all-gather to 400 bytes or a reduce-scatter of 400.
        ("allreduce", 100, 150),
        ("allgather", 100, 300),
        ("_allgather_base", 100, 300),
        ("_reduce_scatter_base", 400, 300),
        ("alltoall_base", 400, 300),
        ("broadcast", 100, 100),
        ("reduce", 100, 100),
    ],
)
def test_bus_bytes_are_those_of_nccl_tests(name, handed_over, factor) -> None:
    factor_of_one = bus_factor(name, 4)
    assert factor_of_one is not None
    assert handed_over * factor_of_one == factor


def test_gloo_moves_a_reduce_scatter_as_an_all_reduce() -> None:
    assert bus_factor("_reduce_scatter_base", 4) == 0.75
    assert bus_factor("_reduce_scatter_base", 4, "gloo") == 1.5
    assert bus_factor("allreduce", 4, "gloo") == bus_factor("allreduce", 4) == 1.5


def test_an_operation_without_a_factor_is_not_in_the_bandwidth(ranks_of) -> None:
    assert (bus_factor("barrier", 4), bus_factor("send", 2)) == (None, None)
    # Over 3 ranks all-reduce 900 x 2 x 2/3 = 1200 in 10 ns, all-gather 400 x 2 in 10 ns: 2000 bytes in 20 ns.
    rows: list[Row] = [
        (0, "allreduce", "0-2", 900, 0, 10),
        (0, "_allgather_base", "0-2", 400, 0, 10),
        (0, "barrier", "0-2", 0, 0, 1000),
        (0, "send", "0-2", 700, 0, 1000),
    ]
    # Rank 1 waits in the all-reduce: that is no transfer.
    other: list[Row] = [(0, "allreduce", "0-2", 900, 0, 90), *rows[1:]]
    assert _communication(ranks_of(rows, other, rows)).bus_bytes_per_s == pytest.approx(100e9)


def test_the_peak_is_the_best_of_plain_all_reduces(ranks_of) -> None:
    # Shortest over ranks 50, 40, 45; the best 40: 1000 x 2 x 2/3 over 40 ns.
    peaks = ([70, 40, 90], [50, 60, 45], [80, 50, 50])
    records = [
        ranks_of([], [], [], link_peak=LinkPeak(payload_bytes=1000, duration_ns=durations))[rank]
        for rank, durations in enumerate(peaks)
    ]
    assert _communication(records).peak_bus_bytes_per_s == pytest.approx(1000 * 4 / 3 / 40e-9)
    assert _communication([*records[:2], ranks_of([], [], [])[2]]).peak_bus_bytes_per_s is None
    shorter = ranks_of([], [], [], link_peak=LinkPeak(payload_bytes=1000, duration_ns=[50]))[2]
    with pytest.raises(SchemaError, match=r"ranks of run run-1 of .* measured different all-reduces"):
        _communication([*records[:2], shorter])


def test_one_rank_or_no_measurement_has_no_peak(ranks_of) -> None:
    alone = ranks_of([], link_peak=LinkPeak(payload_bytes=1000, duration_ns=[50]))
    assert _communication(alone).peak_bus_bytes_per_s is None
    empty = ranks_of([], [], link_peak=LinkPeak(payload_bytes=1000, duration_ns=[]))
    assert _communication(empty).peak_bus_bytes_per_s is None


def test_times_of_the_host_are_means_over_ranks_and_steps(cell_of, record_of) -> None:
    def found(*each: Recorded) -> Communication:
        cell = cell_of(gpus=len(each))
        return _communication([record_of(cell, rank, recorded=own) for rank, own in enumerate(each)])

    first = Recorded(
        step_ns=[90, 110],
        blocked_ns=[10, 20],
        dispatch_ns=[1, 3],
        exchange_cpu_ns=[5, 7],
        bubble_ns=[0, 8],
    )
    second = Recorded(
        step_ns=[80, 100],
        blocked_ns=[30, 0],
        dispatch_ns=[5, 7],
        exchange_cpu_ns=[1, 3],
        bubble_ns=[4, 0],
    )
    both = found(first, second)
    assert (both.step_ns, both.blocked_ns, both.dispatch_ns) == (95, 15, 4)
    assert (both.exchange_cpu_ns, both.bubble_ns) == (4, 3)
    without = found(first, Recorded(step_ns=[80, 100]))
    assert (without.step_ns, without.blocked_ns, without.dispatch_ns) == (95, None, None)
    assert (without.exchange_cpu_ns, without.bubble_ns) == (None, None)


def test_on_cuda_blocked_is_communication_that_did_not_overlap(cell_of, record_of) -> None:
    # (30 - 10) / 4 = 5 and (50 - 14) / 4 = 9
    kernels = (
        KernelTimes(steps=4, compute_ns=100, communication_ns=30, overlap_ns=10),
        KernelTimes(steps=4, compute_ns=100, communication_ns=50, overlap_ns=14),
    )
    records = [
        record_of(cell_of(), rank, recorded=Recorded(step_ns=[90, 110], kernels=own))
        for rank, own in enumerate(kernels)
    ]
    assert _communication(records).blocked_ns == 7
