"""Print a soak's ledger (tests/slurm/test_soak.py) as a Markdown table."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

HEAD = """\
| where | fault | rounds | fault met the study | how the runs ended that it met | failures |
|---|---|---|---|---|---|"""


def table(lines: list[str]) -> str:
    """One row for each kind of fault; of a round that was repeated, its last line counts."""
    rounds = {(line["kind"], line["seed"], line["round"]): line for line in map(json.loads, lines)}
    rows = [HEAD]
    for where, fault in sorted({(line["kind"], line["fault"]) for line in rounds.values()}):
        same = [line for line in rounds.values() if (line["kind"], line["fault"]) == (where, fault)]
        ends = Counter(end for line in same for end in line.get("ends", []))
        hits = sum(line.get("hit", False) for line in same)
        failures = [line for line in same if line["failure"] is not None]
        words = ", ".join(f"{end} {count}" for end, count in sorted(ends.items())) or "-"
        rows.append(f"| {where} | {fault} | {len(same)} | {hits} | {words} | {len(failures)} |")
    return "\n".join([*rows, f"\n{len(rounds)} rounds."])


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
