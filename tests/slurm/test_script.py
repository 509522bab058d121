"""Job scripts: their complete text, and values that are hard to write down."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from approval import approved
from hypothesis import given, settings
from hypothesis import strategies as st

from results.errors import UsageError
from results.plan import Placement
from slurm.script import (
    ScriptJob,
    agent_command,
    job_script,
    rendezvous_port,
)
from slurm.site import SITE_FILE, Container, SiteProfile, directive, log_pattern, shell

HERE = Path(__file__).parent
SITES = HERE.parents[1] / "docs" / "sites"
COMMAND = ("/opt/bench/bin/python", "-m", "supervisor", "runs/my study")
NASTY = 'it\'s a "$(touch pwned)" `id` \\ #1; 50% && <x>'


def job(nodes: int = 4, gpus_per_node: int = 8, **changes: object) -> ScriptJob:
    values: dict[str, object] = {
        "name": "study-4x8",
        "placement": Placement(nodes=nodes, gpus_per_node=gpus_per_node),
        "time_limit_s": 5400,
        "folder": Path("/home/me/bench"),
        "log_folder": Path("/home/me/bench/runs/study/jobs"),
        "command": COMMAND,
    }
    return ScriptJob(**(values | changes))


def follow_up(**changes: object) -> ScriptJob:
    command = ("/opt/bench/bin/bench", "report", "runs/study")
    own = {"name": "study-report", "placement": None, "time_limit_s": 900, "command": command}
    return job(**own | changes)


NASTY_SITE = SiteProfile(
    partition=NASTY,
    directives={"comment": NASTY, "contiguous": True},
    setup=("echo 'as it stands: $HOME {{ x }} {% y %}'",),
    node_setup=("echo it's done", "true"),
    environment={"B": NASTY, "A": "two\nlines"},
)
NASTY_JOB = job(
    name=NASTY,
    folder=Path("/") / NASTY,
    # A path with a backslash has no pattern.
    log_folder=Path("/") / NASTY.replace("\\", ""),
    command=("/bin/echo", NASTY, "two\nlines", "", "~", "-n"),
    requeue=False,
)
SCRIPTS = {
    "plain": job_script(SITE_FILE.read(SITES / "plain.yaml"), job(python_path=Path("/home/me/my code"))),
    "pyxis": job_script(SITE_FILE.read(SITES / "pyxis.yaml"), job(nodes=32, requeue=False)),
    "cpu": job_script(SITE_FILE.read(SITES / "cpu.yaml"), job(nodes=2, gpus_per_node=16)),
    "flags": job_script(SiteProfile(partition="gpu"), job(nodes=1, gpus_per_node=1, time_limit_s=60)),
    "nasty": job_script(NASTY_SITE, NASTY_JOB),
    "report": job_script(SITE_FILE.read(SITES / "plain.yaml"), follow_up()),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_whole_scripts(name) -> None:
    approved(HERE / "golden" / f"{name}.sh", SCRIPTS[name])


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_every_script(name) -> None:
    subprocess.run(["bash", "-n"], input=SCRIPTS[name].encode(), check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name) -> None:
    # Left out: files that only a cluster has, quoted text that looks like code, and the nasty site's own.
    left_out = "--exclude=SC1090,SC1091,SC2016"
    done = subprocess.run(["shellcheck", left_out, "-"], input=SCRIPTS[name].encode(), capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\t", "\x1b", "\udcff"])
def test_what_a_directive_cannot_carry_is_refused(character) -> None:
    with pytest.raises(UsageError, match="job-name cannot hold the character"):
        job_script(SiteProfile(), job(name=f"a{character}b"))


@pytest.mark.parametrize("character", ["\r", "\0", "\udcff"])
def test_what_a_script_cannot_hold_is_refused(character) -> None:
    with pytest.raises(UsageError, match="a script cannot hold the character"):
        job_script(SiteProfile(), job(command=("echo", f"a{character}b")))


def test_a_log_with_a_backslash_is_refused() -> None:
    with pytest.raises(UsageError, match="no log to a path with a backslash"):
        job_script(SiteProfile(), job(log_folder=Path("/a\\b")))
    with pytest.raises(UsageError, match="no log to a path with a backslash"):
        agent_command(SiteProfile(), Placement(nodes=1, gpus_per_node=1), ("true",), Path("/a\\b"))


def read_by_sbatch(line: str) -> str:
    """The argument that sbatch makes of a directive: get_argument() of its opt.c, in Python."""
    quote, characters, result = "", iter(line), ""
    for character in characters:
        if character == "\\":
            result += next(characters)
        elif quote:
            result, quote = (result, "") if character == quote else (result + character, quote)
        elif character in "\"'":
            quote = character
        elif character == "#" or character.isspace():
            break
        else:
            result += character
    return result


PRINTABLE = st.text(st.sampled_from("ab \\'\"#%$=") | st.characters(exclude_categories=("Cc", "Cs")))


@given(PRINTABLE)
def test_sbatch_reads_back_what_was_written(value) -> None:
    assert read_by_sbatch(directive("job-name", value)) == f"--job-name={value}"


@given(PRINTABLE.filter(lambda path: "\\" not in path))
def test_a_log_pattern_stands_for_its_path_alone(path) -> None:
    pattern = log_pattern(path)
    assert pattern.replace("%%", "") == path.replace("%", "")
    assert pattern.count("%") == 2 * path.count("%")


SHELL_TEXT = st.text(
    st.sampled_from("ab \\'\"#$`~\n") | st.characters(exclude_categories=("Cs",), exclude_characters="\0\r"),
    min_size=1,
)


@settings(max_examples=40)
@given(st.lists(SHELL_TEXT, min_size=1, max_size=4), SHELL_TEXT)
def test_bash_reads_back_what_was_written(words, value) -> None:
    script = job_script(SiteProfile(environment={"VALUE": value}), job(command=("printf", "%s\\0", *words)))
    # Without Slurm's commands, and with the variable shown before what the command gets.
    body = script.replace("$(scontrol show hostnames", "$(echo").replace("scontrol --oneliner", "true")
    body = body.replace("exec printf", 'printf "%s\\0" "$VALUE"\nexec printf')
    done = subprocess.run(
        ["bash"],
        input=body.encode(),
        env={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().split("\0") == [value, *words, ""]


def test_a_follow_up_reads_relative_paths_where_the_call_was_made(tmp_path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    (folder / "study.yaml").write_text("found")
    site = SiteProfile(setup=("cd /",))
    script = job_script(site, follow_up(folder=folder, command=("cat", "study.yaml")))
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True)
    assert done.stdout == b"found"


@pytest.mark.parametrize(
    ("answer", "address"),
    [
        ("echo NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 Comment=x", "10.0.0.1"),
        ("echo NodeName=n1 Arch=x86_64", "n1"),
        ("echo slurm_load_node error >&2; exit 1", "n1"),
    ],
)
def test_the_address_is_that_of_the_first_node_or_its_name(tmp_path, answer, address) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\n[ "$2" = hostnames ] && printf "n1\\nn2\\n" && exit\n{answer}\n')
    scontrol.chmod(0o755)
    script = job_script(SiteProfile(), job(command=("sh", "-c", "echo $MASTER_ADDR:$MASTER_PORT")))
    done = subprocess.run(
        ["bash"],
        input=script.encode(),
        env={"SLURM_JOB_ID": "757", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == f"{address}:{rendezvous_port(757, 0)}\n"


@given(SHELL_TEXT)
def test_a_word_of_the_shell_is_one_word(text) -> None:
    assert shlex.split(shell(text)) == [text]


def test_ports() -> None:
    # 20000 + (7 mod 750) x 16 + 0.
    assert rendezvous_port(7, 0) == 20_112
    assert rendezvous_port(7, 3) == 20_115
    assert rendezvous_port(757, 16) == 20_112
    assert "MASTER_PORT=$((20000 + SLURM_JOB_ID % 750 * 16))" in SCRIPTS["plain"]
    ports = {rendezvous_port(job_id, launch) for job_id in range(1000, 1750) for launch in range(16)}
    assert len(ports) == 12_000
    assert min(ports) >= 20_000
    assert max(ports) < 32_768


def test_agents_are_one_a_node() -> None:
    site = SiteProfile(cpus_per_gpu=12)
    placement = Placement(nodes=4, gpus_per_node=8)
    assert agent_command(site, placement, ("echo", "$SLURM_NODEID"), Path("/runs/50%/agent")) == (
        *("srun", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--cpus-per-task=96"),
        *("--kill-on-bad-exit=1", "--cpu-bind=none", "--mpi=none", "--export=ALL"),
        "--output=/runs/50%%/agent-%n.log",
        *("echo", "$SLURM_NODEID"),
    )


def test_agents_in_a_container() -> None:
    site = SiteProfile(
        container=Container(
            image="a b.sqsh", mounts=("/a:/a:ro+rprivate", "/c:/c"), workdir="/c", mount_home=True
        ),
        environment={"NCCL_DEBUG": "WARN", "A": "b"},
    )
    command = agent_command(site, Placement(nodes=1, gpus_per_node=1), ("true",), Path("/log"))
    assert command[command.index("--output=/log-%n.log") + 1 :] == (
        "--container-image=a b.sqsh",
        "--container-mounts=/a:/a:ro+rprivate,/c:/c",
        "--container-workdir=/c",
        "--container-mount-home",
        "--container-env=A,MKL_NUM_THREADS,NCCL_DEBUG,OMP_NUM_THREADS,PYTHONPATH,PYTHONSAFEPATH",
        "true",
    )


@pytest.mark.parametrize(
    ("site", "line"),
    [
        (SiteProfile(), "#SBATCH --gres=gpu:2"),
        (SiteProfile(gpu_type="h100"), "#SBATCH --gres=gpu:h100:2"),
        (SiteProfile(directives={"gres": "nic:1"}), "#SBATCH --gres=gpu:2,nic:1"),
        (SiteProfile(gpu_request="gpus-per-task"), "#SBATCH --gpus-per-task=2"),
        (SiteProfile(gpu_request="gpus-per-node"), "#SBATCH --gpus-per-node=2"),
        (SiteProfile(gpu_request="gpus-per-node", gpu_type="a100"), "#SBATCH --gpus-per-node=a100:2"),
    ],
)
def test_how_gpus_are_asked_for(site, line) -> None:
    assert [each for each in job_script(site, job(gpus_per_node=2)).splitlines() if "gpu" in each] == [line]
