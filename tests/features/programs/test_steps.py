"""Which of a program's steps are warm-up, and which are measured."""

from __future__ import annotations

import pytest

from harness.features.programs.worker.child import LogLine
from harness.features.programs.worker.run import losses_of, times_of
from harness.features.programs.worker.steps import Blocks
from results.cell import StepPolicy

MS = 1_000_000
POLICY = StepPolicy(block_steps=2, warmup_max_steps=8, min_blocks=3, max_blocks=5, target=0.5, budget_s=1e9)


def test_the_warm_up_ends_when_two_blocks_are_alike_on_the_slowest_rank() -> None:
    # Blocks of rank 1 take 200, 100 and 100 ms; rank 0 is always faster.
    blocks = Blocks(POLICY, on_gpu=False)
    slow = [100 * MS, 100 * MS, *[50 * MS] * 4]
    blocks.extend([[10 * MS] * 6, slow])
    assert (blocks.warmup, blocks.steady, blocks.walls_ns) == (6, True, [])


def test_steps_that_come_bit_by_bit_are_divided_as_if_they_came_at_once() -> None:
    steps = [90 * MS, 80 * MS, *[50 * MS] * 20]
    once, bitwise = Blocks(POLICY, on_gpu=False), Blocks(POLICY, on_gpu=False)
    once.extend([steps])
    for taken in range(1, len(steps) + 1):
        bitwise.extend([steps[:taken]])
    assert vars(once) == vars(bitwise)
    # Five blocks are the most, and too few for an interval.
    assert once.stop == "blocks"


def test_an_unsteady_warm_up_ends_at_its_limit() -> None:
    blocks = Blocks(POLICY, on_gpu=False)
    blocks.extend([[step * MS for step in (10, 10, 20, 20, 40, 40, 80, 80, 160)]])
    assert (blocks.warmup, blocks.steady) == (8, False)


def test_measuring_ends_at_the_budget() -> None:
    policy = StepPolicy(block_steps=1, warmup_max_steps=0, min_blocks=2, budget_s=1.0, target=0.0)
    blocks = Blocks(policy, on_gpu=False)
    blocks.extend([[300 * MS] * 10])
    # 0.9 s are fewer than the budget, and 1.2 s are more.
    assert (len(blocks.walls_ns), blocks.stop, blocks.last) == (4, "budget", 4)


@pytest.mark.parametrize(("given", "enough"), [(7, False), (8, True)])
def test_a_program_that_ends_has_enough_steps_with_the_fewest_blocks(given, enough) -> None:
    policy = StepPolicy(block_steps=2, warmup_max_steps=2, min_blocks=3, target=0.0)
    blocks = Blocks(policy, on_gpu=False)
    blocks.extend([[10 * MS] * given])
    assert blocks.enough is enough


def test_on_a_gpu_the_warm_up_lasts_by_time_and_blocks_are_long() -> None:
    blocks = Blocks(POLICY, on_gpu=True)
    blocks.extend([[50 * MS] * 400])
    # 10 s of warm-up, and blocks of half a second.
    assert (blocks.warmup, blocks.steps, blocks.steady) == (200, 10, True)


def test_lines_of_every_few_steps_give_times_and_losses_of_all() -> None:
    # Steps 110, 112 and 115 are printed at 1 s, 1.2 s and 1.8 s.
    times, steps, losses = (1000, 1200, 1800), (110, 112, 115), (3.0, 2.0, 1.0)
    unseen = [LogLine(at * MS, 0, step, loss) for at, step, loss in zip(times, steps, losses, strict=True)]
    assert times_of(unseen) == [100 * MS] * 2 + [200 * MS] * 3
    assert losses_of(unseen) == [2.0] * 2 + [1.0] * 3
    # Where all steps are seen, those up to the first line have its loss; the first step has no time.
    seen = [line._replace(seen=line.step - 100) for line in unseen]
    assert losses_of(seen) == [3.0] * 9 + [2.0] * 2 + [1.0] * 3
    assert losses_of([]) == []


def test_a_line_that_repeats_or_lowers_the_count_takes_no_time_away() -> None:
    # The step after the first line takes 1 s, whatever is printed meanwhile.
    steps = ((0, 5), (900, 5), (950, 3), (1000, 6))
    assert times_of([LogLine(at * MS, 0, step, None) for at, step in steps]) == [1000 * MS]
