"""The MLP with a busy-wait in each step, `py:waiting_model:slow5`: slow-downs of a known size.

Each rank calibrates its wait on itself: the share of the median of its first steps.
"""

from __future__ import annotations

import statistics
import time

from torch import Tensor, nn

from workloads import Workload
from workloads.build import build_workload

CALIBRATED_ON = 12
"""Steps at the start that have no wait: those of the proof and of the warm-up."""


class _Wait:
    def __init__(self, share: float) -> None:
        self._share = share
        self._begun_ns: list[int] = []
        self._wait_ns = 0

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        now_ns = time.perf_counter_ns()
        if len(self._begun_ns) <= CALIBRATED_ON:
            self._begun_ns.append(now_ns)
            if len(self._begun_ns) > CALIBRATED_ON:
                pairs = zip(self._begun_ns, self._begun_ns[1:], strict=False)
                self._wait_ns = round(self._share * statistics.median(b - a for a, b in pairs))
        while time.perf_counter_ns() < now_ns + self._wait_ns:
            pass


def _slowed(share: float) -> Workload:
    workload = build_workload("mlp")
    workload.module.register_forward_pre_hook(_Wait(share))
    return workload


def plain() -> Workload:
    return _slowed(0)


def slow2() -> Workload:
    return _slowed(0.02)


def slow3() -> Workload:
    return _slowed(0.03)


def slow5() -> Workload:
    return _slowed(0.05)


def slow10() -> Workload:
    return _slowed(0.10)
