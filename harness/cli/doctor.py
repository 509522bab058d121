"""`bench doctor`: can this machine run studies, and how well."""

from __future__ import annotations

from importlib import metadata, util

import click

from harness.code import PACKAGES, checkout
from harness.console import Console
from harness.device import cgroup_quota, cpu_model, usable_cores, visible_gpus
from harness.launch.preflight import warnings
from results.catalogue.gpus import catalogue_name


@click.command(name="doctor")
def command() -> int:
    """Check whether this machine can run studies, and how well. Exit code 1 if it cannot run one."""
    console = Console()
    rows = [("packages", f"{', '.join(PACKAGES)} from {checkout()}"), ("torch", _torch())]
    rows += _host() + _gpus()
    device = "cuda" if visible_gpus() else "cpu"
    found = warnings("cuda" if device == "cuda" else "cpu")
    rows += [("warning", warning) for warning in found] or [("state", "nothing that would spoil figures")]
    console.table(["what", "found"], rows, numeric=[False, False])
    return 0 if util.find_spec("torch") else 1


def _torch() -> str:
    if util.find_spec("torch") is None:
        return (
            "not installed: planning and reporting work, running does not (pip install 'torch>=2.11,<2.14')"
        )
    return metadata.version("torch")


def _host() -> list[tuple[str, str]]:
    quota = cgroup_quota()
    limit = "no quota" if quota is None else f"a quota of {quota:g} CPUs"
    cores = usable_cores()
    return [("CPU", f"{cpu_model()}, {len(cores)} usable cores ({limit})")]


def _gpus() -> list[tuple[str, str]]:
    gpus = visible_gpus()
    if not gpus:
        return [("GPUs", "none that NVML shows: studies run on CPU ranks")]
    return [
        (
            f"GPU {gpu.index}",
            f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB; "
            + ("its peak is known, MFU is reported" if catalogue_name(gpu.name) else "no MFU: peak unknown"),
        )
        for gpu in gpus
    ]
