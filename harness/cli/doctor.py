"""`bench doctor`: can this machine run studies, and how well; or, can a cluster, as a site profile has it."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path

import click

from harness.code import PACKAGES, checkout
from harness.console import Console
from harness.device import cgroup_quota, cpu_model, usable_cores, visible_gpus
from harness.launch.preflight import warnings
from results.catalogue.gpus import catalogue_name
from results.plan import Placement
from slurm.client import Client
from slurm.durations import seconds
from slurm.findings import Finding, findings
from slurm.runner import QueueFullError, RefusedError
from slurm.script import Job, job_script
from slurm.site import SiteProfile
from slurm.site_file import read_site


@click.command(name="doctor")
@click.option("--site", metavar="FILE", help="Check this site profile against the Slurm cluster, too.")
def command(site: str | None) -> int:
    """Check whether this machine can run studies, and how well. Exit code 1 if it cannot run one.

    With --site, studies run elsewhere: the exit code is 1 if something in the profile is wrong.
    """
    # First, because its errors are all there is to say.
    found = None if site is None else _examined(read_site(Path(site)), Client())
    console = Console()
    _show_machine(console)
    if found is None:
        return 0 if util.find_spec("torch") else 1
    console.result()
    rows = [(each.level, each.about, each.words) for each in found]
    console.table(["level", "about", "found"], rows, numeric=[False, False, False])
    return 1 if any(each.level == "wrong" for each in found) else 0


def _examined(site: SiteProfile, client: Client) -> list[Finding]:
    return [*findings(site, client.cluster()), _scheduler_says(site, client)]


def _scheduler_says(site: SiteProfile, client: Client) -> Finding:
    """What the scheduler says of a job of one node that asks for all that the profile may ask for."""
    limit = site.time.maximum if site.time.fixed is None else site.time.fixed
    job = Job(
        name="bench-doctor",
        placement=Placement(nodes=1, gpus_per_node=site.gpus_per_node or 1),
        time_limit_s=seconds(limit),
        # Nothing is run, nothing is written.
        folder=Path("/"),
        log_folder=Path("/"),
        command=("true",),
    )
    about = "the scheduler"
    try:
        client.check(job_script(site, job))
    except QueueFullError as error:
        return Finding(level="doubtful", about=about, words=f"{error}; ask again when jobs have ended")
    except RefusedError as error:
        return Finding(level="wrong", about=about, words=str(error))
    return Finding(level="fine", about=about, words=f"would take a job of one node for {limit}")


def _show_machine(console: Console) -> None:
    rows = [("packages", f"{', '.join(PACKAGES)} from {checkout()}"), ("torch", _torch())]
    rows += _host() + _gpus()
    device = "cuda" if visible_gpus() else "cpu"
    found = warnings("cuda" if device == "cuda" else "cpu")
    rows += [("warning", warning) for warning in found] or [("state", "nothing that would spoil figures")]
    console.table(["what", "found"], rows, numeric=[False, False])


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
