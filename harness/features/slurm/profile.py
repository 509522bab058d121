"""The profile of the cluster that is here, for a user to complete."""

from __future__ import annotations

import sys

from results.store import utc_now
from slurm.client import Client
from slurm.cluster import Cluster
from slurm.defaults import with_defaults
from slurm.site import SiteProfile

_NOT_FOUND = """\
# Not found, because Slurm does not say it:
# exclusive: true              # whole nodes: other jobs on a node disturb the measurement
# gpu_model: H100-SXM5-80GB    # for times before the first run
# setup:                       # lines of bash before Python, such as
#   - module load cuda
# environment:
#   NCCL_SOCKET_IFNAME: ib0    # the interface of training
# price: {usd_per_gpu_hour: 2.5, source: "the price list of this site"}
"""


def found_profile(client: Client) -> str:
    """Describe the cluster as a commented profile, in YAML.

    Raises SlurmError if it does not answer, and UsageError where its nodes decide nothing.
    """
    cluster = client.cluster()
    if any(group.gpus for group in cluster.groups):
        site, words = with_defaults(SiteProfile(), cluster.groups)
        lines = [f"partition: {site.partition}", f"gpus_per_node: {site.gpus_per_node}"]
        lines += [f"cpus_per_gpu: {site.cpus_per_gpu}"]
        if site.time != SiteProfile().time:
            lines += ["time:", f"  minimum: {site.time.minimum}", f"  maximum: {site.time.maximum}"]
    else:
        words, lines = "no node has GPUs", ["gpu_request: none"]
    lines += [f"python: {sys.executable}    # must be there on the nodes, too", *_accounting(cluster)]
    head = [f"# The cluster {client.cluster_name}, as it answered at {utc_now()}: {words}."]
    return "\n".join([*head, *lines, ""]) + _NOT_FOUND


def _accounting(cluster: Cluster) -> list[str]:
    """Lines on accounts, QOS and the limit of jobs, as comments where several could be meant."""
    mine = cluster.associations
    if not mine:
        why = "accounting knows none of yours" if mine is not None else "your accounts are not known here"
        return [f"# account:                   # {why}"]
    accounts, qos = ({*(one.account for one in mine)}, {name for one in mine for name in one.qos})
    limits = [one.max_submit for one in mine if one.max_submit is not None]
    sure = "" if len(accounts) == 1 else "# "
    lines = [f"{sure}account: {sorted(accounts)[0]}    # yours: {', '.join(sorted(accounts))}"]
    lines += [f"# qos: {sorted(qos)[0]}    # yours: {', '.join(sorted(qos))}"] if qos else []
    return [*lines, *([f"submit_limit: {max(limits)}"] if len(limits) == len(mine) else [])]
