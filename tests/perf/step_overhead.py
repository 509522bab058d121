"""Run under torchrun: a cell's step inside the harness against a bare hand-written DDP loop, same process.

Both sides train the same model on the same batches over the same backend, in blocks A B B A; a block is
timed from a barrier to the last rank. Rank 0 prints the ratios of the quads as one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness.worker.clock import step_clock
from harness.worker.exchange import open_exchange
from harness.worker.leave import leave_after
from strategies import Trainer, TrainSettings
from strategies.training.optimizer import build_optimizer
from workloads.build import build_workload
from workloads.catalog import MEMBERS, WORKLOADS

Batches = Iterator[tuple[Tensor, Tensor]]
CPU = torch.device("cpu")


def bare_loop(workload: str, optimizer: str) -> Callable[[Batches], object]:
    torch.manual_seed(0)
    built = build_workload(workload)
    model = DistributedDataParallel(built.module.train())
    updater = build_optimizer(optimizer, model.parameters())

    def step(batches: Batches) -> Tensor:
        inputs, targets = next(batches)
        loss = built.loss(model(inputs), targets)
        loss.backward()
        updater.step()
        updater.zero_grad()
        return loss.detach()

    return step


def harness_loop(workload: str, optimizer: str) -> tuple[Callable[[Batches], object], Callable[[], object]]:
    torch.manual_seed(0)
    built = build_workload(workload)
    settings = TrainSettings(strategy="ddp", optimizer=optimizer)
    trainer = Trainer(built.module, built.loss, device=CPU, settings=settings, group=open_exchange())
    trainer.observer = clock = step_clock(CPU)
    return trainer.step, clock.drain


def main() -> None:
    workload, steps, quads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    member = MEMBERS[WORKLOADS.parse(workload).name]
    bare = bare_loop(workload, member.optimizer)
    ours, drain = harness_loop(workload, member.optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    pool = [build_workload(workload).synthetic(generator, member.batch) for _ in range(4)]

    def block(step: Callable[[Batches], object]) -> float:
        batches = iter(pool * steps)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step(batches)
        wall = torch.tensor([time.perf_counter() - start])
        drain()
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        return wall.item()

    for step in (ours, bare, bare, ours):
        block(step)
    ratios = []
    for _ in range(quads):
        first, second, third, fourth = block(ours), block(bare), block(bare), block(ours)
        ratios.append((first + fourth) / (second + third))
    if dist.get_rank() == 0:
        print(json.dumps(ratios), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    leave_after(main)
