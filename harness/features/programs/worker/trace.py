"""The last steps of a program under torch's profiler: where the time of a rank goes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.features.programs.records import Traced
from results import files
from results.derivation.intervals import Span, intersection, length

STEPS = 3
WARM_UP = 1
"""Steps under the profiler before those that count, because its start takes time."""
_MOST_BYTES = 2**31
"""The largest trace that is read."""
_EXCHANGE = ("nccl", "rccl", "gloo:", "mpi:", "ucc:")
"""Parts, in lower case, of the names of kernels that communicate, and on a CPU of operations of backends."""


def keep_trace(plain: Path, path: Path, *, on_gpu: bool) -> Traced:
    """Pack the Chrome trace `plain` into `path`, and return where the time of its steps went.

    Raises ValueError for a trace without steps or, on a GPU, without kernels.
    """
    if not plain.is_file():
        raise ValueError("the program ended before its traced steps, or could not be profiled")
    trace = json.loads(files.read(plain, most=_MOST_BYTES).data)
    found = traced(trace, on_gpu=on_gpu)
    # The profiler writes the path of its file, which names folders of this machine.
    trace.pop("traceName", None)
    files.write_once(path, gzip.compress(json.dumps(trace).encode(), compresslevel=6, mtime=0))
    plain.unlink()
    return found


def traced(trace: Mapping[str, Any], *, on_gpu: bool) -> Traced:
    """Divide the time of the steps in a Chrome trace of torch's profiler, by one rank.

    On a GPU, compute is the union of kernels that do not communicate. On a CPU, the operators of aten
    compute, and Python and compiled code count as idle. Exposed communication is the exchange during which
    nothing computes. Idle is the rest. Times are in ns of a step, as means. Raises ValueError for a trace
    without steps or, on a GPU, without kernels.
    """
    spans: dict[str, list[Span]] = {"step": [], "exchange": [], "compute": []}
    for event in trace["traceEvents"]:
        if (kind := _kind(event, on_gpu=on_gpu)) is not None:
            start = round(event["ts"] * 1e3)
            spans[kind].append((start, start + round(event["dur"] * 1e3)))
    if not spans["step"]:
        raise ValueError("the trace of the program has no steps")
    if on_gpu and not spans["compute"] + spans["exchange"]:
        raise ValueError("the profiler saw no kernel: another one, such as nsys, may have the device")
    steps = len(spans["step"])
    compute, exchange = (intersection(spans[kind], spans["step"]) for kind in ("compute", "exchange"))
    whole, busy, computes = length(spans["step"]), length([*compute, *exchange]), length(compute)
    return Traced(
        steps=steps,
        compute_ns=computes // steps,
        exposed_ns=(busy - computes) // steps,
        idle_ns=(whole - busy) // steps,
    )


def _kind(event: Mapping[str, Any], *, on_gpu: bool) -> str | None:
    """Return whether an event belongs to a step, to the exchange between ranks or to compute."""
    name, category = str(event.get("name")), event.get("cat")
    if event.get("ph") != "X":
        return None
    if name.startswith("ProfilerStep#") and category == "user_annotation":
        return "step"
    if category == "kernel" if on_gpu else category in ("cpu_op", "user_annotation"):
        if any(part in name.lower() for part in _EXCHANGE):
            return "exchange"
        return "compute" if on_gpu or name.startswith("aten::") else None
    return None
