"""The cost of the telemetry thread to a timed block: blocks with and without it by turns, in one process.

Two figures: the ratio of the blocks, which on a shared machine is mostly noise, and the CPU time of one
sample over the interval, which is not: what the thread can take from a rank that shares its core with it.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import numpy as np
import pytest
import rank_builders
import torch
from torch import Tensor

from harness.worker.measure.clock import StepClock
from harness.worker.measure.telemetry import INTERVAL_S, sampler
from harness.worker.rank.rank import Rank
from strategies import Trainer, TrainSettings
from workloads.build import build_workload

QUADS = 20
BLOCK_S = 1.0
"""Long enough for the thread to sample at its interval, and not only at the begin and the end."""
SAMPLES = 200
CPU = torch.device("cpu")
ALONE = Rank(rank=0, local_rank=0, node_rank=0, gpus=1, local_gpus=1)
one_thread = rank_builders.one_thread


class Blocks:
    """Blocks of training steps, as many as take about `BLOCK_S`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        built = build_workload("mlp")
        self._trainer = Trainer(built.module, built.loss, device=CPU, settings=TrainSettings())
        self._trainer.observer = self._clock = StepClock(CPU)
        generator = torch.Generator().manual_seed(0)
        self._pool: list[tuple[Tensor, Tensor]] = [built.synthetic(generator, 32) for _ in range(4)]
        self._steps = 20
        # The first blocks are warm-up.
        seconds = min(self.timed_s(sampled=False) for _ in range(5))
        self._steps = max(1, round(self._steps * BLOCK_S / seconds))

    def timed_s(self, *, sampled: bool) -> float:
        batches = iter([self._pool[i % 4] for i in range(self._steps)])
        with sampler(CPU, ALONE) if sampled else nullcontext():
            start = time.perf_counter()
            for _ in range(self._steps):
                self._trainer.step(batches)
            seconds = time.perf_counter() - start
        self._clock.drain()
        return seconds


@pytest.mark.slow
def test_blocks_with_the_sampler_against_blocks_without(benchmark, amount) -> None:
    blocks, many = Blocks(), amount(QUADS, brief=1)

    def quads() -> list[float]:
        found = []
        for _ in range(many):
            first, second, third, fourth = (blocks.timed_s(sampled=on) for on in (True, False, False, True))
            found.append((first + fourth) / (second + third))
        return found

    ratios = benchmark.pedantic(quads, rounds=1)
    low, median, high = (float(value) for value in np.quantile(ratios, [0.25, 0.5, 0.75]))
    assert len(ratios) == many
    benchmark.extra_info.update({"ratio": median, "low": low, "high": high})
    print(f"\nwith telemetry over without: {median:.3f} (quartiles {low:.3f} to {high:.3f} of {many} quads)")


@pytest.mark.slow
def test_cpu_time_of_a_sample_over_the_interval(benchmark) -> None:
    with sampler(CPU, ALONE) as sampling:
        pass
    taken_ns = []

    def samples() -> None:
        for _ in range(SAMPLES):
            start = time.thread_time_ns()
            assert len(sampling._row()) == 4
            taken_ns.append(time.thread_time_ns() - start)

    benchmark.pedantic(samples, rounds=1)
    low, median, high = (float(value) for value in np.quantile(taken_ns, [0.25, 0.5, 0.75]))
    share = median / (INTERVAL_S * 1e9)
    benchmark.extra_info.update({"sample_us": median / 1e3, "share_of_a_core": share})
    print(f"\na sample: {median / 1e3:.0f} us ({low / 1e3:.0f} to {high / 1e3:.0f}), {share:.5f} of a core")
