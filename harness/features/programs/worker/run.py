"""One run of a program: start it on every rank, follow its steps, end it together, and record its figures."""

from __future__ import annotations

import math
import random
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

from harness.features.programs import file as programs
from harness.features.programs.file import Program, Programs
from harness.features.programs.records import PROGRAM_RUN, ProgramRun
from harness.features.programs.worker.child import GRACE_S, Child, LogLine
from harness.features.programs.worker.steps import Blocks
from harness.features.programs.worker.trace import STEPS, WARM_UP, keep_trace
from harness.worker.measure.telemetry import sampler
from harness.worker.rank.context import Run
from harness.worker.rank.failure import DivergedError, classify
from harness.worker.rank.usage import ForeignCpu
from results import files
from results.environment import Program as Built
from results.errors import MachineError, UsageError
from results.outcome import Outcome
from results.plan import read_values
from results.record import Memory, StepColumns, Training, Work
from results.spec import split

POLL_S = 0.25
"""Seconds between two looks at the steps, which the ranks take together."""
TRACE = "trace.json"
MARGIN_S = 0.5
"""The program has at least this time to see after which step it is to leave."""
SILENCES = 3
"""The first step may take this many times as long as a launch may be silent."""
_UNKNOWN = {
    "proof": "not proven: bench did not train it",
    "flops": "nobody counts the FLOPs of a foreign program",
    "parameters_hash": "bench did not train it, and has no access to its parameters",
    **dict.fromkeys(("quads", "recorded", "buckets", "link_peak"), "not recorded in a foreign program"),
}


class ProgramError(Exception):
    """The program of this rank did not do what a figure needs."""


def run_program(run: Run, values: Mapping[str, Any]) -> None:
    """Run the program of the cell until its step time is precise enough, and record it; collective."""
    around = run.around
    program = read_values(values, Programs).programs[run.cell.workload]
    on_gpu = around.device.type == "cuda"
    run.absent |= _UNKNOWN
    run.begin("start")
    with ExitStack() as stack:
        follow = _Follow(run, program, stack.enter_context(_started(run, program)), on_gpu=on_gpu)
        follow.until(lambda: bool(follow.times[0]))
        run.begin("steps")
        foreign = ForeignCpu(around.cores) if around.rank.local_rank == 0 else None
        with sampler(around.device, around.rank) if on_gpu else nullcontext() as sampling:
            follow.until(lambda: follow.blocks.stop is not None)
        if foreign is not None:
            run.found["foreign_cpu_cores"] = foreign.cores_used()
        run.begin("end")
        follow.end()
    if sampling is None:
        run.absent["telemetry"] = "samples of a CPU rank would describe the process of bench"
    else:
        run.found["telemetry"] = sampling.telemetry()
        run.absent |= sampling.absent
    follow.record()


def _started(run: Run, program: Program) -> Child:
    around, cell, file = run.around, run.cell, program.file
    folder, rank = Path(program.folder), around.rank.rank
    port = around.control.from_first(float(_free_port() if rank == 0 else 0))
    own = _own_folder(run)
    own.mkdir(exist_ok=True)
    # A program takes the GPUs that it sees.
    hidden_gpus = {} if around.device.type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    control = {
        "script": None if file.script is None else str(folder / file.script),
        "module": file.module,
        "arguments": programs.words(file, _strategy(run), cell),
        "steps": "none" if file.steps == "log" else file.steps,
        "trace": {"path": str(own / TRACE), "warmup": WARM_UP, "steps": STEPS} if _traces(run) else None,
    }
    return Child(
        programs.interpreter(file, folder),
        control,
        folder=own,
        cwd=folder,
        environment={**hidden_gpus, **file.environment, "MASTER_PORT": f"{port:.0f}"},
        pattern=file.pattern,
    )


def _own_folder(run: Run) -> Path:
    """The folder of this rank's program, which works in another folder: its path is absolute."""
    folder = run.around.study.run_folder(run.cell.id, run.slot.run_id).resolve()
    return folder / f"program-{run.around.rank.rank:05d}"


def _traces(run: Run) -> bool:
    return run.around.rank.rank in run.around.launch.trace


def _strategy(run: Run) -> str:
    return str(split(run.cell.strategy)[1])


def _free_port() -> int:
    """A port at which nobody on this host listens now, below those that the kernel gives to connections."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as found, suppress(OSError):
            found.bind(("", port))
            return port
    raise MachineError("no port from 20000 to 29999 is free on this host: end the programs that listen there")


def times_of(lines: Sequence[LogLine]) -> list[int]:
    """The times of steps from lines of every few steps, as equal shares of the time between two lines."""
    times: list[int] = []
    for before, after in pairwise(rising(lines)):
        steps = after.step - before.step
        times += [(after.at_ns - before.at_ns) // steps] * steps
    return times


def rising(lines: Sequence[LogLine]) -> list[LogLine]:
    """The first line of each step."""
    most = accumulate((line.step for line in lines), max, initial=-1)
    return [line for line, before in zip(lines, most, strict=False) if line.step > before]


def losses_of(lines: Sequence[LogLine]) -> list[float | None]:
    """The losses of steps from lines of every few steps, without the first step that was seen."""
    losses = [line.loss for line in lines[:1] for _ in range(1, line.seen)]
    for earlier, line in pairwise(rising(lines)):
        losses += [line.loss] * (line.step - earlier.step)
    return losses


class _Follow:
    """The steps of a program on all ranks, from looks that the ranks take together."""

    def __init__(self, run: Run, program: Program, child: Child, *, on_gpu: bool) -> None:
        self._run, self._file, self._child, self._on_gpu = run, program.file, child, on_gpu
        self._control, self._gpus = run.around.control, run.around.rank.gpus
        self.times: list[list[int]] = [[] for _ in range(self._gpus)]
        """The times of the steps that all ranks have taken, by rank, without the first step."""
        self.blocks = Blocks(run.cell.steps, on_gpu=on_gpu)
        self._by_log = self._file.steps == "log"
        self._logs: list[list[LogLine]] = [[] for _ in range(self._gpus)]
        """The matching lines of each rank's output."""
        self._progress = (0, 0)
        """The steps, and before the first one the bytes of output, at the last look."""

    def until(self, done: Callable[[], bool]) -> None:
        """Look at the steps until `done`, or until the program has ended with enough blocks; collective.

        Raises ProgramError if the program fails, ends before, or takes no step for too long.
        """
        limit_ns = self._child.started_ns + int(SILENCES * self._run.around.launch.silence_s * 1e9)
        while not done():
            time.sleep(POLL_S)
            running = self._look()
            for before, after in pairwise(rising(self._lines)[:2] if self._by_log else ()):
                self.blocks.keep_together(after.step - before.step)
            self.blocks.extend(self.times)
            if not running and not done():
                if self.blocks.enough:
                    return
                raise ProgramError(self._ended_early)
            if not self.times[0] and self._control.largest([time.perf_counter_ns() > limit_ns])[0]:
                raise ProgramError(
                    f"no two steps ended in {(limit_ns - self._child.started_ns) / 1e9:.0f} s: {self._advice}"
                )

    @property
    def _lines(self) -> list[LogLine]:
        """The matching lines of the first rank that prints some."""
        return next((lines for lines in self._logs if lines), [])

    @property
    def _own(self) -> list[int]:
        """Times of this rank's steps after the first one, by the device's clock where it has one."""
        child = self._child
        if self._by_log:
            return times_of(self._lines)
        if child.begin.get("cuda"):
            return child.device_ns[1:]
        return [after - before for before, after in pairwise(child.columns["end_ns"])]

    def _look(self) -> bool:
        """Read the new steps of all ranks; collective. Return whether all programs still run.

        Raises ProgramError, UsageError or MemoryError on all ranks if a program failed.
        """
        child = self._child
        running = child.process.poll() is None
        child.read()
        self._share_lines()
        own = self._own
        # Before the first steps, words are progress too.
        progress = (len(own), 0 if self.times[0] else child.printed)
        if progress != self._progress:
            self._run.around.log.heartbeat()
        self._progress = progress
        failed = child.refused is not None or (not running and child.broken)
        counts, alive, bad = zip(*self._control.of_all([len(own), running, failed]), strict=True)
        new = self._control.of_all(own[len(self.times[0]) : int(min(counts))])
        for row, values in zip(self.times, new, strict=True):
            row += map(int, values)
        if any(bad):
            self._fail()
        return all(alive)

    def _share_lines(self) -> None:
        """Add the new matching lines of all ranks; collective."""
        if self._file.pattern is not None:
            every: list[list[LogLine]] = [[]] * self._gpus
            dist.all_gather_object(every, self._child.new_lines())
            for lines, new in zip(self._logs, every, strict=True):
                lines += new

    def _fail(self) -> None:
        """Raise why this rank's program failed, or that another rank's did; collective."""
        child = self._child
        with suppress(subprocess.TimeoutExpired):
            # The rank that fails first may be the last to end, and others fail as it goes away.
            child.process.wait(GRACE_S)
        child.read()
        refused = self._control.union([] if child.refused is None else [child.refused])
        if refused:
            raise UsageError(refused[0])
        why = child.failure
        ports = re.findall(r"\d+", why) if "EADDRINUSE" in why else ()
        if self._control.largest([child.port in ports])[0]:
            # A cancelled run is made again, at another port.
            raise RuntimeError(f"remote process exited: the port of the program's ranks was taken ({why})")
        outcome = classify(RuntimeError(why))[0] if child.broken else Outcome.CANCELLED
        others = self._control.largest([outcome is not Outcome.CANCELLED])[0]
        if outcome is Outcome.OUT_OF_MEMORY or "MemoryError" in why:
            raise MemoryError(why)
        if outcome is Outcome.CANCELLED and others:
            raise RuntimeError(f"remote process exited: the program of another rank failed ({why})")
        raise ProgramError(why)

    @property
    def _ended_early(self) -> str:
        steps, policy = len(self.times[0]) + 1, self.blocks.policy
        if steps == 1:
            return f"the program ended before its second step: {self._advice}; {self._child.failure}"
        return (
            f"the program ended after {steps} steps, before its warm-up and {policy.min_blocks} blocks of "
            f"{self.blocks.steps} steps were over: have it take more steps; {self._child.failure}"
        )

    @property
    def _advice(self) -> str:
        """The steps that were seen, and how to have more of them seen."""
        if self._by_log:
            return (
                "no two lines of its output match the pattern of `log`: correct it, or count steps otherwise"
            )
        noted = "".join(f"; {note}" for note in self._child.notes)
        seen = len(self._child.columns["end_ns"])
        instead = "call bench_step() at the end of each step, or give a pattern by `log`"
        return f"{seen} steps were seen{noted}; {instead}"

    def end(self) -> None:
        """Have all programs leave after the same step, and require that they counted alike; collective."""
        child = self._child
        if self._by_log:
            child.end_now()
            return
        taken = self._control.largest([len(child.columns["end_ns"])])[0]
        typical_s = median(self.times[0][-20:]) / 1e9
        # A step is collective, so that all ranks take those which some of them trace.
        traced = any(rank < self._gpus for rank in self._run.around.launch.trace)
        further = 1 + math.ceil(MARGIN_S / typical_s) + (WARM_UP + STEPS) * traced
        child.stop_after(int(taken) + further)
        self._run.around.log.heartbeat()
        # The profiler writes its file before the program leaves.
        limit_s = (4 if traced else 1) * GRACE_S + (3 + further) * typical_s
        left = child.leave(limit_s, meanwhile=self._run.around.log.heartbeat)
        child.read()
        final = self._control.of_all([len(child.columns["end_ns"]), left])
        counts = {int(steps) for steps, _ in final}
        if len(counts) > 1 and all(well for _, well in final):
            raise ProgramError(
                f"the ranks stepped unequally often ({', '.join(map(str, sorted(counts)))} times), so that "
                f"their steps cannot be compared: count them by bench_step()"
            )

    def _other_count(self) -> str | None:
        """Say that the program counts other steps than were seen; None if it agrees, or counts none."""
        lines = self._logs[self._run.around.rank.rank]
        pattern = self._file.pattern
        if self._by_log or len(lines) < 2 or pattern is None or "step" not in pattern.groupindex:
            return None
        first, last = lines[0], lines[-1]
        seen = sum(first.at_ns < end <= last.at_ns for end in self._child.columns["end_ns"])
        counted = last.step - first.step
        if abs(seen - counted) <= max(2, 0.05 * counted):
            return None
        return (
            f"the program counts {counted} steps where {seen} were seen, and has no figure: call "
            f"bench_step() at the end of each step"
        )

    def _losses(self) -> list[float | None]:
        """Return the loss of each step.

        A line of the output has the mean since the line before; the steps after the last line get its loss.
        """
        last = self.blocks.last
        own: list[float | None] = self._child.columns["loss"][1:][:last]
        if not any(loss is not None for loss in own):
            own = losses_of(self._lines)
        losses = (own + own[-1:] * last + [None] * last)[:last]
        if self._control.largest([any(loss is not None and not math.isfinite(loss) for loss in losses)])[0]:
            raise DivergedError
        return losses

    def record(self) -> None:
        """Add the figures of the run to its record; collective."""
        run, child, blocks = self._run, self._child, self.blocks
        if other := self._control.union(filter(None, [self._other_count()])):
            raise ProgramError(other[0])
        begin, last, size = blocks.warmup, blocks.last, blocks.steps
        losses = self._losses()
        steps = self.times[run.around.rank.rank][begin:last]
        run.found |= {
            "clock": "cuda-event" if child.begin.get("cuda") and not self._by_log else "monotonic",
            "steps": StepColumns(step_ns=steps, loss=losses[begin:]),
            "blocks_ns": [sum(steps[at : at + size]) for at in range(0, len(steps), size)],
            "block_steps": size,
            "stop": blocks.stop or "blocks",
            "warmup_loss": losses[:begin],
            "warmup_steady": blocks.steady,
            "training": Training(),
            "work": self._work(),
        }
        if ends := child.columns["end_ns"]:
            run.found["first_step_ns"] = ends[0] - child.started_ns
        self._record_interpreter()
        self._record_memory()
        self._keep()

    def _work(self) -> Work:
        """The work of a replica in a step. Raises ProgramError if the program says other samples."""
        samples, units = programs.work(self._file, _strategy(self._run), self._run.cell)
        said = {number for number in self._child.columns["samples"] if number not in (None, samples)}
        if said:
            told = ", ".join(map(str, sorted(said)))
            raise ProgramError(
                f"bench_step says {told} samples, and a replica is to take {samples} a step: give it the "
                f"samples of one replica, and keep the batch while the program runs"
            )
        return Work(
            samples=samples,
            units=samples * units,
            unit=self._file.unit,
            parameters=None,
            flops=None,
            exchange_payload_bytes=None,
            exchange_operations=None,
        )

    def _record_interpreter(self) -> None:
        """Describe what runs the program. Raises ProgramError if that is not the device of the cell."""
        begin, run = self._child.begin, self._run
        # What bench's own torch and NCCL would do says nothing of the program.
        run.surroundings |= {
            "cuda": begin.get("cuda_version"),
            "nccl": None,
            "process_group": "",
            "attention": (),
        }
        if begin:
            versions = {"Python": begin["python"], "torch": begin["torch"], "packages": begin["packages"]}
            run.program = Built(names_hash="", tensors={}, modules={}, distributions=versions)
            run.surroundings["threads"] = begin["threads"]
        if begin and not self._by_log and begin["cuda"] is not self._on_gpu:
            used = "a GPU" if begin["cuda"] else "no GPU"
            raise ProgramError(f"the program used {used}, and its cell is of --device {run.cell.device}")

    def _record_memory(self) -> None:
        end, begin = self._child.end, self._child.begin
        if not end:
            self._run.absent["memory"] = "bench ended the program before its peak of memory was written"
            return
        self._run.found["memory"] = Memory(
            rss_peak_bytes=end["peak_rss_bytes"],
            rss_idle_bytes=min(end["peak_rss_bytes"], begin["rss_bytes"]),
            device_allocated_peak_bytes=end["peak_device_bytes"],
            device_reserved_peak_bytes=None,
            device_idle_bytes=None,
        )

    def _keep(self) -> None:
        """Write the feature's own file of this rank: how long it waited, and what the shim noted."""
        child, around, size = self._child, self._run.around, self.blocks.steps
        traced = None
        if _traces(self._run) and self._by_log:
            self._run.absent["trace"] = "lines of an output do not end the steps that a profiler keeps"
        elif _traces(self._run):
            path = around.study.trace_path(self._run.cell.id, self._run.slot.run_id, around.rank.rank)
            try:
                traced = keep_trace(_own_folder(self._run) / TRACE, path, on_gpu=self._on_gpu)
            except Exception as error:
                # A full disk, say. A trace is an extra: the run is good without.
                self._run.absent["trace"] = f"{type(error).__name__}: {error}"
        waits = child.columns["wait_ns"][1:][self.blocks.warmup : self.blocks.last]
        by, why = child.waits.get("by"), None
        if not waits or None in waits:
            by, why = None, child.waits.get("note") or "waits are not taken with `steps: log`"
        means = (int(fmean(waits[at : at + size])) for at in range(0, len(waits), size))
        kept = ProgramRun(
            rank=around.rank.rank,
            waits_ns=None if why else list(means),
            waits_by=by,
            why_no_waits=why,
            notes=child.notes,
            steps_seen=len(child.columns["end_ns"]),
            traced=traced,
        )
        files.write_once(_own_folder(self._run).with_suffix(".json"), PROGRAM_RUN.encode(kept))
