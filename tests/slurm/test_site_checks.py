"""A site profile against a cluster: each rule from both sides by hand-made facts, and on a real Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli import run
from results.site import TimeLimits
from slurm.client import Client
from slurm.cluster import Association, Cluster, NodeGroup, read_sinfo
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
    name="test",
    version="24.05.1",
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


def told(*groups: NodeGroup, cluster: Cluster = CLUSTER, **changes: object) -> dict[str, tuple[str, str]]:
    """Level and words by key, for SITE with changes, on CLUSTER or on one of these groups."""
    where = replace(cluster, groups=groups) if groups else cluster
    found = cluster_checks(SiteProfile(**(SITE | changes)), where)
    assert len({each.about for each in found}) == len(found), "a key twice"
    return {each.about: (each.level, each.words) for each in found}


def not_fine(found: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {about: level for about, (level, _) in found.items() if level != "fine"}


def mine(*associations: Association) -> Cluster:
    return replace(CLUSTER, associations=associations)


def test_a_right_profile_is_fine_in_every_respect() -> None:
    assert told() == {
        "partition": ("fine", "4 of 4 nodes of gpu are usable (idle)"),
        "gpu_type": ("fine", "4 nodes of gpu have h100"),
        "gpus_per_node": ("fine", "8; there are 8 GPUs a node of gpu"),
        "cpus_per_gpu": ("fine", "12 x 8 GPUs = 96; there are 96 CPUs a node of gpu"),
        "memory_per_node": ("fine", "left to Slurm; nodes of gpu have up to 512000 MB"),
        "time": ("fine", "maximum 1d; the limit of gpu is 1d"),
        "time.signal": (
            "fine",
            "a job is told 120 s before its limit; it is killed 30 s after it (KillWait)",
        ),
        "account": ("fine", "ml; yours: ml"),
        "qos": ("fine", "left to Slurm; your account may use long, normal"),
        "submit_limit": ("fine", "50; your account may have 50 jobs in the queue"),
    }


@pytest.mark.parametrize(
    ("sizes", "nodes", "words"),
    [("2-4", 1, "at least 2;"), ("2-4", 4, None), ("3", 4, "at most 3;"), ("1-infinite", 9_999, None)],
)
def test_a_job_has_as_many_nodes_as_its_partition_allows(sizes: str, nodes: int, words: str | None) -> None:
    why = over_limits(SiteProfile(partition="p"), nodes, 60, read_sinfo(f"p|up|1:00|{sizes}|9|idle|8|10|\n"))
    assert (why is None) if words is None else (words in str(why))


@pytest.mark.parametrize("about", ["partition", "serial_partition"])
def test_a_partition_must_be_there(about: str) -> None:
    words = "gpus is not one that sinfo shows; write one of cpu, gpu"
    assert told(**{about: "gpus"})[about] == ("wrong", words)
    assert told(**{about: "gpu"})[about][0] == "fine"
    nothing = cluster_checks(SiteProfile(partition="gpu"), replace(CLUSTER, groups=()))
    assert nothing[0].words == "gpu is not one that sinfo shows; there is none"


@pytest.mark.parametrize("about", ["partition", "serial_partition"])
def test_a_partition_must_be_up(about: str) -> None:
    closed = replace(SERIAL, is_up=False)
    found = told(NODES, closed, gpu_request="none", gpu_type=None, gpus_per_node=None, **{about: "cpu"})
    assert found[about] == ("wrong", "cpu is not up and starts no jobs; wait for it, or name another")


def test_without_a_partition_slurm_decides() -> None:
    found = told(partition=None)
    assert found["partition"] == (
        "doubtful",
        "left to Slurm, so nodes and times are not checked; to have them checked, write one of cpu, gpu",
    )
    assert not {"gpu_type", "cpus_per_gpu", "memory_per_node", "time"} & set(found)


def test_each_of_several_partitions_is_checked() -> None:
    found = cluster_checks(SiteProfile(**(SITE | {"partition": "gpu, cpu"})), CLUSTER)
    wrong = [(each.about, each.words) for each in found if each.level == "wrong"]
    words = "gres, but cpu has no GPUs; name a partition that has, or write none"
    assert wrong == [("gpu_request", words)]


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        *[(state, True) for state in ("idle", "mixed", "allocated", "completing", "planned")],
        # Planned, completing, powered down, powering up: they will take jobs.
        *[(state, True) for state in ("mixed-", "allocated+", "idle~", "idle#", "mixed#")],
        *[
            (state, False)
            for state in ("down", "down*", "drained", "drained*", "draining", "fail", "failing")
        ],
        *[(state, False) for state in ("idle*", "mixed*", "idle$", "maint", "reserved", "reboot^", "idle@")],
        *[(state, False) for state in ("unknown", "inval", "blocked", "future", "melted", "undrained")],
    ],
)
def test_a_state_takes_jobs_or_not(state: str, usable: bool) -> None:
    level, words = told(replace(NODES, state=state), SERIAL)["partition"]
    count, advice = (4, "") if usable else (0, "; wait for them, or name another")
    assert (level, words) == (
        "fine" if usable else "wrong",
        f"{count} of 4 nodes of gpu are usable ({state}){advice}",
    )


def test_one_usable_node_is_enough() -> None:
    groups = (replace(NODES, nodes=3, state="drained"), replace(NODES, nodes=1, state="mixed"))
    found = told(*groups)
    assert found["partition"] == ("fine", "1 of 4 nodes of gpu are usable (drained, mixed)")
    assert not_fine(found) == {}


@pytest.mark.parametrize("state", ["reserved", "maint", "mixed$"])
def test_reserved_nodes_are_for_those_with_the_reservation(state: str) -> None:
    nodes = replace(NODES, state=state)
    assert told(nodes)["partition"][0] == "wrong"
    assert told(nodes, reservation="mine")["partition"][0] == "fine"
    # The report's job does not ask for the reservation.
    both = told(nodes, reservation="mine", serial_partition="gpu")
    assert both["serial_partition"][0] == "wrong"


def test_gpus_where_there_are_none() -> None:
    found = told(partition="cpu", gpu_request="gpus-per-node")
    words = "gpus-per-node, but cpu has no GPUs; name a partition that has, or write none"
    assert found["gpu_request"] == ("wrong", words)
    assert not {"gpu_type", "gpus_per_node", "cpus_per_gpu"} & set(found)


def test_no_gpus_asked_of_nodes_that_have_them() -> None:
    without: dict[str, Any] = {"gpu_request": "none", "gpu_type": None, "gpus_per_node": None}
    plain = replace(NODES, nodes=2, gpus={})
    assert told(NODES, plain, **without)["gpu_request"] == (
        "doubtful",
        "none, but 4 of 6 nodes of gpu have GPUs (h100); "
        "write gres or gpus-per-node, or name a partition without GPUs",
    )
    found = told(**without, partition="cpu")
    assert found["gpu_request"] == ("fine", "none, and cpu has no GPUs")
    assert found["cpus_per_gpu"] == ("fine", "12 x 1 rank = 12; there are 64 CPUs a node of cpu")
    assert not_fine(found) == {}


def test_the_type_of_gpu() -> None:
    older = replace(NODES, nodes=2, gpus={"a100": 4})
    assert told(gpu_type="a100")["gpu_type"] == (
        "wrong",
        "a100, but the GPUs of gpu are h100; write h100",
    )
    assert told(NODES, older, gpu_type="b200")["gpu_type"][1].endswith(
        "are a100, h100; write one of a100, h100"
    )
    assert told(gpu_type=None)["gpu_type"] == ("fine", "left out; all GPUs of gpu are h100")
    assert told(NODES, older, gpu_type=None)["gpu_type"] == (
        "doubtful",
        "left out, but GPUs of gpu are a100, h100, and jobs get any; name one",
    )
    found = told(NODES, older)
    assert found["gpu_type"] == ("fine", "4 nodes of gpu have h100")
    assert not_fine(found) == {}, "nodes with other GPUs are not asked for"


def test_gpus_without_a_named_type() -> None:
    nameless = replace(NODES, gpus={"": 8})
    words = "h100, but the GPUs of gpu are of no named type; leave it out"
    assert told(nameless)["gpu_type"] == ("wrong", words)
    assert not_fine(told(nameless, gpu_type=None)) == {}


@pytest.mark.parametrize(
    ("given", "level", "words"),
    [
        (9, "wrong", "9, but there are at most 8 GPUs a node of gpu; write 8"),
        (8, "fine", "8; there are 8 GPUs a node of gpu"),
        (7, "doubtful", "7, but nodes of gpu have 8: the others would stay idle; write 8"),
        (None, "doubtful", "left out; nodes of gpu have 8; write 8"),
    ],
)
def test_gpus_of_a_node(given: int | None, level: str, words: str) -> None:
    found = told(gpus_per_node=given)
    assert found["gpus_per_node"] == (level, words)
    assert set(not_fine(found)) <= {"gpus_per_node"}, "the CPUs are counted for the GPUs there are"


def test_gpus_of_unequal_nodes() -> None:
    small = replace(NODES, nodes=2, gpus={"h100": 4})
    assert told(NODES, small)["gpus_per_node"] == (
        "doubtful",
        "8; 4 of 6 nodes have as much, the least 4 GPUs a node of gpu; "
        "ask for less, or choose nodes with constraint",
    )
    assert told(NODES, small, gpus_per_node=None)["gpus_per_node"][1].startswith(
        "left out; nodes of gpu have 4 to 8"
    )
    # Two types on one node, and either will do: 8 + 2.
    both = replace(NODES, gpus={"h100": 8, "l4": 2})
    assert told(both, gpu_type=None, gpus_per_node=10)["gpus_per_node"][0] == "fine"
    assert told(both, gpus_per_node=10)["gpus_per_node"][0] == "wrong"


def test_cpus_of_a_node() -> None:
    # 13 x 8 = 104 of 96; 96 / 8 = 12.
    words = "13 x 8 GPUs = 104, but there are at most 96 CPUs a node of gpu; write at most 12"
    assert told(cpus_per_gpu=13)["cpus_per_gpu"] == ("wrong", words)
    assert told(cpus_per_gpu=13, gpus_per_node=None)["cpus_per_gpu"] == ("wrong", words)
    assert told(cpus_per_gpu=13, gpus_per_node=7)["cpus_per_gpu"][0] == "fine"
    assert told(replace(NODES, cpus=4))["cpus_per_gpu"][1].endswith(
        "at most 4 CPUs a node of gpu; leave it out"
    )
    small = replace(NODES, nodes=1, cpus=48)
    assert told(NODES, small)["cpus_per_gpu"][0] == "doubtful"
    assert told(NODES, small, cpus_per_gpu=6)["cpus_per_gpu"] == (
        "fine",
        "6 x 8 GPUs = 48; there are 48 to 96 CPUs a node of gpu",
    )


def test_cpus_left_out() -> None:
    assert told(cpus_per_gpu=None)["cpus_per_gpu"] == (
        "doubtful",
        "left out, so a job may get one CPU a node; nodes of gpu have 96 CPUs for 8 GPUs; write 12",
    )
    words = "left out; a job has all 96 CPUs of its nodes of gpu for itself"
    assert told(cpus_per_gpu=None, exclusive=True)["cpus_per_gpu"] == ("fine", words)


@pytest.mark.parametrize(
    ("size", "level", "start"),
    [
        # 500 x 1024 = 512000.
        ("500G", "fine", "500G = 512000 MB; there are 512000 MB a node of gpu"),
        ("501G", "wrong", "501G = 513024 MB, but there are at most 512000 MB a node of gpu; write at most"),
        ("512000", "fine", "512000 = 512000 MB;"),
        ("512001M", "wrong", "512001M = 512001 MB,"),
        # 524288001 / 1024 = 512000.001, rounded up.
        ("524288000K", "fine", "524288000K = 512000 MB;"),
        ("524288001K", "wrong", "524288001K = 512001 MB,"),
        ("1T", "wrong", "1T = 1048576 MB,"),
        ("0", "fine", "0 is all of a node; nodes of gpu have up to 512000 MB"),
        ("0G", "fine", "0G is all of a node"),
    ],
)
def test_memory_of_a_node(size: str, level: str, start: str) -> None:
    found = told(memory_per_node=size)["memory_per_node"]
    assert found[0] == level
    assert found[1].startswith(start)


def test_the_time_limit() -> None:
    short = replace(NODES, time_limit_s=1800)
    assert told(short, time=TimeLimits(maximum="31m"))["time"] == (
        "wrong",
        "maximum 31m, but the limit of gpu is 30m; write at most 30m",
    )
    assert told(short, time=TimeLimits(maximum="30m"))["time"] == (
        "fine",
        "maximum 30m; the limit of gpu is 30m",
    )
    assert told(short, time=TimeLimits(minimum="1h", maximum="2h"))["time"] == (
        "wrong",
        "minimum 1h and maximum 2h, but the limit of gpu is 30m; write at most 30m",
    )
    # Where a time is fixed, nothing else is asked for.
    assert told(short, time=TimeLimits(fixed="30m"))["time"] == ("fine", "fixed 30m; the limit of gpu is 30m")
    assert told(short, time=TimeLimits(fixed="1h"))["time"][1].startswith(
        "fixed 1h, but the limit of gpu is 30m"
    )
    endless = replace(NODES, time_limit_s=None)
    assert told(endless, time=TimeLimits(maximum="90d"))["time"] == ("fine", "sinfo shows no limit of gpu")
    odd = replace(NODES, time_limit_s=36 * 3600)
    assert told(odd)["time"][1] == "maximum 1d; the limit of gpu is 36h"


def test_the_signal_before_the_limit() -> None:
    # Half of 10 min, the default minimum.
    assert told(time=TimeLimits(signal="5m"))["time.signal"][0] == "fine"
    assert told(time=TimeLimits(signal="6m"))["time.signal"] == (
        "doubtful",
        "6m, but a job of time.minimum 10m is told 300 s before its limit; write at most 5m",
    )
    assert told(time=TimeLimits(signal="6m", fixed="12m"))["time.signal"][0] == "fine"
    assert told(time=TimeLimits(signal="6m", fixed="5m"))["time.signal"] == (
        "doubtful",
        "6m, but a job of time.fixed 5m is told 150 s before its limit; write at most 150s",
    )
    unknown = told(cluster=replace(CLUSTER, kill_wait_s=None))["time.signal"]
    assert unknown == ("fine", "a job is told 120 s before its limit; KillWait is not known")


@pytest.mark.parametrize(
    ("given", "most", "level", "words"),
    [
        (51, 50, "wrong", "51, but your account may have 50 jobs in the queue; write 50"),
        (50, 50, "fine", "50; your account may have 50 jobs in the queue"),
        (None, 50, "doubtful", "left out, but your account may have 50 jobs in the queue; write 50"),
        (51, None, "fine", "51; no limit of your account's is known"),
        (None, None, "fine", "left out; no limit of your account's is known"),
    ],
)
def test_jobs_in_the_queue(given: int | None, most: int | None, level: str, words: str) -> None:
    found = told(cluster=mine(replace(MINE, max_submit=most)), submit_limit=given)
    assert found["submit_limit"] == (level, words)


def test_the_limit_of_another_account_does_not_count() -> None:
    cluster = mine(MINE, replace(MINE, account="rich", max_submit=None))
    assert told(cluster=cluster, submit_limit=51)["submit_limit"][0] == "wrong"
    # Which account it will be is not known: what one of them allows is not wrong.
    assert told(cluster=mine(MINE, replace(MINE, account="bio", max_submit=10)), account=None) == told(
        cluster=mine(MINE, replace(MINE, account="bio")), account=None
    )
    assert told(cluster=cluster, account=None, submit_limit=51)["submit_limit"][0] == "fine"


def test_the_account() -> None:
    cluster = mine(MINE, replace(MINE, account="bio"))
    assert told(cluster=cluster, account="ai")["account"] == (
        "wrong",
        "ai is not one of yours; write one of bio, ml",
    )
    assert told(cluster=cluster, account="ML")["account"] == ("fine", "ML; yours: bio, ml")
    assert told(cluster=cluster, account=None)["account"] == ("fine", "left to Slurm; yours: bio, ml")
    assert told(cluster=mine())["account"][0] == "doubtful"


def test_accounts_that_are_not_known() -> None:
    without = replace(CLUSTER, has_accounting=False, associations=None)
    words = "accounts, QOS and limits are not known here: the cluster has no accounting; they are not checked"
    assert told(cluster=without)["account"] == ("fine", words)
    secret = replace(CLUSTER, associations=None)
    words = "accounts, QOS and limits are not known here: you may not ask; they are not checked"
    assert told(cluster=secret)["account"] == ("doubtful", words)
    assert told(cluster=secret, account=None, qos="long")["account"] == ("doubtful", words)
    assert told(cluster=secret, account=None)["account"] == ("fine", words)


def test_the_partitions_of_an_account() -> None:
    bound = replace(MINE, partition="cpu")
    found = cluster_checks(SiteProfile(**SITE, serial_partition="cpu"), mine(bound))
    assert [(each.about, each.words) for each in found if each.level == "wrong"] == [
        ("partition", "gpu is not one that your account may use; write cpu")
    ]
    assert not_fine(told(cluster=mine(bound, replace(MINE, partition="gpu")))) == {}


def test_the_qos() -> None:
    assert told(qos="Long")["qos"] == ("fine", "Long; your account may use long, normal")
    words = "fast is not one that your account may use; write one of long, normal"
    assert told(qos="fast")["qos"] == ("wrong", words)
    other = replace(MINE, account="bio", qos=("fast",))
    assert told(cluster=mine(MINE, other), qos="fast")["qos"][0] == "wrong"
    assert told(cluster=mine(replace(MINE, qos=())), qos="fast")["qos"][0] == "doubtful"


LAB = SiteProfile(partition="main", gpu_type="h100", gpus_per_node=8, cpus_per_gpu=2, memory_per_node="0")


def test_a_right_profile_on_a_real_cluster(lab: Any) -> None:
    found = cluster_checks(LAB, Client().cluster())
    assert {each.level for each in found} == {"fine"}


def test_a_wrong_profile_on_a_real_cluster(lab: Any) -> None:
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


def test_nodes_and_partitions_that_are_taken_out(lab: Any) -> None:
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


def test_the_command_asks_the_scheduler_too(
    lab: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "site.yaml"
    good = "partition: short\ngpu_type: h100\ngpus_per_node: 8\ncpus_per_gpu: 2\ntime: {maximum: 30m}\n"
    path.write_text(good)
    # Jobs of tests before stay in the queue for a while after their end.
    before = {job.job_id for job in Client().own_jobs()}
    assert run(["doctor", "--site", str(path)]) == 0
    assert "would take a job of one node for 30m" in capsys.readouterr().out
    # What no description tells: only the scheduler knows the features of nodes.
    path.write_text(f"{good}constraint: infiniband\n")
    assert run(["doctor", "--site", str(path)]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong")]
    assert len(wrong) == 1
    assert "Invalid feature specification" in wrong[0]
    assert {job.job_id for job in Client().own_jobs()} <= before
