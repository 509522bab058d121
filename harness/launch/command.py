"""The command of a launch, and the environment its workers get."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from harness.plan.options import OF_A_LAUNCHER
from results.launch import Launch, torchrun_folder

_SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""A `reports/` folder in the user's working folder must not shadow ours."""


def local_command(launch: Launch, path: Path) -> tuple[str, ...]:
    """The command that starts all workers of a launch on this machine."""
    if launch.link_mbit_per_s is not None:
        return (sys.executable, "-m", "harness.launch.nodes", str(path))
    return torchrun_command(launch, path)


def torchrun_command(
    launch: Launch,
    path: Path,
    *,
    node_rank: int | str | None = None,
    endpoint: str = "",
    python: str = sys.executable,
) -> tuple[str, ...]:
    """The command that starts the workers of the node `node_rank` (None: the launch is on one node), which
    meets the others at `endpoint`, HOST:PORT of node 0. The interpreter of the launch's engine replaces
    `python`."""
    placement = launch.placement
    command = [
        launch.python or python,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={placement.gpus_per_node}",
    ]
    if node_rank is None:
        # The ranks would otherwise look up this host's own name, which need not resolve.
        command += ["--standalone", "--local-addr=127.0.0.1"]
    else:
        command += [
            f"--nnodes={placement.nodes}",
            f"--node-rank={node_rank}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={launch.launch_id}",
        ]
    # Each rank's stdout and stderr go to separate files, and its last exception to error.json.
    logs = torchrun_folder(path.parent, node_rank)
    command += [f"--log-dir={logs}", "--redirects=3"]
    return (*command, "-m", "harness.worker", str(path))


def node_command(launch: Launch, path: Path, node_rank: int, endpoint: str) -> tuple[str, ...]:
    """The torchrun of one node; a launch on one node needs nobody to meet."""
    if launch.placement.nodes == 1:
        return torchrun_command(launch, path)
    return torchrun_command(launch, path, node_rank=node_rank, endpoint=endpoint)


def shell_line(launch: Launch, command: tuple[str, ...]) -> str:
    """The command as it is typed, with the variables that a launch by this program has as well."""
    return f"{' '.join(f'{k}={shlex.quote(v)}' for k, v in _variables(launch).items())} {shlex.join(command)}"


def _variables(launch: Launch) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(launch.threads),
        "MKL_NUM_THREADS": str(launch.threads),
        # numpy starts these threads when it is imported, and a rank with threads cannot be forked.
        **({"OPENBLAS_NUM_THREADS": "1"} if launch.forks else {}),
        **_SAFE_PATH,
        **dict(text.split("=", 1) for text in launch.env),
    }


def worker_environment(launch: Launch, checkout: Path) -> dict[str, str]:
    """Return `code_environment` with the launch's own variables, such as the number of threads."""
    return {**code_environment(checkout), **_variables(launch)}


def code_environment(checkout: Path) -> dict[str, str]:
    """Return this process's variables with the path to our code and without what other launchers set."""
    kept = {name: value for name, value in os.environ.items() if not OF_A_LAUNCHER.fullmatch(name)}
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(checkout), *([inherited] if inherited else [])])
    return {**kept, **_SAFE_PATH, "PYTHONPATH": path}
