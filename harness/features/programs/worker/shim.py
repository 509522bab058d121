"""`INTERPRETER shim.py CONTROL.json` runs a program and writes its steps (Python 3.9, torch 2.4)."""

from __future__ import annotations

import atexit
import builtins
import functools
import itertools
import json
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import profile, schedule

cuda: Any = torch.cuda
COLLECTIVES = ("all_", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")
"""How the names of functions of torch.distributed begin that communicate."""
LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed"}
SHELL = {"sh", "bash", "-c", "exec", "env"}
"""Words that may precede a command which a shell runs."""
UNEVEN = (
    *("deepspeed.runtime.zero", "deepspeed.runtime.fp16", "deepspeed.runtime.bf16_optimizer"),
    "megatron.core.optimizer",
)
"""Modules that step an optimizer once for each group of parameters, or leave steps out."""
OTHERWISE = "set `steps: bench_step` and call bench_step() at the end of each step, or set `steps: log`"
ALONE = "bench starts each rank itself: name the script that one rank runs, without its launcher"


def stamp() -> Any:
    """Now: an event on the current stream if the program uses CUDA, else the host's time in ns."""
    if not cuda.is_initialized():
        return time.perf_counter_ns()
    return cuda.current_stream().record_event(cuda.Event(enable_timing=True))


def between_ns(start: Any, end: Any) -> int | None:
    """The time between two stamps, unknown where the program began to use CUDA between them."""
    if isinstance(end, int):
        return end - int(start)
    end.synchronize()
    return int(start.elapsed_time(end) * 1e6) if isinstance(start, cuda.Event) else None


def total_ns(spans: list[tuple[Any, Any]]) -> int:
    """The time of spans together; one that is unknown counts as none."""
    return sum(between_ns(*span) or 0 for span in spans)


def hidden() -> bool:
    """Whether this code is compiled or captured: it runs again without Python."""
    return torch.compiler.is_compiling() or (cuda.is_initialized() and cuda.is_current_stream_capturing())


class Waits:
    """The time inside of collectives, as spans between two stamps. The object is the context of a span."""

    def __init__(self) -> None:
        self.note: str | None = "no collective of torch.distributed was seen"
        self.spans: list[tuple[Any, Any]] = []
        self._start: Any = None

    def __enter__(self) -> None:
        self._start, self.note = stamp(), None

    def __exit__(self, *_: object) -> None:
        self.spans.append((self._start, stamp()))
        self._start = None

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls are spans, unless they are inside of one."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if hidden() or self._start is not None:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return call

    def timed_end(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """`backward`, whose span begins with its last gradient: DDP and FSDP wait after that."""

        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = tensors if isinstance(tensors, torch.Tensor) else list(tensors)
            root = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
            if hidden() or not dist.is_initialized() or root.grad_fn is None:
                return backward(tensors, *args, **kwargs)
            with ExitStack() as stack:
                # The engine runs these after all gradients, in order; DDP queues its own later.
                queue = torch.autograd.Variable._execution_engine.queue_callback
                begin = functools.partial(stack.enter_context, self)
                hook = root.register_hook(lambda _: None if hidden() else queue(begin))
                stack.callback(hook.remove)
                return backward(tensors, *args, **kwargs)

        return call

    def watch(self) -> None:
        """Time the collectives of torch.distributed, the waits for asynchronous ones, and backward's end."""
        from torch.distributed import _functional_collectives as compiled
        from torch.distributed import distributed_c10d as c10d

        places: list[tuple[Any, str]] = [(c10d.Work, "wait"), (compiled, "wait_tensor")]
        # DDP broadcasts its buffers by this one.
        places.append((dist, "_broadcast_coalesced"))
        for module in (dist, c10d):
            functions = [name for name, value in vars(module).items() if type(value) is FunctionType]
            places += [(module, name) for name in functions if name.startswith(COLLECTIVES)]
        for owner, name in places:
            setattr(owner, name, self.timed(getattr(owner, name)))
        torch.autograd.backward = self.timed_end(torch.autograd.backward)


class Steps:
    """The ends of the program's steps, and what is written about them."""

    def __init__(self, control: Mapping[str, Any], waits: Waits) -> None:
        self.exit, self.error, self.ended = "returned", "", 0
        self._control, self._waits = control, waits
        self._pid, self._rss_bytes, self._packages = os.getpid(), memory_bytes("VmRSS"), packages_hash()
        self._lock = threading.Lock()
        self._owner: object = None
        """The optimizer that ends the steps, or this object once `bench_step` ends them."""
        self._met: dict[int, Optimizer] = {}
        self._rows: list[tuple[Any, ...]] = []
        self._written = 0
        self._last: int | None = None
        self._event: Any = None
        self._profiler: profile | None = None
        self._peaks: dict[str, int | None] | None = None
        """The peaks of memory before the profiler, which takes some itself."""
        self._look()
        self._begin()

    def tell(self, **line: object) -> None:
        """Append a line to the output. Processes that the program forks write none."""
        if os.getpid() == self._pid:
            with Path(self._control["out"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def refuse(self, sentence: str, *_: object, **__: object) -> None:
        """End the program, which bench cannot measure like this."""
        self.tell(refused=sentence)
        raise SystemExit(3)

    def bench_step(self, loss: Any = None, samples: int | None = None) -> None:
        """End a step; from the first call on, nothing else does. `loss` is a number or a tensor of one."""
        if self._control["steps"] != "none":
            self._owner = self
            if isinstance(loss, torch.Tensor):
                # The thread that writes waits for the device, and the program does not.
                loss = loss.detach().clone().reshape(())
            self._end(loss if loss is None or isinstance(loss, torch.Tensor) else float(loss), samples)

    def stepped(self, optimizer: Optimizer, *_: object) -> None:
        """An optimizer has stepped, torch says."""
        if optimizer is self._owner:
            self._end()
        elif id(optimizer) not in self._met:
            self._meet(optimizer)

    def leave(self) -> None:
        """Write what is not written yet, as the interpreter ends."""
        # A device that has failed says so again.
        with suppress(RuntimeError):
            if cuda.is_initialized():
                cuda.synchronize()
            self._flush()
        peaks = self._peaks or memory_peaks()
        self.tell(end={"steps": self.ended, **peaks, "exit": self.exit, "error": self.error})
        if self.exit == "stop" and os.getpid() == self._pid:
            # Process groups that the program has not destroyed may abort the process as C++ ends.
            sys.stdout.flush()
            os._exit(0)

    def _meet(self, optimizer: Optimizer) -> None:
        """An optimizer steps for the first time. The first one counts, or the one whose step contains its."""
        self._met[id(optimizer)] = outer = optimizer
        for frame, _ in traceback.walk_stack(None):
            module = str(frame.f_globals.get("__name__"))
            if module.startswith(UNEVEN):
                self.refuse(f"{module} does not step an optimizer once in each update: {OTHERWISE}")
            holder = frame.f_locals.get("self")
            if isinstance(holder, Optimizer) and hasattr(type(holder).step, "hooked"):
                outer = holder
        if self._owner is None:
            self._owner = outer
            if outer is optimizer:
                self._end()
        elif isinstance(self._owner, Optimizer) and outer is not self._owner:
            name = type(outer).__name__
            self.tell(notes=[f"a further optimizer steps ({name}), and its steps are not counted"])

    def _end(self, loss: Any = None, samples: int | None = None) -> None:
        now_ns = time.perf_counter_ns()
        if hidden():
            self.refuse(f"the program captures its optimizer's step in a CUDA graph: {OTHERWISE}")
        if self.exit != "stop":
            event = stamp() if cuda.is_initialized() else None
            self._rows.append((now_ns, event, self._waits.spans, loss, samples))
            self._waits.spans = []
            self.ended += 1
            if self.ended == 1:
                # A thread writes, so that no step contains the time of writing.
                threading.Thread(target=self._keep_writing, daemon=True).start()
        if self._last is not None:
            left = self._last + 1 - self.ended
            if control := self._control.get("trace"):
                self._trace(left, **control)
            if left <= 0:
                self.exit = "stop"
                raise SystemExit(0)

    def _trace(self, left: int, path: str, warmup: int, steps: int) -> None:
        """Have torch's profiler keep the last `steps` steps, of which `left` and this step's end remain."""
        if left <= warmup + steps and cuda.is_initialized():
            # The kernels of a step are to end within it.
            cuda.synchronize()
        try:
            if left == warmup + steps:
                self._peaks = memory_peaks()
                kept = schedule(wait=0, warmup=warmup, active=steps, repeat=1)
                own = profile(schedule=kept, on_trace_ready=lambda own: own.export_chrome_trace(path))
                own.start()
                self._profiler = own
            elif self._profiler is not None:
                self._profiler.step()
        except RuntimeError as error:
            self._profiler = None
            self.tell(
                notes=[f"no trace: the program profiles itself, or the trace was not written ({error})"]
            )

    def raised(self, error: BaseException) -> None:
        """Keep what has ended the program, unless bench did."""
        if self.exit != "stop" and (not isinstance(error, SystemExit) or error.code):
            self.exit = "raised"
            self.error = traceback.format_exception_only(type(error), error)[-1].split("\n")[0]

    def _keep_writing(self) -> None:
        """Write the steps, and see whether the worker has named the last one."""
        while os.getpid() == self._pid:
            time.sleep(self._control["flush_s"])
            self._look()
            # A device that has failed says so in the program, too.
            with suppress(RuntimeError):
                self._flush()

    def _look(self) -> None:
        with suppress(FileNotFoundError):
            self._last = int(Path(self._control["stop"]).read_text(encoding="ascii"))

    def _flush(self) -> None:
        """Write the steps that the device has passed."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        rows = list(itertools.takewhile(lambda row: row[1] is None or row[1].query(), self._rows))
        if not rows:
            return
        if not self._written:
            self._begin()
        del self._rows[: len(rows)]
        # Python 3.9 has no `strict`.
        ends, events, spans, losses, samples = map(list, zip(*rows))  # noqa: B905
        waits = [None if self._waits.note else total_ns(step) for step in spans]
        losses = [loss if loss is None else float(loss) for loss in losses]
        steps = {"first": self._written, "end_ns": ends, "wait_ns": waits, "loss": losses, "samples": samples}
        if events[-1] is not None:
            steps["device_ns"] = list(map(between_ns, [self._event, *events], events))
        self.tell(waits={"by": "collectives", "note": self._waits.note}, steps=steps)
        self._written, self._event = self._written + len(rows), events[-1]

    def _begin(self) -> None:
        """Describe the process: at its start, and with its first step, when a program has started CUDA."""
        device = cuda.get_device_name() if cuda.is_initialized() else None
        memory = {"threads": torch.get_num_threads(), "rss_bytes": self._rss_bytes, "pid": self._pid}
        versions = {"python": sys.version.split()[0], "torch": torch.__version__, "packages": self._packages}
        self.tell(
            begin={
                **versions,
                **memory,
                "cuda": device is not None,
                "device": device,
                "cuda_version": torch.version.cuda,
            }
        )


def watch_starts(steps: Steps) -> None:
    """Refuse a program that starts ranks: by a launcher, or with other variables of the group."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
            return
        named = LAUNCHERS & set(starts_of(args[0 if event == "os.system" else 1]))
        given = {**os.environ, **(args[3] or {})} if event == "subprocess.Popen" else os.environ
        if named or any(given.get(name) != os.environ.get(name) for name in ("LOCAL_RANK", "MASTER_PORT")):
            steps.refuse(f"the program starts ranks by {' '.join(named) or 'subprocesses'}; {ALONE}")

    sys.addaudithook(audit)
    started: Any = torch.multiprocessing
    refuse = functools.partial(steps.refuse, f"the program starts ranks by torch.multiprocessing; {ALONE}")
    started.spawn = started.start_processes = refuse


def memory_bytes(name: str) -> int:
    """A field of this process's memory, as the kernel counts it: VmRSS or VmHWM, the peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def memory_peaks() -> dict[str, int | None]:
    """The peaks of the process and, where it uses one, of its device so far."""
    device = None
    # A device that has failed says so again.
    with suppress(RuntimeError):
        device = cuda.max_memory_allocated() if cuda.is_initialized() else None
    return {"peak_rss_bytes": memory_bytes("VmHWM"), "peak_device_bytes": device}


def packages_hash() -> str:
    """12 hex digits over the names and versions of the packages that are installed."""
    found = sorted(f"{one.metadata['Name']} {one.version}" for one in distributions())
    return sha256("\n".join(found).encode()).hexdigest()[:12]


def starts_of(command: Any) -> list[str]:
    """The names that a command (a text or a list) starts: two words, and the module of `python -m`."""
    line = command if isinstance(command, (str, bytes)) else b" ".join(map(os.fsencode, command))
    words = [word.rpartition("/")[2] for word in os.fsdecode(line).split()]
    words = [word for word in words if word not in SHELL]
    module = words.index("-m") + 1 if "-m" in words else 0
    return words[:2] + words[module : module + 1]


def watch_optimizers(steps: Steps) -> None:
    """Count the steps of optimizers, and those that scalers leave out."""
    # Compiled code calls the hook after its own part of the step: dynamo does not look into it.
    register_optimizer_step_post_hook(torch.compiler.disable(steps.stepped))  # type: ignore[no-untyped-call]
    scalers: Any = torch.amp.GradScaler
    step = scalers.step

    def scaled(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before, result = steps.ended, step(scaler, optimizer, *args, **kwargs)
        if steps.ended == before:
            steps.stepped(optimizer)
        return result

    scalers.step = scaled


def main(path: str) -> None:
    """Run the program of the file at `path`. Its exit code is the program's own."""
    control = json.loads(Path(path).read_text(encoding="utf-8"))
    script, module = control["script"], control["module"]
    sys.argv = [script or module, *control["arguments"]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent if script else Path.cwd())
    waits = Waits()
    if dist.is_available():
        waits.watch()
    steps = Steps(control, waits)
    builtins.bench_step = steps.bench_step  # type: ignore[attr-defined]
    watch_starts(steps)
    if control["steps"] == "optimizer":
        watch_optimizers(steps)
    atexit.register(steps.leave)
    start = functools.partial(runpy.run_path, script)
    if script is None:
        start = functools.partial(runpy.run_module, module, alter_sys=True)
    try:
        start(run_name="__main__")
    except BaseException as error:
        steps.raised(error)
        raise


if __name__ == "__main__":
    # The program becomes `__main__`, and dynamo finds the globals of functions by the name of their module.
    sys.modules["bench_shim"] = sys.modules[__name__]
    __name__ = "bench_shim"
    main(sys.argv[1])
