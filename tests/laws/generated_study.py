"""A study of 85 cells on 1 to 256 GPUs with plausible times, made from a seed and not from training.

GPT-2 small on nodes of eight GPUs, weak (8 samples a replica) and strong (2,048 samples): a step is its
computation, what of a ring all-reduce does not hide behind 60 % of it, and the wait for the slowest rank.
Between nodes a ring gets 20 GB/s, and less the more nodes share the switch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from builders import a_cell, an_environment

from reports.analysis.assumptions import Assumptions
from reports.analysis.study import StudyFigures, analyse
from results.cell import Cell
from results.outcome import Evidence, Outcome
from results.plan import Plan, Request, Scaling, Series, Skip
from results.record import Proof
from results.run import Communication, OperationSummary, RankColumns, RunResult, StepBudget
from results.statistics import Metric

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
WEAK_BATCH, GLOBAL_BATCH = 8, 2048
STRATEGIES = (
    ("ddp", "none"),
    ("ddp", "bf16"),
    ("ddp", "powersgd:4"),
    ("scratch-ddp", "none"),
    ("fsdp", "none"),
    ("ddp", "topk:0.01"),
)
"""Strategy and compression; the last is only in the weak series."""
_SENT = {"none": 1.0, "bf16": 0.5, "powersgd:4": 0.02, "topk:0.01": 0.01}
"""Share of the gradients' bytes that a ring carries."""
_ENCODING_MS = {"none": 0.0, "bf16": 0.6, "powersgd:4": 9.0, "topk:0.01": 14.0}
_PACE = {"single": 1.0, "ddp": 1.01, "scratch-ddp": 1.02, "fsdp": 1.05}
_GRADIENTS = 124_439_808 * 4
_SAMPLE_MS = 5.6
_NOISE = 0.012
"""Standard deviation between runs, of the logarithm."""
_DAY = "2026-03-14"
_COMMAND = (
    "matrix --name gpt2-on-256 --workload gpt2-small --gpus 1,2,4,8,16,32,64,128,256 "
    "--strategy single,ddp,scratch-ddp,fsdp --compression none,bf16,powersgd:4,topk:0.01 "
    "--scaling weak,strong --batch-size 8 --global-batch-size 2048 --precision bf16 --launcher slurm"
)
GPU = an_environment(
    host="node-00",
    device_name="NVIDIA A100-SXM4-80GB",
    device_memory_bytes=80 * 2**30,
    cpu_model="AMD EPYC 7763",
    cores=128,
    threads=8,
    cuda="13.0",
    nccl="2.28.9",
    driver="580.95",
)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Faults of a study, by shares of its runs and cells, or as clusters have them."""

    disturbed: float = 0.0
    failed: float = 0.0
    dirty: bool = False
    cluster: bool = False
    """Large batches do not fit on the smallest sizes, a node dies before the third run on all nodes, and a
    host is slow on all sizes that have it."""


_DEAD, _SLOW = 29, 5
"""The nodes of `Trouble.cluster` that die and are slow."""


def large_study(
    seed: int = 16,
    trouble: Trouble = Trouble(),
    *,
    priced: bool = True,
    sizes: Sequence[int] = SIZES,
    optimizer: str = "adamw",
) -> StudyFigures:
    """The same seed gives the same study."""
    rng = random.Random(seed)
    plan = _plan(sizes, optimizer, trouble)
    results = [run for cell in plan.cells for run in _runs(cell, trouble, rng)]
    told = Assumptions(epoch_samples=8_800_000) if priced else Assumptions()
    return analyse("gpt2-on-256", [plan], results, told)


def _plan(sizes: Sequence[int], optimizer: str, trouble: Trouble) -> Plan:
    cells: dict[str, Cell] = {}
    series = [
        _series(cells, kind, (strategy, compression, optimizer), own)
        for kind in ("weak", "strong")
        for strategy, compression, own in _points(kind, sizes)
    ]
    return Plan(
        study="gpt2-on-256",
        created_at=f"{_DAY}T08:00:00.000Z",
        request=Request(
            workloads=("gpt2-small",),
            gpus=(1, *sizes),
            strategies=("single", "ddp", "scratch-ddp", "fsdp"),
            compressions=("none", "bf16", "powersgd:4", "topk:0.01"),
            batch_sizes=(WEAK_BATCH,),
            global_batch_sizes=(GLOBAL_BATCH,),
            scalings=("weak", "strong"),
            device="cuda",
            backend="nccl",
            precision="bf16",
        ),
        cells=tuple(cells.values()),
        series=tuple(series),
        skips=tuple(_skips()),
        command=tuple(_COMMAND.split()),
        predicted_bytes={cell.id: _predicted_bytes(cell, trouble) for cell in cells.values() if cell.dense},
    )


def _points(kind: str, sizes: Sequence[int]) -> Iterator[tuple[str, str, Sequence[int]]]:
    yield "single", "none", (1,)
    for strategy, compression in STRATEGIES if kind == "weak" else STRATEGIES[:-1]:
        yield strategy, compression, sizes


def _series(cells: dict[str, Cell], kind: Scaling, way: tuple[str, str, str], sizes: Sequence[int]) -> Series:
    strategy, compression, _ = way
    own = [_cell(way, gpus, GLOBAL_BATCH // gpus if kind == "strong" else WEAK_BATCH) for gpus in sizes]
    cells |= {cell.id: cell for cell in own}
    return Series(
        kind=kind,
        workload="gpt2-small",
        strategy=strategy,
        compression=compression,
        batch_size=WEAK_BATCH,
        global_batch=GLOBAL_BATCH if kind == "strong" else None,
        cells=tuple(cell.id for cell in own),
    )


def _cell(way: tuple[str, str, str], gpus: int, batch: int) -> Cell:
    strategy, compression, optimizer = way
    return a_cell(
        workload="gpt2-small",
        strategy=strategy,
        compression=compression,
        gpus=gpus,
        micro_batch=batch,
        device="cuda",
        backend="nccl",
        precision="bf16",
        optimizer=optimizer,
    )


def _skips() -> Iterator[Skip]:
    for scaling in ("weak", "strong"):
        for gpus in SIZES:
            yield _skip("single", "none", gpus, scaling, "single runs on exactly 1 GPU")
        yield _skip("fsdp", "bf16", 2, scaling, "fsdp exchanges by itself, and takes no compressor")


def _skip(strategy: str, compression: str, gpus: int, scaling: Scaling, reason: str) -> Skip:
    return Skip(
        workload="gpt2-small",
        strategy=strategy,
        compression=compression,
        gpus=gpus,
        batch_size=WEAK_BATCH,
        scaling=scaling,
        reason=reason,
        rule="strategy",
        predicate=reason.removeprefix(f"{strategy} "),
    )


def _runs(cell: Cell, trouble: Trouble, rng: random.Random) -> Iterator[RunResult]:
    fails = (cell.gpus == 256 and "topk" in cell.compression) or rng.random() < trouble.failed
    for repeat in (1, 2, 3):
        disturbed = rng.random() < trouble.disturbed
        dies = trouble.cluster and repeat == 3 and cell.gpus > 8 * _DEAD
        if fails or _peak_bytes(cell, trouble) > 80 * 2**30:
            reason = "rank 17: CUDA out of memory: tried to allocate 3.71 GiB"
            yield _failed(cell, repeat, trouble, Outcome.OUT_OF_MEMORY, reason)
        elif dies:
            reason = f"node-{_DEAD} stopped answering, and Slurm ended the job (NODE_FAIL)"
            yield _failed(cell, repeat, trouble, Outcome.NODE_FAILED, reason)
        else:
            yield measured(cell, repeat, rng, disturbed, trouble)


def base_fields(cell: Cell, repeat: int, trouble: Trouble) -> dict[str, object]:
    """Fields of a run, however it ended."""
    minute = (cell.gpus * 7 + repeat * 13) % 600
    code = msgspec.structs.replace(GPU.code, dirty=trouble.dirty)
    nodes = max(1, cell.gpus // 8)
    environment = msgspec.structs.replace(GPU, nodes=nodes, gpus_per_node=min(8, cell.gpus), code=code)
    return {
        "cell_id": cell.id,
        "run_id": f"20260314T{9 + minute // 60:02d}{minute % 60:02d}00Z-{repeat:02d}{cell.id[-6:]}",
        "launch_id": f"launch-{cell.gpus}-{repeat}",
        "repeat": repeat,
        "started_at": f"{_DAY}T{9 + minute // 60:02d}:{minute % 60:02d}:00.000Z",
        "ranks_expected": cell.gpus,
        "environment": environment,
        "hosts": tuple(f"node-{node:02d}" for node in range(nodes)),
        "fingerprint": environment.fingerprint,
        "evidence": Evidence.MEASURED,
    }


def _predicted_bytes(cell: Cell, trouble: Trouble) -> int:
    """A little more than what is measured."""
    return round(_peak_bytes(cell, trouble) + (0.1 + 0.002 * cell.batch_per_replica) * 2**30)


def _peak_bytes(cell: Cell, trouble: Trouble) -> int:
    """The more, the more samples there are."""
    return round((2.1 + (0.08 if trouble.cluster else 0.022) * cell.batch_per_replica) * 2**30)


def _failed(cell: Cell, repeat: int, trouble: Trouble, outcome: Outcome, reason: str) -> RunResult:
    return RunResult(**base_fields(cell, repeat, trouble), outcome=outcome, reason=reason, ranks_present=0)


def measured(cell: Cell, repeat: int, rng: random.Random, disturbed: bool, trouble: Trouble) -> RunResult:
    noise = rng.lognormvariate(0, _NOISE) * (1.05 if disturbed else 1.0)
    compute = cell.batch_per_replica * _SAMPLE_MS * _PACE[cell.strategy] + _ENCODING_MS[cell.compression]
    if cell.compression != "none":
        compute += 0.8
    ring = _ring_ms(cell)
    transfer = max(0.03 * ring, ring - 0.6 * compute) if cell.gpus > 1 else 0.0
    slower = trouble.cluster and cell.gpus > 8 * _SLOW
    wait = 0.012 * compute * max(0, cell.gpus.bit_length() - 1) / 2 + 0.06 * compute * slower
    parts = {"input": 0.4, "compute": compute, "transfer": transfer, "wait": wait, "other": 0.001 * compute}
    ns = {name: ms * noise * rng.lognormvariate(0, 0.01) * 1e6 for name, ms in parts.items()}
    step = sum(ns.values())
    several = cell.gpus > 1
    exposed = (ns["transfer"] + ns["wait"]) * 1.02
    bytes_sent = _GRADIENTS * _SENT[cell.compression]
    return RunResult(
        **base_fields(cell, repeat, trouble),
        outcome=Outcome.OK,
        reason=None,
        ranks_present=cell.gpus,
        steps=60,
        step_ns=_metric(step),
        step_ns_median=step * 0.995,
        step_ns_p10=step * 0.97,
        step_ns_p90=step * 1.03,
        step_ns_p99=step * 1.08,
        slow_steps=2,
        phase_ns={
            "data": ns["input"],
            "forward": 0.31 * compute * 1e6,
            "backward": step - ns["input"] - 0.41 * compute * 1e6,
            "optimizer": 0.1 * compute * 1e6,
            "other": 0.0,
        },
        samples_per_s=cell.global_batch * 1e9 / step,
        units_per_s=cell.global_batch * 1024 * 1e9 / step,
        unit="tokens",
        flops_per_s=6 * 124e6 * 1024 * cell.global_batch * 1e9 / step,
        mfu=6 * 124e6 * 1024 * cell.global_batch * 1e9 / step / (312e12 * cell.gpus),
        exposed_ns=_metric(exposed) if several else None,
        budget=StepBudget(
            method="on-off" if several else "one rank",
            input_ns=ns["input"],
            compute_ns=ns["compute"],
            transfer_ns=_metric(ns["transfer"]),
            wait_ns=_metric(ns["wait"]),
            other_ns=ns["other"],
        ),
        communication=_communication(cell, step, ring, ns, bytes_sent, rng) if several else None,
        ranks=_ranks(cell, ns["compute"], rng, trouble) if several else None,
        exchange_payload_bytes=round(bytes_sent) if several else 0,
        exchange_operations=20 if several else 0,
        parameters=124_439_808,
        flops_per_step=round(6 * 124e6 * 1024 * cell.global_batch),
        rss_peak_bytes=round((3.2 + 0.01 * rng.random()) * 2**30),
        rss_over_idle_bytes=2**30,
        device_allocated_peak_bytes=_peak_bytes(cell, trouble),
        loss_first=10.95,
        loss_last=8.1 + 0.01 * rng.random(),
        warmup_steps=12,
        warmup_steady=True,
        stop="target",
        proof=Proof(
            method="serial-simulation", passed=True, detail="3 steps, all gradients within the bound"
        ),
        replicas_agree=True,
        foreign_cpu_cores=9.1 if disturbed else 0.2,
        disturbed=disturbed,
        setup_ns=round(4.2e9),
        first_step_ns=round(1.9e9),
    )


def _metric(ns: float) -> Metric:
    return Metric(value=ns, unit="ns", low=ns * 0.99, high=ns * 1.01, samples=10, interval="batch-means")


def _bytes_per_s(gpus: int) -> float:
    return 180e9 if gpus <= 8 else 20e9 / (1 + gpus / 200)


def _ring_ms(cell: Cell) -> float:
    """Bytes of a compressor that selects: each rank gets what all others send."""
    times = cell.gpus - 1 if "topk" in cell.compression else 2 * (cell.gpus - 1) / cell.gpus
    latency = 0.02 * cell.gpus
    return times * _GRADIENTS * _SENT[cell.compression] / _bytes_per_s(cell.gpus) * 1e3 + latency


def _communication(
    cell: Cell, step: float, ring: float, ns: dict[str, float], bytes_sent: float, rng: random.Random
) -> Communication:
    ring_ns = ring * 1e6 * rng.lognormvariate(0, 0.02)
    bandwidth = 2 * (cell.gpus - 1) / cell.gpus * bytes_sent / ring_ns * 1e9
    return Communication(
        steps=10,
        step_ns=step * 1.01,
        total_ns=ring_ns + ns["wait"],
        blocked_ns=ns["transfer"] + ns["wait"],
        transfer_ns=ring_ns,
        wait_ns=ns["wait"],
        exchange_cpu_ns=None,
        dispatch_ns=ns["compute"] * 0.3,
        bubble_ns=None,
        operations=(
            OperationSummary(
                name="allreduce",
                group_size=cell.gpus,
                count=20.0,
                payload_bytes=bytes_sent,
                duration_ns=ring_ns + ns["wait"],
                transfer_ns=ring_ns,
                wait_ns=ns["wait"],
            ),
        ),
        bus_bytes_per_s=bandwidth,
        peak_bus_bytes_per_s=_bytes_per_s(cell.gpus) * (1.1 + 0.02 * (cell.gpus % 3)),
    )


def _ranks(cell: Cell, compute_ns: float, rng: random.Random, trouble: Trouble) -> RankColumns:
    """Rank 3 of the ring of 64 is slow, because its fan failed; in a troubled cluster, a host is slow."""
    slow = range(8 * _SLOW, 8 * _SLOW + 8) if trouble.cluster else [3] * (cell.gpus == 64)
    paces = [1.06 if rank in slow else 1.0 + 0.004 * rng.random() for rank in range(cell.gpus)]
    return RankColumns(
        node=[rank // 8 for rank in range(cell.gpus)],
        compute_ns=[round(compute_ns * pace) for pace in paces],
        compute_sd_ns=[round(compute_ns * 0.01)] * cell.gpus,
        slowest_share=[1 / cell.gpus] * cell.gpus,
        wait_ns=[round(0.01 * compute_ns)] * cell.gpus,
        steps=40,
    )
