"""Manifests of jobs: pure text, the same for the same input.

Each pod is one node of the placement, and all of them run the same command; the variable
JOB_COMPLETION_INDEX says which node a pod is. A headless service gives them names.

There are two forms. A Job ends: its pods give their GPUs back when the last cell is done. The pods of a
StatefulSet stay until it is deleted, with whatever is left in them, and keep their GPUs so long: it is for
looking around after a failure, and for clusters that hand out nodes to StatefulSets alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Literal

import yaml

from harness.launchers.kubernetes.profile import (
    OWN_LABELS,
    QUEUE_LABEL,
    ExtraVolume,
    KubernetesProfile,
    object_name,
)
from results.errors import UsageError
from results.job import Job

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"false", "n", "no", "null", "off", "on", "true", "y", "yes"}
"""Words that some version of YAML takes for something else than a text."""


def yaml_text(documents: Iterable[dict[str, Any]]) -> str:
    """The documents as one stream, each introduced by `---`."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, explicit_start=True, sort_keys=False, default_flow_style=False, width=10**9
    )


def unexpanded(text: str) -> str:
    """A value of `command` or `env` that stands for `text`: Kubernetes puts variables in for $(NAME).

    It reads $$ as a dollar sign, and leaves alone any that is followed by neither a dollar sign nor a
    parenthesis.
    """
    return re.sub(r"\$(?=[$(])", "$$", text)


class _Dumper(yaml.SafeDumper):
    """Texts in quotes wherever versions of YAML could differ on them: 1e3 is a number to one alone."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        # Lists are set in, as people write them.
        super().increase_indent(flow, False)


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text)
    style = "|" if text.endswith("\n") and text.isascii() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


Form = Literal["job", "statefulset"]
_Json = dict[str, Any]

MANIFEST = "manifest.yaml"
FETCH_S = 600
"""What fetching the image may take off a pod's time; the program in it keeps to the job's own limit."""
GRACE_S = 60
"""Between SIGTERM and SIGKILL: time to end a launch and to write it down."""

_STAY = f"""\
export JOB_COMPLETION_INDEX="${{POD_NAME##*-}}"
limit_s=$1
shift
trap 'kill "$!"; wait "$!"; exit 143' TERM
timeout --kill-after={GRACE_S} "$limit_s" "$@" &
wait "$!"
echo "ended with exit code $?; the pod stays until its StatefulSet is deleted"
sleep infinity &
wait "$!"
"""
"""Runs a command with a time limit, and then idles: a pod of a StatefulSet that ends is started again."""


def manifest(profile: KubernetesProfile, job: Job, *, form: Form, folder: str) -> str:
    """The YAML of a job's objects, for kubectl. `folder` is the job's own, as the pods see it.

    Raises UsageError for a folder that is not on the volume, and for more GPUs than a node has.
    """
    if not folder.startswith(f"{profile.mount_path}/"):
        raise UsageError(f"the job's folder {folder} is not under {profile.mount_path}, where pods write")
    has, wanted = profile.gpus_per_node, job.placement.gpus_per_node
    if has is not None and wanted > has:
        raise UsageError(f"{wanted} GPUs are asked of a node, and the profile says it has {has}")
    command = [profile.python, "-m", "harness.launchers.program", folder]
    make = _job if form == "job" else _stateful_set
    return yaml_text([_service(profile, job), make(profile, job, command)])


def pod_address(profile: KubernetesProfile, job: Job) -> str:
    """The name by which pod 0 of a job is found, in both forms."""
    name = object_name(job.name)
    return f"{name}-0.{name}.{profile.namespace}.svc"


def _service(profile: KubernetesProfile, job: Job) -> _Json:
    """Names for the pods, known before they are ready: they look for each other while they start."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(profile, job),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _selector(job)},
    }


def _job(profile: KubernetesProfile, job: Job, command: list[str]) -> _Json:
    nodes, ttl = job.placement.nodes, profile.ttl_seconds_after_finished
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(profile, job, queue=True),
        "spec": {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimit": job.options.retries,
            "podFailurePolicy": {"rules": _FAILURES},
            **({} if ttl is None else {"ttlSecondsAfterFinished": ttl}),
            "template": {
                "metadata": _pod_metadata(profile, job),
                "spec": {
                    "restartPolicy": "Never",
                    # The Job's own limit would also count the time that its pods wait for nodes.
                    "activeDeadlineSeconds": math.ceil(job.time_limit_s) + FETCH_S,
                    "subdomain": object_name(job.name),
                    **_pod(profile, job, command, []),
                },
            },
        },
    }


_FAILURES: list[_Json] = [
    # First, because the program of a pod that is evicted ends with an exit code as well.
    {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    # Schemas up to 1.28 ask for conditions in every rule, by mistake; no conditions are none.
    {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}, "onPodConditions": []},
]
"""A pod that the cluster took away is replaced, as often as there are retries; one that failed is not."""


def _stateful_set(profile: KubernetesProfile, job: Job, command: list[str]) -> _Json:
    limit_s = str(math.ceil(job.time_limit_s))
    stay = ["sh", "-c", _STAY, "sh", limit_s, *command]
    pod_name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(profile, job, queue=True),
        "spec": {
            "replicas": job.placement.nodes,
            "podManagementPolicy": "Parallel",
            "serviceName": object_name(job.name),
            "selector": {"matchLabels": _selector(job)},
            "template": {
                "metadata": _pod_metadata(profile, job),
                "spec": {"restartPolicy": "Always", **_pod(profile, job, stay, [pod_name])},
            },
        },
    }


def _metadata(profile: KubernetesProfile, job: Job, *, queue: bool = False) -> _Json:
    labels = _labels(profile, job)
    if queue and profile.queue is not None:
        labels[QUEUE_LABEL] = profile.queue
    return {
        "name": object_name(job.name),
        "namespace": profile.namespace,
        "labels": labels,
        "annotations": {"bench/job": job.name},
    }


def _pod_metadata(profile: KubernetesProfile, job: Job) -> _Json:
    annotations = dict(sorted(profile.pod_annotations.items()))
    return _given({"labels": _labels(profile, job), "annotations": annotations})


def _labels(profile: KubernetesProfile, job: Job) -> dict[str, str]:
    own = dict(zip(OWN_LABELS, ("bench", object_name(job.name), "bench"), strict=True))
    return {**dict(sorted(profile.labels.items())), **own}


def _selector(job: Job) -> dict[str, str]:
    return {OWN_LABELS[1]: object_name(job.name)}


def _pod(profile: KubernetesProfile, job: Job, command: list[str], variables: list[_Json]) -> _Json:
    parts: _Json = {
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": profile.service_account,
        "imagePullSecrets": [{"name": name} for name in profile.image_pull_secrets],
        "priorityClassName": profile.priority_class,
        "runtimeClassName": profile.runtime_class,
        "schedulerName": profile.scheduler_name,
        "hostNetwork": True if profile.host_network else None,
        # Without it a pod on the host's network asks the host's DNS, which does not know the other pods.
        "dnsPolicy": "ClusterFirstWithHostNet" if profile.host_network else None,
        "nodeSelector": dict(sorted(profile.node_selector.items())),
        "tolerations": [
            _given({name: getattr(toleration, name) for name in toleration.__struct_fields__})
            for toleration in profile.tolerations
        ],
        "affinity": _apart(job) if profile.one_pod_per_host and job.placement.nodes > 1 else None,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": profile.user,
            "runAsGroup": profile.user,
            "fsGroup": profile.user,
            # Otherwise every start walks over the whole volume.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(profile, job, command, variables)],
        "volumes": [
            {"name": "results", "persistentVolumeClaim": {"claimName": profile.volume_claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": profile.shared_memory}},
            *(_volume(volume) for volume in profile.volumes),
        ],
    }
    return _given(parts)


def _volume(volume: ExtraVolume) -> _Json:
    if volume.claim is not None:
        return {"name": volume.name, "persistentVolumeClaim": {"claimName": volume.claim}}
    return {"name": volume.name, "hostPath": {"path": volume.host_path, "type": "Directory"}}


def _mount(volume: ExtraVolume) -> _Json:
    read_only = True if volume.read_only else None
    return _given({"name": volume.name, "mountPath": volume.mount_path, "readOnly": read_only})


def _apart(job: Job) -> _Json:
    term = {"labelSelector": {"matchLabels": _selector(job)}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _container(profile: KubernetesProfile, job: Job, command: list[str], variables: list[_Json]) -> _Json:
    resources = _resources(profile, job)
    return _given(
        {
            "name": "bench",
            "image": profile.image,
            "command": [unexpanded(word) for word in command],
            "workingDir": profile.mount_path,
            "env": [*variables, *_environment(profile)],
            "resources": {"requests": resources, "limits": resources} if resources else None,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": _given({"drop": ["ALL"], "add": list(profile.capabilities)}),
            },
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "results", "mountPath": profile.mount_path},
                {"name": "shared-memory", "mountPath": "/dev/shm"},
                *(_mount(volume) for volume in profile.volumes),
            ],
        }
    )


def _environment(profile: KubernetesProfile) -> list[_Json]:
    own = {
        "PYTHONSAFEPATH": "1",
        # The image may have no name for the number, and Python then asks for this.
        "USER": "bench",
        **({} if profile.code_path is None else {"PYTHONPATH": profile.code_path}),
    }
    together = sorted({**profile.environment, **own}.items())
    return [{"name": name, "value": unexpanded(value)} for name, value in together]


def _resources(profile: KubernetesProfile, job: Job) -> dict[str, str]:
    """Requests and limits alike: pods whose CPUs and memory are given are never squeezed for others."""
    ranks = job.placement.gpus_per_node
    resources = {}
    if profile.cpus_per_gpu is not None:
        resources["cpu"] = str(profile.cpus_per_gpu * ranks)
    if profile.memory_per_node is not None:
        resources["memory"] = profile.memory_per_node
    if profile.gpu_resource != "none":
        resources[profile.gpu_resource] = str(ranks)
    resources |= {name: str(count) for name, count in sorted(profile.extra_resources.items())}
    return resources


def _given(parts: _Json) -> _Json:
    """What is not left out."""
    return {key: value for key, value in parts.items() if value not in (None, [], {})}
