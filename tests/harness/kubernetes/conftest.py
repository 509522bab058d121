"""A profile and a job to make manifests of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from harness.launchers.kubernetes.profile import KubernetesProfile
from results.environment import CodeVersion
from results.job import Job, RunOptions
from results.plan import Placement

JOB = Job(
    job_id="0001-2x8",
    name="demo-ab12-0001-2x8",
    launcher="kubernetes",
    placement=Placement(nodes=2, gpus_per_node=8),
    plan=1,
    cells=(),
    baseline=None,
    options=RunOptions(),
    code=CodeVersion(code_hash="0"),
    estimate_s=10,
    time_limit_s=3600,
    billed_gpus=16,
    site={},
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
