"""`bench --help` answers at once, also where other packages add names: goal at most 0.1 s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages import first_on_the_path, install

from results.extensions import GROUPS

PACKAGES = 20
"""Each adds one name, all of the groups in turn."""


@pytest.mark.slow
def test_help_with_packages_of_others(benchmark, tmp_path) -> None:
    """The modules of these names do not exist, as `--help` imports none of them."""
    for number in range(PACKAGES):
        group = list(GROUPS.values())[number % len(GROUPS)]
        install(tmp_path, f"elsewhere-{number}", {group: {f"name-{number}": f"elsewhere_{number}:Facts"}})
    command = [str(Path(sys.executable).with_name("bench")), "--help"]
    environment = {**os.environ, "PYTHONPATH": first_on_the_path(tmp_path)}
    done = benchmark(subprocess.run, command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "matrix" in done.stdout
