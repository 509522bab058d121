"""A model that fails on demand: it does what the file `fault` beside it says; without that file it trains.

A line `1/2 8 kill rank` is for rank 1 of 2 with a batch of 8, in the 20th call of the model: amid the steps
of `COUNTED`. Several lines for one rank happen one after the other.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
from torch import nn

from workloads import Workload

HERE = Path(__file__).parent
CALL = 20


class Faulty(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        if self.calls == CALL and (HERE / "fault").exists():
            here = (f"{os.environ['RANK']}/{os.environ['WORLD_SIZE']}", str(len(x)))
            for line in (HERE / "fault").read_text().splitlines():
                rank, batch, fault, *given = line.split()
                if (rank, batch) == here:
                    found = FAULTS[fault](*given)
                    y = y if found is None else y * found
        return y


def build():
    def synthetic(generator, samples):
        return torch.randn(samples, 16, generator=generator), torch.randn(samples, 1, generator=generator)

    return Workload(module=Faulty(16, 1), loss=nn.functional.mse_loss, synthetic=synthetic)


def refuse():
    raise ValueError("as it\nwas told")


def kill(whom, number="KILL"):
    """The rank, its torchrun, the guardian of that, or who has started the guardian: bench or an agent."""
    above = [os.getpid()]
    while len(above) < 4:
        above.append(psutil.Process(above[-1]).ppid())
    pids = dict(zip(("rank", "torchrun", "guardian", "bench"), above, strict=True))
    os.kill(pids[whom], getattr(signal, f"SIG{number}"))


def daemon():
    """Leave a process behind that is in a session of its own, below nobody, and hears no SIGTERM."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            sleep()
        os._exit(0)
    os.waitpid(child, 0)


def put(name, text):
    """Write a file that another process may read at any moment: it never sees the file without its text."""
    part = HERE / f"{name}.part"
    part.write_text(text)
    part.rename(HERE / name)


def reach():
    """Tell the test that this rank stands still from now on, and which it is."""
    put("reached", str(os.getpid()))


def flood():
    """Print more than a log may hold, and wait until it is cut."""
    for _ in range(12_000):
        print("x" * 1000, file=sys.stderr)
    end = time.monotonic() + 100
    while os.fstat(2).st_size > 8 * 2**20 and time.monotonic() < end:
        time.sleep(0.02)


def hang():
    reach()
    sleep()


def sleep():
    time.sleep(3600)


def wait():
    """Until the file `fault` is gone."""
    reach()
    while (HERE / "fault").exists():
        time.sleep(0.02)


def fill(folder):
    """Leave no byte free where `folder` is."""
    with Path(folder, "filler").open("wb") as file:
        for size in (2**20, 2**10, 1):
            try:
                while True:
                    file.write(bytes(size))
                    file.flush()
            except OSError:
                pass


def exhaust():
    taken = []
    while True:
        taken.append(torch.ones(2**24))


def set_clock(offset):
    put("clock", offset)


FAULTS = {
    "raise": refuse,
    "flood": flood,
    "kill": kill,
    "hang": hang,
    "sleep": sleep,
    "wait": wait,
    "daemon": daemon,
    "diverge": lambda: float("nan"),
    "allocate": lambda: torch.empty(10**14),
    "exhaust": exhaust,
    "exit": lambda code: sys.exit(int(code)),
    "exit-now": lambda code: os._exit(int(code)),
    "fill": fill,
    "set-clock": set_clock,
}
