"""Measure the peak of the network when nothing else runs: plain all-reduces over all ranks of the launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.worker.rank.control import Control
from harness.worker.rank.failure import out_of_memory
from results.record import LinkPeak
from strategies.devices import device_of

LARGEST_BYTES = 16 * 2**20
DEVICE_LARGEST_BYTES = 2**30
"""The largest payload between GPUs, whose links reach their peak with hundreds of MiB (nccl-tests goes to 8
GiB)."""
DEVICE_SHARE = 0.25
"""The share of a device's free memory that a payload may take."""
GROWTH = 4
LONGEST_S = 1.0
TIMED = 3


def peak_payload_bytes(ranks: int, link_mbit_per_s: float | None) -> int:
    """Return 16 MiB, or the largest power of two that a shaped link carries in about a second.

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

    On CUDA several payloads are tried, and the one with the most bytes a second counts; an all-reduce takes
    the time of the rank on which it was shortest. The all-reduces bypass the exchange group, which would
    count them as traffic of the cell. Two ranks or more.
    """
    smallest = peak_payload_bytes(ranks, link_mbit_per_s)
    largest = max(smallest, _device_largest_bytes(control, device))
    found: LinkPeak | None = None
    reached = 0.0
    for values in _payloads(control, device, smallest, largest):
        durations_ns = [_all_reduce_ns(values, control) for _ in range(1 + TIMED)][1:]
        [negated] = control.largest([-float(max(1, min(durations_ns)))])
        if found is None or values.nbytes / -negated > reached:
            found = LinkPeak(payload_bytes=values.nbytes, duration_ns=durations_ns)
            reached = values.nbytes / -negated
        if GROWTH * -negated > LONGEST_S * 1e9:
            break
    assert found is not None
    return found


def _device_largest_bytes(control: Control, device: torch.device) -> int:
    """The largest payload that every rank has room for; 0 in memory of the host."""
    figures = device_of(device).memory()
    if figures is None:
        return 0
    [least] = control.largest([-DEVICE_SHARE * figures.free])
    return min(DEVICE_LARGEST_BYTES, int(-least))


def _payloads(control: Control, device: torch.device, smallest: int, largest: int) -> Iterator[torch.Tensor]:
    """Zeros of growing size, up to `largest` or to what one rank has no memory for; the first in any case."""
    payload_bytes = smallest
    yield torch.zeros(smallest // 4, device=device)
    while (payload_bytes := GROWTH * payload_bytes) <= largest:
        values, full = None, False
        try:
            values = torch.zeros(payload_bytes // 4, device=device)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            full = True
        if control.largest([float(full)])[0] or values is None:
            return
        yield values


def _all_reduce_ns(values: torch.Tensor, control: Control) -> int:
    control.synchronize()
    control.begin_together()
    device = device_of(values.device)
    begun = device.moment()
    control.all_reduce(values)
    ended = device.moment()
    control.synchronize()
    return device.elapsed_ns(begun, ended)
