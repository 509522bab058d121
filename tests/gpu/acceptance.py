"""`make gpu MINUTES=30` shows what it can of the program on a GPU within a given time.

The parts are ordered by their worth. A step of a part is cut at its limit, and skipped where the time that is
left is too short for it. The last lines name what is done, with its figures, what is left, and the command
that continues. `--archive FILE` packs them with all records. `--device cpu` runs every line with small
models. It has not run on a GPU so far.

An aim is compared only with the median of three runs or more.

Cells whose predicted memory exceeds the device's are left out, with a sentence.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, combinations, groupby, product, takewhile
from math import ceil, inf
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import msgspec

from harness.launch.guarded import Guarded
from harness.launchers.campaign_call import INTERRUPTED
from harness.machine.code import code_hash
from harness.machine.device import visible_gpus
from harness.matrix import Matrix
from harness.plan.estimate import estimate
from harness.plan.expand import expand
from harness.plan.request import make_requests
from harness.plan.schedule import Progress, schedule
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import Machine, Surroundings, devices_here
from results.cell import Cell
from results.errors import BenchError
from results.outcome import Outcome
from results.parts import ModelParts
from results.plan import Plan, Request
from results.record import Telemetry
from results.run import RunResult
from results.store import Study, utc_now
from workloads.catalog import WORKLOADS, facts

HERE = Path(__file__).resolve().parent
CODE = code_hash(HERE.parents[1])
PARTS = "figures", "order", "clocks", "ranks", "calls", "repeats", "correct", "blocks", "models"
ENDING_S = 20.0
"""Seconds that are kept to end the workers of a step that is cut, and to print the summary."""
SLOW_START_S = 60.0
"""Seconds that a step may take beyond its estimate, and in which a part of a longer step is done."""
COMPILATION_S = 40.0
"""Seconds to compile a cell, which the estimates of a plan lack. Assumed."""
SILENCE = "5m"
"""A launch without progress for this long is ended as hung."""
FLAT_WITHIN = 0.02
SERIES = {"sm_clock_mhz", "power_w", "temperature_c"}
FEW = StudyFile(budget=0, warmup_steps=0, block_steps=2, quads=1)
"""Steps of what is to be right, not fast: with a warm-up, a GPU would be timed for seconds."""
ENOUGH = 8
"""Samples of a batch: where more do not fit, activations are computed again."""
CLAIMED = 3
"""The runs from which a figure is claimed."""
AIMS = {"resnet50": "3,000 images/s on an H200", "gpt2": "MFU 50 %", "llama": "MFU 50 %"}
OVERFLOWED = "the loss scaler left out every step"
"""Words of a proof in fp16 where the first factor of the loss is too large for the first steps."""
ROUNDED = "where parameters are off by one rounding"
"""Words of a proof where rounding turns the gradients of a model (docs/proof.md)."""
OF_A_STEP = "batch_size", "precision", "memory_format", "compile", "activation_checkpointing"
Row = dict[str, Any]


_FAST = {"precision": "bf16", "compile": True, "budget": 10}
GPU = SimpleNamespace(
    # A workload that is measured before, between and after others of its launch.
    again="gpt2-small",
    others="mlp,resnet50",
    timed={"batch_size": 8, "precision": "bf16", "budget": 3},
    # A cell that is measured from the start of its launch, and one whose steps are short.
    heating={"workload": "gpt2-small", "batch_size": 16, "precision": "bf16", "budget": 45},
    short={"workload": "mlp", "batch_size": 8, "budget": 8},
    block_steps=(5, 50, 500),
    # Workloads of `correct`: in pairs with each of the other settings, and in one cell each.
    proven=(
        *("mlp", "resnet18-32px", "resnet18", "resnet50"),
        *("gpt-nano", "gpt2-small", "llama-nano", "llama-125m", "moe-nano"),
    ),
    once=("resnet101", "gpt2-medium", "gpt2-large"),
    precisions=("fp32", "tf32", "bf16", "fp16"),
    # Settings of `correct` that take too long together.
    left_out=tuple(
        {"workload": each, "compile": True}
        for each in ("resnet18-32px", "gpt-nano", "llama-nano", "moe-nano")
    ),
    batch=8,
    # The workloads of strategies that keep complete models, and of those that cut them.
    whole="mlp",
    cut="gpt2-small",
    blocks=12,
    # Workloads, their largest batches, and their settings.
    figures=(
        ("gpt2-small", 64, _FAST),
        ("resnet50", 256, _FAST | {"memory_format": "channels_last"}),
    ),
    models=(
        *((model, 64, _FAST) for model in ("gpt2-medium", "gpt2-xl")),
        *((model, 16, _FAST) for model in ("llama-1b", "llama-7b")),
        # The compiler stops at the number of tokens of each expert.
        *(
            (model, 16, _FAST | {"compile": False})
            for model in ("granite-3b", "mixtral-8x7b", "mixtral-8x22b")
        ),
    ),
    bare_s=90,
)
_SMALL = "mlp", "resnet18-32px", "gpt-nano:seq=8", "llama-nano:seq=8"
_SLOW = {"precision": "bf16", "budget": 0, "warmup_steps": 2, "block_steps": 1}
CPU = SimpleNamespace(
    again="gpt-nano:seq=8",
    others="mlp,resnet18-32px",
    timed={"batch_size": 2, "budget": 0.2},
    heating={"workload": "mlp", "batch_size": 2, "budget": 2},
    short={"workload": "mlp", "batch_size": 2, "budget": 1},
    block_steps=(1, 5, 50),
    proven=_SMALL,
    once=("gpt-nano:seq=16",),
    precisions=("fp32", "bf16", "fp16"),
    left_out=(
        *({"workload": each, "compile": True} for each in _SMALL if each != "mlp"),
        *({"precision": each, "compile": True} for each in ("bf16", "fp16")),
        # Most CPUs emulate such convolutions; `figures` have one in bf16.
        *({"workload": "resnet18-32px", "precision": each} for each in ("bf16", "fp16")),
    ),
    batch=2,
    whole="mlp",
    cut="gpt-nano:seq=8",
    blocks=4,
    figures=(("gpt-nano:seq=8", 2, _SLOW),),
    models=(("resnet18-32px", 2, _SLOW | {"memory_format": "channels_last"}),),
    bare_s=30,
)
"""The same with small models. The compiler takes longer than all else, and has one of them."""


def scale(device: str) -> SimpleNamespace:
    return CPU if device == "cpu" else GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Cells that are asked for at once."""

    part: str
    options: StudyFile
    """But for where they run."""
    ranks: int = 1
    simulated: bool = True
    """Whether nothing less than a serial simulation of the steps proves them."""
    repeats: int = 1

    def placed(self, device: str, gpus: int) -> StudyFile:
        """With where they run. Ranks beyond the number of GPUs share them, over Gloo."""
        crowded = device == "cpu" or self.ranks > gpus
        return msgspec.structs.replace(
            self.options,
            device=device,
            gpus=self.ranks,
            repeats=self.repeats,
            oversubscribe=crowded or None,
            backend="gloo" if crowded else "nccl",
        )


@cache
def lines(part: str, device: str) -> tuple[Line, ...]:
    """The lines of a part. Some parts plan many cells to find them, and print those that they leave out."""
    size = scale(device)
    if part == "clocks":
        return (_line(part, block_steps=50, warmup_steps=0, target=0.0, **size.heating),)
    if part == "blocks":
        return tuple(
            _line(part, block_steps=steps, warmup_steps=0, target=0.0, **size.short)
            for steps in size.block_steps
        )
    if part in ("figures", "models"):
        # One cell a model, as large as is predicted to fit; small models first.
        chosen = (_largest(*model, device) for model in getattr(size, part))
        return tuple(line for line in chosen if line is not None)
    if part == "repeats":
        return tuple(replace(line, repeats=CLAIMED) for line in lines("figures", device))
    made = {"order": _order, "ranks": _ranks, "correct": _correct}
    return tuple(made[part](device)) if part in made else ()


def _line(part: str, ranks: int = 1, simulated: bool = True, **given: Any) -> Line:
    proven = part in ("ranks", "correct")
    few = msgspec.structs.asdict(FEW) if proven else {}
    given = {name: value for name, value in (few | given).items() if value is not None}
    options = StudyFile(**({"strategy": "single"} | given))
    return Line(part=part, options=options, ranks=ranks, simulated=simulated and proven)


def _order(device: str) -> list[Line]:
    """The same work before, between and after other work, with a seed that gives it each of these places: the
    order of a launch is drawn from the ids of its cells."""
    size = scale(device)
    others = _line("order", workload=size.others, **size.timed)
    every = _line("order", workload=size.again, seed=",".join(map(str, range(64))), **size.timed)
    plans = planned(others, device, gpus=1) + planned(every, device, gpus=1)
    cells = [cell for plan in plans for cell in plan.cells]
    [launch] = schedule(cells, repeats=1, seed=plans[0].request.seed)
    runs = groupby(launch.cells, key=lambda cell: cell.workload == size.again)
    seeds = ",".join(str(next(same).seed) for is_again, same in runs if is_again)
    return [others, _line("order", workload=size.again, seed=seeds, **size.timed)]


def _ranks(device: str) -> list[Line]:
    """The first cells of `correct` on two ranks, which share a GPU where there is one."""
    return _of_ranks(device)[:2]


def _correct(device: str) -> list[Line]:
    size = scale(device)
    rows = [_line("correct", **row, batch_size=size.batch) for row in pairwise(device)]
    # Their proof may be a weaker one, as a simulation of their steps may take too long.
    large = {"simulated": False, "batch_size": 2, "precision": "bf16"}
    return _of_ranks(device) + rows + [_line("correct", workload=each, **large) for each in size.once]


def pairwise(device: str) -> list[Row]:
    """Settings in which each two values that go together meet; greedily, the most new pairs first."""
    rows, chosen = possible(device), []
    left = {pair for row in rows for pair in pairs(row)}
    while left:
        chosen.append(max(rows, key=lambda row: len(left & pairs(row))))
        left -= pairs(chosen[-1])
    return chosen


def possible(device: str) -> list[Row]:
    """All combinations of the settings of `correct` that no rule refuses."""
    size = scale(device)
    factors: Row = {
        "workload": size.proven,
        "precision": size.precisions,
        "activation_checkpointing": (False, "selective", True),
        "memory_format": ("contiguous", "channels_last"),
        "compile": (False, True),
    }
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    return [row for row in rows if _goes(row, device)]


def _goes(row: Row, device: str) -> bool:
    if any(row.items() >= left_out.items() for left_out in scale(device).left_out):
        return False
    parts = facts(WORKLOADS.parse(row["workload"])).parts
    if row["activation_checkpointing"] and not (isinstance(parts, ModelParts) and parts.blocks):
        return False
    [plan] = planned(_line("correct", **row, batch_size=2), device, gpus=1)
    return bool(plan.cells)


def pairs(row: Row) -> set[object]:
    return set(combinations(row.items(), 2))


def _of_ranks(device: str) -> list[Line]:
    """Every strategy, compressor and collective that is offered on GPUs."""
    size = scale(device)
    half, plain = size.blocks // 2, "sgd:lr=0.05:momentum=0"
    rest = ",".join(
        (
            *("fsdp:offload=cpu", "zero2", "zero3", "scratch-fsdp:stage=1", "scratch-fsdp:stage=2"),
            *("scratch-fsdp:stage=3", "scratch-fsdp:offload=cpu"),
            f"manual:reshard.checkpoint*{half}+keep*{half}",
            *(f"pipeline:{kind}:microbatches=2" for kind in ("gpipe", "1f1b", "interleaved")),
        )
    )
    lossy = "fp16,bf16,topk:0.1,randomk:0.1,powersgd:2,int8,signsgd,dgc:0.1"
    asked: tuple[Row, ...] = (
        {"workload": size.whole, "strategy": "ddp,ddp:bucket_view=true,scratch-ddp,zero1,local-sgd:2"},
        {"workload": size.whole, "strategy": "local-sgd:2:outer=nesterov"},
        {"workload": size.cut, "strategy": "fsdp,tp"},
        {"workload": size.cut, "strategy": rest},
        {"workload": size.whole, "strategy": "scratch-ddp", "compression": lossy, "optimizer": plain},
        {"workload": size.whole, "strategy": "ddp", "compression": "topk:0.1,powersgd:2,torch-powersgd:2"},
        {"workload": size.whole, "strategy": "local-sgd:2", "compression": "topk:0.1"},
    )
    lines = [_line("correct", ranks=2, batch_size=size.batch, **options) for options in asked]
    # Two nodes of two ranks: fewer have nothing inside of a node, or nothing across.
    nodes: tuple[Row, ...] = (
        {"workload": size.whole, "strategy": "ddp,scratch-ddp", "collective": "hierarchical"},
        {"workload": size.cut, "strategy": "hsdp"},
    )
    return lines + [
        _line("correct", ranks=4, node_size=2, batch_size=size.batch, **options) for options in nodes
    ]


def _largest(workload: str, most: int, settings: Row, device: str) -> Line | None:
    """The largest batch that fits, with the least that is computed again for a batch of `ENOUGH`."""
    batches = ",".join(str(2**power) for power in range(most.bit_length()))
    found: list[tuple[int, Row]] = []
    nearest: list[tuple[int, Cell]] = []
    for again in (False, "selective", True):
        options = {"workload": workload, "activation_checkpointing": again} | settings
        [plan] = planned(_line("figures", batch_size=batches, **options), device, gpus=1)
        nearest += [(plan.predicted_bytes[cell.id], cell) for cell in plan.cells]
        found.append(
            (max((cell.micro_batch for cell in plan.cells if _fits(cell, plan)), default=0), options)
        )
    enough = (one for one in found if one[0] >= min(ENOUGH, most))
    largest, options = next(enough, max(found, key=lambda one: one[0]))
    if largest:
        return _line("figures", batch_size=largest, **options)
    print(_too_large(*min(nearest, key=lambda one: one[0])))
    return None


def planned(line: Line, device: str, gpus: int) -> list[Plan]:
    """The plans of a line, whatever this machine has."""
    options = line.placed(device, gpus)
    requests = make_requests(options, machine_has_cuda=device == "cuda", source_folder=Path())
    return [expand(request, study="gpu", created_at=utc_now()) for request in requests]


def _room(cell: Cell) -> int:
    """Bytes that may be planned for a rank of a cell."""
    return Surroundings.of(cell, devices_here(), None).room


def _fits(cell: Cell, plan: Plan) -> bool:
    return plan.predicted_bytes.get(cell.id, 0) <= _room(cell)


def _too_large(predicted: int, cell: Cell) -> str:
    return (
        f"{cell.workload}, batch {cell.micro_batch}: left out, as it is predicted to need "
        f"{predicted / 2**30:.1f} GiB of the {_room(cell) / 2**30:.1f} that may be planned"
    )


class _Together(Matrix):
    """A `bench matrix` of several lines, whose cells share their launches."""

    def __init__(self, requests: Iterable[Request], options: StudyFile) -> None:
        self._of_all_lines = tuple(requests)
        super().__init__(options, study_file=None)

    def _requested(self, options: StudyFile, folder: Path) -> tuple[Request, ...]:
        return self._of_all_lines


class Script:
    """A script in another process, which leaves nothing on the device. Its output is kept if it ends well."""

    def __init__(self, name: str, seconds: float, out: Path, *words: str) -> None:
        self.name, self._seconds, self._words = name, seconds, words
        self._kept = out / f"{name.replace(' ', '-')}-{CODE}.txt"
        self._failed: list[str] = []

    def left_s(self) -> float:
        return 0.0 if self._kept.exists() else self._seconds

    def figures(self) -> list[str]:
        return self._kept.read_text(encoding="utf-8").splitlines() if self._kept.exists() else []

    def wrong(self) -> list[str]:
        return self._failed

    def run(self, limit_s: float) -> None:
        path, end = self._kept.with_suffix(".log"), time.monotonic() + limit_s
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as log:
            process = Guarded((sys.executable, *self._words), log=log)
            try:
                while process.poll() is None and time.monotonic() < end:
                    time.sleep(0.1)
            finally:
                code = process.end()
        if code == 0:
            path.rename(self._kept)
        elif time.monotonic() < end:
            self._failed = [f"{self.name}: exit code {code}, see {path}"]


class Group:
    """Cells of one number of ranks, which share a start of workers. Those that do not fit are left out."""

    def __init__(self, name: str, root: Path, chosen: Sequence[Line], device: str) -> None:
        self.name = name
        self.study = Study(root)
        self.cells: dict[str, Cell] = {}
        self.predicted: dict[str, int] = {}
        self._asked: dict[str, Line] = {}
        self._requests: dict[Request, None] = {}
        gpus = len(visible_gpus())
        self._options = chosen[0].placed(device, gpus)
        for line, plan in ((one, plan) for one in chosen for plan in planned(one, device, gpus)):
            self.predicted |= plan.predicted_bytes
            for cell in plan.cells:
                if _fits(cell, plan):
                    self.cells[cell.id], self._asked[cell.id] = cell, line
                    self._requests[plan.request] = None
                else:
                    print(_too_large(plan.predicted_bytes[cell.id], cell))

    def runs(self) -> dict[str, list[RunResult]]:
        """The runs of each cell by this code, oldest first, except those that were cut."""
        found: dict[str, list[RunResult]] = {}
        for result in sorted(self.study.results(cells=set(self.cells)), key=lambda run: run.run_id):
            of_this_code = result.environment is None or result.environment.code.code_hash == CODE
            if of_this_code and not result.outcome.runs_again:
                found.setdefault(result.cell_id, []).append(result)
        return found

    def ended(self) -> dict[str, RunResult]:
        """The newest run of each cell."""
        return {cell: runs[-1] for cell, runs in self.runs().items()}

    def left_s(self) -> float:
        """Estimate the seconds that the missing runs take, 0 without any."""
        runs = self.runs()
        ok = {cell: len(those) for cell, those in runs.items()}
        closed = {cell for cell, those in runs.items() if those[-1].outcome is not Outcome.OK}
        left = schedule(
            list(self.cells.values()),
            repeats=self._options.repeats or 1,
            progress=Progress(ok_runs=ok, closed=closed),
        )
        seconds = estimate(left, earlier={}, hardware=Machine.here().hardware).seconds
        return seconds + COMPILATION_S * sum(cell.compile for launch in left for cell in launch.cells)

    def figures(self) -> list[str]:
        report = REPORTS.get(self.name.partition(" ")[0], of_each_cell)
        return report(self) if self.ended() else []

    def wrong(self) -> list[str]:
        ended = self.ended().items()
        of_cells = [words for cell, run in ended for words in _wrong(self._asked[cell], run)]
        return of_cells + _left_behind(self.study)

    def run(self, limit_s: float) -> None:
        given = {"out": str(self.study.root), "max_time": f"{max(1.0, limit_s):.0f}s", "hang_after": SILENCE}
        options = msgspec.structs.replace(self._options, **given)
        if _Together(self._requests, options).run(report=False) == INTERRUPTED:
            raise KeyboardInterrupt


def figures_of(runs: Sequence[RunResult], predicted: int | None) -> str:
    """Write the figures of a cell's run of median time in a line, with the range of all its runs."""
    timed = sorted((run.step_ns.value, run.run_id, run) for run in runs if run.step_ns is not None)
    if not timed:
        return f"  {runs[-1].cell_id}: {runs[-1].outcome}"
    _, _, result = timed[len(timed) // 2]
    assert result.step_ns is not None
    spread = f"{timed[0][0] / 1e6:.2f} to {timed[-1][0] / 1e6:.2f} in {len(timed)} runs"
    figures = [
        f"{result.step_ns.value / 1e6:.2f} ms a step ({spread if len(timed) > 1 else '1 run'})",
        f"{result.samples_per_s:,.1f} samples/s",
    ]
    if result.units_per_s is not None:
        figures.append(f"{result.units_per_s:,.0f} {result.unit}/s")
    if result.mfu is not None:
        figures.append(f"MFU {result.mfu:.1%}")
    if result.device_allocated_peak_bytes is not None:
        beside = "" if predicted is None else f" of {predicted / 2**30:.2f} predicted"
        figures.append(f"{result.device_allocated_peak_bytes / 2**30:.2f} GiB{beside}")
    aim = next((aim for name, aim in AIMS.items() if result.cell_id.startswith(name)), None)
    aimed = f" (aim {aim})" if aim and len(timed) >= CLAIMED else ""
    return f"  {result.cell_id}: {', '.join(figures)}{aimed}"


def of_each_cell(group: Group) -> list[str]:
    cells = sorted(group.runs().items(), key=lambda each: each[1][-1].started_at or "")
    return [figures_of(runs, group.predicted.get(cell)) for cell, runs in cells]


def of_all_cells(group: Group) -> list[str]:
    outcomes = Counter(str(result.outcome) for result in group.ended().values())
    return [f"  of {len(group.cells)} cells: {', '.join(f'{n} {word}' for word, n in outcomes.items())}"]


def of_order(group: Group) -> list[str]:
    """How far the figures of the same work are apart, too."""
    [(again, _)] = Counter(cell.workload for cell in group.cells.values()).most_common(1)
    ended = [run for cell, run in group.ended().items() if group.cells[cell].workload == again]
    same = [run.step_ns.value for run in ended if run.step_ns is not None]
    return [*of_each_cell(group), *(f"  {again}: {max(same) / min(same) - 1:.1%} apart" for _ in same[:1])]


def by_second(step_ns: Sequence[int]) -> list[tuple[float, float]]:
    """The mean time of the steps that end in each second, in ms, by the second from the first step on."""
    ends = accumulate(step_ns)
    seconds = groupby(zip(ends, step_ns, strict=True), key=lambda step: step[0] // 10**9)
    return [(float(second), fmean(each for _, each in steps) / 1e6) for second, steps in seconds]


def flat_from(points: Sequence[tuple[float, float]]) -> float:
    """The time from which all values are within FLAT_WITHIN of the second half's median; inf if none is."""
    final = median(value for _, value in points[len(points) // 2 :])
    flat = list(takewhile(lambda point: abs(point[1] - final) <= FLAT_WITHIN * abs(final), points[::-1]))
    return flat[-1][0] if flat else inf


def of_steps(group: Group) -> list[str]:
    """Report the time of blocks outside of their steps, and the time until step times and clocks are flat."""
    runs = [(cell, run.run_id) for cell, run in group.ended().items() if run.outcome is Outcome.OK]
    records = [record for run in runs for record in group.study.rank_records(*run)]
    found = []
    for record in sorted(records, key=lambda record: record.block_steps):
        wall, inside, steps = sum(record.blocks_ns), sum(record.steps.step_ns), len(record.steps.step_ns)
        found.append(
            f"  {len(record.blocks_ns)} blocks of {record.block_steps} steps: {wall / steps / 1e6:.4f} ms a "
            f"step, {1 - inside / wall:.2%} of it outside of the steps"
        )
        telemetry = record.telemetry or Telemetry()
        curves = {"ms a step": by_second(record.steps.step_ns)}
        for name in SERIES & telemetry.series.keys():
            read = zip(telemetry.at_ms, telemetry.series[name], strict=True)
            curves[name] = [(at / 1e3, value) for at, value in read if value is not None]
        found += [
            f"    {name}: {points[0][1]:.5g} at first, {points[-1][1]:.5g} after {points[-1][0]:.0f} s, "
            f"flat within {FLAT_WITHIN:.0%} from: {flat_from(points):.0f} s".replace("inf s", "never")
            for name, points in curves.items()
        ]
    return found


REPORTS = {"order": of_order, "clocks": of_steps, "blocks": of_steps, "correct": of_all_cells}


def _wrong(line: Line, result: RunResult) -> list[str]:
    """List what is wrong: a cell is not proven, unless it is one of `figures` or `models` that is too large
    for the device in spite of the prediction."""
    if result.outcome is Outcome.OUT_OF_MEMORY and line.part in ("figures", "models"):
        return []
    if result.outcome is not Outcome.OK:
        return [f"{result.cell_id}: {result.outcome}: {result.reason}"]
    proof = result.proof
    if proof is None or not proof.passed:
        return [f"{result.cell_id}: not proven: {proof.detail if proof else 'no proof'}"]
    accepted = any(reason in proof.detail for reason in (OVERFLOWED, ROUNDED))
    if line.simulated and proof.method != "serial-simulation" and not accepted:
        return [f"{result.cell_id}: proven by {proof.method} alone: {proof.detail}"]
    return []


def _left_behind(study: Study) -> list[str]:
    """Launches that ended early, as a cell had left memory behind."""
    logs = [path.read_text(encoding="utf-8") for path in sorted(study.root.glob("launches/*/rank-*.jsonl"))]
    events = [json.loads(line) for log in logs for line in log.splitlines()]
    stopped = [event["reason"] for event in events if event["event"] == "stopped"]
    return [f"{study.root}: {reason}" for reason in stopped if "memory" in reason]


Step = Script | Group


def steps(parts: Sequence[str], device: str, out: Path) -> list[Step]:
    """All steps of these parts, in the order of their worth. A step is left out if none of its cells fits."""
    found = [step for part in parts for step in _steps(part, device, out)]
    return [step for step in found if isinstance(step, Script) or step.cells]


def _steps(part: str, device: str, out: Path) -> Iterator[Step]:
    if part == "calls":
        yield Script("doctor", 15, out, "-m", "harness.cli", "doctor")
        # Over NCCL at one rank, on a CPU over Gloo at two.
        yield Script("calls", 30, out, str(HERE / "calls.py"), device)
    if part in ("figures", "repeats", "models"):
        for line in lines(part, device):
            # The runs of `repeats` follow those of `figures` in the same study.
            yield Group(f"{part} of {line.options.workload}", out / "figures", [line], device)
            first, last = {"figures": (1, 1), "repeats": (2, CLAIMED), "models": (1, 0)}[part]
            for number in range(first, last + 1):
                yield _against_bare(line, number, device, out)
        return
    for ranks in (2, 4, 1):
        chosen = [line for line in lines(part, device) if line.ranks == ranks]
        if chosen:
            # The cells of `ranks` are among those of `correct`, in the same study.
            study = part if ranks == 1 else f"ranks-{ranks}"
            yield Group(f"{part} on {ranks} ranks" if ranks > 1 else part, out / study, chosen, device)


def _against_bare(line: Line, number: int, device: str, out: Path) -> Script:
    """Compare a step of this line with a bare loop's, for the `number`-th time."""
    given = {name: getattr(line.options, name) for name in ("workload", *OF_A_STEP)}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"device": device, "out": str(out / f"{line.options.workload}-{CODE}-bare.json")}
    words = str(HERE / "bare.py"), json.dumps(given)
    name = f"{line.options.workload} against a bare loop, process {number}"
    return Script(name, scale(device).bare_s, out, *words)


def limit_s(estimate_s: float, left_s: float) -> float | None:
    """Seconds that a step may take of those that are left; None: they are too few to begin.

    A step that takes much longer than its estimate must not take the time of all others.
    """
    room = left_s - ENDING_S
    return min(room, 2 * estimate_s + SLOW_START_S) if room >= min(estimate_s, SLOW_START_S) else None


def run_all(asked: Sequence[Step], left_s: Callable[[], float]) -> list[str]:
    """Run what is left, while there is time; what was cut continues after the others. Returns errors."""
    queue, errors = deque(asked), []
    while queue:
        step = queue.popleft()
        estimate_s = step.left_s()
        limit = limit_s(estimate_s, left_s()) if estimate_s else None
        if limit is None:
            continue
        print(f"\n{step.name}: about {estimate_s:.0f} s, at most {limit:.0f} of {left_s():.0f}", flush=True)
        try:
            step.run(limit)
        except BenchError as error:
            errors.append(f"{step.name}: {error}")
        print("\n".join([*step.figures(), *step.wrong()]), flush=True)
        if step.left_s() < estimate_s:
            queue.append(step)
    return errors


def summary(asked: Sequence[Step], command: str) -> list[str]:
    """List the finished steps with their figures, the steps that are left, and the command that continues."""
    found = ["", "done:"]
    for step in asked:
        found += [step.name, *figures] if (figures := step.figures()) else []
    left = {step.name: left_s for step in asked if (left_s := step.left_s())}
    if left:
        minutes = ceil((sum(left.values()) + SLOW_START_S + ENDING_S) / 60)
        found += ["", "left:", *(f"{name} (about {seconds:.0f} s)" for name, seconds in left.items())]
        found += [f"continue with: {command} MINUTES={minutes}"]
    return found


def archive(path: Path, out: Path, said: str) -> None:
    """Pack what the parts left in `out`, and the summary, as one file."""
    summary = said.encode()
    entry = tarfile.TarInfo(f"{out.name}/summary.txt")
    entry.size = len(summary)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as packed:
        packed.addfile(entry, io.BytesIO(summary))
        if out.exists():
            packed.add(out, arcname=out.name)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if left out")
    parser.add_argument("--minutes", type=float, default=30.0, help="of all parts together; 30 if left out")
    parser.add_argument("--began", type=float, default=time.time(), help="when they began, in Unix time; now")
    parser.add_argument("--command", default="make gpu", help="what the summary continues with")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="folder of the studies; runs/gpu-on-DEVICE if left out")
    parser.add_argument("--archive", type=Path, help="a file to pack the summary and all records into")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if given.device is None and not visible_gpus():
        print("skipped, as this machine has no GPU; DEVICE=cpu runs all parts with small models")
        return 0
    device = given.device or "cuda"
    out = given.out or Path("runs", f"gpu-on-{device}")
    asked = steps(given.parts or PARTS, device, out)
    end, wrong, code = given.began + 60 * given.minutes, [], 0
    try:
        wrong = run_all(asked, lambda: end - time.time())
    except KeyboardInterrupt:
        code = INTERRUPTED
    wrong += [words for step in asked for words in step.wrong()]
    said = "\n".join([*summary(asked, given.command), "", *(f"wrong: {words}" for words in wrong)])
    print(said)
    if given.archive is not None:
        archive(given.archive, out, said)
        print(f"packed: {given.archive}")
    return code or int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
