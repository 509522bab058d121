from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.plan.estimate import Hardware, StepTime, estimate, run_seconds, step_time
from harness.plan.schedule import schedule
from results.cell import Cell, StepPolicy
from results.unknown import Unknown

MakeCell = Callable[..., Cell]

MLP_STEP_S = 0.016_436_428_8
"""256 samples x 3 x 2 x (784 x 512 + 512 x 256 + 256 x 10) FLOP at 50 GFLOP/s:
256 x 3 x 2 x 535,040 = 821,821,440; / 50e9."""


def test_a_cpu_step_is_assumed_from_its_flops(cell_of: MakeCell) -> None:
    step = step_time(cell_of(), known_ns=None, hardware=Hardware())
    assert step.basis == "assumed"
    assert step.seconds == pytest.approx(MLP_STEP_S)


def test_accumulation_multiplies_the_work_of_a_step(cell_of: MakeCell) -> None:
    step = step_time(cell_of(micro_batch=64, accumulation=4), known_ns=None, hardware=Hardware())
    assert step.seconds == pytest.approx(MLP_STEP_S)


@pytest.mark.parametrize(("gpus", "crowd"), [(1, 1.0), (2, 1.0), (4, 2.0), (8, 4.0)])
def test_ranks_beyond_the_cores_share_them(cell_of: MakeCell, gpus: int, crowd: float) -> None:
    cell = cell_of(gpus=gpus, strategy="ddp")
    step = step_time(cell, known_ns=None, hardware=Hardware(cores=2))
    assert step.seconds == pytest.approx(MLP_STEP_S * crowd)


@pytest.mark.parametrize(
    ("strategy", "ranks", "share"),
    [
        # 4 ranks of a replica have a quarter of its work each.
        ("tp", 4, 1 / 4),
        ("fsdp:tp=2", 2, 1 / 2),
        ("fsdp", 1, 1.0),
        # (p - 1) / m of the computation is idle: 3 / 8 of 4 stages, 1 / 8 of 2; of 2 stages a rank half.
        ("pipeline:1f1b:microbatches=8", 4, (1 + 3 / 8) / 4),
        ("pipeline:gpipe:microbatches=8:dp=2", 2, (1 + 1 / 8) / 2),
        ("pipeline:interleaved:microbatches=8", 4, (1 + 3 / 16) / 4),
    ],
)
def test_the_ranks_of_a_replica_share_its_work(
    cell_of: MakeCell, strategy: str, ranks: int, share: float
) -> None:
    cell = cell_of(gpus=4, strategy=strategy, model_parallel=ranks)
    step = step_time(cell, known_ns=None, hardware=Hardware())
    assert step.seconds == pytest.approx(MLP_STEP_S * share)
    # 4 ranks on 2 cores take twice as long.
    crowded = step_time(cell, known_ns=None, hardware=Hardware(cores=2))
    assert crowded.seconds == pytest.approx(MLP_STEP_S * share * 2)


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
def test_a_proof_simulates_whole_replicas(
    cell_of: MakeCell, strategy: str, ranks: int, simulated: float
) -> None:
    cell = cell_of(gpus=4, strategy=strategy, model_parallel=ranks)
    step = StepTime(basis="known", seconds=0.1)
    proof = run_seconds(cell, step, proves=True) - run_seconds(cell, step, proves=False)
    assert proof == pytest.approx(3 * 0.1 * (1 + simulated))


def test_a_gpu_step_is_assumed_from_the_catalogue(cell_of: MakeCell) -> None:
    cell = cell_of(device="cuda", backend="nccl", precision="bf16")
    step = step_time(cell, known_ns=None, hardware=Hardware(gpu_name="NVIDIA A100-SXM4-80GB"))
    # 821,821,440 FLOP at 40 % of 312 TFLOP/s: 6.585 us.
    assert step.seconds == pytest.approx(821_821_440 / 124.8e12)
    assert step.basis == "assumed"


@pytest.mark.parametrize(
    ("gpu_name", "reason"),
    [
        (None, "the kind of GPU is unknown"),
        ("a device of tomorrow", "the GPU catalogue has no peak of a device of tomorrow in fp32"),
    ],
)
def test_a_gpu_without_a_known_peak_takes_its_budget(
    cell_of: MakeCell, gpu_name: str | None, reason: str
) -> None:
    cell = cell_of(device="cuda", backend="nccl")
    step = step_time(cell, known_ns=None, hardware=Hardware(gpu_name=gpu_name))
    assert step == StepTime(basis="budget", seconds=Unknown(reason))
    # Set-up 1 s and the budget of 20 s.
    assert run_seconds(cell, step, proves=True) == 21.0


def test_an_own_model_takes_its_budget_and_says_so(cell_of: MakeCell) -> None:
    cells = [cell_of(workload="py:mine:build"), cell_of()]
    result = estimate(schedule(cells, repeats=1), known_step_ns={})
    assert result.bases[cells[0].id].basis == "budget"
    assert result.notes == (
        "assumed: step times of 1 of 2 cells follow from their FLOPs, unmeasured",
        "assumed: 1 of 2 cells take their measuring budget: the FLOPs of py:mine:build are unknown, "
        "because planning does not run a user's own code",
    )


@pytest.mark.parametrize(
    ("step_s", "gpus", "proves", "expected"),
    [
        # Set-up 1, proof 3 x 0.1 x (1 + 1), warm-up 40 x 0.1, measuring 20.
        (0.1, 1, True, 1 + 0.6 + 4 + 20),
        (0.1, 1, False, 1 + 4 + 20),
        # Proof 3 x 0.1 x (1 + 2); quads 5 x 4 blocks x 5 steps x 0.1; recorded 21 x 0.1.
        (0.1, 2, True, 1 + 0.9 + 4 + 20 + 10 + 2.1),
        # A thousandth of that: 200 blocks x 5 steps x 0.0001 s end before the budget.
        (0.0001, 1, True, 1 + 0.0006 + 0.004 + 0.1),
        # 6 blocks x 5 steps x 2 s are measured whatever the budget says.
        (2.0, 1, True, 1 + 12 + 80 + 60),
        # A proof of 3 x 10 x (1 + 2) = 90 s is beyond its limit; quads 100 steps x 10 s, recorded 21.
        (10.0, 2, True, 1 + 400 + 300 + 1000 + 210),
    ],
)
def test_a_run_is_the_sum_of_its_parts(
    cell_of: MakeCell, step_s: float, gpus: int, proves: bool, expected: float
) -> None:
    cell = cell_of(gpus=gpus)
    step = StepTime(basis="known", seconds=step_s)
    assert run_seconds(cell, step, proves=proves) == pytest.approx(expected)


def test_without_quads_nothing_is_added_for_them(cell_of: MakeCell) -> None:
    cell = cell_of(gpus=2, steps=StepPolicy(quads=0))
    # Set-up 1, warm-up 40 x 0.1, measuring 20, recorded 21 x 0.1.
    assert run_seconds(cell, StepTime(basis="known", seconds=0.1), proves=False) == pytest.approx(27.1)


def test_whole_periods_are_recorded_after_one_that_is_not_kept(cell_of: MakeCell) -> None:
    plain, long = (cell_of(gpus=2, strategy=name) for name in ("local-sgd:8", "local-sgd:50"))
    step = StepTime(basis="known", seconds=0.1)
    # Quads are blocks of a period: 5 x 4 x 8 and 5 x 4 x 50 steps; recorded 2 periods of 8 or 1 of 50.
    assert run_seconds(plain, step, proves=False) == pytest.approx(25 + 16 + 3 * 0.8)
    assert run_seconds(long, step, proves=False) == pytest.approx(1 + 4 + 30 + 100 + 2 * 5)


def test_a_plan_is_its_launches_times_their_devices(cell_of: MakeCell) -> None:
    one, two = cell_of(), cell_of(gpus=2, strategy="ddp")
    result = estimate(
        schedule([one, two], repeats=2), known_step_ns={one.id: 100_000_000, two.id: 100_000_000}
    )
    # Known cells have had their proof. one: 8 + 1 + 4 + 20 = 33 s; two: 33 + 10 s of quads + 2.1 s
    # recorded; twice.
    assert result.seconds == pytest.approx(2 * (33 + 45.1))
    assert result.device_hours == pytest.approx(2 * (33 * 1 + 45.1 * 2) / 3600)
    assert sorted(launch.seconds for launch in result.launches) == pytest.approx([33, 33, 45.1, 45.1])
    assert result.notes == ()


def test_a_cell_proves_itself_once(cell_of: MakeCell) -> None:
    cell = cell_of(micro_batch=2560)
    first, second = estimate(schedule([cell], repeats=2), known_step_ns={}).launches
    # Ten times the step of 256 samples; the proof is 3 x 2 steps.
    assert first.seconds - second.seconds == pytest.approx(6 * 10 * MLP_STEP_S)


def test_a_cuda_launch_starts_more_slowly(cell_of: MakeCell) -> None:
    cell = cell_of(device="cuda", backend="nccl")
    result = estimate(schedule([cell], repeats=1), known_step_ns={cell.id: 1_000_000})
    # 15 + 1 + 40 x 0.001 + 200 x 5 x 0.001.
    assert result.seconds == pytest.approx(15 + 1 + 0.04 + 1.0)


def test_the_estimate_of_nothing_is_nothing() -> None:
    result = estimate([], known_step_ns={})
    assert (result.seconds, result.device_hours, result.notes) == (0, 0, ())
