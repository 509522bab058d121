"""Recovery drills: `bench train` on two CPU ranks is interrupted, and comes back.

    python docs/studies/drills.py FOLDER [worker|bench|node|back|torchft|torchft-back ...]

does each of these kinds five times (without names the first four), in turn, and prints the table of
docs/evidence.md after each round. FOLDER keeps the studies. `node` and `back` need root, as virtual nodes
with a link do. The kinds of torchft train the same model without `bench`, in an environment that has torchft
as well.

    python docs/studies/drills.py FOLDER target

trains the GPT of docs/studies/train-text.yaml to its held-out loss, while a worker is killed at step 300 and
`bench` at step 800, and prints what `bench train` said at the end.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.features.train.log import Started, Steps, TrainingLog, training_log
from harness.features.train.trained import Recovery, recoveries
from results.store import Study, utc_now

TIMES = 5
KINDS = {
    "worker": "a worker killed (SIGKILL to one of the two ranks)",
    "bench": "bench killed, the same command at once",
    "node": "a node killed (its agent and its rank); training continues on one node less",
    "back": "the node is back: bench interrupted, the same command",
    "torchft": "torchft: a replica killed (SIGKILL to one of two); the other continues",
    "torchft-back": "torchft: the replica is started again, and joins",
}
PATIENCE_S = 300.0
_TRAIN = (
    *("train", "--workload", "mlp", "--dataset", "digits", "--gpus", "2", "--strategy", "ddp"),
    *("--batch-size", "32", "--steps", "100000", "--checkpoint-every", "50", "--device", "cpu"),
)
_TO_TARGET = (
    *(
        "train",
        str(Path(__file__).with_name("train-text.yaml")),
        "--steps",
        "2000",
        "--checkpoint-every",
        "100",
    ),
    *("--validate-every", "200", "--schedule", "cosine", "--warmup-steps", "50", "--target", "val_loss<=1.2"),
)
_ON_TWO_NODES = ("--link", "1gbit", "--elastic", "1:2")


def main() -> None:
    folder, *kinds = sys.argv[1:]
    if kinds == ["target"]:
        print(to_target(Path(folder)))
        return
    kinds = kinds or [kind for kind in KINDS if not kind.startswith("torchft")]
    found: dict[str, list[tuple[Recovery, float]]] = {kind: [] for kind in kinds}
    for number in range(TIMES):
        for kind in kinds:
            run = drill_torchft if kind.startswith("torchft") else drill
            found[kind].append(run(Path(folder) / f"{kind}-{number}", kind))
        print("\n| fault | drills | noticed | started | ready | first step | steps lost | goodput |")
        print("|---|---|---|---|---|---|---|---|")
        for kind, drills in found.items():
            print(f"| {KINDS[kind]} | {len(drills)} | {' | '.join(row(drills))} |", flush=True)


def drill(folder: Path, kind: str) -> tuple[Recovery, float]:
    """The last interruption of a run, and the goodput of the whole run."""
    command = (*_TRAIN, *(_ON_TWO_NODES if kind in ("node", "back") else ()))
    bench = start(folder, command)
    faults = []
    try:
        await_(lambda: log(folder).step >= 60)
        if kind == "back":
            kill_node(bench.pid)
            await_(lambda: came_back(log(folder), launches=2))
            assert log(folder).launches[-1].replicas == 1
        faults.append(utc_now())
        if kind == "worker":
            os.kill(ranks(bench.pid)[-1], signal.SIGKILL)
        elif kind == "node":
            kill_node(bench.pid)
        else:
            bench.send_signal(signal.SIGTERM if kind == "back" else signal.SIGKILL)
            bench.wait()
            bench = start(folder, command)
        await_(lambda: came_back(log(folder), launches=3 if kind == "back" else 2))
    finally:
        bench.send_signal(signal.SIGTERM)
        bench.wait()
    found = log(folder)
    assert found.launches[-1].replicas == (1 if kind == "node" else 2)
    return recoveries(found, Study(folder).attempts(), faults)[-1], found.goodput or 0.0


def drill_torchft(folder: Path, kind: str) -> tuple[Recovery, float]:
    """The same of a run without `bench`: of the log of the replica that is not killed, since both train."""
    folder.mkdir(parents=True)
    file = folder / "replica-0.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lighthouse = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas=1"]
    processes = [torchft(folder, port, *lighthouse, f"--bind=127.0.0.1:{port}")]
    processes += [replica(number, folder, port) for number in (0, 1)]
    faults = []
    try:
        await_(lambda: trains(file, replicas=2, steps=60))
        faults.append(utc_now())
        processes[-1].kill()
        await_(lambda: trains(file, replicas=1))
        if kind == "torchft-back":
            faults.append(utc_now())
            processes.append(replica(1, folder, port))
            await_(lambda: trains(file, replicas=2))
    finally:
        for one in processes:
            one.kill()
            one.wait()
    rows = TrainingLog.read(file).rows
    together = next(place for place, one in enumerate(rows) if isinstance(one, Started) and one.replicas == 2)
    log = TrainingLog(rows[together:])
    return recoveries(log, {}, faults)[-1], log.goodput or 0.0


def replica(number: int, folder: Path, port: int) -> subprocess.Popen[bytes]:
    program = str(Path(__file__).with_name("torchft_replica.py"))
    log = str(folder / f"replica-{number}.jsonl")
    return torchft(folder, port, sys.executable, program, str(number), log)


def torchft(folder: Path, port: int, *command: str) -> subprocess.Popen[bytes]:
    environment = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
    with (folder / "torchft.log").open("ab") as output:
        return subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)


def trains(file: Path, *, replicas: int, steps: int = 1) -> bool:
    """Whether this number of replicas has taken `steps` together since it last changed."""
    log = TrainingLog.read(file)
    last = log.launches[-1] if log.launches else None
    return last is not None and last.replicas == replicas and log.step >= (last.resumed_step or 0) + steps


def to_target(folder: Path) -> str:
    bench = start(folder, _TO_TARGET)
    await_(lambda: log(folder).step >= 300, patience_s=900)
    os.kill(ranks(bench.pid)[-1], signal.SIGKILL)
    await_(lambda: log(folder).restarts == 1 and log(folder).step >= 800, patience_s=900)
    bench.kill()
    bench.wait()
    return subprocess.run(called(folder, _TO_TARGET), text=True, capture_output=True, check=True).stdout


def start(folder: Path, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(called(folder, command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def called(folder: Path, command: tuple[str, ...]) -> list[str]:
    return [str(Path(sys.executable).with_name("bench")), *command, "--out", str(folder)]


def log(folder: Path) -> TrainingLog:
    cells = sorted((folder / "cells").glob("*")) if folder.exists() else []
    return training_log(Study(folder), cells[0].name) if cells else TrainingLog()


def came_back(found: TrainingLog, *, launches: int) -> bool:
    """Whether so many launches have begun, and the last one has taken a step."""
    if len(found.launches) < launches:
        return False
    last = max(place for place, one in enumerate(found.rows) if isinstance(one, Started))
    return any(isinstance(one, Steps) for one in found.rows[last:])


def kill_node(bench: int) -> None:
    """Kill the agent of the second virtual node and its rank: a machine that loses its power."""
    [agent] = _below(bench, lambda words: b"torch.distributed.run" in words and b"--node-rank=1" in words)
    for pid in (agent, *ranks(agent)):
        os.kill(pid, signal.SIGKILL)


def ranks(above: int) -> list[int]:
    """The ranks among the descendants of a process."""
    return _below(above, lambda words: b"harness.worker" in words and b"torch.distributed.run" not in words)


def _below(above: int, wanted: Callable[[list[bytes]], bool]) -> list[int]:
    parents = dict(_parents())
    found = []
    for pid in parents:
        at = pid
        while at in parents and at != above:
            at = parents[at]
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if at == above and wanted(words):
            found.append(pid)
    return sorted(found)


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue


def await_(true: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    until = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > until:
            raise TimeoutError(f"nothing came for {patience_s:.0f} s")
        time.sleep(0.05)


def row(found: list[tuple[Recovery, float]]) -> Iterator[str]:
    for name in ("noticed_s", "started_s", "ready_s", "first_step_s"):
        known = [value for one, _ in found if (value := getattr(one, name)) is not None]
        yield _band(known, ".1f", " s") if known else "-"
    yield _band([one.steps_lost for one, _ in found], ".0f", "")
    yield _band([100 * goodput for _, goodput in found], ".0f", " %")


def _band(values: list[float], form: str, unit: str) -> str:
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    main()
