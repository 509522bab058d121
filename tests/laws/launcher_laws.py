"""The laws of every launcher: tests in a class, of which each launcher has a subclass."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from builders import a_request

from harness.cli import run
from harness.launchers.launcher import JobLauncher, Launcher
from harness.launchers.registry import launcher, launchers
from harness.plan.expand import expand
from harness.plan.launchers import OWN, added_launchers, launcher_help
from harness.plan.study_file import BY_NAME, StudyFile
from results.job_store import JobStore
from results.outcome import Outcome
from results.store import Study

PATIENCE_S = 240.0
"""For a few steps of two ranks, on a machine that is full."""
WORK = {"workload": "mlp", "batch_size": 32, "strategy": "single,ddp", "repeats": 1, "device": "cpu"}
STEPS = {"budget": 0, "block_steps": 2, "quads": 0}
GIVEN = {"apply": True, "partition": "elsewhere"}
"""Options that some launcher reads; none reads all of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of a call of `bench`."""

    code: int
    out: str
    errors: str


class LauncherLaws:
    """Subclass it as `TestNAME`, and say what is named here; the rest is the same for all launchers."""

    name: str
    gpus = "1,2"
    """Sizes of the study that is run."""
    folder: Path
    variables: dict[str, str]
    """Options of every call, in addition to the options of the tests."""

    def options(self) -> dict[str, object]:
        """Options that a call needs in addition to --launcher, such as `site`; files are in `self.folder`."""
        return {}

    def finish(self) -> None:
        """Do what the launcher leaves to others, until what it has started or submitted has ended."""

    def command(self) -> list[str]:
        """`bench` as a process."""
        return [str(Path(sys.executable).with_name("bench"))]

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path, monkeypatch) -> None:
        self.folder = tmp_path
        self.variables = {}
        monkeypatch.chdir(tmp_path)

    @property
    def study(self) -> Study:
        return Study(self.folder / "study")

    def bench(self, *arguments: str) -> Done:
        """`bench` in this process."""
        out, errors = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.variables.items():
                patch.setenv(name, value)
            with redirect_stdout(out), redirect_stderr(errors):
                code = run(list(arguments))
        return Done(code=code, out=out.getvalue(), errors=errors.getvalue())

    def call(self, **changes: object) -> Done:
        """`bench matrix` of a small study by this launcher. An option that is changed to None is left out."""
        return self.bench(*self.words(**changes))

    def words(self, **changes: object) -> list[str]:
        """The words of such a call."""
        options = {**WORK, **STEPS, "gpus": self.gpus, "launcher": self.name, "out": "study"}
        if self.launcher.several_hosts:
            options["gpus_per_node"] = 1
        words = ["matrix", "--no-report"]
        for name, value in {**options, **self.options(), **changes}.items():
            flag = "--" + name.replace("_", "-")
            words += [] if value is None else [flag] if value is True else [flag, str(value)]
        return words

    @property
    def launcher(self) -> Launcher:
        return launcher(self.name)

    def starts(self) -> set[str]:
        """The launches and jobs that have been started, written or submitted."""
        return {path.name for kind in ("launches", "jobs") for path in self.study.root.glob(f"{kind}/*")}

    # The laws.

    def test_its_facts_are_whole(self) -> None:
        assert self.launcher.name == self.name
        assert launcher_help()[self.name].strip()
        assert self.launcher.options <= BY_NAME.keys()
        assert (self.launcher.site_file is not None) == ("site" in self.launcher.options)
        offer = self.launcher.offer()
        assert offer is None or f"--launcher {self.name}" in offer

    def test_it_is_imported_without_torch(self) -> None:
        home = OWN[self.name].place if self.name in OWN else added_launchers()[self.name].point.value
        module = home.partition(":")[0]
        code = f"import sys, {module}; assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **self.variables})

    def written(self) -> set[Path]:
        """Return the files of the folder, without the bytecode of imported modules."""
        return {path for path in self.folder.rglob("*") if "__pycache__" not in path.parts}

    def test_a_dry_run_shows_what_would_be_started_and_writes_nothing(self) -> None:
        self.options()
        before = self.written()
        done = self.call(gpus="1,2", dry_run=True)
        assert (done.code, done.errors) == (0, "")
        _, told, commands = done.out.partition("2 of 2 runs to do")
        assert told
        assert "harness." in commands
        assert self.written() == before

    def test_nodes_that_it_does_not_have_are_refused_before_anything_is_written(self) -> None:
        # Either nodes are hosts with a network of their own, or there is one host alone.
        several = self.launcher.several_hosts
        changes = {"gpus_per_node": None, "link": "1gbit"} if several else {"gpus_per_node": 1}
        done = self.call(gpus="2", **changes)
        assert done.code == 2
        assert done.errors.startswith(f"error: --{'link' if several else 'gpus-per-node 1'} ")
        assert f"--launcher {self.name}" in done.errors
        assert done.errors.count("\n") == 1
        assert not self.study.root.exists()

    def test_an_option_that_it_does_not_read_is_named(self) -> None:
        others = {name for each in launchers() for name in each.options} - self.launcher.options
        if not others:
            pytest.skip("no other launcher here reads an option that this one does not")
        unread = [name for name in GIVEN if name in others]
        assert unread, "add to GIVEN an option that this launcher does not read"
        done = self.call(dry_run=True, **{unread[0]: GIVEN[unread[0]]})
        assert done.code == 0
        assert f"no effect with --launcher {self.name}: {BY_NAME[unread[0]].flag} (for " in done.errors

    @pytest.mark.slow
    def test_the_same_command_goes_on_where_it_stopped(self) -> None:
        done = self.call()
        assert done.code == 0, done.errors
        self.finish()
        results = self.study.collect()
        assert {result.outcome for result in results} == {Outcome.OK}
        assert all(result.ranks_present == result.ranks_expected for result in results)
        # The cells of a study are the same whoever runs it.
        [plan] = self.study.plans()
        given = StudyFile(**WORK, **STEPS, gpus=self.gpus)
        request = a_request(given, source_folder=self.folder)
        expected = expand(request, study="s", created_at="").cells
        assert [cell.id for cell in plan.cells] == [cell.id for cell in expected]
        assert {result.cell_id for result in results} == {cell.id for cell in plan.cells}
        before = self.starts()
        again = self.call()
        assert again.code == 0, again.errors
        assert self.starts() == before
        assert "; 0 of " in self.call(dry_run=True).out


class CampaignLaws(LauncherLaws):
    """Further laws of launchers whose call stays until the runs are done."""

    @pytest.mark.slow
    def test_an_interrupted_call_ends_its_ranks_and_leaves_its_runs_to_the_next(self) -> None:
        with self.started(*self.words(gpus="2", budget=600)) as bench:
            self.until(self.began, bench)
            ranks = bench.children(recursive=True)
            bench.send_signal(signal.SIGTERM)
            assert bench.wait(60) == 130
            _, alive = psutil.wait_procs(ranks, 30)
            assert alive == []
        [result] = self.study.results()
        assert (result.outcome, result.reason) == (Outcome.CANCELLED, "interrupted by the user")
        assert "; 1 of 1 run to do" in self.call(gpus="2", budget=600, dry_run=True).out

    def began(self) -> bool:
        """Whether rank 0, whom the supervisor follows, has begun a run; another rank may be sooner."""
        logs = self.study.root.glob("launches/*/rank-00000.jsonl")
        return any('"event": "run"' in log.read_text() for log in logs)

    def started(self, *arguments: str) -> Started:
        return Started([*self.command(), *arguments], self.folder, self.variables)

    def until(self, condition, bench: psutil.Popen) -> None:
        """Wait for a condition, as long as `bench` runs."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            said = (self.folder / "said").read_text()
            assert bench.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.05)


class Started:
    """`bench` as a separate process, which ends with the test."""

    def __init__(self, command: list[str], folder: Path, variables: dict[str, str]) -> None:
        self._command, self._folder = command, folder
        self._variables = variables

    def __enter__(self) -> psutil.Popen:
        with (self._folder / "said").open("wb") as log:
            self._process = psutil.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env={**os.environ, **self._variables},
            )
        return self._process

    def __exit__(self, *error: object) -> None:
        with suppress(psutil.NoSuchProcess):
            left = [self._process, *self._process.children(recursive=True)]
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()


class JobLaws(LauncherLaws):
    """Further laws of launchers that make jobs, while nothing starts these."""

    @pytest.fixture
    def idle(self) -> None:
        """A cluster that takes jobs and starts none: without one, nobody starts any."""

    def test_a_plan_whose_points_are_all_skipped_has_no_jobs(self, idle) -> None:
        # Data parallelism on one worker is a skip.
        for done in (self.call(gpus="1", strategy="ddp", dry_run=True), self.call(gpus="1", strategy="ddp")):
            said = done.out + done.errors
            assert "1 point skipped" in said
            assert done.code == int("nothing was measured" in said)
            assert "no jobs are left to submit" in said
            assert "defect" not in said
        assert self.starts() == set()

    def test_jobs_hold_their_cells_until_they_are_cancelled(self, idle) -> None:
        assert isinstance(self.launcher, JobLauncher)
        assert self.call(gpus="1").code == 0
        store = JobStore(self.study.root)
        [job] = store.jobs()
        assert (job.launcher, store.ended(job.job_id)) == (self.name, None)
        # Neither this launcher nor another has its cells done twice.
        assert self.call(gpus="1").code == 0
        here = self.call(gpus="1", launcher="local", **dict.fromkeys(self.options()))
        assert (here.code, "left to jobs that are still live" in here.errors) == (1, True)
        assert self.starts() == {job.job_id}
        done = self.bench("cancel", "study")
        assert (done.code, done.out.startswith("1 job cancelled")) == (0, True)
        self.finish()
        status = self.bench("status", "study")
        assert f"{job.job_id} " in status.out
        ended = store.ended(job.job_id)
        assert ended.outcome is Outcome.CANCELLED
        assert self.bench("cancel", "study").out.startswith("0 jobs cancelled")
        assert self.call(gpus="1").code == 0
        assert len(store.jobs()) == 2

    def test_a_job_is_closed_without_asking_anybody(self, idle) -> None:
        assert self.call(gpus="1").code == 0
        assert self.bench("cancel", "study", "--forget").out == "1 job closed\n"
        store = JobStore(self.study.root)
        [job] = store.jobs()
        ended = store.ended(job.job_id)
        assert (ended.outcome, ended.reason) == (Outcome.CANCELLED, "given up by the user")


def a_port() -> int:
    """Different from the one of another process of tests."""
    return 25_000 + os.getpid() % 4000
