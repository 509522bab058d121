"""`--batch-size auto` on CPU ranks against a linear scan under the same margin, and 200 steps with its batch.

    python docs/studies/tuning_batch.py FOLDER [CASE ...]

runs the cases (all, or those with these numbers) that FOLDER does not have yet, and prints the table of
docs/tuning.md of all that it has. The scan measures every micro-batch, one after another, in its own study,
which the search does not see. `bench train` then takes 200 steps with the batch that was found, under the
same limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from results.outcome import Outcome
from results.store import BATCH_RUNS, Study

MIB = 2**20
SHARE = 0.95
"""The share of the limit that a rank may be measured to take, stated here a second time."""
STEPS = 200
AT_ONCE = 12
"""Micro-batches of the scan in one launch."""
CASES = (
    *(("gpt-nano", "single", 1, accumulation, limit) for accumulation, limit in ((1, 60), (2, 64), (1, 68))),
    *(
        ("llama-nano", "single", 1, accumulation, limit)
        for accumulation, limit in ((1, 60), (2, 64), (1, 68))
    ),
    *(("resnet18-32px", "single", 1, 1, limit) for limit in (190, 210)),
    *(("gpt-nano", "ddp", 2, accumulation, limit) for accumulation, limit in ((1, 64), (2, 66), (1, 70))),
    *(("gpt-nano", strategy, 2, 1, 64) for strategy in ("zero1", "fsdp", "scratch-fsdp", "local-sgd:2")),
    *(("llama-nano", strategy, 2, 1, 66) for strategy in ("ddp", "fsdp:reshard=false", "scratch-ddp")),
    ("gpt-nano", "tp", 2, 1, 60),
    ("llama-nano", "zero1", 2, 2, 66),
)
"""Workload, strategy, ranks, accumulation, MiB."""


def bench(*words: object) -> None:
    call = [str(Path(sys.executable).with_name("bench")), *map(str, words)]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(call)}\n{done.stderr}")


def taken(study: Study) -> dict[int, int | None]:
    """The bytes of the fullest rank by micro-batch; None for a run that failed."""
    found: dict[int, int | None] = {}
    for run in study.results():
        memories = [record.memory for record in study.rank_records(run.cell_id, run.run_id)]
        sizes = [one.rss_peak_bytes - one.rss_idle_bytes for one in memories if one is not None]
        found[study.cell(run.cell_id).micro_batch] = max(sizes) if run.outcome is Outcome.OK else None
    return found


def case(folder: Path, number: int) -> dict[str, object]:
    """Search, scan and train one case. Returns the row of the table."""
    workload, strategy, gpus, accumulation, limit_mb = CASES[number]
    work = ("--workload", workload, "--strategy", strategy, "--gpus", gpus, "--accumulation", accumulation)
    work += ("--device", "cpu", "--memory-limit-mb", limit_mb, "--oversubscribe", "--no-report")
    short = ("--budget", 0, "--block-steps", 2, "--warmup-steps", 0, "--quads", 0, "--repeats", 1)
    began = time.monotonic()
    bench("matrix", *work, *short, "--no-baseline", "--batch-size", "auto", "--out", folder / "auto")
    auto = Study(folder / "auto")
    [batch] = auto.plan(1).request.batches or ()
    seconds = time.monotonic() - began
    scanned: dict[int, int | None] = {}
    best = 0
    for first in count(1, AT_ONCE):
        sizes = ",".join(str(accumulation * size) for size in range(first, first + AT_ONCE))
        more = ("--isolation", "fork", "--no-prune", "--no-baseline", "--out", folder / "scan")
        bench("matrix", *work, *short, *more, "--batch-size", sizes)
        scanned = taken(Study(folder / "scan"))
        for size in range(first, first + AT_ONCE):
            what = scanned[size]
            if what is None or what > SHARE * limit_mb * MIB:
                break
            best = size
        if best < first + AT_ONCE - 1:
            break
    trained = ("--steps", STEPS, "--checkpoint-every", STEPS, "--batch-size", batch.series.batch_size)
    bench("train", *work, *trained, "--restarts", 0, "--out", folder / "train")
    train = Study(folder / "train")
    [cell] = train.cell_ids()
    return {
        "case": f"{workload}, {strategy} on {gpus}" + f", accumulation {accumulation}" * (accumulation > 1),
        "limit": limit_mb,
        "scan": best,
        "auto": batch.series.batch_size // accumulation,
        "runs": len(taken(Study(auto.root / BATCH_RUNS))),
        "seconds": round(seconds),
        "steps": train.training_log(cell).step,
    }


def main() -> None:
    folder, *numbers = sys.argv[1:]
    for number in map(int, numbers or map(str, range(len(CASES)))):
        path = Path(folder) / f"case-{number:02d}"
        if not (path / "row.json").exists():
            path.mkdir(parents=True, exist_ok=True)
            (path / "row.json").write_text(json.dumps(case(path, number)))
    rows = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("case-*/row.json"))]
    print("| case | limit MiB | scan | auto | runs | s | steps after |\n|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {' | '.join(str(row[name]) for name in row)} |")
    larger = sum(row["auto"] > row["scan"] for row in rows)
    near = sum(row["scan"] - row["auto"] <= max(1, 0.03 * row["scan"]) for row in rows)
    print(f"larger: {larger}; at most one step or 3 % smaller: {near} of {len(rows)}; ", end="")
    print(f"{STEPS} steps done: {sum(row['steps'] >= STEPS for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
