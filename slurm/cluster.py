"""The facts of a live cluster with which a site profile is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from results.grouping import grouped
from results.notation import seconds_of
from slurm.runner import SlurmError

SINFO_FORMAT = "%P|%a|%l|%s|%D|%T|%c|%m|%G|%S"
"""Partition (the default with a star), whether it is up, time limit, nodes of a job, nodes, their state,
CPUs, memory in MB, GRES, hosts that may submit to it."""
ASSOCIATION_FORMAT = "account,partition,qos,maxsubmit"
LIMITS_FORMAT = "defaultaccount,account,defaultqos,maxtres,maxwall,grptres"
QOS_FORMAT = "name,maxtres,maxtrespu,maxwall,grptres"
_LIMITED = {"gres/gpu": "GPUs", "node": "nodes"}

_GPUS = re.compile(r"(?:^|,)gpu:(?:(?P<type>[^:,()]+):)?(?P<count>\d+)")
_SETTING = re.compile(r"^(?P<name>\w+)\s*= (?P<value>.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition with equal hardware and in the same state."""

    partition: str
    is_up: bool
    """Whether the partition starts jobs."""
    is_default: bool = False
    """Whether jobs that name no partition go there."""
    time_limit_s: int | None
    """The time limit of a job in the partition; None: no limit."""
    least_nodes: int = 1
    """The smallest number of nodes that a job in the partition may have."""
    most_nodes: int | None = None
    """The largest number of nodes that a job in the partition may have; None: no limit."""
    nodes: int
    state: str
    """The state in Slurm's words, such as `idle`, `mixed`, `drained*`."""
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]
    """The number of GPUs of a node by type; the type is empty if the site has no type names."""
    submitters: str = "all"
    """The hosts that may submit jobs to the partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """An account that the user may charge."""

    account: str
    partition: str | None
    """None: in all partitions."""
    qos: tuple[str, ...]
    max_submit: int | None
    """The maximum number of jobs in the queue; None: the account has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster as its commands describe it."""

    has_accounting: bool
    """Whether sacct knows jobs that the controller has forgotten."""
    kill_wait_s: int | None
    """The time between SIGTERM and SIGKILL when a job reaches its time limit."""
    groups: tuple[NodeGroup, ...]
    associations: tuple[Association, ...] | None
    """None: the cluster has no accounting, or the user may not query it."""


def read_settings(text: str) -> dict[str, str]:
    """Read the settings in the output of `scontrol show config`. Raises SlurmError for other output."""
    settings = {match["name"]: match["value"] for match in _SETTING.finditer(text)}
    if not {"ClusterName", "SLURM_VERSION", "AccountingStorageType"} <= set(settings):
        raise SlurmError(f"Slurm's settings are not as it writes them: {text[:80]!r}")
    return settings


def read_sinfo(text: str) -> tuple[NodeGroup, ...]:
    """Read the groups in sinfo's output of SINFO_FORMAT. Raises SlurmError for other output."""
    groups = []
    for line in text.splitlines():
        try:
            partition, up, limit, size, nodes, state, cpus, memory, gres, submitters = line.split("|")
            # `2-4`, `1-infinite`, or one number where both ends are the same.
            least, _, most = size.rpartition("-")
            group = NodeGroup(
                partition=partition.removesuffix("*"),
                is_up=up == "up",
                is_default=partition.endswith("*"),
                time_limit_s=slurm_seconds(limit),
                least_nodes=int(least or most),
                most_nodes=None if most == "infinite" else int(most),
                nodes=int(nodes),
                state=state,
                cpus=int(cpus),
                memory_mb=int(memory),
                gpus=_gpus(gres),
                submitters=submitters,
            )
        except ValueError as error:
            raise SlurmError(f"a line of sinfo is not as Slurm writes it ({error}): {line!r}") from error
        groups.append(group)
    return tuple(groups)


def slurm_seconds(text: str) -> int | None:
    """Return the seconds of a time limit that Slurm printed, or None if Slurm printed no limit.

    A bare number means minutes.
    """
    seconds = seconds_of(f"{text}:00" if text.isdecimal() else text)
    return None if seconds is None else int(seconds)


def _gpus(gres: str) -> dict[str, int]:
    """Return the number of GPUs by type in a text such as `gpu:h100:8(S:0-1),nic:2`."""
    counts: dict[str, int] = {}
    for match in _GPUS.finditer(gres):
        kind = match["type"] or ""
        counts[kind] = counts.get(kind, 0) + int(match["count"])
    return counts


def read_associations(text: str) -> tuple[Association, ...]:
    """Read the associations in sacctmgr's `--parsable2` output of ASSOCIATION_FORMAT.

    Raises SlurmError for other output.
    """
    associations = []
    for line in text.splitlines():
        try:
            account, partition, qos, most = line.split("|")
            association = Association(
                account=account,
                partition=partition or None,
                qos=tuple(name for name in qos.split(",") if name),
                max_submit=int(most) if most else None,
            )
        except ValueError as error:
            raise SlurmError(f"a line of sacctmgr is not as Slurm writes it ({error}): {line!r}") from error
        associations.append(association)
    return tuple(associations)


def read_limits(text: str, qos_text: str, account: str | None, qos: str | None) -> dict[str, int]:
    """The most `GPUs`, `nodes` and `seconds` of a job, as far as the user's account and QOS limit them.

    `text` is of LIMITS_FORMAT for one user, `qos_text` of QOS_FORMAT. A limit of the QOS takes the place of
    the account's (Resource Limits in Slurm's manual).
    """
    found: list[tuple[str, int]] = []
    rows = [line.split("|") for line in text.splitlines()]
    every = {name: limits for name, *limits in (line.split("|") for line in qos_text.splitlines())}
    for _, _, default, own, wall, together in [row for row in rows if row[1] == (account or row[0])][:1]:
        most, of_user, longest, of_all = every.get(qos or default or "normal", [""] * 4)
        for limits in (_tres(own) | _tres(most), _tres(of_user), _tres(together) | _tres(of_all)):
            found += [(_LIMITED[name], limit) for name, limit in limits.items() if name in _LIMITED]
        limit_s = slurm_seconds(longest or wall or "UNLIMITED")
        found += [] if limit_s is None else [("seconds", limit_s)]
    return {what: min(limits) for what, limits in grouped(found).items()}


def _tres(text: str) -> dict[str, int]:
    """Read `gres/gpu=16,node=4`; amounts with a unit are left out."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name: int(amount) for name, _, amount in pairs if amount.isdecimal()}
