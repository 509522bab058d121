"""Slow ranks and nodes that were planted are named; chance is not, more often than is stated."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from scipy import stats

from reports.analysis.stragglers import (
    FALSE_ALARM,
    SLOW_ABOVE,
    laden,
    numbered,
    persistently_slow,
    split_wait,
    stragglers,
)

MS = 1e6


@pytest.fixture
def found(new_cell, new_run, figures_of):
    """The stragglers of a cell from the rank columns of its runs, and of their waits in ms."""

    def made(runs, budgets=None):
        cell = new_cell(len(runs[0].compute_ns))
        results = [
            new_run(cell, ranks=ranks, budget=None if budgets is None else budgets[place])
            for place, ranks in enumerate(runs)
        ]
        return stragglers(figures_of(cell, results))

    return made


def test_a_rank_that_is_slow_in_each_run_is_named(found, new_ranks) -> None:
    shares = [0.05, 0.05, 0.85, 0.05]
    runs = [new_ranks([10.0, 10.1, 11.5, 9.8], slowest_share=shares) for _ in range(3)]
    one = found(runs)
    assert one.persistent == (2,)
    assert one.slow_nodes == ()
    # The median of 9.8, 10.0, 10.1 and 11.5 is 10.05.
    assert one.excess == pytest.approx([10 / 10.05 - 1, 10.1 / 10.05 - 1, 11.5 / 10.05 - 1, 9.8 / 10.05 - 1])
    assert one.runs == 3
    # 11.5 less the mean of all four, 10.35.
    assert one.persistent_wait_ns == pytest.approx(1.15 * MS)
    assert one.finding == (
        "Rank 2 is persistently slow: 14.4 % above the median rank in each of 3 runs, and the slowest of "
        "all in 85.0 % of the steps (25.0 % by chance). The mean rank loses 1.15 ms a step to that."
    )


def test_a_rank_that_is_slow_in_one_run_of_two_is_not(found, new_ranks) -> None:
    one = found([new_ranks([10.0, 10.0, 12.0, 10.0]), new_ranks([10.0, 10.0, 10.0, 10.0])])
    assert one.persistent == ()


def test_another_node_in_another_run_is_another_rank(found, new_ranks) -> None:
    compute = [10.0, 10.0, 12.0, 10.0]
    one = found([new_ranks(compute, node=[0, 0, 1, 1]), new_ranks(compute, node=[0, 0, 2, 1])])
    assert one.persistent == ()


@pytest.mark.parametrize(("compute", "persistent"), [(10.31, (1,)), (10.29, ())])
def test_three_percent_above_the_median_is_slow_and_less_is_not(
    found, new_ranks, compute, persistent
) -> None:
    assert pytest.approx(0.03) == SLOW_ABOVE
    assert found([new_ranks([10.0, compute, 10.0, 10.0, 10.0], 0.001)]).persistent == persistent


@pytest.mark.parametrize("above", [True, False])
def test_a_rank_within_the_spread_of_its_steps_is_not_slow(found, new_ranks, above) -> None:
    # One side of the bound by scipy's own quantile: 10 % above, over five ranks, 50 steps.
    t = stats.t.isf(FALSE_ALARM / 5, df=49)
    sd = 1.0 * 50**0.5 / t * (0.99 if above else 1.01)
    one = found([new_ranks([10.0, 11.0, 10.0, 10.0, 10.0], sd)])
    assert one.persistent == ((1,) if above else ())


def test_one_step_tells_nothing_and_steps_without_spread_tell_all(new_ranks) -> None:
    compute = [10.0, 12.0, 10.0]
    assert persistently_slow([new_ranks(compute, 0.0, steps=1)]) == ()
    assert persistently_slow([new_ranks(compute, 0.0, steps=2)]) == (1,)
    assert persistently_slow([new_ranks([10.0, 10.0, 10.0], 0.0)]) == ()


def test_a_slow_node_is_named_as_a_node(found, new_ranks) -> None:
    node = [0, 0, 1, 1, 2, 2]
    one = found([new_ranks([10.0, 10.0, 12.0, 12.0, 10.0, 10.0], node=node)] * 2)
    assert (one.persistent, one.slow_nodes) == ((2, 3), (1,))
    assert one.finding.startswith(
        "Node 1 (ranks 2 and 3) is persistently slow: on the mean 20.0 % above the median rank in each of "
        "2 runs"
    )


def test_a_slow_host_is_named_whatever_its_number_in_a_launch(found, new_ranks) -> None:
    hosts = ["n5", "n5", "n6", "n6", "n7", "n7"]
    runs = [new_ranks([10.0, 10.0, 12.0, 12.0, 10.0, 10.0], node=[0, 0, 1, 1, 2, 2], host=hosts)]
    runs += [new_ranks([10.0, 10.0, 12.0, 12.0, 10.0, 10.0], node=[0, 0, 2, 2, 1, 1], host=hosts)]
    one = found(runs)
    assert one.slow_places == ("n6",)
    assert one.finding.startswith("Host n6 (ranks 2 and 3) is persistently slow")
    moved = msgspec.structs.replace(runs[1], host=["n5", "n5", "n8", "n8", "n7", "n7"])
    assert found([runs[0], moved]).persistent == ()


def test_a_node_with_a_quick_rank_is_no_slow_node(found, new_ranks) -> None:
    one = found([new_ranks([10.0, 10.0, 12.0, 10.0, 12.0, 12.0, 10.0, 10.0], node=[0, 0, 1, 1, 2, 2, 3, 3])])
    assert (one.persistent, one.slow_nodes) == ((2, 4, 5), (2,))
    assert one.finding.startswith("Node 2 (ranks 4 and 5) and rank 2 are persistently slow")


def test_nodes_of_one_rank_and_a_single_node_are_ranks(found, new_ranks) -> None:
    for node in ([0, 1, 2], [0, 0, 0]):
        one = found([new_ranks([10.0, 10.0, 12.0], node=node)])
        assert (one.persistent, one.slow_nodes) == ((2,), ())
        assert one.finding.startswith("Rank 2 is persistently slow")


@pytest.mark.parametrize(
    ("rows", "compute", "persistent", "laden_ranks"),
    [
        # Twice the rows in 1.5 times the compute: rows have half of it, on all ranks.
        ([80.0, 100.0, 120.0, 200.0], [9.0, 10.0, 11.0, 15.0], (), (2, 3)),
        # As many rows on all ranks, within 1 %.
        ([100.0, 101.0, 99.0, 100.0], [10.0, 10.0, 10.0, 15.0], (3,), ()),
        # Rows have half of the compute, and rank 1 is slow beyond the 2.5 % that its own 5 % explain.
        ([80.0, 105.0, 100.0, 100.0, 120.0], [9.0, 13.0, 10.0, 10.0, 11.0], (1,), (4,)),
        # The fewer rows, the slower: rows explain nothing.
        ([100.0, 100.0, 60.0], [10.0, 10.0, 13.0], (2,), ()),
        # A step grows at most as its rows do: 8 % of 10.5 % leave less than 3 %, and 5 % more than that.
        ([100.0, 100.0, 108.0], [10.0, 10.0, 11.05], (), (2,)),
        ([100.0, 100.0, 105.0], [10.0, 10.0, 11.05], (2,), ()),
    ],
)
def test_a_rank_whose_rows_explain_its_compute_is_laden_and_not_slow(
    found, new_ranks, rows, compute, persistent, laden_ranks
) -> None:
    one = found([new_ranks(compute, 0.001, rows=rows)] * 2)
    assert (one.persistent, one.laden) == (persistent, laden_ranks)
    assert one.marked == tuple(sorted((*persistent, *laden_ranks)))
    # In a run without rows nothing is known of them.
    assert found([new_ranks(compute, 0.001, rows=rows), new_ranks(compute, 0.001)]).laden == ()


def test_a_laden_rank_is_told_with_its_rows_and_without_its_host(found, new_ranks) -> None:
    hosts = ["n5", "n5", "n6", "n6"]
    run = new_ranks([10.0, 10.0, 10.0, 14.0], 0.001, rows=[90.0, 100.0, 100.0, 160.0], host=hosts)
    one = found([run])
    assert one.slow_names == "rank 3"
    # 14 less the mean of all four, 11.
    assert one.finding == (
        "Rank 3 is laden: 60.0 % more rows, and 40.0 % more compute, than the median rank in the one run, "
        "and the slowest of all in 25.0 % of the steps (25.0 % by chance). The mean rank loses 3.00 ms a "
        "step to that."
    )
    both = msgspec.structs.replace(run, compute_ns=[round(ms * MS) for ms in (10, 12, 10, 14)])
    assert found([both]).clause == (
        "Rank 1 on n5 is persistently slow: 9.1 % above the median rank in the one run; rank 3 is laden: "
        "60.0 % more rows, and 27.3 % more compute, than the median rank in the one run"
    )


def test_two_ranks_are_laden_by_as_much_as_their_rows_differ() -> None:
    # Of two ranks the median is the mean: 20 % and 10 % on both sides of it.
    assert laden([-0.2, 0.2], [-0.1, 0.1]) == (1,)
    assert laden([-0.02, 0.02], [-0.1, 0.1]) == ()
    assert laden([0.2, -0.2], [-0.1, 0.1]) == ()


def test_random_skew_is_no_slow_rank_and_its_loss_is_named(found, new_ranks, new_budget) -> None:
    runs = [new_ranks([10.0, 10.1, 9.9, 10.0], 1.0)]
    one = found(runs, [new_budget(10.0, wait=0.9)])
    assert one.persistent == ()
    # The largest mean is 10.1, the mean of them 10.0: one of four equal ranks is the slowest by chance.
    assert one.persistent_wait_ns == 0
    assert one.random_wait_ns == pytest.approx(0.9 * MS)
    assert one.finding == (
        "No rank of 4 is persistently slow; the mean rank loses 900 us a step to random skew."
    )


def test_the_wait_is_split_over_the_means_of_the_runs(new_ranks) -> None:
    runs = [new_ranks([10.0, 12.0]), new_ranks([10.0, 14.0])]
    # Rank 1 needs 13 ms over the runs, rank 0 10: 1.5 above their mean; of waits of 2 and 3 ms 1.0 is left.
    assert split_wait(runs, [2 * MS, 3 * MS], slow=True) == (1.5 * MS, 1.0 * MS)
    assert split_wait(runs, [], slow=True) == (1.5 * MS, None)
    assert split_wait(runs, [1 * MS], slow=True) == (1.5 * MS, 0.0)
    assert split_wait(runs, [2 * MS, 3 * MS], slow=False) == (0.0, 2.5 * MS)


def test_clean_runs_raise_no_more_alarms_than_stated(ranks_of) -> None:
    """2,000 runs of 32 equal ranks whose steps vary by half, so that 3 % is nothing.

    Two alarms are expected at most; nine or more come by chance once in 4,000 such tests. Without
    Bonferroni's correction there would be some 60.
    """
    rng = np.random.default_rng(7)
    alarms = sum(bool(persistently_slow([ranks_of(_noise(rng, 0.5, 32))])) for _ in range(2000))
    assert stats.poisson.sf(8, 2000 * FALSE_ALARM) < 1 / 4000
    assert alarms < 9


def test_a_planted_rank_is_found_in_every_study(ranks_of) -> None:
    """10 % slower, with steps that vary by 5 %: missed in no study of 200."""
    rng = np.random.default_rng(9)
    pace = np.where(np.arange(16) == 5, 1.1, 1.0)[:, None]
    for _ in range(200):
        runs = [ranks_of(_noise(rng, 0.05) * pace) for _ in range(2)]
        assert persistently_slow(runs) == (5,)


def _noise(rng: np.random.Generator, spread: float, ranks: int = 16) -> np.ndarray:
    return (1 + spread * rng.standard_normal((ranks, 50))) * 10 * MS


def test_without_ranks_there_are_no_stragglers(new_cell, new_run, new_ranks, figures_of) -> None:
    cell = new_cell(2)
    assert stragglers(figures_of(cell, [new_run(cell)])) is None
    alone = new_cell(1)
    assert stragglers(figures_of(alone, [new_run(alone, ranks=new_ranks([10.0]))])) is None


def test_runs_without_ranks_are_not_counted(new_cell, new_run, new_ranks, figures_of) -> None:
    cell = new_cell(3)
    runs = [new_run(cell), new_run(cell, ranks=new_ranks([10.0, 12.0, 10.0]))]
    one = stragglers(figures_of(cell, runs))
    assert (one.runs, one.persistent) == (1, (1,))
    assert "in the one run" in one.finding


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((3,), "rank 3"),
        ((3, 4), "ranks 3 and 4"),
        ((4, 5, 6, 7), "ranks 4 to 7"),
        ((1, 3, 6), "ranks 1, 3 and 6"),
        (tuple(range(0, 24, 2)), "12 ranks"),
    ],
)
def test_ranks_in_words(numbers, text) -> None:
    assert numbered("rank", numbers) == text
