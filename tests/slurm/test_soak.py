"""Faults at random moments, on Slurm and on this machine; then the same command until all is done.

SOAK_ROUNDS says how many rounds each kind has (2), SOAK_SEED where their faults and moments begin. The
default seed (9431) draws what no other test does: on Slurm an agent and an srun are killed, here SIGHUP comes
while ranks start, and a guardian is killed. With SOAK_LEDGER, each round adds a line to that file, and a
round that is in it without a failure is not repeated, so that a long soak can be stopped and continued
(`make soak`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.code import checkout
from results.job_store import JobStore
from results.lock import study_lock
from results.outcome import Outcome
from results.store import Study

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "2"))
SEED = int(os.environ.get("SOAK_SEED", "9431"))
LEDGER = Path(os.environ["SOAK_LEDGER"]) if "SOAK_LEDGER" in os.environ else None
CALLS = 6
"""Calls of the same command after the fault, at most."""
CELLS = ("--gpus", "2", "--strategy", "ddp", "--batch-size", "4,8", "--block-steps", "200")
ON_NODES = (*CELLS, "--gpus-per-node", "1", "--launcher", "slurm")
LATEST_S = {"start": 15.0, "run": 4.0}
"""The fault comes at most so long after the start, or after a run of two ranks has begun."""
KILLED = {
    "torchrun": "a node's torchrun was killed by SIGKILL",
    "agent": "the agent of ",
    "srun": "the process that started the ranks was killed by SIGKILL",
    "local torchrun": "the process that started the ranks was killed by SIGKILL",
    "guardian": "the process that started the ranks was killed by SIGKILL",
    "program": "the job's program was killed",
}
"""What started the ranks and was killed, and what is said then."""
ENDS = {
    **dict.fromkeys(KILLED, frozenset({Outcome.MISSING_RANKS})),
    "bench": frozenset({Outcome.UNKNOWN}),
    **dict.fromkeys(("cancel", "SIGTERM", "SIGINT", "SIGHUP"), frozenset({Outcome.CANCELLED})),
    **dict.fromkeys(("rank", "SIGSEGV"), frozenset({Outcome.CRASHED})),
    **dict.fromkeys(("node", "controller"), frozenset({Outcome.NODE_FAILED})),
    **dict.fromkeys(("notice", "limit"), frozenset({Outcome.TIMED_OUT})),
    **dict.fromkeys(("requeue", "preempt"), frozenset({Outcome.PREEMPTED})),
}
"""How runs may end that a fault has met."""
PROCESSES = {
    "rank": "harness.worker",
    "torchrun": "torch.distributed.run",
    "agent": "harness.launchers.slurm.agent",
    "srun": "srun",
    "program": "harness.launchers.program",
    "guardian": "guardian.py",
}
"""By a word of their command lines; ranks have those of their torchrun but one."""
ON_SLURM = (
    *(what for what in PROCESSES if what != "guardian"),
    "cancel",
    "requeue",
    "preempt",
    "node",
    "limit",
    "notice",
    "controller",
)
CONTROLLER_AWAY_S = 45.0
"""For how long Slurm's controller is away, at most: srun gives up after 30 s."""
OF_BENCH = {
    "bench": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGHUP": signal.SIGHUP,
}
"""Signals that bench itself gets on this machine."""
BELOW_BENCH = {
    "rank": ("rank", signal.SIGKILL),
    "SIGSEGV": ("rank", signal.SIGSEGV),
    "local torchrun": ("torchrun", signal.SIGKILL),
    "guardian": ("guardian", signal.SIGKILL),
}
"""Which process below bench gets which signal on this machine.

Not drawn: bench and the guardian killed at the same time. Then nobody is left to end a daemon of a rank in a
session of its own; torchrun and the ranks themselves end with the guardian, as when it is killed alone.
"""
HERE = (*BELOW_BENCH, *OF_BENCH)
Bench = Any


@contextmanager
def entry(kind: str, turn: int, fault: str, moment: tuple[str, float]) -> Iterator[dict[str, Any]]:
    """The round's line in the ledger, with its failure if it fails. Skips a round that has passed before."""
    if LEDGER is None:
        yield {}
        return
    key = {"kind": kind, "seed": SEED, "round": turn}
    lines = LEDGER.read_text().splitlines() if LEDGER.exists() else []
    if any(key.items() <= line.items() and line["failure"] is None for line in map(json.loads, lines)):
        pytest.skip(f"passed before, as {LEDGER} says")
    found: dict[str, Any] = {**key, "fault": fault, "moment": moment, "failure": "interrupted"}
    begin = time.monotonic()
    try:
        yield found
        found["failure"] = None
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        found["seconds"] = round(time.monotonic() - begin, 1)
        with LEDGER.open("a") as file:
            file.write(json.dumps(found) + "\n")


class Soak:
    """One study, what is known of its files, and what must hold of them whatever happens."""

    def __init__(self, bench: Bench, fault: str) -> None:
        self.bench, self.fault = bench, fault
        self._good: dict[Path, str] = {}
        self.ends: dict[str, str] = {}
        """How each run ended that is not ok, by run."""

    @property
    def study(self) -> Study:
        return self.bench.study()

    def is_done(self) -> bool:
        plans = self.study.plans()
        ok = {result.cell_id for result in self.bench.results() if result.outcome is Outcome.OK}
        return bool(plans) and {cell.id for cell in plans[0].cells} <= ok

    def look(self) -> None:
        """Every run has a named end that fits, nothing good was lost or changed, nothing was invented."""
        self.bench.wait_for_processes()
        results = self.bench.results()
        for result in results:
            if result.outcome is not Outcome.OK:
                print(result.cell_id, result.outcome, result.reason)
                self.ends[result.run_id] = result.outcome
                assert result.outcome in ENDS[self.fault], result.reason
            if result.outcome is Outcome.MISSING_RANKS:
                assert KILLED[self.fault] in str(result.reason)
            if result.outcome is Outcome.UNKNOWN:
                assert "nothing tells how its launch ended" in str(result.reason)
        now = {
            path: hashlib.sha256(path.read_bytes()).hexdigest()
            for result in results
            if result.outcome is Outcome.OK
            for path in self.study.run_folder(result.cell_id, result.run_id).glob("rank-*.json")
        }
        assert self._good.items() <= now.items(), "a good run was lost or changed"
        self._good = now
        slots = {(s.cell_id, s.run_id): launch for launch in self.study.launches() for s in launch.slots}
        for result in results:
            launch = slots[result.cell_id, result.run_id]
            assert result.launch_id in (launch.launch_id, "unknown")

    def end(self, expected: dict[str, set[bytes]]) -> None:
        """What a study must be that is done."""
        # On Slurm there is the baseline of the job, too.
        assert expected.items() <= self.bench.figures().items()
        if self.fault != "bench":
            assert [x for x in self.study.launches() if not self.study.has_attempt(x.launch_id)] == []
        store = JobStore(self.study.root)
        assert [job.job_id for job in store.jobs() if store.ended(job.job_id) is None] == []
        self._must_be_free()

    def _must_be_free(self) -> None:
        """Nobody holds the study: no lock, no mount, and no open file within a while."""
        root = str(self.study.root)
        with study_lock(self.study.root):
            pass
        assert root not in Path("/proc/self/mountinfo").read_text()
        # A daemon of Slurm may close a job's log a little later.
        end = time.monotonic() + 60
        while held := holders(root):
            assert time.monotonic() < end, held
            time.sleep(0.1)

    def has_come(self, anchor: str, moment_s: float) -> Callable[[], bool]:
        """Whether the moment of a fault has come, so long after the start or after the first run of two."""
        began: list[float] = [time.monotonic()] if anchor == "start" else []

        def come() -> bool:
            if not began and list(self.study.root.glob("cells/*-g002-*/*/")):
                began.append(time.monotonic())
            return bool(began) and time.monotonic() > began[0] + moment_s

        return come

    def kill(self, what: str, chance: random.Random, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send one process of that kind a signal, at random. Returns False if there is none."""
        word = PROCESSES[what]
        found = []
        for process in self.bench.processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if what != "guardian" and any(word.endswith("/guardian.py") for word in words):
                    # It has its command's words beside its own.
                    continue
                is_rank = "harness.worker" in words and "torch.distributed.run" not in words
                if any(w == word or w.endswith(f"/{word}") for w in words) and is_rank == (what == "rank"):
                    found.append(process)
        # srun's words hold the agent's.
        if what == "agent":
            found = [process for process in found if process.name() != "srun"]
        if found:
            chance.choice(sorted(found, key=lambda process: process.pid)).send_signal(number)
        return bool(found)


def holders(root: str) -> list[tuple[int, str]]:
    """Processes that hold a file below this folder, by number, and which."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [(process.pid, f.path) for f in process.open_files() if f.path.startswith(f"{root}/")]
    return found


@pytest.fixture(scope="module")
def expected(
    bench_in: Callable[..., Bench],
    faulty_model: Callable[..., tuple[str, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, set[bytes]]:
    """What the cells train when nothing goes wrong."""
    bench = bench_in(tmp_path_factory.mktemp("soak"))
    done = bench.matrix(*faulty_model(bench.folder), *CELLS)
    assert done.code == 0, done.stderr
    figures: dict[str, set[bytes]] = bench.figures()
    return figures


def drawn(kind: str, turn: int, faults: tuple[str, ...]) -> tuple[str, tuple[str, float], random.Random]:
    """The fault of a round, its moment, and where its other choices come from; all faults take turns."""
    chance = random.Random(f"{SEED}/{kind}/{turn}")
    order = random.Random(f"{SEED}/{kind}").sample(faults, len(faults))
    fault, anchor = order[turn % len(order)], chance.choice(["start", "run", "run"])
    moment_s = chance.uniform(0, LATEST_S[anchor])
    print(f"SOAK_SEED={SEED} {kind} round {turn}: {fault}, {moment_s:.2f} s after the {anchor}")
    return fault, (anchor, moment_s), chance


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(ROUNDS))
def test_a_study_on_slurm_outlives_any_fault(
    turn: int,
    bench: Bench,
    lab: Any,
    faulty_model: Callable[..., tuple[str, ...]],
    expected: dict[str, set[bytes]],
) -> None:
    fault, moment, chance = drawn("slurm", turn, ON_SLURM)
    with entry("slurm", turn, fault, moment) as line:
        soak = Soak(bench, fault)
        call = (*faulty_model(bench.folder), *ON_NODES)
        assert bench.matrix(*call).code == 0
        (job_id,) = bench.jobs()
        come = soak.has_come(*moment)
        lab.wait(lambda: come() or not lab.command("squeue", "--noheader"), "the moment", 400)
        line["hit"] = harm(soak, lab, job_id, chance)
        for _ in range(CALLS):
            bench.settle()
            assert bench.matrix(*call, "--rerun", "failed").code == 0
            bench.settle()
            soak.look()
            if soak.is_done():
                break
        assert soak.is_done(), [(r.cell_id, r.outcome, r.reason) for r in bench.results()]
        assert "every cell has its runs" in bench.matrix(*call).stderr
        soak.end(expected)
        line["ends"] = sorted(soak.ends.values())


def harm(soak: Soak, lab: Any, job_id: int, chance: random.Random) -> bool:
    """Do what the round has drawn. Returns False if the job has ended before."""
    slurm = {
        "cancel": ("scancel", str(job_id)),
        "requeue": ("scontrol", "requeue", str(job_id)),
        "preempt": (
            *("sbatch", "--partition=urgent", "--nodes=4", "--exclusive"),
            *("--output=/dev/null", "--wrap=sleep 1"),
        ),
        "limit": ("scontrol", "update", f"JobId={job_id}", "EndTime=now+1"),
        "notice": ("scancel", "--signal=USR1", "--batch", str(job_id)),
    }
    if soak.fault in slurm:
        try:
            lab.command(*slurm[soak.fault])
        except AssertionError:
            return False
        return True
    if soak.fault == "node":
        lab.kill_node(chance.choice(["n1", "n2"]))
        return True
    if soak.fault == "controller":
        lab.kill_controller()
        try:
            time.sleep(chance.uniform(0, CONTROLLER_AWAY_S))
        finally:
            lab.start_controller()
        return True
    return soak.kill(soak.fault, chance)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(ROUNDS))
def test_a_study_on_this_machine_outlives_any_fault(
    turn: int,
    tmp_path: Path,
    bench_in: Callable[..., Bench],
    faulty_model: Callable[..., tuple[str, ...]],
    expected: dict[str, set[bytes]],
) -> None:
    fault, moment, chance = drawn("local", turn, HERE)
    with entry("local", turn, fault, moment) as line:
        bench = bench_in(tmp_path)
        soak = Soak(bench, fault)
        call = (*faulty_model(tmp_path), *CELLS)
        process = bench.start(*call)
        come = soak.has_come(*moment)
        while not come() and process.poll() is None:
            time.sleep(0.02)
        if fault in OF_BENCH:
            line["hit"] = process.poll() is None
            process.send_signal(OF_BENCH[fault])
        else:
            what, number = BELOW_BENCH[fault]
            line["hit"] = soak.kill(what, chance, number)
        process.communicate(timeout=400)
        bench.wait_for_processes()
        for _ in range(CALLS):
            if bench.study().root.exists():
                soak.look()
            if soak.is_done():
                break
            bench.matrix(*call, "--rerun", "failed")
        assert soak.is_done(), [(r.cell_id, r.outcome, r.reason) for r in bench.results()]
        soak.end(expected)
        line["ends"] = sorted(soak.ends.values())


def test_a_rank_whose_torchrun_is_gone_before_it_can_watch_it_ends() -> None:
    """It had a second or so in which nothing would have ended it: it would wait for the others for long."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "harness.worker", "no such file"],
        env={**os.environ, "PYTHONPATH": str(checkout())},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (1, "")
