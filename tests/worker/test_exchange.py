"""The group that gradients go over: what it counts, and that switching it off can be undone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
import torch.distributed as dist
from rank_builders import CPU, a_stopwatch, batches, network
from torch import Tensor
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from harness.worker.exchange.stand_ins import StandIns
from harness.worker.rank.control import Control, hash_number, parameters_hash
from results.cell import StepPolicy
from results.record import StepColumns
from strategies import Trainer, TrainSettings
from strategies.collectives.link import Link
from strategies.devices import Host
from strategies.snapshot import Snapshot
from workloads.build import build_workload

# Linear(8, 48): 8 * 48 + 48 = 432; BatchNorm1d(48): 96; Linear(48, 5): 48 * 5 + 5 = 245 floats.
GRADIENT_BYTES = 4 * (432 + 96 + 245)
# Running mean and variance, 48 floats each, and the number of batches, an int64.
BUFFER_BYTES = 4 * 96 + 8


def trainer_of(exchange: ExchangeGroup, rank: int, **settings: Any) -> Trainer:
    """A trainer, each replica's dropout with a different seed."""
    chosen = TrainSettings(**{"strategy": "ddp", "optimizer": "sgd:lr=0.05", **settings})
    trainer = Trainer(network(dropout=0.3), F.cross_entropy, device=CPU, settings=chosen, group=exchange)
    torch.manual_seed(100 + rank)
    return trainer


def count(rank: int, settings: dict[str, Any], enabled: bool) -> tuple[list[int], list[int]]:
    """On a rank: the bytes and operations of each of three steps, after two."""
    exchange = open_exchange()
    trainer, data = trainer_of(exchange, rank, **settings), batches(rank)
    for _ in range(2):
        trainer.step(data)
    sizes, operations = [], []
    for _ in range(3):
        exchange.reset()
        exchange.traffic.enabled = enabled
        trainer.step(data)
        sizes.append(exchange.traffic.payload_bytes)
        operations.append(exchange.traffic.operations)
    return sizes, operations


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("settings", "payload", "operations"),
    [
        # One bucket of gradients; of the buffers, one message for the floats and one for the integer.
        ({}, GRADIENT_BYTES + BUFFER_BYTES, 3),
        # However many micro-batches: gradients once, at the end, and buffers once, at the start.
        ({"accumulation": 3}, GRADIENT_BYTES + BUFFER_BYTES, 3),
        ({"strategy": "ddp:bucket_view=true"}, GRADIENT_BYTES + BUFFER_BYTES, 3),
        # Who used which of the 6 parameters, an int32 each.
        ({"strategy": "ddp:find_unused=true"}, GRADIENT_BYTES + BUFFER_BYTES + 6 * 4, 4),
        # A bucket is closed once it holds 1048 bytes, from the last layer on: the 980 of Linear(48, 5) and
        # half of BatchNorm's 384; then the other half and the 1728 of the first layer.
        ({"strategy": "ddp:bucket_mb=0.001"}, GRADIENT_BYTES + BUFFER_BYTES, 2 + 2),
    ],
)
def test_payload_is_gradients_and_buffers_in_every_step(ranks, size, settings, payload, operations) -> None:
    for found in ranks(size, count, settings, True):
        assert found == ([payload] * 3, [operations] * 3)


def test_nothing_is_counted_while_it_is_off(ranks) -> None:
    assert ranks(2, count, {}, False) == [([0] * 3, [0] * 3)] * 2


def reset(rank: int) -> tuple[bool, int, int]:
    exchange = open_exchange()
    exchange.traffic.enabled = False
    trainer_of(exchange, rank, strategy="single")
    exchange.traffic.payload_bytes = exchange.traffic.operations = 7
    exchange.reset()
    return exchange.traffic.enabled, exchange.traffic.payload_bytes, exchange.traffic.operations


def test_a_reset_exchange_is_as_new(ranks) -> None:
    assert ranks(1, reset) == [(True, 0, 0)]


def threads_of_a_part(rank: int) -> tuple[bool, bool]:
    exchange, process = open_exchange(), psutil.Process()
    before = process.num_threads()
    # Held to the end, as DTensor's caches hold the groups of a cell's mesh.
    part = exchange.split_into([[0], [1]])
    added = process.num_threads() > before
    exchange.reset()
    ended = process.num_threads() == before
    del part
    return added, ended


def test_a_reset_exchange_ends_the_threads_of_parts_that_are_still_referred_to(ranks) -> None:
    assert ranks(2, threads_of_a_part) == [(True, True)] * 2


def diverge_and_return(rank: int, settings: dict[str, Any]) -> dict[str, bool]:
    """On a rank: whether all ranks agree before, after two steps without exchange, and after going back."""
    exchange, control = open_exchange(), Control(CPU)
    trainer, data = trainer_of(exchange, rank, **settings), batches(rank)
    for _ in range(2):
        trainer.step(data)
    found = {"before": control.agree(hash_number(trainer.model.named_parameters()))}
    snapshot = Snapshot(trainer)
    exchange.traffic.enabled = False
    for _ in range(2):
        trainer.step(data)
    found["off"] = control.agree(hash_number(trainer.model.named_parameters()))
    exchange.traffic.enabled = True
    snapshot.restore()
    found["restored"] = control.agree(hash_number(trainer.model.named_parameters()))
    trainer.step(data)
    found["after"] = control.agree(hash_number(trainer.model.named_parameters()))
    return found


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw"}, {"strategy": "ddp:bucket_view=true"}])
def test_without_exchange_ranks_diverge_and_a_restored_snapshot_makes_them_equal_again(
    ranks, settings
) -> None:
    expected = {"before": True, "off": False, "restored": True, "after": True}
    assert ranks(2, diverge_and_return, settings) == [expected] * 2


def end_state(trainer: Trainer, data: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """All that training depends on, as a hash and bytes."""
    return {
        "parameters": parameters_hash(trainer),
        "buffers": [buffer.tolist() for buffer in trainer.model.bare.buffers()],
        "optimizer": [
            {name: value.tolist() for name, value in state.items() if isinstance(value, Tensor)}
            for state in trainer.optimizer.state_dict()["state"].values()
        ],
        "random": torch.get_rng_state().numpy().tobytes(),
        "next batch": next(data)[0].tolist(),
    }


def quads_or_none(rank: int, settings: dict[str, Any], folder: str, disturbed: bool) -> dict[str, Any]:
    """On a rank: two quads of two steps, or only the steps of their on blocks; then one step more."""
    exchange = open_exchange()
    trainer, data = trainer_of(exchange, rank, **settings), batches(rank)
    trainer.step(data)
    policy = StepPolicy(block_steps=2, quads=2)
    if disturbed:
        quads = a_stopwatch(trainer, data).measure_exposed(exchange, policy)
        assert len(quads.off_second_ns) == policy.quads
    else:
        for _ in range(2 * policy.quads * policy.block_steps):
            trainer.step(data)
    loss = trainer.step(data).item()
    return {"loss": loss, **end_state(trainer, data)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "adamw", "accumulation": 2},
        {"strategy": "ddp:bucket_view=true", "precision": "fp16"},
    ],
)
def test_after_whole_quads_training_stands_where_an_undisturbed_run_does_bit_for_bit(
    ranks, settings, tmp_path
) -> None:
    measured = ranks(2, quads_or_none, settings, str(tmp_path), True)
    plain = ranks(2, quads_or_none, settings, str(tmp_path), False)
    assert measured == plain
    assert measured[0]["parameters"] == measured[1]["parameters"]


def received_while_off(rank: int) -> list[list[float]]:
    """On a rank: what a pipeline receives without exchange into new memory, after a period of two messages;
    and what it receives when these are forgotten."""
    exchange = open_exchange()
    part, other = exchange.split_into([[0, 1]], duplex=True), 1 - rank
    stand_ins = exchange.traffic.stand_ins
    stand_ins.keep_messages()
    # A stage has a buffer for each microbatch.
    buffers = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    for number, buffer in enumerate(buffers):
        sent = part.send([torch.full((2,), 10.0 * rank + number)], other, 0)
        part.recv([buffer], other, 0).wait()
        sent.wait()
    exchange.traffic.enabled = False
    found = []
    for forgets in (False, False, False, True):
        if forgets:
            stand_ins.forget()
        received = torch.full((2,), torch.nan, requires_grad=True)
        part.recv([received], other, 0)
        found.append(received.tolist())
    exchange.reset()
    return found


def test_a_stage_receives_its_last_messages_while_the_exchange_is_off(ranks) -> None:
    first, second = ranks(2, received_while_off)
    assert first == [[10.0, 10.0], [11.0, 11.0], [10.0, 10.0], [0.0, 0.0]]
    assert second == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def rows_counted_while_off(rank: int) -> list[list[int]]:
    """On a rank: the numbers of rows that it receives without exchange, after a period of two layers."""
    exchange = open_exchange()
    exchange.traffic.stand_ins.keep_messages()
    link, own = Link(exchange), 10 * rank
    for counts in ([own, own + 1], [own + 2, own + 3]):
        link.all_to_all(torch.tensor(counts).view(2, 1))
    exchange.traffic.enabled = False
    return [link.all_to_all(torch.tensor([[7], [8]])).flatten().tolist() for _ in range(3)]


def test_ranks_get_as_many_rows_as_before_while_the_exchange_is_off(ranks) -> None:
    first, second = ranks(2, rows_counted_while_off)
    assert first == [[0, 10], [2, 12], [0, 10]]
    assert second == [[1, 11], [3, 13], [1, 11]]


def test_messages_beyond_the_room_for_them_are_not_kept() -> None:
    stand_ins = StandIns()
    stand_ins.keep_messages(12.0)
    # 8 bytes each: the third of the first shape does not fit; the first of another shape is always kept.
    for number in (1.0, 2.0, 3.0):
        stand_ins.received("group", 0, [torch.full((2,), number)])
    stand_ins.received("group", 0, [torch.full((3,), 4.0)])
    places = [torch.full((size,), torch.nan) for size in (2, 2, 2, 3, 3)]
    stand_ins.receive("group", 0, places)
    assert [place.tolist() for place in places] == [[1, 1], [2, 2], [1, 1], [4, 4, 4], [4, 4, 4]]


@pytest.mark.parametrize(("places", "own"), [(6, 2), (5, 2), (3, 5), (0, 2), (3, 0), (0, 0)])
def test_places_of_any_size_and_order_in_memory_are_filled_again_and_again(places, own) -> None:
    # Both are columns, whose values are not next to one another in memory.
    columns, values = torch.full((places, 2), torch.nan), torch.arange(2.0 * own).view(own, 2)
    StandIns().fill(columns[:, 1:], values[:, 1])
    expected = [2.0 * (at % own) + 1 if own else 0.0 for at in range(places)]
    assert columns[:, 1].tolist() == expected
    assert columns[:, 0].isnan().all()
    StandIns().fill(columns.t(), torch.ones(3))
    assert columns.tolist() == [[1.0, 1.0]] * places


def scattered_while_off(rank: int) -> list[list[float]]:
    """On a rank: what it gets of sums without exchange: of no values, and of values in another order."""
    exchange = open_exchange()
    exchange.traffic.enabled = False
    empty, output = torch.empty(0), torch.full((4,), torch.nan)
    exchange._reduce_scatter_base(empty, torch.empty(0))
    exchange._reduce_scatter_base(output, torch.arange(8.0).view(2, 4).t())
    exchange.reset()
    return [empty.tolist(), output.tolist()]


def test_a_sum_without_exchange_leaves_this_ranks_part_also_where_it_is_empty(ranks) -> None:
    assert ranks(2, scattered_while_off) == [[[], [0.0, 4.0, 1.0, 5.0]], [[], [2.0, 6.0, 3.0, 7.0]]]


def wait_alone(rank: int) -> str:
    """On rank 0: what a sum over a group that was split twice says when nobody else comes."""
    part = open_exchange(timedelta(seconds=2)).split_into([[0, 1]]).split_into([[0, 1]])
    said = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), group=part)
        said = str(caught.value)
    dist.barrier()
    return said


def test_groups_that_are_split_wait_as_long_as_the_exchange_was_told(ranks) -> None:
    assert "Timed out waiting 2000ms" in ranks(2, wait_alone)[0]


def is_left_behind(rank: int, folder: str, opening: str) -> bool:
    """On rank 1, which opens its groups last: whether rank 0 continues meanwhile."""
    open_group, left, seen = dist.new_group, Path(folder) / "left", []

    def open_last(*arguments: Any, **options: Any) -> Any:
        group, until = open_group(*arguments, **options), time.monotonic() + 0.5
        while rank == 1 and not left.exists() and time.monotonic() < until:
            time.sleep(0.01)
        seen.append(rank == 1 and left.exists())
        return group

    exchange = open_exchange()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "new_group", open_last)
        if opening == "split":
            exchange.split_into([[0, 1]])
        else:
            open_exchange()
    left.touch()
    return any(seen)


@pytest.mark.parametrize("opening", ["exchange", "split"])
def test_no_rank_goes_on_before_all_have_opened_their_groups(ranks, opening, tmp_path) -> None:
    # One that fails next closes its connections, and one that still connects would report that.
    assert ranks(2, is_left_behind, str(tmp_path), opening) == [False, False]


class DataMover(dist.ProcessGroup):
    """A backend that is not the default group's, as NCCL on CUDA: another Gloo, which keeps its calls."""

    calls: ClassVar[list[str]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.named = ""

    @property
    def group_name(self) -> str:
        self.named = dist.distributed_c10d._world.pg_names.get(self, self.named)
        return self.named

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        self.calls.append("allreduce")
        work: dist.Work = self._inner.allreduce(tensors, options or dist.AllreduceOptions())
        return work

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        self.calls.append("broadcast")
        work: dist.Work = self._inner.broadcast(tensors, options or dist.BroadcastOptions())
        return work


def agree_beside_the_exchange(rank: int) -> dict[str, Any]:
    """On a rank: agreements and sums next to an exchange whose backend is not the default group's."""
    if "data_mover" not in dist.Backend.backend_list:
        dist.Backend.register_backend("data_mover", DataMover, devices=["cpu"])
    exchange = open_exchange(backend="data_mover")
    # A device without memory: an agreement that is laid on the device fails.
    control = Control(torch.device("meta"), exchange.backend)
    DataMover.calls.clear()
    control.barrier()
    found = [control.largest([rank]), control.of_all([rank]), control.from_first(rank + 5), control.agree(1)]
    agreements = list(DataMover.calls)
    values = torch.ones(2)
    dist.all_reduce(values, group=exchange.split_into([[0, 1]]))
    control.all_reduce(values)
    control.broadcast(values)
    counted = exchange.traffic.operations
    exchange.reset()
    calls = list(DataMover.calls)
    return {
        "found": found,
        "agreements": agreements,
        "calls": calls,
        "counted": counted,
        "sum": values.tolist(),
    }


def test_agreements_go_over_the_default_group_and_data_over_the_backend_of_the_exchange(ranks) -> None:
    for said in ranks(2, agree_beside_the_exchange):
        assert said["found"] == [[1.0], [[0.0], [1.0]], 5.0, True]
        assert said["agreements"] == []
        # Of the exchange, in a group that was split, which it counts; then of the checks.
        assert said["calls"] == ["allreduce", "allreduce", "broadcast"]
        assert said["counted"] == 1
        assert said["sum"] == [4.0, 4.0]


def off_gradient(rank: int) -> list[tuple[list[float], bool]]:
    """On a rank: a gradient of rank + 1 after an all-reduce of two, the exchange on and off."""
    exchange = open_exchange()
    found = []
    for enabled in (True, False):
        exchange.traffic.enabled = enabled
        buffer = torch.tensor([rank + 1.0])
        work = dist.all_reduce(buffer, group=exchange, async_op=True)
        work.wait()
        found.append((buffer.tolist(), work.is_completed()))
    return found


def filled_while_off(rank: int) -> list[list[float]]:
    """On a rank: the places that an exchange that is off fills, time after time, and what others left there
    meanwhile."""
    exchange = open_exchange()
    exchange.traffic.enabled = False
    gathered, counts = torch.empty(4), torch.empty(2, dtype=torch.int64)
    found = []
    for values in ([1.0, 2.0], [3.0, 4.0]):
        gathered.fill_(torch.nan)
        dist.all_gather_into_tensor(gathered, torch.tensor(values), group=exchange)
        dist.all_gather_into_tensor(counts, torch.tensor([int(values[0])]), group=exchange)
        found += [gathered.tolist(), counts.tolist()]
    # The own part in its place already, as torch's FSDP gathers.
    own = gathered.view(2, 2)[rank].fill_(7.0)
    dist.all_gather_into_tensor(gathered, own, group=exchange)
    own_part, received = torch.full((1,), torch.nan), torch.full((3,), torch.nan)
    dist.reduce_scatter_tensor(own_part, torch.tensor([5.0, 6.0]), group=exchange)
    # Experts send more to a rank than they get from it.
    dist.all_to_all_single(received, torch.tensor([8.0, 9.0]), [1, 2], [1, 1], group=exchange)
    return [*found, gathered.tolist(), own_part.tolist(), received.tolist()]


def test_every_place_is_filled_with_own_values_while_the_exchange_is_off(ranks) -> None:
    alike = [[1.0, 2.0, 1.0, 2.0], [1, 1], [3.0, 4.0, 3.0, 4.0], [3, 3], [7.0] * 4]
    for rank, found in enumerate(ranks(2, filled_while_off)):
        assert found == [*alike, [5.0 + rank], [8.0, 9.0, 8.0]]


class Queued(Host):
    """The CPU with what is measured otherwise on a device that queues its work."""

    asynchronous = True


def off_losses(rank: int, strategy: str) -> tuple[list[float | None], int]:
    """On a rank: the losses of steps without exchange as a GPU takes them, and the copies that were timed."""
    torch.manual_seed(0)
    exchange, workload = open_exchange(), build_workload("gpt-nano")
    generator = torch.Generator().manual_seed(rank)
    assert workload.synthetic is not None
    assert workload.loss is not None
    data = (workload.synthetic(generator, 1) for _ in itertools.count())
    settings = TrainSettings(strategy=strategy, optimizer="adamw:lr=0.001")
    trainer = Trainer(
        workload.module, workload.loss, device=CPU, settings=settings, layout=workload.layout, group=exchange
    )
    trainer.step(data)
    watch, losses = a_stopwatch(trainer, data), list[float | None]()
    watch._device, drain = Queued(CPU), watch._clock.drain

    def kept() -> StepColumns:
        columns = drain()
        losses.extend(() if exchange.traffic.enabled else columns.loss)
        return columns

    watch._clock.drain = kept
    quads = watch.measure_exposed(exchange, StepPolicy(block_steps=8, quads=1))
    exchange.reset()
    return losses, min(quads.copies_ns)


@pytest.mark.parametrize("strategy", ["fsdp", "scratch-fsdp"])
def test_a_sharded_model_computes_with_its_own_shards_while_the_exchange_is_off(ranks, strategy) -> None:
    for losses, copies_ns in ranks(2, off_losses, strategy):
        assert len(losses) == 16
        # Of 256 characters a model that has learnt nothing is log 256 = 5.5 uncertain.
        assert all(loss is not None and 5 < loss < 6 for loss in losses)
        assert copies_ns > 0


def test_an_exchange_that_is_off_leaves_the_buffer_and_is_done_at_once(ranks) -> None:
    # On: 1 + 2 on both. Off: each keeps its own.
    assert ranks(2, off_gradient) == [
        [([3.0], True), ([1.0], True)],
        [([3.0], True), ([2.0], True)],
    ]
