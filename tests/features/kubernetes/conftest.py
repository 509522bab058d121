"""A profile and a job to make manifests of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from launching import a_job

from harness.features.kubernetes.profile import KubernetesProfile
from results.job import Job, RunOptions
from results.plan import Placement

JOB = a_job(
    "0001-2x8",
    name="demo-ab12-0001-2x8",
    launcher="kubernetes",
    placement=Placement(nodes=2, gpus_per_node=8),
    cells=(),
    options=RunOptions(),
    time_limit_s=3600,
    billed_gpus=16,
    site={"image": "bench:1", "volume_claim": "results"},
)


@pytest.fixture(scope="session")
def make_job() -> Callable[..., Job]:
    """A job of two nodes with eight GPUs each, with other values for some of its fields."""
    return lambda **changes: msgspec.structs.replace(JOB, **changes)


@pytest.fixture(scope="session")
def make_profile() -> Callable[..., KubernetesProfile]:
    """A profile with what must be given, and with what the test gives."""

    def make(**values: Any) -> KubernetesProfile:
        return KubernetesProfile(**{"image": "bench:1", "volume_claim": "results", **values})

    return make


@pytest.fixture
def kubectl(tmp_path, monkeypatch) -> Path:
    """Replace kubectl, which needs a cluster, by a script. Returns the file to which it adds manifests."""
    applied, program = tmp_path / "applied", tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat >> {applied}\necho done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return applied
