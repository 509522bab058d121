"""Manifests: their complete text, the schemas of Kubernetes, and values that are hard to write down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from approval import approved
from hypothesis import given
from hypothesis import strategies as st

from harness.features.kubernetes.manifest import manifest, pod_address, unexpanded, yaml_text
from harness.features.kubernetes.profile import PROFILE_FILE, ExtraVolume, KubernetesProfile, Toleration
from results.errors import UsageError
from results.job import Job, RunOptions
from results.plan import Placement

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "docs" / "sites" / "kubernetes.yaml"
FOLDER = "/results/demo/jobs/0001-2x8"
NASTY = 'it\'s a "$(HOME)" $$x `id` \\ #1: 50% & <x>, [y]: {z}\u2028\u00e4'


@pytest.fixture
def rich(make_profile) -> KubernetesProfile:
    """A profile with a value for everything, some of them hard to write down."""
    return make_profile(
        image="registry.example.com:5000/bench@sha256:0123",
        python="/opt/bench/bin/python3",
        code_path="/opt/code",
        namespace="1e3",
        mount_path="/mnt/no",
        user=10_001,
        gpu_resource="nvidia.com/gpu.shared",
        cpus_per_gpu=3,
        memory_per_node="4Gi",
        node_selector={"b": "true", "a": ""},
        tolerations=(
            Toleration(),
            Toleration(key="k", operator="Equal", value="1", effect="NoExecute"),
        ),
        service_account="me",
        image_pull_secrets=("s1", "s2"),
        priority_class="high",
        queue="q",
        labels={"team": "off"},
        extra_resources={"vpc.amazonaws.com/efa": 4, "rdma/hca_shared_devices_a": 1},
        host_network=True,
        pod_annotations={"k8s.v1.cni.cncf.io/networks": NASTY},
        capabilities=("IPC_LOCK", "SYS_NICE"),
        volumes=(
            ExtraVolume(name="data", mount_path="/data", claim="images", read_only=True),
            ExtraVolume(name="tools", mount_path="/opt/host tools", host_path="/opt/tools"),
        ),
        runtime_class="nvidia",
        scheduler_name="volcano",
        environment={"B": NASTY, "A": "two\nlines\n", "C": "1e3", "D": "", "E": "y"},
    )


def documents(profile: KubernetesProfile, job: Job, folder: str = FOLDER) -> list[Any]:
    return list(yaml.safe_load_all(manifest(profile, job, folder=folder)))


def pod(documents: list[Any]) -> Any:
    return documents[1]["spec"]["template"]["spec"]


def test_the_whole_text(make_job) -> None:
    text = manifest(PROFILE_FILE.read(EXAMPLE), make_job(), folder=FOLDER)
    approved(HERE / "golden" / "job.yaml", text)


@pytest.mark.parametrize("version", ["1.28", "1.31", "1.34"])
def test_kubernetes_knows_all_of_it(version, rich, make_profile, make_job) -> None:
    cpu = make_profile(gpu_resource="none")
    one = make_job(placement=Placement(nodes=1, gpus_per_node=1))
    made = [
        *documents(PROFILE_FILE.read(EXAMPLE), make_job()),
        *documents(rich, make_job(), folder="/mnt/no/jobs/1"),
        *documents(cpu, one),
    ]
    for document in made:
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_the_schemas_tell_a_mistake(make_job) -> None:
    made = documents(PROFILE_FILE.read(EXAMPLE), make_job())[1]
    made["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagee"):
        kubernetes_validate.validate(made, "1.31", strict=True)


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand a value as Kubernetes does, letter by letter (its package forked/golang/expansion)."""
    out, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out, at = out + text[at], at + 1
        elif text[at + 1] == "$":
            out, at = out + "$", at + 2
        elif text[at + 1] == "(" and ")" in text[at:]:
            close = text.index(")", at)
            name = text[at + 2 : close]
            out, at = out + variables.get(name, f"$({name})"), close + 1
        else:
            out, at = out + text[at : at + 2], at + 2
    return out


@given(st.text("$()Ax ", max_size=12))
def test_nothing_in_a_value_is_expanded(text) -> None:
    assert expanded(unexpanded(text), {"A": "no", "": "no", "x": "no"}) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_every_text_is_read_back(text) -> None:
    assert yaml.safe_load(yaml_text([{"value": text}])) == {"value": text}


@pytest.mark.parametrize(
    "text", ["1e3", "0o17", "y", "No", "on", "~", "", "1_000", "2026-01-02", "=", ".inf", "a: b"]
)
def test_what_versions_of_yaml_differ_on_is_in_quotes(text) -> None:
    assert yaml_text([{"value": text}]) == f'---\nvalue: "{text}"\n'


def test_hard_values_arrive(rich, make_job) -> None:
    container = pod(documents(rich, make_job(), folder="/mnt/no/jobs/1"))["containers"][0]
    values = {variable["name"]: expanded(variable["value"], {"HOME": "no"}) for variable in container["env"]}
    assert values == {
        **rich.environment,
        **{"PYTHONPATH": "/opt/code", "PYTHONSAFEPATH": "1", "USER": "bench"},
    }
    assert container["command"] == [
        "/opt/bench/bin/python3",
        "-m",
        "harness.launchers.program",
        "/mnt/no/jobs/1",
    ]


def test_a_node_asks_for_its_share(rich, make_profile, make_job) -> None:
    # 3 CPUs for each of 8 GPUs.
    container = pod(documents(rich, make_job(), folder="/mnt/no/jobs/1"))["containers"][0]
    share = {
        "cpu": "24",
        "memory": "4Gi",
        "vpc.amazonaws.com/efa": "4",
        "rdma/hca_shared_devices_a": "1",
        "nvidia.com/gpu.shared": "8",
    }
    assert container["resources"] == {"requests": share, "limits": share}
    without = pod(documents(make_profile(gpu_resource="none"), make_job()))["containers"][0]
    assert "resources" not in without


def test_names_of_pods_are_those_that_the_service_gives(make_job, make_profile) -> None:
    job, profile = make_job(name="My study"), make_profile(namespace="ml")
    service, made = documents(profile, job)
    name = made["metadata"]["name"]
    assert re.fullmatch(r"my-study-[0-9a-f]{8}", name)
    assert service["metadata"]["name"] == made["spec"]["template"]["spec"]["subdomain"] == name
    # <pod>.<service>.<namespace>.svc, and pods are <name>-<number>.
    assert pod_address(profile, job) == f"{name}-0.{name}.ml.svc"
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert made["metadata"]["annotations"] == {"bench/job": "My study"}


def test_a_job_of_one_pod_per_node_with_its_limits(make_job, make_profile) -> None:
    job = make_job(
        placement=Placement(nodes=3, gpus_per_node=1), time_limit_s=90.5, options=RunOptions(retries=5)
    )
    made = documents(make_profile(), job)[1]["spec"]
    assert (made["completions"], made["parallelism"], made["backoffLimit"]) == (3, 3, 5)
    assert made["template"]["spec"]["activeDeadlineSeconds"] == 91 + 600
    assert made["ttlSecondsAfterFinished"] == 7 * 24 * 3600
    kept = documents(make_profile(ttl_seconds_after_finished=None), job)[1]["spec"]
    assert "ttlSecondsAfterFinished" not in kept


def test_what_a_fast_network_needs_is_in_every_pod(make_job, make_profile) -> None:
    profile = make_profile(
        extra_resources={"rdma/hca_shared_devices_a": 1},
        host_network=True,
        pod_annotations={"k8s.v1.cni.cncf.io/networks": "rdma-net"},
        capabilities=("IPC_LOCK",),
        volumes=(ExtraVolume(name="data", mount_path="/data", claim="images", read_only=True),),
        runtime_class="nvidia",
        scheduler_name="volcano",
    )
    made = documents(profile, make_job())
    template, spec = made[1]["spec"]["template"], pod(made)
    (container,) = spec["containers"]
    assert template["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma-net"}
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert (spec["runtimeClassName"], spec["schedulerName"]) == ("nvidia", "volcano")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "1"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert spec["volumes"][-1] == {"name": "data", "persistentVolumeClaim": {"claimName": "images"}}
    assert container["volumeMounts"][-1] == {"name": "data", "mountPath": "/data", "readOnly": True}
    # Without any of it, a pod has nothing of it.
    plain = yaml.safe_dump(documents(make_profile(), make_job()))
    assert not re.search("hostNetwork|dnsPolicy|runtimeClass|schedulerName|add:", plain)


def test_pods_have_hosts_of_their_own_unless_told_otherwise(make_job, make_profile) -> None:
    one = make_job(placement=Placement(nodes=1, gpus_per_node=8))
    assert "affinity" in pod(documents(make_profile(), make_job()))
    assert "affinity" not in pod(documents(make_profile(), one))
    assert "affinity" not in pod(documents(make_profile(one_pod_per_host=False), make_job()))


def test_the_job_is_queued_and_its_service_is_not(rich, make_job) -> None:
    service, made = documents(rich, make_job(), folder="/mnt/no/jobs/1")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert "kueue.x-k8s.io/queue-name" not in service["metadata"]["labels"]


def test_what_cannot_be_is_refused(make_job, make_profile) -> None:
    for folder in ("/elsewhere/jobs/1", "/resultsbeside/jobs/1"):
        with pytest.raises(UsageError, match="is not under /results"):
            manifest(make_profile(), make_job(), folder=folder)
    with pytest.raises(UsageError, match="8 GPUs are asked of a node, and the profile says it has 4"):
        manifest(make_profile(gpus_per_node=4), make_job(), folder=FOLDER)
    manifest(make_profile(gpus_per_node=8), make_job(), folder=FOLDER)
