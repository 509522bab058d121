"""What the network reaches when nothing else runs: a few plain all-reduces over all ranks of the launch."""

from __future__ import annotations

import time

import torch

from harness.worker.control import Control
from results.recorded import LinkPeak

LARGEST_BYTES = 16 * 2**20
LONGEST_S = 1.0
TIMED = 3


def peak_payload_bytes(ranks: int, link_mbit_per_s: float | None) -> int:
    """16 MiB, or the largest power of two that a shaped link carries in about a second.

    Each rank sends 2 (p - 1) / p of the payload (Patarasuk & Yuan 2009, Bandwidth optimal all-reduce
    algorithms for clusters of workstations, section 3), and one rank of a virtual node sends over its link.
    """
    if link_mbit_per_s is None:
        return LARGEST_BYTES
    in_time = link_mbit_per_s * 1e6 / 8 * LONGEST_S * ranks / (2 * (ranks - 1))
    return min(LARGEST_BYTES, 1 << (int(in_time).bit_length() - 1))


def measure_link_peak(
    control: Control, device: torch.device, *, ranks: int, link_mbit_per_s: float | None
) -> LinkPeak:
    """Three all-reduces of the backend after one that warms it up, each after a barrier; collective.

    They go around the exchange, so that no traffic of the cell is counted. Two ranks or more.
    """
    payload_bytes = peak_payload_bytes(ranks, link_mbit_per_s)
    values = torch.zeros(payload_bytes // 4, device=device)
    durations_ns = [_all_reduce_ns(values, control) for _ in range(1 + TIMED)]
    return LinkPeak(payload_bytes=payload_bytes, duration_ns=durations_ns[1:])


def _all_reduce_ns(values: torch.Tensor, control: Control) -> int:
    control.synchronize()
    control.barrier()
    control.synchronize()
    start = time.perf_counter_ns()
    control.all_reduce(values)
    control.synchronize()
    return time.perf_counter_ns() - start
