"""Jobs on a real Slurm: submitted, asked about, cancelled, and started with what they should have."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from results.outcome import Outcome
from results.plan import Placement
from slurm.client import Client
from slurm.job_view import JobPhase, JobView
from slurm.runner import RefusedError, SlurmError
from slurm.script import (
    ScriptJob,
    agent_command,
    job_script,
    log_path,
    rendezvous_port,
)
from slurm.site import SiteProfile

SITE = SiteProfile(partition="main", cpus_per_gpu=1)
NASTY = 'it\'s a "$(touch pwned)" `id` \\ #1; 50%j \u00e9'


def job(tmp_path: Path, command: tuple[str, ...], **changes: object) -> ScriptJob:
    values: dict[str, object] = {
        "name": "test",
        "placement": Placement(nodes=1, gpus_per_node=1),
        "time_limit_s": 600,
        "folder": tmp_path,
        "log_folder": tmp_path,
        "command": command,
    }
    return ScriptJob(**(values | changes))


@pytest.fixture
def finished(lab, tmp_path) -> Callable[..., tuple[JobView, str]]:
    """Submits a command as a job, and gives its end and its log."""

    def run(command: tuple[str, ...], site: SiteProfile = SITE, **changes: object) -> tuple[JobView, str]:
        job_id = Client().submit(job_script(site, job(tmp_path, command, **changes)))
        view = lab.wait_for(job_id, "COMPLETED", "FAILED")
        return view, log_path(tmp_path, job_id).read_text()

    return run


def test_a_job_runs_and_is_over(finished) -> None:
    view, log = finished(("echo", "two  words"), name="hello")
    assert log == "two  words\n"
    assert (view.name, view.phase, view.outcome) == ("hello", JobPhase.ENDED_WELL, Outcome.OK)
    assert (view.exit_code, view.signal, view.restarts) == (0, None, 0)


@pytest.mark.parametrize(
    ("code", "words"), [("exit 3", "exit code 3"), ("kill -9 $$", "SIGKILL"), ("kill -SEGV $$", "SIGSEGV")]
)
def test_a_job_that_fails_says_how(finished, code, words) -> None:
    view, _ = finished(("bash", "-c", code))
    assert view.outcome is Outcome.CRASHED
    assert words in view.words


def test_a_log_folder_that_is_not_there_fails_the_job(lab, tmp_path) -> None:
    script = job_script(SITE, job(tmp_path, ("true",), log_folder=tmp_path / "none"))
    view = lab.wait_for(Client().submit(script), "FAILED")
    assert view.signal == 53


def test_waiting_running_cancelled(lab, tmp_path) -> None:
    client = Client()
    whole = SiteProfile(exclusive=True)
    sleeping = job(tmp_path, ("sleep", "600"), placement=Placement(nodes=4, gpus_per_node=8))
    first, second = (client.submit(job_script(whole, sleeping)) for _ in range(2))
    lab.wait_for(first, "RUNNING")
    views = client.query([first, second, 999_999])
    assert list(views) == [first, second]
    assert (views[first].phase, views[second].phase) == (JobPhase.RUNNING, JobPhase.WAITING)
    assert views[first].outcome is views[second].outcome is None
    assert {view.job_id for view in client.own_jobs()} >= {first, second}
    client.cancel([first, second, 999_999])
    assert lab.wait_for(first, "CANCELLED").outcome is Outcome.CANCELLED
    assert lab.wait_for(second, "CANCELLED").outcome is Outcome.CANCELLED
    client.cancel([first])
    assert client.query([999_999]) == {}


def test_a_dependent_job_waits(lab, tmp_path) -> None:
    client = Client()
    first = client.submit(
        job_script(SITE, job(tmp_path, ("bash", "-c", "until test -e go; do sleep 0.1; done; exit 1")))
    )
    report = ScriptJob(
        name="report",
        placement=None,
        time_limit_s=60,
        folder=tmp_path,
        log_folder=tmp_path,
        command=("bash", "-c", 'echo "$SLURM_CPUS_ON_NODE CPU, GPUs: ${SLURM_JOB_GPUS-none}"'),
    )
    after = client.submit(job_script(SITE, report), after=[first])
    assert client.query([after])[after].reason == "Dependency"
    (tmp_path / "go").touch()
    lab.wait_for(after, "COMPLETED")
    assert client.query([first])[first].outcome is Outcome.CRASHED
    assert log_path(tmp_path, after).read_text() == "1 CPU, GPUs: none\n"


@pytest.mark.parametrize(
    ("site", "changes", "words"),
    [
        (SiteProfile(partition="nonsense"), {}, "Invalid partition name specified"),
        (SITE, {"placement": Placement(nodes=5, gpus_per_node=1)}, "More processors requested|Node count"),
        (SITE, {"placement": Placement(nodes=1, gpus_per_node=9)}, "Requested node configuration"),
        (SiteProfile(gpu_type="a100"), {}, "Requested node configuration is not available"),
        (SiteProfile(partition="short"), {"time_limit_s": 3600}, "Requested time limit is invalid"),
        (SiteProfile(directives={"no-such-option": True}), {}, "no-such-option"),
    ],
)
def test_the_impossible_is_refused_at_once(lab, tmp_path, site, changes, words) -> None:
    script = job_script(site, job(tmp_path, ("true",), **changes))
    with pytest.raises(RefusedError, match=words):
        Client().submit(script)
    with pytest.raises(RefusedError):
        Client().check(script)


def test_checking_submits_nothing(lab, tmp_path) -> None:
    before = Client().own_jobs()
    Client().check(job_script(SITE, job(tmp_path, ("true",))))
    assert {view.job_id for view in Client().own_jobs()} == {view.job_id for view in before}


def test_a_job_gets_the_users_environment_and_the_sites(finished, monkeypatch, tmp_path) -> None:
    leaks = {
        "SBATCH_PARTITION": "nonsense",
        "SBATCH_EXPORT": "NONE",
        "SLURM_JOB_ID": "12345",
        "SLURM_NTASKS": "99",
        "SQUEUE_PARTITION": "urgent",
        "SQUEUE_FORMAT": "%i",
        "PYTHONPATH": "/mine",
        "SECRET": "token",
    }
    for name, value in leaks.items():
        monkeypatch.setenv(name, value)
    site = SiteProfile(
        setup=("UNSET=$NOT_SET_AT_ALL", "export FROM_SETUP='a b'"),
        environment={"QUOTED": NASTY, "LINES": "two\nlines"},
    )
    view, log = finished(("env", "--null"), site)
    variables = dict(each.split("=", 1) for each in log.split("\0") if each)
    assert view.outcome is Outcome.OK
    assert variables["PYTHONSAFEPATH"] == "1"
    assert variables["FROM_SETUP"] == "a b"
    assert (variables["QUOTED"], variables["LINES"]) == (NASTY, "two\nlines")
    assert variables["SLURM_JOB_ID"] == str(view.job_id)
    assert variables["SLURM_JOB_PARTITION"] == "main"
    assert variables["HOME"] == os.environ["HOME"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "0"
    assert not {"SECRET", "PYTHONPATH", "SBATCH_PARTITION", "SQUEUE_FORMAT"} & set(variables)
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert int(variables["MASTER_PORT"]) == rendezvous_port(view.job_id, 0)


def test_python_imports_nothing_from_where_it_stands(finished, tmp_path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('from the working folder')")
    view, _ = finished((sys.executable, "-c", "import json"))
    assert view.outcome is Outcome.OK


def test_a_set_up_that_fails_stops_the_job(finished) -> None:
    view, log = finished(("echo", "started"), SiteProfile(setup=("module load nonsense",)))
    assert view.outcome is Outcome.CRASHED
    assert "module: command not found" in log
    assert "started" not in log


def test_names_and_paths_are_taken_as_they_are(lab, tmp_path) -> None:
    folder, logs = tmp_path / NASTY, tmp_path / NASTY.replace("\\", "") / "logs %j %% \u00e9"
    folder.mkdir()
    logs.mkdir(parents=True)
    site = SiteProfile(directives={"comment": NASTY})
    job_id = Client().submit(
        job_script(site, job(tmp_path, ("pwd",), name=f"{NASTY} | x", folder=folder, log_folder=logs))
    )
    view = lab.wait_for(job_id, "COMPLETED")
    assert view.name == f"{NASTY} | x"
    assert log_path(logs, job_id).read_text() == f"{folder}\n"
    assert f"Comment={NASTY} " in lab.command("scontrol", "--oneliner", "show", "job", str(job_id))
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    "name", ["'", '"', "\\", "a\\'b", '\\"', "#", "a #b", "hetjob", ":", "$HOME", "%j", " "]
)
def test_sbatch_reads_every_name_as_it_is(lab, tmp_path, name) -> None:
    client = Client()
    held = SiteProfile(directives={"hold": True})
    job_id = client.submit(job_script(held, job(tmp_path, ("true",), name=name)))
    assert client.query([job_id])[job_id].name == name
    client.cancel([job_id])


AGENT = """
    echo "$SLURM_NODEID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE $PYTHONSAFEPATH $SITE"
    test -n "${FAILING-}" || exit 0
    touch "said-$SLURM_NODEID"
    test "$SLURM_NODEID" = "$FAILING" || exec sleep 600
    # All are ended at once then: first they are to have spoken.
    until test -e said-0 -a -e said-1 -a -e said-2 -a -e said-3; do sleep 0.1; done
    exit 3
"""


@pytest.mark.parametrize("failing", [None, "2"])
def test_one_agent_runs_on_each_node(finished, tmp_path, failing) -> None:
    placement = Placement(nodes=4, gpus_per_node=2)
    environment = {"SITE": "here"} | ({} if failing is None else {"FAILING": failing})
    site = SiteProfile(
        cpus_per_gpu=3, environment=environment, node_setup=(f'touch "{tmp_path}/$SLURMD_NODENAME"',)
    )
    agents = agent_command(site, placement, ("bash", "-c", textwrap.dedent(AGENT)), tmp_path / "50%j agent")
    view, log = finished(agents, site, placement=placement)
    assert all((tmp_path / node).exists() for node in ("n1", "n2", "n3", "n4"))
    logs = [(tmp_path / f"50%j agent-{node}.log").read_text().splitlines() for node in range(4)]
    assert [lines[0] for lines in logs] == [f"{node} n{node + 1} 0,1 6 1 here" for node in range(4)]
    if failing is None:
        assert view.outcome is Outcome.OK
    else:
        # The others sleep for long, but srun ends them; its own code is the largest of all, here theirs.
        assert (view.outcome, view.exit_code) == (Outcome.CRASHED, 128 + signal.SIGTERM)
        assert "n3: task 2: Exited with exit code 3" in log


def test_the_cluster_describes_itself(lab) -> None:
    cluster = Client().cluster()
    assert (Client().cluster_name, cluster.has_accounting, cluster.associations) == ("lab", False, None)
    nodes = {group.partition: group.nodes for group in cluster.groups}
    assert nodes == {"main": 4, "short": 2, "urgent": 4}
    limits = {group.partition: group.time_limit_s for group in cluster.groups}
    assert limits == {"main": 86_400, "short": 1800, "urgent": None}
    assert all((group.gpus, group.cpus, group.is_up) == ({"h100": 8}, 16, True) for group in cluster.groups)


def test_a_cluster_that_is_not_there(lab, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
    with pytest.raises(SlurmError, match="squeue --me"):
        Client(timeout_s=0.5).own_jobs()


KILLED_SESSION = """
    import os, runpy, signal, sys
    lab = runpy.run_path(sys.argv[1])["Lab"]()
    lab.start()
    lab.command("sbatch", "--output=/dev/null", "--wrap", "sleep 300")
    lab.command("srun", "true")
    print(lab.folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_session_does_no_harm(running_lab) -> None:
    fixtures = Path(__file__).parents[1] / "laws" / "slurm_fixtures.py"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_SESSION), str(fixtures)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(fixtures.parents[2]), *sys.path])},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = Path(done.stdout.strip())
    lab = runpy.run_path(str(fixtures))
    lab["sweep"]()
    assert not left.exists()
    assert not [
        process for process in psutil.process_iter() if lives(process) and lab["belongs"](process, left)
    ]
    running_lab.wait_idle()


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and bool(process.environ())
    return False
