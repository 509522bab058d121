"""Find what the steps of blocks send over process groups other than the exchange's.

torch numbers the operations of every group, whoever issues them: Python, the reducer of DDP, or a functional
collective in C++. The numbers are read before the first step of a block and after the last one, so that no
step takes longer. The bytes come from torch's flight recorder, which keeps the latest operations; it also has
the sends and receives, which NCCL does not number.

Groups whose backends give no numbers are unknown, and a group counts only if in every block it has an
operation for each period, or in the last block a message. An exchange comes in every period, but a rank may
open a group late, or agree with others rarely.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, get_args

import torch
import torch.distributed as dist

from harness.worker.exchange.group import ExchangeGroup
from harness.worker.exchange.recorder import group_text
from harness.worker.rank.network import flight_recording
from results.cell import Backend


class UncountedTraffic:
    """Counts what steps send over other groups, and the bytes of the exchange in each block."""

    def __init__(self, exchange: ExchangeGroup, period: int) -> None:
        """`period` is the number of steps from one exchange to the next."""
        self._exchange, self._period = exchange, period
        self.block_bytes: list[float] = []
        """Bytes of the exchange in a step of each block: the mean over its steps."""
        self._operations: Counter[str] = Counter()
        """Operations outside of the exchange in all blocks, by the name of their group. An operation of the
        exchange that is counted in one block and numbered in the next one is subtracted and added."""
        self._busy_blocks: Counter[str] = Counter()
        """Blocks that had an operation or more for each period, by the name of the group."""
        self._steps = 0
        self._latest = 0, 0, 1
        """When the latest block began and ended, in ns of Unix time, and its number of steps."""

    @contextmanager
    def counting(self, steps: int) -> Iterator[None]:
        """Count what the `steps` steps of this context send."""
        traffic, carriers = self._exchange.traffic, self._exchange.backends()
        before, sent, began = _numbers(), traffic.payload_bytes, time.time_ns()
        carried = -self._carried()
        yield
        self._latest = began, time.time_ns(), steps
        carried += self._carried()
        issued = {group: number - before.get(group, 0) for group, number in _numbers().items()}
        # What is sent directly over a group that carries the exchange is not counted by the exchange either.
        issued[carriers[0]] = sum(issued.pop(group, 0) for group in carriers) - carried
        for group, count in issued.items():
            self._operations[group.group_name] += count
            self._busy_blocks[group.group_name] += count * self._period >= steps
        self._steps += steps
        self.block_bytes.append((traffic.payload_bytes - sent) / steps)

    def _carried(self) -> int:
        """Return how many operations of the exchange its backends have numbered so far: Gloo numbers sends
        and receives as well, and NCCL only collectives."""
        traffic = self._exchange.traffic
        if dist.get_backend(self._exchange.backend) == dist.Backend.GLOO:
            return traffic.operations + traffic.received
        return traffic.operations - traffic.sends

    def found(self, strategy: str) -> str | None:
        """Return in a sentence what the steps sent over which other group, and the way out, or None."""
        recorded, steps, blocks = self._recorded(), self._latest[2], len(self.block_bytes)
        names = {name for name, busy in self._busy_blocks.items() if busy == blocks}
        messages = {name for name, entries in recorded.items() if any(each["is_p2p"] for each in entries)}
        name = min(names | messages, default=None)
        if name is None:
            return None
        sizes = [_bytes(entry) for entry in recorded.get(name, ())]
        operations = max(self._operations[name] / self._steps, len(sizes) / steps)
        payload = f" of {sum(sizes) / len(sizes):,.0f} bytes each" if sizes else ""
        return (
            f"the timed steps of {strategy} sent {operations:.3g} operations{payload} a step over "
            f"{_words(name)}, which bench can neither count nor switch off: a strategy sends over "
            f"`setting.exchange.group` or states an `own_transport`"
        )

    def _recorded(self) -> dict[str, list[dict[str, Any]]]:
        """Return the operations of the latest block, by the name of their group, as far as torch has recorded
        them. The groups that carry the exchange are left out, and groups that torch uses without a name."""
        others = {group.group_name for group in _groups()}
        others -= {group.group_name for group in self._exchange.backends()}
        began, ended, _ = self._latest
        found: dict[str, list[dict[str, Any]]] = {}
        for entry in _entries():
            name = entry["process_group"][0]
            if name in others and began <= entry["time_created_ns"] <= ended:
                found.setdefault(name, []).append(entry)
        return found


def _groups() -> list[dist.ProcessGroup]:
    """Return the groups of this process; an exchange is left out, as other groups carry it."""
    return [group for group in dist.distributed_c10d._world.pg_map if not isinstance(group, ExchangeGroup)]


def _numbers() -> dict[dist.ProcessGroup, int]:
    """Return how many operations each group of this process has issued so far, as far as its backends number
    them."""
    numbers: dict[dist.ProcessGroup, int] = {}
    for group in _groups():
        # torch raises the error where a backend numbers nothing, as MPI's does.
        with suppress(RuntimeError):
            # One backend may serve several kinds of devices. torch's stubs lack the method.
            backends: set[Any] = {group._get_backend(device) for device in group._device_types}
            numbers[group] = sum(each._get_sequence_number_for_group() for each in backends)
    return numbers


def _entries() -> Iterator[dict[str, Any]]:
    """Yield the latest operations that torch has recorded, of every backend."""
    for backend in get_args(Backend):
        yield from json.loads(flight_recording(backend) or "{}").get("entries", ())


def _bytes(entry: dict[str, Any]) -> int:
    """Return the bytes that a recorded operation was given."""
    total = 0
    for shape, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False):
        # Names such as Float and BFloat16; torch has no attributes for Byte and Char, which are of 1 byte.
        total += torch.Size(shape).numel() * getattr(getattr(torch, kind.lower(), None), "itemsize", 1)
    return total


def _words(name: str) -> str:
    """Name a group for its user, with its ranks."""
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_name == name:
            ranks = group_text(dist.get_process_group_ranks(group))
            which = "the default process group" if group is dist.group.WORLD else f"process group {name}"
            return f"{which} (ranks {ranks})"
    return f"process group {name}"
