"""`python -m harness.features.slurm.agent LAUNCH.json HOST:PORT`: one node's share of a launch, under srun.

Starts this node's torchrun and stays until it has ended. The nodes meet at HOST:PORT, an address of the
first one. After a failure the agent waits a moment before it ends: srun ends the other nodes as soon as one
agent has failed, and the agents of the other nodes must first find out and record what happened there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from harness.launch.command import node_command, worker_environment
from harness.launch.ending import out_of_memory_kills, print_kills, print_torchrun_killed
from harness.launch.guarded import Guarded
from harness.launch.nodes import GRACE_S, PATIENCE_S, POLL_S, shell_code
from harness.machine.code import checkout
from results.schemas import LAUNCH


def main() -> int:
    """Run the node's torchrun. Returns its exit code."""
    path, endpoint = Path(sys.argv[1]), sys.argv[2]
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stops.append(number))
    node_rank, kills = int(os.environ["SLURM_NODEID"]), out_of_memory_kills()
    launch = LAUNCH.read(path)
    command = node_command(launch, path, node_rank, endpoint)
    # srun adds variables of its own, such as those of PMI; a container keeps only some.
    torchrun = Guarded(command, environment=worker_environment(launch, checkout()), grace_s=GRACE_S)
    while torchrun.poll() is None and not stops:
        time.sleep(POLL_S)
    code = torchrun.end()
    if kills is not None:
        # The ranks are in this process's control group, and not in that of the job's program.
        print_kills((out_of_memory_kills() or kills) - kills)
    if code < 0 and not stops:
        print_torchrun_killed(-code)
    if code and not stops:
        time.sleep(PATIENCE_S)
    return shell_code(code)


if __name__ == "__main__":
    sys.exit(main())
