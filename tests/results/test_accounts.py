"""The budget of a step and the columns of the ranks, worked out by hand; times are in ns.

Every run here has timed blocks of 2 steps in 60 ns, 30 a step, of which the data phase takes 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.derivation.run_result import derive
from results.errors import SchemaError
from results.record import ExpertRows, KernelTimes, Operations, Quads, Recorded, StepColumns
from results.run import RunResult, StepBudget

Make = Callable[..., RunResult]


@pytest.fixture(scope="session")
def run_of(cell_of, record_of, columns_of) -> Make:
    """Derives a run of as many ranks as `each` has entries: the fields of each rank's record."""

    def run(each: Sequence[dict[str, object]], **fields: object) -> RunResult:
        cell = cell_of(gpus=len(each), strategy="ddp" if len(each) > 1 else "single")
        plain = {"blocks_ns": [60, 60, 60], "steps": columns_of(6, 30), **fields}
        records = [record_of(cell, rank, **(plain | own)) for rank, own in enumerate(each)]
        return derive(cell, "run-1", records, None)

    return run


def _quads(off: list[int], on_first: list[int], on_second: list[int], *, steps: int = 1) -> Quads:
    """The quads of one rank, from the single steps of its off blocks, whose walls are their sums."""
    blocks = [sum(off[at : at + steps]) for at in range(0, len(off), steps)]
    return Quads(
        steps=steps,
        on_first_ns=on_first,
        off_first_ns=blocks[0::2],
        off_second_ns=blocks[1::2],
        on_second_ns=on_second,
        off_step_ns=off,
    )


def _sum(budget: StepBudget) -> float:
    parts = (budget.input_ns, budget.compute_ns, budget.transfer_ns.value, budget.wait_ns.value)
    return sum(parts) + (budget.imbalance_ns or 0) + (budget.bubble_ns or 0) + budget.other_ns


def _budget(run: RunResult) -> StepBudget:
    assert run.budget is not None
    assert _sum(run.budget) == pytest.approx(run.step_ns.value, abs=1e-9)
    return run.budget


# Two quads of three ranks; blocks of one step, so two off steps a quad. Rank 2 is slow.
SLOW_RANK = [
    {"quads": _quads([10, 10, 10, 12], on_first=[25, 23], on_second=[27, 26])},
    {"quads": _quads([12, 14, 10, 10], on_first=[24, 24], on_second=[25, 25])},
    {"quads": _quads([20, 21, 22, 20], on_first=[26, 24], on_second=[25, 22])},
]


def test_a_slow_rank_is_wait_of_the_others(run_of) -> None:
    # Quad 1: compute (10 + 10 + 12 + 14 + 20 + 21) / 6 = 14.5; slowest (20 + 21) / 2 = 20.5; wait 6;
    # on to the last rank (26 + 27) / 2 = 26.5; transfer 6.
    # Quad 2: compute (10 + 12 + 10 + 10 + 22 + 20) / 6 = 14; slowest (22 + 20) / 2 = 21; wait 7;
    # on (24 + 26) / 2 = 25; transfer 4.
    budget = _budget(run_of(SLOW_RANK))
    assert (budget.method, budget.input_ns, budget.compute_ns) == ("on-off", 3, 14.25)
    wait, transfer = budget.wait_ns, budget.transfer_ns
    assert (wait.value, wait.low, wait.high) == (6.5, 6, 7)
    assert (transfer.value, transfer.low, transfer.high) == (5, 4, 6)
    assert (wait.unit, wait.samples, wait.interval) == ("ns", 2, "range")
    # 30 - (3 + 14.25 + 5 + 6.5)
    assert (budget.bubble_ns, budget.other_ns) == (None, 1.25)


def test_wait_that_the_rows_of_experts_explain_is_imbalance(run_of) -> None:
    """Ranks compute 10.5, 11.5 and 20.75 ns. Where rank 2 has twice the rows of the others, rows have 9.25 of
    11.5 ns, and the mean rank loses 2 / 3 of 9.25 ns to them."""

    def budget(*rows: int) -> StepBudget:
        counted = [[ExpertRows(module="a", first=0, rows=[number])] for number in rows]
        return _budget(
            run_of([own | {"experts": each} for own, each in zip(SLOW_RANK, counted, strict=True)])
        )

    even, uneven, reversed_ = budget(60, 60, 60), budget(60, 60, 120), budget(120, 120, 60)
    assert (even.imbalance_ns, even.wait_ns.value) == (0, 6.5)
    assert (reversed_.imbalance_ns, reversed_.wait_ns.value) == (0, 6.5)
    assert uneven.imbalance_ns == pytest.approx(9.25 * 2 / 3)
    assert uneven.wait_ns.value == pytest.approx(6.5 - 9.25 * 2 / 3)


def test_where_no_rank_differs_transfer_is_all_that_is_exposed(run_of) -> None:
    off, on_first, on_second = [10, 12, 11, 9, 10, 14, 10, 10], [26, 24], [23, 27]
    run = run_of([{"quads": _quads(off, on_first, on_second, steps=2)}] * 3)
    budget = _budget(run)
    assert (budget.wait_ns.value, budget.wait_ns.low, budget.wait_ns.high) == (0, 0, 0)
    # (26 + 23 - 42) / 4 = 1.75 and (24 + 27 - 44) / 4 = 1.75
    assert budget.transfer_ns == run.exposed_ns
    assert budget.transfer_ns.value == 1.75


@pytest.mark.parametrize(("copies_ns", "high"), [(50, 1050), (53, 1103)])
def test_copies_without_exchange_make_the_exposed_time_a_range(run_of, copies_ns, high) -> None:
    # On 3,000 in the mean and off 2,000. 50 of 1,050 are less than 5 %, and 53 of 1,053 are more.
    off, on = [2000] * 4, [2950, 3050]
    copies = [[copies_ns, copies_ns, 1, copies_ns], [1, copies_ns - 1, copies_ns, 2 * copies_ns]]
    quads = [msgspec.structs.replace(_quads(off, on, on), copies_ns=own) for own in copies]
    run = run_of([{"quads": own} for own in quads])
    # Of the rank with most, the median: a block that was disturbed does not count.
    assert run.copies_ns == copies_ns
    for found in (run.exposed_ns, _budget(run).transfer_ns):
        assert (found.value, found.low, found.high) == (1000, 950, high)
    assert _budget(run_of([{"quads": _quads(off, on, on)}] * 2)).transfer_ns.high == 1050


def test_six_quads_give_students_interval(run_of) -> None:
    # Transfers 1 .. 6: 3.5 +- 2.570582 x sqrt(3.5 / 6)
    on = [11, 12, 13, 14, 15, 16]
    budget = _budget(run_of([{"quads": _quads([10] * 12, on, on)}] * 2))
    assert budget.transfer_ns.value == 3.5
    assert budget.transfer_ns.high == pytest.approx(3.5 + 1.963314)
    assert budget.transfer_ns.interval == "t95-quads"


@st.composite
def _some_quads(draw: st.DrawFn) -> tuple[int, list[Quads]]:
    ranks, quads, period = draw(st.integers(2, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    steps = period * draw(st.integers(1, 3))
    times = st.integers(1, 10**9)

    def some(number: int) -> list[int]:
        return draw(st.lists(times, min_size=number, max_size=number))

    rows = [(some(2 * steps * quads), some(quads), some(quads)) for _ in range(ranks)]
    return period, [_quads(off, first, second, steps=steps) for off, first, second in rows]


def _by_loops(period: int, ranks: list[Quads]) -> tuple[Fraction, Fraction, Fraction]:
    """Compute, wait and transfer in exact fractions, one step after another."""
    steps, quads = ranks[0].steps, len(ranks[0].on_first_ns)
    computes, waits, transfers = [], [], []
    for quad in range(quads):
        compute = slowest = Fraction(0)
        for begin in range(2 * steps * quad, 2 * steps * (quad + 1), period):
            sums = [sum(own.off_step_ns[begin : begin + period]) for own in ranks]
            compute += Fraction(sum(sums), len(sums))
            slowest += max(sums)
        on = max(own.on_first_ns[quad] for own in ranks) + max(own.on_second_ns[quad] for own in ranks)
        computes.append(compute / (2 * steps))
        waits.append((slowest - compute) / (2 * steps))
        transfers.append((on - slowest) / (2 * steps))
    return tuple(sum(values) / quads for values in (computes, waits, transfers))


@given(_some_quads())
def test_the_budget_is_that_of_plain_loops(run_of, some) -> None:
    period, quads = some
    run = run_of([{"quads": own} for own in quads], period=period)
    budget = run.budget
    found = (budget.compute_ns, budget.wait_ns.value, budget.transfer_ns.value)
    assert found == pytest.approx([float(value) for value in _by_loops(period, quads)], rel=1e-9, abs=1e-3)
    assert budget.wait_ns.value > -1e-3
    # Times of up to a second, as doubles.
    assert _sum(budget) == pytest.approx(30, abs=1e-3)


@pytest.mark.parametrize("period", [2, 0])
def test_an_off_block_that_is_no_whole_periods_is_refused(run_of, period) -> None:
    each = [{"quads": _quads([10] * 4, [12, 12], [12, 12])}] * 2
    with pytest.raises(SchemaError, match=rf"1 steps, not a multiple of the period {period}"):
        run_of(each, period=period)


def test_ranks_of_which_one_kept_no_single_steps_are_refused(run_of) -> None:
    whole = _quads([10] * 4, [12, 12], [12, 12])
    without = msgspec.structs.replace(whole, off_step_ns=[])
    with pytest.raises(SchemaError, match="did not measure the same blocks and steps"):
        run_of([{"quads": whole}, {"quads": without}])


def _allreduces(durations: list[int], group: str = "0-1") -> Operations:
    """One a step."""
    steps = len(durations)
    return Operations(
        names=["allreduce"],
        groups=[group],
        step=list(range(steps)),
        name=[0] * steps,
        group=[0] * steps,
        payload_bytes=[100] * steps,
        issued_ns=[1] * steps,
        duration_ns=durations,
    )


# Time blocked by step (6 + 2) / 2 = 4 and (8 + 4) / 2 = 6; wait of rank 0: 7 - 4 = 3 and 9 - 5 = 4, so by
# step 1.5 and 2. Steps take (20 + 20 + 22 + 24) / 4 = 21.5.
RECORDED = [
    Recorded(step_ns=[20, 22], blocked_ns=[6, 8], operations=_allreduces([7, 9])),
    Recorded(step_ns=[20, 24], blocked_ns=[2, 4], operations=_allreduces([4, 5])),
]


def _each(recorded: list[Recorded | None], **changes: list[object]) -> list[dict[str, object]]:
    """The recorded steps of each rank, with the values of a field replaced rank by rank."""
    return [
        {
            "recorded": own
            and msgspec.structs.replace(own, **{name: each[rank] for name, each in changes.items()})
        }
        for rank, own in enumerate(recorded)
    ]


def test_without_quads_the_budget_is_by_the_recorder(run_of) -> None:
    budget = _budget(run_of(_each(RECORDED)))
    assert (budget.method, budget.input_ns) == ("recorded", 3)
    # 21.5 - 5 - 3
    assert budget.compute_ns == 13.5
    assert (budget.wait_ns.value, budget.transfer_ns.value) == (1.75, 3.25)
    assert (budget.wait_ns.samples, budget.wait_ns.interval) == (2, None)
    # 30 - 3 - 13.5 - 5
    assert budget.other_ns == 8.5


def test_the_recorder_gives_way_to_quads(run_of) -> None:
    each = [{"quads": _quads([10] * 4, [12, 12], [12, 12]), "recorded": own} for own in RECORDED]
    assert _budget(run_of(each)).method == "on-off"
    old = msgspec.structs.replace(_quads([10] * 4, [12, 12], [12, 12]), off_step_ns=[])
    assert _budget(run_of([{"quads": old, "recorded": own} for own in RECORDED])).method == "recorded"


def test_wait_that_is_hidden_behind_compute_is_not_in_the_budget(run_of) -> None:
    # Rank 0 waits 96 and 95 in its collectives; blocked are 5 in the mean.
    operations = [_allreduces([100, 100]), _allreduces([4, 5])]
    budget = _budget(run_of(_each(RECORDED, operations=operations)))
    assert (budget.wait_ns.value, budget.transfer_ns.value, budget.compute_ns) == (5, 0, 13.5)


def test_recorded_steps_get_an_interval_by_batch_means(run_of) -> None:
    # Both ranks alike, so no wait; transfers 1 .. 6 as above.
    recorded = Recorded(
        step_ns=[20] * 6, blocked_ns=[1, 2, 3, 4, 5, 6], operations=_allreduces([9, 9, 9, 9, 9, 9])
    )
    budget = _budget(run_of(_each([recorded, recorded])))
    assert budget.transfer_ns.high == pytest.approx(3.5 + 1.963314)
    assert (budget.transfer_ns.samples, budget.transfer_ns.interval) == (6, "t95-batch-means")


def test_the_bubble_is_no_exposed_communication(run_of) -> None:
    # Bubbles by step (4 + 0) / 2 = 2 and (6 + 0) / 2 = 3: exposed 4 - 2 and 6 - 3, in the mean 2.5 of 5.
    budget = _budget(run_of(_each(RECORDED, bubble_ns=[[4, 6], [0, 0]])))
    assert (budget.bubble_ns, budget.compute_ns) == (2.5, 13.5)
    assert (budget.wait_ns.value, budget.transfer_ns.value) == (1.75, 0.75)
    # More bubble than the thread was blocked leaves nothing exposed, not less.
    budget = _budget(run_of(_each(RECORDED, bubble_ns=[[40, 60], [0, 0]])))
    assert (budget.bubble_ns, budget.wait_ns.value, budget.transfer_ns.value) == (25, 0, 0)


def test_the_bubble_is_in_the_on_steps_alone_and_taken_off_transfer(run_of) -> None:
    each = [
        {"quads": _quads([10] * 4, [12, 12], [12, 12]), **own}
        for own in _each(RECORDED, bubble_ns=[[4, 6], [0, 0]])
    ]
    budget = _budget(run_of(each))
    assert (budget.method, budget.compute_ns, budget.bubble_ns) == ("on-off", 10, 2.5)
    assert (budget.transfer_ns.value, budget.other_ns) == (-0.5, 15)


def test_unequal_stage_times_count_as_wait_and_not_as_bubble(run_of) -> None:
    # Stages of 8 and 12 in steps of 14: compute 10, the slowest 12, wait 2. They waited 6 and 2: 4 in the
    # mean, of which 2 are the wait; nothing is left for transfer.
    bubbles = _each(RECORDED, bubble_ns=[[6, 6], [2, 2]])
    each = [
        {"quads": _quads([alone] * 4, [14, 14], [14, 14]), **own}
        for alone, own in zip((8, 12), bubbles, strict=True)
    ]
    budget = _budget(run_of(each))
    assert (budget.compute_ns, budget.wait_ns.value, budget.bubble_ns) == (10, 2, 2)
    assert budget.transfer_ns.value == 0


def test_on_cuda_exposed_is_what_does_not_overlap(run_of) -> None:
    # Rank 0 (12 - 4) / 2 = 4 a step, rank 1 (8 - 4) / 2 = 2: 3 in the mean, of which 1.75 is wait.
    kernels = [
        KernelTimes(steps=2, compute_ns=30, communication_ns=12, overlap_ns=4),
        KernelTimes(steps=2, compute_ns=30, communication_ns=8, overlap_ns=4),
    ]
    budget = _budget(run_of(_each(RECORDED, blocked_ns=[None, None], kernels=kernels)))
    assert (budget.wait_ns.value, budget.transfer_ns.value, budget.compute_ns) == (1.75, 1.25, 15.5)
    assert (budget.transfer_ns.samples, budget.transfer_ns.interval) == (1, None)


def test_one_rank_has_its_step_to_itself(run_of) -> None:
    # 3 data, 6 forward, 15 backward, 1 (30 // 20) optimizer: 22 of compute; 5 of the 30 are outside.
    budget = _budget(run_of([{}]))
    assert (budget.method, budget.input_ns, budget.compute_ns, budget.other_ns) == ("one rank", 3, 22, 5)
    for part in (budget.transfer_ns, budget.wait_ns):
        assert (part.value, part.low, part.high, part.samples) == (0, None, None, 1)


OLD_QUADS = Quads(steps=1, on_first_ns=[9], off_first_ns=[8], off_second_ns=[8], on_second_ns=[9])
NEITHER = (
    "no blocks without exchange ({}), and no time blocked by the recorder that could be taken apart ({})"
)
NOT_RECORDED = "not recorded, or by sends between two ranks"


@pytest.mark.parametrize(
    ("each", "why"),
    [
        (
            [{"quads": OLD_QUADS}] * 2,
            "the single steps of its blocks without exchange were not kept: an older bench measured it",
        ),
        (
            [{"absent": {"quads": "not asked for", "recorded": "too many operations"}}] * 2,
            NEITHER.format("not asked for", "too many operations"),
        ),
        ([{"recorded": RECORDED[0]}, {}], NEITHER.format("none were measured", NOT_RECORDED)),
        (
            _each(RECORDED, blocked_ns=[[6, 8], None]),
            NEITHER.format("none were measured", NOT_RECORDED),
        ),
    ],
)
def test_a_run_without_a_budget_says_why(run_of, each, why) -> None:
    run = run_of(each)
    assert (run.budget, run.absent["budget"]) == (None, why)


OFF = ([10, 12, 10, 12], [11, 11, 3, 15])


def test_the_columns_have_one_value_a_rank(run_of) -> None:
    # Rank 0: mean 11, squares 4 x 1 over 3: sd 1.15. Rank 1: mean 10, squares 1 + 1 + 49 + 25 = 76 over 3:
    # sd 5.03. The slowest in steps 1 and 4: rank 1, in 2 and 3: rank 0.
    each = [
        {"quads": _quads(own, [12, 12], [12, 12]), "recorded": recorded, "node_rank": rank + 3}
        for rank, (own, recorded) in enumerate(zip(OFF, RECORDED, strict=True))
    ]
    columns = run_of(each).ranks
    assert (columns.node, columns.compute_ns, columns.compute_sd_ns) == ([3, 4], [11, 10], [1, 5])
    assert (columns.slowest_share, columns.steps) == ([0.5, 0.5], 4)
    # Wait of rank 0: 3 and 4, so 3.5, of rank 1 nothing; blocked 6 and 8, 2 and 4.
    assert (columns.wait_ns, columns.blocked_ns) == ([4, 0], [7, 3])


def test_the_slowest_is_the_one_that_is_waited_for(run_of) -> None:
    # Period 2: 22 and 22, which both share, then 22 and 18.
    each = [{"quads": _quads(own, [24], [24], steps=2)} for own in OFF]
    columns = run_of(each, period=2).ranks
    assert (columns.slowest_share, columns.wait_ns, columns.blocked_ns) == ([0.75, 0.25], None, None)


def test_shares_of_the_slowest_add_up(run_of) -> None:
    columns = run_of([{"quads": _quads([10] * 4, [12, 12], [12, 12])}] * 3).ranks
    assert columns.slowest_share == [0.333333] * 3
    columns = run_of(SLOW_RANK).ranks
    assert columns.slowest_share == [0, 0, 1]


def test_without_off_steps_or_others_there_are_no_columns(run_of) -> None:
    assert run_of(_each(RECORDED)).ranks is None
    assert run_of([{"quads": _quads([10] * 4, [12, 12], [12, 12])}]).ranks is None


def test_input_is_that_of_the_slowest_rank_because_the_others_wait_for_it(run_of) -> None:
    # Data of 3 and 53 of a step of 30: the second rank's 53 is what the step loses to input.
    slow = StepColumns(
        step_ns=[75] * 2, data_ns=[53] * 2, forward_ns=[6] * 2, backward_ns=[15] * 2, optimizer_ns=[1] * 2,
        loss=[1.0] * 2,
    )  # fmt: skip
    fast = msgspec.structs.replace(slow, data_ns=[3, 3])
    quads = _quads([10] * 4, [12, 12], [12, 12])
    two_steps = {"quads": quads, "blocks_ns": [150]}
    budget = _budget(run_of([two_steps | {"steps": fast}, two_steps | {"steps": slow}]))
    assert budget.input_ns == 53


def test_sends_alone_have_no_wait_that_is_told_apart(run_of) -> None:
    sends = Operations(
        names=["send"], groups=["0-1"], step=[0, 1], name=[0, 0], group=[0, 0], payload_bytes=[4, 4],
        issued_ns=[1, 1], duration_ns=[2, 2],
    )  # fmt: skip
    recorded = [msgspec.structs.replace(own, operations=sends) for own in RECORDED]
    run = run_of([{"recorded": own} for own in recorded])
    assert run.budget is None
    assert "by sends between two ranks" in run.absent["budget"]
    quads = _quads([10] * 4, [12, 12], [12, 12])
    run = run_of([{"recorded": own, "quads": quads} for own in recorded])
    assert run.ranks.wait_ns is None
