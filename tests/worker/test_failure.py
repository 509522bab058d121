"""From an exception to an outcome, by messages that torch and gloo really produce."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_builders import CPU
from torch import nn

from harness.worker.crew import STARTS_AFRESH
from harness.worker.exchange.group import open_exchange
from harness.worker.rank.failure import DivergedError, ProofFailedError, classify
from results.errors import SpecError, StoreError
from results.outcome import Outcome
from strategies import Trainer, TrainSettings

MIB = 2**20

# As torch 2.13 words them: the allocators of the device and of the host, and gloo.
CUDA_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
HOST_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory:"
    " you tried to allocate 400000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
PAIR = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537]"

BUFFER = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78]"
# As ProcessGroupNCCL.cpp words it.
WATCHDOG = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1,"
    " NumelOut=1, Timeout(ms)=960000) ran for 960012 milliseconds before timing out."
)

# As ProcessGroupNCCL.cpp words what NCCL says; the last line is NCCL's own last warning.
NCCL_CUDA = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with"
    " NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function"
    " failed.\nLast error:\n"
)


def _raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


DEVICE_MEMORY: list[Exception] = [
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    dist.DistBackendError(f"{NCCL_CUDA}Cuda failure 2 'out of memory'"),
    dist.DistBackendError(f"{NCCL_CUDA}Cuda failure 'out of memory'"),
    dist.DistBackendError(f"{NCCL_CUDA}Failed to CUDA calloc async 608 bytes"),
    dist.DistBackendError(f"{NCCL_CUDA}Failed to CUDA calloc 6291456 bytes"),
    dist.DistBackendError(f"{NCCL_CUDA}Failed to CUDA host alloc 4923392 bytes"),
]

HANGS = "a collective was not joined by all ranks in time: "
PEER = "another rank went away: "
DISK = "the disk is full: "
EXIT = "the program called sys.exit({}) before the run was over"
ERRORS: list[tuple[BaseException, Outcome, str]] = [
    # What comes before the type and the words of the error in the reason.
    (torch.OutOfMemoryError(CUDA_MEMORY), Outcome.OUT_OF_MEMORY, ""),
    (MemoryError(), Outcome.OUT_OF_MEMORY, ""),
    (RuntimeError("std::bad_alloc"), Outcome.OUT_OF_MEMORY, ""),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), Outcome.OUT_OF_MEMORY, ""),
    (RuntimeError(HOST_MEMORY), Outcome.OUT_OF_MEMORY, ""),
    *((error, Outcome.OUT_OF_MEMORY, "") for error in DEVICE_MEMORY),
    (
        RuntimeError(f"{PAIR} Read error [127.0.0.1]:53137: Connection reset by peer"),
        Outcome.CANCELLED,
        PEER,
    ),
    (RuntimeError(f"{PAIR} Connection closed by peer [127.0.0.1]:8721"), Outcome.CANCELLED, PEER),
    (dist.DistBackendError("NCCL error: remote process exited or there was a"), Outcome.CANCELLED, PEER),
    (RuntimeError(f"{PAIR} Application timeout caused pair closure"), Outcome.CANCELLED, PEER),
    (RuntimeError(f"{BUFFER} Timed out waiting 75000ms for recv operation to"), Outcome.HUNG, HANGS),
    # As ProcessGroupNCCL2 of torch 2.15 words it.
    (dist.DistBackendError("NCCL operation timed out"), Outcome.HUNG, HANGS),
    (dist.DistBackendError(f"[Rank 1] {WATCHDOG}"), Outcome.HUNG, HANGS),
    (OSError(errno.ENOSPC, "No space left on device", "rank-00000.jsonl"), Outcome.CANCELLED, DISK),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), Outcome.CANCELLED, DISK),
    (
        _raised_from(StoreError("cannot write log"), OSError(errno.ENOSPC, "No space left on device")),
        Outcome.CANCELLED,
        DISK,
    ),
    # From another rank only the words come.
    (StoreError("cannot write log: No space left on device; free some space"), Outcome.CANCELLED, DISK),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "data"), Outcome.CRASHED, ""),
    # What a device says of something else than memory.
    (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), Outcome.CRASHED, ""),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `f(h)`"), Outcome.CRASHED, ""),
    (dist.DistBackendError(f"{NCCL_CUDA}Cuda failure 1 'invalid argument'"), Outcome.CRASHED, ""),
    (ValueError("CUDA error: out of memory"), Outcome.CRASHED, ""),
    (ValueError("not a\n  shape"), Outcome.CRASHED, ""),
    (RuntimeError("mat1 and mat2 shapes"), Outcome.CRASHED, ""),
    (AssertionError(), Outcome.CRASHED, ""),
    # Words are not enough: a user's model may raise what it likes.
    (ValueError("not enough memory cells"), Outcome.CRASHED, ""),
    (ValueError("Timed out waiting 1ms for tea"), Outcome.CRASHED, ""),
    (KeyError("Broken pipe"), Outcome.CRASHED, ""),
]


@pytest.mark.parametrize(("error", "outcome", "before"), ERRORS)
def test_an_error_has_its_outcome_and_one_line_that_says_why(error, outcome, before) -> None:
    said = " ".join(str(error).split())
    assert classify(error) == (outcome, before + ": ".join(filter(None, (type(error).__name__, said))))


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (SystemExit(0), Outcome.CRASHED, EXIT.format(0)),
        (SystemExit(), Outcome.CRASHED, EXIT.format(None)),
        (SystemExit("no"), Outcome.CRASHED, EXIT.format("'no'")),
        (DivergedError(), Outcome.DIVERGED, "the loss is not a finite number (NaN or infinity)"),
        (ProofFailedError("gradient of w differs"), Outcome.PROOF_FAILED, "gradient of w differs"),
        (SpecError("use ddp, not dpp"), Outcome.SKIPPED, "use ddp, not dpp"),
    ],
)
def test_what_ends_a_run_by_design_says_why_without_a_type(error, outcome, reason) -> None:
    assert classify(error) == (outcome, reason)


def test_a_process_goes_on_after_a_run_that_diverged_and_after_no_other_failure() -> None:
    # All ranks know of that one; of any other, one may not, and wait for this rank.
    assert {outcome for _, outcome, _ in ERRORS} | {Outcome.PROOF_FAILED, Outcome.SKIPPED} == STARTS_AFRESH


def test_a_long_message_is_cut() -> None:
    _, line = classify(ValueError("x" * 10_000))
    assert line == f"ValueError: {'x' * 200} ... (9,600 characters left out) ... {'x' * 200}"


def exhaust_host_memory(rank: int, by_torch: bool) -> tuple[str, str, str]:
    """On a rank: an allocation of 1 GiB where the kernel gives at most 256 MiB more."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used_kib * 1024 + 256 * MIB, before[1]))
    try:
        torch.ones(256 * MIB) if by_torch else bytearray(1024 * MIB)
    except (RuntimeError, MemoryError) as error:
        return type(error).__name__, *classify(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return "nothing", "", ""


def test_what_the_allocator_really_says_is_out_of_memory(ranks) -> None:
    [(kind, outcome, reason)] = ranks(1, exhaust_host_memory, True)
    assert (kind, outcome) == ("RuntimeError", Outcome.OUT_OF_MEMORY)
    assert "you tried to allocate 1073741824 bytes" in reason
    # As a data loader may meet it, outside of torch.
    answer = ("MemoryError", Outcome.OUT_OF_MEMORY, "MemoryError")
    assert ranks(1, exhaust_host_memory, False) == [answer]


def lose_a_peer_at_a_barrier(rank: int) -> tuple[str, str]:
    """On a rank: rank 1 is killed while rank 0 waits for it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        return classify(error)
    return "nothing", ""


def lose_a_peer_in_backward(rank: int) -> tuple[str, str]:
    """On a rank: rank 1 is killed before the third step of data-parallel training."""
    settings = TrainSettings(strategy="ddp")
    trainer = Trainer(
        nn.Linear(2, 2), lambda y, t: (y - t).mean(), device=CPU, settings=settings, group=open_exchange()
    )
    batch = torch.ones(1, 2), torch.ones(1, 2)
    try:
        for step in range(4):
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step(iter([batch]))
    except RuntimeError as error:
        return classify(error)
    return "nothing", ""


@pytest.mark.parametrize("function", [lose_a_peer_at_a_barrier, lose_a_peer_in_backward])
def test_what_is_really_seen_of_a_killed_peer_is_cancelled(ranks, function) -> None:
    (outcome, reason), died = ranks(2, function, dying=(1,))
    assert died is None
    assert outcome == Outcome.CANCELLED
    assert reason.startswith("another rank went away: RuntimeError: ")


def wait_in_vain(rank: int, gone: Path) -> tuple[str, str]:
    """On a rank: rank 1 joins a sum when rank 0 has lost patience, and has made the file `gone`."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    end = time.monotonic() + 60
    while rank == 1 and not gone.exists() and time.monotonic() < end:
        time.sleep(0.05)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return classify(error)
    finally:
        gone.touch()
    return "nothing", ""


def test_a_collective_that_really_times_out_has_hung_and_the_late_rank_is_a_victim(ranks, tmp_path) -> None:
    # The group is broken afterwards: none of its ranks is used again.
    waited, late = ranks(2, wait_in_vain, tmp_path / "gone", dying=(0, 1))
    assert waited[0] == Outcome.HUNG
    assert "Timed out waiting 1000ms for" in waited[1]
    assert late[0] == Outcome.CANCELLED
