from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from results.errors import StoreError, StudyBusyError
from results.files import study_lock

HOLDER = """
import sys
from pathlib import Path
from results.files import study_lock

with study_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
# Starts a child that keeps the descriptor until its stdin ends, and dies without unlocking.
PARENT = """
import os, subprocess, sys
from pathlib import Path
from results.files import study_lock

with study_lock(Path(sys.argv[1])) as lock:
    wait = "import sys; sys.stdin.read()"
    subprocess.Popen([sys.executable, "-c", wait], pass_fds=[lock], stdout=subprocess.DEVNULL)
    print("held", flush=True)
    os._exit(1)
"""


def _start(script: str, root: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def _wait_until_free(root: Path) -> bool:
    for _ in range(200):
        try:
            with study_lock(root):
                return True
        except StudyBusyError:
            time.sleep(0.05)
    return False


def test_a_second_process_is_refused_and_told_who_holds_the_study(tmp_path) -> None:
    with _start(HOLDER, tmp_path) as holder:
        with pytest.raises(StudyBusyError) as error, study_lock(tmp_path):
            pass
        assert str(error.value) == (
            f"{tmp_path} is in use by another bench (process {holder.pid}), or by workers it left behind; "
            f"wait for it or stop it, then run the same command again"
        )
        holder.communicate()
    with study_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_killed_process_leaves_the_study_free(tmp_path) -> None:
    with _start(HOLDER, tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with study_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_child_that_outlives_its_parent_keeps_the_lock(tmp_path) -> None:
    with _start(PARENT, tmp_path) as parent:
        assert parent.wait() == 1
        with pytest.raises(StudyBusyError, match=f"process {parent.pid}"), study_lock(tmp_path):
            pass
        parent.stdin.close()
        assert _wait_until_free(tmp_path)


def test_the_lock_is_freed_when_the_work_fails(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="boom"), study_lock(tmp_path):
        raise RuntimeError("boom")
    with study_lock(tmp_path) as descriptor:
        assert descriptor >= 0


def test_a_refusal_does_not_free_the_lock_of_the_holder(tmp_path) -> None:
    with study_lock(tmp_path):
        for _ in range(2):
            with pytest.raises(StudyBusyError), study_lock(tmp_path):
                pass


def test_a_holder_that_has_not_written_its_number_yet_is_unknown(tmp_path) -> None:
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StudyBusyError, match="process unknown"), study_lock(tmp_path):
            pass


def test_the_folder_of_a_new_study_is_made(tmp_path) -> None:
    with study_lock(tmp_path / "runs" / "new"):
        assert [path.name for path in (tmp_path / "runs" / "new").iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_is_one_line_with_advice(read_only_disk) -> None:
    root = read_only_disk()
    with pytest.raises(StoreError) as error, study_lock(root):
        pass
    assert str(error.value) == (
        f"cannot write in {root}: Read-only file system; choose a folder that you may write with --out"
    )


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        # What Lustre answers where it is mounted without flock.
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match="has no locks \\(Function not implemented") as caught:
        with study_lock(tmp_path):
            pass
    assert not isinstance(caught.value, StudyBusyError)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path) -> None:
    study, target = tmp_path / "study", tmp_path / "target"
    study.mkdir()
    target.write_text("mine")
    (study / ".lock").symlink_to(target)
    with pytest.raises(StoreError, match="is a link, which bench did not make: remove it"), study_lock(study):
        pass
    assert target.read_text() == "mine"
    (tmp_path / "linked").symlink_to(study)
    (study / ".lock").unlink()
    with study_lock(tmp_path / "linked"):
        assert (study / ".lock").is_file()
