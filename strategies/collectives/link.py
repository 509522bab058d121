"""The calls of our exchanges to a process group: the only module in which strategies call torch.distributed.

A blocking call (`all_reduce`, `all_gather`) returns when later code on this thread may use its result: on
CPU the result has arrived, on CUDA the current stream waits for it. `send`, `receive` and every `start_...`
return a work under way, whose `wait` does the same.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from results.errors import UsageError

_LINKS: WeakSet[Link] = WeakSet()


@atexit.register
def _release_groups() -> None:
    """Release the groups before the interpreter ends. `destroy_process_group` joins Gloo's threads only where
    nothing else holds the group, and a thread that then frees a tensor aborts the process."""
    for link in _LINKS:
        link._group = None


class Link:
    """This rank's connection to the others of a group; the `Wire` of the backend's own collectives."""

    rank: int
    size: int

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """`group` None is the default group. The group's own methods are called, not torch's functions over
        it, so that a group in Python, or one that torch has not registered, will do."""
        if group is None:
            if dist.group.WORLD is None:
                raise UsageError(
                    "no process group is open: start with torchrun, and call "
                    "torch.distributed.init_process_group first"
                )
            group = dist.group.WORLD
        # torch's stubs declare a dozen overloads of each method, with C++ structs as arguments.
        self._group: Any = group
        self.rank, self.size = group.rank(), group.size()
        _LINKS.add(self)

    @property
    def group(self) -> ProcessGroup:
        """The group of the link, for strategies that torch implements."""
        group: ProcessGroup = self._group
        return group

    def backend(self, device: str) -> str:
        """Return the backend that moves tensors of this kind of device: `nccl` or `gloo`."""
        # A group in Python names the group that it wraps; for others torch reports the default group.
        over = getattr(self._group, "backend", None)
        return "nccl" if device == "cuda" and "nccl" in dist.get_backend(over) else "gloo"

    def announce_bucket(self) -> None:
        """Announce the exchange of a bucket to a group that counts buckets."""
        announce: Callable[[], None] | None = getattr(self._group, "announce_bucket", None)
        if announce is not None:
            announce()

    def start_all_reduce(self, values: Tensor) -> Work:
        """Begin to sum `values` over the ranks, in place; the work's `wait` ends it."""
        work: Work = self._group.allreduce([values])
        return work

    def all_reduce(self, values: Tensor) -> None:
        """Sum over the ranks, in place."""
        self.start_all_reduce(values).wait()

    def largest(self, values: Tensor) -> None:
        """Take each element's maximum over the ranks, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX)
        self._group.allreduce([values], options).wait()

    def reduce(self, values: Tensor, root: int) -> None:
        """Sum over the ranks, in place on rank `root`; afterwards the values on other ranks are undefined."""
        options = dist.ReduceOptions()
        options.rootRank = root
        self._group.reduce([values], options).wait()

    def broadcast(self, values: Tensor, source: int) -> None:
        """Copy the values of rank `source` to all ranks, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([values], options).wait()

    def all_gather(self, values: Tensor) -> Tensor:
        """Gather the (n,) values of every rank into (size, n) values, one row per rank, in rank order."""
        gathered = values.new_empty(self.size * values.numel())
        self.start_all_gather(gathered, values).wait()
        return gathered.view(self.size, -1)

    def start_all_gather(self, gathered: Tensor, values: Tensor) -> Work:
        """Begin to fill `gathered`, (size * n,), with the (n,) of every rank in the order of ranks."""
        work: Work = self._group._allgather_base(_real(gathered), _real(values))
        return work

    def start_all_to_all(self, received: Tensor, values: Tensor) -> Work:
        """Begin to fill part r of `received`, (size * n,), with the part that rank r has for this rank."""
        work: Work = self._group.alltoall_base(_real(received), _real(values), [], [])
        return work

    def start_reduce_scatter(self, summed: Tensor, values: Tensor) -> Work:
        """Begin to fill `summed`, (n,), with the sum over the ranks of this rank's part of (size * n,)."""
        work: Work = self._group._reduce_scatter_base(_real(summed), _real(values))
        return work

    def all_to_all(self, values: Tensor) -> Tensor:
        """Send row r of (size, n) to rank r, and return (size, n), row r from rank r."""
        received = torch.empty_like(values)
        self._group.alltoall_base(received.view(-1), values.view(-1), [], []).wait()
        return received

    def all_to_all_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` of the rows (sum of sent, n) to rank r, in order; return (sum of received, n), of
        which `received[r]` are from rank r."""
        came = rows.new_empty(sum(received), *rows.shape[1:])
        self._group.alltoall_base(came, rows.contiguous(), received, sent).wait()
        return came

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Sum row r of (size, n) over the ranks for rank r; return the sum of this rank's row, (n,)."""
        summed = values.new_empty(values.shape[1])
        self._group._reduce_scatter_base(summed, values.view(-1)).wait()
        return summed

    def send(self, values: Tensor, to: int) -> Work:
        """Begin to send contiguous `values`, which must stay as they are until the work has ended."""
        work: Work = self._group.send([values], to, 0)
        return work

    def receive(self, values: Tensor, source: int) -> Work:
        """Begin to receive into contiguous `values`. Messages of one rank arrive in the order sent."""
        work: Work = self._group.recv([values], source, 0)
        return work

    def split(self, parts: Sequence[Sequence[int]], *, duplex: bool = False) -> Link:
        """Return the link to the part that this rank is in; `parts` are disjoint, and cover all ranks.

        With `duplex` a send to a lower rank never waits for a send to a higher one, as a pipeline needs.

        Collective over all ranks of the group, which must be all ranks of the default group.
        """
        split: Callable[..., ProcessGroup] | None = getattr(self._group, "split_into", None)
        if split is not None:
            return Link(split(parts, duplex=duplex))
        # torch makes one operation of sends and receives over a separate group, so that they are duplex.
        groups = [
            dist.new_group([dist.get_global_rank(self._group, rank) for rank in part]) for part in parts
        ]
        own: ProcessGroup = next(g for g, part in zip(groups, parts, strict=True) if self.rank in part)
        return Link(own)

    def beside(self) -> Link:
        """Return a separate link between the same ranks, through host memory, which another thread may use;
        collective."""
        if self.size == dist.get_world_size():
            everyone = dist.new_group(backend="gloo")
            assert isinstance(everyone, ProcessGroup)
            return Link(everyone)
        if self._group not in dist.distributed_c10d._world.pg_map:
            raise UsageError(
                f"a group of {self.size} of {dist.get_world_size()} ranks that torch has not registered "
                f"cannot save: give one that torch.distributed.new_group has made"
            )
        # The ranks of other groups need not take part; torch then names the group by its ranks.
        members = dist.get_process_group_ranks(self._group)
        group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        return Link(group)


def _real(values: Tensor) -> Tensor:
    """Return (n,) complex values as (2 * n,) real ones in the same memory, as no backend gathers or sums
    complex ones; others as they are."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values
