"""The tests that the Makefile names are there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_every_file_of_the_tests_that_the_makefile_names_is_there() -> None:
    named = re.findall(r"tests/[\w./-]+\w", (ROOT / "Makefile").read_text())
    assert "tests/features/slurm/test_soak.py" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_the_soak_collects_its_tests_without_an_error() -> None:
    call = ["make", "--dry-run", "--old-file", ".venv/.installed-dev", "soak"]
    printed = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = re.split(r"[;\n]", printed.replace("\\\n", " "))
    calls = [shlex.split(command) for command in commands if "/pytest " in command]
    assert len(calls) == 2
    # A process of xdist is known by these; the collection is none.
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    for words in calls:
        [place] = [at for at, word in enumerate(words) if word.endswith("/pytest")]
        collect = ["-n", "0", "--collect-only", "-q", "-p", "no:cacheprovider"]
        found = [sys.executable, "-m", "pytest", *words[place + 1 :], *collect]
        done = subprocess.run(found, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
