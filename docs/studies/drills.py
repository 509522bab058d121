"""Recovery drills: `bench train` on two CPU ranks is interrupted, and comes back.

    python docs/studies/drills.py FOLDER [worker|bench ...]

kills a worker, or `bench` itself (which is then started again by the same command), five times each, and
prints the table of docs/recovery.md. FOLDER keeps the studies.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from reports.analysis.recovery import Recovery, recoveries
from results.store import Study, utc_now
from results.training_log import Started, Steps, TrainingLog

TIMES = 5
KINDS = {"worker": "a worker killed", "bench": "bench killed, and started again at once"}
PATIENCE_S = 120.0
_TRAIN = (
    *("train", "--workload", "mlp", "--dataset", "digits", "--gpus", "2", "--strategy", "ddp"),
    *("--batch-size", "32", "--steps", "100000", "--checkpoint-every", "50", "--device", "cpu"),
)


def main() -> None:
    folder, *kinds = sys.argv[1:]
    print("| fault | noticed | started | ready | first step | steps lost | goodput |")
    print("|---|---|---|---|---|---|---|")
    for kind in kinds or KINDS:
        found = [drill(Path(folder) / f"{kind}-{number}", kind) for number in range(TIMES)]
        print(f"| {KINDS[kind]} | {' | '.join(row(found))} |", flush=True)


def drill(folder: Path, kind: str) -> tuple[Recovery, float]:
    """One interruption, and the goodput of a run that it is a part of."""
    bench = start(folder)
    try:
        await_(lambda: log(folder).step >= 60)
        fault = utc_now()
        if kind == "worker":
            os.kill(workers(bench.pid)[-1], signal.SIGKILL)
        else:
            bench.kill()
            bench.wait()
            bench = start(folder)
        await_(lambda: came_back(log(folder)))
    finally:
        bench.send_signal(signal.SIGINT)
        bench.wait()
    study = Study(folder)
    (recovery,) = recoveries(log(folder), study.attempts(), [fault])
    return recovery, log(folder).goodput or 0.0


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("bench")), *_TRAIN, "--out", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def log(folder: Path) -> TrainingLog:
    cells = sorted((folder / "cells").glob("*")) if folder.exists() else []
    return Study(folder).training_log(cells[0].name) if cells else TrainingLog()


def came_back(found: TrainingLog) -> bool:
    return len(found.launches) > 1 and isinstance(found.rows[-1], Steps) and not_first(found)


def not_first(found: TrainingLog) -> bool:
    """Whether the last launch has taken a step."""
    last = max(place for place, one in enumerate(found.rows) if isinstance(one, Started))
    return any(isinstance(one, Steps) for one in found.rows[last:])


def workers(bench: int) -> list[int]:
    """The ranks among the descendants of a process."""
    parents = dict(_parents())
    found = []
    for pid in parents:
        above = pid
        while above in parents and above != bench:
            above = parents[above]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if above == bench else []
        if b"harness.worker" in words and b"torch.distributed.run" not in words:
            found.append(pid)
    return sorted(found)


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue


def await_(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > until:
            raise TimeoutError(f"nothing came for {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def row(found: list[tuple[Recovery, float]]) -> Iterator[str]:
    for name in ("noticed_s", "started_s", "ready_s", "first_step_s"):
        known = [value for one, _ in found if (value := getattr(one, name)) is not None]
        yield _band(known, ".1f", " s") if known else "not known"
    yield _band([one.steps_lost for one, _ in found], ".0f", "")
    yield _band([100 * goodput for _, goodput in found], ".0f", " %")


def _band(values: list[float], form: str, unit: str) -> str:
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    main()
