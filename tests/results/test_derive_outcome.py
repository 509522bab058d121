"""How a run ends, read from its rank records and from what the supervisor saw; and what cannot be one run."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest
from builders import a_work, steps_of
from launching import an_attempt

from results.derivation.run_result import derive
from results.errors import SchemaError
from results.launch import Attempt
from results.outcome import Outcome
from results.record import Memory, Quads, StepColumns


def _attempt(**fields: object) -> Attempt:
    return an_attempt(**{"launch_id": "launch-9", "exit_code": 1} | fields)


def test_replicas_that_differ_are_a_crash_without_figures(two) -> None:
    run = two(parameters_hash=("aa", "bb"))
    assert run.outcome is Outcome.CRASHED
    assert run.reason == "the replicas' parameters differ at the end of the run"
    assert (run.step_ns, run.samples_per_s) == (None, None)
    assert two().replicas_agree is True


WORST_FIRST = [
    Outcome.OUT_OF_MEMORY,
    Outcome.DIVERGED,
    Outcome.PROOF_FAILED,
    # A rank that refuses, whatever then becomes of the others.
    Outcome.SKIPPED,
    Outcome.CRASHED,
    Outcome.HUNG,
    Outcome.TIMED_OUT,
    Outcome.PREEMPTED,
    Outcome.NODE_FAILED,
    Outcome.CANCELLED,
    Outcome.MISSING_RANKS,
    Outcome.UNKNOWN,
]


def test_every_outcome_has_its_place_among_the_worst() -> None:
    assert {*WORST_FIRST, Outcome.OK} == set(Outcome)


def test_the_worst_outcome_wins_and_names_its_rank(two) -> None:
    # The collateral crash of rank 0 must not hide that rank 1 ran out of memory.
    for worse, better in combinations(WORST_FIRST, 2):
        run = two(outcome=(better, worse), reason=("collateral", "the cause"))
        assert (run.outcome, run.reason) == (worse, "rank 1: the cause")


def test_one_bad_rank_is_enough_and_the_first_of_equals_is_named(two) -> None:
    assert two(outcome=(Outcome.OK, Outcome.HUNG), reason=(None, "silent")).reason == "rank 1: silent"
    both = two(outcome=Outcome.CRASHED, reason=("first", "second"))
    assert (both.outcome, both.reason, both.step_ns) == (Outcome.CRASHED, "rank 0: first", None)


def test_missing_ranks_without_an_attempt_may_still_come(cell_of, record_of) -> None:
    run = derive(cell_of(), "run-1", [record_of(cell_of(), 0)], None)
    assert (run.outcome, run.ranks_present, run.ranks_expected) == (Outcome.UNKNOWN, 1, 2)
    assert "may still be running" in run.reason
    assert (run.launch_id, run.repeat) == ("launch-1", 1)


def test_missing_ranks_end_as_the_supervisor_saw_it(cell_of, record_of) -> None:
    attempt = _attempt(outcomes={"run-1": Outcome.PREEMPTED}, reasons={"run-1": "SIGTERM from the node"})
    run = derive(cell_of(), "run-1", [record_of(cell_of(), 1)], attempt)
    assert (run.outcome, run.reason) == (Outcome.PREEMPTED, "SIGTERM from the node")


def test_missing_ranks_of_an_ended_launch_are_counted(cell_of, record_of) -> None:
    cell = cell_of(gpus=3)
    run = derive(cell, "run-1", [record_of(cell, 1)], _attempt())
    assert (run.outcome, run.reason) == (Outcome.MISSING_RANKS, "2 of 3 ranks left no record")
    empty = derive(cell, "run-1", [], _attempt())
    assert (empty.outcome, empty.launch_id, empty.started_at) == (Outcome.MISSING_RANKS, "launch-9", None)


def test_whole_records_count_whatever_the_supervisor_saw(cell_of, record_of) -> None:
    # The launch was cancelled after this run was done.
    attempt = _attempt(outcomes={"run-1": Outcome.CANCELLED})
    records = [record_of(cell_of(), rank) for rank in range(2)]
    assert derive(cell_of(), "run-1", records, attempt).outcome is Outcome.OK


@pytest.mark.parametrize(
    "fields",
    [
        {"blocks_ns": ([100], [100, 100])},
        {"block_steps": (2, 3)},
        {"steps": (steps_of(1.0), steps_of(1.0, 1.0))},
        {"quads": (Quads(steps=2), None)},
        {"block_steps": 0},
        {"blocks_ns": []},
        {"steps": StepColumns()},
        {"warmup_loss": ([1.0], [1.0, 1.0])},
        {"period": (1, 2)},
    ],
)
def test_ranks_that_did_not_measure_the_same_are_refused(two, fields) -> None:
    with pytest.raises(SchemaError, match="did not measure the same blocks and steps"):
        two(**fields)


@pytest.mark.parametrize("fields", [{"rank": 2}, {"rank": -1}, {"gpus": 4}])
def test_a_rank_that_the_cell_does_not_have_is_refused(cell_of, record_of, fields) -> None:
    records = [record_of(cell_of(), 0), msgspec.structs.replace(record_of(cell_of(), 1), **fields)]
    with pytest.raises(SchemaError, match="the cell has 2 ranks"):
        derive(cell_of(), "run-1", records, None)


WHOLE = msgspec.structs.replace(steps_of(*[1.0] * 6), step_ns=[5] * 6)
LONG_DATA = msgspec.structs.replace(WHOLE, data_ns=[9] * 6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"blocks_ns": ([5] * 3, [10] * 3)},
            "its steps took 3e-05 ms, and the blocks that they are of 1.5e-05",
        ),
        ({"steps": (LONG_DATA, WHOLE)}, "the phases of its steps took"),
        (
            {
                "quads": Quads(
                    steps=1,
                    on_first_ns=[9],
                    off_first_ns=[3],
                    off_second_ns=[3],
                    on_second_ns=[9],
                    off_step_ns=[6, 6],
                )
            },
            "its steps without exchange took",
        ),
        # Together they are as long as their steps, and the first is shorter than its own.
        ({"blocks_ns": ([5, 10, 15], [10] * 3)}, "the steps of block 0 took"),
        ({"spent_ns": {"measure": 20}}, "its blocks took"),
    ],
    ids=["blocks", "phases", "quads", "block", "part"],
)
def test_a_record_whose_times_contradict_each_other_has_no_figure(two, fields, words) -> None:
    whole = {"steps": WHOLE, "blocks_ns": [10] * 3, "block_steps": 2}
    assert two(**whole).outcome is Outcome.OK
    run = two(**(whole | fields))
    assert (run.outcome, run.step_ns) == (Outcome.CRASHED, None)
    assert run.reason.startswith(f"rank 0: its times contradict each other: {words}")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_steps": 4}, "6 steps, and 3 blocks of 4"),
        ({"blocks_ns": [100] * 6}, "6 steps, and 6 blocks of 2"),
        ({"work": a_work(samples=16)}, "16 samples, and the cell gives a replica 8"),
        ({"work": a_work(units=12)}, "8 samples have 12"),
        ({"work": a_work(updates=7)}, "updated 7 times in 6 steps"),
        ({"memory": Memory(
            rss_peak_bytes=9, rss_idle_bytes=1, device_allocated_peak_bytes=8, device_reserved_peak_bytes=4,
            device_idle_bytes=0,
        )}, "8 bytes were allocated"),
        ({"work": (a_work(), a_work(flops=9))}, "FLOPs"),
        ({"work": (a_work(), a_work(parameters=9))}, "parameters"),
        ({"work": (a_work(), a_work(units=16))}, "units"),
    ],
)  # fmt: skip
def test_a_run_whose_figures_do_not_follow_from_each_other_has_no_figure(two, fields, words) -> None:
    """Events of a GPU are another clock, and counts need none."""
    run = two(clock="cuda-event", **fields)
    assert (run.outcome, run.step_ns) == (Outcome.CRASHED, None)
    assert words in run.reason
    assert "contradict" in run.reason


def test_what_a_rank_could_not_count_contradicts_nothing(two) -> None:
    assert two(work=(a_work(), a_work(flops=None))).outcome is Outcome.OK
    assert two(work=(a_work(), None), memory=None).outcome is Outcome.OK
