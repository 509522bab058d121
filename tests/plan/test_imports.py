from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "pandas", "matplotlib", "click", "rich")


def test_planning_loads_nothing_heavy() -> None:
    modules = "expand, estimate, naming, request, schedule"
    program = (
        f"from harness.plan import {modules}; import sys; print(*sorted(set(sys.modules) & set({HEAVY})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
