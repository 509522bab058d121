"""A site profile: the requirements of one cluster for jobs, written once by its users.

Its values are quoted in a job script so that they are read back as they were written, or are refused.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from typing import Annotated, Literal

import msgspec

from results.catalogue.gpus import require_known
from results.errors import UsageError
from results.plan import Placement
from results.site import SitePrice, TimeLimits, require, seconds
from results.strict_yaml import FileKind

_UNQUOTED = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def directive(option: str, value: str | bool) -> str:
    """Return `--option="value"` for a line after `#SBATCH`; quoted only if needed, a switch without a value.

    sbatch reads these lines by its own rules (get_argument in its opt.c), not by the shell's: a backslash
    escapes within both kinds of quotes, no variable is expanded, and no line is continued. Raises UsageError
    for a value that such a line cannot contain.
    """
    if value is True:
        return f"--{option}"
    text = carried(str(value), f"Slurm's option {option}")
    if _UNQUOTED.fullmatch(text):
        return f"--{option}={text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{option}="{escaped}"'


def carried(text: str, what: str) -> str:
    """Return `text`, if one line of a script can contain it. Raises UsageError naming `what` if not."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs"):
            raise UsageError(f"{what} cannot hold the character {character!a} in {text!a}; leave it out")
    return text


def log_pattern(path: str) -> str:
    """Return a file name pattern of Slurm that means exactly this path. Raises UsageError if no pattern does.

    A backslash in the path would switch off the replacement of %j (FILENAME PATTERN in sbatch's manual).
    """
    if "\\" in path:
        raise UsageError(f"Slurm writes no log to a path with a backslash: {path}; choose another folder")
    return path.replace("%", "%%")


def shell(text: str) -> str:
    """Return `text` as one word of the shell. Raises UsageError for characters that a script cannot
    contain."""
    for character in text:
        if character in "\0\r" or unicodedata.category(character) == "Cs":
            raise UsageError(f"a script cannot hold the character {character!a} in {text!a}; leave it out")
    return shlex.quote(text)


GpuRequest = Literal["gres", "gpus-per-node", "gpus-per-task", "none"]
Count = Annotated[int, msgspec.Meta(ge=1)]

_OPTION = re.compile(r"[a-z][a-z0-9-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = re.compile(r"\d+[KMGT]?")
_GPU = re.compile(r"(?:^|,)\s*(?:gres[:/])?gpu\b")
_OWN_KEYS = {
    "account": "account",
    "constraint": "constraint",
    "cpus-per-gpu": "cpus_per_gpu",
    "cpus-per-task": "cpus_per_gpu",
    "exclusive": "exclusive",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-task": "gpu_request",
    "gres": "gpu_request",
    "mem": "memory_per_node",
    "partition": "partition",
    "qos": "qos",
    "reservation": "reservation",
    "time": "time.fixed",
}
"""Directives that have a key of the profile."""
_THE_JOBS = {
    *("array", "chdir", "dependency", "error", "export", "export-file", "get-user-env", "gpus", "het-group"),
    *("input", "job-name", "nodes", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "output"),
    *("parsable", "requeue", "signal", "test-only", "wait", "wrap"),
}
"""Directives that each job sets itself, or that would change what the job is."""


def _word(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty; leave it out")
    return carried(text, "it")


def _size(text: str) -> None:
    if not _MEMORY.fullmatch(text):
        raise ValueError(f"{text!r} is not a size such as 480G, or 0 for all")


def _mount(text: str) -> None:
    # Pyxis splits mounts at commas, and writes each as a line of an fstab, which splits at spaces.
    if ":" not in text or re.search(r"[,\s]", text):
        raise ValueError(f"{text!r} is not FROM:TO or FROM:TO:FLAGS, without commas and spaces")


def _check_directive(name: str, value: str | bool) -> None:
    if not _OPTION.fullmatch(name):
        raise ValueError(f"directives: {name!r} is not a long option of sbatch, such as mail-type")
    if name == "hetjob":
        raise ValueError(
            "directives: hetjob would give a job different nodes, and all nodes of a launch are equal; write "
            "a profile for each kind of node, with its constraint or partition"
        )
    if name in _OWN_KEYS and (name != "gres" or _GPU.search(str(value))):
        raise ValueError(f"directives: {name} has its own key here, {_OWN_KEYS[name]}")
    if name in _THE_JOBS:
        raise ValueError(f"directives: {name} is for the job to decide; leave it out")
    if value is False:
        raise ValueError(f"directives: {name} is false; leave it out")
    require(f"directives.{name}", _word, str(value))


class Container(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The image that agents run in, started by srun through the Pyxis plugin and Enroot."""

    image: str
    """A reference (nvcr.io#nvidia/pytorch:26.06-py3), or a .sqsh file, which spares the nodes a download."""
    python: str = "python3"
    """Python inside the image."""
    mounts: tuple[str, ...] = ()
    """FROM:TO[:FLAG+FLAG]; all files that the agents read and write must be under one of them."""
    workdir: str | None = None
    mount_home: bool = False

    def __post_init__(self) -> None:
        require("image", _word, self.image)
        require("python", _word, self.python)
        require("workdir", _word, self.workdir)
        for mount in self.mounts:
            require("mounts", _mount, mount)


class SiteProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cluster, or one way to use it. A key that is left out has Slurm's default."""

    partition: str | None = None
    serial_partition: str | None = None
    """The partition for jobs that need no GPU, such as writing a report; left out: `partition`."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    """Node features, such as h100&ib."""
    reservation: str | None = None

    gpu_request: GpuRequest = "gres"
    """How GPUs are asked for (a task is a whole node's share of a launch); `none` on a cluster without them,
    where each worker is a CPU rank."""
    gpu_type: str | None = None
    gpu_model: str | None = None
    """The GPU's name in bench's catalogue, such as H100-SXM5-80GB, from which unmeasured step times are
    assumed; left out: a step counts as so long that the measuring budget holds only the minimum number of
    blocks."""
    gpus_per_node: Count | None = None
    """The number of GPUs of a node; left out: not known."""
    network_gbit_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The rate of all adapters of a node together, with which the strategy `auto` predicts messages; left
    out: 200 with GPUs, 10 without."""
    cpus_per_gpu: Count | None = None
    """The number of CPUs of one worker; without GPUs, of one rank."""
    memory_per_node: str | None = None
    """The memory of a node, such as 480G; 0 is all memory."""
    exclusive: bool = False
    """Whether a job has exclusive nodes. Other jobs on a shared node disturb the measurement."""
    directives: dict[str, str | bool] = {}
    """Other options of sbatch by long name; true for one that takes no value. `gres` names resources
    other than GPUs, such as nic:1."""
    time: TimeLimits = TimeLimits()

    setup: tuple[str, ...] = ()
    """Lines of bash that each job runs first: modules, a virtual environment."""
    node_setup: tuple[str, ...] = ()
    """Lines of bash that each node runs once, before the first program is started on it.

    They avoid a storm of hundreds of interpreters that import from one shared file system: unpack the
    environment from one archive to a local disk here.
    """
    python: str | None = None
    """Python on the nodes; left out: the one that submits."""
    environment: dict[str, str] = {}
    """Environment variables of every job, such as NCCL_SOCKET_IFNAME; values are not expanded."""
    container: Container | None = None

    step_creation: str | None = None
    """The time that a launch may wait while srun says that Slurm creates no step for it, such as 5m; left
    out: 2m, or the cluster's UnkillableStepTimeout and a minute where that is longer."""
    submit_limit: Count | None = None
    """The maximum number of queued jobs of one user."""
    price: SitePrice | None = None

    def __post_init__(self) -> None:
        words = ("partition", "serial_partition", "account", "qos", "constraint", "reservation", "gpu_type")
        for name in (*words, "python"):
            require(name, _word, getattr(self, name))
        require("memory_per_node", _size, self.memory_per_node)
        require("gpu_model", require_known, self.gpu_model)
        require("step_creation", seconds, self.step_creation)
        if self.gpu_request == "none" and (self.gpu_type or self.gpu_model or self.gpus_per_node):
            raise ValueError(
                "with gpu_request: none leave out gpu_type, gpu_model and gpus_per_node, or choose another "
                "gpu_request"
            )
        for name, value in self.directives.items():
            _check_directive(name, value)
        for name, text in self.environment.items():
            if not _VARIABLE.fullmatch(name) or name.startswith(("SLURM_", "SBATCH_", "SRUN_")):
                raise ValueError(f"environment: {name!r} is not a variable that a job may set")
            require(f"environment.{name}", shell, text)
        for line in (*self.setup, *self.node_setup):
            require("setup and node_setup", shell, line)

    def billed_gpus(self, placement: Placement) -> int | None:
        """Return the number of GPUs that a job of this placement is charged for: all GPUs of exclusive nodes.

        None if that is not known.
        """
        if self.gpu_request == "none":
            return 0
        if not self.exclusive:
            return placement.gpus
        return None if self.gpus_per_node is None else placement.nodes * self.gpus_per_node


SITE_FILE = FileKind(
    type=SiteProfile, name="site profile", example="partition: gpu", advice="docs/sites has examples"
)
