"""Every figure of a run, worked out by hand from two or three rank records; times are in ms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import msgspec
import pytest
from builders import a_work, steps_of

from results.cell import Cell
from results.derivation.run_result import block_walls, derive, exposed_time, step_time
from results.outcome import Evidence, Outcome
from results.record import Memory, Proof, Quads, RankRecord, StepColumns
from results.run import RunResult

MS = 1_000_000

PASSED = Proof(method="serial-simulation", passed=True, detail="within the bound")
FAILED = Proof(method="serial-simulation", passed=False, detail="0.3 off at fc.weight")


def _ms(*values: float) -> list[int]:
    return [round(value * MS) for value in values]


def _steps(step: list[int], **phases: list[int]) -> StepColumns:
    return StepColumns(step_ns=step, loss=[1.0] * len(step), **phases)


@pytest.fixture
def ranks(cell_of, record_of) -> list[RankRecord]:
    # Two blocks of two steps. Walls to the last rank: 220 (rank 1) and 180 (rank 0).
    walls = ([_ms(200, 180), _ms(220, 160)], [_ms(100, 100, 90, 90), _ms(110, 105, 80, 80)])
    phases = (
        {"data": 10, "forward": [20, 20, 20, 20], "backward": [40, 40, 40, 40], "optimizer": 5},
        {"data": 10, "forward": [30, 30, 30, 30], "backward": [40, 40, 20, 20], "optimizer": 7},
    )
    return [
        record_of(
            cell_of(),
            rank,
            block_steps=2,
            blocks_ns=walls[0][rank],
            steps=_steps(
                walls[1][rank],
                **{
                    f"{name}_ns": _ms(*(value if isinstance(value, list) else [value] * 4))
                    for name, value in phases[rank].items()
                },
            ),
        )
        for rank in range(2)
    ]


def test_a_block_lasts_until_its_last_rank(ranks) -> None:
    assert block_walls(ranks).tolist() == _ms(220, 180)


def test_a_step_is_the_mean_of_the_block_walls_over_their_steps(ranks) -> None:
    # 220 / 2 = 110 and 180 / 2 = 90: mean 100. The mean of each rank's own blocks would say 95.
    metric = step_time(ranks)
    assert (metric.value, metric.unit, metric.samples) == (100 * MS, "ns", 2)
    assert (metric.low, metric.high, metric.interval) == (None, None, None)


def test_a_run_of_six_blocks_knows_its_own_interval(two) -> None:
    # Per step 1 .. 6 ms: 3.5 +- 2.570582 x sqrt(3.5 / 6) = 3.5 +- 1.963314
    blocks = (_ms(2, 4, 6, 8, 10, 12), _ms(1, 1, 1, 1, 1, 1))
    zeros = dict.fromkeys(("data_ns", "forward_ns", "backward_ns", "optimizer_ns"), [0] * 12)
    metric = two(blocks_ns=blocks, block_steps=2, steps=_steps([0] * 12, **zeros)).step_ns
    assert metric.value == 3.5 * MS
    assert metric.high == pytest.approx(5.463314 * MS)
    assert metric.interval == "t95-batch-means"


def test_the_spread_is_of_each_steps_slowest_rank(ranks, cell_of) -> None:
    # Maxima over ranks: 110, 105, 90, 90; sorted 90, 90, 105, 110. The quantile q lies at 3 q:
    # median at 1.5: 97.5; p10 at 0.3: 90; p90 at 2.7: 105 + 0.7 x 5 = 108.5; p99 at 2.97: 109.85.
    run = derive(cell_of(), "run-1", ranks, None)
    assert run.steps == 4
    assert (run.step_ns_median, run.step_ns_p10) == pytest.approx((97.5 * MS, 90 * MS))
    assert (run.step_ns_p90, run.step_ns_p99) == pytest.approx((108.5 * MS, 109.85 * MS))


def test_a_slow_step_of_one_rank_is_a_slow_step_of_the_run(two) -> None:
    # Maxima 50, 50, 50, 50, 50, 90: quartiles 50 and 50, so 90 is above the fence.
    plain, slow = _ms(50, 50, 50, 50, 50, 50), _ms(50, 50, 50, 50, 50, 90)
    columns = {f"{phase}_ns": _ms(0, 0, 0, 0, 0, 0) for phase in ("data", "forward", "backward", "optimizer")}
    steps = _steps(plain, **columns), _steps(slow, **columns)
    assert two(steps=steps, blocks_ns=_ms(100, 100, 140)).slow_steps == 1


def test_the_phases_and_the_rest_add_up_to_the_step(ranks, cell_of) -> None:
    # Means over ranks and steps: data 10; forward (20 + 30) / 2 = 25; backward of rank 1 is
    # (40 + 40 + 20 + 20) / 4 = 30, with rank 0's 40: 35; optimizer (5 + 7) / 2 = 6; sum 76 of 100.
    run = derive(cell_of(), "run-1", ranks, None)
    expected = {"data": 10, "forward": 25, "backward": 35, "optimizer": 6, "other": 24}
    assert run.phase_ns == pytest.approx({name: value * MS for name, value in expected.items()})


def test_throughput_is_the_work_of_all_ranks_over_the_step(ranks, cell_of, record_of) -> None:
    # 2 ranks x 8 samples in 0.1 s: 160 samples/s; at 32 tokens a sample 2 x 256 / 0.1 = 5120 tokens/s.
    work = a_work(units=256, unit="tokens", exchange_operations=3)
    run = derive(cell_of(), "run-1", [msgspec.structs.replace(rank, work=work) for rank in ranks], None)
    assert run.samples_per_s == pytest.approx(160.0)
    assert run.units_per_s == pytest.approx(5120.0)
    assert run.unit == "tokens"
    # Forward and backward of both ranks: 6e9 FLOP in 0.1 s.
    assert run.flops_per_step == 6 * 10**9
    assert run.flops_per_s == pytest.approx(6e10)
    # What one rank hands over, and a model's size, are not added up.
    assert (run.exchange_payload_bytes, run.exchange_operations, run.parameters) == (4000, 3, 1000)


def test_without_the_work_of_one_rank_there_is_no_rate(two) -> None:
    run = two(work=(a_work(), None))
    assert (run.outcome, run.samples_per_s, run.flops_per_s) == (Outcome.OK, None, None)


QUADS = (
    # The longer of both ranks: on 220 + 224, off 170 + 164: (444 - 334) / (2 x 2) = 27.5 a step;
    # second quad: on 200 + 200, off 210 + 200: (400 - 410) / 4 = -2.5. Mean 12.5, range -2.5 .. 27.5.
    Quads(
        steps=2,
        on_first_ns=_ms(220, 200),
        off_first_ns=_ms(160, 210),
        off_second_ns=_ms(164, 190),
        on_second_ns=_ms(216, 190),
    ),
    Quads(
        steps=2,
        on_first_ns=_ms(210, 190),
        off_first_ns=_ms(170, 200),
        off_second_ns=_ms(150, 200),
        on_second_ns=_ms(224, 200),
    ),
)


def test_exposed_time_is_sync_on_minus_sync_off_to_the_last_rank(two) -> None:
    metric = exposed_time(QUADS)
    assert (metric.value, metric.low, metric.high) == (12.5 * MS, -2.5 * MS, 27.5 * MS)
    assert (metric.samples, metric.interval) == (2, "range")
    assert two(quads=QUADS).exposed_ns == metric


def test_without_quads_nothing_is_said_of_exposed_time(two) -> None:
    assert exposed_time([]) is None
    assert exposed_time([Quads(steps=2)]) is None
    run = two(quads=None, absent={"quads": "not asked for (quads: 0)"})
    assert run.exposed_ns is None
    assert run.absent["quads"] == "not asked for (quads: 0)"


def _on_gpu(record: RankRecord, name: str, flops: int | None) -> RankRecord:
    assert record.work is not None
    return msgspec.structs.replace(
        record,
        environment=msgspec.structs.replace(record.environment, device_name=name),
        work=msgspec.structs.replace(record.work, flops=flops),
    )


def _mfu(cell: Cell, records: Sequence[RankRecord], names: Sequence[str], flops: int | None) -> RunResult:
    changed = [_on_gpu(record, name, flops) for record, name in zip(records, names, strict=True)]
    return derive(cell, "run-1", changed, None)


def test_mfu_is_over_the_dense_peaks_of_all_devices(cell_of, record_of) -> None:
    # 2 x 30 TFLOP in a step of 0.05 s: 1200 TFLOP/s; two H200 in bf16: 2 x 989 = 1978; MFU 0.60667
    cell = cell_of(device="cuda", backend="nccl", precision="bf16")
    records = [record_of(cell, rank) for rank in range(2)]
    run = _mfu(cell, records, ["NVIDIA H200"] * 2, 30 * 10**12)
    assert run.flops_per_s == pytest.approx(1.2e15)
    assert run.mfu == pytest.approx(1200 / 1978)
    assert "mfu" not in run.absent


def test_mfu_counts_unlike_devices_each_with_its_own_peak(cell_of, record_of) -> None:
    # 2 x 3 TFLOP / 0.05 s = 120 TFLOP/s over 989 (H200) + 312 (A100)
    cell = cell_of(device="cuda", backend="nccl", precision="bf16")
    records = [record_of(cell, rank) for rank in range(2)]
    run = _mfu(cell, records, ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"], 3 * 10**12)
    assert run.mfu == pytest.approx(120 / 1301)


@pytest.mark.parametrize(
    ("device", "names", "flops", "reason"),
    [
        ("cpu", ["AMD EPYC"] * 2, 10**9, "no peak is known for a CPU core"),
        ("cuda", ["Acme 1", "Acme 1"], 10**9, "no bf16 peak of Acme 1 in the catalogue"),
        (
            "cuda",
            ["NVIDIA H200", "Acme 1"],
            10**9,
            "no bf16 peak of Acme 1, NVIDIA H200 in the catalogue",
        ),
        (
            "cuda",
            ["Tesla V100-SXM2-16GB"] * 2,
            10**9,
            "no bf16 peak of Tesla V100-SXM2-16GB in the catalogue",
        ),
        ("cuda", ["NVIDIA H200"] * 2, None, "the FLOPs of this workload were not counted"),
    ],
)
def test_without_a_peak_mfu_is_null_with_a_reason(cell_of, record_of, device, names, flops, reason) -> None:
    cell = cell_of(device=device, precision="bf16")
    run = _mfu(cell, [record_of(cell, rank) for rank in range(2)], names, flops)
    assert (run.mfu, run.absent["mfu"]) == (None, reason)
    assert run.samples_per_s is not None


def test_without_flops_the_mfu_names_what_was_not_counted(cell_of, record_of) -> None:
    cell = cell_of(device="cuda", precision="bf16")
    records = [
        msgspec.structs.replace(record_of(cell, rank), absent={"flops": "mine::product"}) for rank in range(2)
    ]
    assert "mine::product" in _mfu(cell, records, ["NVIDIA H200"] * 2, None).absent["mfu"]


def _memory(rss: int, device: int | None) -> Memory:
    return Memory(
        rss_peak_bytes=rss,
        rss_idle_bytes=1,
        device_allocated_peak_bytes=device,
        device_reserved_peak_bytes=device,
        device_idle_bytes=0,
    )


def test_memory_is_the_largest_ranks(two) -> None:
    run = two(memory=(_memory(1000, 70), _memory(1500, 50)))
    assert (run.rss_peak_bytes, run.device_allocated_peak_bytes) == (1500, 70)
    assert run.rss_over_idle_bytes == 1499
    run = two(memory=(_memory(1000, None), None))
    assert (run.rss_peak_bytes, run.device_allocated_peak_bytes) == (1000, None)


@pytest.mark.parametrize(
    ("hosts", "threads", "limit"),
    [
        (["a", "a", "b"], 1, 0.1),  # the busiest host runs 2 ranks of 1 thread: 5 % of 2 cores
        (["a", "b", "c"], 1, 0.05),
        (["a", "a", "a"], 4, 0.6),  # 5 % of 12 cores
    ],
)
def test_a_run_is_disturbed_above_a_twentieth_of_its_cores(
    cell_of, record_of, environment_of, hosts, threads, limit
) -> None:
    def run(foreign: float | None) -> RunResult:
        cell = cell_of(gpus=3)
        records = [
            record_of(
                cell,
                rank,
                environment=environment_of(host=host, threads=threads),
                foreign_cpu_cores=foreign if rank == 2 else None,
            )
            for rank, host in enumerate(hosts)
        ]
        return derive(cell, "run-1", records, None)

    assert (run(limit - 0.001).disturbed, run(limit + 0.001).disturbed) == (False, True)
    assert run(limit + 0.001).foreign_cpu_cores == limit + 0.001
    assert (run(None).disturbed, run(None).foreign_cpu_cores) == (False, None)
    assert run(0.0).hosts == tuple(sorted(set(hosts)))


def test_losses_are_means_over_ranks_from_the_first_warm_up_step_on(two) -> None:
    # first (2 + 4) / 2 = 3; last (1 + 0.5) / 2 = 0.75
    columns = {"warmup_loss": ([2.0, 1.9], [4.0, 3.9]), "blocks_ns": [2 * MS]}
    run = two(**columns, steps=(steps_of(1.5, 1.0), steps_of(1.5, 0.5)))
    assert (run.loss_first, run.loss_last, run.warmup_steps, run.steps) == (3.0, 0.75, 2, 2)
    run = two(**columns | {"warmup_loss": []}, steps=(steps_of(1.5, 1.0), steps_of(2.5, None)))
    assert (run.loss_first, run.loss_last, run.warmup_steps) == (2.0, None, 0)


def test_a_failed_proof_is_the_runs_proof(two) -> None:
    assert two(proof=(PASSED, FAILED)).proof == FAILED
    assert two(proof=(None, PASSED)).proof == PASSED
    assert two(proof=None).proof is None


def test_a_run_combines_the_findings_of_its_ranks(two) -> None:
    run = two(
        started_at=("2026-01-02T03:04:06.000Z", "2026-01-02T03:04:05.900Z"),
        setup_ns=(5, 9),
        spent_ns=({"build": 5, "proof": 8}, {"build": 9, "proof": 7}),
        warnings=(["busy", "hot"], ["busy"]),
        absent=({"a": "rank 0 says"}, {"a": "rank 1 says", "b": "why"}),
        evidence=Evidence.EMULATED,
    )
    assert run.started_at == "2026-01-02T03:04:05.900Z"
    assert (run.setup_ns, run.warnings[:2], run.evidence) == (9, ("busy", "hot"), Evidence.EMULATED)
    assert run.spent_ns == {"build": 9, "proof": 8}
    assert (run.absent["a"], run.absent["b"]) == ("rank 0 says", "why")
    # Besides them only what could not be derived.
    assert set(run.absent) == {"a", "b", "mfu", "budget", "communication", "energy_j"}


def test_the_order_of_the_records_does_not_count(cell_of, record_of) -> None:
    cell = cell_of(gpus=3)
    records = [record_of(cell, rank, blocks_ns=_ms(110 + rank, 100, 100), setup_ns=rank) for rank in range(3)]
    results = [derive(cell, "run-1", order, None) for order in permutations(records)]
    assert all(result == results[0] for result in results)
    # Walls to the last rank 112, 100, 100 over 2 steps: 56, 50, 50; mean 52.
    assert results[0].step_ns.value == 52 * MS


@pytest.mark.parametrize(("wall_ns", "warned"), [(2090, False), (2110, True), (1890, True)])
def test_a_step_that_is_not_its_phases_carries_a_warning(wall_ns, warned, two) -> None:
    # Phases sum to 10 + 200 + 700 + 90 = 1000 ns a step; blocks of 2 steps: 2090 / 2 = 1045 leaves 45,
    # 4.3 % of 1045; 1055 leaves 5.2 %; 945 leaves -5.8 %.
    columns = StepColumns(
        step_ns=[1000] * 2,
        data_ns=[10] * 2,
        forward_ns=[200] * 2,
        backward_ns=[700] * 2,
        optimizer_ns=[90] * 2,
        loss=[1.0] * 2,
    )
    run = two(steps=(columns, columns), blocks_ns=([wall_ns], [wall_ns]), block_steps=2)
    assert any("of the step is outside of its phases" in warning for warning in run.warnings) == warned


def test_a_replica_of_two_ranks_counts_once(two, cell_of) -> None:
    # Both ranks have the replica's 8 samples and 3 GFLOP on record; blocks of 2 steps take 100 ms.
    together = two(cell_of(strategy="tp", model_parallel=2))
    apart = two(cell_of())
    assert (together.samples_per_s, together.units_per_s) == (8 / 0.05, 8 / 0.05)
    assert (apart.samples_per_s, apart.units_per_s) == (16 / 0.05, 16 / 0.05)
    assert (together.flops_per_step, apart.flops_per_step) == (3 * 10**9, 6 * 10**9)
    assert together.flops_per_s == pytest.approx(3e9 / 0.05)
