"""`bench doctor --nodes` on a real Slurm with faulty nodes: a slow link, a busy core, another version."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from harness.features.preflight.verdict import PREFLIGHT, PREFLIGHT_FILE

TOOLS = ("unshare", "nsenter", "taskset", "ip", "tc")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
OTHER_TORCH = "2.99.0+elsewhere"
SCRIPT = """\
set -e
ip link set lo up
for node in 1 2 3 4; do
    ip link add e$node type veth peer name p$node
    ip addr add 10.77.1.$node/32 dev e$node
    ip link set e$node up
    ip link set p$node up
done
tc qdisc add dev lo root handle 1: htb default 10
tc class add dev lo parent 1: classid 1:10 htb rate 4gbit quantum 60000
tc class add dev lo parent 1: classid 1:20 htb rate 400mbit quantum 60000
tc filter add dev lo parent 1: protocol ip u32 match ip dst 10.77.1.1 flowid 1:20
echo ready
exec sleep 1000
"""
"""A network whose first node has a tenth of the others' rate.

Gloo's lower rank listens, and both ends of a connection on one machine have its address.
"""
PYTHON = """\
#!/bin/sh
# The Python of the agents; the job's program is on the first node, outside of the network.
case "$*" in
*slurm.agent*)
    export GLOO_SOCKET_IFNAME=e${{SLURMD_NODENAME#n}}
    test $SLURMD_NODENAME = n4 && export PYTHONPATH={other}
    test $SLURMD_NODENAME = n3 && taskset -cp {core} $$
    exec nsenter --net=/proc/{holder}/ns/net {python} "$@" ;;
*) exec {python} "$@" ;;
esac
"""


@contextmanager
def network() -> Iterator[int]:
    """The process that holds the network of the nodes; skips where none can be made."""
    path = {**os.environ, "PATH": PATH}
    if os.geteuid() or any(shutil.which(tool, path=PATH) is None for tool in TOOLS):
        pytest.skip("a network of nodes needs root, util-linux and iproute2")
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", SCRIPT], env=path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            pytest.skip("the kernel has no network namespaces with veth and htb")
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def other_torch(folder: Path) -> Path:
    """A folder on the path with the torch that is installed, as another version of it."""
    installed, copy = Path(torch.__file__).parent, folder / "torch"
    copy.mkdir(parents=True)
    for part in installed.iterdir():
        if part.name not in ("version.py", "__pycache__"):
            (copy / part.name).symlink_to(part)
    text = (installed / "version.py").read_text()
    (copy / "version.py").write_text(f"{text}\n__version__ = {OTHER_TORCH!r}\n")
    return folder


SPINS = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass"


@contextmanager
def busy_core(core: int, runs: Path, rank: int) -> Iterator[None]:
    """Keep a core busy once the rank has joined the others, so that it starts fast and multiplies slowly."""
    over = threading.Event()
    with ExitStack() as stack:
        others = [subprocess.Popen([sys.executable, "-c", SPINS], start_new_session=True) for _ in range(20)]
        for other in others:
            stack.callback(other.communicate)
            stack.callback(other.kill)
            # They have stopped, so that they need no time to start once the rank is there.
            os.waitid(os.P_PID, other.pid, os.WSTOPPED)
            os.sched_setaffinity(other.pid, {core})

        def plant() -> None:
            while not over.wait(0.02):
                if any('"ready"' in log.read_text() for log in runs.rglob(f"rank-{rank:05d}.jsonl")):
                    for other in others:
                        other.send_signal(signal.SIGCONT)
                    return

        thread = threading.Thread(target=plant)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.mark.slow
@pytest.mark.needs("slurm")
def test_four_nodes_with_three_faults(running_lab, bench_in, tmp_path) -> None:
    bench = bench_in(tmp_path, running_lab)
    running_lab.wait_idle()
    core = max(os.sched_getaffinity(0))
    with network() as holder, busy_core(core, tmp_path / "runs", rank=2):
        python = tmp_path / "python"
        other = shlex.quote(str(other_torch(tmp_path / "other")))
        interpreter = shlex.quote(sys.executable)
        python.write_text(PYTHON.format(python=interpreter, holder=holder, other=other, core=core))
        python.chmod(0o755)
        (tmp_path / "site.yaml").write_text(f"{{gpu_request: none, python: {python}}}")
        done = bench(
            *("doctor", "--launcher", "slurm", "--nodes", "4", "--site", "site.yaml"),
            *("--budget", "6s", "--slow-below", "0.7"),
        )
    assert done.code == 1, done.stderr
    verdict = PREFLIGHT.read(tmp_path / "runs" / PREFLIGHT_FILE)
    faults = {node.name: " ".join(node.faults) for node in verdict.nodes}
    assert list(faults) == ["n1", "n2", "n3", "n4"]
    assert "all-reduce with another" in faults["n1"]
    assert "products" not in faults["n1"]
    assert faults["n2"] == ""
    assert "products" in faults["n3"]
    assert faults["n4"] == f"torch is {OTHER_TORCH}, elsewhere {torch.__version__}"
    assert "#SBATCH --exclude=n1,n3,n4" in done.stdout
    # As another study in that folder, whose nodes only its job knows: all four are one host.
    (study,) = (tmp_path / "runs").glob("preflight-*")
    (study / PREFLIGHT_FILE).unlink()
    assert "1 run used n1, n3, n4" in bench("report", study).stderr
