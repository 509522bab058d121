"""The client without a cluster: what Slurm printed once (version 22.05.8), and what it says in distress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from results.outcome import Outcome
from slurm.client import Client
from slurm.cluster import Association, NodeGroup, read_limits, read_sinfo
from slurm.job_view import JobPhase, JobView, read_sacct, read_squeue
from slurm.runner import (
    Completed,
    NoAnswerError,
    QueueFullError,
    RefusedError,
    SlurmError,
    client_environment,
    job_environment,
    run_program,
)

RECORDED = Path(__file__).parent / "recorded"
NO_JOB = Completed((), 1, "", "slurm_load_jobs error: Invalid job id specified\n")
UNREACHABLE = Completed(
    (), 1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
)


def recorded(name: str) -> str:
    return (RECORDED / f"{name}-22.05.txt").read_text(encoding="utf-8")


def said(text: str) -> Completed:
    return Completed((), 0, text, "")


class Tape:
    """A Runner that answers by the name of the program, and remembers what was asked."""

    def __init__(self, **answers: Completed) -> None:
        self.answers = answers
        self.asked: list[tuple[str, ...]] = []

    def __call__(
        self, command: Sequence[str], *, stdin: str, environment: Mapping[str, str], timeout_s: float
    ) -> Completed:
        self.asked.append(tuple(command))
        return self.answers[command[0]]


def test_squeue_is_read() -> None:
    views = {view.job_id: view for view in read_squeue(recorded("squeue"))}
    assert len(views) == 14
    assert views[29] == JobView(
        job_id=29,
        name="requeued",
        state="RUNNING",
        reason=None,
        exit_code=0,
        signal=None,
        restarts=1,
        end="2026-11-21T08:02:34",
        source="squeue",
    )
    assert {job_id: view.outcome for job_id, view in views.items() if view.phase.ended} == {
        16: Outcome.OK,
        17: Outcome.CRASHED,
        18: Outcome.CRASHED,
        19: Outcome.CANCELLED,
        21: Outcome.NODE_FAILED,
        22: Outcome.CRASHED,
        23: Outcome.OK,
        25: Outcome.CANCELLED,
        27: Outcome.TIMED_OUT,
    }
    assert {job_id for job_id, view in views.items() if view.is_held} == {24, 26, 28}
    assert {views[20].phase, views[29].phase} == {JobPhase.RUNNING}
    assert views[20].outcome is None


def test_squeues_exit_codes_are_raw_before_23_02_and_pairs_since() -> None:
    endings = {view.job_id: (view.exit_code, view.signal) for view in read_squeue(recorded("squeue"))}
    # 768 = 3 << 8; 9 and 15 are signals; 4021 = 0x0fb5 is signal 0x35 = 53 with a core.
    assert (endings[17], endings[18], endings[19], endings[22]) == ((3, None), (0, 9), (0, 15), (0, 53))
    newer = recorded("squeue").replace("|768|", "|3:0|").replace("|9|", "|0:9|").replace("|4021|", "|0:53|")
    assert {view.job_id: (view.exit_code, view.signal) for view in read_squeue(newer)} == endings


def test_a_name_may_hold_the_separator_and_a_line_break() -> None:
    for read, name in ((read_squeue, "squeue"), (read_sacct, "sacct")):
        names = [view.name for view in read(recorded(name))]
        assert "a | pipe" in names
        assert "line\nbreak" in names


def test_sacct_is_read() -> None:
    views = {view.job_id: view for view in read_sacct(recorded("sacct"))}
    assert views[25].state == "CANCELLED"
    assert (views[30].exit_code, views[30].signal) == (0, 53)
    assert {job_id: view.outcome for job_id, view in views.items() if view.phase.ended} == {
        22: Outcome.OK,
        23: Outcome.CRASHED,
        24: Outcome.CRASHED,
        25: Outcome.CANCELLED,
        26: Outcome.TIMED_OUT,
        27: Outcome.NODE_FAILED,
        28: Outcome.PREEMPTED,
        30: Outcome.CRASHED,
        31: Outcome.OK,
        35: Outcome.OK,
        36: Outcome.TIMED_OUT,
    }


def test_a_job_that_runs_in_the_books_alone_is_not_known_to_run() -> None:
    running = next(view for view in read_sacct(recorded("sacct")) if view.state == "RUNNING")
    assert running.phase is JobPhase.UNKNOWN
    assert running.outcome is Outcome.UNKNOWN


def test_words() -> None:
    words = {view.job_id: view.words for view in read_squeue(recorded("squeue"))}
    assert words[16] == "COMPLETED"
    assert words[17] == "FAILED, exit code 3, NonZeroExitCode"
    assert words[18] == "FAILED, SIGKILL, JobLaunchFailure"
    assert words[22] == "FAILED, signal 53, JobLaunchFailure"
    assert words[24] == "PENDING, job requeued in held state"
    # A job that waits again keeps the code of its last end.
    again = recorded("squeue").splitlines()[1].replace("CANCELLED", "PENDING")
    assert read_squeue(again)[0].words == "PENDING"


@pytest.mark.parametrize("text", ["garbage", "16|COMPLETED", "16|OK|x|0||r|name|\n", "1|R|0|many||r|n|\n"])
def test_other_output_is_an_error(text) -> None:
    with pytest.raises(SlurmError, match="not as Slurm writes it"):
        read_squeue(text)


def test_all_jobs_are_asked_for_at_once_and_the_books_for_the_forgotten() -> None:
    tape = Tape(
        squeue=said(recorded("squeue")), sacct=said(recorded("sacct")), scontrol=said(recorded("config"))
    )
    views = Client(tape).query([31, 16, 22, 99])
    assert list(views) == [16, 22, 31]
    # Both know a job 22; the queue has it as it is now.
    assert views[22].source == "squeue"
    assert views[31].source == "sacct"
    programs = [command[0] for command in tape.asked]
    assert programs == ["squeue", "scontrol", "sacct"]
    assert "--jobs=16,22,31,99" in tape.asked[0]
    assert "--jobs=31,99" in tape.asked[2]


def test_without_accounting_a_forgotten_job_is_left_out() -> None:
    config = recorded("config").replace("accounting_storage/slurmdbd", "accounting_storage/none")
    tape = Tape(squeue=NO_JOB, scontrol=said(config))
    assert Client(tape).query([99]) == {}
    assert [command[0] for command in tape.asked] == ["squeue", "scontrol"]


def test_the_books_are_not_opened_when_the_queue_knows_all() -> None:
    tape = Tape(squeue=said(recorded("squeue")))
    assert list(Client(tape).query([16, 17])) == [16, 17]
    assert Client(Tape()).query([]) == {}


def test_a_silent_controller_is_not_an_empty_queue() -> None:
    with pytest.raises(NoAnswerError, match=r"squeue --jobs=1 .* ended with 1: .*Unable to contact"):
        Client(Tape(squeue=UNREACHABLE)).query([1])


@pytest.mark.parametrize(
    "printed", ["17\n", "17;lab\n", "Welcome to the lab, user 5!\n17\n", "17\nHave a nice day\n"]
)
def test_the_job_id_is_found(printed) -> None:
    assert Client(Tape(sbatch=said(printed))).submit("#!/bin/bash\n") == 17


def test_no_job_id_is_no_success() -> None:
    with pytest.raises(NoAnswerError, match="no job id"):
        Client(Tape(sbatch=said("Submitted!\n"))).submit("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        (recorded("sbatch-queue-full"), QueueFullError),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\n", QueueFullError),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified\n", RefusedError),
        ("sbatch: error: QOSMaxWallDurationPerJobLimit\n", RefusedError),
        (UNREACHABLE.stderr, NoAnswerError),
        (
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
            NoAnswerError,
        ),
    ],
)
def test_refusals_are_told_apart(stderr, kind) -> None:
    refusal = Completed((), 1, "", stderr)
    with pytest.raises(SlurmError) as caught:
        Client(Tape(sbatch=refusal)).submit("#!/bin/bash\n")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert " ".join(stderr.split()) in str(caught.value)


def test_dependencies() -> None:
    tape = Tape(sbatch=said("9\n"))
    Client(tape).submit("#!/bin/bash\n", after=[7, 8])
    options = ("--dependency=afterany:7:8", "--kill-on-invalid-dep=yes")
    assert tape.asked == [("sbatch", "--export=ALL", "--parsable", *options)]


def test_cancelling_what_is_gone_is_no_error() -> None:
    Client(Tape(scancel=Completed((), 1, "", "Invalid job id specified"))).cancel([1])
    Client(Tape()).cancel([])
    with pytest.raises(SlurmError, match="Access/permission denied"):
        Client(Tape(scancel=Completed((), 1, "", "Access/permission denied"))).cancel([1])


def test_the_cluster() -> None:
    tape = Tape(
        scontrol=said(recorded("config")), sinfo=said(recorded("sinfo")), sacctmgr=said(recorded("sacctmgr"))
    )
    cluster = Client(tape).cluster()
    assert (Client(tape).cluster_name, cluster.has_accounting, cluster.kill_wait_s) == ("lab", True, 2)
    assert Client(tape).unkillable_step_s == 60
    assert cluster.associations == (
        Association(account="test", partition=None, qos=("normal",), max_submit=3),
        Association(account="root", partition=None, qos=("normal",), max_submit=3),
    )
    assert cluster.groups[1] == NodeGroup(
        partition="main",
        is_up=True,
        time_limit_s=86_400,
        nodes=3,
        state="idle",
        cpus=16,
        memory_mb=64_000,
        gpus={"h100": 8},
    )


USER = "test|test|big|gres/gpu=16,node=4|2-00:00:00|gres/gpu=64\ntest|root||||\n"
QOS = "normal||||\nbig|gres/gpu=32|gres/gpu=24,mem=1T|08:00:00|node=100\n"
"""Slurm 22.05 with a database printed these lines."""


@pytest.mark.parametrize(
    ("account", "qos", "limits"),
    [
        # The limits of the default QOS take the place of the association's; each user has at most 24 GPUs.
        (None, None, {"GPUs": 24, "nodes": 4, "seconds": 28_800}),
        ("test", "normal", {"GPUs": 16, "nodes": 4, "seconds": 172_800}),
        ("root", None, {}),
        ("other", None, {}),
    ],
)
def test_the_limits_of_a_job_are_those_of_its_association_and_qos(account, qos, limits) -> None:
    assert read_limits(USER, QOS, account, qos) == limits


def test_limits_that_may_not_be_asked_for_are_unknown() -> None:
    denied = Completed((), 1, "", "sacctmgr: error: Access/permission denied")
    assert Client(Tape(sacctmgr=denied)).limits(None, None) == {}


def test_associations_that_may_not_be_asked_for_are_unknown() -> None:
    denied = Completed((), 1, "", "sacctmgr: error: Access/permission denied")
    tape = Tape(scontrol=said(recorded("config")), sinfo=said(""), sacctmgr=denied)
    assert Client(tape).cluster().associations is None


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:8", {"": 8}),
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("nic:2,gpu:a100:4,gpu:a100_1g.5gb:7", {"a100": 4, "a100_1g.5gb": 7}),
        ("gpu:a100:4(S:0),gpu:a100:2(S:1)", {"a100": 6}),
        ("shard:gpu:3", {}),
    ],
)
def test_gpus_of_a_node(gres, gpus) -> None:
    assert read_sinfo(f"p|up|infinite|1-infinite|1|idle|8|1000|{gres}|all\n")[0].gpus == gpus


def test_other_settings_are_an_error() -> None:
    with pytest.raises(SlurmError, match="settings are not as it writes them"):
        Client(Tape(scontrol=said("Welcome!\n"))).cluster()


@pytest.mark.parametrize("line", ["p|up|1:00|1-2|1|idle|8|1000", "p|up|1:00|1-2|x|idle|8|1000|(null)|all"])
def test_other_lines_of_sinfo_are_an_error(line) -> None:
    with pytest.raises(SlurmError, match="sinfo is not as Slurm writes it"):
        read_sinfo(line)


INHERITED = {
    **{"PATH": "/bin", "HOME": "/home/me", "LC_ALL": "C", "LANG": "C", "SLURM_CONF": "/etc/slurm.conf"},
    **{"SBATCH_PARTITION": "nonsense", "SLURM_JOB_ID": "7", "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "%s"},
    **{"LD_LIBRARY_PATH": "/opt", "PYTHONPATH": "/mine", "BASH_FUNC_ls%%": "() { :; }", "SECRET": "token"},
}


def test_a_job_inherits_the_user_and_nothing_else() -> None:
    assert set(job_environment(INHERITED)) == {"PATH", "HOME", "LC_ALL", "LANG", "SLURM_CONF"}


def test_a_question_is_not_changed_by_variables() -> None:
    kept = set(INHERITED) - set(client_environment(INHERITED))
    assert kept == {"SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_FORMAT", "SLURM_TIME_FORMAT"}


def test_a_command_that_takes_too_long() -> None:
    with pytest.raises(NoAnswerError, match=r"no answer in 0\.1 s to: sleep 600"):
        run_program(["sleep", "600"], stdin="", environment={"PATH": "/usr/bin:/bin"}, timeout_s=0.1)


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(SlurmError, match="there is no sbatch-of-nowhere here"):
        run_program(["sbatch-of-nowhere"], stdin="", environment={}, timeout_s=1)


def test_a_command_runs_with_what_it_is_given() -> None:
    done = run_program(
        ["sh", "-c", "cat; echo $A >&2; printf '\\377'; exit 3"],
        stdin="in",
        environment={"A": "b"},
        timeout_s=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "in\ufffd", "b\n")
