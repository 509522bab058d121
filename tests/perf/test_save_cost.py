"""The cost of a save: how long it blocks training, and how much slower the steps are while it writes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import Trainer, TrainSettings

BOUND = 0.15
"""An asynchronous save may block for this share of the time of a synchronous one."""


def costs(rank: int, strategy: str, width: int, rounds: int, folder: Path) -> dict[str, float]:
    """Medians in seconds: a synchronous save, the time that an asynchronous one blocks, the time until it is
    on the disk, a step during a save, and a step without one."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    settings = TrainSettings(strategy=strategy, optimizer="adamw")
    trainer = Trainer(module, F.mse_loss, device=torch.device("cpu"), settings=settings)
    x = torch.randn(16, width)

    def seconds(work: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def step() -> Tensor:
        return trainer.step(iter([(x, x)]))

    found: dict[str, list[float]] = {
        name: [] for name in ("synchronous", "blocked", "written", "beside", "alone")
    }
    for number in range(rounds + 1):
        step()
        taken = {"synchronous": seconds(lambda: trainer.save(folder, keep=1)), "alone": seconds(step)}
        start = time.perf_counter()
        taken["blocked"] = seconds(lambda: trainer.save(folder, keep=1, asynchronous=True))
        taken["beside"] = seconds(step)
        trainer.save(folder, keep=1).wait()
        taken["written"] = time.perf_counter() - start
        if number:  # the first takes its memory from the system
            for name, value in taken.items():
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "scratch-fsdp"])
def test_what_a_save_blocks(ranks, benchmark, amount, tmp_path, strategy) -> None:
    width, rounds = amount(1600, brief=200), amount(5, brief=1)
    measured = benchmark.pedantic(lambda: ranks(2, costs, strategy, width, rounds, tmp_path), rounds=1)
    worst = {name: max(each[name] for each in measured) for name in measured[0]}
    share = worst["blocked"] / worst["synchronous"]
    benchmark.extra_info.update({**worst, "share": share})
    values = 8 * width * (width + 1)
    print(
        f"\n{strategy}, {values / 1e6:.1f} M parameters with AdamW, 2 ranks: a save takes "
        f"{worst['synchronous']:.2f} s, an asynchronous one blocks {worst['blocked']:.2f} s ({share:.0%}); "
        f"a step {worst['alone']:.2f} s, beside a save {worst['beside']:.2f} s"
    )
    if amount(1, brief=0):
        assert share <= BOUND
