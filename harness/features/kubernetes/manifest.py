"""Manifests of jobs: pure text, the same for the same input.

A job is one Indexed Job. Each pod is one node of the placement, and all of them run the same command; the
variable JOB_COMPLETION_INDEX says which node a pod is. A headless service gives the pods names, and
torchrun's own rendezvous is at the first one's. The pods give their GPUs back after the last cell.

Values are written so that every reader of YAML, and Kubernetes, takes them for what they are.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import yaml

from harness.features.kubernetes.profile import OWN_LABELS, QUEUE_LABEL, KubernetesProfile, object_name
from results.errors import UsageError
from results.job import Job

_Json = dict[str, Any]

MANIFEST = "manifest.yaml"
"""The file of a manifest in its job's folder."""
FETCH_S = 600
"""Seconds of a pod's time for fetching the image; the program in it keeps to the job's own limit."""
GRACE_S = 60
"""Seconds between SIGTERM and SIGKILL, in which a launch can be ended and its end recorded."""

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"false", "n", "no", "null", "off", "on", "true", "y", "yes"}
"""Words that some version of YAML takes for something else than a string."""
_FAILURES: list[_Json] = [
    # First, because the program of a pod that is evicted ends with an exit code as well.
    {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    # Schemas up to 1.28 wrongly require conditions in every rule; an empty list means no condition.
    {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}, "onPodConditions": []},
]
"""A pod that the cluster took away is replaced, as often as there are retries; one that failed is not."""


def manifest(profile: KubernetesProfile, job: Job, *, folder: str) -> str:
    """The YAML of a job's objects, for kubectl. `folder` is the job's own, as the pods see it.

    Raises UsageError for a folder that is not on the volume, and for more GPUs than a node has.
    """
    if not folder.startswith(f"{profile.mount_path}/"):
        raise UsageError(f"the job's folder {folder} is not under {profile.mount_path}, where pods write")
    has, wanted = profile.gpus_per_node, job.placement.gpus_per_node
    if has is not None and wanted > has:
        raise UsageError(f"{wanted} GPUs are asked of a node, and the profile says it has {has}")
    name, nodes, ttl = object_name(job.name), job.placement.nodes, profile.ttl_seconds_after_finished
    own_labels = dict(zip(OWN_LABELS, ("bench", name, "bench"), strict=True))
    labels = dict(sorted(profile.labels.items())) | own_labels
    selector = {OWN_LABELS[1]: name}
    metadata = {
        "name": name,
        "namespace": profile.namespace,
        "labels": labels,
        "annotations": {"bench/job": job.name},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        # Names are known before pods are ready: they look for each other while they start.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }
    queue = {} if profile.queue is None else {QUEUE_LABEL: profile.queue}
    program = [profile.python, "-m", "harness.launchers.program", folder]
    pods = {
        "metadata": _given({"labels": labels, "annotations": dict(sorted(profile.pod_annotations.items()))}),
        "spec": {
            "restartPolicy": "Never",
            # The Job's own limit would also count the time that its pods wait for nodes.
            "activeDeadlineSeconds": math.ceil(job.time_limit_s) + FETCH_S,
            "subdomain": name,
            **_pod(profile, job, program, selector),
        },
    }
    jobs = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**metadata, "labels": labels | queue},
        "spec": {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimit": job.options.retries,
            "podFailurePolicy": {"rules": _FAILURES},
            **({} if ttl is None else {"ttlSecondsAfterFinished": ttl}),
            "template": pods,
        },
    }
    return yaml_text([service, jobs])


def yaml_text(documents: list[_Json]) -> str:
    """The documents as one stream, each introduced by `---`."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, explicit_start=True, sort_keys=False, default_flow_style=False, width=10**9
    )


def pod_address(profile: KubernetesProfile, job: Job) -> str:
    """The name by which pod 0 of a job is found."""
    name = object_name(job.name)
    return f"{name}-0.{name}.{profile.namespace}.svc"


def _pod(profile: KubernetesProfile, job: Job, command: list[str], selector: dict[str, str]) -> _Json:
    apart = {"labelSelector": {"matchLabels": selector}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    return _given(
        {
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "serviceAccountName": profile.service_account,
            "imagePullSecrets": [{"name": name} for name in profile.image_pull_secrets],
            "priorityClassName": profile.priority_class,
            "runtimeClassName": profile.runtime_class,
            "schedulerName": profile.scheduler_name,
            "hostNetwork": profile.host_network or None,
            # Otherwise a pod on the host's network asks the host's DNS, which does not know the other pods.
            "dnsPolicy": "ClusterFirstWithHostNet" if profile.host_network else None,
            "nodeSelector": dict(sorted(profile.node_selector.items())),
            "tolerations": [_given(msgspec.structs.asdict(toleration)) for toleration in profile.tolerations],
            "affinity": affinity if profile.one_pod_per_host and job.placement.nodes > 1 else None,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": profile.user,
                "runAsGroup": profile.user,
                "fsGroup": profile.user,
                # Otherwise every start walks over the whole volume.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(profile, job, command)],
            "volumes": [
                {"name": "results", "persistentVolumeClaim": {"claimName": profile.volume_claim}},
                {
                    "name": "shared-memory",
                    "emptyDir": {"medium": "Memory", "sizeLimit": profile.shared_memory},
                },
                *(
                    {"name": volume.name, "hostPath": {"path": volume.host_path, "type": "Directory"}}
                    if volume.claim is None
                    else {"name": volume.name, "persistentVolumeClaim": {"claimName": volume.claim}}
                    for volume in profile.volumes
                ),
            ],
        }
    )


def _container(profile: KubernetesProfile, job: Job, command: list[str]) -> _Json:
    environment = {
        **profile.environment,
        "PYTHONSAFEPATH": "1",
        # The image may have no name for the user's number; Python then reads this variable.
        "USER": "bench",
        **({} if profile.code_path is None else {"PYTHONPATH": profile.code_path}),
    }
    ranks, cpus = job.placement.gpus_per_node, profile.cpus_per_gpu
    # Requests equal limits, so that no other pod gets CPUs or memory that the profile gives to this one.
    resources = _given(
        {
            "cpu": None if cpus is None else str(cpus * ranks),
            "memory": profile.memory_per_node,
            profile.gpu_resource: None if profile.gpu_resource == "none" else str(ranks),
            **{name: str(count) for name, count in sorted(profile.extra_resources.items())},
        }
    )
    mounts = [
        _given({"name": one.name, "mountPath": one.mount_path, "readOnly": one.read_only or None})
        for one in profile.volumes
    ]
    return _given(
        {
            "name": "bench",
            "image": profile.image,
            "command": [unexpanded(word) for word in command],
            "workingDir": profile.mount_path,
            "env": [
                {"name": name, "value": unexpanded(value)} for name, value in sorted(environment.items())
            ],
            "resources": {"requests": resources, "limits": resources} if resources else None,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": _given({"drop": ["ALL"], "add": list(profile.capabilities)}),
            },
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "results", "mountPath": profile.mount_path},
                {"name": "shared-memory", "mountPath": "/dev/shm"},
                *mounts,
            ],
        }
    )


def _given(parts: _Json) -> _Json:
    """The parts that have a value."""
    return {key: value for key, value in parts.items() if value not in (None, [], {})}


def unexpanded(text: str) -> str:
    """Escape `text` for `command` or `env`, where Kubernetes puts variables in for $(NAME).

    It reads $$ as a dollar sign, and leaves every dollar sign as it is that is followed by neither a dollar
    sign nor a parenthesis.
    """
    return re.sub(r"\$(?=[$(])", "$$", text)


class _Dumper(yaml.SafeDumper):
    """Strings in quotes where versions of YAML could differ on them: 1e3 is a number only to one of them."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        # Lists are indented, as people write them.
        super().increase_indent(flow, False)


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text)
    style = "|" if text.endswith("\n") and text.isascii() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)
