"""Measurements of a run outside of its timed blocks: single steps, the first one, the network, kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_builders import CPU, Moments, a_context
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from harness.worker import run as run_module
from harness.worker.cell import memory
from harness.worker.exchange.group import open_exchange
from harness.worker.measure import clock as clock_module
from harness.worker.measure import link_peak as link_peak_module
from harness.worker.measure import profiler
from harness.worker.measure.clock import FirstStep
from harness.worker.measure.link_peak import measure_link_peak, peak_payload_bytes
from harness.worker.measure.profiler import Kernel, attach_profiler, kernel_times, kernels_on
from harness.worker.rank.context import Run
from harness.worker.rank.control import Control
from harness.worker.run import measure_cell
from results.cell import Cell, StepPolicy
from results.groups import GroupLayout
from results.launch import Slot
from results.record import KernelTimes
from strategies import Trainer
from strategies.pipeline.order import Shape, replayed_bubble

MIB = 2**20


@pytest.mark.parametrize(
    ("ranks", "mbit", "payload"),
    [
        (2, None, 16 * MIB),
        # Of two ranks each sends the payload once: 125 MB in a second.
        (2, 1000.0, 16 * MIB),
        # 12.5 MB; 8 MiB are the power of two below.
        (2, 100.0, 8 * MIB),
        # Of four each sends 1.5 payloads: 12.5 / 1.5 = 8.33 MB, which is 7.95 MiB.
        (4, 100.0, 4 * MIB),
        # 131072 bytes a second.
        (2, 1.048576, 2**17),
        # 125000 / (2 * 255 / 256) = 62745 bytes.
        (256, 1.0, 2**15),
    ],
)
def test_the_payload_is_what_the_link_carries_in_a_second(ranks, mbit, payload) -> None:
    assert peak_payload_bytes(ranks, mbit) == payload


def peak(rank: int) -> tuple[int, list[int], int, int]:
    """On a rank: payload and durations, the traffic counted, and the time around all of it."""
    exchange = open_exchange()
    start = time.perf_counter_ns()
    found = measure_link_peak(Control(CPU), CPU, ranks=2, link_mbit_per_s=10.0)
    took_ns = time.perf_counter_ns() - start
    return found.payload_bytes, found.duration_ns, exchange.traffic.operations, took_ns


def test_three_all_reduces_are_timed_and_not_counted_as_traffic(ranks) -> None:
    for payload, durations, operations, whole in ranks(2, peak):
        assert (payload, len(durations), operations) == (MIB, 3, 0)
        assert all(duration > 0 for duration in durations)
        assert sum(durations) < whole


def swept_peak(rank: int) -> tuple[int, list[int]]:
    """On a rank: the payload of a sweep in which rank 1 has no memory for the last one, and all payloads."""
    tried = []

    def timed(values: torch.Tensor, control: Control) -> int:
        tried.append(values.nbytes)
        # Rank 0 waits for rank 1 in all of them, and longest in the second.
        waits_ns = 1_000_000 if values.nbytes == 4 * MIB else 1_000
        taken_ns = {MIB: 20_000, 4 * MIB: 30_000, 16 * MIB: 200_000}[values.nbytes]
        return taken_ns + (waits_ns if rank == 0 else 0)

    def zeros(numel: int, *, device: torch.device) -> torch.Tensor:
        if rank == 1 and 4 * numel == 64 * MIB:
            raise torch.OutOfMemoryError("no room")
        return torch.empty(numel)

    with (
        patch.object(link_peak_module, "_all_reduce_ns", timed),
        patch.object(link_peak_module, "_device_largest_bytes", lambda *_: 256 * MIB),
        patch.object(link_peak_module, "peak_payload_bytes", lambda *_: MIB),
        patch.object(torch, "zeros", zeros),
    ):
        found = measure_link_peak(Control(CPU), torch.device("cuda"), ranks=2, link_mbit_per_s=None)
    return found.payload_bytes, sorted(set(tried))


def test_the_peak_is_that_of_the_best_payload_that_all_ranks_have_memory_for(ranks) -> None:
    assert ranks(2, swept_peak) == [(4 * MIB, [MIB, 4 * MIB, 16 * MIB])] * 2


def late_peak(rank: int) -> list[int]:
    """On a rank: durations where one joins every all-reduce 100 ms late."""
    plain = link_peak_module._all_reduce_ns

    def late(values: torch.Tensor, control: Control) -> int:
        time.sleep(0.1 * rank)
        return plain(values, control)

    with patch.object(link_peak_module, "_all_reduce_ns", late):
        return measure_link_peak(Control(CPU), CPU, ranks=2, link_mbit_per_s=1.0).duration_ns


def test_each_begins_at_a_barrier(ranks) -> None:
    # 64 KiB take about a millisecond; without the barrier rank 0 would wait for 100 ms in each.
    assert min(ranks(2, late_peak)[0]) < 50_000_000


def test_the_first_step_is_the_sum_of_its_parts_until_it_is_over(monkeypatch) -> None:
    # 10 to 25 and 100 to 103: 15 + 3. The clock is not read again after that, nor the device waited for.
    monkeypatch.setattr(clock_module, "time", Moments(10, 25, 100, 103))
    waited: list[str] = []
    first = FirstStep(lambda: waited.append("for the device"))
    for _ in range(2):
        with first.part():
            assert len(waited) < 2
    first.is_over()
    with first.part():
        pass
    assert first.ns == 18
    assert len(waited) == 2


REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_kernels_that_communicate_are_told_from_those_that_compute() -> None:
    kernels = [
        Kernel("ampere_sgemm_128x64_tn", 0, 100),
        # Beside the first on another stream: 20 more.
        Kernel("void at::native::vectorized_elementwise_kernel<4>", 80, 120),
        # 50 of its 80 beside computation, to 120; then alone.
        Kernel(REDUCE, 70, 150),
        Kernel("ncclDevKernel_SendRecv", 200, 230),
        Kernel("Memcpy HtoD (Pinned -> Device)", 0, 500),
        Kernel("Memset (Device)", 300, 400),
    ]
    assert kernel_times(kernels, 3) == KernelTimes(
        steps=3, compute_ns=120, communication_ns=80 + 30, overlap_ns=50
    )
    assert kernel_times([], 3) == KernelTimes(steps=3, compute_ns=0, communication_ns=0, overlap_ns=0)


def event(name: str, device: DeviceType, index: int = 1, **options: Any) -> FunctionEvent:
    """Make an event like the profiler: microseconds, and a new object for the device type each time."""
    fresh = DeviceType(device.value)
    assert fresh is not device
    return FunctionEvent(0, name, 0, 2.5, 4.0, device_type=fresh, device_index=index, **options)


def test_kernels_are_the_events_of_the_device_that_nobody_has_named() -> None:
    events = [
        event("gemm", DeviceType.CUDA),
        event("gemm of another device", DeviceType.CUDA, index=0),
        event("aten::mm", DeviceType.CPU),
        event("forward", DeviceType.CUDA, is_user_annotation=True),
        event(REDUCE, DeviceType.CUDA),
    ]
    found = list(kernels_on(torch.device("cuda", 1), events))
    assert found == [Kernel("gemm", 2500, 4000), Kernel(REDUCE, 2500, 4000)]


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)))


@given(compute=intervals, communicate=intervals)
def test_times_are_those_of_counting_moments(compute, communicate) -> None:
    kernels = [Kernel("gemm", start, start + length) for start, length in compute]
    kernels += [Kernel(REDUCE, start, start + length) for start, length in communicate]
    busy = [
        {moment for start, length in spans for moment in range(start, start + length)}
        for spans in (compute, communicate)
    ]
    found = kernel_times(kernels, 1)
    assert found.compute_ns == len(busy[0])
    assert found.communication_ns == len(busy[1])
    assert found.overlap_ns == len(busy[0] & busy[1])


def run_twice(rank: int, folder: str, size: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """On a rank: two runs of a cell, the second without a proof, and what is recorded of each."""
    policy = StepPolicy(block_steps=2, warmup_max_steps=2, min_blocks=1, max_blocks=1, quads=1)
    cell = Cell(**fields, gpus=size, device="cpu", backend="gloo", steps=policy)
    found = []
    with a_context(rank, folder, {}) as around:
        for proved_by in (None, "before"):
            slot = Slot(cell_id=cell.id, run_id="r", repeat=1, proved_by=proved_by)
            began = time.perf_counter_ns()
            record = Run(around, slot, cell).execute(measure_cell)
            took_ns = time.perf_counter_ns() - began
            assert record.reason is None
            row = {name: getattr(record, name) for name in record.__struct_fields__}
            found.append(row | {"losses": record.steps.loss, "took_ns": took_ns})
    return found


def first_acts(rank: int, folder: str) -> list[str]:
    """On a rank: what a run does until it has looked at the memory of the idle worker."""
    acts: list[str] = []

    def look() -> int:
        acts.append("idle memory")
        raise RuntimeError("enough")

    cell = Cell(**MLP | {"strategy": "single"}, gpus=1, device="cpu", backend="gloo")
    with (
        a_context(rank, folder, {}) as around,
        patch.object(around.exchange, "reset", lambda: acts.append("reset")),
        patch.object(run_module, "attach_profiler", lambda device: acts.append(f"profiler on {device}")),
        patch.object(memory, "rss_bytes", look),
    ):
        Run(around, Slot(cell_id=cell.id, run_id="r", repeat=1), cell).execute(measure_cell)
    return acts


def slow_halves(rank: int, folder: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """On a rank: the same with a trainer whose halves of a step take 50 ms more each."""

    def slow(half: Callable[..., Any]) -> Callable[..., Any]:
        def slower(*arguments: Any) -> Any:
            time.sleep(0.05)
            return half(*arguments)

        return slower

    with (
        patch.object(Trainer, "compute_gradients", slow(Trainer.compute_gradients)),
        patch.object(Trainer, "update", slow(Trainer.update)),
    ):
        return run_twice(rank, folder, 1, fields)


MLP = {
    "workload": "mlp",
    "dataset": "synthetic",
    "micro_batch": 4,
    "optimizer": "sgd",
    "strategy": "scratch-ddp",
    "compression": "topk:0.01",
}


def test_a_run_has_all_of_it_and_ends_in_the_same_bits(ranks, tmp_path) -> None:
    both = ranks(2, run_twice, str(tmp_path), 2, MLP)
    assert len({run["parameters_hash"] for runs in both for run in runs}) == 1
    ends = ["warm-up", "measure", "exposed", "recording", "hash", "late proof"]
    for runs in both:
        assert runs[0]["losses"] == runs[1]["losses"]
        assert [list(run["spent_ns"]) for run in runs] == [
            ["build", "proof", *ends],
            ["build", "first steps", *ends],
        ]
        for run in runs:
            spent_ns = run["spent_ns"]
            assert sum(run["blocks_ns"]) < spent_ns["measure"]
            assert run["setup_ns"] < spent_ns["build"]
            assert sum(spent_ns.values()) < run["took_ns"]
            recorded, quads, work = run["recorded"], run["quads"], run["work"]
            assert run["period"] == 1
            assert 0 < run["first_step_ns"] < 20e9
            # Two steps in each of two off blocks.
            assert len(quads.off_step_ns) == 4
            halves = sum(quads.off_step_ns[:2]), sum(quads.off_step_ns[2:])
            assert 0 < halves[0] <= quads.off_first_ns[0]
            assert 0 < halves[1] <= quads.off_second_ns[0]
            assert len(recorded.step_ns) == len(recorded.exchange_cpu_ns) == 20
            assert sum(recorded.operations.payload_bytes) == 20 * work.exchange_payload_bytes
            assert len(recorded.operations.step) == 20 * work.exchange_operations
            assert recorded.kernels is recorded.dispatch_ns is recorded.bubble_ns is None
            assert run["link_peak"].payload_bytes == 16 * MIB
            assert not {"recorded", "link_peak"} & set(run["absent"])


def test_groups_are_gone_and_the_profiler_is_there_before_all_else(ranks, tmp_path) -> None:
    assert ranks(1, first_acts, str(tmp_path)) == [["reset", "profiler on cpu", "idle memory"]]


def test_the_profiler_is_attached_once_in_a_process_on_cuda() -> None:
    with patch.object(profiler, "profiled_kernels") as profiled:
        for device in (CPU, torch.device("cuda", 1), torch.device("cuda", 1)):
            attach_profiler(device)
    attach_profiler.cache_clear()
    profiled.assert_called_once_with(torch.device("cuda", 1))


def test_a_run_that_leans_on_a_proof_warns_of_batches_that_all_ranks_read(whole_runs) -> None:
    for name, warned in (("of_a_loader_for_all", True), ("of_a_loader", False)):
        fields = {
            "workload": f"py:proof_models:{name}",
            "dataset": "own",
            "micro_batch": 4,
            "optimizer": "sgd",
        }
        for record in whole_runs(2, fields, proved_by="an earlier run"):
            assert (record["outcome"], record["proof"].method) == ("ok", "earlier-run")
            alike = [each for each in record["warnings"] if "replicas 0 and 1 read the same batches" in each]
            assert len(alike) == warned


def test_one_rank_has_nothing_to_record_and_says_so(ranks, tmp_path) -> None:
    single = {**MLP, "strategy": "single", "compression": "none"}
    [[proven, repeated]] = ranks(1, slow_halves, str(tmp_path), single)
    for run in (proven, repeated):
        assert run["recorded"] is run["link_peak"] is None
        assert run["absent"]["recorded"] == run["absent"]["link_peak"] == "one rank exchanges nothing"
        # Both halves of the first step; a proof takes them apart.
        assert run["first_step_ns"] >= 100_000_000


@pytest.mark.slow
def test_the_bubble_is_replayed_from_the_times_of_all_stages(whole_runs) -> None:
    fields = {
        "workload": "llama-nano:seq=16",
        "strategy": "pipeline:zbv",
        "micro_batch": 4,
        "optimizer": "sgd",
    }
    policy = StepPolicy(block_steps=2, warmup_max_steps=2, min_blocks=1, max_blocks=1, quads=0)
    both = whole_runs(2, fields | {"steps": policy})
    seconds = {}
    for run, stages in zip(both, ((0, 3), (1, 2)), strict=True):
        recorded = run["recorded"]
        assert run["layout"] == GroupLayout(pipeline=2)
        assert tuple(own.stage for own in recorded.stages) == stages
        for own in recorded.stages:
            assert {*own.part_ns} == {"forward", "input", "weights"} | ({"loss"} if own.stage == 3 else set())
            seconds |= {(own.stage, part): ns for part, ns in own.part_ns.items()}
        # Four microbatches a step; what a stage computes is no time in which it waits.
        computed_ns = 4 * sum(ns for own in recorded.stages for ns in own.part_ns.values())
        assert 0 < computed_ns + fmean(recorded.bubble_ns) <= fmean(recorded.step_ns)
    replayed = replayed_bubble(Shape("zbv", 2, 2, 4), seconds)
    assert [run["recorded"].bubble_replayed for run in both] == [pytest.approx(replayed)] * 2
