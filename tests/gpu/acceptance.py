"""The acceptance on a machine with a GPU, by `bench matrix` from end to end: `make gpu`.

    python tests/gpu/acceptance.py smoke correct ranks figures [--device cpu] [--out FOLDER]

A part is a few lines. Each is a study in a folder of its own, so that the same command goes on where it was
stopped. `--device cpu` runs every line with small models and few steps. Where there is no GPU, and `--device`
does not ask for one, the parts are skipped with a sentence. It has not run on a GPU so far.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.device import visible_gpus
from harness.worker.exchange import open_exchange
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study
from strategies.collectives.link import Link

FEW = ("--budget", "0", "--warmup-steps", "2", "--block-steps", "2", "--quads", "1")
"""Steps of a line that is to be right, not fast."""
TINY = {
    "resnet18,resnet50": "resnet18-32px",
    "gpt2-small,llama-125m": "gpt-nano:seq=8,llama-nano:seq=8",
    "resnet50": "resnet18-32px",
    "gpt2-small": "gpt-nano:seq=8",
    "ddp,scratch-ddp": "scratch-ddp",
    "gpt2-small,gpt2-medium,gpt2-xl": "gpt-nano:seq=8",
    "llama-1b,llama-7b": "llama-nano:seq=8",
    "8": "2",
    "256": "2",
    "tf32": "fp32",
    "20s": "0",
}
"""What takes the place of a word on CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One study."""

    part: str
    name: str
    words: str
    ranks: int = 1

    def command(self, device: str, out: Path, gpus: int = 0) -> list[str]:
        """The call of `bench`. On CPU models are not compiled: that takes a minute a model. Ranks beyond the
        number of GPUs share them, over Gloo."""
        words = [*self.words.split(), *(() if self.part == "figures" else FEW)]
        few: Sequence[str] = ()
        if device == "cpu":
            words = [TINY.get(word, word) for word in words if word != "--compile"]
            few = () if self.part != "figures" else FEW[2:]
        call = [sys.executable, "-P", "-c", "from harness.cli import main; main()", "matrix"]
        places = (
            "--device",
            device,
            "--gpus",
            str(self.ranks),
            "--out",
            str(out / f"{self.part}-{self.name}"),
        )
        # Lines of several ranks name their strategies.
        alone = ("--strategy", "single") if self.ranks == 1 else ()
        crowded: Sequence[str] = ("--oversubscribe",) if device == "cpu" else ()
        if device == "cuda" and self.ranks > gpus:
            crowded = ("--oversubscribe", "--backend", "gloo")
        return [*call, *words, *alone, *few, *places, *crowded, "--repeats", "1", "--no-report"]


def _lines() -> Iterator[Line]:
    """All parts in their order; of two options each pair is in a line of `correct`."""
    images, tokens = "--workload resnet18,resnet50", "--workload gpt2-small,llama-125m"
    batch = "--batch-size 8"
    yield Line(part="smoke", name="all", words="--workload mlp,resnet18-32px,gpt-nano --batch-size 8")
    yield Line(part="correct", name="tf32", words=f"{images} {batch} --precision tf32 --compile")
    yield Line(part="correct", name="fp32", words=f"{tokens} {batch} --activation-checkpointing")
    yield Line(
        part="correct", name="bf16", words=f"{tokens} {batch} --precision bf16 --selective-checkpointing"
    )
    yield Line(part="correct", name="fp16", words=f"{tokens} {batch} --precision fp16 --compile")
    yield Line(part="correct", name="last", words=f"{images} {batch} --memory-format channels_last")
    strategies = "ddp,scratch-ddp,zero1,fsdp,zero2,scratch-fsdp,local-sgd:2,tp,pipeline:gpipe:microbatches=2"
    yield Line(
        part="ranks",
        name="strategies",
        words=f"--workload gpt2-small {batch} --strategy {strategies}",
        ranks=2,
    )
    lossy = "topk:0.1,powersgd:2,int8,signsgd,fp16,bf16,randomk:0.1"
    yield Line(
        part="ranks",
        name="compressors",
        words=f"--workload mlp {batch} --strategy ddp,scratch-ddp --compression {lossy}",
        ranks=2,
    )
    fast = "--precision bf16 --compile --budget 20s"
    yield Line(
        part="figures",
        name="resnet50",
        words=f"--workload resnet50 --batch-size 256 --memory-format channels_last {fast}",
    )
    yield Line(part="figures", name="gpt2", words=f"--workload gpt2-small,gpt2-medium,gpt2-xl {batch} {fast}")
    yield Line(
        part="figures",
        name="llama",
        words=f"--workload llama-1b,llama-7b {batch} --activation-checkpointing {fast}",
    )


LINES = tuple(_lines())
PARTS = tuple(dict.fromkeys(line.part for line in LINES))


def run_line(line: Line, device: str, out: Path, gpus: int) -> list[str]:
    """Run a line, or what is left of it, and print its figures. Returns what is wrong."""
    command = line.command(device, out, gpus)
    print(f"\n{line.part}: {' '.join(command[4:])}", flush=True)
    code = subprocess.run(command, check=False).returncode
    # Of each cell the newest run: earlier ones may be of a defect that is mended.
    newest = {result.cell_id: result for result in Study(out / f"{line.part}-{line.name}").results()}
    results = newest.values()
    too_large = line.part == "figures" and any(one.outcome is Outcome.OUT_OF_MEMORY for one in results)
    expected = code == 0 or (code == 1 and too_large)
    wrong = [] if expected else [f"{line.part} {line.name}: exit code {code}"]
    if not results:
        wrong.append(f"{line.part} {line.name}: no run")
    for result in results:
        print(_figures(result), flush=True)
        wrong += _wrong(line, result)
    return wrong


def _figures(result: RunResult) -> str:
    if result.step_ns is None:
        return f"  {result.cell_id}: {result.outcome}"
    figures = [f"{result.step_ns.value / 1e6:.2f} ms a step", f"{result.samples_per_s:,.1f} samples/s"]
    if result.units_per_s is not None:
        figures.append(f"{result.units_per_s:,.0f} {result.unit}/s")
    if result.mfu is not None:
        figures.append(f"MFU {result.mfu:.1%}")
    if result.device_allocated_peak_bytes is not None:
        figures.append(f"{result.device_allocated_peak_bytes / 2**30:.2f} GiB")
    return f"  {result.cell_id}: {', '.join(figures)}"


def _wrong(line: Line, result: RunResult) -> list[str]:
    """A cell of `figures` may be too large for the device; all others are to be proven."""
    if result.outcome is Outcome.OUT_OF_MEMORY and line.part == "figures":
        return []
    if result.outcome is not Outcome.OK:
        return [f"{result.cell_id}: {result.outcome}: {result.reason}"]
    if line.part != "figures" and (result.proof is None or result.proof.method != "serial-simulation"):
        return [f"{result.cell_id}: not proven: {result.proof and result.proof.detail}"]
    return []


def one_rank(device: str) -> list[str]:
    """Every call of a link over the backend of the device, at one rank. Returns what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        exchange = open_exchange(backend="nccl" if device == "cuda" else None)
        link, values = Link(exchange), torch.arange(6.0, device=device)
        found: dict[str, torch.Tensor] = {}
        for name in ("all_reduce", "largest"):
            getattr(link, name)(found.setdefault(name, values.clone()))
        link.reduce(found.setdefault("reduce", values.clone()), 0)
        link.broadcast(found.setdefault("broadcast", values.clone()), 0)
        found["all_gather"] = link.all_gather(values).view(-1)
        found["all_to_all"] = link.all_to_all(values.view(1, -1)).view(-1)
        found["reduce_scatter"] = link.reduce_scatter(values.view(1, -1))
        exchange.traffic.enabled = False
        link.all_reduce(found.setdefault("all_reduce, switched off", values.clone()))
        wrong = [f"{name} at one rank: {value}" for name, value in found.items() if not value.equal(values)]
        exchange.reset()
        dist.destroy_process_group()
    print(f"\nranks: {len(found)} calls of a link at one rank over {'NCCL' if device == 'cuda' else 'Gloo'}")
    return wrong


def accept(parts: Sequence[str], device: str | None, out: Path) -> list[str]:
    """Run these parts on `device` (None: the GPU, if there is one). Returns what is wrong."""
    gpus = len(visible_gpus())
    if device is None and not gpus:
        print(
            f"{', '.join(parts)}: skipped, as this machine has no GPU; DEVICE=cpu runs all with small models"
        )
        return []
    device = device or "cuda"
    wrong = []
    for line in LINES:
        if line.part not in parts:
            continue
        wrong += run_line(line, device, out, gpus)
    if "ranks" in parts:
        wrong += one_rank(device)
    return wrong


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
