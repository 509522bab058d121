"""The laws of all launchers for Slurm's, on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from launcher_laws import JobLaws


class TestSlurm(JobLaws):
    name = "slurm"

    @pytest.fixture(autouse=True)
    def _cluster(self, lab: Any) -> None:
        self.lab = lab

    @pytest.fixture
    def idle(self, lab: Any) -> Iterator[None]:
        lab.drain()
        yield
        lab.resume()

    def finish(self) -> None:
        self.lab.wait(lambda: not self.lab.command("squeue", "--noheader"), "an empty queue", 240)
