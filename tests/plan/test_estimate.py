from __future__ import annotations

import pytest
from builders import cell_of, nano_cell, parts_of

from harness.plan.estimate import (
    Earlier,
    StepTime,
    estimate,
    estimated_step_time,
    predicted_times,
    run_parts,
    run_times,
)
from harness.plan.schedule import schedule
from harness.plan.surroundings import Devices, Surroundings
from results.cell import StepPolicy
from results.parts import Unknown
from strategies.predictions import traffic

MLP_STEP_S = 0.016_436_428_8
"""256 samples x 3 x 2 x (784 x 512 + 512 x 256 + 256 x 10) FLOP at 50 GFLOP/s:
256 x 3 x 2 x 535,040 = 821,821,440; / 50e9."""
UPDATE_S = 4 * 535_818 * 5 / 10e9
"""SGD with momentum moves 5 values for each of 535,818 parameters, at 10 GB/s."""


def test_a_cpu_step_is_assumed_from_its_flops() -> None:
    step = estimated_step_time(cell_of(), known_ns=None, hardware=Devices())
    assert step.basis == "assumed"
    assert step.seconds == pytest.approx(MLP_STEP_S + UPDATE_S)


def test_accumulation_multiplies_the_work_of_a_step() -> None:
    step = estimated_step_time(cell_of(micro_batch=64, accumulation=4), known_ns=None, hardware=Devices())
    assert step.seconds == pytest.approx(MLP_STEP_S + UPDATE_S)


@pytest.mark.parametrize(("gpus", "crowd"), [(1, 1.0), (2, 1.0), (4, 2.0), (8, 4.0)])
def test_ranks_beyond_the_cores_share_them(gpus, crowd) -> None:
    """The exchange of compressed gradients is not predicted, and counts as none."""
    cell = cell_of(gpus=gpus, strategy="ddp", compression="bf16")
    step = estimated_step_time(cell, known_ns=None, hardware=Devices(cores=2))
    assert step.seconds == pytest.approx(MLP_STEP_S * crowd + UPDATE_S)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 1),
        ("tp", 4),
        ("fsdp:tp=2", 2),
        ("fsdp", 1),
        ("pipeline:1f1b:microbatches=4", 4),
        ("pipeline:gpipe:microbatches=4:dp=2", 2),
    ],
)
def test_a_step_is_what_auto_would_weigh(strategy, ranks) -> None:
    """The estimate of a plan and the choice of `auto` are one prediction, on real nodes too."""
    cell = nano_cell(strategy, 4, model_parallel=ranks)
    for per_node in (None, 2):
        step = estimated_step_time(cell, known_ns=None, hardware=Devices(cores=2), gpus_per_node=per_node)
        around = Surroundings.of(cell, Devices(cores=2), per_node)
        placed, parts = around.placed(cell), parts_of("gpt-nano")
        times = predicted_times(placed, parts, traffic(placed, parts), around)
        assert step.seconds == times.step
        assert step.basis == "assumed"
        assert times.exposed > 0
    # Two hosts have twice the cores, which 4 ranks no longer share.
    assert times.compute < 4 * 3 * 4 * 113_246_208 / 50e9 / 4 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("strategy", "ranks", "simulated"),
    [
        # One replica of 4 ranks is 4 times the work of one of them; so are 2 of 2.
        ("tp", 4, 4.0),
        ("fsdp:tp=2", 2, 4.0),
        # A step of 4 stages with a bubble of 3 / 4 has 4 / 7 of work in it.
        ("pipeline:1f1b", 4, 4 / 1.75),
    ],
)
def test_a_proof_simulates_whole_replicas(strategy, ranks, simulated) -> None:
    cell = cell_of(gpus=4, strategy=strategy, model_parallel=ranks)
    parts = run_parts(cell, 0.1, parameters=0, proves=True)
    assert parts["proof"] == pytest.approx(3 * 0.1 * (1 + simulated))


def test_a_gpu_step_is_assumed_from_the_catalogue() -> None:
    cell = cell_of(device="cuda", backend="nccl", precision="bf16")
    step = estimated_step_time(cell, known_ns=None, hardware=Devices(gpu_name="NVIDIA A100-SXM4-80GB"))
    # 821,821,440 FLOP at 40 % of 312 TFLOP/s: 6.585 us. The update moves 5 values at 80 % of 2,039 GB/s.
    assert step.seconds == pytest.approx(821_821_440 / 124.8e12 + UPDATE_S * 10e9 / (0.8 * 2039e9))
    assert step.basis == "assumed"


@pytest.mark.parametrize(
    ("gpu_name", "reason"),
    [
        (None, "the kind of GPU is unknown"),
        ("a device of tomorrow", "the GPU catalogue has no peak of a device of tomorrow in fp32"),
    ],
)
def test_a_gpu_without_a_known_peak_takes_its_budget(gpu_name, reason) -> None:
    cell = cell_of(device="cuda", backend="nccl")
    step = estimated_step_time(cell, known_ns=None, hardware=Devices(gpu_name=gpu_name))
    assert step == StepTime(basis="budget", seconds=Unknown(reason))
    # 6 blocks of 5 steps fill the budget of 20 s if a step takes 2/3 s; then set-up 1, the proof's 3 steps
    # and their simulation, 40 s of warm-up and a block, the budget, 9 steps before the late one, and 5 % of
    # what was measured for it. Building and checking half a million parameters is little beside that.
    steps, warm_up = 2 / 3 * (3 * 2 + 9), 40 + 5 * 2 / 3
    expected = 1 + steps + warm_up + 20 + 0.05 * (warm_up + 20)
    assert sum(run_times(cell, step, proves=True, known_s={}).values()) == pytest.approx(expected, rel=0.01)


def test_an_own_model_takes_its_budget_and_says_so() -> None:
    cells = [cell_of(workload="py:mine:build"), cell_of()]
    result = estimate(schedule(cells, repeats=1), earlier={})
    assert result.bases[cells[0].id].basis == "budget"
    assert result.notes == (
        "assumed: step times of 1 of 2 cells follow from their FLOPs and an assumed network, unmeasured",
        "assumed: 1 of 2 cells take their measuring budget: the FLOPs of py:mine:build are unknown, "
        "because planning does not run a user's own code",
    )


@pytest.mark.parametrize(
    ("step_s", "gpus", "proves", "expected"),
    [
        # Proof 3 x 0.1 x (1 + 1), warm-up 40 x 0.1, measuring 20; the late proof has 9 x 0.1 before it, and
        # 5 % of 24 s for up to 10 checks of 0.2 s.
        (0.1, 1, True, {"proof": 0.6, "warm-up": 4, "measure": 20, "late proof": 0.9 + 1.2}),
        (0.1, 1, False, {"first steps": 0.3, "warm-up": 4, "measure": 20, "late proof": 0.9 + 1.2}),
        # Proof 3 x 0.1 x (1 + 2); quads 3 x 4 blocks x 5 steps x 0.1, and blocks for the rest of the 20 s;
        # recorded 21 x 0.1. Late each rank simulates its own replica, for 5 % of 18 s.
        (
            0.1,
            2,
            True,
            {"proof": 0.9, "warm-up": 4, "measure": 14, "exposed": 6, "recording": 2.1, "late proof": 1.8},
        ),
        # A thousandth of that: 200 blocks x 5 steps x 0.0001 s end before the budget, and 10 checks of 0.2 ms
        # take less than 5 % of 0.104 s.
        (0.0001, 1, True, {"proof": 6e-4, "warm-up": 4e-3, "measure": 0.1, "late proof": 9e-4 + 2e-3}),
        # 6 blocks x 5 steps x 2 s are measured whatever the budget says; 5 % of 140 s are 7 s.
        (2.0, 1, True, {"proof": 12, "warm-up": 80, "measure": 60, "late proof": 18 + 7}),
        # Simulating 2 replicas of 3 steps of 11 s is beyond the limit of 60 s: the ranks simulate one each.
        (
            11.0,
            2,
            True,
            # One replica, then 3 steps and 3 replicas; quads 60 steps, recorded 21; 9 steps, 5 % of 770 s.
            {"proof": 77, "warm-up": 440, "measure": 330, "exposed": 660, "recording": 231}
            | {"late proof": 99 + 0.05 * 770},
        ),
    ],
)
def test_a_run_is_the_sum_of_its_parts(step_s, gpus, proves, expected) -> None:
    parts = run_parts(cell_of(gpus=gpus), step_s, parameters=0, proves=proves)
    assert parts == pytest.approx({"build": 1.0, "hash": 0.0, **expected})


@pytest.mark.parametrize(
    ("most_steps", "step_s", "warm_up", "measure", "exposed"),
    [
        # 6 blocks of half a second, and 3 quads of 4, whether a step takes 1 ms, or nothing is known of it.
        (40, 0.001, 40.5, 3, 6),
        (40, 0.0, 40.5, 3, 6),
        # Whole periods: a block has 8 steps of 0.3 s.
        (40, 0.3, 42.4, 14.4, 28.8),
        # Without a warm-up nothing is known of the step time, and blocks have 5 steps, so 8.
        (0, 0.001, 0, 0.048, 0.096),
    ],
)
def test_blocks_on_a_gpu_last_by_time(most_steps, step_s, warm_up, measure, exposed) -> None:
    steps = StepPolicy(budget_s=0, warmup_max_steps=most_steps)
    cell = cell_of(gpus=2, strategy="local-sgd:8", device="cuda", backend="nccl", steps=steps)
    parts = run_parts(cell, step_s, parameters=0, proves=False)
    found = parts["warm-up"], parts["measure"], parts["exposed"]
    assert found == pytest.approx((warm_up, measure, exposed), rel=0.01)


def test_without_quads_nothing_is_added_for_them() -> None:
    cell = cell_of(gpus=2, steps=StepPolicy(quads=0))
    assert run_parts(cell, 0.1, parameters=10**9, proves=False)["exposed"] == 0


def test_whole_periods_are_recorded_after_one_that_is_not_kept() -> None:
    plain, long = (
        run_parts(cell_of(gpus=2, strategy=name), 0.1, parameters=0, proves=False)
        for name in ("local-sgd:8", "local-sgd:50")
    )
    # Quads are blocks of a period: 3 x 4 x 8 and 3 x 4 x 50 steps; recorded 2 periods of 8 or 1 of 50.
    assert (plain["exposed"], long["exposed"]) == pytest.approx((9.6, 60))
    assert (plain["recording"], long["recording"]) == pytest.approx((3 * 0.8, 2 * 5))
    # The proof of an outer step takes a second period, which has momentum.
    outer = run_parts(cell_of(gpus=2, strategy="local-sgd:8:outer=nesterov"), 0.1, parameters=0, proves=False)
    assert (outer["first steps"], outer["late proof"]) == pytest.approx((1.6, plain["late proof"]))
    # First a whole period, and late up to two of them before the checked steps, the last 8 or 10 of a period.
    assert (plain["first steps"], long["first steps"]) == pytest.approx((0.8, 5))
    assert (plain["late proof"], long["late proof"]) == pytest.approx((1.6 + 8 * 0.2, 10 + 10 * 0.2))


def test_parameters_are_built_simulated_copied_and_hashed() -> None:
    values = 10**9
    cell = cell_of(gpus=2, strategy="ddp", optimizer="adamw")
    bare = run_parts(cell, 0.1, parameters=0, proves=True)
    costs = {
        part: seconds - bare[part]
        for part, seconds in run_parts(cell, 0.1, parameters=values, proves=True).items()
    }
    # 10 s to draw initial values; 4e9 bytes at 1.1 GB/s to hash; copies of 4e9 bytes at 2.5 GB/s.
    build, hashed, copied = 10, 4 / 1.1, 1.6
    assert costs["build"] == build
    assert costs["hash"] == pytest.approx(hashed)
    # A model is built once, and 6 copies are made for each of 3 steps.
    assert costs["proof"] == pytest.approx(build + 3 * 6 * copied + hashed)
    # Each of 3 quads copies parameters and two values of state for each, there and back.
    assert costs["exposed"] == pytest.approx(3 * 2 * 3 * copied)
    # One step is checked, which takes longer than 0.9 s, 5 % of the time of measuring.
    assert costs["late proof"] == pytest.approx(0.2 + build + 6 * copied + hashed - 0.9)
    assert costs["warm-up"] == costs["measure"] == costs["recording"] == 0
    sharded = run_parts(
        cell_of(gpus=2, strategy="fsdp", optimizer="adamw"), 0.1, parameters=values, proves=True
    )
    # A rank has half of it; and rank 0 simulates both replicas of a late step.
    assert sharded["exposed"] == pytest.approx(bare["exposed"] + 3 * 2 * 3 * copied / 2)
    assert sharded["late proof"] == pytest.approx(0.9 + 0.1 + 2 * 0.1 + build + 6 * copied + hashed)


def test_a_small_models_proof_is_simulated_whole() -> None:
    cell = cell_of(gpus=2, strategy="ddp")
    # A model of 0.1 s, 3 x (a step, 2 replicas of one, 6 copies of 16 ms), then a hash.
    parts = run_parts(cell, 0.1, parameters=10**7, proves=True)
    assert parts["proof"] == pytest.approx(0.1 + 3 * (0.1 + 2 * 0.1 + 6 * 0.016) + 0.04 / 1.1)


def test_a_long_proof_is_shared_out_or_given_up() -> None:
    cell = cell_of(gpus=8, strategy="ddp")
    # Rank 0 would take 32 s of the 20 a step has: it simulates one replica to know; then each rank its own,
    # with 0.04 s for the sum of 4e7 bytes.
    parts = run_parts(cell, 4, parameters=10**7, proves=True)
    assert parts["proof"] == pytest.approx(0.1 + 4 + 6 * 0.016 + 3 * (4 + 4 + 0.04 + 6 * 0.016) + 0.04 / 1.1)
    given_up = run_parts(cell, 25, parameters=10**7, proves=True)
    assert given_up["proof"] == pytest.approx(0.1 + 4 * 25 + 6 * 0.016 + 0.04 / 1.1)


def test_measured_times_of_earlier_runs_replace_the_model() -> None:
    cell = cell_of(gpus=2, strategy="ddp")
    spent = {"build": 7.0, "proof": 50.0, "warm-up": 0.1, "measure": 0.2, "exposed": 11.0, "late proof": 30.0}
    step = StepTime(basis="known", seconds=0.1)
    parts = run_parts(cell, 0.1, parameters=535_818, proves=False)
    # It leans on the proof; warm-up and blocks may take as long as their limits.
    expected = 7 + parts["first steps"] + 4 + 14 + 11 + parts["recording"] + parts["hash"] + 30
    assert sum(run_times(cell, step, proves=False, known_s=spent).values()) == pytest.approx(expected)
    with_proof = sum(run_times(cell, step, proves=True, known_s=spent).values())
    assert with_proof - expected == pytest.approx(50 - parts["first steps"])
    one = Earlier(step_ns=1e8, spent_s=spent)
    # What it will probably take is what it took.
    [launch] = estimate(schedule([cell], repeats=1), earlier={cell.id: one}).launches
    [(_, likely)] = launch.runs
    assert likely == pytest.approx({**parts, **{part: spent[part] for part in parts if part in spent}})
    assert (likely["warm-up"], likely["measure"]) == (0.1, 0.2)
    both = one.and_then(Earlier(step_ns=2e8, spent_s={"build": 6.0, "first steps": 1.0, "late proof": 31.0}))
    assert both == Earlier(step_ns=2e8, spent_s=spent | {"first steps": 1.0, "late proof": 31.0})


def test_a_plan_is_its_launches_times_their_devices() -> None:
    one, two = cell_of(), cell_of(gpus=2, strategy="ddp")
    known = {cell.id: Earlier(step_ns=100_000_000) for cell in (one, two)}
    result = estimate(schedule([one, two], repeats=2), earlier=known)
    # Known cells have had their proof. one: 8 + 1 + 0.3 + 4 + 20 + 2.1 = 35.4 s and what half a million
    # parameters take; two: 35.4 + 2.1 s recorded - 0.3 s of late steps; twice.
    seconds = [35.4, 35.4, 37.2, 37.2]
    assert result.seconds == pytest.approx(sum(seconds), rel=0.01)
    assert sorted(launch.longest_s for launch in result.launches) == pytest.approx(seconds, rel=0.01)
    assert result.device_hours == pytest.approx((2 * 35.4 + 2 * 2 * 37.2) / 3600, rel=0.01)
    assert result.notes == ()


def test_a_cell_proves_itself_once() -> None:
    cell = cell_of(micro_batch=2560)
    first, second = estimate(schedule([cell], repeats=2), earlier={}).launches
    # Ten times the step of 256 samples; the proof simulates 3 of them, and repeats take those steps as well.
    assert first.longest_s - second.longest_s == pytest.approx(3 * 10 * MLP_STEP_S, rel=0.2)


def test_a_cuda_launch_starts_more_slowly() -> None:
    cell = cell_of(device="cuda", backend="nccl")
    result = estimate(schedule([cell], repeats=1), earlier={cell.id: Earlier(step_ns=1_000_000)})
    # 15 + 1, 12 steps of 1 ms, 40.5 s of warm-up, the budget, and 10 checks of 2 ms that copy for 5 ms.
    assert result.seconds == pytest.approx(15 + 1 + 0.012 + 40.5 + 20 + 0.07, abs=0.05)


def test_only_the_first_run_of_a_launch_on_a_gpu_may_warm_up_for_long() -> None:
    cells = [cell_of(device="cuda", backend="nccl", seed=seed) for seed in range(3)]
    known = {cell.id: Earlier(step_ns=1_000_000) for cell in cells}
    result = estimate(schedule(cells, repeats=1), earlier=known)
    # As above; 1.08 s pass between the timed steps of two runs, so that the longest warm-up is 4 x 4 s.
    one = 1 + 0.012 + 40.5 + 20 + 0.07
    assert len(result.launches) == 1
    assert result.seconds == pytest.approx(15 + 3 * one - 2 * (40 - 16), abs=0.15)


def test_the_estimate_of_nothing_is_nothing() -> None:
    result = estimate([], earlier={})
    assert (result.seconds, result.device_hours, result.notes) == (0, 0, ())
