"""The laws of all launchers for Slurm's, on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launcher_laws import JobLaws


class TestSlurm(JobLaws):
    name = "slurm"

    @pytest.fixture(autouse=True)
    def _cluster(self, lab) -> None:
        self.lab = lab

    @pytest.fixture
    def idle(self, lab) -> Iterator[None]:
        lab.drain()
        yield
        lab.resume()

    def finish(self) -> None:
        self.lab.wait(lambda: not self.lab.command("squeue", "--noheader"), "an empty queue", 240)
