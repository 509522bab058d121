"""The replay of a step against steps that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from results.groups import GroupLayout
from strategies.closed_form.replay import Operation, Work, operations_of, replay, span
from strategies.closed_form.terms import Overlap, Piece, Term, term

WORK = Work(forward_s=4, backward_s=8, update_s=1)


def operation(payload: float, ready: float, needed: float = 12, **fields) -> Operation:
    """An operation of as many seconds as bytes, in the tests below."""
    base = {"collective": "all-reduce", "ranks": 2}
    return Operation(payload_bytes=payload, ready_s=ready, needed_s=needed, **base | fields)


def exposed(*operations: Operation, work: Work = WORK, at_once: int = 1) -> float:
    found = replay(work, operations, lambda each: each.payload_bytes, at_once=at_once)
    assert found.compute_s == work.compute_s
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_s)
    assert sum(waited for _, waited in found.exchange.values()) == pytest.approx(found.exposed_s)
    return found.exposed_s


@pytest.mark.parametrize(
    ("operations", "seconds"),
    [
        ([], 0),
        # A bucket that is ready at 8 hides for 4; one that is ready last does not hide.
        ([operation(3, 8)], 0),
        ([operation(5, 8)], 1),
        ([operation(2, 12)], 2),
        # One after another: 6 to 9, then 9 to 12 for the one that was ready at 8, and the last 12 to 14.
        ([operation(3, 6), operation(3, 8), operation(2, 12)], 2),
        # The queue is 1 late: 6 to 11, 11 to 13, 13 to 15.
        ([operation(5, 6), operation(2, 8), operation(2, 12)], 3),
        # Blocking: computation stops at 4 for 3, and what is ready at 8 begins at the 11th second.
        ([operation(3, 4, 4), operation(5, 8)], 3 + 1),
        # It stops at 4 for one of 3, beside 2 seconds of another group: that ends at 8, the one of 3 at 9.
        ([operation(4, 2, dimension="shard"), operation(3, 4, 4)], 5),
        # A gathering that is needed at 2 and takes 3 from 0 on stops computation for 1.
        ([operation(3, 0, 2)], 1),
        # Three in a row, as one.
        ([operation(2, 10, count=3)], 4),
        # After the update.
        ([operation(2, 13, 13)], 2),
    ],
)
def test_a_step_by_hand(operations, seconds) -> None:
    assert exposed(*operations) == pytest.approx(seconds)


def test_a_wait_is_of_the_dimension_that_computation_needs() -> None:
    """The first one has 1 s left at 12. It then shares the network until 14; the other ends 2 s later."""
    both = [operation(5, 8, dimension="shard"), operation(3, 12, 12, dimension="context")]
    found = replay(WORK, both, lambda each: each.payload_bytes)
    assert found.exchange == {"shard": (5, pytest.approx(2)), "context": (3, pytest.approx(2))}


def test_operations_that_run_together_share_the_network() -> None:
    """4 s from 8 on, and 1 s from 9 on that is needed at 10: together each at half its rate, so that it ends
    at 11; one after another at 13."""
    both = [operation(4, 8, needed=13), operation(1, 9, needed=10)]
    assert (exposed(*both, at_once=2), exposed(*both)) == pytest.approx((1, 3))
    # Two groups run together also where a group has one at a time.
    apart = [operation(4, 0, needed=4), operation(4, 0, needed=8, dimension="shard")]
    assert exposed(*apart) == pytest.approx(4)


def test_a_rank_that_is_late_delays_what_it_has_ready() -> None:
    """Computation of 13 takes 13 + 1.3: a bucket ready at 8 begins at 8.8 and ends at 13.8; passes end at
    13.2."""
    found = replay(WORK, [operation(5, 8)], lambda each: each.payload_bytes, delays_s=[1.3])
    assert found.exposed_s == pytest.approx(1)
    assert found.step_s == pytest.approx(13.8 + 1.1)
    assert found.waits_s == pytest.approx(14.9 - 14)
    # Half of the steps have no delay.
    both = replay(WORK, [operation(5, 8)], lambda each: each.payload_bytes, delays_s=[1.3, 0.0])
    assert both.waits_s == pytest.approx(0.45)


def term_of(overlap: Overlap, operations: float, *, payload: float = 12.0, collective="all-reduce") -> Term:
    made = term("", collective, ("replicate", 4), payload=payload, operations=operations, overlap=overlap)
    return made


def places(made: Term, work: Work) -> list[tuple[float, float, float]]:
    found = operations_of([made], work, GroupLayout(replicate=4), 2)
    return [(each.payload_bytes, each.ready_s, each.needed_s) for each in found]


def test_messages_lie_where_their_passes_make_them() -> None:
    two = replace(WORK, micro_batches=2)
    # Sums of the last backward pass, 8 to 12: the last one is ready when it is over.
    assert places(term_of("last backward", 4), two) == [(3, ready, 12) for ready in (9, 10, 11, 12)]
    assert places(term_of("backward", 4), two) == [(3, ready, 12) for ready in (4, 6, 10, 12)]
    # Gatherings one ahead; nothing is ahead of the first.
    gather = {"collective": "all-gather"}
    assert places(term_of("forward", 4, **gather), two) == [(3, 0, 0), (3, 0, 1), (3, 1, 6), (3, 6, 7)]
    assert places(term_of("first forward", 2, **gather), two) == [(6, 0, 0), (6, 0, 1)]
    assert places(term_of("compute", 2, **gather), two) == [(6, 0, 0), (6, 0, 6)]
    # What overlaps with nothing blocks, whole.
    assert places(term_of("none", 4), two) == [(3, 13, 13)]
    named = replace(term_of("last backward", 2), pieces=(Piece(2, 0.25), Piece(10, 1.0)))
    assert places(named, two) == [(2, 9, 12), (10, 12, 12)]


def test_many_operations_are_joined_without_a_loss() -> None:
    made = term_of("last backward", 1000, payload=1000.0)
    pieces = tuple(Piece(1.0, (index + 1) / 1000) for index in range(1000))
    for each in (made, replace(made, pieces=pieces)):
        found = operations_of([each], WORK, GroupLayout(replicate=4), 4)
        assert len(found) <= 128
        assert sum(one.count for one in found) == pytest.approx(1000)
        assert sum(one.count * one.payload_bytes for one in found) == pytest.approx(1000)
        assert found[-1].ready_s == pytest.approx(12)


def test_a_group_spans_nodes_and_shares_their_way_out() -> None:
    """8 ranks in nodes of 4: of hsdp's grid the shards stay inside, and 4 sums cross from each node."""
    grid = GroupLayout(replicate=2, shard=4)
    assert span(grid, "shard", 4) == (1, 1)
    assert span(grid, "replicate", 4) == (2, 4)
    assert span(GroupLayout(replicate=8), "replicate", 4) == (2, 1)
    assert span(GroupLayout(replicate=8), "replicate", 8) == (1, 1)
