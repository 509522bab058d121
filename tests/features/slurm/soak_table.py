"""Print a soak's ledgers (tests/features/slurm/test_soak.py) as a Markdown table."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PHASES = ("before the first launch", "before ready", "in a run", "between runs", "after the last record")
HEAD = f"""\
| where | fault | came | {" | ".join(PHASES)} | how the runs ended that it met |
|---|---|---|{"---|" * len(PHASES)}---|"""

Line = dict[str, Any]


def table(lines: Sequence[str]) -> str:
    """One row for each kind of fault, and the rounds; of a round that was repeated, its last line counts."""
    rounds: dict[tuple[str, int, int], Line] = {
        (line["kind"], line["seed"], line["round"]): line for line in map(json.loads, lines)
    }
    passed = [line for line in rounds.values() if line["failure"] is None]
    came: dict[tuple[str, str], list[Line]] = {}
    for line in passed:
        for strike in line["strikes"]:
            if strike["hit"]:
                came.setdefault((line["kind"], strike["fault"]), []).append(strike)
    rows = [HEAD, *(_row(*key, strikes) for key, strikes in sorted(came.items()))]
    failed = sum(line["failure"] not in (None, "interrupted") for line in rounds.values())
    return "\n".join(
        [*rows, f"\n{sum(map(len, came.values()))} faults in {len(passed)} rounds; {failed} rounds failed."]
    )


def _row(where: str, fault: str, strikes: Sequence[Line]) -> str:
    phases = Counter(strike["phase"] for strike in strikes)
    ends = Counter(end for strike in strikes for end in strike["ends"] or ["none lost"])
    words = ", ".join(f"{end} {times}" for end, times in sorted(ends.items()))
    cells = " | ".join(str(phases[phase] or "-") for phase in PHASES)
    return f"| {where} | {fault} | {len(strikes)} | {cells} | {words} |"


if __name__ == "__main__":
    print(table([line for path in sys.argv[1:] for line in Path(path).read_text("utf-8").splitlines()]))
