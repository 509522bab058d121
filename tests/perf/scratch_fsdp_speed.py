"""Run under torchrun: a step of scratch-fsdp against one of another sharding strategy, in the same process.

Both sides train the same model on the same batches over the same backend, in blocks A B B A; a block is
timed from a barrier to the last rank. Rank 0 prints the ratios of the quads, and the median step of either
side in milliseconds, as one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from harness.worker.exchange import open_exchange
from harness.worker.leave import leave_after
from strategies import Trainer, TrainSettings
from workloads.gpt.model import build_gpt
from workloads.gpt.shape import GPTShape
from workloads.workload import Workload

Batches = Iterator[tuple[Tensor, Tensor]]
Step = Callable[[Batches], object]
CPU = torch.device("cpu")
SHAPES = {
    # gpt-nano, and one of 12.7 million parameters.
    "nano": GPTShape(layers=4, width=128, heads=4, context=64, vocabulary=256, seq=64),
    "wide": GPTShape(layers=4, width=512, heads=8, context=64, vocabulary=256, seq=64),
}


def loop(model: str, strategy: str) -> tuple[Workload, Step]:
    torch.manual_seed(0)
    built = build_gpt(SHAPES[model])
    trainer = Trainer(
        built.module,
        built.loss,
        device=CPU,
        settings=TrainSettings(strategy=strategy, optimizer="adamw"),
        layout=built.layout,
        group=open_exchange(),
    )
    return built, trainer.step


def main() -> None:
    model, ours, theirs = sys.argv[1:4]
    batch, steps, quads = (int(argument) for argument in sys.argv[4:7])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (built, own), (_, other) = loop(model, ours), loop(model, theirs)
    generator = torch.Generator().manual_seed(dist.get_rank())
    pool = [built.synthetic(generator, batch) for _ in range(4)]

    def block(step: Step) -> float:
        batches = iter(pool * steps)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step(batches)
        wall = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        return wall.item()

    for step in (own, other, other, own):
        block(step)
    ratios, step_ms = [], ([], [])  # type: ignore[var-annotated]
    for _ in range(quads):
        first, second, third, fourth = block(own), block(other), block(other), block(own)
        ratios.append((first + fourth) / (second + third))
        step_ms[0].append(500 * (first + fourth) / steps)
        step_ms[1].append(500 * (second + third) / steps)
    if dist.get_rank() == 0:
        print(json.dumps({"ratios": ratios, "step_ms": [median(side) for side in step_ms]}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    leave_after(main)
