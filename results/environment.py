"""The environment of a run: an allow-list of facts, and the fingerprint by which runs may be pooled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from results.grouping import grouped

LATER_FACTS = ("settings", "program", "process_group")
"""The facts of pooling that older records lack: they count only if both runs have them, and are not part of
a fingerprint."""


class CodeVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The code that measured."""

    code_hash: str
    """Hash over the source of the packages that run inside the measured process."""
    commit: str | None = None
    dirty: bool | None = None
    """Whether the checkout differs from the commit; None without git."""
    user_commit: str | None = None
    """Commit of the repository that holds the user's code, or the value of BENCH_COMMIT; None in older
    records, and without both. `commit` names bench's own."""
    user_dirty: bool | None = None
    extensions: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Code of other packages that is used: `PACKAGE VERSION HASH` by `strategy gossip`; unset if none is.
    Of an engine of one of bench's own strategies `PACKAGE VERSION`."""

    @property
    def measured_commit(self) -> str | None:
        """The commit that nights and baselines name: the user's if it is known, else bench's."""
        return self.user_commit or self.commit

    @property
    def measured_dirty(self) -> bool | None:
        """Whether the checkout of `measured_commit` differs from it."""
        return self.user_dirty if self.user_commit else self.dirty

    @property
    def packages(self) -> Mapping[str, str]:
        """The `extensions`; empty if none is used."""
        return self.extensions or {}


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a workload's code built, and the libraries and files that the code used.

    Runs that differ in it are not pooled.
    """

    names_hash: str
    """Hash over names, shapes and types of all parameters and buffers."""
    tensors: dict[str, int]
    """The number of parameters and buffers of each type and shape, such as `float32 64x16`."""
    modules: dict[str, int]
    """The number of modules of each class."""
    distributions: dict[str, str] = {}
    """Versions of the distributions that the source of a `py:` workload imports."""
    files: dict[str, str] = {}
    """Hashes of the files that it opened in its own folder while it was built, by path from there."""

    def facts(self) -> dict[str, str]:
        """The facts as one flat mapping, in the order in which a report names differences."""
        return {
            **{f"file {name}": found for name, found in self.files.items()},
            **{f"tensors {name}": str(found) for name, found in self.tensors.items()},
            **{f"modules {name}": str(found) for name, found in self.modules.items()},
            **{f"version of {name}": found for name, found in self.distributions.items()},
            "hash of names": self.names_hash,
        }


def unlike_facts(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Names of the facts (`Program.facts`) in which two programs differ.

    A file counts only if both programs opened it: a module that is imported again opens no file.
    """
    return [
        name
        for name in dict.fromkeys((*first, *second))
        if first.get(name) != second.get(name)
        and not (name.startswith("file ") and (name not in first or name not in second))
    ]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one rank's process and machine. Never `os.environ`, never a secret."""

    host: str
    os: str
    python: str
    torch: str
    device_name: str
    """Marketing name of the GPU, or of the CPU."""
    device_memory_bytes: int | None
    """Memory of one device; of the whole host on CPU."""
    cpu_model: str
    cores: int
    """Cores this process may use together with the other ranks of its host (affinity and quota)."""
    threads: int
    """Threads of one rank."""
    code: CodeVersion
    allocation: str | None = None
    """The scheduler's job that it ran in, such as `slurm 17`; None: none."""
    device_uuid: str | None = None
    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    nodes: int = 1
    gpus_per_node: int = 1
    pinned_cores: tuple[int, ...] = ()
    nccl_settings: dict[str, str] = {}
    """Environment variables that were set and change the cost of a step: NCCL's, torch's for NCCL and for its
    allocator, and some of CUDA (`harness.machine.device.nccl_settings`)."""
    settings: dict[str, str] | None = None
    """The variables of other libraries that do the same (`harness.machine.device.other_settings`); None in
    records from before the field existed."""
    process_group: str = ""
    """torch's class that moved the exchange, such as ProcessGroupNCCL: torch 2.15 builds another one for the
    backend `nccl`. Empty in records that lack it."""
    interfaces: dict[str, str] = {}
    """The variables by which the user or bench named the network interfaces of Gloo and NCCL; a library that
    is not in it took its own."""
    transports: tuple[str, ...] = ()
    """Transports in the NCCL logs of all ranks of the launch so far; empty: not known."""
    attention: tuple[str, ...] = ()
    """torch's kernels of scaled dot-product attention that are switched on, the preferred one first; empty in
    records from before it was recorded."""
    program: Program | None = None
    """The model that was built; None in older records."""

    def pooling_facts(self) -> dict[str, object]:
        """Facts that must be equal for figures of two runs to be pooled; `LATER_FACTS` only if both runs
        have them (`reports.analysis.pooling.differing`)."""
        facts: dict[str, object] = {
            "device_name": self.device_name,
            "cpu_model": self.cpu_model,
            "python": self.python,
            "torch": self.torch,
            "driver": self.driver,
            "cuda": self.cuda,
            "nccl": self.nccl,
            "threads": self.threads,
            "nccl_settings": self.nccl_settings,
            "placement": [self.nodes, self.gpus_per_node],
            "code_hash": self.code.code_hash,
        }
        # An empty fact is left out, so that older fingerprints stay.
        if self.code.packages:
            facts["packages"] = dict(self.code.packages)
        if self.network:
            facts["network"] = self.network
        if self.settings is not None:
            facts["settings"] = self.settings
        if self.program is not None:
            facts["program"] = self.program.facts()
        if self.process_group:
            facts["process_group"] = self.process_group
        return facts

    @property
    def network(self) -> str:
        """The transports between nodes; empty if they are not known, or the run has one node.

        These are complete in each run, because its measurement of the link connects all nodes. Transports
        inside a node are left out: later cells of a launch have other groups, and may add some.
        """
        return ", ".join(name for name in self.transports if "(NET/" in name)

    def machine(self) -> dict[str, object]:
        """The facts that all nodes of one run should share: a node's facts of pooling."""
        facts = self.pooling_facts() | {"device_memory_bytes": self.device_memory_bytes, "cores": self.cores}
        for of_the_run in ("placement", "network", "program"):
            facts.pop(of_the_run, None)
        settings = {"nccl_settings": self.nccl_settings, "settings": self.settings or {}}
        return facts | {
            name: " ".join(f"{k}={v}" for k, v in sorted(of.items())) for name, of in settings.items()
        }

    @property
    def fingerprint(self) -> str:
        """12 hex digits over `pooling_facts` without `LATER_FACTS`."""
        facts = {name: fact for name, fact in self.pooling_facts().items() if name not in LATER_FACTS}
        data = msgspec.json.encode(facts, order="sorted")
        return hashlib.sha256(data).hexdigest()[:12]


def unlike_devices(environments: Sequence[Environment]) -> list[str]:
    """A sentence for each host whose ranks have different devices; the ranks of one run are given in
    order."""
    ranks = grouped((one.host, (one.device_name, rank)) for rank, one in enumerate(environments))
    sentences = []
    for host, devices in ranks.items():
        kinds = grouped(devices)
        if len(kinds) > 1:
            found = ", ".join(f"{name} (ranks {', '.join(map(str, of))})" for name, of in kinds.items())
            sentences.append(f"the devices of {host} differ, and each step waits for the slowest: {found}")
    return sentences


def unlike_nodes(environments: Sequence[Environment]) -> list[str]:
    """Facts in which the nodes of one run differ: `the nodes differ in cores: 8 (node-a), 4 (node-b)`."""
    of_hosts = {environment.host: environment for environment in environments}
    machines = {host: environment.machine() for host, environment in of_hosts.items()}
    sentences = []
    for fact in next(iter(machines.values()), {}):
        hosts = grouped((str(machine[fact]), host) for host, machine in machines.items())
        if len(hosts) > 1:
            values = ", ".join(f"{value} ({', '.join(sorted(where))})" for value, where in hosts.items())
            sentences.append(f"the nodes differ in {fact}: {values}")
    return sentences
