"""The MLP with a known regression planted in it, `py:waiting_model:slow5`: time, memory, or its start."""

from __future__ import annotations

import statistics
import time
from collections import deque

import torch
from torch import Tensor, nn

from harness.worker.rank.usage import rss_bytes
from workloads import Workload
from workloads.build import build_workload

RECENT = 25
"""Steps by whose mean CPU time a wait is calibrated, again and again, so that it stays a share of a step."""
START_S = 1.0
"""The additional seconds that `late` takes to build."""


class _Wait:
    """A busy-wait before each forward pass, on every rank: a share of the CPU time that its own steps take.

    By the wall clock a step on a shared core would also have the time of others in it, and the wait, which is
    preempted as the step is, would be lengthened by them a second time.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._steps_ns: deque[int] = deque(maxlen=RECENT)
        self._ended_ns: int | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # Of all threads: those of Gloo and of the reducer work for the step, too.
        if self._ended_ns is not None:
            self._steps_ns.append(time.process_time_ns() - self._ended_ns)
        # Of this thread: what the others do meanwhile is not the wait.
        until_ns = time.thread_time_ns() + self._wait_ns()
        while time.thread_time_ns() < until_ns:
            pass
        self._ended_ns = time.process_time_ns()

    def _wait_ns(self) -> int:
        return round(self._share * statistics.mean(self._steps_ns)) if self._steps_ns else 0


class _Hoard:
    """Memory that is held from the second step on: a share of what the model has taken until then."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._before = rss_bytes()
        self._steps = 0
        self._kept: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._steps += 1
        if self._steps == RECENT:
            self._kept = torch.ones(round(self._share * (rss_bytes() - self._before)), dtype=torch.uint8)


def _planted(hook: _Wait | _Hoard | None) -> Workload:
    workload = build_workload("mlp")
    if hook is not None:
        workload.module.register_forward_pre_hook(hook)
    return workload


def plain() -> Workload:
    return _planted(_Wait(0))


def slow2() -> Workload:
    return _planted(_Wait(0.02))


def slow3() -> Workload:
    return _planted(_Wait(0.03))


def slow5() -> Workload:
    return _planted(_Wait(0.05))


def slow10() -> Workload:
    return _planted(_Wait(0.10))


def memory10() -> Workload:
    return _planted(_Hoard(0.10))


def late() -> Workload:
    time.sleep(START_S)
    return _planted(_Wait(0))
