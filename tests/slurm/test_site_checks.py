"""A site profile against a cluster: each rule from both sides by hand-made facts, and on a real Slurm."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from approval import approved

from results.errors import UsageError
from results.site import TimeLimits
from slurm.client import Client
from slurm.cluster import Association, Cluster, NodeGroup, read_sinfo
from slurm.defaults import with_defaults
from slurm.site import SiteProfile
from slurm.site_checks import cluster_checks, over_limits

NODES = NodeGroup(
    partition="gpu",
    is_up=True,
    time_limit_s=86_400,
    nodes=4,
    state="idle",
    cpus=96,
    memory_mb=512_000,
    gpus={"h100": 8},
)
SERIAL = replace(NODES, partition="cpu", nodes=2, cpus=64, gpus={})
MINE = Association(account="ml", partition=None, qos=("normal", "long"), max_submit=50)
CLUSTER = Cluster(
    has_accounting=True,
    kill_wait_s=30,
    groups=(NODES, SERIAL),
    associations=(MINE,),
)
SITE: dict[str, Any] = {
    "partition": "gpu",
    "account": "ml",
    "gpu_type": "h100",
    "gpus_per_node": 8,
    "cpus_per_gpu": 12,
    "submit_limit": 50,
}
"""Nothing is wrong or doubtful with it."""
NO_GPUS: dict[str, Any] = {"gpu_request": "none", "gpu_type": None, "gpus_per_node": None}


def told(cluster: Cluster = CLUSTER, **changes: object) -> dict[str, tuple[str, str]]:
    """Level and words by key, for SITE with changes."""
    found = cluster_checks(SiteProfile(**(SITE | changes)), cluster)
    assert len({each.about for each in found}) == len(found), "a key twice"
    return {each.about: (each.level, each.words) for each in found}


def not_fine(found: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {about: level for about, (level, _) in found.items() if level != "fine"}


def nodes(**facts: Any) -> Cluster:
    """A cluster of NODES with other facts."""
    return replace(CLUSTER, groups=(replace(NODES, **facts),))


def beside(**facts: Any) -> Cluster:
    """A cluster of NODES and of others in their partition that differ in these facts."""
    return replace(CLUSTER, groups=(NODES, replace(NODES, **{"nodes": 2} | facts)))


def mine(*associations: Association) -> Cluster:
    return replace(CLUSTER, associations=associations)


def time(**limits: str) -> dict[str, Any]:
    return {"time": TimeLimits(**limits)}


SHORT, SECRET = nodes(time_limit_s=1800), replace(CLUSTER, associations=None)
CLOSED = replace(CLUSTER, groups=(NODES, replace(SERIAL, is_up=False)))
BIO = replace(MINE, account="bio")
RICH = mine(MINE, replace(BIO, max_submit=None))
LIMITLESS = mine(replace(MINE, max_submit=None))
CHECKS: list[tuple[str, str, Cluster, dict[str, Any]]] = [
    *((level, about, CLUSTER, {about: name})
      for about in ("partition", "serial_partition")
      for level, name in (("wrong", "gpus"), ("fine", "gpu"))),
    ("wrong", "partition", replace(CLUSTER, groups=()), {}),
    *(("wrong", about, CLOSED, NO_GPUS | {about: "cpu"})
      for about in ("partition", "serial_partition")),
    ("doubtful", "partition", CLUSTER, {"partition": None}),
    # The report's job does not ask for the reservation.
    *(("wrong", "partition", nodes(state=state), {}) for state in ("reserved", "maint", "mixed$")),
    *(("fine", "partition", nodes(state=state), {"reservation": "mine"})
      for state in ("reserved", "maint", "mixed$")),
    ("wrong", "serial_partition", nodes(state="maint"), {"reservation": "mine", "serial_partition": "gpu"}),
    ("wrong", "gpu_request", CLUSTER, {"partition": "cpu", "gpu_request": "gpus-per-node"}),
    ("doubtful", "gpu_request", beside(gpus={}), NO_GPUS),
    ("fine", "gpu_request", CLUSTER, NO_GPUS | {"partition": "cpu"}),
    ("wrong", "gpu_type", CLUSTER, {"gpu_type": "a100"}),
    ("wrong", "gpu_type", beside(gpus={"a100": 4}), {"gpu_type": "b200"}),
    ("fine", "gpu_type", CLUSTER, {"gpu_type": None}),
    ("doubtful", "gpu_type", beside(gpus={"a100": 4}), {"gpu_type": None}),
    ("fine", "gpu_type", beside(gpus={"a100": 4}), {}),
    ("wrong", "gpu_type", nodes(gpus={"": 8}), {}),
    ("wrong", "gpus_per_node", CLUSTER, {"gpus_per_node": 9}),
    ("doubtful", "gpus_per_node", CLUSTER, {"gpus_per_node": 7}),
    ("doubtful", "gpus_per_node", CLUSTER, {"gpus_per_node": None}),
    ("doubtful", "gpus_per_node", beside(gpus={"h100": 4}), {}),
    ("doubtful", "gpus_per_node", beside(gpus={"h100": 4}), {"gpus_per_node": None}),
    # Two types on one node, and either will do: 8 + 2.
    ("fine", "gpus_per_node", nodes(gpus={"h100": 8, "l4": 2}), {"gpu_type": None, "gpus_per_node": 10}),
    ("wrong", "gpus_per_node", nodes(gpus={"h100": 8, "l4": 2}), {"gpus_per_node": 10}),
    # 13 x 8 = 104 of 96; 96 / 8 = 12.
    ("wrong", "cpus_per_gpu", CLUSTER, {"cpus_per_gpu": 13}),
    ("wrong", "cpus_per_gpu", CLUSTER, {"cpus_per_gpu": 13, "gpus_per_node": None}),
    ("fine", "cpus_per_gpu", CLUSTER, {"cpus_per_gpu": 13, "gpus_per_node": 7}),
    ("wrong", "cpus_per_gpu", nodes(cpus=4), {}),
    ("doubtful", "cpus_per_gpu", beside(cpus=48), {}),
    ("fine", "cpus_per_gpu", beside(cpus=48), {"cpus_per_gpu": 6}),
    ("fine", "cpus_per_gpu", CLUSTER, NO_GPUS | {"partition": "cpu"}),
    ("doubtful", "cpus_per_gpu", CLUSTER, {"cpus_per_gpu": None}),
    ("fine", "cpus_per_gpu", CLUSTER, {"cpus_per_gpu": None, "exclusive": True}),
    # 500 x 1024 = 512000; 524288001 / 1024 = 512000.001, rounded up.
    *(("fine", "memory_per_node", CLUSTER, {"memory_per_node": size})
      for size in ("500G", "512000", "524288000K", "0", "0G")),
    *(("wrong", "memory_per_node", CLUSTER, {"memory_per_node": size})
      for size in ("501G", "512001M", "524288001K", "1T")),
    ("wrong", "time", SHORT, time(maximum="31m")),
    ("fine", "time", SHORT, time(maximum="30m")),
    ("wrong", "time", SHORT, time(minimum="1h", maximum="2h")),
    # Where a time is fixed, nothing else is asked for.
    ("fine", "time", SHORT, time(fixed="30m")),
    ("wrong", "time", SHORT, time(fixed="1h")),
    ("fine", "time", nodes(time_limit_s=None), time(maximum="90d")),
    ("fine", "time", nodes(time_limit_s=36 * 3600), {}),
    ("fine", "feed", CLUSTER, {}),
    ("doubtful", "feed", nodes(submitters="login1"), {}),
    # Half of 10 min, the default minimum.
    ("fine", "time.signal", CLUSTER, time(signal="5m")),
    ("doubtful", "time.signal", CLUSTER, time(signal="6m")),
    ("fine", "time.signal", CLUSTER, time(signal="6m", fixed="12m")),
    ("doubtful", "time.signal", CLUSTER, time(signal="6m", fixed="5m")),
    ("fine", "time.signal", replace(CLUSTER, kill_wait_s=None), {}),
    ("wrong", "submit_limit", CLUSTER, {"submit_limit": 51}),
    ("doubtful", "submit_limit", CLUSTER, {"submit_limit": None}),
    ("fine", "submit_limit", LIMITLESS, {"submit_limit": 51}),
    ("fine", "submit_limit", LIMITLESS, {"submit_limit": None}),
    # The limit of another account does not count, unless it is not known which account it will be.
    ("wrong", "submit_limit", RICH, {"submit_limit": 51}),
    ("fine", "submit_limit", RICH, {"account": None, "submit_limit": 51}),
    ("wrong", "account", mine(MINE, BIO), {"account": "ai"}),
    ("fine", "account", mine(MINE, BIO), {"account": "ML"}),
    ("fine", "account", mine(MINE, BIO), {"account": None}),
    ("doubtful", "account", mine(), {}),
    ("fine", "account", replace(SECRET, has_accounting=False), {}),
    ("doubtful", "account", SECRET, {}),
    ("doubtful", "account", SECRET, {"account": None, "qos": "long"}),
    ("fine", "account", SECRET, {"account": None}),
    ("fine", "qos", CLUSTER, {"qos": "Long"}),
    ("wrong", "qos", CLUSTER, {"qos": "fast"}),
    ("wrong", "qos", mine(MINE, replace(BIO, qos=("fast",))), {"qos": "fast"}),
    ("doubtful", "qos", mine(replace(MINE, qos=())), {"qos": "fast"}),
]  # fmt: skip
"""The level of a key's check, on a cluster, for SITE with changes."""


@pytest.mark.parametrize(("level", "about", "cluster", "changes"), CHECKS)
def test_a_rule_judges_from_both_sides(level, about, cluster, changes) -> None:
    found = cluster_checks(SiteProfile(**(SITE | changes)), cluster)
    assert {each.about: each.level for each in found}[about] == level


def test_the_words_of_each_check_are_those_that_were_approved() -> None:
    lines = [f"{about}: {level}: {words}" for about, (level, words) in told().items()]
    for _, about, cluster, changes in CHECKS:
        found = cluster_checks(SiteProfile(**(SITE | changes)), cluster)
        lines += [f"{each.about}: {each.level}: {each.words}" for each in found if each.about == about]
    approved(Path(__file__).parent / "golden" / "site_checks.txt", "\n".join(lines) + "\n")


def test_what_is_not_wrong_is_fine_in_every_respect() -> None:
    drained = replace(CLUSTER, groups=tuple(
        replace(NODES, nodes=number, state=state) for number, state in ((3, "drained"), (1, "mixed"))
    ))  # fmt: skip
    assert not_fine(told()) == {}
    assert not_fine(told(drained)) == {}, "one usable node is enough"
    assert not_fine(told(**NO_GPUS, partition="cpu")) == {}
    assert not_fine(told(beside(gpus={"a100": 4}))) == {}, "nodes with other GPUs are not asked for"
    assert not_fine(told(nodes(gpus={"": 8}), gpu_type=None)) == {}, "GPUs without a named type"
    bound = [replace(MINE, partition=partition) for partition in ("cpu", "gpu")]
    assert not_fine(told(mine(*bound))) == {}
    for given in (9, 7, None):
        found = told(gpus_per_node=given)
        assert set(not_fine(found)) == {"gpus_per_node"}, "the CPUs are counted for the GPUs there are"


def test_what_cannot_be_checked_is_left_out() -> None:
    assert not {"gpu_type", "cpus_per_gpu", "memory_per_node", "time"} & set(told(partition=None))
    without = told(partition="cpu", gpu_request="gpus-per-node")
    assert not {"gpu_type", "gpus_per_node", "cpus_per_gpu"} & set(without)
    # Which account it will be is not known: what one of them allows is not wrong.
    assert told(mine(MINE, replace(BIO, max_submit=10)), account=None) == told(mine(MINE, BIO), account=None)


@pytest.mark.parametrize(
    ("partition", "cluster", "wrong"),
    [
        (
            {"partition": "gpu, cpu"},
            CLUSTER,
            [("gpu_request", "gres, but cpu has no GPUs; name a partition that has, or write none")],
        ),
        (
            {"serial_partition": "cpu"},
            mine(replace(MINE, partition="cpu")),
            [("partition", "gpu is not one that your account may use; write cpu")],
        ),
    ],
)
def test_each_of_several_partitions_is_checked(partition, cluster, wrong) -> None:
    found = cluster_checks(SiteProfile(**(SITE | partition)), cluster)
    assert [(each.about, each.words) for each in found if each.level == "wrong"] == wrong


@pytest.mark.parametrize(
    ("sizes", "nodes", "words"),
    [("2-4", 1, "at least 2;"), ("2-4", 4, None), ("3", 4, "at most 3;"), ("1-infinite", 9_999, None)],
)
def test_a_job_has_as_many_nodes_as_its_partition_allows(sizes, nodes, words) -> None:
    why = over_limits(
        SiteProfile(partition="p"), nodes, 60, read_sinfo(f"p|up|1:00|{sizes}|9|idle|8|10||all\n")
    )
    assert (why is None) if words is None else (words in str(why))


@pytest.mark.parametrize(
    ("usable", "states"),
    [
        (True, "idle mixed allocated completing planned"),
        # Planned, completing, powered down, powering up: they will take jobs.
        (True, "mixed- allocated+ idle~ idle# mixed#"),
        (False, "down down* drained drained* draining fail failing"),
        (False, "idle* mixed* idle$ maint reserved reboot^ idle@"),
        (False, "unknown inval blocked future melted undrained"),
    ],
)
def test_a_state_takes_jobs_or_not(usable, states) -> None:
    for state in states.split():
        level, words = told(replace(CLUSTER, groups=(replace(NODES, state=state), SERIAL)))["partition"]
        count, advice = (4, "") if usable else (0, "; wait for them, or name another")
        assert level == ("fine" if usable else "wrong"), state
        assert words == f"{count} of 4 nodes of gpu are usable ({state}){advice}"


LAB = SiteProfile(partition="main", gpu_type="h100", gpus_per_node=8, cpus_per_gpu=2, memory_per_node="0")


def test_a_right_profile_on_a_real_cluster(lab) -> None:
    found = cluster_checks(LAB, Client().cluster())
    assert {each.level for each in found} == {"fine"}


def test_a_wrong_profile_on_a_real_cluster(lab) -> None:
    site = SiteProfile(
        partition="main", gpu_type="h100", gpus_per_node=9, cpus_per_gpu=2, time=TimeLimits(maximum="2d")
    )
    found = cluster_checks(site, Client().cluster())
    assert {each.about: each.words for each in found if each.level == "wrong"} == {
        "gpus_per_node": "9, but there are at most 8 GPUs a node of main; write 8",
        "time": "maximum 2d, but the limit of main is 1d; write at most 1d",
    }
    site = SiteProfile(
        partition="short", gpu_type="a100", serial_partition="long", time=TimeLimits(fixed="30m")
    )
    found = cluster_checks(site, Client().cluster())
    assert {each.about: each.words for each in found if each.level == "wrong"} == {
        "gpu_type": "a100, but the GPUs of short are h100; write h100",
        "serial_partition": "long is not one that sinfo shows; write one of main, short, urgent",
    }


def test_nodes_and_partitions_that_are_taken_out(lab) -> None:
    lab.command("scontrol", "update", "nodename=n1,n2", "state=drain", "reason=test")
    try:
        words = {each.about: each.words for each in cluster_checks(LAB, Client().cluster())}
        assert words["partition"] == "2 of 4 nodes of main are usable (drained, idle)"
        lab.command("scontrol", "update", "partitionname=main", "state=drain")
        found = cluster_checks(LAB, Client().cluster())
        assert found[0].level == "wrong"
        assert found[0].words.startswith("main is not up")
    finally:
        lab.command("scontrol", "update", "partitionname=main", "state=up")
        lab.command("scontrol", "update", "nodename=n1,n2", "state=resume")


# What a profile leaves out

DEFAULT = replace(SERIAL, is_default=True)
OTHER = replace(NODES, partition="old", gpus={"v100": 4}, cpus=40)


def test_the_only_partition_with_gpus_gives_what_the_profile_leaves_out() -> None:
    site, words = with_defaults(SiteProfile(), [DEFAULT, NODES, replace(NODES, nodes=2, state="mixed")])
    assert (site.partition, site.gpus_per_node, site.cpus_per_gpu) == ("gpu", 8, 12)
    assert words == "6 nodes of 8 h100 and 96 CPUs in partition gpu, jobs of at most 24 h"


@pytest.mark.parametrize(
    ("site", "partition", "gpus", "cpus"),
    [
        (SiteProfile(partition="old"), "old", 4, 10),
        (SiteProfile(gpu_type="v100"), "old", 4, 10),
        (SiteProfile(partition="gpu", cpus_per_gpu=3), "gpu", 8, 3),
        (SiteProfile(partition="gpu", exclusive=True), "gpu", 8, None),
    ],
)
def test_what_the_profile_says_stays_and_chooses_the_nodes(site, partition, gpus, cpus) -> None:
    found, _ = with_defaults(site, [NODES, OTHER, SERIAL])
    assert (found.partition, found.gpus_per_node, found.cpus_per_gpu) == (partition, gpus, cpus)


def test_the_default_partition_is_taken_where_several_have_gpus() -> None:
    assert with_defaults(SiteProfile(), [NODES, replace(OTHER, is_default=True)])[0].partition == "old"


def test_a_job_is_no_longer_than_the_partition_allows() -> None:
    limits = with_defaults(SiteProfile(), [replace(NODES, time_limit_s=300)])[0].time
    assert limits.limit_s(1e6) == 300


@pytest.mark.parametrize(
    ("site", "groups", "says"),
    [
        ({}, [NODES, OTHER], "the partitions gpu, old have GPUs: name one with --partition"),
        ({}, [DEFAULT], "no node of a partition that is up has GPUs: name another with --partition"),
        ({"partition": "cpu"}, [NODES, SERIAL], "no node of the partition cpu has GPUs"),
        ({"gpu_type": "b200"}, [NODES], "has b200"),
        ({}, [NODES, replace(NODES, gpus={"h100": 4})], "have 4 h100 or 8 h100: give --gpus-per-node"),
        ({}, [NODES, replace(NODES, gpus={"a100": 8})], "have 8 a100 or 8 h100: give --gpus-per-node"),
    ],
)
def test_nodes_that_decide_nothing_are_refused_with_the_flag_to_give(site, groups, says) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        with_defaults(SiteProfile(**site), groups)


def test_sinfo_marks_the_default_partition() -> None:
    first, second = read_sinfo(
        "main*|up|1:00|1-infinite|1|idle|8|10||all\nbig|up|1:00|1-infinite|1|idle|8|10||all\n"
    )
    assert (first.partition, first.is_default, second.is_default) == ("main", True, False)
