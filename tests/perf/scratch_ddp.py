"""Run under torchrun: a step of scratch-ddp against one of torch's DDP, the same Trainer, the same process.

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

from harness.worker.exchange import open_exchange
from harness.worker.leave import leave_after
from strategies import Trainer, TrainSettings
from workloads.build import build_workload
from workloads.catalog import MEMBERS, WORKLOADS

Batches = Iterator[tuple[Tensor, Tensor]]
CPU = torch.device("cpu")


def loop(workload: str, strategy: str) -> Callable[[Batches], object]:
    torch.manual_seed(0)
    built = build_workload(workload)
    optimizer = MEMBERS[WORKLOADS.parse(workload).name].optimizer
    settings = TrainSettings(strategy=strategy, optimizer=optimizer)
    return Trainer(built.module, built.loss, device=CPU, settings=settings, group=open_exchange()).step


def main() -> None:
    workload, batch, steps, quads = sys.argv[1], *(int(argument) for argument in sys.argv[2:5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours, theirs = (loop(workload, strategy) for strategy in ("scratch-ddp", "ddp"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    pool = [build_workload(workload).synthetic(generator, batch) for _ in range(4)]

    def block(step: Callable[[Batches], object]) -> float:
        batches = iter(pool * steps)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step(batches)
        wall = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        return wall.item()

    for step in (ours, theirs, theirs, ours):
        block(step)
    ratios = []
    for _ in range(quads):
        first, second, third, fourth = block(ours), block(theirs), block(theirs), block(ours)
        ratios.append((first + fourth) / (second + third))
    if dist.get_rank() == 0:
        print(json.dumps(ratios), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    leave_after(main)
