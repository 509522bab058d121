"""Completes a site profile by the cluster's own description of its nodes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from results.errors import UsageError
from results.site import seconds
from slurm.cluster import NodeGroup
from slurm.site import SiteProfile
from slurm.site_checks import gpu_count


def with_defaults(site: SiteProfile, groups: Sequence[NodeGroup]) -> tuple[SiteProfile, str]:
    """Complete a profile of GPUs by the nodes of its partition, or of the only partition that has such GPUs.

    Returns the profile, and what the cluster says of the nodes, a clause. Raises UsageError with the flag to
    give where these nodes differ, or several partitions have GPUs.
    """
    name, chosen = _partition(site, [group for group in groups if gpu_count(site, group)])
    counts = {gpu_count(site, group) for group in chosen}
    kinds = sorted({kind for group in chosen for kind in group.gpus})
    if len(counts) > 1 or (site.gpu_type is None and len(kinds) > 1):
        each = sorted({f"{count} {kind or 'GPUs'}" for group in chosen for kind, count in group.gpus.items()})
        raise UsageError(
            f"nodes of the partition {name} have {' or '.join(each)}: give --gpus-per-node, and a profile "
            f"(--site) with gpu_type or constraint that names one kind of node"
        )
    [gpus], cpus = counts, min(group.cpus for group in chosen)
    limits = [group.time_limit_s for group in chosen if group.time_limit_s is not None]
    most_nodes = min((group.most_nodes for group in chosen if group.most_nodes is not None), default=None)
    time = site.time
    if limits and min(limits) < seconds(time.maximum):
        maximum = f"{min(limits)}s"
        least = time.minimum if seconds(time.minimum) <= min(limits) else maximum
        time = msgspec.structs.replace(time, maximum=maximum, minimum=least)
    share = max(1, cpus // gpus) if site.cpus_per_gpu is None and not site.exclusive else site.cpus_per_gpu
    nodes = sum(group.nodes for group in chosen)
    kind = site.gpu_type or kinds[0]
    words = (
        f"{nodes} node{'s' * (nodes > 1)} of {gpus} {kind or 'GPUs'} and {cpus} CPUs in partition {name}"
        + (f", jobs of at most {min(limits) / 3600:.3g} h" if limits else "")
        + (f", {most_nodes} nodes" if most_nodes is not None else "")
    )
    whole = msgspec.structs.replace(site, partition=name, gpus_per_node=gpus, cpus_per_gpu=share, time=time)
    return whole, words


def _partition(site: SiteProfile, having: Sequence[NodeGroup]) -> tuple[str, list[NodeGroup]]:
    """The partition that jobs ask for, and its nodes that have GPUs of the profile."""
    names = dict.fromkeys(group.partition for group in having if group.is_up)
    if site.partition is not None:
        names = dict.fromkeys(name.strip() for name in site.partition.split(","))
    elif default := [group.partition for group in having if group.is_default]:
        names = dict.fromkeys(default)
    chosen = [group for group in having if group.partition in names]
    if not chosen:
        kind = site.gpu_type or "GPUs"
        where = f"the partition {site.partition}" if site.partition else "a partition that is up"
        raise UsageError(f"no node of {where} has {kind}: name another with --partition, or --device cpu")
    if len(names) > 1 and site.partition is None:
        raise UsageError(f"the partitions {', '.join(names)} have GPUs: name one with --partition")
    return ",".join(names), chosen
