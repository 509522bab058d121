"""A separate working folder for each test, and the command as a user has it: a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest

from harness.launch.preflight import link_obstacle
from results.store import Study

Bench = Callable[..., subprocess.CompletedProcess[str]]
QUICK = ("--device", "cpu", "--budget", "0", "--block-steps", "2", "--quads", "1")
"""Six blocks of two steps: real training, no more of it than the test needs."""

LINK_BY_HAND = """
shaped="tc qdisc add dev one root tbf rate 1mbit burst 5000 limit 9000"
link="ip link add one type veth peer name two && $shaped"
unshare --net sh -c "$link" || unshare --map-root-user --net sh -c "$link"
"""


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("bench")), *arguments]


@pytest.fixture
def bench(tmp_path) -> Bench:
    """Run `bench` in the test's own folder; returns the finished process."""

    def run(*arguments: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            cwd=cwd,
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "400"},
        )

    return run


@pytest.fixture(scope="session")
def small_study(tmp_path_factory) -> tuple[Study, subprocess.CompletedProcess[str]]:
    """A real study, run once: the MLP alone and data-parallel, weak and strong, two repeats."""
    folder = tmp_path_factory.mktemp("small")
    arguments = ["matrix", "--workload", "mlp", "--batch-size", "32", "--gpus", "1..2", *QUICK]
    done = subprocess.run(
        command(*arguments, "--scaling", "weak,strong", "--repeats", "2", "--out", "study"),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return Study(folder / "study"), done


@pytest.fixture(scope="session")
def links() -> None:
    """Skips the test where this machine makes no virtual nodes with a network link."""
    obstacle = link_obstacle()
    if obstacle is not None:
        # A fault of ours is no reason to skip.
        by_hand = subprocess.run(["sh", "-c", LINK_BY_HAND], stderr=subprocess.DEVNULL)
        assert by_hand.returncode != 0, f"a link can be made by hand, and not by us: {obstacle}"
        pytest.skip(obstacle)


@pytest.fixture
def no_tensorboard(tmp_path, monkeypatch) -> None:
    """No tensorboard is installed, and the test has a folder for its own files."""
    monkeypatch.chdir(tmp_path)
    real = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name, *more: None if name == "tensorboard" else real(name, *more)
    )
