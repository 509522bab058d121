"""Profiles of Slurm clusters: as a call has them, and held against the cluster that is here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.plan.options import read_job_time_s
from harness.plan.study_file import StudyFile
from results.plan import Placement
from results.site import seconds
from slurm.client import Client
from slurm.runner import QueueFullError, RefusedError
from slurm.script import ScriptJob, job_script
from slurm.site import SITE_FILE, SiteProfile
from slurm.site_checks import ClusterCheck, cluster_checks


def site_of(options: StudyFile) -> SiteProfile:
    """The profile of the cluster: the file's, with what the flags say. Raises UsageError."""
    site = SITE_FILE.read(Path(options.site)) if options.site else SiteProfile()
    limit = None if options.time is None else f"{read_job_time_s(options.time, '--time'):.15g}s"
    values: Mapping[str, object] = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "cpus_per_gpu": options.cpus_per_gpu,
        "time.fixed": limit,
        # Without a profile, a CPU study asks for no GPUs.
        "gpu_request": "none" if options.device == "cpu" and not options.site else None,
    }
    return SITE_FILE.overridden(site, values, "options of the site")


def site_checks(site: SiteProfile, client: Client) -> list[ClusterCheck]:
    """What the cluster's description tells of a profile, and what the scheduler says of a job by it."""
    return [*cluster_checks(site, client.cluster()), _scheduler_says(site, client)]


def _scheduler_says(site: SiteProfile, client: Client) -> ClusterCheck:
    """What the scheduler says of a job of one node that asks for all that the profile may ask for."""
    limit = site.time.maximum if site.time.fixed is None else site.time.fixed
    job = ScriptJob(
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
        return ClusterCheck(level="doubtful", about=about, words=f"{error}; ask again when jobs have ended")
    except RefusedError as error:
        return ClusterCheck(level="wrong", about=about, words=str(error))
    return ClusterCheck(level="fine", about=about, words=f"would take a job of one node for {limit}")
