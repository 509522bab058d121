"""Files of every version read to the same objects for ever: `golden/<schema>-<version>.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from golden_laws import GoldenLaws

from results import schemas
from results.cell import Cell, StepPolicy
from results.checkpoint import Checkpoint, FileSum, LaidOut
from results.environment import CodeVersion, Environment, Program
from results.job import Job, JobEnd, RunOptions, Submission
from results.launch import Attempt, JobVariables, Launch, RankExit, Slot
from results.network import Measurement, NetworkFacts, NetworkTable, NetworkTimes
from results.outcome import Evidence, Outcome
from results.plan import FittingBatch, Order, Pattern, Placement, Plan, Request, Series, Skip
from results.record import (
    Buckets,
    KernelTimes,
    LinkPeak,
    Memory,
    Operations,
    Proof,
    Quads,
    RankRecord,
    Recorded,
    StepColumns,
    Telemetry,
    Training,
    Work,
)
from results.review import ReviewEntry
from results.run import Communication, OperationSummary, RankColumns, RunResult, StepBudget
from results.schema import Schema
from results.statistics import Metric

GOLDEN = Path(__file__).with_name("golden")

CELL = Cell(
    workload="gpt-nano",
    dataset="python-docs",
    strategy="ddp:bucket_mb=1.0",
    gpus=2,
    micro_batch=4,
    device="cuda",
    backend="nccl",
    optimizer="adamw:lr=0.001",
    compression="topk:0.01",
    accumulation=2,
    precision="bf16",
    clip_norm=1.0,
    activation_checkpointing=True,
    compile=True,
    memory_format="channels_last",
    seed=3,
    source_hash="5eed",
    dataset_hash="da7a",
    steps=StepPolicy(
        block_steps=2,
        warmup_max_steps=10,
        min_blocks=2,
        max_blocks=3,
        target=0.05,
        budget_s=60.0,
        quads=1,
    ),
)
CODE = CodeVersion(code_hash="c0de", commit="abc1234", dirty=True)
ENVIRONMENT = Environment(
    host="node-a",
    os="Linux 6.1",
    python="3.11.7",
    torch="2.13.0",
    device_name="NVIDIA H200",
    device_memory_bytes=150_000_000_000,
    cpu_model="Example CPU",
    cores=16,
    threads=1,
    code=CODE,
    device_uuid="GPU-1",
    driver="570.1",
    cuda="12.8",
    nccl="2.27.3",
    nodes=1,
    gpus_per_node=2,
    pinned_cores=(0, 1),
    nccl_settings={"NCCL_ALGO": "Ring"},
)
PROOF = Proof(
    method="serial-simulation", passed=True, detail="3 steps", max_difference=1.5e-6, max_bound=2.5e-6
)
CELL_2 = msgspec.structs.replace(
    CELL, collective="hierarchical:via=leaders", node_size=2, link_mbit_per_s=2500.0
)
CELL_3 = msgspec.structs.replace(
    CELL_2,
    strategy="fsdp:tp=2",
    gpus=4,
    activation_checkpointing="selective",
    model_parallel=2,
    memory_limit_mb=4096,
    env=("NCCL_ALGO=Ring",),
)
ORDER = Order(
    kind="trained",
    values={
        "epochs": 3,
        "steps": None,
        "checkpoint_every": 50,
        "keep": 2,
        "best": "val_accuracy",
        "patience": 4,
        "target": "val_accuracy>=0.97",
        "validate_every": 25,
        "schedule": "cosine",
        "warmup_steps": 10,
        "restarts": 5,
        "elastic": [1, 2],
        "batch_rule": "rate",
    },
)
PLAN = Plan(
    study="demo",
    created_at="2026-01-02T03:04:05.000Z",
    request=Request(
        workloads=("gpt-nano",),
        gpus=(1, 2),
        strategies=("single", "ddp:bucket_mb=1.0"),
        compressions=("topk:0.01",),
        batch_sizes=(8,),
        global_batch_sizes=(16,),
        scalings=("weak", "strong"),
        repeats=2,
        dataset="python-docs",
        device="cuda",
        backend="nccl",
        precision="bf16",
        accumulation=2,
        optimizer="adamw:lr=0.001",
        clip_norm=1.0,
        activation_checkpointing=True,
        compile=True,
        memory_format="channels_last",
        seed=3,
        steps=StepPolicy(quads=1),
        gpus_per_node=2,
        include=(Pattern(workload="gpt-nano", gpus=4),),
        exclude=(Pattern(strategy="single", compression="none", batch_size=8, scaling="weak"),),
        source_folder="models",
    ),
    cells=(CELL,),
    series=(
        Series(
            kind="strong",
            workload="gpt-nano",
            strategy="ddp:bucket_mb=1.0",
            compression="topk:0.01",
            batch_size=8,
            global_batch=16,
            cells=(CELL.id,),
        ),
    ),
    skips=(
        Skip(
            workload="gpt-nano",
            strategy="ddp",
            compression="none",
            gpus=1,
            batch_size=8,
            scaling="weak",
            reason="ddp needs 2 workers or more",
        ),
    ),
)
PLAN_2 = msgspec.structs.replace(
    PLAN,
    request=msgspec.structs.replace(
        PLAN.request,
        collectives=("default", "hierarchical:via=leaders"),
        links=("none", "2.5gbit"),
        node_size=2,
        exclude=(Pattern(collective="default", link="2.5gbit"),),
    ),
    cells=(CELL_2,),
    series=(
        msgspec.structs.replace(
            PLAN.series[0], cells=(CELL_2.id,), collective="hierarchical:via=leaders", link="2.5gbit"
        ),
    ),
    skips=(msgspec.structs.replace(PLAN.skips[0], collective="ring", link="100mbit"),),
)
PLAN_3 = msgspec.structs.replace(
    PLAN_2,
    request=msgspec.structs.replace(
        PLAN_2.request,
        activation_checkpointing="selective",
        memory_limit_mb=4096,
        gpu_model="H100-SXM5-80GB",
        network_gbit_per_s=3200.0,
        env=("NCCL_ALGO=Ring",),
        batches=(
            FittingBatch(
                series=PLAN.series[0].id,
                work="gpt-nano-ddp-g001-b1-0123456789abcdef",
                basis="measured",
                why="of the 61.0 MiB that a rank on 2 may take, a micro-batch of 8 takes 60.0",
            ),
        ),
    ),
    cells=(CELL_3,),
    series=(msgspec.structs.replace(PLAN_2.series[0], cells=(CELL_3.id,), strategy="fsdp:tp=2"),),
    skips=(msgspec.structs.replace(PLAN_2.skips[0], rule="strategy", predicate="needs 2 workers or more"),),
    command=("matrix", "--gpus", "1,2"),
    predicted_bytes={CELL_3.id: 10_000_000},
    unpredicted={"py:mine:build": "planning does not run a user's own code"},
    order=ORDER,
)
LAUNCH = Launch(
    launch_id="20260102T030405Z-00000a",
    placement=Placement(nodes=1, gpus_per_node=2),
    device="cuda",
    backend="nccl",
    evidence=Evidence.EMULATED,
    slots=(Slot(cell_id=CELL.id, run_id="20260102T030406Z-00000b", repeat=2, proved_by="run-1"),),
    code=CODE,
    threads=2,
    pin=False,
    source_folder="models",
    supervisor_pid=4321,
    warnings=("on battery",),
)
LAUNCH_2 = msgspec.structs.replace(LAUNCH, link_mbit_per_s=2500.0)
LAUNCH_3 = msgspec.structs.replace(LAUNCH_2, job_id="20260102T030400Z-00000c", silence_s=60.0)
LAUNCH_4 = msgspec.structs.replace(
    LAUNCH_3,
    trace=(0, 3),
    tensorboard=True,
    job_variables=(JobVariables(scheduler="slurm", job="SLURM_JOB_ID", restarts="SLURM_RESTART_COUNT"),),
    forks=True,
    order=ORDER,
    env=("NCCL_ALGO=Ring",),
    python="/engines/bin/python",
    proof="report",
)
ATTEMPT = Attempt(
    launch_id=LAUNCH.launch_id,
    command=("python", "-m", "torch.distributed.run"),
    started_at="2026-01-02T03:04:05.000Z",
    ended_at="2026-01-02T03:09:05.000Z",
    exit_code=1,
    stopped_by="silence of 60 s",
    outcomes={"20260102T030406Z-00000b": Outcome.HUNG},
    reasons={"20260102T030406Z-00000b": "no heartbeat"},
    ranks=(RankExit(rank=1, exit_code=None, signal="SIGKILL", message="killed"),),
    startup_ns=6_000_000_000,
)
ATTEMPT_2 = msgspec.structs.replace(
    ATTEMPT,
    heartbeats={"0": "2026-01-02T03:08:05.000Z"},
    out_of_memory_kills=1,
    scheduler="RUNNING",
)
RANK_RECORD = RankRecord(
    cell_id=CELL.id,
    run_id="20260102T030406Z-00000b",
    launch_id=LAUNCH.launch_id,
    repeat=2,
    gpus=2,
    rank=1,
    local_rank=1,
    node_rank=0,
    outcome=Outcome.DIVERGED,
    reason="the loss is not finite",
    evidence=Evidence.EMULATED,
    started_at="2026-01-02T03:04:05.000Z",
    ended_at="2026-01-02T03:04:15.000Z",
    clock="cuda-event",
    environment=ENVIRONMENT,
    setup_ns=700,
    warmup_loss=[2.5],
    warmup_steady=False,
    steps=StepColumns(
        step_ns=[8, 7],
        data_ns=[1, 1],
        forward_ns=[2, 2],
        backward_ns=[3, 2],
        optimizer_ns=[1, 1],
        loss=[2.25, None],
    ),
    blocks_ns=[15],
    block_steps=2,
    stop="budget",
    quads=Quads(steps=2, on_first_ns=[16], off_first_ns=[12], off_second_ns=[11], on_second_ns=[15]),
    work=Work(
        samples=8,
        units=512,
        unit="tokens",
        parameters=1000,
        flops=3_000_000,
        exchange_payload_bytes=4000,
        exchange_operations=2,
    ),
    memory=Memory(
        rss_peak_bytes=5,
        rss_idle_bytes=4,
        device_allocated_peak_bytes=3,
        device_reserved_peak_bytes=2,
        device_idle_bytes=1,
    ),
    proof=PROOF,
    parameters_hash="aa",
    foreign_cpu_cores=0.25,
    warnings=["on battery"],
    absent={"wire_bytes": "not counted"},
)
RUN_RESULT = RunResult(
    cell_id=CELL.id,
    run_id=RANK_RECORD.run_id,
    launch_id=LAUNCH.launch_id,
    repeat=2,
    outcome=Outcome.OK,
    reason=None,
    evidence=Evidence.EMULATED,
    started_at="2026-01-02T03:04:05.000Z",
    ranks_expected=2,
    ranks_present=2,
    environment=ENVIRONMENT,
    hosts=("node-a",),
    fingerprint="0123456789ab",
    steps=2,
    step_ns=Metric(value=7.5, unit="ns", low=7.0, high=8.0, samples=10, interval="t95-batch-means"),
    step_ns_median=7.5,
    step_ns_p10=7.1,
    step_ns_p90=7.9,
    step_ns_p99=7.99,
    slow_steps=1,
    phase_ns={"data": 1.0, "forward": 2.0, "backward": 2.5, "optimizer": 1.0, "other": 1.0},
    samples_per_s=2.0,
    units_per_s=128.0,
    unit="tokens",
    flops_per_s=1.5e12,
    mfu=0.25,
    exposed_ns=Metric(value=-0.5, unit="ns", low=None, high=None, samples=1, interval=None),
    exchange_payload_bytes=4000,
    exchange_operations=2,
    parameters=1000,
    flops_per_step=6_000_000,
    rss_peak_bytes=5,
    rss_over_idle_bytes=3,
    device_allocated_peak_bytes=3,
    loss_first=2.5,
    loss_last=2.25,
    warmup_steps=1,
    warmup_steady=True,
    stop="target",
    proof=PROOF,
    replicas_agree=True,
    foreign_cpu_cores=0.25,
    disturbed=True,
    setup_ns=700,
    warnings=("on battery",),
    absent={"wire_bytes": "not counted"},
)
IN_A_JOB = msgspec.structs.replace(ENVIRONMENT, allocation="slurm 17")
RANK_RECORD_2 = msgspec.structs.replace(RANK_RECORD, environment=IN_A_JOB)
RUN_RESULT_2 = msgspec.structs.replace(RUN_RESULT, environment=IN_A_JOB)
TRAINING = Training(differences=("averages every 2 steps",), averages_all_gradients=False)
CONNECTED = msgspec.structs.replace(
    IN_A_JOB,
    settings={"FI_PROVIDER": "efa"},
    process_group="ProcessGroupNCCL",
    transports=("NVLink (P2P/CUMEM)",),
    attention=("flash", "math"),
    code=msgspec.structs.replace(CODE, user_commit="def5678", user_dirty=False),
    program=Program(
        names_hash="d1ce",
        tensors={"float32 64x16": 1},
        modules={"torch.nn.modules.linear.Linear": 1},
        distributions={"timm": "1.0"},
        files={"config.json": "beef"},
    ),
)
NAMED = msgspec.structs.replace(CONNECTED, interfaces={"GLOO_SOCKET_IFNAME": "eth0"})
NETWORK_TIMES = [
    NetworkTimes(collective="all-reduce", payload_bytes=65536, ranks=2, nodes=1, duration_ns=[1500000.5, 2.0])
]
RANK_RECORD_3 = msgspec.structs.replace(
    RANK_RECORD_2,
    environment=CONNECTED,
    first_step_ns=90,
    first_steps=3,
    spent_ns={"build": 700, "late proof": 900},
    period=2,
    training=TRAINING,
    trained_steps=120,
    quads=msgspec.structs.replace(RANK_RECORD.quads, off_step_ns=[6, 5, 5, 6]),
    recorded=Recorded(
        step_ns=[10, 9],
        blocked_ns=[2, 3],
        dispatch_ns=[4, 5],
        exchange_cpu_ns=[1, 0],
        bubble_ns=[0, 1],
        operations=Operations(
            names=["allreduce", "send"],
            groups=["0-1", "1"],
            step=[0, 1],
            name=[0, 1],
            group=[0, 1],
            payload_bytes=[4000, 16],
            issued_ns=[3, 4],
            duration_ns=[5, 2],
        ),
        kernels=KernelTimes(steps=2, compute_ns=9, communication_ns=6, overlap_ns=4),
    ),
    buckets=Buckets(started=[0, 3], early=[0, 2]),
    first_hash="bb",
    link_peak=LinkPeak(payload_bytes=1 << 20, duration_ns=[300, 310]),
    telemetry=Telemetry(
        at_ms=[0, 50], series={"power_w": [350.5, None]}, window_ns=50_000_000, energy_j=17.5
    ),
    work=msgspec.structs.replace(RANK_RECORD.work, exchange_operations=0.25, bubble_ideal=0.25),
)
RANK_RECORD_4 = msgspec.structs.replace(
    RANK_RECORD_3,
    environment=NAMED,
    outcome=Outcome.PROOF_FAILED,
    quads=msgspec.structs.replace(RANK_RECORD_3.quads, copies_ns=[2, 1]),
    buckets=Buckets(started=[0, 3], early=[0, 2], left=[[], [0.75, 0.5, 0.0]]),
    network=NETWORK_TIMES,
)
RUN_RESULT_3 = msgspec.structs.replace(
    RUN_RESULT_2,
    environment=CONNECTED,
    training=TRAINING,
    budget=StepBudget(
        method="on-off",
        input_ns=1.0,
        compute_ns=4.5,
        transfer_ns=Metric(value=1.25, unit="ns", low=1.0, high=1.5, samples=2, interval="range"),
        wait_ns=Metric(value=0.25, unit="ns", low=None, high=None, samples=1, interval=None),
        bubble_ns=0.5,
        other_ns=0.0,
    ),
    communication=Communication(
        steps=2,
        step_ns=9.5,
        total_ns=3.5,
        blocked_ns=2.5,
        transfer_ns=2.0,
        wait_ns=0.5,
        exchange_cpu_ns=0.5,
        dispatch_ns=4.5,
        bubble_ns=0.5,
        operations=(
            OperationSummary(
                name="allreduce",
                group_size=2,
                count=0.5,
                payload_bytes=2000.0,
                duration_ns=2.5,
                transfer_ns=2.0,
                wait_ns=0.5,
            ),
        ),
        bus_bytes_per_s=1e12,
        peak_bus_bytes_per_s=3.5e12,
    ),
    ranks=RankColumns(
        node=[0, 0],
        compute_ns=[5, 6],
        compute_sd_ns=[1, 1],
        slowest_share=[0.25, 0.75],
        wait_ns=[1, 0],
        blocked_ns=[2, 3],
        steps=4,
    ),
    telemetry={"power_w": 350.5, "power_w_max": 400.0},
    energy_j=0.125,
    bubble_ideal=0.25,
    losses=(2.5, 2.25),
    losses_every=2,
    exchange_operations=0.25,
    exchange_buckets=1.5,
    exchange_buckets_early=1.0,
    first_hash="bb",
    loss_fixed=2.375,
    first_steps=3,
    first_step_ns=90,
    startup_ns=6_000_000_000,
    spent_ns={"build": 700, "late proof": 900},
)
JOB = Job(
    job_id="0001-2x8",
    purpose="feed",
    name="demo-3fa9-0001-2x8",
    launcher="slurm",
    placement=Placement(nodes=2, gpus_per_node=8),
    plan=1,
    cells=(CELL.id,),
    baseline=CELL.id,
    options=RunOptions(
        isolation="cell",
        oversubscribe=True,
        max_time_s=60.0,
        rerun_failed=True,
        silence_s=30.0,
        prune=False,
        retries=1,
    ),
    code=CODE,
    estimate_s=120.0,
    time_limit_s=600.0,
    billed_gpus=16,
    site={"partition": "gpu"},
)
JOB_2 = msgspec.structs.replace(
    JOB,
    options=msgspec.structs.replace(JOB.options, trace=(0, 3), tensorboard=True, proof="report"),
    arguments=("tune",),
)
SUBMISSION = Submission(
    job_id=JOB.job_id, scheduler_id="17", submitted_at="2026-01-02T03:04:05.000Z", cluster="lab"
)
JOB_END = JobEnd(
    job_id=JOB.job_id,
    scheduler_id="17",
    start=1,
    told_by="job",
    nodes=("n1", "n2"),
    started_at="2026-01-02T03:04:05.000Z",
    ended_at="2026-01-02T03:09:05.000Z",
    outcome=Outcome.PREEMPTED,
    reason="PREEMPTED",
)
# One line a version; an older line stays when a newer one comes.
NETWORK = NetworkTable(
    source="bench",
    measured_at="2026-01-02T03:04:05.000Z",
    facts=NetworkFacts(
        backend="nccl",
        device_name="NVIDIA H200",
        library="NCCL 2.27.3",
        link_mbit_per_s=2500.0,
        network="P2P/IPC, GDRDMA (NET/IB)",
        settings={"NCCL_ALGO": "Ring"},
    ),
    evidence=Evidence.MEASURED,
    measurements=(
        Measurement(
            collective="all-gather",
            payload_bytes=65536,
            ranks=16,
            nodes=2,
            median_s=0.001,
            low_s=0.0009,
            high_s=0.0012,
            runs=30,
        ),
    ),
    absent={"send": "not asked for"},
)
REVIEW = ReviewEntry(
    at="2026-01-02T03:04:05.000Z",
    author="Ann",
    what="approved",
    run_ids=("20260102T030405Z-0123ab",),
    why="as planned",
    state="0123456789abcdef",
    runs=36,
)
CHECKPOINT = Checkpoint(
    step=200,
    session="0a1b2c3d4e5f6071",
    laid_out=LaidOut(strategy="ddp", compression="topk:0.01", collective="default", ranks=2, node_size=2),
    optimizer="AdamW",
    own_replicas=False,
    conditions={"torch": "2.13.0+cpu", "device": "cpu", "CPU kernels": "AVX512", "threads": "1"},
    files={
        ".metadata": FileSum(bytes=4343, sha256="b8f9"),
        "__0_0.distcp": FileSum(bytes=49360, sha256="8da1"),
    },
    metric=0.25,
    metric_name="val_loss",
)
EXPECTED: dict[str, tuple[Schema[Any], Any]] = {
    "plan-1": (schemas.PLAN, PLAN),
    "plan-2": (schemas.PLAN, PLAN_2),
    "plan-3": (schemas.PLAN, PLAN_3),
    "plan-4": (schemas.PLAN, PLAN_3),
    "cell-1": (schemas.CELL, CELL),
    "cell-2": (schemas.CELL, CELL_2),
    "cell-3": (schemas.CELL, CELL_3),
    "launch-1": (schemas.LAUNCH, LAUNCH),
    "launch-2": (schemas.LAUNCH, LAUNCH_2),
    "launch-3": (schemas.LAUNCH, LAUNCH_3),
    "launch-4": (schemas.LAUNCH, LAUNCH_4),
    "launch-5": (schemas.LAUNCH, LAUNCH_4),
    "attempt-1": (schemas.ATTEMPT, ATTEMPT),
    "attempt-2": (schemas.ATTEMPT, ATTEMPT_2),
    "rank-record-1": (schemas.RANK_RECORD, RANK_RECORD),
    "rank-record-2": (schemas.RANK_RECORD, RANK_RECORD_2),
    "rank-record-3": (schemas.RANK_RECORD, RANK_RECORD_3),
    "rank-record-4": (schemas.RANK_RECORD, RANK_RECORD_4),
    "rank-record-5": (
        schemas.RANK_RECORD,
        msgspec.structs.replace(RANK_RECORD_4, measured={"copy_ns": [1.5, 2.0]}),
    ),
    "run-result-1": (schemas.RUN_RESULT, RUN_RESULT),
    "run-result-2": (schemas.RUN_RESULT, RUN_RESULT_2),
    "run-result-3": (schemas.RUN_RESULT, RUN_RESULT_3),
    "run-result-4": (
        schemas.RUN_RESULT,
        msgspec.structs.replace(
            RUN_RESULT_3,
            environment=NAMED,
            outcome=Outcome.PROOF_FAILED,
            copies_ns=1.5,
            exchange_backward_left=0.375,
        ),
    ),
    "job-1": (schemas.JOB, JOB),
    "job-2": (schemas.JOB, JOB_2),
    "submission-1": (schemas.SUBMISSION, SUBMISSION),
    "job-end-1": (schemas.JOB_END, JOB_END),
    "checkpoint-1": (schemas.CHECKPOINT, CHECKPOINT),
    "network-1": (schemas.NETWORK, NETWORK),
    "review-1": (schemas.REVIEW, REVIEW),
}


class TestGolden(GoldenLaws):
    golden = Path(__file__).with_name("golden")
    expected = EXPECTED

    def test_every_schema_of_the_core_has_golden_files(self) -> None:
        every = {value.name for value in vars(schemas).values() if isinstance(value, Schema)}
        assert {schema.name for schema, _ in EXPECTED.values()} == every
