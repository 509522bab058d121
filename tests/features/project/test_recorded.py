"""Components of stragglers against known truth, and recorded buckets by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import a_cell, an_environment
from hypothesis import given
from hypothesis import strategies as st

from harness.features.project.recorded import Stragglers, recorded_buckets
from results.outcome import Evidence, Outcome
from results.record import Operations, RankRecord, Recorded, StepColumns
from strategies.closed_form.replay import Work, replay
from strategies.closed_form.terms import Piece


def run_of(random: np.random.Generator, nodes: int, per_node: int, truth: dict[str, float]) -> Any:
    """400 steps without exchange of each rank, in seconds, by these standard deviations."""
    place = np.repeat(np.arange(nodes), per_node)
    lasting = random.normal(0, truth["node"], nodes)[place] + random.normal(0, truth["rank"], len(place))
    steps = 1 + lasting[:, None] + random.normal(0, truth["step"], (len(place), 400))
    stalls = random.random(steps.shape) < truth["stalls"]
    return np.where(stalls, steps + truth["stall"], steps), place


@pytest.mark.parametrize(
    "truth",
    [
        {"node": 0.0, "rank": 0.0, "step": 0.02, "stalls": 0.0, "stall": 0.0},
        {"node": 0.0, "rank": 0.03, "step": 0.01, "stalls": 0.0, "stall": 0.0},
        {"node": 0.05, "rank": 0.01, "step": 0.01, "stalls": 0.0, "stall": 0.0},
        {"node": 0.0, "rank": 0.0, "step": 0.005, "stalls": 0.01, "stall": 0.5},
    ],
    ids=["step", "rank", "node", "stall"],
)
def test_the_wait_of_more_ranks_is_near_the_truth(truth) -> None:
    """From 16 ranks on 4 nodes to 64 on 16: the mean delay of the slowest over 24 studies, against clusters
    of the truth. The drawn maximum of lasting effects cannot exceed what was seen, so it is somewhat less."""
    random = np.random.default_rng(1)
    drawn, real = [], []
    for _ in range(24):
        fitted = Stragglers.of([run_of(random, 4, 4, truth)])
        drawn.append(np.mean(fitted.delays_s(64, 16)))
        steps, _ = run_of(random, 16, 4, truth)
        real.append((steps.max(axis=0) - 1 - truth["stalls"] * truth["stall"]).mean())
    assert 0.6 < np.mean(drawn) / np.mean(real) < 1.1
    # Without a split the noise of means would count as lasting: equal ranks have none.
    if not truth["rank"] + truth["node"] + truth["stalls"]:
        assert np.std(fitted.rank_s) < truth["step"] / 10


def test_a_slow_rank_of_two_delays_two_and_eight() -> None:
    """100 and 120 ms, always: the slowest of any even number computes 10 ms longer than the mean."""
    steps = np.array([[0.100] * 50, [0.120] * 50])
    fitted = Stragglers.of([(steps, [0, 0])])
    assert fitted.node_s == ()
    for ranks, nodes in ((2, 1), (8, 1), (8, 4)):
        assert fitted.delays_s(ranks, nodes) == pytest.approx([0.010] * 16)
    # With a rank a node the same is between nodes.
    apart = Stragglers.of([(steps, [0, 1])])
    assert apart.rank_s == ()
    assert apart.delays_s(8, 8) == pytest.approx([0.010] * 16)
    found = replay(Work(forward_s=0.03, backward_s=0.08), [], lambda _: 0.0, delays_s=apart.delays_s(8, 8))
    assert found.waits_s == pytest.approx(0.010)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 3))
def test_more_ranks_never_wait_less_and_one_rank_not_at_all(nodes, per_node, seed) -> None:
    random = np.random.default_rng(seed)
    truth = {"node": 0.02, "rank": 0.02, "step": 0.02, "stalls": 0.02, "stall": 0.3}
    fitted = Stragglers.of([run_of(random, nodes, per_node, truth)])
    ranks = nodes * per_node
    few, many = (np.mean(fitted.delays_s(size, nodes)) for size in (ranks, 4 * ranks))
    assert many >= few - 0.005
    assert Stragglers().delays_s(64, 8) == (0.0,) * 16


def record(rank: int, buckets: list[list[tuple[int, int]]], *, ranks: int = 2, **fields: Any) -> RankRecord:
    """A rank that recorded these (bytes, moment in ns) of each step, data 10 and forward 90 ns long."""
    cell = a_cell(strategy="ddp", gpus=ranks)
    rows = [(step, size, at) for step, own in enumerate(buckets) for size, at in own]
    columns = StepColumns(
        step_ns=[400] * 3, data_ns=[10] * 3, forward_ns=[90] * 3, backward_ns=[280] * 3,
        optimizer_ns=[20] * 3, loss=[1.0] * 3,
    )  # fmt: skip
    recorded = Recorded(
        step_ns=[400] * len(buckets),
        operations=Operations(
            names=["allreduce"],
            groups=[f"0-{ranks - 1}"],
            step=[step for step, _, _ in rows],
            name=[0] * len(rows),
            group=[0] * len(rows),
            payload_bytes=[size for _, size, _ in rows],
            issued_ns=[at for _, _, at in rows],
            duration_ns=[5] * len(rows),
        ),
    )
    base: dict[str, Any] = {"reason": None, "evidence": Evidence.MEASURED, "started_at": STARTED}
    base |= {"steps": columns, "recorded": recorded}
    return RankRecord(
        cell_id=cell.id, run_id="a", launch_id="b", repeat=1, gpus=ranks, rank=rank, local_rank=rank,
        node_rank=0, outcome=Outcome.OK, ended_at=STARTED, clock="monotonic", environment=an_environment(),
        **base | fields,
    )  # fmt: skip


STARTED = "2026-01-01T00:00:00Z"


def test_buckets_are_ready_where_they_were_issued() -> None:
    """Backward from 100 to 300: issued at 150, 250 and 300 are 0.25, 0.75 and 1; medians over steps and
    ranks."""
    usual = [(1000, 150), (4000, 250), (500, 300)]
    late = [(1000, 250), (4000, 290), (500, 300)]
    found = recorded_buckets([record(0, [usual, usual, late]), record(1, [usual, usual, usual])])
    assert found == (Piece(1000, 0.25), Piece(4000, 0.75), Piece(500, 1.0))


def test_steps_that_differ_in_their_buckets_say_nothing() -> None:
    one, two = [(1000, 150), (4000, 300)], [(5000, 300)]
    assert recorded_buckets([record(0, [one, two])]) == ()
    assert recorded_buckets([record(0, [one, two, two])]) == (Piece(5000, 1.0),)
    assert recorded_buckets([record(0, [one], recorded=None)]) == ()
