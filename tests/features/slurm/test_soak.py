"""Faults at random moments, on Slurm and on this machine; then the same command until all is done.

A round is one study that meets several faults, one after the other, each in another launch or in the
call itself, from before the ranks are ready to after the last record. Each lost run must be of a launch that
a fault has met, and end as that fault lets it.

SOAK_ROUNDS says how many rounds each place has (1), SOAK_SEED where their faults and moments begin. The
default seed draws what does not wait for long on Slurm. With SOAK_LEDGER, each round adds a line to that
file, and a round that is in it without a failure is not repeated, so that a long soak can be stopped and
continued (`make soak`; docs/evidence.md has the results).
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from harness.launch.follow import LaunchState
from harness.machine.code import checkout
from results.files import study_lock
from results.job_store import JobStore
from results.launch import Launch, rank_log_path
from results.outcome import Outcome
from results.run import RunResult
from results.schemas import LAUNCH
from results.store import Study

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "1"))
SEED = int(os.environ.get("SOAK_SEED", "12668"))
LEDGER = Path(os.environ["SOAK_LEDGER"]) if "SOAK_LEDGER" in os.environ else None
CALLS = 6
"""Calls of the same command after the last fault, at most."""
STRIKES = {"local": 9, "link": 6, "slurm": 6}
"""Faults of a round."""
CELLS = ("--gpus", "2", "--strategy", "ddp", "--batch-size", "4,8,16,32,64,128,256", "--block-steps", "20")
LINKED = (*CELLS, "--link", "1gbit")
ON_NODES = (*CELLS, "--gpus-per-node", "1", "--launcher", "slurm")
LATEST_S = {"call": 1.5, "start": 8.0, "run": 2.0, "end": 1.0}
"""The longest time from its anchor to the fault: the call of bench, the start of a launch, the begin of a
run of it, or its last record."""
MEMORY_BYTES = 2 * 2**30
"""The memory that bench and its processes may take together, so that a neighbour can use it up."""
QUEUE_S = 0.5
"""Between two looks at Slurm's queue: each is a process."""
PATIENCE_S = 400.0
RANKS_KILLED = "the process that started the ranks was killed by SIGKILL"
TORCHRUN_KILLED = "a node's torchrun was killed by SIGKILL"
BENCH_KILLED = (
    "is gone, and has not recorded the end of the launch: probably it was killed, or its machine stopped"
)
KILLED = {
    ("slurm", "torchrun"): (TORCHRUN_KILLED,),
    # Each agent has one, and so has srun.
    ("slurm", "guardian"): (TORCHRUN_KILLED, RANKS_KILLED),
    ("slurm", "agent"): ("the agent of ",),
    ("slurm", "srun"): (RANKS_KILLED,),
    ("slurm", "program"): ("the job's program was killed",),
    ("local", "torchrun"): (RANKS_KILLED,),
    ("local", "guardian"): (RANKS_KILLED,),
    ("local", "bench"): (BENCH_KILLED,),
    # The guardian goes first, and bench may see that.
    ("local", "bench and guardian"): (BENCH_KILLED, RANKS_KILLED),
    ("link", "torchrun"): (TORCHRUN_KILLED,),
    ("link", "guardian"): (RANKS_KILLED,),
    ("link", "nodes"): (RANKS_KILLED,),
    ("link", "bench"): (BENCH_KILLED,),
    ("link", "bench and guardian"): (BENCH_KILLED, RANKS_KILLED),
}
"""The killed process that started the ranks, and the words of its end."""
ENDS = {
    **dict.fromkeys((fault for _, fault in KILLED), frozenset({Outcome.MISSING_RANKS})),
    **dict.fromkeys(("cancel", "SIGTERM", "SIGINT", "SIGHUP"), frozenset({Outcome.CANCELLED})),
    **dict.fromkeys(("rank", "SIGSEGV"), frozenset({Outcome.CRASHED})),
    **dict.fromkeys(("node", "controller"), frozenset({Outcome.NODE_FAILED})),
    **dict.fromkeys(("notice", "limit"), frozenset({Outcome.TIMED_OUT})),
    **dict.fromkeys(("requeue", "preempt"), frozenset({Outcome.PREEMPTED})),
    "memory": frozenset({Outcome.OUT_OF_MEMORY}),
}
"""How runs may end that a fault has met."""
PROCESSES = {
    "rank": ("harness.worker", signal.SIGKILL),
    "SIGSEGV": ("harness.worker", signal.SIGSEGV),
    "torchrun": ("torch.distributed.run", signal.SIGKILL),
    "guardian": ("guardian.py", signal.SIGKILL),
    "nodes": ("harness.launch.nodes", signal.SIGKILL),
    "agent": ("harness.features.slurm.agent", signal.SIGKILL),
    "srun": ("srun", signal.SIGKILL),
    "program": ("harness.launchers.program", signal.SIGKILL),
}
"""A word of the process's command line, and the signal that it gets."""
STARTERS = ("guardian", "nodes", "srun", "agent", "torchrun")
"""Programs whose command lines also have the words of what they start."""
OF_BENCH = {
    "bench": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGHUP": signal.SIGHUP,
}
"""Signals that bench itself gets on this machine."""
HERE = ("rank", "SIGSEGV", "torchrun", "guardian", "memory", "bench and guardian", *OF_BENCH)
HERE_LINKED = (*HERE, "nodes")
OF_JOB = ("program", "cancel", "requeue", "preempt", "node", "limit", "notice", "controller")
"""Faults of a job, not of one launch."""
ON_SLURM = ("rank", "SIGSEGV", "torchrun", "guardian", "agent", "srun", *OF_JOB)
_OF_BENCH = ("bench and guardian", *OF_BENCH)
OF_CALL = {"local": _OF_BENCH, "link": _OF_BENCH, "slurm": OF_JOB}
"""Faults that may come before there is a launch."""
CONTROLLER_AWAY_S = 45.0
"""For how long Slurm's controller is away, at most: srun gives up after 30 s."""
HOG = """
from harness.launch.ending import out_of_memory_kills
before, taken = out_of_memory_kills(), []
while out_of_memory_kills() == before:
    taken.append(b"x" * 2**24)
"""
"""Takes memory until the kernel ends a process of its control group."""
Bench = Any


@dataclass
class Strike:
    """One fault, when it is to come, and what it met."""

    fault: str
    anchor: str
    moment_s: float
    run: int = 1
    """Which run of the launch must have begun, if the anchor is `run`."""
    hit: bool = False
    """Whether there was something to harm."""
    phase: str = "not come"
    """The phase of the launch by its files, a moment before."""
    launches: set[str] = field(default_factory=set)
    """Runs that the fault may have met."""
    ends: list[str] = field(default_factory=list)
    """How the runs of these ended that are not ok."""

    def meets(self, before: set[str], after: set[str]) -> None:
        """It met what was there `after` it, and was not over `before`."""
        self.launches |= after - before


@contextmanager
def entry(kind: str, turn: int, strikes: Sequence[Strike]) -> Iterator[None]:
    """The round's line in the ledger, with its failure if it fails. Skips a round that has passed before."""
    if LEDGER is None:
        yield
        return
    key = {"kind": kind, "seed": SEED, "round": turn}
    lines = LEDGER.read_text().splitlines() if LEDGER.exists() else []
    if any(key.items() <= line.items() and line["failure"] is None for line in map(json.loads, lines)):
        pytest.skip(f"passed before, as {LEDGER} says")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=checkout(), capture_output=True, text=True
    )
    found: dict[str, Any] = {**key, "commit": commit.stdout.strip(), "failure": "interrupted"}
    begin = time.monotonic()
    try:
        yield
        found["failure"] = None
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}"[:2000]
        raise
    finally:
        found["seconds"] = round(time.monotonic() - begin, 1)
        found["strikes"] = [{**asdict(strike), "launches": sorted(strike.launches)} for strike in strikes]
        with LEDGER.open("a") as file:
            file.write(json.dumps(found) + "\n")


def drawn(kind: str, turn: int, faults: Sequence[str]) -> tuple[list[Strike], random.Random]:
    """The faults of a round, and where its other choices come from; all faults take turns."""
    endless = (
        fault
        for deck in count()
        for fault in random.Random(f"{SEED}/{kind}/deck {deck}").sample(faults, len(faults))
    )
    size = STRIKES[kind]
    chance = random.Random(f"{SEED}/{kind}/{turn}")
    strikes = []
    for place, fault in enumerate(islice(endless, turn * size, (turn + 1) * size)):
        anchors = ["start", "run", "run", *(["call"] if fault in OF_CALL[kind] else [])]
        if place == size - 1:
            # After it the study is done, unless the fault has met a record.
            anchors += ["end", "end"]
        anchor = chance.choice(anchors)
        moment_s = round(chance.uniform(0, LATEST_S[anchor]), 2)
        strikes.append(Strike(fault=fault, anchor=anchor, moment_s=moment_s, run=chance.choice([1, 1, 1, 2])))
    print(f"SOAK_SEED={SEED} {kind} round {turn}: {[(s.fault, s.anchor, s.moment_s) for s in strikes]}")
    return strikes, chance


class Soak:
    """One study, what is known of its files, and what must hold of them whatever happens."""

    def __init__(self, bench: Bench, kind: str, strikes: Sequence[Strike]) -> None:
        self.bench, self.kind, self.strikes = bench, kind, strikes
        self._good: dict[Path, str] = {}
        self._namespaces: set[str] = set()
        self._earlier: set[str] = set()
        """Launches of earlier calls: if a call was killed, its launches have no end yet."""

    @property
    def study(self) -> Study:
        return self.bench.study()

    def is_done(self) -> bool:
        plans = self.study.plans() if self.study.root.exists() else []
        ok = {result.cell_id for result in self.bench.results() if result.outcome is Outcome.OK}
        return bool(plans) and {cell.id for cell in plans[0].cells} <= ok

    def launches(self, *, ended: bool = False) -> set[str]:
        """Ids of all launches, or of those that have ended."""
        name = "attempt" if ended else "launch"
        return {path.parent.name for path in self.study.root.glob(f"launches/*/{name}.json")}

    def running(self) -> set[str]:
        """Ids of the launches of this call that have not ended."""
        return self.launches() - self.launches(ended=True) - self._earlier

    def look(self) -> None:
        """Every run has a named end that fits, nothing good was lost or changed, nothing was invented.

        No process of the study may run meanwhile.
        """
        self._earlier = self.launches()
        if not self.study.root.exists():
            return
        self.bench.wait_for_processes()
        results = self.bench.results()
        slots = {(s.cell_id, s.run_id): launch for launch in self.study.launches() for s in launch.slots}
        for strike in self.strikes:
            strike.ends.clear()
        for result in results:
            launch = slots[result.cell_id, result.run_id]
            assert result.launch_id in (launch.launch_id, "unknown")
            if result.outcome is not Outcome.OK:
                self._must_fit(result, launch)
        for strike in self.strikes:
            # The scheduler is asked again and again while it is away.
            assert len(strike.ends) <= 1 or strike.fault == "controller", strike
        self._must_keep(results)

    def _must_fit(self, result: RunResult, launch: Launch) -> None:
        """A lost run is of a launch that a fault has met, and ended as that fault lets it."""
        print(result.cell_id, result.outcome, result.reason)
        met = [strike for strike in self.strikes if strike.hit and launch.launch_id in strike.launches]
        said = f"{result.outcome}: {result.reason}; it met {met}"
        if result.outcome is Outcome.UNKNOWN:
            # The next call names it.
            assert not self.study.has_attempt(launch.launch_id), said
            fitting = [s for s in met if s.fault in OF_CALL[self.kind]]
        else:
            fitting = [s for s in met if result.outcome in ENDS[s.fault]]
        assert fitting, said
        if result.outcome is Outcome.MISSING_RANKS:
            words = [word for s in fitting for word in KILLED.get((self.kind, s.fault), ())]
            assert any(word in str(result.reason) for word in words), said
        fitting[-1].ends.append(result.outcome)

    def _must_keep(self, results: Sequence[RunResult]) -> None:
        now = {
            path: hashlib.sha256(path.read_bytes()).hexdigest()
            for result in results
            if result.outcome is Outcome.OK
            for path in self.study.run_folder(result.cell_id, result.run_id).glob("rank-*.json")
        }
        assert self._good.items() <= now.items(), "a good run was lost or changed"
        self._good = now

    def end(self, expected: dict[str, set[bytes]]) -> None:
        """Check that a study is done, with all its promises."""
        # On Slurm there is the baseline of the job, too.
        assert expected.items() <= self.bench.figures().items()
        unnamed = [result for result in self.bench.results() if result.outcome is Outcome.UNKNOWN]
        assert unnamed == []
        assert self.launches() == self.launches(ended=True)
        store = JobStore(self.study.root)
        assert [job.job_id for job in store.jobs() if store.ended(job.job_id) is None] == []
        self._must_be_free()

    def _must_be_free(self) -> None:
        """Nobody holds the study: no lock, no mount, and no open file within a while."""
        self.bench.wait_for_processes()
        root = str(self.study.root)
        with study_lock(self.study.root):
            pass
        mounts = Path("/proc/self/mountinfo").read_text()
        assert root not in mounts
        assert not [namespace for namespace in self._namespaces if namespace in mounts]
        assert not self._namespaces & namespaces(psutil.process_iter())
        # A daemon of Slurm may close a job's log a little later.
        end = time.monotonic() + 60
        while held := holders(root):
            assert time.monotonic() < end, held
            time.sleep(0.1)

    def await_moment(self, strike: Strike, is_running: Callable[[], bool]) -> bool:
        """Until the moment of a fault. Returns False if nothing runs any more before it has come."""
        anchors: dict[str, float] = {}
        called = time.monotonic()
        while is_running():
            now = time.monotonic()
            for launch_id in self.running():
                launch = LAUNCH.read(self.study.launch_folder(launch_id) / "launch.json")
                if launch_id not in anchors and self._has_come(strike, launch):
                    anchors[launch_id] = called if strike.anchor == "call" else now
                if now > anchors.get(launch_id, now) + strike.moment_s:
                    strike.phase = self._phase(launch)
                    self._namespaces |= namespaces(self.bench.processes()) - namespaces([psutil.Process()])
                    return True
            if strike.anchor == "call" and now > called + strike.moment_s:
                strike.phase = "before the first launch"
                return True
            time.sleep(0.02)
        return False

    def _has_come(self, strike: Strike, launch: Launch) -> bool:
        """Whether a launch has reached the anchor of the moment."""
        if strike.anchor == "run":
            return len(self.study.begun_slots(launch)) >= min(strike.run, len(launch.slots))
        return strike.anchor in ("call", "start") or self._recorded(launch) == len(launch.slots)

    def _recorded(self, launch: Launch) -> int:
        """Slots of which all ranks have left a record."""
        ranks = range(launch.placement.gpus)
        paths = [[self.study.rank_path(s.cell_id, s.run_id, rank) for rank in ranks] for s in launch.slots]
        return sum(all(path.exists() for path in slot) for slot in paths)

    def _phase(self, launch: Launch) -> str:
        state = LaunchState.of(rank_log_path(self.study.launch_folder(launch.launch_id), 0))
        recorded = self._recorded(launch)
        if not state.ready:
            return "before ready"
        if recorded == len(launch.slots):
            return "after the last record"
        return "in a run" if len(state.started) > recorded else "between runs"

    def kill(self, strike: Strike, chance: random.Random) -> None:
        """Send one process of that kind its signal, at random, if there is one."""
        process = self.victim(strike, chance)
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(PROCESSES[strike.fault][1])
                strike.hit = True

    def victim(self, strike: Strike, chance: random.Random) -> psutil.Process | None:
        """One process that the fault is for, as soon as there is one; None if no launch gets one."""
        running = self.running()
        while running & self.running():
            found = sorted(self.processes(strike.fault), key=lambda process: process.pid)
            if found:
                process = chance.choice(found)
                with suppress(psutil.NoSuchProcess):
                    paths = [word for word in process.cmdline() if word.endswith("/launch.json")]
                    strike.launches |= {Path(path).parent.name for path in paths}
                    return process
            time.sleep(0.02)
        return None

    def processes(self, fault: str) -> list[psutil.Process]:
        """The processes that the fault is for."""
        word, _ = PROCESSES["rank" if fault == "memory" else fault]
        found = []
        for process in self.bench.processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                kinds = [PROCESSES[kind][0] for kind in STARTERS]
                first = next((k for k in kinds if any(_is(w, k) for w in words)), None)
                if (first or word) == word and any(_is(w, word) for w in words):
                    found.append(process)
        return found


def _is(given: str, word: str) -> bool:
    return given == word or given.endswith(f"/{word}")


def holders(root: str) -> list[tuple[int, str]]:
    """Processes that hold a file below this folder, by number, and which."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [(process.pid, f.path) for f in process.open_files() if f.path.startswith(f"{root}/")]
    return found


def namespaces(processes: Iterable[psutil.Process]) -> set[str]:
    """The kernel's namespaces of networks, mounts and host names that they are in."""
    found = set()
    for process in processes:
        for kind in ("net", "mnt", "uts"):
            with suppress(OSError):
                found.add(str(Path(f"/proc/{process.pid}/ns/{kind}").readlink()))
    return found


class Place(Protocol):
    """The place where a round's study runs."""

    def call(self) -> None:
        """Have the same command run what is left."""

    def is_running(self) -> bool: ...

    def strike(self, strike: Strike) -> None:
        """Do what was drawn, and stay until it has had its effect."""

    def settle(self) -> None:
        """Until nothing runs any more."""


def survive(soak: Soak, place: Place, expected: dict[str, set[bytes]]) -> None:
    """Let the study meet its faults, and go on until it is done."""
    for strike in soak.strikes:
        while strike.phase == "not come" and not soak.is_done():
            if not place.is_running():
                place.settle()
                soak.look()
                place.call()
            if soak.await_moment(strike, place.is_running):
                place.strike(strike)
    for _ in range(CALLS):
        place.settle()
        soak.look()
        if soak.is_done():
            break
        place.call()
    assert soak.is_done(), [(r.cell_id, r.outcome, r.reason) for r in soak.bench.results()]
    # It closes what a killed call has left open.
    place.call()
    place.settle()
    soak.look()
    soak.end(expected)


class OnSlurm:
    """Jobs of the tests' cluster."""

    def __init__(self, soak: Soak, lab: Any, call: tuple[str, ...], chance: random.Random) -> None:
        self._soak, self._lab, self._call, self._chance = soak, lab, call, chance
        self._looked_at = 0.0
        self._queue = ""

    def call(self) -> None:
        done = self._soak.bench.matrix(*self._call, "--rerun", "failed")
        assert done.code == 0, done.stderr
        self._looked_at = 0.0

    def is_running(self) -> bool:
        if time.monotonic() > self._looked_at + QUEUE_S:
            self._queue = self._lab.command("squeue", "--noheader")
            self._looked_at = time.monotonic()
        return bool(self._queue)

    def settle(self) -> None:
        self._wait(lambda: False)
        # A node that has gone comes back.
        self._lab.clean()

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds, or no job is left."""
        end = time.monotonic() + PATIENCE_S
        while not condition() and self.is_running():
            assert time.monotonic() < end, self._queue
            time.sleep(0.1)

    def strike(self, strike: Strike) -> None:
        soak, over = self._soak, self._soak.launches() - self._soak.running()
        if strike.fault in OF_JOB:
            strike.hit = self._harm_job(strike)
            if strike.hit and strike.fault in ("cancel", "limit", "program"):
                self._wait(lambda: False)
        else:
            soak.kill(strike, self._chance)
        # A launch may outlive a notice that comes early, and a controller that is away.
        met = soak.running() if strike.fault in OF_JOB else strike.launches
        outlives = not strike.hit or strike.fault in ("notice", "controller")
        self._wait(lambda: outlives or met <= soak.launches(ended=True))
        if strike.fault in OF_JOB:
            strike.meets(over, soak.launches())

    def _harm_job(self, strike: Strike) -> bool:
        """Returns False if the job has ended before."""
        job_id = self._soak.bench.jobs()[-1]
        commands = {
            "cancel": ("scancel", str(job_id)),
            "requeue": ("scontrol", "requeue", str(job_id)),
            "preempt": (
                *("sbatch", "--partition=urgent", "--nodes=3", "--exclusive"),
                *("--output=/dev/null", "--wrap=sleep 1"),
            ),
            "limit": ("scontrol", "update", f"JobId={job_id}", "EndTime=now+1"),
            "notice": ("scancel", "--signal=USR1", "--batch", str(job_id)),
        }
        if strike.fault in commands:
            try:
                self._lab.command(*commands[strike.fault])
            except AssertionError:
                return False
        elif strike.fault == "program":
            found = self._soak.processes("program")
            for process in found:
                process.kill()
            return bool(found)
        elif strike.fault == "node":
            node = self._chance.choice(["n1", "n2"])
            self._lab.kill_node(node)
            self._lab.set_down(node)
        else:
            self._lab.kill_controller()
            try:
                time.sleep(self._chance.uniform(0, CONTROLLER_AWAY_S))
            finally:
                self._lab.start_controller()
        return True


class OnThisMachine:
    """Calls of `bench` with the launcher `local`, in a control group with little memory if there is one."""

    def __init__(
        self, soak: Soak, call: tuple[str, ...], group: tuple[str, ...], chance: random.Random
    ) -> None:
        self._soak, self._call, self._group, self._chance = soak, call, group, chance
        self._process: subprocess.Popen[str] | None = None
        self._told: signal.Signals | None = None

    def call(self) -> None:
        self._process = self._soak.bench.start(*self._call, "--rerun", "failed", before=self._group)
        self._told = None

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def settle(self) -> None:
        if self._process is None:
            return
        _, errors = self._process.communicate(timeout=PATIENCE_S)
        code = self._process.returncode
        self._process = None
        self._soak.bench.wait_for_processes()
        if self._told is None:
            assert code in (0, 1), errors
            assert "Traceback" not in errors, errors
        else:
            # One that had not begun to listen ends as any program does.
            assert code in (0, 1, 130, -self._told), errors

    def strike(self, strike: Strike) -> None:
        soak, over = self._soak, self._soak.launches() - self._soak.running()
        if strike.fault == "memory":
            self._exhaust(strike)
        elif strike.fault in _OF_BENCH:
            self._harm_bench(strike)
            strike.meets(over, soak.launches())
            return
        else:
            soak.kill(strike, self._chance)
        end = time.monotonic() + PATIENCE_S
        while self.is_running() and not strike.launches <= soak.launches(ended=True):
            assert time.monotonic() < end, strike
            time.sleep(0.05)

    def _harm_bench(self, strike: Strike) -> None:
        assert self._process is not None
        if strike.fault == "bench and guardian":
            for process in self._soak.processes("guardian"):
                process.kill()
        self._told = OF_BENCH.get(strike.fault, signal.SIGKILL)
        strike.hit = self.is_running()
        self._process.send_signal(self._told)
        self._process.wait(PATIENCE_S)
        self._soak.bench.wait_for_processes()

    def _exhaust(self, strike: Strike) -> None:
        """Have a neighbour in the group use up its memory; of the others the kernel ends a rank first."""
        victim = self._soak.victim(strike, self._chance) if self._group else None
        if victim is None:
            return
        with suppress(OSError):
            Path(f"/proc/{victim.pid}/oom_score_adj").write_text("1000")
            hog = subprocess.Popen([*self._group, sys.executable, "-c", HOG], cwd=checkout())
            # A rank may take so long to die that the kernel ends the neighbour as well.
            strike.hit = hog.wait(PATIENCE_S) in (0, -signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(bench_in, faulty_model, tmp_path_factory) -> dict[str, set[bytes]]:
    """The figures of the cells in an undisturbed study."""
    return trained(bench_in, faulty_model, tmp_path_factory, CELLS)


@pytest.fixture(scope="module")
def expected_over_a_link(bench_in, faulty_model, tmp_path_factory) -> dict[str, set[bytes]]:
    """The same on virtual nodes with a link."""
    return trained(bench_in, faulty_model, tmp_path_factory, LINKED)


def trained(
    bench_in: Callable[..., Bench],
    faulty_model: Callable[..., tuple[str, ...]],
    tmp_path_factory: pytest.TempPathFactory,
    cells: tuple[str, ...],
) -> dict[str, set[bytes]]:
    bench = bench_in(tmp_path_factory.mktemp("soak"))
    done = bench.matrix(*faulty_model(bench.folder), *cells)
    assert done.code == 0, done.stderr
    figures: dict[str, set[bytes]] = bench.figures()
    return figures


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("turn", range(ROUNDS))
def test_a_study_on_slurm_outlives_any_fault(turn, bench, lab, faulty_model, expected) -> None:
    strikes, chance = drawn("slurm", turn, ON_SLURM)
    with entry("slurm", turn, strikes):
        soak = Soak(bench, "slurm", strikes)
        survive(soak, OnSlurm(soak, lab, (*faulty_model(bench.folder), *ON_NODES), chance), expected)


@pytest.fixture
def group(memory_group) -> tuple[str, ...]:
    """Words before a command that let it and all it starts have MEMORY_BYTES; none where that cannot be."""
    try:
        return tuple(memory_group(MEMORY_BYTES))
    except pytest.skip.Exception:
        return ()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("turn", range(ROUNDS))
def test_a_study_on_this_machine_outlives_any_fault(
    turn, bench_in, faulty_model, tmp_path, group, expected
) -> None:
    strikes, chance = drawn("local", turn, HERE)
    with entry("local", turn, strikes):
        soak = Soak(bench_in(tmp_path), "local", strikes)
        survive(soak, OnThisMachine(soak, (*faulty_model(tmp_path), *CELLS), group, chance), expected)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("turn", range(ROUNDS))
def test_a_study_over_a_link_outlives_any_fault(
    turn, bench_in, faulty_model, tmp_path, group, expected_over_a_link
) -> None:
    strikes, chance = drawn("link", turn, HERE_LINKED)
    with entry("link", turn, strikes):
        soak = Soak(bench_in(tmp_path), "link", strikes)
        place = OnThisMachine(soak, (*faulty_model(tmp_path), *LINKED), group, chance)
        survive(soak, place, expected_over_a_link)


def test_a_rank_whose_torchrun_is_gone_before_it_can_watch_it_ends() -> None:
    """It had a second or so in which nothing would have ended it: it would wait for the others for long."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "harness.worker", "no such file"],
        env={**os.environ, "PYTHONPATH": str(checkout())},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
