"""`python -m harness.worker LAUNCH.json`, started by torchrun on every rank.

Binds the process to its cores first: threads that torch starts inherit the binding. A rank does not outlive
its torchrun, so that one that is killed leaves no rank behind on a device.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from harness.machine.device import Gpu, physical_cores, usable_cores, visible_gpus
from harness.machine.kernel import die_with_parent
from harness.worker.rank.rank import Rank, leave_after
from results.foreign_text import escape_unprintable
from results.launch import Launch
from results.schemas import LAUNCH


def main() -> int:
    """Bind, then work."""
    die_with_parent()
    if not _has_torchrun():
        return 1
    escape_unprintable()
    path = Path(sys.argv[1]).resolve()
    rank = Rank.from_torchrun()
    launch = LAUNCH.read(path)
    mine, all_of_them = _cores(launch, rank)
    if mine:
        os.sched_setaffinity(0, mine)
    # Torch makes 300,000 objects as it is imported: collections begin when `keep_imports` has set them aside.
    gc.disable()
    from torch.distributed.elastic.multiprocessing.errors import record

    from harness.worker.crew import work

    code = record(work)(path, rank, pinned=mine, cores=all_of_them)
    assert code is not None
    return code


def _has_torchrun() -> bool:
    """Whether the parent is still the torchrun that started this rank, not a process that adopted it."""
    try:
        return b"torch" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return False


def _cores(launch: Launch, rank: Rank) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cores this rank is bound to (none: it is not bound), and the cores of all ranks of this node."""
    usable = usable_cores()
    if not launch.pin:
        return (), tuple(usable)
    if launch.device == "cuda":
        return _near(visible_gpus(), rank, usable), tuple(usable)
    each = launch.threads
    if rank.local_gpus * each > len(usable):
        return (), tuple(usable)
    mine = usable[rank.local_rank * each : (rank.local_rank + 1) * each]
    return tuple(mine), tuple(usable[: rank.local_gpus * each])


def _near(gpus: list[Gpu], rank: Rank, usable: list[int]) -> tuple[int, ...]:
    """This rank's share of the cores near its device, with all threads of each; ranks on one NUMA node do not
    overlap."""
    if rank.local_gpus > len(gpus):
        return ()
    near = gpus[rank.local_rank].near_cores
    neighbours = [i for i, gpu in enumerate(gpus[: rank.local_gpus]) if gpu.near_cores == near]
    cores = physical_cores([core for core in usable if core in near])
    each = len(cores) // len(neighbours)
    first = neighbours.index(rank.local_rank) * each
    return tuple(thread for core in cores[first : first + each] for thread in core)


if __name__ == "__main__":
    leave_after(main)
