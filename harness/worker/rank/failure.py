"""Classify an exception as the outcome of this rank's run.

Every outcome but `crashed` needs an exception type or a text that is listed here.
"""

from __future__ import annotations

import errno
import os
import re

import torch

from results.errors import StoreError, UsageError
from results.files import FULL
from results.foreign_text import shortened
from results.outcome import Outcome

# Messages of RuntimeErrors. torch's allocator on CUDA raises OutOfMemoryError; contexts, libraries and
# communicators, which take device memory beside it, raise AcceleratorError, DistBackendError or a plain one.
_NO_MEMORY = re.compile(
    # The CPU allocator and C++.
    r"can't allocate memory|not enough memory|DefaultCPUAllocator|std::bad_alloc"
    # The runtime and the driver, by torch, and the driver by Triton.
    r"|CUDA (driver )?error: out of memory|Triton Error \[CUDA\]: out of memory"
    # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED, and so cuSOLVER, cuSPARSE, cuFFT and cuRAND.
    r"|\bCU[A-Z]+_(STATUS_)?ALLOC(ATION)?_FAILED\b"
    # NCCL's last error behind ncclUnhandledCudaError; older versions leave the number out.
    r"|Cuda failure (\d+ )?'out of memory'|Failed to CUDA (host )?[cm]?alloc\b",
    re.IGNORECASE,
)
# Messages of a rank whose peer went away; the peer's own record tells why.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Broken pipe|remote process exited|Socket closed|"
    r"Application timeout caused pair closure|ncclRemoteError",
    re.IGNORECASE,
)
# Messages of a rank that waited in a collective for longer than the group's time-out.
_NOBODY_CAME = re.compile(
    r"Timed out waiting \d+ ?ms for|Watchdog caught collective operation timeout|NCCL operation timed out",
    re.IGNORECASE,
)


class DivergedError(Exception):
    """The loss of a rank is not a finite number; raised on all ranks."""

    def __init__(self) -> None:
        super().__init__("the loss is not a finite number (NaN or infinity)")


class ProofFailedError(Exception):
    """The cell does not train as its reference does; raised on all ranks."""


_BY_TYPE: dict[type[Exception], Outcome] = {
    DivergedError: Outcome.DIVERGED,
    # A refusal, as of a plan, that only the model's code could decide.
    UsageError: Outcome.SKIPPED,
    ProofFailedError: Outcome.PROOF_FAILED,
}


def classify(error: BaseException) -> tuple[Outcome, str]:
    """Return the outcome of an error, and one line that says why."""
    if isinstance(error, SystemExit):
        return Outcome.CRASHED, f"the program called sys.exit({error.code!r}) before the run was over"
    said = " ".join(str(error).split())
    text = shortened(said)
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if _disk_is_full(error):
        # Not the cell's fault: the cell is run again when the disk has room.
        return Outcome.CANCELLED, f"the disk is full: {reason}"
    for kind, outcome in _BY_TYPE.items():
        if isinstance(error, kind):
            return outcome, text
    if out_of_memory(error):
        return Outcome.OUT_OF_MEMORY, reason
    if not isinstance(error, RuntimeError):
        return Outcome.CRASHED, reason
    if _NOBODY_CAME.search(said):
        return Outcome.HUNG, f"a collective was not joined by all ranks in time: {reason}"
    if _PEER_LOST.search(said):
        return Outcome.CANCELLED, f"another rank went away: {reason}"
    return Outcome.CRASHED, reason


def _disk_is_full(error: BaseException) -> bool:
    """Whether the error is the system's own, was raised from it, or repeats what another rank said of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    told = isinstance(error, StoreError) and any(os.strerror(number) in str(error) for number in FULL)
    return told or (cause is not None and cause.errno in FULL)


def out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    told = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return told or system or isinstance(error, torch.OutOfMemoryError | MemoryError)
