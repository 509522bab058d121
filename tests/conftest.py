"""Shared by all tests: living ranks in gloo groups, and `bench` with a model that fails on demand."""

from __future__ import annotations

import fcntl
import gc
import io
import multiprocessing
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, settings
from packages import module_at

from harness.cli import run as run_bench
from harness.features import FEATURES
from results.job_store import JobStore
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study
from strategies.catalog import STRATEGIES
from workloads.catalog import MEMBERS, WORKLOADS

pytest_plugins = ["command_fixtures", "perf_fixtures", "record_fixtures", "slurm_fixtures", "study_fixtures"]
"""Fixtures of tests/laws, which tests of the core and of features use."""
PRELOADED = ["torch", "torch._dynamo", "pytest", "hypothesis", "harness.worker.run"]
"""Imported once, by the server that ranks are forked from."""
GRACE_S = 5.0
"""For the other ranks to answer after one has failed: they may wait for it in a collective."""
PATIENCE_S = 1200.0
"""For the ranks to answer: more than the slowest test takes on a busy machine, as it only ends what hangs."""


@pytest.fixture(autouse=True)
def no_members_of_features() -> Iterator[None]:
    """Take the members of features out of the catalogs again, which have them once a text has named them."""
    yield
    for name in [name for name, one in STRATEGIES.offered.items() if one.own and name in STRATEGIES]:
        STRATEGIES.forget(name)
    for name in [name for name, one in WORKLOADS.offered.items() if one.own and name in MEMBERS]:
        del WORKLOADS.entries[name], MEMBERS[name]
        WORKLOADS._parsed.clear()


class Pool:
    """`size` processes in one gloo group, each with one thread."""

    def __init__(self, size: int, store: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connections, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            given = {"CONNECTION": there, "RANK": rank, "SIZE": size, "STORE": str(store)}
            script = str(Path(__file__).with_name("rank.py"))
            process = context.Process(
                target=runpy.run_path, args=(script,), kwargs={"init_globals": given}, daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(
        self, function: Callable[..., object], *arguments: object, timeout_s: float, dying: tuple[int, ...]
    ) -> list[Any]:
        """`function(rank, *arguments)` of every rank. Fails with the traceback of the rank that failed."""
        # By file and name: test modules are no importable packages.
        request = pickle.dumps((function.__code__.co_filename, function.__name__, arguments))
        for connection in self._connections:
            connection.send_bytes(request)
        answers, errors = self._collect(timeout_s, dying)
        if errors or len(answers) < len(self._connections):
            pytest.fail("\n".join(errors) or f"only the ranks {sorted(answers)} answered in {timeout_s} s")
        return [answers[rank] for rank in range(len(answers))]

    def _collect(self, timeout_s: float, dying: tuple[int, ...]) -> tuple[dict[int, Any], list[str]]:
        answers: dict[int, Any] = {}
        errors: list[str] = []
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        end = time.monotonic() + timeout_s
        while pending and (ready := wait(list(pending), timeout=max(0, end - time.monotonic()))):
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    good, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    good, value = rank in dying, None if rank in dying else "the process has ended"
                if good:
                    answers[rank] = value
                else:
                    errors.append(f"rank {rank}: {value}")
                    end = min(end, time.monotonic() + GRACE_S)
        return answers, errors

    def end(self, *, patience_s: float) -> None:
        """Let the ranks leave the group; kill those that have not after `patience_s`."""
        if patience_s:
            for connection in self._connections:
                connection.send_bytes(b"")
        end = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()


def pytest_configure() -> None:
    # Tests that a shell starts in the background ignore SIGINT, and so would all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes of pytest-xdist have 80, to which tables would be fitted: a test of a width sets its own.
    os.environ.pop("COLUMNS", None)
    # On a loaded machine an example takes long, and so does the drawing of one.
    settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("loaded")


FIRST = ["slurm faults", "slurm", "small study"]
"""The longest groups, and one that many tests wait for."""
FOLDERS = ["gpu", "slurm", "harness", "features", "worker", "strategies"]
"""Folders of long groups, the longest first."""


# First, because xdist reads the marks in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests for parallel processes: a group runs in one process.

    A file is a group, so that its shared fixtures are made once, unless a test is marked with another group
    (which spreads a long file). Each group of Slurm starts a cluster: its fault tests are one group, its
    other tests another. The tests that read the small study are one group. These come first, then the groups
    with slow tests, longest folders first: only short groups are left at the end of the run, when a long one
    would keep a single process busy. In their file slow tests come first, because a process takes its next
    group when two tests of the last one are left, and that group waits for them.
    """
    names = {item: _group(item) for item in items}
    slow = {names[item] for item in items if item.get_closest_marker("slow") is not None}

    def place(item: pytest.Item) -> tuple[int, int, Path, bool]:
        folders = item.path.relative_to(Path(__file__).parents[1]).parts[1:3]
        return (
            FIRST.index(names[item]) if names[item] in FIRST else len(FIRST) + (names[item] not in slow),
            min(FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS) for folder in folders),
            item.path,
            item.get_closest_marker("slow") is None,
        )

    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(names[item]))
    items.sort(key=place)


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    if mark is not None:
        return str(mark.args[0])
    fixtures = getattr(item, "fixturenames", ())
    shared = {"running_lab": "slurm", "small_study": "small study"}
    return next((group for fixture, group in shared.items() if fixture in fixtures), str(item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a feature which this tree lacks."""
    needed = {str(name) for mark in item.iter_markers("needs") for name in mark.args}
    if absent := needed - set(FEATURES):
        pytest.skip(f"there is no {', '.join(sorted(absent))} here")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Torch makes 300,000 objects while it is imported, which no collection of garbage goes through."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude imported and collected objects from garbage collection during the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(2, function, *arguments)` runs a module-level function on two ranks, and gives their results.

    A rank is called `function(rank, *arguments)`, with the default process group open; arguments and
    results are pickled. What raises, or takes longer than `PATIENCE_S`, fails the test and ends the pool; the
    next test gets a new one. The ranks in `dying` may end without a result, and give None. `fresh` ranks have
    run nothing before, and end with the test.
    """
    pools: dict[int, Pool] = {}

    def run(
        size: int,
        function: Callable[..., object],
        *arguments: object,
        dying: tuple[int, ...] = (),
        fresh: bool = False,
    ) -> list[Any]:
        known = None if fresh else pools.pop(size, None)
        pool = known or Pool(size, tmp_path_factory.mktemp("ranks") / "store")
        intact = False
        try:
            results = pool.run(function, *arguments, timeout_s=PATIENCE_S, dying=dying)
            intact = not dying and not fresh
        finally:
            if intact:
                pools[size] = pool
            else:
                pool.end(patience_s=0)
        return results

    yield run
    for pool in pools.values():
        pool.end(patience_s=5)


@pytest.fixture(scope="session")
def other_rounding() -> ModuleType:
    """A module that sums in another order on ranks, as another CPU would."""
    return module_at(Path(__file__).with_name("other_rounding.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The exit code and the output of a call of `bench`."""

    code: int
    stdout: str
    stderr: str


COUNTED = (
    *("--device", "cpu", "--repeats", "1", "--budget", "0"),
    *("--warmup-steps", "5", "--block-steps", "5", "--quads", "0"),
)
"""Steps that are counted, not timed: what is trained is always the same."""
PATIENT = """
import sys, time
from functools import partial
from pathlib import Path
import psutil
from harness.cli import main
from harness.launch import campaign, supervise

then = counted = 0.0
def clock():
    global then, counted
    now, reached = time.monotonic(), Path("reached")
    if reached.exists() and psutil.pid_exists(int(reached.read_text())):
        counted += now - then
    then = now
    return counted

campaign.Deadline = partial(campaign.Deadline, clock=clock)
supervise.Pulse = partial(supervise.Pulse, clock=clock)
main()
"""
"""`bench` whose clocks of silence and of --max-time run while a rank stands still (`reached`), and not while
ranks start on a busy machine."""


class Bench:
    """`bench` as it is called in one folder, on a Slurm or on this machine, and what its studies hold."""

    def __init__(self, folder: Path, lab: Any = None) -> None:
        self.folder = folder
        self.counted = COUNTED
        self._lab = lab

    def __call__(self, *arguments: object, **variables: str) -> Done:
        """Call it in this process, with these variables in addition to the cluster's."""
        given = {**(self._lab.environment if self._lab else {}), **variables}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        out, errors = io.StringIO(), io.StringIO()
        try:
            with chdir(self.folder), redirect_stdout(out), redirect_stderr(errors):
                code = run_bench([str(argument) for argument in arguments])
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        return Done(code=code, stdout=out.getvalue(), stderr=errors.getvalue())

    def matrix(self, *arguments: object, out: str = "study", **variables: str) -> Done:
        """`bench matrix` with steps that are counted."""
        return self(*self._words(out), *arguments, **variables)

    def start(
        self, *arguments: object, before: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[str]:
        """Start `bench matrix` as a separate process. `before` are words in front of the command."""
        return subprocess.Popen(
            [*before, sys.executable, "-P", "-c", PATIENT, *self._words("study"), *map(str, arguments)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )

    def run(self, *arguments: object, before: tuple[str, ...] = (), **variables: str) -> Done:
        """Start such a process and wait for it."""
        process = self.start(*arguments, before=before, **variables)
        out, errors = process.communicate()
        return Done(code=process.returncode, stdout=out, stderr=errors)

    def _words(self, out: str) -> tuple[str, ...]:
        launcher = ("slurm",) if self._lab else ("local", "--oversubscribe", "--no-report")
        return ("matrix", *COUNTED, "--launcher", *launcher, "--out", out)

    def study(self, out: str = "study") -> Study:
        return Study(self.folder / out)

    def jobs(self, out: str = "study") -> list[int]:
        """The scheduler's numbers of a study's jobs, oldest first."""
        store = JobStore(self.folder / out)
        found = [store.submission(job.job_id) for job in store.jobs()]
        return [int(submission.scheduler_id) for submission in found if submission is not None]

    def settle(self, timeout_s: float = 500) -> None:
        """Wait until the queue is empty."""
        self._lab.wait(lambda: not self._lab.command("squeue", "--noheader"), "an empty queue", timeout_s)

    def results(self, out: str = "study") -> list[RunResult]:
        return self.study(out).results()

    def figures(self, out: str = "study") -> dict[str, set[bytes]]:
        """Return the losses, parameters and bytes of all ranks of each cell's good runs."""
        study = self.study(out)
        found: dict[str, set[bytes]] = {}
        for result in study.results():
            if result.outcome is Outcome.OK:
                records = study.rank_records(result.cell_id, result.run_id)
                found.setdefault(result.cell_id, set()).add(
                    msgspec.json.encode(
                        [
                            (
                                *(record.rank, record.warmup_loss, record.steps.loss),
                                *(record.parameters_hash, record.work),
                            )
                            for record in records
                        ]
                    )
                )
        return found

    def named(self, word: str) -> list[RunResult]:
        """Return the results of the cells that have this word in their id."""
        return [result for result in self.results() if word in result.cell_id]

    def processes(self) -> list[psutil.Process]:
        """Return the processes that work in this folder."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and str(self.folder) in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wait_for_processes(self, timeout_s: float = 120) -> None:
        """Wait until none of them is left. Fails after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < end, [process.cmdline() for process in left if process.is_running()]
            time.sleep(0.1)


@pytest.fixture(scope="session")
def bench_in() -> Callable[..., Bench]:
    """`bench_in(folder)` is `bench` on this machine, `bench_in(folder, lab)` on the cluster."""
    return Bench


@pytest.fixture(scope="session")
def faulty_model() -> Callable[..., tuple[str, ...]]:
    """`faulty_model(folder, "1/2 8 wait")` puts tests/faulty.py there, and gives the words that train it."""

    def put(folder: Path, *faults: str) -> tuple[str, ...]:
        shutil.copy(Path(__file__).with_name("faulty.py"), folder)
        for name in ("fault", "reached"):
            (folder / name).unlink(missing_ok=True)
        if faults:
            (folder / "fault").write_text("".join(f"{fault}\n" for fault in faults))
        return ("--workload", "py:faulty:build")

    return put


@pytest.fixture(scope="session")
def undisturbed(bench_in, faulty_model, tmp_path_factory) -> Bench:
    """The study of that model without a fault, on this machine."""
    base = tmp_path_factory.getbasetemp()
    # The processes of pytest-xdist share the folder above their own: the first one that asks makes the study.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    folder.mkdir(exist_ok=True)
    bench: Bench = bench_in(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            batches = ",".join(str(2**power) for power in range(10))
            cells = ("--gpus", "1,2", "--strategy", "single,ddp", "--batch-size", batches)
            done = bench.matrix(*faulty_model(folder), *cells)
            assert done.code == 0, done.stderr
            (folder / "made").touch()
    return bench


@pytest.fixture(scope="session")
def expected(undisturbed) -> dict[str, set[bytes]]:
    """The figures of its cells when nothing goes wrong."""
    figures = undisturbed.figures()
    assert len(figures) == 20
    return figures


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], list[str]]]:
    """Words in front of a command that limit the memory of it and its children together, in bytes.

    They run it in a new control group, with which the kernel really ends processes; skips where none can be
    made.
    """
    made: list[Path] = []

    def limited(limit_bytes: int) -> list[str]:
        folder = _own_memory_group() / f"bench-test-{os.getpid()}-{len(made)}"
        try:
            folder.mkdir()
            made.append(folder)
            limits = [folder / name for name in ("memory.limit_in_bytes", "memory.max")]
            next(path for path in limits if path.exists()).write_text(str(limit_bytes))
        except (OSError, StopIteration):
            pytest.skip("no control group with a memory limit can be made here")
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(folder)]

    yield limited
    for folder in made:
        end = time.monotonic() + 100
        while folder.exists() and time.monotonic() < end:
            # Busy until the kernel has buried the last process.
            with suppress(OSError):
                folder.rmdir()
            time.sleep(0.05)


def _own_memory_group() -> Path:
    lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory", path.lstrip("/"))
    return Path("/sys/fs/cgroup", groups.get("", "/").lstrip("/"))
