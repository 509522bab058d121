"""The search of `bench tune` on exhaustive grids of real runs on CPU (docs/evidence.md).

    python docs/studies/tuning_grids.py record FOLDER [WORKLOAD ...]
    python docs/studies/tuning_grids.py replay FOLDER
    python docs/studies/tuning_grids.py live FOLDER [WORKLOAD ...]

`record` runs every setting of a workload's grid twice, by `bench matrix` on two CPU ranks, and writes
FOLDER/WORKLOAD.json: the outcome of each run, its blocks, and its time besides them and proofs. The same
command resumes where it was stopped. The machine must be quiet: about 8 minutes a workload on two cores.

`replay` races on these records under 100 seeds. The search sees one run of each setting, alternating with
the seed, and the other run judges. A trial is a piece of the run that begins at a random block; it costs the
time besides the blocks, and its blocks. The final sees the complete runs of the search's recording. How far
the best setting of one recording is off in the other one says what the noise allows any search.

`live` runs `bench tune` once a workload over the settings of its grid. Its search may take 25 % of the device
time of the grid. What its search puts first, and its answer, are then measured against the four best of the
grid in ten interleaved runs of each, and it prints the ratio to the fastest of them with its interval.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator, default_rng
from tuning_surfaces import SHARE, Ground, compare

from harness.features.tune.call import FINAL_SHARE, Tune
from harness.features.tune.race import BLOCKS, GROWTH
from harness.features.tune.records import TunedSetting, read_record
from harness.plan.study_file import StudyFile
from reports.text import metric
from results.cell import Cell, StepPolicy
from results.record import RankRecord
from results.statistics import over_runs
from results.store import Study

SEEDS = 100
BUDGET_S = 1.0
RIVALS, JUDGED = 4, 10
"""The settings of the grid with which the choice of a live tune is compared, and the runs of each."""
COMMON: Mapping[str, Any] = {
    "gpus": "2",
    "device": "cpu",
    "accumulation": "1,2,4",
    "activation_checkpointing": "none",
    "compile": "false",
    "memory_format": "contiguous",
}
_STRATEGIES = "ddp,scratch-ddp,zero1,fsdp,scratch-fsdp,scratch-fsdp:stage=1,scratch-fsdp:stage=2"
"""`bench tune` adds the values of their main options."""
GRIDS: Mapping[str, Mapping[str, int]] = {
    "gpt-nano": {"global_batch_size": 8, "block_steps": 1},
    "llama-nano": {"global_batch_size": 8, "block_steps": 1},
    "mlp": {"global_batch_size": 64, "block_steps": 5},
}
_BENCH = Path(sys.executable).with_name("bench")


def record(folder: Path, workload: str) -> None:
    """Run the settings of the space of a tune, and write the JSON of the workload."""
    options = StudyFile(workload=workload, strategy=_STRATEGIES, **COMMON, **GRIDS[workload])
    settings = Tune(options)._space.candidates
    texts = dict.fromkeys(one.cell.strategy for one in settings)
    study = _measured(folder / workload, workload, strategy=",".join(texts), repeats=2, warmup_steps=6)
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in study.results():
        records = study.rank_records(result.cell_id, result.run_id)
        times = _timed(records) if records else {}
        runs[_plain_id(study.cell(result.cell_id))].append({"outcome": result.outcome, **times})
    document = [
        {
            "cell": one.cell.id,
            "strategy": one.cell.strategy,
            "accumulation": str(one.cell.accumulation),
            "choices": one.setting.choices,
            "predicted_rate": one.setting.predicted_rate,
            "samples": one.cell.global_batch * GRIDS[workload]["block_steps"],
            "runs": runs[one.cell.id],
        }
        for one in settings
        if len(runs[one.cell.id]) == 2
    ]
    path = folder / f"{workload}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{path}: {len(document)} of {len(settings)} settings have two runs")


def _measured(out: Path, workload: str, **options: object) -> Study:
    """Measure settings of a workload by `bench matrix`, for BUDGET_S each run."""
    steps = {"scaling": "strong", "budget": f"{BUDGET_S}s", "target": 0, "quads": 0, "isolation": "fork"}
    _bench("matrix", out, workload, "--no-baseline", "--no-report", **steps, **options)
    return Study.existing(out)


def _bench(command: str, out: Path, workload: str, *flags: str, **options: object) -> None:
    """Run a command of bench, which fails if a run fails."""
    given = {"workload": workload, "out": out, **COMMON, **GRIDS[workload], **options}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([_BENCH, command, *words, *flags], check=False)


def _plain_id(cell: Cell) -> str:
    """The id of a cell under the default step policy."""
    return msgspec.structs.replace(cell, steps=StepPolicy()).id


def _timed(records: Sequence[RankRecord]) -> dict[str, Any]:
    """Seconds of each block, to its last rank, and of all besides blocks and proofs."""
    blocks, others = zip(*(one.blocks_ns for one in records), strict=True), ("proof", "late proof", "measure")
    spent_ns = sum(ns for part, ns in records[0].spent_ns.items() if part not in others)
    return {"blocks_s": [round(max(block) / 1e9, 6) for block in blocks], "start_s": spent_ns / 1e9}


def grid(path: Path, seed: int) -> Ground:
    """A recorded grid, as the search of one seed sees it: a run of each setting, and the other one judges."""
    document = json.loads(path.read_text())
    seen, judges = ([one["runs"][side] for one in document] for side in (seed % 2, 1 - seed % 2))
    # A run that failed takes the median time of the others besides their blocks.
    start_s = median(run["start_s"] for run in seen if run["outcome"] == "ok")

    def run(chosen: Sequence[int], budget_s: float, rng: Generator) -> Iterator[tuple[float, float]]:
        """Take a piece of each recorded run; after its last block its first follows."""
        for one, recorded in ((document[at], seen[at]) for at in chosen):
            if recorded["outcome"] != "ok":
                yield 0.0, 2 * start_s
                continue
            blocks_s = np.roll(recorded["blocks_s"], -rng.integers(len(recorded["blocks_s"])))
            kept = blocks_s[: 1 + int(np.searchsorted(np.cumsum(blocks_s), budget_s))]
            yield one["samples"] / float(kept.mean()), 2 * (recorded["start_s"] + float(kept.sum()))

    return Ground(
        settings=tuple(
            TunedSetting(id=str(at), choices=one["choices"], predicted_rate=one["predicted_rate"])
            for at, one in enumerate(document)
        ),
        rates=np.array([_rate(one, run) for one, run in zip(document, judges, strict=True)]),
        lengths_s=(BUDGET_S / GROWTH ** (len(BLOCKS) - 1), BUDGET_S),
        final_runs=1,
        run=run,
        rng=default_rng(seed),
    )


def _rate(setting: Mapping[str, Any], run: Mapping[str, Any]) -> float:
    """The samples/s of a recorded run; 0 if it failed."""
    return setting["samples"] / fmean(run["blocks_s"]) if run["outcome"] == "ok" else 0.0


def live(folder: Path, workload: str) -> None:
    """Run `bench tune` on the space of the grid. Compare what it chose with the best of the grid, by
    interleaved runs, pair by pair."""
    path, out = folder / f"{workload}.json", folder / f"{workload}-tune"
    grid_s = fmean(grid(path, seed).grid_s() for seed in (0, 1))
    seconds = math.ceil(SHARE * grid_s / int(COMMON["gpus"]) / (1 - FINAL_SHARE))
    _bench("tune", out, workload, strategy=_STRATEGIES, max_time=f"{seconds}s")
    tuning = read_record(out)
    assert tuning is not None
    assert tuning.answer is not None
    spent_s = sum(trial.device_s for trial in tuning.trials)
    print(f"{workload}: the search took {spent_s / grid_s:.0%} of the grid's time")
    document = {one["cell"]: one for one in json.loads(path.read_text())}
    recorded = {cell: [_rate(one, run) for run in one["runs"]] for cell, one in document.items()}
    best = sorted((cell for cell in recorded if all(recorded[cell])), key=lambda one: -fmean(recorded[one]))
    chosen = {"search": tuning.final[0], "answer": tuning.answer.setting}
    asked = [document[one] for one in {*best[:RIVALS], *chosen.values()}]
    study = _measured(
        folder / f"{workload}-judge",
        workload,
        strategy=",".join({one["strategy"] for one in asked}),
        accumulation=",".join({one["accumulation"] for one in asked}),
        repeats=JUDGED,
    )
    rates: dict[str, dict[int, float]] = {}
    for run in study.results():
        cell = study.cell(run.cell_id)
        assert run.step_ns is not None
        rates.setdefault(_plain_id(cell), {})[run.repeat] = 1e9 * cell.global_batch / run.step_ns.value
    rival = max(rates, key=lambda one: fmean(rates[one].values()))
    for name, one in chosen.items():
        ratio = over_runs([rate / rates[rival][place] for place, rate in rates[one].items()], "x")
        print(f"  the {name}'s setting over the fastest of {len(rates)}: {metric(ratio).with_ends}")


def main() -> None:
    action, place, *workloads = sys.argv[1:]
    folder = Path(place)
    for workload in workloads or GRIDS:
        if action == "record":
            record(folder, workload)
        elif action == "live":
            live(folder, workload)
        elif action == "replay":
            print(f"\n**{workload}**\n")
            grids = {seed: grid(folder / f"{workload}.json", seed) for seed in range(SEEDS)}
            compare(grids, near=0.03, noise=0.03)
            rates = [grids[seed].rates for seed in (0, 1)]
            own = [f"{grids[1 - at].off(int(rates[at].argmax())):.0%}" for at in (0, 1)]
            ran = (rates[0] > 0) & (rates[1] > 0)
            apart = np.median(np.abs(np.log(rates[0][ran] / rates[1][ran])))
            print(f"\nThe best of a recording is off by {' and '.join(own)} in the other one.")
            print(f"The two runs of a setting differ by {apart:.0%} (median).")


if __name__ == "__main__":
    main()
