"""Every call of a link and of an exchange: `python tests/gpu/calls.py cuda`, over NCCL at one rank.

`cpu` makes the same calls over Gloo on two ranks, as a rank of Gloo cannot send to itself. Ends with exit
code 1, and a line for each wrong result.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from harness.worker.exchange.recorder import Recorder
from harness.worker.measure.clock import StepClock
from harness.worker.rank.control import Control
from strategies.collectives.link import Link
from strategies.devices import device_of
from strategies.scratch_fsdp.flat import start_reduce_scatter
from strategies.training.observer import Phase

Found = Iterator[tuple[str, Tensor, Tensor]]
"""A call, what came of it, and what must."""


def main(kind: str) -> int:
    size = 1 if kind == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (size, kind, folder), nprocs=size)
    return 0


def of_rank(rank: int, size: int, kind: str, folder: str) -> None:
    # From torch 2.13 on some of its functions have other names, too.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    exchange = open_exchange(backend="nccl" if kind == "cuda" else None)
    found = list(calls(exchange, device))
    device_of(device).synchronize()
    wrong = [
        f"{name}: {there.tolist()}, not {right.tolist()}"
        for name, there, right in found
        if there.cpu().tolist() != right.tolist()
    ]
    exchange.reset()
    dist.destroy_process_group()
    if wrong:
        sys.exit("\n".join(wrong))
    if rank == 0:
        over = "NCCL" if kind == "cuda" else "Gloo"
        print(f"  {len(found)} calls of a link and an exchange are right, over {over} at size {size}")


def own(rank: int) -> Tensor:
    """The values that a rank gives to a call: (4,), in host memory."""
    return torch.arange(4.0) + 10 * rank


def calls(exchange: ExchangeGroup, device: torch.device) -> Found:
    """All of them, as in a step, as in a recorded step, in a part of all ranks, and switched off."""
    yield from of_link(Link(exchange), device)
    yield from of_neighbours(exchange, device)
    yield from recorded(exchange, device)
    size = exchange.size()
    part = Link(exchange).split([[rank] for rank in range(size)])
    yield from renamed("in a part", of_link(part, device, first=exchange.rank()))
    yield from of_torch(exchange, device)
    yield from of_control(Control(device, exchange.backend), device)
    beside = Link(exchange).beside()
    values = own(exchange.rank())
    beside.all_reduce(values)
    yield "beside", values, torch.stack([own(rank) for rank in range(size)]).sum(0)
    exchange.traffic.enabled = False
    values = own(exchange.rank()).to(device)
    Link(exchange).all_reduce(values)
    yield "switched off", values, own(exchange.rank())
    exchange.traffic.enabled = True


def renamed(where: str, found: Found) -> Found:
    return ((f"{name} {where}", there, right) for name, there, right in found)


def of_link(link: Link, device: torch.device, first: int = 0) -> Found:
    """`first` is the rank of the launch that is the link's rank 0."""
    size, rank = link.size, link.rank
    every = torch.stack([own(first + each) for each in range(size)])
    mine = every[rank]
    # Row r of what rank s has is for rank r.
    rows = torch.stack([every + 100 * each for each in range(size)])

    def given(values: Tensor = mine) -> Tensor:
        return values.clone().to(device)

    in_place: dict[str, tuple[Callable[[Tensor], object], Tensor]] = {
        "all_reduce": (link.all_reduce, every.sum(0)),
        "start_all_reduce": (lambda values: link.start_all_reduce(values).wait(), every.sum(0)),
        "largest": (link.largest, every.max(0).values),
        "broadcast": (lambda values: link.broadcast(values, size - 1), every[-1]),
    }
    for name, (call, right) in in_place.items():
        values = given()
        call(values)
        yield name, values, right
    values = given()
    link.reduce(values, 0)
    if rank == 0:
        yield "reduce", values, every.sum(0)
    yield "all_gather", link.all_gather(given()), every
    gathered = given(every.new_zeros(every.numel()))
    link.start_all_gather(gathered, given()).wait()
    yield "start_all_gather", gathered, every.flatten()
    yield "all_to_all", link.all_to_all(given(rows[rank])), rows[:, rank]
    received = given(every.new_zeros(every.numel()))
    link.start_all_to_all(received, given(rows[rank]).flatten()).wait()
    yield "start_all_to_all", received, rows[:, rank].flatten()
    yield "reduce_scatter", link.reduce_scatter(given(rows[rank])), rows[:, rank].sum(0)
    summed = given(torch.zeros(4))
    link.start_reduce_scatter(summed, given(rows[rank]).flatten()).wait()
    yield "start_reduce_scatter", summed, rows[:, rank].sum(0)
    scattering = start_reduce_scatter(link, given(rows[rank]).flatten())
    yield "scatter", scattering.wait(), rows[:, rank].sum(0)
    for kind in (torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float64):
        values = given().to(kind)
        link.all_reduce(values)
        yield f"all_reduce of {kind}", values.float(), every.sum(0)


@contextmanager
def coalesced(exchange: ExchangeGroup, device: torch.device) -> Iterator[None]:
    """NCCL takes what a rank sends to itself where a receive is in the same call."""
    backend = exchange.backend
    backend._start_coalescing(device)
    yield
    work = backend._end_coalescing(device)
    if work is not None:
        work.wait()


def of_neighbours(exchange: ExchangeGroup, device: torch.device) -> Found:
    """A send and a receive: of each of two ranks to the other, of one alone to itself."""
    link, other = Link(exchange), exchange.size() - 1 - exchange.rank()
    sent, received = own(link.rank).to(device), torch.zeros(4, device=device)
    with coalesced(exchange, device) if link.size == 1 else nullcontext():
        works = [link.send(sent, other), link.receive(received, other)]
    for work in works:
        if work is not None:
            work.wait()
    yield "send and receive", received, own(other)


def recorded(exchange: ExchangeGroup, device: torch.device) -> Found:
    clock = StepClock(device)
    recorder = Recorder(clock, device)
    recorder.begins(Phase.FORWARD)
    exchange.traffic.recorder = recorder
    found = list(of_link(Link(exchange), device))
    exchange.traffic.recorder = None
    recorder.step_done(torch.zeros((), device=device))
    device_of(device).synchronize()
    operations = recorder.take(clock.drain()).operations
    yield from renamed("in a recorded step", iter(found))
    took = operations.duration_ns
    yield "operations that took less than nothing", torch.tensor([min(took) < 0]), torch.tensor([False])
    yield (
        "operations in a recorded step",
        torch.tensor(len(took)),
        torch.tensor(len(found) + link_only(exchange)),
    )


def link_only(exchange: ExchangeGroup) -> int:
    """A reduce leaves nothing to compare on ranks other than the first."""
    return int(exchange.rank() > 0)


def of_torch(exchange: ExchangeGroup, device: torch.device) -> Found:
    """Call torch's functions as torch's strategies do, with a work and without."""
    size, rank = exchange.size(), exchange.rank()
    every = torch.stack([own(each) for each in range(size)])
    for later in (False, True):
        values, mine = own(rank).to(device), own(rank).to(device)
        gathered = torch.zeros(4 * size, device=device)
        summed = torch.zeros(4, device=device)
        received = torch.zeros(4 * size, device=device)
        lists = [torch.zeros(4, device=device) for _ in range(size)]
        works = [
            dist.all_reduce(values, group=exchange, async_op=later),
            dist.all_gather_into_tensor(gathered, mine, group=exchange, async_op=later),
            dist.reduce_scatter_tensor(summed, mine.repeat(size), group=exchange, async_op=later),
            dist.all_to_all_single(received, mine.repeat(size), group=exchange, async_op=later),
            dist.all_gather(lists, mine, group=exchange, async_op=later),
        ]
        for work in works:
            if work is not None:
                work.wait()
        how = "with a work" if later else "without a work"
        yield f"torch's all_reduce {how}", values, every.sum(0)
        yield f"torch's all_gather_into_tensor {how}", gathered, every.flatten()
        yield f"torch's reduce_scatter_tensor {how}", summed, every.sum(0)
        yield f"torch's all_to_all_single {how}", received, every.flatten()
        yield f"torch's all_gather {how}", torch.stack(lists), every


def of_control(control: Control, device: torch.device) -> Found:
    """Tensors of the device that the ranks exchange for checks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    every = torch.stack([own(each) for each in range(size)])
    values = own(rank).to(device)
    control.all_reduce(values)
    yield "control's all_reduce", values, every.sum(0)
    yield "control's all_gather", torch.stack(control.all_gather(own(rank).to(device))), every
    values = own(rank).to(device)
    control.broadcast(values)
    yield "control's broadcast", values, every[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
