"""`bench doctor`: check this machine, or a cluster by its site profile."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import click

from harness.launch.preflight import TORCH, amd_only, require_devices, unknown_name, warnings
from harness.launchers.registry import launcher, launchers
from harness.machine.code import PACKAGES, checkout
from harness.machine.device import (
    cgroup_quota,
    cpu_model,
    rdma_devices,
    rdma_warnings,
    usable_cores,
    visible_gpus,
)
from harness.machine.torch_devices import ask_torch, torch_version
from harness.plan.study_file import StudyFile
from harness.terminal.console import Console
from results.catalogue.gpus import catalogue_name
from results.errors import MachineError, UsageError, bench_call
from results.features import Hook, hook
from results.site import SiteCheck

_HEADS = ("what", "found")


@click.command(name="doctor")
@click.option("--site", metavar="FILE", help="Check this site profile against its cluster, too.")
@click.option(
    "--launcher",
    "launcher_name",
    metavar="NAME",
    help="The launcher whose cluster --write describes, and whose nodes --nodes examines.",
)
@click.option(
    "--write",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write a profile of the cluster that is here, for you to complete.",
)
@click.option(
    "--noise",
    is_flag=True,
    help="Measure how far equal runs differ here, and write the margins of bench compare.",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="How long --noise may measure (3m), or the devices of --nodes multiply (20s).",
)
@click.option(
    "--baselines",
    type=click.Path(path_type=Path),
    default=Path("baselines"),
    help="Where --noise writes thresholds/MACHINE.json.",
)
@click.option(
    "--nodes",
    metavar="N",
    type=click.IntRange(min=1),
    help="Preflight: compare the devices and the network of N nodes of --launcher.",
)
@click.option(
    "--slow-below",
    metavar="SHARE",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.85,
    show_default=True,
    help="Share of the median of all nodes below which --nodes calls a node slow.",
)
@click.option("--json", "as_json", is_flag=True, help="The tables as JSON.")
def doctor_command(
    site: str | None, *, noise: bool, budget: str | None, baselines: Path, as_json: bool, **of_cluster: Any
) -> int:
    """Check whether this machine can run studies, and how well. Exit code 1 if it cannot run one.

    With --site, studies run elsewhere: the exit code is 1 if something in the profile is wrong.
    With --launcher and --write, it writes the profile of a cluster (docs/clusters.md).
    With --nodes, it examines nodes of the launcher, and the exit code is 1 if one is slow or wrong.
    With --noise, it runs a small cell in fresh launches until --budget is spent (docs/gate.md).
    """
    nodes, slow_below = of_cluster.pop("nodes"), of_cluster.pop("slow_below")
    if nodes is not None:
        options = StudyFile(launcher=of_cluster["launcher_name"], site=site, budget=budget or "20s")
        return int(_hooked("preflight", "--nodes")(nodes, slow_below, options))
    if any(of_cluster.values()):
        return _write_site(**of_cluster)
    if noise and as_json:
        raise UsageError("--json is for what doctor finds, and --noise writes a JSON file: leave one out")
    if noise:
        return int(_hooked("measure_noise", "--noise")(budget or "3m", baselines))
    # The profile is checked first: if it has an error, that error is the only output.
    found = None if site is None else _site_checks(Path(site))
    console = Console()
    machine, heads = _machine(), ("level", "about", "found")
    rows = [(each.level, each.about, each.words) for each in found or ()]
    if as_json:
        tables = {"machine": [dict(zip(_HEADS, row, strict=True)) for row in machine]}
        tables |= {} if found is None else {"site": [dict(zip(heads, row, strict=True)) for row in rows]}
        console.text(json.dumps(tables))
    else:
        console.table(_HEADS, machine, numeric=[False, False])
    if found is None:
        return 0 if util.find_spec("torch") and not _obstacle() else 1
    if not as_json:
        console.result()
        console.table(heads, rows, numeric=[False, False, False])
    return 1 if any(each.level == "wrong" for each in found) else 0


def _hooked(name: Hook, flag: str) -> Callable[..., Any]:
    found = hook(name)
    if found is None:
        raise UsageError(f"{flag} needs a feature that this installation lacks")
    return found


def _write_site(launcher_name: str | None, write: Path | None) -> int:
    if launcher_name is None or write is None:
        raise UsageError("--launcher NAME goes with --write FILE or --nodes N: give one of them")
    text = launcher(launcher_name).found_site()
    if text is None:
        raise UsageError(f"--launcher {launcher_name} cannot describe its cluster: docs/sites has examples")
    try:
        with write.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--write {write}: it is there already; name another file") from None
    Console().result(f"{write}: complete it; then {bench_call('doctor', '--site', write)} checks it")
    return 0


def _site_checks(path: Path) -> Sequence[SiteCheck]:
    """Check a profile by the first launcher that can check profiles of clusters."""
    for each in launchers():
        found = each.check_site(path)
        if found is not None:
            return found
    raise UsageError(f"--site {path}: no launcher here can check a profile; leave --site out")


def _machine() -> list[tuple[str, str]]:
    """Rows of `_HEADS`: what this machine has, and what would spoil figures."""
    quota, gpus = cgroup_quota(), visible_gpus()
    cpus = "no quota" if quota is None else f"a quota of {quota:g} CPUs"
    rows = [
        ("packages", f"{', '.join(PACKAGES)} from {checkout()}"),
        ("torch", _torch()),
        ("CPU", f"{cpu_model()}, {len(usable_cores())} usable cores ({cpus})"),
    ]
    for gpu in gpus:
        memory = "memory unknown" if gpu.memory_bytes is None else f"{gpu.memory_bytes / 2**30:.0f} GiB"
        mfu = "its peak is known, MFU is reported" if catalogue_name(gpu.name) else "no MFU: peak unknown"
        rows.append((f"GPU {gpu.index}", f"{gpu.name}, {memory}; {mfu}"))
    if not gpus:
        rows.append(("GPUs", f"{amd_only() or 'none that NVML shows'}: studies run on CPU ranks"))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "no limit" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.3g} MiB"
    rows.append(("RDMA", f"{', '.join(rdma_devices()) or 'no device is up'}; ulimit -l: {locked}"))
    found = [
        *_obstacle(),
        *unknown_name(),
        *rdma_warnings(rdma_devices()),
        *warnings("cuda" if gpus else "cpu"),
    ]
    return rows + (
        [("warning", warning) for warning in found] or [("state", "nothing that would spoil figures")]
    )


def _obstacle() -> list[str]:
    """Why torch cannot use the GPUs of this machine."""
    try:
        if util.find_spec("torch") is not None and visible_gpus():
            require_devices("cuda")
    except MachineError as error:
        return [str(error)]
    return []


def _torch() -> str:
    version = torch_version()
    if version is None:
        return f"not installed: planning and reporting work, running does not (pip install '{TORCH}')"
    if not visible_gpus() and "+cpu" in version:
        return version
    found = ask_torch()
    built = "built without CUDA" if found.cuda is None else f"CUDA {found.cuda}, uses {found.devices} GPUs"
    return f"{version}, {found.error or built}"
