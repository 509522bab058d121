"""`bench doctor --site`: what it prints, what it returns, and that every way to fail is one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.cli import run

RECORDED = Path(__file__).parents[2] / "slurm" / "recorded"
SITE = "partition: main\ngpu_type: h100\ngpus_per_node: 8\ncpus_per_gpu: 2\nsubmit_limit: 3\naccount: test\n"
PRINT = "while IFS= read -r line; do printf '%s\\n' \"$line\"; done"
UNREACHABLE = "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch) -> Path:
    """A folder of programs where Slurm's answer what a real one (22.05.8) did once; nothing else is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, recorded in {"scontrol": "config", "sinfo": "sinfo", "sacctmgr": "sacctmgr"}.items():
        program(folder / name, f"{PRINT} < '{RECORDED}/{recorded}-22.05.txt'")
    # Keeps how it is called, and what it is given.
    program(folder / "sbatch", f"cd '{tmp_path}'; echo \"$@\" > options; {PRINT} > script")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def program(path: Path, code: str) -> None:
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def doctor(text: str | None = SITE) -> int:
    if text is not None:
        Path("site.yaml").write_text(text)
    return run(["doctor", "--site", "site.yaml"])


def rows(capsys: pytest.CaptureFixture[str], level: str) -> list[tuple[str, str]]:
    """The findings of one level: the key, and the words."""
    table = capsys.readouterr().out.partition("\n\n")[2]
    cells = [re.split("  +", line, maxsplit=2) for line in table.splitlines()]
    return [(about, words) for each, about, words in cells if each == level]


def error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == "", "a table of half of the truth"
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_right_profile(capsys) -> None:
    assert doctor() == 0
    machine, site = capsys.readouterr().out.split("\n\n")
    assert machine.splitlines()[0].split() == ["what", "found"]
    assert "\ntorch " in machine
    lines = site.splitlines()
    assert lines[0].split() == ["level", "about", "found"]
    assert {line.split()[0] for line in lines[1:]} == {"fine"}
    assert lines[1].split(maxsplit=2)[1:] == [
        "partition",
        "4 of 4 nodes of main are usable (allocated, idle)",
    ]
    assert lines[-1].endswith("would take a job of one node for 1d")


def test_the_scheduler_is_asked_for_all_that_a_node_has(tmp_path) -> None:
    assert doctor() == 0
    assert (tmp_path / "options").read_text() == "--export=ALL --test-only\n"
    script = (tmp_path / "script").read_text().splitlines()
    asked = {
        "partition=main",
        "nodes=1",
        "gres=gpu:h100:8",
        "cpus-per-task=16",
        "time=1-00:00:00",
        "account=test",
    }
    assert {f"#SBATCH --{each}" for each in asked} <= set(script)
    assert script[-1] == "exec true"
    assert doctor(f"{SITE}time: {{fixed: 2h}}\n") == 0
    assert "#SBATCH --time=0-02:00:00" in (tmp_path / "script").read_text()


def test_a_wrong_profile(capsys) -> None:
    assert doctor(SITE.replace("main", "mian")) == 1
    words = "mian is not one that sinfo shows; write one of main, urgent"
    assert rows(capsys, "wrong") == [("partition", words)]


def test_what_is_doubtful_is_no_failure(capsys) -> None:
    assert doctor(SITE.replace("gpus_per_node: 8\n", "")) == 0
    assert rows(capsys, "doubtful") == [("gpus_per_node", "left out; nodes of main have 8; write 8")]


@pytest.mark.parametrize(
    ("words", "level", "code"),
    [
        ("allocation failure: Invalid qos specification", "wrong", 1),
        ("allocation failure: AssocMaxSubmitJobLimit", "doubtful", 0),
    ],
)
def test_a_refusal_is_told_in_slurms_words(words, level, code, programs, capsys) -> None:
    program(programs / "sbatch", f"echo '{words}' >&2; exit 1")
    assert doctor() == code
    ((about, told),) = rows(capsys, level)
    assert about == "the scheduler"
    assert words in told


def test_torch_is_not_needed_here(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["doctor"]) == 1
    assert doctor() == 0
    assert "not installed: planning and reporting work" in capsys.readouterr().out


def test_without_a_site_no_slurm_is_asked(programs, capsys) -> None:
    for each in programs.iterdir():
        each.unlink()
    assert run(["doctor"]) == 0
    assert "level" not in capsys.readouterr().out


def test_a_file_that_is_missing(capsys) -> None:
    assert doctor(None) == 2
    assert "there is no site profile site.yaml; docs/sites has examples" in error(capsys)


def test_a_file_that_is_wrong(capsys) -> None:
    assert doctor("partiton: main\n") == 2
    assert "site.yaml, line 1: partiton is not an option (did you mean 'partition'?)" in error(capsys)


def test_no_slurm_on_this_machine(programs, capsys) -> None:
    for each in programs.iterdir():
        each.unlink()
    assert doctor() == 1
    assert "there is no scontrol here; run this where Slurm's commands are" in error(capsys)


@pytest.mark.parametrize("name", ["scontrol", "sinfo", "sacctmgr", "sbatch"])
def test_a_controller_that_does_not_answer(name, programs, capsys) -> None:
    program(programs / name, f"echo '{UNREACHABLE}' >&2; exit 1")
    assert doctor() == 1
    message = error(capsys)
    assert message.startswith(f"error: {name} ")
    assert UNREACHABLE in message
