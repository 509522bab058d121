"""Completes a site profile by the cluster's own description of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from results.errors import UsageError
from results.site import TimeLimits, seconds
from slurm.cluster import NodeGroup
from slurm.site import SiteProfile
from slurm.site_checks import gpu_count, names_in


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    """Equal nodes of a partition."""

    partition: str
    nodes: int
    gpus: int
    kind: str
    cpus: int
    longest_s: int | None
    """The time limit of a job; None: no limit."""
    most: int | None
    """The largest number of nodes of a job; None: no limit."""

    @property
    def words(self) -> str:
        """`4 nodes of 8 h100 and 96 CPUs in partition gpu, jobs of at most 24 h, 2 nodes`."""
        limits = [] if self.longest_s is None else [f"jobs of at most {self.longest_s / 3600:.3g} h"]
        limits += [] if self.most is None else [f"at most {self.most} nodes a job"]
        count = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        what = f"{self.gpus} {self.kind or 'GPUs'} and {self.cpus} CPUs"
        return ", ".join([f"{count} of {what} in partition {self.partition}", *limits])


def with_defaults(site: SiteProfile, groups: Sequence[NodeGroup]) -> tuple[SiteProfile, str]:
    """Complete a profile of GPUs by the nodes of its partition, or of the only partition that has such GPUs.

    Returns the profile, and what the cluster says of the nodes, a clause. Raises UsageError with the flag to
    give where these nodes differ, or several partitions have GPUs.
    """
    found = _equal_nodes(site, _of_one_partition(site, [one for one in groups if gpu_count(site, one)]))
    share = max(1, found.cpus // found.gpus)
    whole = msgspec.structs.replace(
        site,
        partition=site.partition or found.partition,
        gpus_per_node=found.gpus,
        cpus_per_gpu=share if site.cpus_per_gpu is None and not site.exclusive else site.cpus_per_gpu,
        time=_within(site.time, found.longest_s),
    )
    return whole, found.words


def most_devices(site: SiteProfile, groups: Sequence[NodeGroup], per_node: int | None) -> int | None:
    """The devices of the profile's largest partition; None without one. Raises UsageError without nodes."""
    if site.partition is None or per_node is None:
        return None
    names = names_in(site.partition)
    nodes = max(sum(group.nodes for group in groups if group.partition == name) for name in names)
    if not nodes:
        raise UsageError(f"no node is in the partition {site.partition}: name another with --partition")
    return nodes * per_node


def _of_one_partition(site: SiteProfile, having: Sequence[NodeGroup]) -> list[NodeGroup]:
    """The nodes of the partition of the profile, of the default one, or of the only one that is up."""
    if site.partition is not None:
        chosen = [group for group in having if group.partition in names_in(site.partition)]
        _require_some(chosen, site, f"the partition {site.partition}")
        return chosen
    default = [group for group in having if group.is_default]
    chosen = default or [group for group in having if group.is_up]
    _require_some(chosen, site, "a partition that is up")
    names = dict.fromkeys(group.partition for group in chosen)
    if len(names) > 1:
        raise UsageError(f"the partitions {', '.join(names)} have GPUs: name one with --partition")
    return chosen


def _require_some(chosen: Sequence[NodeGroup], site: SiteProfile, where: str) -> None:
    if not chosen:
        what = site.gpu_type or "GPUs"
        raise UsageError(f"no node of {where} has {what}: name another with --partition, or --device cpu")


def _equal_nodes(site: SiteProfile, groups: Sequence[NodeGroup]) -> _Nodes:
    kinds = {(gpu_count(site, group), site.gpu_type or "+".join(sorted(group.gpus))) for group in groups}
    if len(kinds) > 1:
        each = " or ".join(f"{gpus} {kind or 'GPUs'}" for gpus, kind in sorted(kinds))
        raise UsageError(
            f"nodes of the partition {groups[0].partition} have {each}: give --gpus-per-node, and a profile "
            f"(--site) with gpu_type or constraint that names one kind of node"
        )
    [(gpus, kind)] = kinds
    return _Nodes(
        partition=groups[0].partition,
        nodes=sum(group.nodes for group in groups),
        gpus=gpus,
        kind=kind,
        cpus=min(group.cpus for group in groups),
        longest_s=min(filter(None, (group.time_limit_s for group in groups)), default=None),
        most=min(filter(None, (group.most_nodes for group in groups)), default=None),
    )


def _within(limits: TimeLimits, longest_s: int | None) -> TimeLimits:
    """The limits, none of them above the longest time of a job."""
    if longest_s is None or longest_s >= seconds(limits.maximum):
        return limits
    longest = f"{longest_s}s"
    least = limits.minimum if seconds(limits.minimum) <= longest_s else longest
    return msgspec.structs.replace(limits, maximum=longest, minimum=least)
