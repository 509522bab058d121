"""Cells of GPUs on a simulated device with streams, over a group that answers as NCCL does."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import streams
import torch
import torch.distributed as dist
from planting import wrapped
from rank_builders import a_context

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from harness.worker.exchange.recorder import Recorder
from harness.worker.exchange.staged import StagedGroup
from harness.worker.measure.blocks import Stopwatch
from harness.worker.measure.uncounted import UncountedTraffic
from harness.worker.rank.context import Run
from harness.worker.rank.control import Control
from harness.worker.rank.process import tear_down
from harness.worker.run import measure_cell
from results.cell import Cell, StepPolicy
from results.launch import Slot
from results.outcome import Evidence
from results.record import StepColumns
from strategies import Trainer, TrainSettings
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES, group_layout
from strategies.collectives.link import Link
from strategies.ddp.hook import Hook
from strategies.exchange.lane import open_lane
from strategies.refusal import refusal
from strategies.scratch_fsdp.flat import start_reduce_scatter
from strategies.scratch_fsdp.host_shards import HostShards
from strategies.training.observer import Phase

Fields = dict[str, Any]
DEVICE = torch.device("cpu", 0)
"""`streams` says why."""
POLICY = StepPolicy(block_steps=1, warmup_max_steps=2, min_blocks=1, max_blocks=1, quads=1)


def run_cells(rank: int, folder: str, cells: list[Fields], staged: bool = False) -> list[Fields]:
    """On a rank: the records of whole runs of cells, one after another in one worker."""
    found = []
    with ExitStack() as stack:
        exchange = open_staged() if staged else streams.open_nccl_like()
        simulation = stack.enter_context(streams.simulated_device())
        stack.enter_context(watched())
        stack.enter_context(filled_places())
        # Some steps in which every operation is recorded show what twenty do.
        stack.enter_context(patch("harness.worker.exchange.recorder.RECORDED_STEPS", 2))
        # A block of one step warms up and shows the step time, by which blocks then have one step.
        stack.enter_context(patch("results.cell.GPU_LONGEST_WARM_UP_S", 1e-9))
        stack.enter_context(patch("results.cell.GPU_BLOCK_S", 1e-9))
        control = Control(DEVICE, exchange.backend)
        for number, fields in enumerate(cells):
            began = time.perf_counter()
            record = _run_cell(rank, Path(folder) / f"{number}", fields, exchange, control)
            tear_down(DEVICE)
            found.append(
                {name: getattr(record, name) for name in record.__struct_fields__}
                | {"seconds": time.perf_counter() - began}
            )
            simulation.transfers.clear()
            if record.outcome != "ok":
                # As a worker does: other ranks may wait in a collective.
                return found
        exchange.reset()
        # Those that cells split off have been destroyed.
        assert set(streams.NcclLike.open) == (set() if staged else {exchange.backend})
    return found


@contextmanager
def filled_places() -> Iterator[None]:
    """Require that an exchange that is off fills each place with values of this rank or of a message."""
    issue, receive = ExchangeGroup._run, ExchangeGroup.recv

    def run(group: Any, name: str, sent: Any, result: Any, *given: Any) -> Any:
        if not group.traffic.enabled and "gather" in name:
            places = result[0] if name == "allgather" else result[0].view(group.size(), -1)
            with torch._C._DisableTorchDispatch():
                assert all(torch.equal(place.view(-1), sent[0].view(-1)) for place in places)
        return issue(group, name, sent, result, *given)

    def recv(group: Any, tensors: list[torch.Tensor], *given: int) -> Any:
        work = receive(group, tensors, *given)
        if not group.traffic.enabled:
            with torch._C._DisableTorchDispatch():
                assert all(tensor.isfinite().all() and tensor.any() for tensor in tensors)
        return work

    with patch.object(ExchangeGroup, "_run", run), patch.object(ExchangeGroup, "recv", recv):
        yield


def cell_of(size: int, fields: Fields) -> Cell:
    base = {"dataset": "synthetic", "gpus": size, "device": "cuda", "backend": "nccl", "steps": POLICY}
    groups = group_layout(fields["strategy"], size, fields.get("node_size"))
    return Cell(model_parallel=groups.model_parallel, **base | fields)


def _run_cell(rank: int, folder: Path, fields: Fields, exchange: Any, control: Control) -> Any:
    size = dist.get_world_size()
    cell = cell_of(size, fields)
    launch = {"evidence": Evidence.EMULATED, "source_folder": str(Path(__file__).parent)}
    given = {"evidence": Evidence.EMULATED, "device": DEVICE, "exchange": exchange, "control": control}
    with a_context(rank, folder, launch, **given) as around:
        slot = Slot(cell_id=cell.id, run_id="r", repeat=1)
        with redirect_stderr(io.StringIO()) as errors:
            record = Run(around, slot, cell).execute(measure_cell)
        if record.reason is not None:
            print(errors.getvalue()[-3000:], file=sys.stderr)
        return record


MLP: Fields = {"workload": "mlp", "micro_batch": 4, "optimizer": "sgd:lr=0.05"}
PLAIN = MLP | {"optimizer": "sgd:lr=0.05:momentum=0"}
GPT: Fields = {"workload": "py:proof_models:gpt", "micro_batch": 2, "optimizer": "adamw:lr=0.001"}
CELLS: list[Fields] = [
    MLP | {"strategy": "ddp:bucket_mb=0.05"},
    MLP | {"strategy": "scratch-ddp:bucket_mb=0.05:first_bucket_mb=0.01", "accumulation": 2},
    GPT | {"strategy": "fsdp:prefetch=1", "accumulation": 2},
    GPT | {"strategy": "scratch-fsdp:stage=3", "clip_norm": 0.1},
    GPT | {"strategy": "scratch-fsdp:offload=cpu"},
    GPT | {"strategy": "tp", "precision": "fp16"},
    GPT | {"strategy": "pipeline:1f1b:microbatches=4", "micro_batch": 4},
    MLP | {"strategy": "scratch-ddp", "collective": "hierarchical", "node_size": 1},
    MLP | {"strategy": "ddp", "compression": "topk:0.1"},
    MLP | {"strategy": "ddp", "compression": "torch-powersgd:2"},
    PLAIN | {"strategy": "scratch-ddp:bucket_mb=0.05", "compression": "powersgd:2"},
    PLAIN | {"strategy": "scratch-ddp:bucket_mb=0.05", "compression": "int8"},
]
FURTHER: list[Fields] = [
    MLP | {"strategy": "local-sgd:2"},
    MLP | {"strategy": "zero1", "optimizer": "adamw:lr=0.001"},
    # Another name of fsdp.
    GPT | {"strategy": "zero3", "precision": "fp16"},
    GPT | {"strategy": "hsdp"},
    GPT | {"strategy": "scratch-fsdp:stage=2", "accumulation": 2},
    GPT | {"strategy": "zero2"},
    GPT | {"strategy": "manual:reshard.checkpoint*2+keep"},
    GPT | {"strategy": "scratch-fsdp:stage=1", "clip_norm": 0.1},
    GPT | {"strategy": "pipeline:gpipe:microbatches=2"},
    GPT | {"workload": "gpt-nano", "strategy": "pipeline:interleaved:microbatches=4", "micro_batch": 4},
    MLP | {"strategy": "ddp", "collective": "hierarchical"},
    MLP | {"strategy": "ddp", "compression": "powersgd:2"},
    MLP | {"strategy": "local-sgd:2", "compression": "topk:0.1"},
    *(
        PLAIN | {"strategy": "scratch-ddp:bucket_mb=0.05", "compression": each}
        for each in ("topk:0.1", "fp16", "bf16", "randomk:0.1", "signsgd", "dgc:0.1")
    ),
]
"""Cells of the long test: other names, schedules and compressors over the same calls."""


def test_all_that_is_offered_on_gpus_has_a_cell() -> None:
    catalogs = {"strategy": STRATEGIES, "compression": COMPRESSIONS, "collective": COLLECTIVES}
    for field, catalog in catalogs.items():
        used = {fields[field].partition(":")[0] for fields in CELLS + FURTHER if field in fields}
        kinds = [kind for kind in catalog.all_facts if getattr(kind, "on_cuda", None) is None]
        # An engine has a notion of the device of its own.
        kinds = [kind for kind in kinds if getattr(kind, "engine", None) is None]
        offered = {entry.name for kind in kinds for entry in kind.entries()}
        assert offered - used <= {"single", "auto", "none", "default"}
    for fields in CELLS + FURTHER:
        cell = cell_of(2, fields)
        assert refusal(cell) is None, fields


@pytest.mark.slow
@pytest.mark.parametrize("cells", [CELLS, pytest.param(CELLS + FURTHER, marks=pytest.mark.long)])
def test_every_cell_of_gpus_is_proven_in_the_order_of_streams(ranks, tmp_path, cells) -> None:
    """With recorder and quads, and in one start of workers: what one cell leaves behind meets the next."""
    results = ranks(2, run_cells, str(tmp_path), cells)
    for rank, records in enumerate(results):
        for fields, record in zip(cells, records, strict=False):
            assert (record["outcome"], record["reason"]) == ("ok", None), (rank, fields)
            assert record["clock"] == "cuda-event"
            assert record["environment"].process_group == "NcclLike"
            # All losses without exchange are finite, and all updates were made.
            assert record["quads"] is not None, (fields, record["absent"])
            recorded = record["recorded"]
            assert recorded.operations.step
            assert recorded.blocked_ns is None
            assert min(recorded.operations.duration_ns) >= 0
            assert rank or record["proof"].method == "serial-simulation"
        assert len(records) == len(cells)


def _tuned_in(rank: int, folder: str) -> set[tuple[str, bool, bool]]:
    """On a rank: for each part of a run, whether cuDNN times its algorithms in its steps, and whether it only
    takes deterministic ones."""
    parts, seen = [""], set()

    def begin(original: Any, self: Run, part: str) -> None:
        parts.append(part)
        original(self, part)

    def compute(original: Any, self: Trainer, *given: Any) -> Any:
        cudnn = torch.backends.cudnn
        seen.add((parts[-1], cudnn.benchmark, cudnn.deterministic))
        return original(self, *given)

    with wrapped(Run, "begin", begin), wrapped(Trainer, "compute_gradients", compute):
        [record] = run_cells(rank, folder, [MLP | {"strategy": "ddp"}])
    assert record["first_steps"] == 3 + 1
    assert record["proof"] is None or record["proof"].passed
    return seen


def test_kernels_are_tuned_for_what_is_timed_and_not_for_the_proof(ranks, tmp_path) -> None:
    timed = {(part, True, False) for part in ("warm-up", "measure", "exposed", "recording")}
    proven = {(part, False, True) for part in ("proof", "late proof")}
    assert ranks(2, _tuned_in, str(tmp_path)) == [timed | proven] * 2


@pytest.mark.slow
def test_ranks_that_share_a_device_run_proven_cells_over_gloo(ranks, tmp_path) -> None:
    cells = [
        MLP | {"strategy": "ddp:bucket_mb=0.05", "backend": "gloo"},
        GPT | {"strategy": "scratch-fsdp:stage=3", "backend": "gloo"},
        GPT | {"strategy": "fsdp", "backend": "gloo"},
        GPT | {"strategy": "pipeline:1f1b:microbatches=4", "micro_batch": 4, "backend": "gloo"},
    ]
    for records in ranks(2, run_cells, str(tmp_path), cells, True):
        assert [(record["outcome"], record["reason"]) for record in records] == [("ok", None)] * len(cells)
        assert all(record["recorded"].operations.step for record in records)


def begun(rank: int) -> tuple[int, int]:
    """On a rank: when a step begins on its device, and when its host left the barrier; rank 1 is late."""
    exchange, began, left = streams.open_nccl_like(), [], []

    def late_barrier() -> None:
        dist.barrier()
        time.sleep(0.1 * rank)
        left.append(time.perf_counter_ns())

    def step(batches: Any) -> None:
        began.append(streams.SimulatedDevice(DEVICE).moment())

    with streams.simulated_device():
        control: Any = Control(DEVICE, exchange.backend)
        idle: Any = SimpleNamespace(step=step, model=SimpleNamespace(period=1), drain=StepColumns)
        watch = Stopwatch(idle, iter(()), clock=idle, control=control, log=Mock())
        with patch.object(control, "barrier", late_barrier):
            watch.measure(StepPolicy(block_steps=1, min_blocks=1, max_blocks=1))
        return began[0].at_ns, left[0]


def test_a_block_begins_when_the_devices_have_met_not_their_hosts(ranks) -> None:
    # The clock of one machine.
    (first_ns, _), (_, late_ns) = ranks(2, begun)
    assert first_ns >= late_ns


def test_a_lane_waits_for_what_it_is_given_and_who_takes_it_waits_for_the_lane() -> None:
    with streams.simulated_device():
        lane, values = open_lane(DEVICE), torch.ones(4, device=DEVICE)

        def double() -> None:
            values.mul_(2)

        pending = lane.run(double)
        with pytest.raises(
            streams.UnorderedError, match=r"aten\.add_.* before aten\.mul_.* on a lane is done"
        ):
            values.add_(1)
        pending.wait()
        assert values.tolist() == [2, 2, 2, 2]


def test_a_gradient_is_copied_to_the_host_beside_what_is_computed() -> None:
    with streams.simulated_device():
        host, gradient = HostShards(DEVICE), torch.ones(4, device=DEVICE)
        copy = host.take(gradient)
        for touched in (copy, gradient):
            with pytest.raises(streams.UnorderedError, match=r"before aten\.copy_.* on a lane is done"):
                touched.add_(1)
        host.settle()
        assert copy.add_(1).tolist() == [2, 2, 2, 2]


def test_a_shard_is_copied_to_the_device_beside_what_is_computed() -> None:
    with streams.simulated_device():
        host, shard = HostShards(DEVICE), torch.ones(4)
        whole = torch.zeros(8, device=DEVICE)

        def switched_off(own: torch.Tensor) -> Any:
            whole[:4].copy_(own)
            return SimpleNamespace(wait=lambda: True)

        pending = host.hand_over(shard, whole, switched_off)
        for touched in (whole, shard):
            with pytest.raises(streams.UnorderedError, match=r"before aten\.copy_.* on a lane is done"):
                touched.add_(1)
        pending.wait()
        assert whole.add_(1).tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
        # The host writes to it in the update, after all copies.
        host.settle()
        assert shard.add_(1).tolist() == [2, 2, 2, 2]


def test_memory_of_a_lane_is_ordered_with_both_streams() -> None:
    with streams.simulated_device():
        lane, values = open_lane(DEVICE), torch.ones(4, device=DEVICE)
        with lane.memory():
            values.mul_(3)
        assert values.tolist() == [3, 3, 3, 3]


def test_who_waits_for_the_future_of_a_hook_has_its_stream_wait_for_the_lane() -> None:
    with streams.simulated_device():
        values = torch.ones(4, device=DEVICE)
        bucket: Any = SimpleNamespace(buffer=lambda: values)
        doubled: Any = SimpleNamespace(average=lambda bucket: bucket.buffer().mul_(2))
        link: Any = SimpleNamespace(announce_bucket=lambda: None)
        Hook(doubled, link, DEVICE).run(bucket).wait()
        assert values.tolist() == [2, 2, 2, 2]


def open_staged() -> Any:
    return open_exchange(staged_for=streams.SimulatedDevice(DEVICE))


@contextmanager
def watched() -> Iterator[None]:
    """Watch what the threads of a staged group touch, too."""
    land = StagedGroup._land

    def told(group: StagedGroup, *arguments: Any) -> None:
        with streams.Watch():
            land(group, *arguments)

    with patch.object(StagedGroup, "_land", told):
        yield


def link_calls(rank: int, staged: bool = False) -> list[list[float]]:
    """On a rank: the result of every call of a link, touched as its caller may touch it."""
    found = []
    exchange = open_staged() if staged else streams.open_nccl_like()
    with streams.simulated_device(), watched():
        link = Link(exchange)

        def own() -> torch.Tensor:
            return torch.arange(4.0, device=DEVICE) + 10 * rank

        for call in (
            lambda values: link.all_reduce(values),
            lambda values: link.largest(values),
            lambda values: link.broadcast(values, 1),
        ):
            values = own()
            call(values)
            found.append(values.tolist())
        found.append(link.all_gather(own()).flatten().tolist())
        found.append(link.all_to_all(own().view(2, 2)).flatten().tolist())
        found.append(link.reduce_scatter(own().view(2, 2)).tolist())
        found.append(start_reduce_scatter(link, own()).wait().tolist())
        values = own()
        if rank == 0:
            link.send(values, 1).wait()
        else:
            link.receive(values, 0).wait()
        found.append(values.tolist())
        exchange.reset()
    return found


@pytest.mark.parametrize("staged", [False, True])
def test_every_call_of_a_link_is_waited_for(ranks, staged) -> None:
    first, second = ranks(2, link_calls, staged)
    total = [10.0, 12.0, 14.0, 16.0]
    assert first[:4] == [total, [10, 11, 12, 13], [10, 11, 12, 13], [0, 1, 2, 3, 10, 11, 12, 13]]
    assert second[:4] == first[:4]
    assert (first[4], second[4]) == ([0, 1, 10, 11], [2, 3, 12, 13])
    assert (first[5], second[5]) == (total[:2], total[2:])
    assert (first[6], second[6]) == (total[:2], total[2:])
    assert first[7] == second[7] == [0, 1, 2, 3]


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Have hosts wait for what is queued on the device until the event is set."""
    go, synchronize = threading.Event(), streams.Event.synchronize

    def held(event: Any) -> None:
        assert go.wait(60)
        synchronize(event)

    with patch.object(streams.Event, "synchronize", held):
        yield go


def staged_sums(rank: int) -> list[Any]:
    """On a rank: a sum that is held up on the device, an average, and values of a rank that is not there."""
    exchange = open_staged()
    found: list[Any] = []
    with streams.simulated_device(), watched():
        values = torch.arange(3.0, device=DEVICE) + rank
        with held_up() as go:
            work = exchange.allreduce([values])
            future = work.get_future()
            # The device has not come to what is to be sent.
            found.append(future.done())
            go.set()
            work.wait()
        found.append(values.tolist())
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        exchange.allreduce([values.mul_(rank + 1)], options).wait()
        found.append(values.tolist())
        nobody = dist.BroadcastOptions()
        nobody.rootRank = 7
        try:
            exchange.broadcast([values], nobody).wait()
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_what_is_staged_is_sent_when_the_device_has_come_there(ranks) -> None:
    for early, total, average, error in ranks(2, staged_sums):
        assert early is False
        assert total == [1, 3, 5]
        # Once and twice the sum, over two.
        assert average == [1.5, 4.5, 7.5]
        assert "invalid root" in error


def found_over_nccl(rank: int) -> list[str | None]:
    """On a rank: what is found in right steps, and in steps with a sum directly over the backend."""
    exchange, found = streams.open_nccl_like(), []
    with streams.simulated_device():
        link, values = Link(exchange), torch.ones(4, device=DEVICE)
        for direct in (False, True):
            uncounted = UncountedTraffic(exchange, period=1)
            for _ in range(2):
                with uncounted.counting(1):
                    (link.send(values, 1) if rank == 0 else link.receive(values, 0)).wait()
                    exchange.allreduce([values]).wait()
                    if direct:
                        exchange.backend.allreduce([values]).wait()
            found.append(uncounted.found("mine"))
    return found


def test_only_collectives_are_subtracted_from_what_nccl_numbers(ranks) -> None:
    for right, wrong in ranks(2, found_over_nccl):
        assert right is None
        assert wrong.startswith("the timed steps of mine sent 1 operations a step over process group ")


def found_of_late_sums(rank: int) -> str | None:
    """On a rank: what is found if the device is ready for the sums of a block only in the next one."""
    exchange = open_staged()
    with streams.simulated_device(), watched(), held_up() as go:
        uncounted, values = UncountedTraffic(exchange, period=1), torch.ones(4, device=DEVICE)
        with uncounted.counting(1):
            works = [exchange.allreduce([values.clone()]) for _ in range(3)]
        with uncounted.counting(1):
            go.set()
            for work in works:
                work.wait()
    return uncounted.found("mine")


def test_a_sum_that_is_numbered_a_block_later_is_not_found(ranks) -> None:
    assert ranks(2, found_of_late_sums) == [None, None]


def refused(rank: int) -> list[str]:
    """On a rank: what the group says to calls that NCCL does not take, and to touches before a wait."""
    said = []
    exchange = streams.open_nccl_like()
    with streams.simulated_device() as simulation:
        group = exchange.backend

        def ask(call: Callable[[], object]) -> None:
            try:
                said.append(str(call()))
            except AssertionError as error:
                said.append(str(error))

        ask(lambda: group.allreduce([torch.ones(3)]))
        ask(lambda: group.allreduce([torch.ones(3, dtype=torch.int16, device=DEVICE)]))
        ask(lambda: group.allreduce([torch.ones(4, 2, device=DEVICE).t()]))
        values = torch.ones(3, device=DEVICE)
        work = group.allreduce([values])
        ask(work.is_completed)
        ask(values.tolist)
        ask(lambda: values.zero_())
        ask(group.shutdown)
        work.wait()
        ask(values.tolist)
        options = dist.AllreduceOptions()
        options.asyncOp = False
        ask(lambda: group.allreduce([values], options))
        ask(values.tolist)
        # Who reads has waited, and who writes to what is still read has not.
        sent = torch.ones(3, device=DEVICE)
        gathered = torch.empty(6, device=DEVICE)
        work = group._allgather_base(gathered, sent)
        ask(lambda: sent.sum().tolist())
        ask(lambda: sent.zero_())
        work.wait()
        ask(gathered.tolist)
        simulation.errors.clear()
    return said


def test_the_group_takes_what_nccl_takes_and_shows_what_came_to_who_waited(ranks) -> None:
    for said in ranks(2, refused):
        expected = [
            "allreduce: (3,) lies in the host's memory",
            "allreduce: NCCL has no torch.int16",
            "allreduce: tensors must be contiguous and dense",
            "is_completed() says of a transfer on a device whether it has begun",
            "tolist on the current stream touches (3,) before allreduce",
            "aten.zero_.default on the current stream touches (3,) before allreduce",
            "the group was destroyed while allreduce was under way",
            "[2.0, 2.0, 2.0]",
            "None",
            "[4.0, 4.0, 4.0]",
            "3.0",
            "aten.zero_.default on the current stream touches (3,) before _allgather_base",
            "[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]",
        ]
        assert len(said) == len(expected)
        for found, begin in zip(said, expected, strict=True):
            assert found.startswith(begin)


def recorded(rank: int) -> tuple[list[int], int]:
    """On a rank: when the recorder says that two sums ended, and when they could begin; in ns of the step."""
    exchange = streams.open_nccl_like()
    with streams.simulated_device() as simulation:
        group, go = exchange.backend, threading.Event()
        gloo, clock = group._gloo, SimpleNamespace(begins=lambda phase: None, step_done=lambda loss: None)

        def held(*arguments: Any) -> Any:
            assert go.wait(60)
            return gloo.allreduce(*arguments)

        group._gloo = SimpleNamespace(allreduce=held)
        recorder = exchange.traffic.recorder = Recorder(clock, DEVICE)
        values = [torch.ones(4, device=DEVICE) for _ in range(2)]
        recorder.begins(Phase.BACKWARD)
        for tensor in values:
            exchange.allreduce([tensor]).wait()
        assert not any(transfer.ended.is_set() for transfer in simulation.transfers)
        began_ns = time.perf_counter_ns() - recorder._start.at_ns
        go.set()
        recorder.step_done(values[0])
        Control(DEVICE).synchronize()
        columns = StepColumns(**{name: [1] for name in StepColumns.__struct_fields__})
        operations = recorder.take(columns).operations
        exchange.traffic.recorder, group._gloo = None, gloo
        assert [tensor.tolist() for tensor in values] == [[2.0] * 4] * 2
    rows = zip(operations.issued_ns, operations.duration_ns, strict=True)
    return [issued_ns + took_ns for issued_ns, took_ns in rows], began_ns


def test_an_operation_ends_when_the_device_has_done_it_not_when_the_wait_returns(ranks) -> None:
    for ended_ns, began_ns in ranks(2, recorded):
        assert len(ended_ns) == 2
        assert min(ended_ns) >= began_ns


def test_the_host_looks_at_a_loss_when_it_has_come() -> None:
    with streams.simulated_device(), patch("strategies.trainer.LOOK_EVERY", 2):
        settings = TrainSettings()
        trainer = Trainer(torch.nn.Linear(1, 1), mean_output, device=DEVICE, settings=settings)
        given = repeat((torch.full((1, 1), torch.nan, device=DEVICE), torch.zeros(1, device=DEVICE)))
        for _ in range(3):
            trainer.step(given)
        with pytest.warns(RuntimeWarning, match="the loss of step 2 is not finite"):
            trainer.step(given)


def mean_output(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()
