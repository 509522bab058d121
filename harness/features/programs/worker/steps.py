"""Divide recorded steps into a warm-up and blocks, and decide when the blocks are enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.worker.measure.blocks import STEADY_WITHIN, Stop, stop_of
from results.cell import StepPolicy, gpu_warm_up_s


class Blocks:
    """A warm-up and blocks in the steps that all ranks have recorded, by the rules of bench's own runs
    (`harness.worker.measure.blocks`)."""

    def __init__(self, policy: StepPolicy, *, on_gpu: bool) -> None:
        self.policy = policy
        self._timed = on_gpu and policy.warmup_max_steps > 0
        self._limits_s = gpu_warm_up_s(math.inf) if self._timed else (0.0, math.inf)
        self.steps = policy.block_steps
        """The steps of a block. After a warm-up on a GPU, a block also has a shortest time."""
        self.warmup = 0
        """Steps of the warm-up so far."""
        self.steady: bool | None = None
        """Whether the warm-up ended because the step time was steady; None: it lasts."""
        self.walls_ns: list[float] = []
        """The time of each block on the rank that took longest."""
        self.stop: Stop | None = None
        """Why no further block is needed; None: it is."""
        self._warmed_ns: list[float] = []
        """The times of the blocks of the warm-up."""
        if not policy.warmup_max_steps:
            self.steady = False

    def keep_together(self, steps: int) -> None:
        """Make each block of complete groups of `steps` steps, each of which has one time."""
        if not self.last and steps > 0:
            self.steps = math.ceil(self.policy.block_steps / steps) * steps

    @property
    def last(self) -> int:
        """The number of steps up to the end of the last block."""
        return self.warmup + self.steps * len(self.walls_ns)

    @property
    def enough(self) -> bool:
        """Whether there are as many blocks as any run has."""
        return self.stop is not None or len(self.walls_ns) >= self.policy.min_blocks

    def extend(self, step_ns: Sequence[Sequence[int]]) -> None:
        """Go on with the steps so far: the times of a rank's steps in each row, equally many."""
        while self.stop is None and self.last + self.steps <= len(step_ns[0]):
            wall = float(max(sum(row[self.last : self.last + self.steps]) for row in step_ns))
            if self.steady is None:
                self._warm_up(wall)
            else:
                self.walls_ns.append(wall)
                self.stop = stop_of(self.walls_ns, self.policy, 0)

    def _warm_up(self, wall_ns: float) -> None:
        """Add a block to the warm-up, and end it if the step time is steady, or at its limit."""
        before_ns = self._warmed_ns[-1] if self._warmed_ns else math.inf
        self._warmed_ns.append(wall_ns)
        self.warmup += self.steps
        least_s, most_s = self._limits_s
        spent_s = sum(self._warmed_ns) / 1e9
        full = spent_s >= most_s if self._timed else self.warmup >= self.policy.warmup_max_steps
        if abs(wall_ns - before_ns) <= STEADY_WITHIN * before_ns < math.inf and spent_s >= least_s:
            self.steady = True
        elif full and (len(self._warmed_ns) > 1 or not self._timed):
            self.steady = False
        if self.steady is not None and self._timed:
            self.steps = self.policy.steps_of_block(1, min(self._warmed_ns) / self.steps / 1e9)
