"""A profile of a Kubernetes cluster: what its jobs ask for, written once by its users.

Names are as Kubernetes takes them. The rules are its own (documentation, "Object Names and IDs" and "Labels
and Selectors"), which quotes RFC 1123 for most names and RFC 1035 for names of services.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from results.catalogue.gpus import require_known
from results.plan import Placement
from results.site import SitePrice, TimeLimits, require
from results.strict_yaml import FileKind

LONGEST = 52
"""Characters of an object's name: 63 of a label of DNS less a dash and 10 that Kubernetes may put behind it.

The number of a pod takes fewer. Names that were given before stay the same.
"""
_DIGITS = 8

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_PART = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_STARTS_WITH_A_LETTER = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def object_name(text: str) -> str:
    """A name for the objects of a job: `text` itself where it can be one.

    Otherwise what it says in the letters that are allowed, and 8 digits of its hash, so that different
    jobs have different names. At most LONGEST characters, the first of them a letter, as a service's must be.
    """
    if len(text) <= LONGEST and _STARTS_WITH_A_LETTER.fullmatch(text):
        return text
    digits = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    kept = words if words[:1].isalpha() else f"bench-{words}"
    return f"{kept[: LONGEST - _DIGITS - 1].strip('-')}-{digits}"


def _matches(pattern: str, words: str, most: int | None = None) -> Callable[[str], None]:
    """A rule that refuses a text of more than `most` characters, or which the pattern does not match."""

    def rule(text: str) -> None:
        if len(text) > (most or len(text)) or not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is not {words}")

    return rule


check_label = _matches(
    _LABEL, "a name: at most 63 small letters, digits and dashes, and no dash at an end", most=63
)
"""Raises ValueError unless a text is a label of DNS, as the name of a namespace is."""
check_subdomain = _matches(
    rf"{_LABEL}(\.{_LABEL})*",
    "a name: at most 253 small letters, digits, dashes and dots, and each part between dots begins and ends "
    "with a letter or a digit",
    most=253,
)
"""Raises ValueError unless a text is a domain of DNS, as the names of most objects are."""
check_value = _matches(
    f"({_PART})?",
    "a label's value: at most 63 letters, digits, dashes, dots and underscores, and a letter or a digit at "
    "each end",
    most=63,
)
"""Raises ValueError unless a text is a value of a label."""


def check_key(text: str) -> None:
    """Raise ValueError unless the text is a key of a label: `name` or `domain/name`."""
    domain, slash, name = text.rpartition("/")
    if slash:
        check_subdomain(domain)
    if len(name) > 63 or not re.fullmatch(_PART, name):
        raise ValueError(f"{text!r} is not a key such as disk or example.com/disk")


Count = Annotated[int, msgspec.Meta(ge=1)]
PORTS = 1000
"""Launches meet at one of this number of ports, from the profile's on."""

OWN_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by")
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_OWN_VOLUMES = ("results", "shared-memory")
_OWN_VARIABLES = {"JOB_COMPLETION_INDEX", "POD_NAME", "PYTHONPATH", "PYTHONSAFEPATH", "USER"}

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


Capability = Annotated[str, msgspec.Meta(pattern=r"\A[A-Z][A-Z_]*\Z")]


def _text(text: str) -> None:
    if re.search(r"[\0\ud800-\udfff]", text):
        raise ValueError(f"{text!a} has a character that no variable can hold")


_size = _matches(r"[1-9]\d*(Ki|Mi|Gi|Ti|k|M|G|T)", "a size such as 480Gi")
_path = _matches(
    r"(/(?!\.{1,2}(/|$))[^/:\0]+)+",
    "a path such as /results: it begins with a slash and does not end with one, and has no colon",
)


def _resource(text: str) -> None:
    if text != "none":
        check_key(text)
        if text.startswith("amd.com/"):
            raise ValueError(f"{text!r}: bench measures NVIDIA GPUs and CPU ranks only; write none for these")
        if "/" not in text:
            raise ValueError(f"{text!r} is not a resource such as nvidia.com/gpu, or none")


class Toleration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A taint that pods tolerate: they may be scheduled on nodes that have it."""

    key: str | None = None
    """Left out: any."""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Left out: any."""

    def __post_init__(self) -> None:
        require("key", check_key, self.key)
        require("value", check_value, self.value)
        if (self.operator == "Equal") != (self.value is not None):
            raise ValueError("operator Equal needs a value, and Exists does not take one")
        if self.key is None and self.operator == "Equal":
            raise ValueError("without a key, operator is Exists")


class ExtraVolume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further volume of every pod: a data set, or what a driver of the host needs."""

    name: str
    mount_path: str
    """Its path in pods."""
    claim: str | None = None
    """A PersistentVolumeClaim; exactly one of it and `host_path` is given."""
    host_path: str | None = None
    """A folder of the host, which must be there."""
    read_only: bool = False

    def __post_init__(self) -> None:
        require("name", check_label, self.name)
        if self.name in _OWN_VOLUMES:
            raise ValueError(f"name: {self.name} is a volume of bench's own; use another name")
        for key in ("mount_path", "host_path"):
            require(key, _path, getattr(self, key))
        require("claim", check_subdomain, self.claim)
        if (self.claim is None) == (self.host_path is None):
            raise ValueError("a volume has either claim or host_path")


class KubernetesProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cluster, or one way to use it. What is left out is left to the cluster's defaults."""

    image: str
    """A reference with a tag or a digest; the image contains the same code of bench as the machine that
    submits."""
    python: str = "python3"
    """Python inside the image."""
    code_path: str | None = None
    """The folder of bench in the image; left out: its Python finds it."""

    namespace: str = "default"
    volume_claim: str
    """PersistentVolumeClaim of the results: all pods write to it at once (ReadWriteMany)."""
    mount_path: str = "/results"
    """Its path in pods."""
    user: Count = 1000
    """Number of the user and group that pods run as, and that can write to the volume."""

    gpu_resource: str = "nvidia.com/gpu"
    """How GPUs are asked for; `none` on a cluster without them, where each worker is a CPU rank."""
    gpu_model: str | None = None
    """The GPU's name in bench's catalogue, such as H100-SXM5-80GB, to assume unmeasured step times from; left
    out: a step counts as so long that the measuring budget holds only the minimum number of blocks."""
    gpus_per_node: Count | None = None
    """GPUs that a node has; left out: not known."""
    network_gbit_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The rate of a node's adapters together, by which the strategy `auto` weighs messages; left out: 200 are
    assumed with GPUs, 10 without."""
    cpus_per_gpu: Count | None = None
    """CPUs of one worker; without GPUs, of one rank."""
    memory_per_node: str | None = None
    """The memory of a pod, such as 480Gi."""
    extra_resources: dict[str, Annotated[int, msgspec.Meta(ge=1)]] = {}
    """Further resources of each pod, such as rdma/hca_shared_devices_a: 1 or vpc.amazonaws.com/efa: 32."""
    shared_memory: str = "2Gi"
    """Size of /dev/shm, which NCCL needs; its content counts as memory of the pod. Runtimes give 64 MiB."""
    one_pod_per_host: bool = True
    """Whether pods of a job are kept on different hosts; if not, several of the `nodes` may be on one
    host."""

    host_network: bool = False
    """Whether pods use the network of their host: its addresses, and its RDMA devices."""
    pod_annotations: dict[str, str] = {}
    """Annotations of every pod, such as k8s.v1.cni.cncf.io/networks: rdma-net."""
    capabilities: tuple[Capability, ...] = ()
    """Linux capabilities of the container, such as IPC_LOCK, by which RDMA locks memory; by default none."""
    volumes: tuple[ExtraVolume, ...] = ()

    runtime_class: str | None = None
    scheduler_name: str | None = None
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    service_account: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    priority_class: str | None = None
    queue: str | None = None
    """LocalQueue of Kueue that jobs wait in."""
    labels: dict[str, str] = {}
    """Labels of all objects."""
    environment: dict[str, str] = {}
    """Variables of every pod, such as NCCL_SOCKET_IFNAME; nothing in them is expanded."""
    port: Annotated[int, msgspec.Meta(ge=1024, le=32_768 - PORTS)] = 20_000
    """The first of the 1000 ports that nodes of a launch meet at."""

    ttl_seconds_after_finished: Annotated[int, msgspec.Meta(ge=0)] | None = 7 * 86_400
    """Seconds after which the cluster deletes a finished Job with its pods and their logs; the results stay
    on the volume. null: it deletes none."""

    time: TimeLimits = TimeLimits()
    price: SitePrice | None = None

    def __post_init__(self) -> None:
        for name, word in (("image", self.image), ("python", self.python)):
            if not word or not word.isprintable() or " " in word:
                raise ValueError(f"{name}: {word!r} is not one printable word")
        for name in ("mount_path", "code_path"):
            require(name, _path, getattr(self, name))
        for name in ("memory_per_node", "shared_memory"):
            require(name, _size, getattr(self, name))
        require("namespace", check_label, self.namespace)
        require("queue", check_label, self.queue)
        for name in ("volume_claim", "service_account", "priority_class", "runtime_class", "scheduler_name"):
            require(name, check_subdomain, getattr(self, name))
        for secret in self.image_pull_secrets:
            require("image_pull_secrets", check_subdomain, secret)
        self._check_resources()
        self._check_mappings()

    def _check_resources(self) -> None:
        require("gpu_resource", _resource, self.gpu_resource)
        for name in self.extra_resources:
            require("extra_resources", _resource, name)
            if name == self.gpu_resource:
                raise ValueError(
                    f"extra_resources: {name} is gpu_resource, and bench requests one of it for each worker"
                )
        require("gpu_model", require_known, self.gpu_model)
        if self.gpu_resource == "none" and (self.gpu_model or self.gpus_per_node):
            raise ValueError(
                'gpu_resource is "none", but gpu_model or gpus_per_node is given; keep one of them'
            )

    def _check_mappings(self) -> None:
        for name in ("node_selector", "labels"):
            for key, value in getattr(self, name).items():
                require(name, check_key, key)
                require(f"{name}.{key}", check_value, value)
        for key in (*OWN_LABELS, QUEUE_LABEL):
            if key in self.labels:
                raise ValueError(f"labels: {key} is set by bench; leave it out")
        for key, text in self.pod_annotations.items():
            require("pod_annotations", check_key, key)
            require(f"pod_annotations.{key}", _text, text)
        names = [volume.name for volume in self.volumes]
        if len(set(names)) < len(names):
            raise ValueError(f"volumes: names must differ, not {', '.join(names)}")
        for name, text in self.environment.items():
            if not _VARIABLE.fullmatch(name) or name in _OWN_VARIABLES:
                raise ValueError(f"environment: {name!r} is not a variable that a profile may set")
            require(f"environment.{name}", _text, text)

    def billed_gpus(self, placement: Placement) -> int:
        """GPUs that a job of this placement asks for, and keeps from others."""
        return 0 if self.gpu_resource == "none" else placement.gpus


PROFILE_FILE = FileKind(
    type=KubernetesProfile,
    name="profile of a Kubernetes cluster",
    example="volume_claim: results",
    advice="docs/sites/kubernetes.yaml is an example",
)
