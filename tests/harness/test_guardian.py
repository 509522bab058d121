"""The guardian: how commands end, and that no process of them is left, whoever is killed. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launching import until

from harness.launch.guarded import Guarded
from harness.machine.code import checkout

DAEMONS = """
import os, signal, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            # Its parent is gone, and so are its session, its terminal and its files.
            os.close(1)
            while True:
                time.sleep(600)
        os._exit(0)
while True:
    if os.path.exists("go"):
        exec(open("go").read())
    time.sleep(0.01)
"""
"""Three daemons, and a command that then does what the file `go` says; none of them hears SIGTERM."""
STARTER = """
import sys, time
from harness.launch.guarded import Guarded
Guarded(sys.argv[1:], grace_s=0.2)
time.sleep(600)
"""


def processes(folder: Path) -> dict[str, psutil.Process]:
    """The processes that work in a folder: the guardian, the command, daemons, and their starter."""
    found = {}
    for process in psutil.process_iter():
        # One may end meanwhile.
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.cwd() == str(folder):
                name = _name(process)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[name] = process
    return found


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    if STARTER in words:
        return "starter"
    if any(word.endswith("guardian.py") for word in words):
        return "guardian"
    # A guardian leads the session of its command, and each daemon is in one of its own.
    with suppress(psutil.Error, ProcessLookupError):
        leader = psutil.Process(os.getsid(process.pid)).cmdline()
        if any(word.endswith("guardian.py") for word in leader):
            return "command"
    return f"daemon {process.pid}"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder that only what the test starts works in; all of it ends with the test."""
    monkeypatch.setenv("PYTHONPATH", str(checkout()))
    yield tmp_path
    for process in processes(tmp_path).values():
        process.kill()


@pytest.fixture
def starter(place) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started a guarded command with daemons."""
    command = [sys.executable, "-c", STARTER, sys.executable, "-c", DAEMONS]
    process = subprocess.Popen(command, cwd=place)
    until(lambda: len(processes(place)) == 6 and _are_orphans(place))
    yield process
    process.kill()
    process.wait()


def _are_orphans(place: Path) -> bool:
    found = processes(place)
    guardian = found["guardian"].pid
    return all(process.ppid() == guardian for name, process in found.items() if name[:6] == "daemon")


@pytest.mark.parametrize(
    ("go", "code"),
    [
        ("os._exit(3)", 3),
        ("os._exit(0)", 0),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_it_ends_as_the_command_did_and_takes_daemons_along(place, monkeypatch, go, code) -> None:
    monkeypatch.chdir(place)
    (place / "go").write_text(go)
    assert Guarded([sys.executable, "-c", DAEMONS]).process.wait(120) == code
    monkeypatch.undo()
    assert processes(place) == {}


@pytest.mark.parametrize("victim", ["starter", "command"])
def test_nothing_outlives_who_started_it_nor_the_command(place, starter, victim) -> None:
    """A bench that SIGKILL ends can do nothing more itself."""
    processes(place)[victim].kill()
    left = {"command": {"starter"}, "starter": set()}[victim]
    until(lambda: processes(place).keys() == left)


def test_a_killed_guardian_takes_the_command_along(place, starter) -> None:
    """Forked children of the command are left then, as the docs say."""
    found = processes(place)
    found["guardian"].kill()
    until(lambda: processes(place).keys() == found.keys() - {"guardian", "command"})


def test_a_command_that_is_asked_to_end_has_its_grace_and_no_more(place, monkeypatch) -> None:
    monkeypatch.chdir(place)
    deaf = Guarded([sys.executable, "-c", DAEMONS], grace_s=0.2)
    heard = Guarded(
        ["bash", "-c", "trap 'echo > ended; exit 5' TERM; echo > begun; while :; do sleep 0.01; done"]
    )
    until(lambda: (place / "begun").exists())
    until(lambda: sum(name[:6] == "daemon" for name in processes(place)) == 3)
    assert (deaf.end(), heard.end()) == (-signal.SIGKILL, 5)
    assert (place / "ended").exists()
    monkeypatch.undo()
    assert processes(place) == {}


def test_what_cannot_be_started_is_named_in_the_log(tmp_path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert Guarded(["no-such-program"], log=log).process.wait(120) == 127
    assert (
        (tmp_path / "log").read_text()
        == "guardian: cannot start no-such-program, which starts the workers: No such file or directory\n"
    )


def test_the_command_is_as_if_started_without_it(place, monkeypatch) -> None:
    """Signals ignored, blocked and caught, open descriptors; nohup's ignored SIGHUP stays ignored."""
    monkeypatch.chdir(place)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for number, show in enumerate((["grep", "^Sig[BIC]", "/proc/self/status"], ["ls", "/proc/self/fd"])):
            log = place / str(number)
            with log.open("wb") as file:
                assert Guarded(show, log=file).process.wait(120) == 0
            bare = subprocess.run(show, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
            assert log.read_text() == bare.stdout
    finally:
        signal.signal(signal.SIGHUP, before)
