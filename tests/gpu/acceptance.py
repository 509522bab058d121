"""The acceptance on a machine with a GPU, by what `bench matrix` does from end to end: `make gpu`.

    python tests/gpu/acceptance.py smoke correct ranks figures [--device cpu] [--out FOLDER]

A part has a study for each number of ranks, whose cells share a start of workers; the same command goes on
where it was stopped. `--device cpu` runs every line with small models and few steps. Where there is no GPU,
and `--device` does not ask for one, the parts are skipped with a sentence. It has not run on a GPU so far.

Cells that are predicted not to fit into the device's memory are left out, with a sentence.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The program need not be installed: what it needs may be there with a torch of the machine's own.
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from harness.device import visible_gpus  # noqa: E402
from harness.matrix import Matrix  # noqa: E402
from harness.plan.expand import expand  # noqa: E402
from harness.plan.request import make_requests  # noqa: E402
from harness.plan.study_file import StudyFile  # noqa: E402
from harness.plan.surroundings import Surroundings, devices_here  # noqa: E402
from results.cell import Cell  # noqa: E402
from results.errors import BenchError  # noqa: E402
from results.outcome import Outcome  # noqa: E402
from results.parts import ModelParts  # noqa: E402
from results.plan import Plan, Request  # noqa: E402
from results.run import RunResult  # noqa: E402
from results.store import Study, utc_now  # noqa: E402
from workloads.catalog import WORKLOADS, facts  # noqa: E402

PARTS = "smoke", "correct", "ranks", "figures"
LONGEST_S = {"smoke": 120, "correct": 480, "ranks": 480, "figures": 480}
"""What a part may take on a recent GPU."""
FEW = StudyFile(budget=0, warmup_steps=0, block_steps=2, quads=1)
"""Steps of what is to be right, not fast: with a warm-up, a GPU would be timed for seconds."""
ENOUGH = 8
"""Samples of a batch: where more do not fit, activations are computed again."""
AIMS = {"resnet50": "3,000 images/s on an H200", "gpt2": "MFU 50 %", "llama": "MFU 50 %"}
COST_AIM = 1.01
OVERFLOWED = "the loss scaler left out every step"
"""What a proof says in fp16 where the first factor of the loss is too large for the first steps."""
ROUNDED = "where parameters are off by one rounding"
"""What it says where rounding alone gives gradients of a model another direction (docs/proof.md)."""
OF_A_STEP = "batch_size", "precision", "memory_format", "compile", "activation_checkpointing"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is run on one kind of device."""

    smoke: str
    proven: tuple[str, ...]
    """Workloads of `correct`, in pairs with each of the other settings."""
    once: tuple[str, ...]
    """Other workloads of `correct`, each in one cell."""
    precisions: tuple[str, ...]
    left_out: tuple[Row, ...]
    """Settings of `correct` that take too long together."""
    batch: int
    """Of `correct` and `ranks`."""
    whole: str
    """The workload of strategies that keep whole models, and of compressors."""
    cut: str
    """The workload of strategies that cut the model."""
    blocks: int
    figures: tuple[tuple[str, int, Row], ...]
    """Workloads, their largest batches, and their settings."""
    against_bare: tuple[str, ...]
    """Those whose steps are compared with a bare loop's."""


_FAST = {"precision": "bf16", "compile": True, "budget": 20}
GPU = Scale(
    smoke="mlp,resnet18-32px,gpt-nano",
    proven=(
        *("mlp", "resnet18-32px", "resnet18", "resnet50"),
        *("gpt-nano", "gpt2-small", "llama-nano", "llama-125m"),
    ),
    once=("resnet101", "gpt2-medium", "gpt2-large"),
    precisions=("fp32", "tf32", "bf16", "fp16"),
    left_out=tuple(
        {"workload": each, "compile": True} for each in ("resnet18-32px", "gpt-nano", "llama-nano")
    ),
    batch=8,
    whole="mlp",
    cut="gpt2-small",
    blocks=12,
    figures=(
        ("resnet50", 256, _FAST | {"memory_format": "channels_last"}),
        *((model, 64, _FAST) for model in ("gpt2-small", "gpt2-medium", "gpt2-xl")),
        *((model, 16, _FAST) for model in ("llama-1b", "llama-7b")),
    ),
    against_bare=("resnet50", "gpt2-small"),
)
_SMALL = "mlp", "resnet18-32px", "gpt-nano:seq=8", "llama-nano:seq=8"
_SLOW = {"precision": "bf16", "budget": 0, "warmup_steps": 2, "block_steps": 1}
CPU = Scale(
    smoke="mlp,resnet18-32px,gpt-nano:seq=8",
    proven=_SMALL,
    once=("gpt-nano:seq=16",),
    precisions=("fp32", "bf16", "fp16"),
    left_out=(
        *({"workload": each, "compile": True} for each in _SMALL if each != "mlp"),
        *({"precision": each, "compile": True} for each in ("bf16", "fp16")),
        # A convolution in fp16 is emulated.
        {"workload": "resnet18-32px", "precision": "fp16"},
    ),
    batch=2,
    whole="mlp",
    cut="gpt-nano:seq=8",
    blocks=4,
    figures=(
        ("resnet18-32px", 2, _SLOW | {"memory_format": "channels_last"}),
        ("gpt-nano:seq=8", 2, _SLOW),
        ("llama-nano:seq=8", 2, _SLOW),
    ),
    against_bare=("gpt-nano:seq=8",),
)
"""The same with small models. The compiler takes longer than all else, and has one of them."""


def scale(device: str) -> Scale:
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

    def placed(self, device: str, gpus: int) -> StudyFile:
        """With where they run. Ranks beyond the number of GPUs share them, over Gloo."""
        crowded = device == "cpu" or self.ranks > gpus
        return msgspec.structs.replace(
            self.options,
            device=device,
            gpus=self.ranks,
            repeats=1,
            oversubscribe=crowded or None,
            backend="gloo" if crowded else "nccl",
        )


@cache
def lines(part: str, device: str) -> tuple[Line, ...]:
    """What a part runs. Some parts plan many cells to find it, and say what they leave out."""
    found = {"smoke": _smoke, "correct": _correct, "ranks": _ranks, "figures": _figures}[part]
    return tuple(found(device))


def _line(part: str, ranks: int = 1, simulated: bool = True, **given: Any) -> Line:
    few = {} if part == "figures" else msgspec.structs.asdict(FEW)
    options = StudyFile(**{name: value for name, value in (few | given).items() if value is not None})
    return Line(part=part, options=options, ranks=ranks, simulated=simulated)


def _smoke(device: str) -> list[Line]:
    size = scale(device)
    return [_line("smoke", workload=size.smoke, strategy="single", batch_size=size.batch)]


def _correct(device: str) -> list[Line]:
    size = scale(device)
    rows = [_line("correct", **row, strategy="single", batch_size=size.batch) for row in pairwise(device)]
    # Their proof may be a weaker one, as a simulation of their steps may take too long.
    return rows + [
        _line("correct", simulated=False, workload=each, strategy="single", batch_size=2, precision="bf16")
        for each in size.once
    ]


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
    [plan] = planned(_line("correct", **row, strategy="single", batch_size=2), device, gpus=1)
    return bool(plan.cells)


def pairs(row: Row) -> set[object]:
    return set(combinations(row.items(), 2))


def _ranks(device: str) -> list[Line]:
    """Every strategy, compressor and collective that is offered on GPUs."""
    size = scale(device)
    half, plain = size.blocks // 2, "sgd:lr=0.05:momentum=0"
    whole = "ddp,ddp:bucket_view=true,scratch-ddp,zero1,local-sgd:2"
    cut = ",".join(
        (
            *("fsdp", "fsdp:offload=cpu", "zero2", "zero3", "scratch-fsdp:stage=1"),
            *("scratch-fsdp:stage=2", "scratch-fsdp:stage=3", "scratch-fsdp:offload=cpu", "tp"),
            f"manual:reshard.checkpoint*{half}+keep*{half}",
            *(f"pipeline:{kind}:microbatches=2" for kind in ("gpipe", "1f1b", "interleaved")),
        )
    )
    lossy = "fp16,bf16,topk:0.1,randomk:0.1,powersgd:2,int8,signsgd,dgc:0.1"
    asked: tuple[Row, ...] = (
        {"workload": size.whole, "strategy": whole},
        {"workload": size.cut, "strategy": cut},
        {"workload": size.whole, "strategy": "scratch-ddp", "compression": lossy, "optimizer": plain},
        {"workload": size.whole, "strategy": "ddp", "compression": "topk:0.1,powersgd:2,torch-powersgd:2"},
        {"workload": size.whole, "strategy": "local-sgd:2", "compression": "topk:0.1"},
    )
    lines = [_line("ranks", ranks=2, batch_size=size.batch, **options) for options in asked]
    # Two nodes of two ranks: fewer have nothing inside of a node, or nothing across.
    nodes: tuple[Row, ...] = (
        {"workload": size.whole, "strategy": "ddp,scratch-ddp", "collective": "hierarchical"},
        {"workload": size.cut, "strategy": "hsdp"},
    )
    return lines + [
        _line("ranks", ranks=4, node_size=2, batch_size=size.batch, **options) for options in nodes
    ]


def _figures(device: str) -> list[Line]:
    """One cell a model, as large as is predicted to fit."""
    found = (_largest(*model, device) for model in scale(device).figures)
    return [line for line in found if line is not None]


def _largest(workload: str, most: int, settings: Row, device: str) -> Line | None:
    """The largest batch that fits, with the least that is computed again for a batch of `ENOUGH`."""
    batches = [2**power for power in range(most.bit_length())]
    best: tuple[int, Line] | None = None
    nearest: list[tuple[int, Cell]] = []
    for again in (False, "selective", True):
        options = {"workload": workload, "strategy": "single", "activation_checkpointing": again} | settings
        line = _line("figures", simulated=False, batch_size=",".join(map(str, batches)), **options)
        for plan in planned(line, device, gpus=1):
            fitting = [cell.micro_batch for cell in plan.cells if _fits(cell, plan)]
            nearest += [(plan.predicted_bytes[cell.id], cell) for cell in plan.cells]
            largest = max(fitting, default=0)
            if best is None or (largest > best[0] and best[0] < min(ENOUGH, most)):
                best = largest, _line("figures", simulated=False, batch_size=largest or 1, **options)
    assert best is not None
    if best[0]:
        return best[1]
    print(_too_large(*min(nearest, key=lambda one: one[0])))
    return None


def planned(line: Line, device: str, gpus: int) -> list[Plan]:
    """The plans of a line, whatever this machine has."""
    requests = make_requests(
        line.placed(device, gpus), machine_has_cuda=device == "cuda", source_folder=Path()
    )
    return [_planned(request) for request in requests]


def _planned(request: Request) -> Plan:
    return expand(request, study="gpu", created_at=utc_now(), earlier=(), limit=None, link_obstacle=None)


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

    def __init__(self, requests: Sequence[Request], options: StudyFile) -> None:
        self._of_all_lines = tuple(requests)
        super().__init__(options, study_file=None)

    def _requested(self, options: StudyFile, folder: Path) -> tuple[Request, ...]:
        return self._of_all_lines


def run_study(part: str, ranks: int, device: str, out: Path, gpus: int) -> list[str]:
    """Run the lines of a part on so many ranks, or what is left of them. Returns what is wrong."""
    study = Study(out / (f"{part}-{ranks}" if ranks > 1 else part))
    chosen = [line for line in lines(part, device) if line.ranks == ranks]
    requests: dict[Request, None] = {}
    asked: dict[str, Line] = {}
    for line in chosen:
        for plan in planned(line, device, gpus):
            fitting = {cell.id: line for cell in plan.cells if _fits(cell, plan)}
            for cell in plan.cells:
                if cell.id not in fitting:
                    print(_too_large(plan.predicted_bytes[cell.id], cell))
            asked |= fitting
            if fitting:
                requests[plan.request] = None
    if not requests:
        return []
    print(f"\n{part}: {len(requests)} settings on {ranks} ranks, in {study.root}", flush=True)
    options = msgspec.structs.replace(chosen[0].placed(device, gpus), out=str(study.root))
    try:
        code = _Together(list(requests), options).run(report=False)
    except BenchError as error:
        return [f"{part}: {error}"]
    return [*_ended(part, code, study), *_checked(part, study, asked), *_left_behind(study)]


def _ended(part: str, code: int, study: Study) -> list[str]:
    too_large = part == "figures" and any(one.outcome is Outcome.OUT_OF_MEMORY for one in study.results())
    return [] if code == 0 or (code == 1 and too_large) else [f"{part}: exit code {code}"]


def _checked(part: str, study: Study, asked: Mapping[str, Line]) -> list[str]:
    """Print the figures of each cell's newest run: earlier ones may be of a defect that is mended."""
    newest = {result.cell_id: result for result in study.results() if result.cell_id in asked}
    predicted = {cell: size for plan in study.plans() for cell, size in plan.predicted_bytes.items()}
    wrong = [] if newest else [f"{part}: no run"]
    for result in newest.values():
        print(told(result, predicted.get(result.cell_id)), flush=True)
        wrong += _wrong(asked[result.cell_id], result)
    return wrong


def told(result: RunResult, predicted: int | None) -> str:
    """A line of one run's figures."""
    if result.step_ns is None:
        return f"  {result.cell_id}: {result.outcome}"
    figures = [f"{result.step_ns.value / 1e6:.2f} ms a step", f"{result.samples_per_s:,.1f} samples/s"]
    if result.units_per_s is not None:
        figures.append(f"{result.units_per_s:,.0f} {result.unit}/s")
    if result.mfu is not None:
        figures.append(f"MFU {result.mfu:.1%}")
    if result.device_allocated_peak_bytes is not None:
        beside = "" if predicted is None else f" of {predicted / 2**30:.2f} predicted"
        figures.append(f"{result.device_allocated_peak_bytes / 2**30:.2f} GiB{beside}")
    aim = next((aim for name, aim in AIMS.items() if result.cell_id.startswith(name)), None)
    return f"  {result.cell_id}: {', '.join(figures)}{f' (aim {aim})' if aim else ''}"


def _wrong(line: Line, result: RunResult) -> list[str]:
    """A cell of `figures` may be too large for the device in spite of the prediction; all others are to be
    proven."""
    if result.outcome is Outcome.OUT_OF_MEMORY and line.part == "figures":
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
    found = []
    for path in sorted(study.root.glob("launches/*/rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["event"] == "stopped" and "memory" in event["reason"]:
                found.append(f"{path}: {event['reason']}")
    return found


def calls_of_a_link(device: str) -> list[str]:
    """Every call of a link and of an exchange: over NCCL at one rank, on CPU over Gloo at two."""
    script = Path(__file__).with_name("calls.py")
    return [] if _python(str(script), device) == 0 else ["calls of a link: see above"]


def against_bare_loops(device: str, out: Path) -> list[str]:
    """Steps inside the harness against those of a bare loop. What is there already is not measured again."""
    wrong = []
    asked = {line.options.workload: line.options for line in lines("figures", device)}
    for workload in scale(device).against_bare:
        path = out / "bare" / f"{workload}.json"
        options = asked.get(workload)
        if not path.exists() and options is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            settings = {name: getattr(options, name) for name in OF_A_STEP}
            given = {name: value for name, value in settings.items() if value is not None}
            given |= {"workload": workload, "device": device, "out": str(path)}
            script = Path(__file__).with_name("bare.py")
            if _python(str(script), json.dumps(given)):
                wrong.append(f"{workload} against a bare loop: see above")
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            print(f"  {workload}: a step takes {found['ratio']:.4f} times a bare loop's (aim {COST_AIM})")
    return wrong


def _python(*words: str) -> int:
    """Another Python, so that nothing of what it does stays on the device."""
    there = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(ROOT), *([there] if there else [])])
    return subprocess.run(
        [sys.executable, *words], check=False, env={**os.environ, "PYTHONPATH": paths}
    ).returncode


def run_part(part: str, device: str, out: Path, gpus: int) -> Iterator[str]:
    """Run a part, or what is left of it; what is wrong with it."""
    began = time.monotonic()
    for ranks in sorted({line.ranks for line in lines(part, device)}):
        yield from run_study(part, ranks, device, out, gpus)
    if part == "ranks":
        yield from calls_of_a_link(device)
    if part == "figures":
        yield from against_bare_loops(device, out)
    print(f"{part}: {time.monotonic() - began:.0f} s, of {LONGEST_S[part]} on a recent GPU", flush=True)


def accept(parts: Iterable[str], device: str | None, out: Path) -> list[str]:
    """Run these parts on `device` (None: the GPU, if there is one). Returns what is wrong."""
    gpus = len(visible_gpus())
    if device is None and not gpus:
        print(
            f"{', '.join(parts)}: skipped, as this machine has no GPU; DEVICE=cpu runs all with small models"
        )
        return []
    return [wrong for part in parts for wrong in run_part(part, device or "cuda", out, gpus)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if left out")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    wrong = accept(given.parts or PARTS, given.device, given.out)
    print("".join(f"\nwrong: {each}" for each in wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
