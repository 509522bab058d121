"""A step inside the harness against one of a loop as a user would write it, on one device, in one process.

`python tests/gpu/bare.py '{"workload": "resnet50", "batch_size": 256, "device": "cuda", "out": "a.json"}'`

Each side has its model, optimizer and batches, all alike; they take turns, in blocks A B B A. The
blocks of a side that is measured end with the device. The profiler is attached to the driver, as it is in a
worker: both sides launch their kernels through it. A process is one run, whose ratios are added to `out`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from harness.worker.measure.clock import StepClock
from harness.worker.measure.profiler import attach_profiler
from harness.worker.rank.process import tune_kernels
from strategies import Trainer, TrainSettings
from strategies.devices import device_of
from strategies.optimizers import build_optimizer
from strategies.training.checkpointing import checkpoint_blocks
from strategies.training.precision import set_float32_math
from workloads.build import build_workload
from workloads.catalog import MEMBERS, WORKLOADS
from workloads.workload import Workload

Batches = Iterator[tuple[Tensor, Tensor]]
COST_AIM = 1.01
CLAIMED = 3
"""The processes from which a ratio is compared with the aim."""
QUADS = {"cuda": 5, "cpu": 2}
STEPS = {"cuda": 10, "cpu": 2}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    workload: str
    device: str
    out: str
    batch_size: int
    precision: str = "fp32"
    memory_format: str = "contiguous"
    compile: bool = False
    activation_checkpointing: bool | str = False

    @property
    def optimizer(self) -> str:
        return MEMBERS[WORKLOADS.parse(self.workload).name].optimizer


def inside(asked: Asked, built: Workload, device: torch.device) -> tuple[Callable[[Batches], object], Any]:
    """A step of the harness, with the clock that it has in a cell."""
    names = ("optimizer", "precision", "memory_format", "compile", "activation_checkpointing")
    settings = TrainSettings(**{name: getattr(asked, name) for name in names})
    trainer = Trainer(built.module, built.loss, device=device, settings=settings, layout=built.layout)
    trainer.observer = clock = StepClock(device)
    return trainer.step, clock


def outside(asked: Asked, built: Workload, device: torch.device) -> Callable[[Batches], object]:
    """A step as a user would write it by hand; fp16 would need a loss scaler."""
    form = torch.channels_last if asked.memory_format == "channels_last" else torch.preserve_format
    module = built.module.to(device, memory_format=form).train()
    if asked.activation_checkpointing:
        checkpoint_blocks(module, built.layout, selective=asked.activation_checkpointing == "selective")
    model = torch.compile(module) if asked.compile else module
    optimizer = build_optimizer(asked.optimizer, module.parameters())
    low = TYPES.get(asked.precision)

    def step(batches: Batches) -> object:
        inputs, targets = next(batches)
        with torch.autocast(device.type, dtype=low, enabled=low is not None):
            loss = built.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def seeded(workload: str) -> Workload:
    torch.manual_seed(0)
    return build_workload(workload)


def pool(asked: Asked, built: Workload, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = [built.synthetic(generator, asked.batch_size) for _ in range(4)]
    last = asked.memory_format == "channels_last"
    form = torch.channels_last if last else torch.preserve_format
    return [(inputs.to(device, memory_format=form), targets.to(device)) for inputs, targets in batches]


def measure(asked: Asked) -> list[float]:
    """Return the time of our step over the time of theirs, for each quad."""
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
    on = device_of(device)
    attach_profiler(device)
    set_float32_math(asked.precision)
    tune_kernels(device, deterministic=False)
    ours, theirs = seeded(asked.workload), seeded(asked.workload)
    batches = cycle(pool(asked, ours, device))
    step, clock = inside(asked, ours, device)
    bare = outside(asked, theirs, device)

    def seconds(block: Callable[[Batches], object]) -> float:
        clock.drain()
        on.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS[asked.device]):
            block(batches)
        on.synchronize()
        return time.perf_counter() - began

    ratios = []
    for _ in range(1 + QUADS[asked.device]):
        first, second, third, fourth = (seconds(block) for block in (step, bare, bare, step))
        ratios.append((first + fourth) / (second + third))
    # The first quad compiles, and tunes kernels.
    return ratios[1:]


def main(text: str) -> None:
    asked = msgspec.json.decode(text, type=Asked)
    path, quads = Path(asked.out), measure(asked)
    before = json.loads(path.read_text(encoding="utf-8"))["processes"] if path.exists() else []
    found: dict[str, Any] = {"asked": msgspec.to_builtins(asked), "processes": [*before, quads]}
    found["torch"] = torch.__version__
    if asked.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name(0)
    path.write_text(json.dumps(found), encoding="utf-8")
    print(f"  {asked.workload}: {in_words(found['processes'])}")


def in_words(processes: list[list[float]]) -> str:
    """Say how a step compares with a bare loop's, by the median of each process."""
    ratios = sorted(statistics.median(quads) for quads in processes)
    words = f"a step takes {statistics.median(ratios):.4f} times a bare loop's"
    if len(ratios) < CLAIMED:
        return f"{words} ({len(ratios)} of {CLAIMED} processes)"
    return f"{words} ({ratios[0]:.4f} to {ratios[-1]:.4f} in {len(ratios)} processes; aim {COST_AIM})"


if __name__ == "__main__":
    main(sys.argv[1])
