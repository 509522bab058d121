"""Job scripts, and the line that starts one agent on each node: text that depends only on the input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from results.plan import Placement
from slurm.site import Container, SiteProfile, directive, log_pattern, shell

FIRST_PORT, JOBS, LAUNCHES = 20_000, 750, 16
"""Ports for LAUNCHES of JOBS, all below 32768, where the ephemeral ports of Linux begin."""

HOSTS = "JOB_HOSTS"
"""The variable of a job script with the names of its nodes, one a line."""
_LOG = "job-%j.log"
_SMALL_MEMORY = "4G"
_OF_THE_RANKS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONSAFEPATH")
"""Variables that the process which starts the agents sets for the ranks."""


class _Verbatim(str):
    """Text that is written to a script without quoting."""


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    # Each value is quoted as one word of the shell, unless a filter says otherwise: the default is safe.
    finalize=lambda value: value if isinstance(value, _Verbatim) else shell(str(value)),
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["verbatim"] = _Verbatim
_TEMPLATES.filters["words"] = lambda words: _Verbatim(" ".join(map(shell, words)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptJob:
    """One allocation, and the program that is started in it once, on its first node."""

    name: str
    placement: Placement | None
    """None: a small job on one CPU that runs after others, such as writing their report."""
    time_limit_s: float
    folder: Path
    """The folder in which the program starts."""
    log_folder: Path
    """It must exist: Slurm creates no folders, and a job without a log fails. See `log_path`."""
    command: tuple[str, ...]
    python_path: Path | None = None
    """The folder in which the command's Python looks first for packages."""
    requeue: bool = True
    """Whether Slurm restarts it after a node failed or another job preempted it."""

    def __post_init__(self) -> None:
        assert self.command


def log_path(log_folder: Path, job_id: int) -> Path:
    """Return the file of a job's output; a restarted job appends to it."""
    return log_folder / _LOG.replace("%j", str(job_id))


def rendezvous_port(job_id: int, launch: int) -> int:
    """Return the port of a job's `launch`-th rendezvous, from 0; MASTER_PORT in the job script is for launch
    0.

    Jobs that share a node have different ports if their ids differ by less than JOBS. Two launches of one job
    have different ports if their numbers differ by less than LAUNCHES: a port may stay in use after a launch.
    """
    return FIRST_PORT + job_id % JOBS * LAUNCHES + launch % LAUNCHES


def job_script(site: SiteProfile, job: ScriptJob) -> str:
    """Return the script of a job, for sbatch. Raises UsageError for a value that a script cannot contain.

    The command of a job with a placement must handle USR1, which Slurm sends before the time limit, and TERM,
    which it sends at the limit, and when the job is cancelled or loses its nodes. MASTER_ADDR and MASTER_PORT
    are the address of the rendezvous. `Client.submit` takes the jobs after which a job without a placement
    runs.
    """
    parts: dict[str, object] = {
        "site": site,
        "command": job.command,
        "python_path": job.python_path,
        "folder": job.folder,
    }
    options = {
        "account": site.account,
        "qos": site.qos,
        "job-name": job.name,
        "chdir": str(job.folder),
        "output": f"{log_pattern(str(job.log_folder))}/{_LOG}",
        "open-mode": "append",
        "time": slurm_time(job.time_limit_s),
        "requeue" if job.requeue else "no-requeue": True,
    }
    placement = job.placement
    if placement is None:
        options |= {
            # Another partition has its own quality of service.
            "qos": None if site.serial_partition else site.qos,
            "partition": site.serial_partition or site.partition,
            "cpus-per-task": "1",
            "mem": _SMALL_MEMORY,
            "nodes": "1",
            "ntasks": "1",
        }
        template = "base.sh.j2"
    else:
        options = {
            **site.directives,
            **options,
            "partition": site.partition,
            "constraint": site.constraint,
            "reservation": site.reservation,
            "nodes": str(placement.nodes),
            "ntasks-per-node": "1",
            "cpus-per-task": None if site.cpus_per_gpu is None else str(_cpus(site, placement)),
            "mem": site.memory_per_node,
            "exclusive": site.exclusive,
            **_gpus(site, placement),
            "signal": f"B:USR1@{site.time.signal_s(job.time_limit_s)}",
        }
        parts |= {
            "first_port": FIRST_PORT,
            "jobs": JOBS,
            "launches": LAUNCHES,
            "each_node": _srun(site, placement),
            "node_setup": "\n".join(["set -e", *site.node_setup]),
        }
        template = "job.sh.j2"
    lines = [_Verbatim(directive(option, value)) for option, value in sorted(options.items()) if value]
    return _TEMPLATES.get_template(template).render(directives=lines, **parts)


def agent_command(
    site: SiteProfile, placement: Placement, command: Sequence[str], log: Path
) -> tuple[str, ...]:
    """Return the srun command that starts `command` once on each node of the allocation, in the site's
    container.

    SLURM_NODEID is the number of the node, from 0. The output of the agents goes to `log`, with `-NODEID.log`
    after its name. srun ends when all agents have ended; when one fails, it ends the others, and its exit
    code is the largest of all, not the first. Raises UsageError for a log that Slurm cannot write to.
    """
    return (
        *_srun(site, placement),
        f"--output={log_pattern(str(log))}-%n.log",
        *(() if site.container is None else _pyxis(site, site.container)),
        *command,
    )


def _srun(site: SiteProfile, placement: Placement) -> tuple[str, ...]:
    return (
        "srun",
        f"--nodes={placement.nodes}",
        f"--ntasks={placement.nodes}",
        "--ntasks-per-node=1",
        # Repeated, because srun 22.05 to 23.02 does not inherit this option from the job.
        *(() if site.cpus_per_gpu is None else (f"--cpus-per-task={_cpus(site, placement)}",)),
        "--kill-on-bad-exit=1",
        # The process that starts the ranks binds them.
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
    )


def _pyxis(site: SiteProfile, container: Container) -> Iterable[str]:
    """Yield the options of NVIDIA's Pyxis, a plugin of srun, for one container."""
    yield f"--container-image={container.image}"
    if container.mounts:
        yield f"--container-mounts={','.join(container.mounts)}"
    if container.workdir is not None:
        yield f"--container-workdir={container.workdir}"
    yield "--container-mount-home" if container.mount_home else "--no-container-mount-home"
    # Otherwise a variable of the image would override the job's.
    yield f"--container-env={','.join(sorted({*_OF_THE_RANKS, *site.environment}))}"


def _cpus(site: SiteProfile, placement: Placement) -> int:
    assert site.cpus_per_gpu is not None
    return site.cpus_per_gpu * placement.gpus_per_node


def slurm_time(limit_s: float) -> str:
    """Return a time limit as `DAYS-HH:MM:SS`, rounded up to minutes, Slurm's resolution."""
    days, minutes = divmod(math.ceil(limit_s / 60), 24 * 60)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00"


def _gpus(site: SiteProfile, placement: Placement) -> dict[str, str]:
    parts = [*([site.gpu_type] if site.gpu_type else []), str(placement.gpus_per_node)]
    if site.gpu_request == "gres":
        other = [str(site.directives["gres"])] if "gres" in site.directives else []
        return {"gres": ",".join([":".join(["gpu", *parts]), *other])}
    if site.gpu_request == "gpus-per-task":
        # sbatch accepts this only with a number of tasks.
        return {"gpus-per-task": ":".join(parts), "ntasks": str(placement.nodes)}
    return {} if site.gpu_request == "none" else {site.gpu_request: ":".join(parts)}
