"""Checks of a site profile with a live cluster: pure functions of the facts of `Client.cluster`.

The scheduler decides in the end (`Client.check`), but with EnforcePartLimits=NO, Slurm's default, it accepts
jobs that can never start, and it never reports that a job would measure the wrong nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from results.site import SiteCheck, seconds
from slurm.cluster import Association, Cluster, NodeGroup
from slurm.site import SiteProfile

_wrong = partial(SiteCheck, "wrong")
_doubtful = partial(SiteCheck, "doubtful")
_fine = partial(SiteCheck, "fine")


def cluster_checks(site: SiteProfile, cluster: Cluster) -> tuple[SiteCheck, ...]:
    """Check the profile against the cluster's description, in the order of the profile's keys."""
    return (*_partitions(site, cluster), _signal(site, cluster), *_accounting(site, cluster))


def over_limits(
    site: SiteProfile, nodes: int, time_limit_s: float, groups: Sequence[NodeGroup]
) -> str | None:
    """Return why no partition of the profile starts a job of this size; None if one does, or if that is not
    known.

    With EnforcePartLimits=NO Slurm accepts such a job and keeps it waiting.
    """
    found = [
        _over(name, nodes, time_limit_s, group)
        for name in names_in(site.partition)
        for group in groups
        if group.partition == name
    ]
    return None if not found or None in found else found[0]


def _over(name: str, nodes: int, time_limit_s: float, group: NodeGroup) -> str | None:
    most = group.most_nodes
    if nodes < group.least_nodes or (most is not None and nodes > most):
        allowed = f"at least {group.least_nodes}" if nodes < group.least_nodes else f"at most {most}"
        return (
            f"it asks for {nodes} node{'s' * (nodes > 1)}, and a job in {name} has {allowed}; "
            f"leave its sizes out of --gpus, or name another --partition"
        )
    if group.time_limit_s is not None and time_limit_s > group.time_limit_s:
        limit = _written(group.time_limit_s)
        return (
            f"it asks for {_written(time_limit_s)}, and a job in {name} has at most {limit}; "
            f"give --time {limit}, write time.maximum: {limit} in the profile, or name another --partition"
        )
    return None


def _partitions(site: SiteProfile, cluster: Cluster) -> Iterator[SiteCheck]:
    if site.partition is None:
        advice = _write(group.partition for group in cluster.groups)
        words = f"left to Slurm, so nodes and times are not checked; to have them checked, {advice}"
        yield _doubtful("partition", words)
    for name in names_in(site.partition):
        groups = [group for group in cluster.groups if group.partition == name]
        yield _partition("partition", name, groups, cluster, reserved=site.reservation is not None)
        if groups:
            yield from _gpus(site, name, groups)
            if asked_for := _asked_for(site, groups):
                yield _cpus(site, name, asked_for)
                yield _memory(site.memory_per_node, name, asked_for)
            yield _time(site, name, groups[0].time_limit_s)
            yield _feeding(name, groups[0].submitters)
    for name in names_in(site.serial_partition):
        groups = [group for group in cluster.groups if group.partition == name]
        yield _partition("serial_partition", name, groups, cluster)


def names_in(partition: str | None) -> list[str]:
    """Return the names in a key: of several partitions, Slurm starts a job in the first with free nodes."""
    return [] if partition is None else [name.strip() for name in partition.split(",")]


_USABLE = re.compile(r"(?:allocated|completing|idle|mixed|planned|powered_down|powering_up)[-+~#!%]?")
"""States that accept jobs, now, after others or after powering up (NODE STATE CODES in sinfo's manual).

The signs mean planned (-), completing (+), and powered down, up, or about to be (~ # ! %). The signs for a
node that does not answer (*), is in maintenance ($) or restarts (@ ^) are not included.
"""
_RESERVED = re.compile(r"reserved|maint|(?:allocated|completing|idle|mixed|planned)\$")
"""States that accept the jobs of a reservation."""


def _partition(
    about: str, name: str, groups: Sequence[NodeGroup], cluster: Cluster, *, reserved: bool = False
) -> SiteCheck:
    if not groups:
        advice = _write(group.partition for group in cluster.groups)
        return _wrong(about, f"{name} is not one that sinfo shows; {advice}")
    if not groups[0].is_up:
        return _wrong(about, f"{name} is not up and starts no jobs; wait for it, or name another")
    taking = (_USABLE, _RESERVED) if reserved else (_USABLE,)
    usable = _nodes(groups, lambda group: any(state.fullmatch(group.state) for state in taking))
    states = _listed(group.state for group in groups)
    words = f"{usable} of {_nodes(groups)} nodes of {name} are usable ({states})"
    return _fine(about, words) if usable else _wrong(about, f"{words}; wait for them, or name another")


def _nodes(groups: Iterable[NodeGroup], which: Callable[[NodeGroup], bool] = lambda _: True) -> int:
    return sum(group.nodes for group in groups if which(group))


def _gpus(site: SiteProfile, name: str, groups: Sequence[NodeGroup]) -> Iterator[SiteCheck]:
    having = [group for group in groups if group.gpus]
    types = _listed((kind for group in having for kind in group.gpus if kind), otherwise="of no named type")
    if site.gpu_request == "none" and having:
        there = f"{_nodes(having)} of {_nodes(groups)} nodes of {name} have GPUs ({types})"
        words = f"none, but {there}; write gres or gpus-per-node, or name a partition without GPUs"
        yield _doubtful("gpu_request", words)
    elif site.gpu_request == "none":
        yield _fine("gpu_request", f"none, and {name} has no GPUs")
    elif not having:
        words = f"{site.gpu_request}, but {name} has no GPUs; name a partition that has, or write none"
        yield _wrong("gpu_request", words)
    else:
        yield _gpu_type(site.gpu_type, name, having, types)
        if fitting := _asked_for(site, groups):
            yield _gpus_per_node(site, name, fitting)


def _gpu_type(kind: str | None, name: str, having: Sequence[NodeGroup], types: str) -> SiteCheck:
    kinds = {kind for group in having for kind in group.gpus}
    if kind is None and len(kinds) > 1:
        return _doubtful("gpu_type", f"left out, but GPUs of {name} are {types}, and jobs get any; name one")
    if kind is None:
        return _fine("gpu_type", f"left out; all GPUs of {name} are {types}")
    if kind in kinds:
        there = _nodes(having, lambda group: kind in group.gpus)
        return _fine("gpu_type", f"{there} nodes of {name} have {kind}")
    advice = _write(filter(None, kinds)) if any(kinds) else "leave it out"
    return _wrong("gpu_type", f"{kind}, but the GPUs of {name} are {types}; {advice}")


def _asked_for(site: SiteProfile, groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Return the nodes with the GPUs that the profile asks for."""
    return [group for group in groups if site.gpu_request == "none" or gpu_count(site, group)]


def gpu_count(site: SiteProfile, group: NodeGroup) -> int:
    """Return the number of GPUs of a node that a job of this profile could have."""
    return sum(group.gpus.values()) if site.gpu_type is None else group.gpus.get(site.gpu_type, 0)


def _gpus_per_node(site: SiteProfile, name: str, groups: Sequence[NodeGroup]) -> SiteCheck:
    about, given = "gpus_per_node", site.gpus_per_node
    sizes = [(gpu_count(site, group), group.nodes) for group in groups]
    most, there = max(sizes)[0], f"nodes of {name} have {_span(sizes)}"
    if given is None:
        return _doubtful(about, f"left out; {there}; write {most}")
    if given < most:
        idle = f"{given}, but {there}: the others would stay idle; write {most}"
        return _doubtful(about, idle)
    return _fit(about, str(given), given, sizes, f"GPUs a node of {name}", f"write {most}")


def _cpus(site: SiteProfile, name: str, groups: Sequence[NodeGroup]) -> SiteCheck:
    about, each = "cpus_per_gpu", site.cpus_per_gpu
    # Without GPUs the number of workers of a full node is not known; at least one must fit.
    workers, what = 1, "1 rank"
    if site.gpu_request != "none":
        gpus = max(gpu_count(site, group) for group in groups)
        # More GPUs than a node has is reported as an error of gpus_per_node.
        workers = min(site.gpus_per_node or gpus, gpus)
        what = f"{workers} GPU{'s' * (workers > 1)}"
    most = max(group.cpus for group in groups)
    share = most // workers
    if each is None and site.exclusive:
        words = f"left out; a job has all {most} CPUs of its nodes of {name} for itself"
        return _fine(about, words)
    if each is None:
        there = f"nodes of {name} have {most} CPUs for {what}"
        words = f"left out, so a job may get one CPU a node; {there}; write {max(1, share)}"
        return _doubtful(about, words)
    asked = f"{each} x {what} = {each * workers}"
    sizes = [(group.cpus, group.nodes) for group in groups]
    advice = f"write at most {share}" if share else "leave it out"
    return _fit(about, asked, each * workers, sizes, f"CPUs a node of {name}", advice)


_UNIT_KB = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}


def _memory(size: str | None, name: str, groups: Sequence[NodeGroup]) -> SiteCheck:
    about, most = "memory_per_node", max(group.memory_mb for group in groups)
    if size is None:
        return _fine(about, f"left to Slurm; nodes of {name} have up to {most} MB")
    unit = size[-1] if size[-1] in _UNIT_KB else "M"
    # Slurm counts in MiB, which it calls MB, and rounds up.
    need_mb = -(-int(size.removesuffix(unit)) * _UNIT_KB[unit] // 1024)
    if not need_mb:
        return _fine(about, f"{size} is all of a node; nodes of {name} have up to {most} MB")
    sizes = [(group.memory_mb, group.nodes) for group in groups]
    advice = f"write at most {most}M, or 0 for all"
    return _fit(about, f"{size} = {need_mb} MB", need_mb, sizes, f"MB a node of {name}", advice)


def _fit(
    about: str, asked: str, need: int, sizes: Sequence[tuple[int, int]], what: str, advice: str
) -> SiteCheck:
    """Check whether nodes, given as (size of a node, number of nodes), have the needed size."""
    most, least, every = max(sizes)[0], min(sizes)[0], sum(nodes for _, nodes in sizes)
    enough = sum(nodes for size, nodes in sizes if size >= need)
    if not enough:
        return _wrong(about, f"{asked}, but there are at most {most} {what}; {advice}")
    if enough < every:
        there = f"{enough} of {every} nodes have as much, the least {least} {what}"
        return _doubtful(about, f"{asked}; {there}; ask for less, or choose nodes with constraint")
    return _fine(about, f"{asked}; there are {_span(sizes)} {what}")


def _span(sizes: Sequence[tuple[int, int]]) -> str:
    least, most = min(sizes)[0], max(sizes)[0]
    return str(most) if least == most else f"{least} to {most}"


def _time(site: SiteProfile, name: str, limit_s: int | None) -> SiteCheck:
    if limit_s is None:
        return _fine("time", f"sinfo shows no limit of {name}")
    keys = ("fixed",) if site.time.fixed is not None else ("minimum", "maximum")
    texts = {key: getattr(site.time, key) for key in keys}
    too_long = [f"{key} {text}" for key, text in texts.items() if seconds(text) > limit_s]
    limit = _written(limit_s)
    if too_long:
        given = " and ".join(too_long)
        return _wrong("time", f"{given}, but the limit of {name} is {limit}; write at most {limit}")
    return _fine("time", f"{keys[-1]} {texts[keys[-1]]}; the limit of {name} is {limit}")


def _feeding(name: str, submitters: str) -> SiteCheck:
    """Whether a job of --feed depend may submit the next ones."""
    if submitters == "all":
        return _fine("feed", f"every host may submit to {name}, as --feed depend needs")
    words = f"only {submitters} may submit to {name} (AllocNodes): use --feed wait if these are not its nodes"
    return _doubtful("feed", words)


def _written(time_s: float) -> str:
    """Return a time in the notation of a profile, in the largest unit without a fraction."""
    units = {86_400: "d", 3600: "h", 60: "m"}
    size = next((size for size in units if time_s % size == 0), 1)
    return f"{time_s / size:g}{units.get(size, 's')}"


def _signal(site: SiteProfile, cluster: Cluster) -> SiteCheck:
    key = "minimum" if site.time.fixed is None else "fixed"
    shortest_s = site.time.limit_s(0)
    told_s = site.time.signal_s(shortest_s)
    if seconds(site.time.signal) > shortest_s / 2:
        given = f"{site.time.signal}, but a job of time.{key} {_written(shortest_s)}"
        most = _written(shortest_s / 2)
        return _doubtful(
            "time.signal", f"{given} gets its signal {told_s} s before its limit; write at most {most}"
        )
    wait_s = cluster.kill_wait_s
    end = "KillWait is not known" if wait_s is None else f"it is killed {wait_s} s after it (KillWait)"
    return _fine("time.signal", f"a job gets its signal {told_s} s before its limit; {end}")


def _accounting(site: SiteProfile, cluster: Cluster) -> Iterator[SiteCheck]:
    if cluster.associations is None:
        why = "you may not ask" if cluster.has_accounting else "the cluster has no accounting"
        given = cluster.has_accounting and (site.account or site.qos)
        words = f"accounts, QOS and limits are not known here: {why}; they are not checked"
        yield (_doubtful if given else _fine)("account", words)
    elif not cluster.associations:
        words = "accounting knows no account of yours here; if jobs are refused, ask for one"
        yield _doubtful("account", words)
    else:
        yield from _associated(site, cluster.associations)


def _associated(site: SiteProfile, mine: Sequence[Association]) -> Iterator[SiteCheck]:
    accounts = {each.account for each in mine}
    chosen = [each for each in mine if site.account is None or _same(each.account, site.account)]
    if not chosen:
        yield _wrong("account", f"{site.account} is not one of yours; {_write(accounts)}")
        return
    given = "left to Slurm" if site.account is None else site.account
    yield _fine("account", f"{given}; yours: {_listed(accounts)}")
    for about, partition in (("partition", site.partition), ("serial_partition", site.serial_partition)):
        for name in names_in(partition):
            if not any(each.partition in (None, name) for each in chosen):
                advice = _write(each.partition or "" for each in chosen)
                yield _wrong(about, f"{name} is not one that your account may use; {advice}")
    yield _qos(site.qos, chosen)
    yield _submit_limit(site.submit_limit, chosen)


def _qos(qos: str | None, chosen: Sequence[Association]) -> SiteCheck:
    allowed = {name for each in chosen for name in each.qos}
    words = f"your account may use {_listed(allowed, otherwise='none that is known')}"
    if qos is None:
        return _fine("qos", f"left to Slurm; {words}")
    if not allowed:
        return _doubtful("qos", f"{qos}, but {words}; leave it out if jobs are refused")
    if any(_same(name, qos) for name in allowed):
        return _fine("qos", f"{qos}; {words}")
    return _wrong("qos", f"{qos} is not one that your account may use; {_write(allowed)}")


def _submit_limit(given: int | None, chosen: Sequence[Association]) -> SiteCheck:
    about, limits = "submit_limit", [each.max_submit for each in chosen]
    known = [limit for limit in limits if limit is not None]
    if len(known) < len(limits):
        asked = "left out" if given is None else str(given)
        return _fine(about, f"{asked}; no limit of your account's is known")
    most = max(known)
    there = f"your account may have {most} jobs in the queue"
    if given is None:
        return _doubtful(about, f"left out, but {there}; write {most}")
    if given > most:
        return _wrong(about, f"{given}, but {there}; write {most}")
    return _fine(about, f"{given}; {there}")


def _same(one: str, other: str) -> bool:
    """Return whether names of accounts or QOS are equal: Slurm keeps them in lower case."""
    return one.lower() == other.lower()


def _listed(names: Iterable[str], *, otherwise: str = "none") -> str:
    return ", ".join(sorted(set(names))) or otherwise


def _write(names: Iterable[str]) -> str:
    """Return the advice to write one of the names, in alphabetical order."""
    each = sorted(set(names))
    if not each:
        return "there is none"
    return f"write {each[0]}" if len(each) == 1 else f"write one of {', '.join(each)}"
