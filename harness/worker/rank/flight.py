"""The flight recorder: the last collectives that a rank has issued, as torch's backends keep them."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch

from results.cell import Backend
from results.files import replace

_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""Private names of torch (2.13 to 2.15): they may be missing. ProcessGroupNCCL records its own operations."""


def flight_recording(backend: Backend) -> bytes | None:
    """The backend's recording as JSON; None if this torch keeps none."""
    dump = getattr(torch._C._distributed_c10d, _DUMPS[backend], None)
    if dump is None:
        return None
    # With finished collectives and not active ones alone: how many there were is what ranks differ in.
    recording: bytes = dump(True, False)
    return recording


def write_recording(path: Path, backend: Backend) -> None:
    """Write the recording to `path`, over an older one. A failure is printed: the run goes on."""
    try:
        recording = flight_recording(backend)
        if recording is None:
            print(f"this torch has no flight recorder of {backend}", file=sys.stderr, flush=True)
            return
        replace(path, recording)
    except Exception:
        # It is called beside the run, which may still come to a good end.
        traceback.print_exc()
