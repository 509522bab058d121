"""How a campaign carries the plan out: what it prints first, and how long it expects a launch to take."""

from __future__ import annotations

from collections.abc import Sequence

from harness.launch.conduct import Conduct
from harness.plan.schedule import PlannedLaunch
from reports.text import count
from results.store import Study

LAUNCH_S = 20.0
"""Starting the workers takes most of it."""


class HostMemoryConduct(Conduct):
    """Copies memory once a run."""

    def header(self, study: Study, left: int) -> list[str]:
        assert self.plan.order is not None
        each = f"{max(self.plan.request.gpus)} ranks copy {self.plan.order.values['mib']} MiB each"
        return [f"study {self.plan.study} in {study.root}", f"{each}; {count(left, 'run')} to do"]

    def seconds(self, launches: Sequence[PlannedLaunch], estimated: Sequence[float]) -> Sequence[float]:
        return [LAUNCH_S] * len(launches)
