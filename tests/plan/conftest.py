"""Each test of the plan has an empty working folder, from which plans read the user's files."""

from __future__ import annotations

import pytest

from harness.plan import surroundings
from harness.plan.surroundings import Devices


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def eight_cores(monkeypatch) -> Devices:
    """A host of 8 cores and 64 GiB, whatever this one is."""
    host = Devices(cores=8, host_bytes=64 * 2**30)
    monkeypatch.setattr(surroundings, "devices_here", lambda: host)
    return host
