"""The time of a step by hand: what hides behind which passes, what an update moves, what grows with ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import an_environment, nano_cell, parts_of

from harness.plan import surroundings
from harness.plan.estimate import StepTimes, predicted_bytes, predicted_times, unpredicted
from harness.plan.surroundings import Devices, Measured, Surroundings
from results.cell import Cell
from results.network import Measurement, NetworkFacts, NetworkTable
from results.outcome import Evidence, Outcome
from results.parts import VALUE_BYTES
from results.run import RunResult, StepBudget
from results.schemas import NETWORK
from results.statistics import Metric
from results.store import Study
from strategies.closed_form.terms import Collective, Overlap, Term, term
from strategies.predictions import traffic

HOST = Devices(cores=8, host_bytes=64 * 2**30)
A100 = Devices(gpu_name="NVIDIA A100-SXM4-80GB")
GPU = {"device": "cuda", "backend": "nccl", "precision": "bf16"}


@pytest.fixture
def no_latency(monkeypatch) -> None:
    for name in ("OPERATION_S", "HOP_S"):
        monkeypatch.setattr(surroundings, name, {"cpu": 0.0, "cuda": 0.0})


def term_beside(overlap: Overlap, seconds: float, operations: int) -> Term:
    """Make a term of equal operations of 2 ranks, each of which takes `seconds` at 1 GB/s."""
    collective: Collective = "all-gather" if overlap == "forward" else "all-reduce"
    return term(
        "",
        collective,
        ("replicate", 2),
        payload=1e9 * seconds * operations,
        operations=operations,
        overlap=overlap,
    )


@pytest.mark.usefixtures("no_latency")
@pytest.mark.parametrize(
    ("beside", "exposed"),
    [
        # With C = 12 and accumulation 2: forward 0 to 2, backward 2 to 6, and the same again from 6 on.
        ([("none", 1, 3)], 3),
        # The last bucket is ready when backward is over: ready at 9, 10, 11 and 12.
        ([("last backward", 1, 4)], 1),
        ([("last backward", 2, 4)], 5),
        # However long the backward pass is, the last one is exposed.
        ([("last backward", 0.25, 4)], 0.25),
        # One in each micro-batch, ready at 6 and at 12.
        ([("backward", 5, 2)], 5),
        ([("backward", 7, 2)], 8),
        # Gathered for each forward pass: nothing is ahead of the first, the second has 6.
        ([("forward", 3, 2)], 3),
        ([("forward", 7, 2)], 7 + 1),
        # Sums begin behind the gatherings: 12 is reached at 14 by the clock, and the sum takes 2.
        ([("forward", 2, 2), ("last backward", 2, 1)], 4),
        ([("none", 1, 1), ("last backward", 2, 1)], 3),
    ],
)
def test_what_runs_beside_computation_hides_behind_its_passes(beside, exposed) -> None:
    cell = nano_cell("ddp", 2, accumulation=2)
    parts = parts_of("gpt-nano")
    around = Surroundings.of(cell, HOST, None)
    unit = predicted_times(cell, parts, [], around).compute / 12
    terms = [term_beside(overlap, unit * seconds, count) for overlap, seconds, count in beside]
    assert predicted_times(cell, parts, terms, around).exposed == pytest.approx(unit * exposed)


@pytest.mark.usefixtures("no_latency")
def test_a_forward_pass_that_is_repeated_is_part_of_backward() -> None:
    """With checkpointing C is 16: forward 4 as before, backward 12. Of 2 sums one is ready at 10."""
    parts = parts_of("gpt-nano")
    cell = nano_cell("ddp", 2, activation_checkpointing=True)
    around = Surroundings.of(cell, HOST, None)
    unit = predicted_times(cell, parts, [], around).compute / 16
    terms = [term_beside("last backward", 6 * unit, 2)]
    assert predicted_times(cell, parts, terms, around).exposed == pytest.approx(6 * unit)
    terms = [term_beside("last backward", 7 * unit, 2)]
    assert predicted_times(cell, parts, terms, around).exposed == pytest.approx(8 * unit)


def times_of(cell: Cell, devices: Devices = A100, per_node: int | None = 8) -> StepTimes:
    around = Surroundings.of(cell, devices, per_node)
    placed, parts = around.placed(cell), parts_of(cell.workload)
    return predicted_times(placed, parts, traffic(placed, parts), around)


@pytest.mark.parametrize(
    ("workload", "strategy"), [("resnet50", "ddp"), ("gpt2-small", "zero1"), ("llama-1b", "fsdp")]
)
def test_a_step_takes_longer_on_more_nodes(workload, strategy) -> None:
    """More ranks are more hops of each operation, however little more each of them sends."""
    sizes = (16, 64, 256, 1024, 4096)
    steps = [times_of(nano_cell(strategy, size, workload=workload, micro_batch=8, **GPU)) for size in sizes]
    exposed = [step.exposed for step in steps]
    assert exposed == sorted(exposed)
    assert exposed[-1] > 1.5 * exposed[0]
    # Inside of a node little is exposed, and beyond it much.
    assert times_of(nano_cell(strategy, 8, workload=workload, micro_batch=8, **GPU)).exposed < exposed[0] / 2


def test_the_last_bucket_never_hides() -> None:
    """GPT-2's embedding is the last gradient: with a batch whose backward pass takes a minute, what is in its
    bucket is still to be sent when the pass is over."""
    cell = nano_cell("ddp", 16, workload="gpt2-small", micro_batch=4096, **GPU)
    around = Surroundings.of(cell, A100, 8)
    [sums] = traffic(around.placed(cell), parts_of("gpt2-small"))
    last = 2 * 15 / 16 * sums.pieces[-1].payload_bytes
    assert last > 2 * 4 * 50257 * 768
    exposed = times_of(cell).exposed
    assert exposed == pytest.approx(last / 17.5e9, rel=0.02)


def test_groups_that_leave_a_node_together_share_its_way_out() -> None:
    """hsdp's sums over nodes are as many rings as a node has ranks, each of a part of the bytes."""
    cell = nano_cell("hsdp", 32, workload="llama-1b", micro_batch=1, **GPU)
    around = Surroundings.of(cell, A100, 8)
    placed, parts = around.placed(cell), parts_of("llama-1b")
    [across] = [term for term in traffic(placed, parts) if term.dimension == "replicate"]
    alone = across.wire_bytes / 17.5e9
    least = 8 * alone - predicted_times(placed, parts, [], around).compute
    assert times_of(cell).exposed > max(least, 2 * alone)


def run_of(cell: Cell, compute_s: float, *, forward_s: float, update_s: float, **fields: Any) -> RunResult:
    """A good run of a cell with this computation."""
    phases = {"data": 0.0, "forward": 1e9 * forward_s, "optimizer": 1e9 * update_s}
    nothing = Metric(value=0.0, unit="ns", low=None, high=None, samples=1, interval=None)
    budget = StepBudget(
        method="one rank", input_ns=0.0, compute_ns=1e9 * compute_s, transfer_ns=nothing, wait_ns=nothing,
        other_ns=0.0,
    )  # fmt: skip
    base = {"outcome": Outcome.OK, "reason": None, "evidence": Evidence.MEASURED, "started_at": None}
    return RunResult(
        cell_id=cell.id, run_id="a", launch_id="b", repeat=1, ranks_expected=cell.gpus,
        ranks_present=cell.gpus, phase_ns=phases, budget=budget, **base | fields,
    )  # fmt: skip


def test_measured_computation_goes_before_assumed() -> None:
    """12 s of one rank, of which 4 are forward and 1 is the update; the median of the quiet runs. It counts
    for no other batch of a replica, and for any number of ranks and any replicas."""
    alone, four = nano_cell("single", 1), nano_cell("ddp", 4)
    runs = [run_of(alone, compute_s, forward_s=4, update_s=1) for compute_s in (11, 12, 19)]
    runs.append(run_of(alone, 90, forward_s=4, update_s=1, disturbed=True))
    # Of the cell with fewest ranks.
    runs.append(run_of(four, 30, forward_s=9, update_s=1))
    devices = replace(HOST, measured=Measured.of(runs, [four, alone]))
    found = times_of(nano_cell("ddp", 8), devices, None)
    assert (found.compute, found.update, found.measured) == (11, 1, ("computation",))
    # zero1 updates a part of the parameters.
    assert times_of(nano_cell("zero1", 8), devices, None).update < 0.3
    # 8 ranks on 2 cores take 4 times as long.
    assert times_of(nano_cell("ddp", 8), replace(devices, cores=2), None).compute == 44
    other = times_of(nano_cell("ddp", 8, micro_batch=8), devices, None)
    assert other.measured == ()
    assert other.compute == times_of(nano_cell("ddp", 8, micro_batch=8), HOST, None).compute


def test_a_strategy_that_shards_computes_as_its_own_steps_did() -> None:
    """Its copies into and out of shards are a part of its computation, and no device alone has them."""
    alone, sharded = nano_cell("single", 1), nano_cell("fsdp", 2)
    runs = [run_of(alone, 12, forward_s=4, update_s=0), run_of(sharded, 15, forward_s=4, update_s=0)]
    devices = replace(HOST, measured=Measured.of(runs, [alone, sharded]))
    computes = {
        name: times_of(nano_cell(name, 8), devices, None).compute for name in ("ddp", "fsdp", "zero2")
    }
    assert computes == {"ddp": 12, "fsdp": 15, "zero2": 12}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_the_computation_of_shared_cores_and_of_a_shard_is_predicted_as_it_was_measured(strategy) -> None:
    """8 ranks on 2 cores, which update a part each: what was measured there already has both."""
    cell = nano_cell(strategy, 8)
    host = an_environment(cores=2, nodes=1, gpus_per_node=8)
    runs = [run_of(cell, 44, forward_s=4, update_s=4, environment=host)]
    found = times_of(cell, Devices(cores=2, measured=Measured.of(runs, [cell])), None)
    assert (found.compute, found.update) == pytest.approx((40, 4))


ROWS = tuple(
    Measurement(
        collective="all-reduce", payload_bytes=size, ranks=4, nodes=4, runs=9,
        median_s=1.0, low_s=1.0, high_s=1.0,
    )
    for size in (1, 10**9)
)  # fmt: skip


def table_of(rows: tuple[Measurement, ...]) -> NetworkTable:
    facts = NetworkFacts(backend="gloo", link_mbit_per_s=1000.0)
    return NetworkTable(
        source="bench", measured_at="2026-01-01T00:00:00Z", facts=facts, evidence=Evidence.EMULATED,
        measurements=rows,
    )  # fmt: skip


def test_a_study_has_its_network_in_its_folder(tmp_path) -> None:
    """A torn table does not keep the study from being measured: times are assumed."""
    study = Study(tmp_path)
    known = table_of(ROWS)
    assert Measured.of_study(study, []) == Measured()
    (tmp_path / "network.json").write_bytes(NETWORK.encode(known))
    assert Measured.of_study(study, []).network == known
    (tmp_path / "network.json").write_bytes(NETWORK.encode(known)[:-20])
    assert Measured.of_study(study, []) == Measured()


def test_a_measured_network_goes_before_an_assumed_one() -> None:
    """A table of 4 ranks on 4 nodes under this link: 1 s an operation of any size. For another link,
    and for operations that it lacks, times are assumed."""
    devices = replace(HOST, measured=Measured(network=table_of(ROWS)))
    link = {"link_mbit_per_s": 1000.0, "node_size": 1}
    found = times_of(nano_cell("ddp", 4, **link), devices, None)
    assert found.measured == ("network",)
    # Two buckets that share the network, of which the first begins a little earlier.
    assert found.exposed == pytest.approx(2, abs=0.05)
    slower = times_of(nano_cell("ddp", 4, **link | {"link_mbit_per_s": 100.0}), devices, None)
    assert (slower.measured, slower.exposed < 1) == ((), True)
    # zero1 broadcasts too, which the table lacks: it is assumed, and the rest measured.
    both = times_of(nano_cell("zero1", 4, **link), devices, None)
    assert (both.measured, both.exposed > 2) == ((), True)


@pytest.mark.parametrize(("momentum", "moved"), [(0.0, 3), (0.9, 5)])
def test_sgd_moves_what_it_keeps(momentum, moved) -> None:
    """Parameters are read and written, gradients read, a momentum read and written."""
    parts = parts_of("gpt-nano")
    cell = nano_cell("ddp", 2, optimizer=f"sgd:momentum={momentum}")
    times = predicted_times(cell, parts, [], Surroundings.of(cell, HOST, None))
    assert times.update == pytest.approx(moved * 4 * parts.values / 10e9)


def test_a_plan_predicts_the_memory_of_the_cells_that_a_closed_form_covers() -> None:
    """gpt-nano under AdamW: alone P + 2 P and activations; data parallel P of buckets more."""
    alone, dense = nano_cell("single", 1), nano_cell("ddp", 2)
    compressed = nano_cell("ddp", 2, compression="bf16")
    by_us = nano_cell("ddp", 2, collective="ring")
    found = predicted_bytes([alone, dense, compressed, by_us], None)
    parts = parts_of("gpt-nano")
    assert found.keys() == {alone.id, dense.id}
    assert found[dense.id] - found[alone.id] == VALUE_BYTES * parts.values
    own = nano_cell("ddp", 2, workload="py:mine:build")
    assert predicted_bytes([own], None) == {}
    assert unpredicted([alone, own]) == {"py:mine:build": "planning does not run a user's own code"}
