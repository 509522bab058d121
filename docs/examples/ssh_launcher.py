"""A launcher from another package: torchrun on each host of a list, over ssh.

`bench matrix --gpus 8,16 --launcher ssh --site hosts.yaml --out /shared/study`, where hosts.yaml holds

    hosts: [node1, node2]
    cpus_per_node: 96
    gpus_per_node: 8

starts one torchrun on each host that a launch needs, follows the launch as if it ran here, and goes on with
the next. All hosts see the study's folder at the same path, and have bench installed for `python`.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec

from harness.launch.command import shell_line, torchrun_command
from harness.launch.nodes import outlast
from harness.launch.starter import Starter
from harness.launchers.campaign_call import CampaignCall
from harness.launchers.launcher import Launcher, MatrixCall, WorkerHosts
from harness.machine.kernel import die_with_parent
from harness.plan.surroundings import Machine
from results.environment import CodeVersion
from results.errors import UsageError
from results.launch import Launch
from results.plan import Plan
from results.store import Study
from results.strict_yaml import FileKind

PORTS = 1000


class Hosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of `--site`."""

    hosts: tuple[str, ...]
    """As ssh knows them; ranks meet at the first, which the others reach by the same name."""
    cpus_per_node: Annotated[int, msgspec.Meta(ge=1)]
    gpus_per_node: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0: ranks are on CPU, and --gpus-per-node says how many of them a host has."""
    python: str = "python3"
    environment: dict[str, str] = {}
    """Variables of every rank, such as NCCL_SOCKET_IFNAME."""
    port: Annotated[int, msgspec.Meta(ge=1024, le=65_535 - PORTS)] = 29_400
    """The first of the 1000 ports that ranks meet at."""


FILE = FileKind(
    type=Hosts,
    name="list of hosts",
    example="hosts: [node1, node2]",
    advice="docs/examples/ssh_launcher.py says what is in it",
)


class SshLauncher(Launcher):
    """The line of the registry names this class."""

    name = "ssh"
    options = frozenset({"site"})
    site_file = FILE

    def accept(self, call: MatrixCall) -> SshCall:
        if call.options.site is None:
            raise UsageError("--launcher ssh needs --site: a YAML file with a list of hosts")
        return SshCall(call, FILE.read(Path(call.options.site)))


class SshCall(CampaignCall):
    """One call: which hosts there are, and what starts a launch on them."""

    def __init__(self, call: MatrixCall, site: Hosts) -> None:
        super().__init__(call)
        self._site = site
        self.machine = Machine(cores=site.cpus_per_node, gpu_names=("unknown",) * site.gpus_per_node)
        # Nothing is known here of the Python there.
        self.hosts = WorkerHosts(
            has_gpus=site.gpus_per_node > 0, gpus_per_node=site.gpus_per_node or None, same_python=False
        )

    def check(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        largest = max(plan.request.gpus)
        nodes = -(-largest // (plan.request.gpus_per_node or largest))
        if nodes > len(self._site.hosts):
            raise UsageError(
                f"--gpus {largest} needs {nodes} hosts, and the list of --site has {len(self._site.hosts)}: "
                f"ask for fewer workers, or add hosts"
            )

    def starter(self) -> SshStarter:
        return SshStarter(self._site)

    def line(self, launch: Launch, path: Path) -> str:
        lines = node_lines(self._site, launch, path, self._site.port)
        return "\n  ".join(f"ssh {host} {line}" for host, line in zip(self._site.hosts, lines, strict=False))


class SshStarter(Starter):
    """Starts launches, one after another. `ATTENDED` ends the ranks of other hosts with this process."""

    def __init__(self, site: Hosts) -> None:
        self._site = site
        self._launches = 0

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        # The port that a launch leaves may linger; the next one has another.
        port = self._site.port + self._launches % PORTS
        self._launches += 1
        lines = node_lines(self._site, launch, path, port)
        pairs = zip(self._site.hosts, lines, strict=False)
        return (sys.executable, str(Path(__file__).resolve()), *(word for pair in pairs for word in pair))


def node_lines(site: Hosts, launch: Launch, path: Path, port: int) -> list[str]:
    """What is run on each host of a launch."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(site.environment.items())]
    lines = []
    for rank in range(launch.placement.nodes):
        endpoint = f"{site.hosts[0]}:{port}"
        command = torchrun_command(launch, path, node_rank=rank, endpoint=endpoint, python=site.python)
        lines.append(" ".join([*variables, shell_line(launch, command)]))
    return lines


ATTENDED = """\
exec 3<&0
{line} < /dev/null &
torchrun=$!
{{ cat <&3; kill "$torchrun"; }} > /dev/null 2>&1 &
attendant=$!
wait "$torchrun"
code=$?
kill "$attendant"
exit "$code"
"""
"""A line that ends when its stdin does: so ends what runs on a host whose connection is lost or closed."""


def main() -> int:
    """`python ssh_launcher.py HOST LINE [HOST LINE]...`: run each line on its host, until all have ended."""
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stops.append(number))
    agents = []
    for host, line in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        script = f"sh -c {shlex.quote(ATTENDED.format(line=line))}"
        command = ["ssh", "-o", "BatchMode=yes", host, script]
        agents.append(subprocess.Popen(command, stdin=subprocess.PIPE, preexec_fn=die_with_parent))
    # Torchruns do not tell each other of a failure: after the bad end of one, the others are ended.
    return outlast(agents, lambda: bool(stops))


if __name__ == "__main__":
    sys.exit(main())
